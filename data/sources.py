"""What a user gave: the files of a folder or the rows of a table, here or in a remote store. Opens no media.

What a folder means:

    cat.mp4                      a clip
    cat.txt, cat.mp4.txt         its caption; or cat.json with caption, language, licence
    cat.ref1.png, cat.ref2.wav   its references, by number
    cat.sound.wav                its sound, instead of its own

Left out without a word: names that begin with a dot (among them `._cat.mp4`), text files that are no captions, and what
operating systems strew (`LITTER`). Captions without a video are counted (`Reading.alone`). Unfinished downloads (`UNFINISHED`), linked folders and links out of the folder get a row that
says so. A `.gitignore` is not consulted: a folder of videos is no repository.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple, cast

from data import remote
from data.media_open import Unreadable
from data.paths import as_text, beside, group_of, inside, is_name, refusal, shown, without_secrets
from data.sidecars import SIDECARS, Alone, words_beside
from data.tables import TABLES, Row, Words, rows_of

UNFINISHED = (".part", ".crdownload", ".download", ".partial", ".filepart", ".opdownload", ".!qb", ".aria2", ".ytdl")
"""What browsers and downloaders call a file before it is whole."""
LITTER = ("thumbs.db", "ehthumbs.db", "desktop.ini", "__macosx", "@eadir", "lost+found", "$recycle.bin")
COMPANION = re.compile(r"(.+)\.(?:ref(\d{1,4})|sound)\.[^.]+", re.DOTALL)


NOTHING = Words()
Use = Literal["clip", "reference"]


@dataclass(frozen=True)
class Given:
    """One file as the user named it."""

    file: str
    """Where it can be opened: a local path or a remote one."""
    path: str
    """As `records.Source.path` says."""
    group: str
    words: Words = NOTHING
    use: Use = "clip"
    """`clip`, or `reference`: of another file, whose row names it."""
    sound: Given | None = None
    references: tuple[Given, ...] = ()
    error: str | None = None
    """Why it must not or cannot be opened."""

    @property
    def caption(self) -> str | None:
        """What is said to be seen and heard."""
        return self.words.caption


@dataclass(frozen=True)
class Reading:
    """How the source is read."""

    root: str | None = None
    """Folder that a table's paths are relative to and may not leave; None: the table's own."""
    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    protocols: tuple[str, ...] = ("s3", "oss")
    unread: set[str] = field(default_factory=set[str])
    """Receives the names of the table's columns that nothing reads."""
    alone: Alone = field(default_factory=Alone)
    """Receives a folder's captions that no file has the name of."""


class Item(NamedTuple):
    """One name in a folder."""

    name: str
    is_folder: bool
    is_link: bool = False


def given_by(source: str | Path, reading: Reading | None = None) -> Iterator[Given]:
    """Stream every file of a folder in the order of their paths, or every row of a table in its order.

    Holds the names of one folder at a time, or one row; a .json table as a whole.

    Raises:
        ValueError: the source does not exist, is no folder or table, or the table is not readable as one.
        RuntimeError: a remote source cannot be reached.
    """
    place, reading = remote.plain(str(source)), reading or Reading()
    if remote.is_remote(place):
        if (reason := refusal(place, reading.protocols)) is not None:
            raise ValueError(f"ingest.source {reason}")
        try:
            is_folder = remote.is_folder(place)
            table = None if is_folder else remote.local(place)
        except Unreadable as error:
            raise ValueError(f"ingest.source = {place}: {error}") from error
    else:
        if not os.path.exists(place):  # noqa: PTH110
            raise ValueError(
                f"ingest.source = {place} does not exist; put a folder of videos there (captions in same-name .txt"
                " files), set ingest.source to one, or make the sample with `soundstage sample`"
            )
        is_folder, table = os.path.isdir(place), Path(place)  # noqa: PTH112
    if is_folder:
        for name, value in (("root", reading.root), ("columns", reading.columns)):
            if value:
                raise ValueError(
                    f"ingest.{name} = {value} is about tables, and ingest.source = {place} is a folder;"
                    " leave it out or name a table"
                )
        yield from _in_folder(place.rstrip("/") or "/", reading.alone)
    elif Path(place).suffix.lower() in TABLES and table is not None and table.is_file():
        yield from _in_table(table, place, reading)
    else:
        raise ValueError(f"ingest.source = {place} is neither a folder nor a table ({', '.join(TABLES)})")


