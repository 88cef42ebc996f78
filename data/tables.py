"""Rows of the tables that people train from, streamed: which file, which sound, which references, which words.

Columns are known by the names that our own tables and those of other trainers use, so a table made for one of those is
accepted as it is:

    file        path, video, video_path, media_path, file, file_name, filename, file_path, media, url; where a row has
                none of these, its audio or image column, so that a set without pictures says so
    caption     caption, text, prompt           language, caption_language, lang        licence, license
    sound       sound, sound_path, audio, audio_path, input_audio
    references  reference, references, ref_image, reference_video, reference_video_2, reference_audio, ref_media_path,
                reference_path, in_context_videos, vace_reference_image…: one path or a list, in the order in which
                the columns stand, numbered ones by number

Source: the data sections of the LTX-2 trainer's, DiffSynth-Studio's and SimpleTuner's documentation. Their masks,
control videos and latents are not read here.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from data.files import ROW_GROUP

PATH_COLUMNS = (
    "path", "video", "video_path", "media_path", "file", "file_name", "filename", "file_path", "media", "url",
)  # fmt: skip
SOUND_COLUMNS = ("sound", "sound_path", "audio", "audio_path", "input_audio")
STILL_COLUMNS = ("image", "image_path")
CAPTION_COLUMNS = ("caption", "text", "prompt")
LANGUAGE_COLUMNS = ("caption_language", "language", "lang")
LICENCE_COLUMNS = ("licence", "license")
REFERENCE_COLUMN = re.compile(
    r"(in_context_videos?|vace_reference_images?|ref_media_path|ref(?:erence)?s?(?:_(?:path|image|video|audio|media)s?)?)"
    r"(?:_(\d+))?"
)
TABLES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
MAX_NAMED = 10
"""Most columns that a message names."""
MAX_LINE = 2**22
"""Longest line of a .jsonl table, characters: a thousand times an ordinary caption; more is not a table."""
END = "\0end of the table"
"""A line appended to a table: it comes back as a row of its own unless a quote is open."""
MAX_UNREAD = 100
"""Most names of unread columns that are remembered."""


class Words(NamedTuple):
    """What is said about a file."""

    caption: str | None = None
    caption_from: str | None = None
    language: str | None = None
    licence: str | None = None

    def or_else(self, others: Words) -> Words:
        """These words, with what they lack taken from others."""
        return Words(*(ours or theirs for ours, theirs in zip(self, others, strict=True)))


class Row(NamedTuple):
    """One row of a table; paths as they stand in it."""

    number: int
    path: str = ""
    sound: str | None = None
    references: tuple[str, ...] = ()
    words: Words = Words()
    error: str | None = None


class Roles(NamedTuple):
    """Which column says what."""

    paths: tuple[str, ...]
    sounds: tuple[str, ...]
    captions: tuple[str, ...]
    languages: tuple[str, ...]
    licences: tuple[str, ...]
    references: tuple[str, ...]
    unread: tuple[str, ...]


def rows_of(table: Path, name: str, columns: Mapping[str, str], unread: set[str]) -> Iterator[Row]:
    """Stream a table's rows; a row that is wrong comes with an error, a table that is wrong from its first row raises.

    Args:
        name: What the table is called in messages.
        columns: Own names of columns, to names that are known.
        unread: Receives the names of columns that nothing reads.

    Raises:
        ValueError: the table is not what its suffix says, or has no column of paths.
    """
    renames = tuple(sorted(columns.items()))
    for number, fields in enumerate(_entries(table, name), start=1):
        if isinstance(fields, str):
            if number == 1:
                raise ValueError(f"{name}, row 1: {fields}")
            yield Row(number, error=fields)
            continue
        roles = roles_of(tuple(fields), renames)
        if len(unread) < MAX_UNREAD:
            unread.update(roles.unread)
        if not roles.paths:
            has = ", ".join(map(repr, itertools.islice(fields, MAX_NAMED)))
            own = f"or say which it is: ingest.columns='{{{next(iter(fields), 'name')}: {PATH_COLUMNS[0]}}}'"
            message = f"no column of paths among {has}; name one {' or '.join(PATH_COLUMNS[:4])}, {own}"
            if number == 1:
                raise ValueError(f"{name}, row 1: {message}")
            yield Row(number, error=message)
            continue
        yield _row(number, fields, roles)


@functools.lru_cache(maxsize=64)
def roles_of(names: tuple[str, ...], renames: tuple[tuple[str, str], ...] = ()) -> Roles:
    """Which of the columns says what; names are compared without case."""
    own = dict(renames)
    known = {own.get(name, name).strip().lower(): name for name in reversed(names)}

    def those(wanted: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(known[name] for name in wanted if name in known)

    paths, sounds = those(PATH_COLUMNS), those(SOUND_COLUMNS)
    if not paths:
        paths, sounds = (*those(STILL_COLUMNS), *sounds), ()
    captions, languages, licences = those(CAPTION_COLUMNS), those(LANGUAGE_COLUMNS), those(LICENCE_COLUMNS)
    references = tuple(known[name] for name in _in_order(tuple(reversed(known))))
    read = {*paths, *sounds, *captions, *languages, *licences, *references, known.get("caption_from")}
    return Roles(paths, sounds, captions, languages, licences, references, tuple(n for n in names if n not in read))


def _in_order(names: tuple[str, ...]) -> list[str]:
    """Columns of references: by where the first of each kind stands, then by number."""
    found = {name: match for name in names if (match := REFERENCE_COLUMN.fullmatch(name))}
    kinds = [match[1] for match in found.values()]
    return sorted(found, key=lambda name: (kinds.index(found[name][1]), int(found[name][2] or -1)))


def _row(number: int, fields: Mapping[str, object], roles: Roles) -> Row:
    try:
        path = next((value for name in roles.paths if (value := text_in(fields.get(name)))), "")
        sound = next((value for name in roles.sounds if (value := text_in(fields.get(name)))), None)
        references = tuple(path for name in roles.references for path in paths_in(fields.get(name)))
        if not path:
            return Row(number, error="names no file")
        return Row(number, path, sound, references, words_in(fields, "table", roles))
    except ValueError as error:
        return Row(number, error=str(error))


def words_in(fields: Mapping[str, object], origin: str, roles: Roles | None = None) -> Words:
    """Caption, its language and the licence of a row or a JSON sidecar.

    Raises:
        ValueError: one of them is neither text nor a number.
    """
    roles = roles or roles_of(tuple(fields))

    def first(names: tuple[str, ...]) -> str | None:
        return next((line for name in names if (line := one_line(words_of(name, fields.get(name))))), None)

    caption = first(roles.captions)
    written_by = first(("caption_from",)) or origin
    return Words(caption, written_by if caption else None, first(roles.languages), first(roles.licences))


def one_line(text: str) -> str | None:
    """Text as valid Unicode on one line; None where there is none."""
    return valid(" ".join(text.split())) or None


def valid(text: str) -> str:
    """Text with what no UTF-8 file can hold replaced."""
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def words_of(name: str, value: object) -> str:
    """The text in a cell; a number is text that a table's writer did not quote.

    Raises:
        ValueError: it is something else: a list, an object.
    """
    if value is None or isinstance(value, bool | str | int | float):
        return "" if value is None or isinstance(value, bool) else str(value)
    raise ValueError(f"its {name} is text, not {type(value).__name__}")


def text_in(value: object) -> str:
    """A path in a cell.

    Raises:
        ValueError: it is something else than text.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"a path is text, not {type(value).__name__}")  # noqa: TRY004  # a wrong row, not a wrong call
    return value.strip()


