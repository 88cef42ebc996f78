"""The panel's log: invitations, what raters met and did, and their votes. Rows are added, never changed."""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

BUSY_S = 60.0
"""How long a writer waits for the others, s."""
MAX_EVENTS = 20_000
"""Events kept of one rater: a page gone wild must not fill the disk."""
TABLES = ("panel", "rater", "event", "rating")
SCHEMA = """
CREATE TABLE IF NOT EXISTS panel (sha256 TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS rater (
    rater INTEGER PRIMARY KEY, token_sha256 TEXT NOT NULL UNIQUE, invited_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS event (
    id INTEGER PRIMARY KEY, rater INTEGER NOT NULL REFERENCES rater, at_s REAL NOT NULL,
    kind TEXT NOT NULL, position INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS event_of ON event (rater, position, kind);
CREATE TABLE IF NOT EXISTS rating (
    rater INTEGER NOT NULL REFERENCES rater, position INTEGER NOT NULL, item TEXT NOT NULL, item_sha256 TEXT NOT NULL,
    seed INTEGER NOT NULL, is_training INTEGER NOT NULL, is_repeat INTEGER NOT NULL,
    picture INTEGER NOT NULL, sound INTEGER NOT NULL, sync INTEGER NOT NULL, overall INTEGER NOT NULL,
    played_s REAL NOT NULL, num_plays INTEGER NOT NULL, latency_s REAL NOT NULL, at_s REAL NOT NULL,
    PRIMARY KEY (rater, position));
"""


class Rating(NamedTuple):
    """One vote on four scales, as it is kept; times are seconds since 1970."""

    rater: int
    position: int
    """Place in the rater's order, from 0."""
    item: str
    item_sha256: str
    seed: int
    is_training: bool
    is_repeat: bool
    picture: int
    sound: int
    sync: int
    overall: int
    played_s: float
    """How much of the film was played, by the page."""
    num_plays: int
    latency_s: float
    """From showing the item last to its vote."""
    at_s: float

    @property
    def votes(self) -> tuple[int, ...]:
        """On the scales, in their order."""
        return self.picture, self.sound, self.sync, self.overall


class Progress(NamedTuple):
    """How far a rater is."""

    rater: int
    num_rated: int
    num_hidden: int
    """Times the page was left or put behind another."""
    last_s: float | None
    """When something was last heard of the rater, s since 1970."""


class Log:
    """The log in one SQLite file; any thread or process may use it."""

    def __init__(self, path: Path, panel_sha256: str) -> None:
        """Open or begin the log of a panel.

        Raises:
            RuntimeError: the log belongs to another panel.
        """
        self._path = path
        with self._open() as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(SCHEMA + "".join(map(kept, TABLES)))
            connection.execute("BEGIN IMMEDIATE")
            found = connection.execute("SELECT sha256 FROM panel").fetchone()
            if found is None:
                connection.execute("INSERT INTO panel VALUES (?)", (panel_sha256,))
            connection.execute("COMMIT")
        if found is not None and found[0] != panel_sha256:
            raise RuntimeError(f"{path} holds ratings of another panel; name another folder, or make the panel again")

    @contextmanager
    def _open(self) -> Generator[sqlite3.Connection]:
        connection = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
        try:
            connection.execute("PRAGMA synchronous = FULL")  # a vote that was acknowledged survives a power cut
            yield connection
        finally:
            connection.close()

    def invite(self, count: int, at_s: float) -> list[str]:
        """Tokens of new raters; only their hashes are kept, so they are shown here or never."""
        tokens = [secrets.token_urlsafe(24) for _ in range(count)]
        with self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")
            for token in tokens:
                connection.execute("INSERT INTO rater (token_sha256, invited_s) VALUES (?, ?)", (hashed(token), at_s))
            connection.execute("COMMIT")
        return tokens

    def rater_of(self, token: str) -> int | None:
        """Whose token it is."""
        with self._open() as connection:
            found = connection.execute("SELECT rater FROM rater WHERE token_sha256 = ?", (hashed(token),)).fetchone()
        return None if found is None else int(found[0])

    def note(self, rater: int, kind: str, position: int, at_s: float) -> None:
        """Keep that something happened."""
        with self._open() as connection:
            connection.execute(
                "INSERT INTO event (rater, at_s, kind, position) SELECT ?, ?, ?, ?"
                " WHERE (SELECT COUNT(*) FROM event WHERE rater = ?) < ?",
                (rater, at_s, kind, position, rater, MAX_EVENTS),
            )

    def num_rated(self, rater: int) -> int:
        """Votes of a rater, which is also the position of the next."""
        with self._open() as connection:
            return int(connection.execute("SELECT COUNT(*) FROM rating WHERE rater = ?", (rater,)).fetchone()[0])

    def shown_s(self, rater: int, position: int) -> tuple[float, float] | None:
        """When an item was first and last shown to a rater, s since 1970."""
        with self._open() as connection:
            first, last = connection.execute(
                "SELECT MIN(at_s), MAX(at_s) FROM event WHERE rater = ? AND position = ? AND kind = 'shown'",
                (rater, position),
            ).fetchone()
        return None if first is None else (float(first), float(last))

    def rate(self, rating: Rating) -> Literal["kept", "same", "other", "not yet"]:
        """Keep a vote: once, and in order. A second time it is the `same`, or an`other` vote, and the first one stands."""
        with self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")
            place = (rating.rater, rating.position)
            found = connection.execute(
                "SELECT picture, sound, sync, overall FROM rating WHERE rater = ? AND position = ?", place
            ).fetchone()
            (count,) = connection.execute("SELECT COUNT(*) FROM rating WHERE rater = ?", place[:1]).fetchone()
            if found is None and count == rating.position:
                marks = ", ".join("?" * len(rating))
                connection.execute(f"INSERT INTO rating VALUES ({marks})", rating)  # noqa: S608 # only question marks
            connection.execute("COMMIT")
        if found is not None:
            return "same" if tuple(found) == rating.votes else "other"
        return "kept" if count == rating.position else "not yet"

    def ratings(self) -> list[Rating]:
        """All votes, by rater and position."""
        with self._open() as connection:
            rows = connection.execute("SELECT * FROM rating ORDER BY rater, position").fetchall()
        return [Rating(*row) for row in rows]

    def progress(self) -> list[Progress]:
        """How far every invited rater is."""
        with self._open() as connection:
            rows = connection.execute(
                "SELECT rater, (SELECT COUNT(*) FROM rating WHERE rating.rater = rater.rater),"
                " (SELECT COUNT(*) FROM event WHERE event.rater = rater.rater AND kind IN ('hidden', 'left')),"
                " (SELECT MAX(at_s) FROM event WHERE event.rater = rater.rater) FROM rater ORDER BY rater"
            ).fetchall()
        return [Progress(*row) for row in rows]


def kept(table: str) -> str:
    """What makes a table one that only grows."""
    return "".join(
        f"CREATE TRIGGER IF NOT EXISTS {table}_{verb} BEFORE {verb} ON {table}"
        f" BEGIN SELECT RAISE(ABORT, 'the log of a panel only grows'); END;\n"
        for verb in ("UPDATE", "DELETE")
    )


def hashed(token: str) -> str:
    """What is kept of a token."""
    return hashlib.sha256(token.encode()).hexdigest()