def given_file(file: str) -> Given:
    """One file with the words, references and sound beside it; uses and errors as in a folder.

    A remote one is taken for a clip: what lies beside it is not asked.
    """
    if remote.is_remote(file):
        return _named(file, file.rpartition("/")[0], Reading())
    place = os.path.abspath(remote.plain(file))  # noqa: PTH100  # resolve() would follow links
    root, _, name = place.rpartition("/")
    names = {item.name for item in _scan(root or "/")} if os.path.isdir(root or "/") else {name}  # noqa: PTH112
    if (reason := _unfinished(name)) is not None:
        return _below(root or "/", place, error=reason)
    companions = _companions(names)
    if any(name in owned for owned in companions.values()):
        return _checked(root or "/", place, "reference")
    if name in names and (orphan := _orphaned(name)) is not None:
        return _below(root or "/", place, "reference", orphan)
    return _in_company(root or "/", place, names, companions.get(PurePosixPath(name).stem, []))


def _in_folder(root: str, alone: Alone) -> Iterator[Given]:
    """Files below `root`; a stack of folders instead of recursion, since a path may be 2,000 folders deep."""
    stack = [_contents(root, root, alone)]
    while stack:
        found = next(stack[-1], None)
        if found is None:
            stack.pop()
        elif isinstance(found, str):
            stack.append(_contents(root, found, alone))
        else:
            yield found


def _contents(root: str, folder: str, alone: Alone) -> Iterator[Given | str]:
    """Files of a folder and, as text, the folders in it, so that all paths below come sorted."""
    try:
        items = _scan(folder)
    except (OSError, Unreadable) as error:
        reason = getattr(error, "strerror", None) or error
        if folder == root:
            raise ValueError(f"ingest.source = {root}: {reason}") from error
        yield _below(root, folder, error=f"is a folder that cannot be read: {reason}")
        return
    items = [item for item in items if not item.name.startswith(".") and item.name.lower() not in LITTER]
    names = {item.name for item in items if not item.is_folder}
    alone.add(folder, names)
    companions = _companions(names)
    owned = {name for found in companions.values() for name in found}
    for item in sorted(items, key=lambda item: item.name + "/" * item.is_folder):
        file = f"{folder.rstrip('/')}/{item.name}"
        if item.is_folder and item.is_link:
            yield _below(root, file, error="is a linked folder; links to folders are not followed")
        elif item.is_folder:
            yield file
        elif (reason := _unfinished(item.name)) is not None:
            yield _below(root, file, error=reason)
        elif not item.name.lower().endswith(SIDECARS) and item.name not in owned:
            orphan = _orphaned(item.name)
            if orphan is None:
                yield _in_company(root, file, names, companions.get(PurePosixPath(item.name).stem, []))
            else:
                yield _below(root, file, "reference", orphan)


def _orphaned(name: str) -> str | None:
    """Why a file that belongs to none of those beside it is no clip, if its name says so."""
    match = None if name.lower().endswith(SIDECARS) else COMPANION.fullmatch(name)
    return match and f"is named as the reference of a clip that is not beside it ({match[1]}.*)"


def _unfinished(name: str) -> str | None:
    """Why a file with this name is not looked at, if it is a download under way."""
    suffix = PurePosixPath(name).suffix.lower()
    return f"is an unfinished download ({suffix}); finish it or delete it" if suffix in UNFINISHED else None


def _scan(folder: str) -> list[Item]:
    if remote.is_remote(folder):
        return [Item(entry.name, entry.is_folder) for entry in remote.entries(folder)]
    with os.scandir(folder) as found:
        return [Item(entry.name, _is_folder(entry), entry.is_symlink()) for entry in found]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a loop of links
        return False