def paths_in(value: object) -> list[str]:
    """The paths in a cell: one, a list, a list written as JSON, or objects that hold one each.

    Raises:
        ValueError: there is something else in it.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError, RecursionError):  # a name may begin with a bracket
            value = cast(object, json.loads(value))
    if isinstance(value, list):
        return [path for item in cast(list[object], value) for path in paths_in(item)]
    if isinstance(value, dict):
        fields = cast(dict[str, object], value)
        names = (*PATH_COLUMNS, *SOUND_COLUMNS, *STILL_COLUMNS)
        value = next((fields[name] for name in names if fields.get(name)), None)
    return [path] if (path := text_in(value)) else []


def _entries(table: Path, name: str) -> Iterator[Mapping[str, object] | str]:
    """Rows as mappings, or what is wrong with one."""
    suffix = table.suffix.lower()
    if suffix == ".parquet":
        yield from _parquet_rows(table, name)
        return
    with table.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        if suffix in (".csv", ".tsv"):
            yield from _csv_rows(stream, name, "\t" if suffix == ".tsv" else ",")
        elif suffix == ".jsonl":
            yield from _json_lines(stream, name)
        else:
            yield from _json_rows(stream.read(), name)


def _parquet_rows(table: Path, name: str) -> Iterator[Mapping[str, object]]:
    try:
        with cast(Any, pq.ParquetFile(table)) as file:
            for batch in file.iter_batches(ROW_GROUP):
                yield from cast(list[dict[str, object]], batch.to_pylist())
    except (cast(type[Exception], pa.ArrowException), OSError, ValueError) as error:
        raise ValueError(f"{name} is not Parquet that can be read: {str(error).splitlines()[0]}") from error


def _csv_rows(stream: TextIO, name: str, delimiter: str) -> Iterator[Mapping[str, object] | str]:
    reader = csv.reader(itertools.chain(stream, [END]), delimiter=delimiter)
    try:
        header = next(reader)
        _see_closed(header, name, 1)
        begin = reader.line_num + 1
        if not _is_utf8("".join(header)):
            raise ValueError(f"{name} is not UTF-8; save it as UTF-8")
        if len(set(header)) < len(header):
            twice = sorted({column for column in header if header.count(column) > 1})
            raise ValueError(f"{name} has more than one column called {', '.join(map(repr, twice))}")
        for cells in reader:
            if cells == [END]:
                return
            _see_closed(cells, name, begin)
            begin = reader.line_num + 1
            if len(cells) > len(header):
                yield f"has {len(cells)} cells under {len(header)} columns; quote text that holds the separator"
            elif not _is_utf8("".join(cells)):
                yield "is not UTF-8; save the table as UTF-8"
            elif cells:
                yield dict(zip(header, cells, strict=False))
    except csv.Error as error:
        raise ValueError(f"{name}, line {reader.line_num}: {error}; is a quote left open?") from error


def _see_closed(cells: list[str], name: str, line: int) -> None:
    """Refuse a row that has swallowed all that followed."""
    if cells and cells != [END] and cells[-1].endswith(END):
        raise ValueError(f"{name}, line {line}: a quote is opened and never closed")


def _json_lines(stream: TextIO, name: str) -> Iterator[Mapping[str, object] | str]:
    number = 0
    while line := stream.readline(MAX_LINE):
        number += 1
        if len(line) == MAX_LINE:
            raise ValueError(f"{name}, line {number} is longer than {MAX_LINE} characters")
        if line.strip():
            yield from _parsed(line, f"line {number}")


def _json_rows(text: str, name: str) -> Iterator[Mapping[str, object] | str]:
    try:
        rows = cast(object, json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON at line {error.lineno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON that can be read: {error}") from error
    if not isinstance(rows, list):
        raise ValueError(f"{name} must be a list of objects, each with a path and a caption")  # noqa: TRY004
    yield from (_object(row) for row in cast(list[object], rows))


def _parsed(line: str, place: str) -> Iterator[Mapping[str, object] | str]:
    if not _is_utf8(line):
        yield f"{place} is not UTF-8; save the table as UTF-8"
        return
    try:
        yield _object(cast(object, json.loads(line)))
    except json.JSONDecodeError as error:
        yield f"{place} is not JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets in brackets
        yield f"{place} is not JSON that can be read: {error}"


def _object(row: object) -> Mapping[str, object] | str:
    if isinstance(row, dict):
        return cast(dict[str, object], row)
    return "is no object; a table is a list of objects, each with a path and a caption"


def _is_utf8(text: str) -> bool:
    """Whether text read with `surrogateescape` held nothing but UTF-8."""
    return text.isascii() or not any("\udc80" <= letter <= "\udcff" for letter in text)
