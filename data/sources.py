"""What a user gave: the files of a folder or the rows of a table, with their captions. Opens no media."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

PATH_COLUMNS = ("path", "file", "video", "media_path")
CAPTION_COLUMNS = ("caption", "text", "prompt")
TABLES = (".csv", ".json", ".jsonl")
SIDECARS = (".txt", ".json", ".jsonl", ".csv", ".md", ".srt", ".vtt", ".yaml", ".yml")
"""Files beside media that say something about them; no rows of their own."""


@dataclass(frozen=True)
class Given:
    """One file as the user named it."""

    file: str
    """Where it can be opened."""
    path: str
    """As `records.Source.path` says."""
    group: str
    caption: str | None = None
    error: str | None = None
    """Why it must not or cannot be opened."""


def given_by(source: Path) -> list[Given]:
    """Every file of a folder, or every row of a table, sorted by path.

    Raises:
        ValueError: the source does not exist, is no folder or table, or the table has no column of paths.
    """
    if not source.exists():
        raise ValueError(
            f"ingest.source = {source} does not exist; put a folder of videos there (captions in same-name .txt files),"
            " set ingest.source to one, or make the sample with `soundstage sample`"
        )
    if source.is_dir():
        return sorted(_in_folder(source), key=lambda item: item.path)
    if source.suffix.lower() in TABLES:
        return sorted(_in_table(source), key=lambda item: item.path)
    raise ValueError(f"ingest.source = {source} is neither a folder nor a table ({', '.join(TABLES)})")


def _in_folder(root: Path) -> Iterator[Given]:
    """Files below `root` that are not hidden and not sidecars; links that lead out of it come with an error."""
    for place, folders, names in os.walk(root):
        here = Path(place)
        for name in sorted(folders):
            if not name.startswith(".") and (here / name).is_symlink():
                yield _given(root, here / name, None, "is a linked folder; links to folders are not followed")
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = here / name
            if name.startswith(".") or file.suffix.lower() in SIDECARS:
                continue
            if not _inside(file, root):
                yield _given(root, file, None, "is a link that leads out of the source folder or in a circle")
                continue
            try:
                yield _given(root, file, caption_beside(file, root), None)
            except ValueError as error:
                yield _given(root, file, None, str(error))


def _in_table(table: Path) -> Iterator[Given]:
    """Rows of a table; paths are relative to its folder and may not leave it."""
    root = table.parent
    for number, row in enumerate(_rows(table), start=1):
        column = next((name for name in PATH_COLUMNS if name in row), None)
        if column is None:
            raise ValueError(f"{table.name}, row {number}: no column of paths; name one {' or '.join(PATH_COLUMNS)}")
        name = str(row[column]).strip()
        file = root / name
        if not name:
            yield Given(str(table), f"{shown(table)}#{number}", "", None, f"row {number} names no file")
        elif not _inside(file, root):
            yield Given(str(file), PurePosixPath(name).as_posix(), "", None, "lies outside the folder of its table")
        else:
            yield _given(root, Path(os.path.normpath(file)), _caption_in(row), None)


def _rows(table: Path) -> Iterator[Mapping[str, Any]]:
    """Rows as mappings.

    Raises:
        ValueError: the content is not what the suffix says; the message names the line.
    """
    try:
        text = table.read_text(encoding="utf-8-sig")
        if table.suffix.lower() == ".csv":
            yield from csv.DictReader(io.StringIO(text, newline=""))
            return
        # JSON lines become one document with the same line numbers, so that an error names the right one
        lines = [line for line in text.split("\n") if line.strip()]
        entries: Any = json.loads("[" + ",\n".join(lines) + "]" if table.suffix.lower() == ".jsonl" else text)
    except UnicodeDecodeError as error:
        raise ValueError(f"{table.name} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{table.name} is not JSON at line {error.lineno}: {error.msg}") from error
    if not isinstance(entries, list) or not all(isinstance(row, dict) for row in cast(list[Any], entries)):
        raise ValueError(f"{table.name} must be a list of objects, each with a path and a caption")
    yield from cast(list[dict[str, Any]], entries)


def caption_beside(file: Path, root: Path) -> str | None:
    """The caption in `name.txt`, `name.mp4.txt` or `name.json` beside a file, on one line.

    Raises:
        ValueError: the sidecar is not UTF-8, not JSON, or a link that leads out of `root`.
    """
    for sidecar in (file.with_suffix(".txt"), file.with_name(file.name + ".txt"), file.with_suffix(".json")):
        if not sidecar.is_file():
            continue
        if not _inside(sidecar, root):
            raise ValueError(f"its caption {sidecar.name} is a link that leads out of the source folder")
        try:
            text = sidecar.read_text(encoding="utf-8-sig")
            found = _caption_in(json.loads(text)) if sidecar.suffix == ".json" else _one_line(text)
        except UnicodeDecodeError as error:
            raise ValueError(f"its caption {sidecar.name} is not UTF-8; save it as UTF-8") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"its caption {sidecar.name} is not JSON at line {error.lineno}") from error
        if found is not None:
            return found
    return None


def _caption_in(row: object) -> str | None:
    """The caption of a table's row or a JSON sidecar."""
    if not isinstance(row, dict):
        return None
    fields = cast(dict[str, object], row)
    return next((_one_line(str(fields[name])) for name in CAPTION_COLUMNS if fields.get(name)), None)


def _one_line(text: str) -> str | None:
    return " ".join(text.split()) or None


def _inside(file: Path, root: Path) -> bool:
    """Whether a path, its links followed, lies below `root`."""
    try:
        return file.resolve().is_relative_to(root.resolve())
    except (OSError, ValueError, RuntimeError):  # a loop of links, a name that no file system takes
        return False


def _given(root: Path, file: Path, caption: str | None, error: str | None) -> Given:
    place = file.relative_to(root).parts
    path, group = (_text(name) for name in (shown(file), place[0] if len(place) > 1 else ""))
    if path != shown(file):
        error = "has a name that is not UTF-8; rename it"
    return Given(str(file), path, group, caption, error)


def _text(name: str) -> str:
    """A file name as valid Unicode."""
    return os.fsencode(name).decode("utf-8", "replace")


def shown(file: Path) -> str:
    """A path relative to the working directory where it lies below it, else as it is; POSIX."""
    absolute, here = Path(os.path.abspath(file)), Path.cwd()  # noqa: PTH100  # resolve() would follow links
    return (absolute.relative_to(here) if absolute.is_relative_to(here) else file).as_posix()