def _companions(names: set[str]) -> dict[str, list[str]]:
    """References, by number, and then the sound, of each stem that has a file of its own."""
    matches = {name: match for name in names if (match := COMPANION.fullmatch(name))}
    stems = {PurePosixPath(name).stem for name in names - set(matches) if not name.lower().endswith(SIDECARS)}
    result: dict[str, list[str]] = {}
    for name in sorted(matches, key=lambda name: (int(matches[name][2] or 10_000), name)):
        if not name.lower().endswith((*SIDECARS, *UNFINISHED)) and matches[name][1] in stems:
            result.setdefault(matches[name][1], []).append(name)
    return result


def _in_company(root: str, file: str, names: set[str], companions: list[str]) -> Given:
    """A file with its caption, references and sound."""
    given = _checked(root, file)
    if given.error is not None:
        return given
    others = {name: _checked(root, beside(file, name), "reference") for name in companions}
    numbered = [name for name in companions if cast(re.Match[str], COMPANION.fullmatch(name))[2] is not None]
    sound = next((others[name] for name in companions if name not in numbered), None)
    company = replace(given, references=tuple(others[name] for name in numbered), sound=sound)
    try:
        return replace(company, words=words_beside(file, root, names))
    except (ValueError, OSError, Unreadable) as error:
        return replace(company, error=str(error))


def _in_table(table: Path, name: str, reading: Reading) -> Iterator[Given]:
    """Rows of a table, with the files they name."""
    root = remote.plain(reading.root or name.rpartition("/")[0] or ("/" if name.startswith("/") else "."))
    root = root.rstrip("/") if remote.is_remote(root) else os.path.normpath(root)
    for row in rows_of(table, PurePosixPath(name).name, reading.columns, reading.unread):
        if row.error is not None:
            shown_name = name if remote.is_remote(name) else shown(name)
            yield Given(name, f"{as_text(shown_name)}#{row.number}", "", error=f"row {row.number} {row.error}")
        else:
            yield _of_row(row, root, reading)


def _of_row(row: Row, root: str, reading: Reading) -> Given:
    given = _named(row.path, root, reading)
    references = tuple(_named(path, root, reading, "reference") for path in row.references)
    sound = None if row.sound is None else _named(row.sound, root, reading, "reference")
    if sound is not None and sound.path == given.path:  # a trainer that takes both from one file
        sound = None
    given = replace(given, words=row.words, references=references, sound=sound)
    if row.words.caption is not None or given.error is not None or remote.is_remote(given.file):
        return given
    try:
        return replace(given, words=row.words.or_else(words_beside(given.file, root)))
    except (ValueError, OSError) as error:
        return replace(given, error=str(error))


def _named(name: str, root: str, reading: Reading, use: Use = "clip") -> Given:
    """The file that a cell names; with an error where it lies outside the root or is not to be opened."""
    name = remote.plain(name)
    if remote.is_remote(name):
        reason = refusal(name, reading.protocols)
        path = name if reason is None else without_secrets(name)
        return Given(name, as_text(path), group_of(name, root), use=use, error=reason)
    if remote.is_remote(root):
        if name.startswith("/") or ".." in name.split("/"):
            return Given(name, as_text(name), "", use=use, error="lies outside the folder of its table")
        return _below(root, f"{root}/{PurePosixPath(name)}", use)
    if not is_name(name):
        return Given(root, as_text(name), "", use=use, error="is a name that no file can have")
    file = os.path.normpath(os.path.join(root, name))  # noqa: PTH118
    if not inside(file, root):
        reason = "lies outside the folder of its table; ingest.root widens it"
        return Given(file, as_text(name), "", use=use, error=reason)
    return _below(root, file, use)


def _checked(root: str, file: str, use: Use = "clip") -> Given:
    """A file that was found below `root`, unless it is a link that leads out of it."""
    if not remote.is_remote(file) and not inside(file, root):
        return _below(root, file, use, "is a link that leads out of the source folder or in a circle")
    return _below(root, file, use)


def _below(root: str, file: str, use: Use = "clip", error: str | None = None) -> Given:
    """A file below `root`, under the name that it is shown by."""
    path = file if remote.is_remote(file) else shown(file)
    text = as_text(path)
    if text != path:
        error = "has a name that is not UTF-8; rename it"
    return Given(file, text, as_text(group_of(file, root)), use=use, error=error)
