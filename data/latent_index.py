"""The index of a latent store: one row an entry, an Arrow file that is mapped and never read whole."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import pyarrow as pa

from data.files import schema_of, whole
from data.latent_shards import Broken
from data.records import ClipShape, Frozen

arrow = cast(Any, pa)
ROWS_AT_ONCE, CHUNK = 10_000, 1 << 20
"""Rows of the index that become Arrow's at once while it is written, and rows of a chunk of it."""
KNOWN_ENTRIES = 1 << 14
"""Entries that an open index remembers: 10 MB."""


class LatentRow(Frozen):
    """One entry of the index."""

    entry: str
    """`CLIP_ID@CANVAS`."""
    clip_id: str
    source_id: str
    split: str
    group: str
    canvas: str
    has_audio: bool
    num_frames: int
    frame_rate: int
    height: int
    width: int
    sample_rate_hz: int
    """What was encoded: `ClipShape`."""
    variants: tuple[str, ...]
    """How it can be presented to the model: `t2va`, `fl2va`, `ref2va.0`, `t2va-uncaptioned`…"""
    layouts: tuple[str, ...]
    """Of each variant: entries of equal layout pack alike, and so may share a batch."""
    num_tokens: tuple[int, ...]
    """Of each variant: rows of the packed sequence."""
    shard: str
    """Number of its shard in every part: `00003`."""
    keys: tuple[str, ...]
    """Fingerprint of each part, in the order of `PARTS`; empty where it has none."""

    @property
    def shape(self) -> ClipShape:
        """Frames, rate, size and sound rate."""
        names = ("num_frames", "frame_rate", "height", "width", "sample_rate_hz")
        return ClipShape(**{name: getattr(self, name) for name in names})


class Entry(NamedTuple):
    """What reading an entry takes: the few columns of its row that are needed for every batch."""

    entry: str
    shard: str
    keys: tuple[str, ...]
    has_audio: bool
    frame_rate: int
    num_frames: int


def write_rows(path: Path, rows: Iterable[LatentRow]) -> None:
    """Write an index as an Arrow file, uncompressed, so that any number of processes share one map of it."""
    schema, left = schema_of(LatentRow), iter(rows)
    pieces: list[Any] = []
    while some := [row.model_dump() for row in itertools.islice(left, ROWS_AT_ONCE)]:
        pieces.append(arrow.Table.from_pylist(some, schema=schema))
    table = arrow.concat_tables(pieces) if pieces else schema.empty_table()
    with whole(path) as temporary, arrow.OSFile(str(temporary), "wb") as sink, arrow.ipc.new_file(sink, schema) as file:
        for start in range(0, len(table), CHUNK):
            file.write_table(table.slice(start, CHUNK).combine_chunks())


class LatentIndex:
    """The table of entries, sorted by `entry`: a map of the file, so a million rows open as fast as ten.

    Raises:
        Broken: it is no such table.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.table = arrow.ipc.open_file(arrow.memory_map(str(path))).read_all()  # columns in LatentRow's order
        except (arrow.ArrowInvalid, OSError) as error:
            raise Broken(f"latent index {path} cannot be read: {str(error).splitlines()[0]}") from error
        missing = set(LatentRow.model_fields) - set(self.table.column_names)
        if missing:
            raise Broken(f"latent index {path} lacks {', '.join(sorted(missing))}; run `soundstage encode` again")

        self._columns = {name: self.table[name] for name in Entry._fields}
        self.find = functools.lru_cache(KNOWN_ENTRIES)(self._find)

    def __len__(self) -> int:
        return cast(int, self.table.num_rows)

    def row(self, place: int) -> LatentRow:
        """The whole row at a place."""
        return LatentRow.model_validate(self.table.slice(place, 1).to_pylist()[0])

    def rows(self) -> Iterator[LatentRow]:
        """Every row, in order; a million take half a minute, columns take none."""
        for batch in self.table.to_batches(max_chunksize=ROWS_AT_ONCE):
            yield from map(LatentRow.model_validate, batch.to_pylist())

    def place(self, entry: str) -> int:
        """Where an entry's row is, found by halving.

        Raises:
            KeyError: there is no such entry.
        """
        column = self._columns["entry"]
        place = bisect.bisect_left(range(len(self)), entry, key=lambda place: cast(str, column[place].as_py()))
        if place == len(self) or column[place].as_py() != entry:
            raise KeyError(entry)
        return place

    def _find(self, entry: str) -> Entry:
        """What reading an entry takes; KeyError where there is none."""
        place = self.place(entry)
        values = [self._columns[name][place].as_py() for name in Entry._fields]
        return Entry(values[0], values[1], tuple(values[2]), *values[3:])
