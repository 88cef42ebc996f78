"""Every file that was given, on disk: in order, each path once, references after what they belong to."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

from data.sources import Given
from data.tables import Words


class Listed(NamedTuple):
    """One row of the manifest to come."""

    file: str
    path: str
    group: str
    use: str
    words: Words
    sound: str | None
    """Where the sound file can be opened."""
    sound_path: str | None
    """The same as `records.Source.sound_path` says."""
    references: tuple[str, ...]
    error: str | None
    again: int = 0
    """How many rows named the same path before."""


class Listing:
    """A list in a temporary database, which SQLite removes however the process ends.

    A million rows take some 300 MB of the disk that TMPDIR names and no memory to speak of.
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -16000; PRAGMA temp_store = FILE;"
            "CREATE TABLE listed (position INTEGER PRIMARY KEY, row TEXT);"
            "CREATE TABLE clips (path TEXT PRIMARY KEY, times INTEGER) WITHOUT ROWID;"
            "CREATE TABLE others (position INTEGER PRIMARY KEY, path TEXT UNIQUE, row TEXT);"
            "CREATE TABLE contents (sha256 TEXT PRIMARY KEY, path TEXT) WITHOUT ROWID;"
        )

    def add(self, given: Iterable[Given]) -> None:
        """Append what a source gives.

        Raises:
            RuntimeError: the disk is full.
        """
        try:
            self._database.execute("BEGIN")
            for item in given:
                self._append(item)
            self._database.execute("COMMIT")
        except sqlite3.OperationalError as error:
            remedy = "make room in the folder that TMPDIR names (/var/tmp by default), or name another"
            raise RuntimeError(f"the list of files cannot be written: {error}; {remedy}") from error

    def _append(self, item: Given) -> None:
        clip = listed(item)
        times = self._times(clip.path)
        if times:
            clip = clip._replace(error="is listed more than once; its first row counts", again=times)
        self._database.execute("INSERT INTO listed (row) VALUES (?)", (_text(clip),))
        for other in (*item.references, *(() if item.sound is None else (item.sound,))):
            row = (other.path, _text(listed(other)))
            self._database.execute("INSERT OR IGNORE INTO others (path, row) VALUES (?, ?)", row)

    def _times(self, path: str) -> int:
        """How often a path was listed before."""
        query = "INSERT INTO clips VALUES (?, 1) ON CONFLICT (path) DO UPDATE SET times = times + 1 RETURNING times"
        return cast(int, self._database.execute(query, (path,)).fetchone()[0]) - 1

    def __len__(self) -> int:
        query = f"SELECT (SELECT count(*) FROM listed) + (SELECT count(*) {OTHERS})"  # noqa: S608  # our own words
        return cast(int, self._database.execute(query).fetchone()[0])

    def __iter__(self) -> Iterator[Listed]:
        """The files in their order, then the references and sounds that are no clips themselves."""
        for query in ("SELECT row FROM listed ORDER BY position", f"SELECT row {OTHERS} ORDER BY position"):
            for (text,) in self._database.execute(query):
                fields = cast(dict[str, Any], json.loads(text))
                fields |= {"words": Words(*fields["words"]), "references": tuple(fields["references"])}
                yield Listed(**fields)

    def first_with(self, sha256: str, path: str) -> str:
        """Path of the first file that was asked about with this content: `path` itself where it is new."""
        self._database.execute("INSERT OR IGNORE INTO contents VALUES (?, ?)", (sha256, path))
        found = self._database.execute("SELECT path FROM contents WHERE sha256 = ?", (sha256,))
        return cast(str, found.fetchone()[0])


OTHERS = "FROM others WHERE path NOT IN (SELECT path FROM clips)"


def listed(given: Given) -> Listed:
    """A given file without the files that belong to it, which are listed themselves."""
    return Listed(
        given.file,
        given.path,
        given.group,
        given.use,
        given.words,
        None if given.sound is None else given.sound.file,
        None if given.sound is None else given.sound.path,
        tuple(reference.path for reference in given.references),
        given.error or (given.sound and given.sound.error and f"its sound {given.sound.path} {given.sound.error}"),
    )


def _text(row: Listed) -> str:
    return json.dumps(row._asdict())
