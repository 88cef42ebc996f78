"""Verdicts on any number of sources in flat memory: what must be known about all of them lies in a file beside.

Two passes over the manifest: the first learns what others are needed to judge one (references, the forms of captions),
the second gives every row its fate.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import BaseModel

from data import captions, rules
from data.captions import CaptionFault
from data.limits import Limits
from data.records import Reject, Source, Treatment

CACHE_KB = 20_000
"""Memory that the file beside may keep, KiB: rows come in the manifest's order, so few pages are touched at once."""
TABLES = """
CREATE TABLE reference (path TEXT PRIMARY KEY, error TEXT) WITHOUT ROWID;
CREATE TABLE form (skeleton TEXT PRIMARY KEY, num INTEGER) WITHOUT ROWID;
CREATE TABLE content (source_id TEXT PRIMARY KEY, path TEXT) WITHOUT ROWID;
CREATE TABLE written (kind TEXT, path TEXT, place INTEGER, record TEXT);
"""
Record = TypeVar("Record", bound=BaseModel)


class Fate(NamedTuple):
    """What became of one row: accepted with its treatments, rejected, or kept as a reference."""

    source: Source
    reject: Reject | None
    treatments: list[Treatment]
    faults: list[CaptionFault]


class Verdicts:
    """Judges sources and holds what it found, on disk at `place`."""

    def __init__(self, place: Path, limits: Limits) -> None:
        place.unlink(missing_ok=True)
        self.limits = limits
        self.num_captions = 0
        self.counts: dict[str, int] = {}
        """Rows by kind of verdict, treatments by name."""
        self._data = sqlite3.connect(place, isolation_level=None)
        self._data.executescript(f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-{CACHE_KB};")
        self._data.executescript(TABLES)
        self._data.execute("BEGIN")

    def close(self) -> None:
        """Let go of the file."""
        self._data.close()

    def learn(self, source: Source) -> None:
        """First pass: remember what other rows need to know about this one."""
        if source.use == "reference":
            self._data.execute("INSERT OR REPLACE INTO reference VALUES (?, ?)", (source.path, source.error))
            return
        if not rules.is_captioned(source):
            return
        self.num_captions += 1
        if form := captions.skeleton(source.caption or ""):
            again = "INSERT INTO form VALUES (?, 1) ON CONFLICT (skeleton) DO UPDATE SET num = num + 1"
            self._data.execute(again, (form,))

    def judge(self, source: Source) -> Fate:
        """Second pass: the fate of one row; what is written down about it can be read with `read`."""
        if source.use == "reference":
            found = rules.unusable(source, self.limits)
            return self._keep(Fate(source, found, [], []), "reference" if found is None else "rejected")
        template = self._template(source)
        reject = next(iter(rules.judge_one(source, self.limits, template)), None)
        reject = reject or self._missing_reference(source) or self._copy(source)
        faults = [self._fault(source, item) for item in captions.faults(source.caption, self.limits, template)]
        if reject is not None:
            return self._keep(Fate(source, reject, [], faults), "rejected")
        treatments = rules.treatments(source, self.limits, template)
        text = rules.final_caption(source, self.limits, template)
        language = source.caption_language or captions.guess_language(text)
        kept = source.model_copy(update={"caption": text, "caption_language": language})
        return self._keep(Fate(kept, None, treatments, faults), "accepted")

    def read(self, kind: type[Record]) -> Iterator[Record]:
        """Everything of one kind that was written down, by path."""
        rows = self._data.execute("SELECT record FROM written WHERE kind = ? ORDER BY path, place", (kind.__name__,))
        yield from (kind.model_validate_json(record) for (record,) in rows)

    def _template(self, source: Source) -> tuple[int, int]:
        form = captions.skeleton(source.caption or "")
        row = self._data.execute("SELECT num FROM form WHERE skeleton = ?", (form,)).fetchone() if form else None
        return (row[0] if row else 0, self.num_captions)

    def _missing_reference(self, source: Source) -> Reject | None:
        for path in source.references:
            row = self._data.execute("SELECT error FROM reference WHERE path = ?", (path,)).fetchone()
            if row is None or row[0] is not None:
                why = "is not in the manifest" if row is None else row[0]
                return rules.rejected(source, "references", f"{path} {why}", "references that can be used")
        return None

    def _copy(self, source: Source) -> Reject | None:
        key = (source.source_id,)
        if row := self._data.execute("SELECT path FROM content WHERE source_id = ?", key).fetchone():
            return rules.rejected(source, "unique", f"same content as {row[0]}", "one copy")
        self._data.execute("INSERT INTO content VALUES (?, ?)", (source.source_id, source.path))
        return None

    def _fault(self, source: Source, found: captions.Found) -> CaptionFault:
        return CaptionFault(
            item=source.source_id,
            path=source.path,
            caption=source.caption,
            action=self.limits.action(found.fault),
            **found._asdict(),
        )

    def _keep(self, fate: Fate, verdict: str) -> Fate:
        records: list[BaseModel] = [*fate.treatments, *fate.faults, *([fate.reject] if fate.reject else [])]
        for place, record in enumerate(records):
            row = (type(record).__name__, fate.source.path, place, record.model_dump_json())
            self._data.execute("INSERT INTO written VALUES (?, ?, ?, ?)", row)
        names = [verdict, *(item.treatment for item in fate.treatments)]
        names += ["treated"] if fate.treatments else []
        for name in names:
            self.counts[name] = self.counts.get(name, 0) + 1
        return fate


def judged(sources: Iterable[Source], verdicts: Verdicts) -> Iterator[Source]:
    """The accepted of the sources, in their order, with the captions that are trained on."""
    for source in sources:
        fate = verdicts.judge(source)
        if fate.reject is None and source.use == "clip":
            yield fate.source


def total(counts: Mapping[str, int]) -> int:
    """Rows that have a verdict."""
    return sum(counts.get(name, 0) for name in ("accepted", "rejected", "reference"))
