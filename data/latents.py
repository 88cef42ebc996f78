"""The latent store: safetensors shards of four parts, one Arrow index, a fingerprint for every part of every entry.

An *entry* is one clip at one canvas. Its arrays, by part and name:

    picture     video (C, F, H, W); keyframe/first and keyframe/last (C, H, W)
    sound       audio (S, C, T): S = 2 sides, or 1 for networks that take both at once
    text        text/VARIANT/NAME, what the family's text side makes of the caption, after projection
    references  references/SET/PLACE/image, /video or /audio; a video with sound has both

Reads are memory-mapped and random by entry. A part is valid only for the fingerprint it was written under.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pyarrow as pa

from data.conditions import KEYFRAMES, Variant
from data.files import schema_of, sha256, whole, write_text
from data.latent_shards import Broken, Shard, opened
from data.records import ClipShape, Frozen
from data.remote import is_remote, local

if TYPE_CHECKING:
    from torch import Tensor

    Arrays = dict[str, Tensor]

arrow = cast(Any, pa)
PARTS = ("picture", "sound", "text", "references")
PART_OF = {"video": "picture", "keyframe": "picture", "audio": "sound", "text": "text", "references": "references"}
"""Part by the first word of an array's name."""
SHARED = "shared"
"""Entry of the arrays that every clip shares, such as the text of no caption; in the index it has no row."""
INDEX, RECORD = "index.arrow", "fingerprint.json"
ROWS_AT_ONCE, CHUNK = 10_000, 1 << 20
"""Rows of the index that become Arrow's at once while it is written, and rows of a chunk of it."""
KNOWN_ENTRIES = 1 << 14
"""Entries that an open index remembers: 10 MB."""
OPEN_SHARDS = 256
"""Shards that one process keeps mapped: far below the 65,530 maps that Linux allows."""


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


def fingerprint_of(parts: object) -> str:
    """Hash of everything that decides some bytes: contents, parameters, encoder weights, code version."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def shard_name(part: str, shard: str) -> str:
    """File name of one part of a shard."""
    return f"{part}-{shard}.safetensors"


def write_index(store: Path, rows: Sequence[LatentRow], record: Mapping[str, object]) -> str:
    """Write the index, and last the record with the SHA-256 of every shard; the store is whole once this returns.

    Args:
        store: Folder that the shards are in.
        rows: One an entry.
        record: What else a reader must know: `family`, `text_of` and whatever decided the latents.

    Returns:
        The fingerprint of the whole store.
    """
    ordered = sorted(rows, key=lambda row: row.entry)
    write_rows(store / INDEX, ordered)
    shards = {path.name: sha256(path) for path in sorted(store.glob("*.safetensors"))}
    fingerprint = fingerprint_of([dict(record), [[row.entry, row.split, *row.keys] for row in ordered]])
    text = {"fingerprint": fingerprint, **record, "shards": shards, "index": sha256(store / INDEX)}
    write_text(store / RECORD, json.dumps(text, indent=1, sort_keys=True) + "\n")
    return fingerprint


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

    def _find(self, entry: str) -> Entry:
        """What reading an entry takes, found by halving.

        Raises:
            KeyError: there is no such entry.
        """
        column = self._columns["entry"]
        place = bisect.bisect_left(range(len(self)), entry, key=lambda place: cast(str, column[place].as_py()))
        if place == len(self) or column[place].as_py() != entry:
            raise KeyError(entry)
        values = [self._columns[name][place].as_py() for name in Entry._fields]
        return Entry(values[0], values[1], tuple(values[2]), *values[3:])


class LatentStore:
    """A written store, opened for random reads; it may lie on S3 or OSS, its shards then come through a local cache.

    Cheap to open and safe to pickle: shards are opened when they are read, in each process anew.

    Args:
        folder: Where `encode` wrote it, or a copy of that.
        check: Compare the index with its checksum now, and every array when a process first reads it.

    Raises:
        Broken: the store is missing, or a shard is missing, stale or altered; the message names it.
    """

    def __init__(self, folder: Path | str, *, check: bool = True) -> None:
        self.folder, self._check = str(folder), check
        record = self._fetched(RECORD)
        if not record.is_file():
            raise Broken(f"no latent store in {folder}; run `soundstage encode` first")
        try:
            self.record: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
            self.fingerprint: str = self.record["fingerprint"]
            self.text_of: dict[str, str] = self.record["text_of"]
        except (ValueError, KeyError) as error:
            raise Broken(
                f"{folder}/{RECORD} is damaged or of another version; run `soundstage encode` again"
            ) from error
        if check:
            self.verify_file(INDEX)  # what is mapped is believed: an altered one could end the process
        self.index = LatentIndex(self._fetched(INDEX))
        self._open: OrderedDict[str, Shard] = OrderedDict()
        if not is_remote(self.folder):
            for name in self.record["shards"]:
                if not (Path(self.folder) / name).is_file():
                    raise Broken(f"latent shard {folder}/{name} is missing; run `soundstage encode` again")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict(), "index": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.index = LatentIndex(self._fetched(INDEX))  # mapped, never sent

    def verify(self) -> None:
        """Read every byte of the store.

        Raises:
            Broken: the index or a shard is altered.
        """
        for name in (INDEX, *self.record["shards"]):
            self.verify_file(name)

    def verify_file(self, name: str) -> None:
        """Read every byte of the index or of one shard.

        Raises:
            Broken: it is altered.
        """
        wanted = self.record["index"] if name == INDEX else self.record["shards"][name]
        found = sha256(self._fetched(name))
        if found != wanted:
            what = "index" if name == INDEX else "shard"
            raise Broken(
                f"latent {what} {self.folder}/{name} is altered: SHA-256 {found[:12]}…, recorded {wanted[:12]}…;"
                " run `soundstage encode` again"
            )

    def read(self, row: LatentRow | Entry, name: str) -> Tensor:
        """One array of an entry, e.g. `video`, as a view of the file; copy it before you change it.

        Raises:
            Broken: its shard is missing, stale or altered.
            KeyError: the entry has no such array.
        """
        part = PART_OF[name.partition("/")[0]]
        return self._array(self._of(row, part), part, row.shard, f"{row.entry}/{name}")

    def conditions(self, row: LatentRow | Entry, variant: str) -> Arrays:
        """What the model is given of an entry beside noise: `text/NAME`, `keyframe/first`, `references/0/image`…"""
        facts, said = Variant.parse(variant), self.text_of[variant]
        result: Arrays = {}
        if said.startswith(f"{SHARED}/"):
            prefix = f"text/{said.removeprefix(f'{SHARED}/')}/"
            shard = self._shard("text", SHARED)
            for name in shard.names[SHARED]:
                if name.startswith(prefix):
                    result[f"text/{name.removeprefix(prefix)}"] = self._array(shard, "text", SHARED, f"{SHARED}/{name}")
        else:
            result |= self._below(row, f"text/{said}/", "text/")
        for which in KEYFRAMES.get(facts.mode, ()):
            result[f"keyframe/{which}"] = self.read(row, f"keyframe/{which}")
        if facts.mode == "ref2va":
            result |= self._below(row, f"references/{facts.references}/", "references/")
        return result

    def names(self, row: LatentRow | Entry, part: str) -> list[str]:
        """Names of an entry's arrays in a part."""
        return self._shard(part, row.shard).names.get(row.entry, [])

    def _of(self, row: LatentRow | Entry, part: str) -> Shard:
        """The shard that a part of an entry is in.

        Raises:
            Broken: it is missing, or holds another one.
        """
        shard = self._shard(part, row.shard)
        if shard.keys.get(row.entry) != row.keys[PARTS.index(part)]:
            raise Broken(
                f"latent shard {self.folder}/{shard_name(part, row.shard)} is stale: it does not hold the {part} of"
                f" {row.entry} that the index names; run `soundstage encode` again"
            )
        return shard

    def _below(self, row: LatentRow | Entry, prefix: str, new_prefix: str) -> Arrays:
        part = PART_OF[prefix.partition("/")[0]]
        shard, length = self._of(row, part), len(prefix)
        return {
            new_prefix + name[length:]: self._array(shard, part, row.shard, f"{row.entry}/{name}")
            for name in shard.names.get(row.entry, ())
            if name.startswith(prefix)
        }

    def _array(self, shard: Shard, part: str, number: str, key: str) -> Tensor:
        found = shard.read.get(key)
        if found is None:
            if self._check and shard.altered(key):
                raise Broken(
                    f"latent shard {self.folder}/{shard_name(part, number)} is altered: {key} is not what was written;"
                    " run `soundstage encode` again"
                )
            found = shard.read[key] = shard.array(key)
        return found

    def _fetched(self, name: str) -> Path:
        return local(f"{self.folder.rstrip('/')}/{name}") if is_remote(self.folder) else Path(self.folder) / name

    def _shard(self, part: str, number: str) -> Shard:
        name = shard_name(part, number)
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        if name not in self.record["shards"]:
            raise Broken(f"latent store {self.folder} has no shard {name}; its index is of another store")
        if is_remote(self.folder):
            self.verify_file(name)  # a copy is believed once it has been read whole
        shard = opened(self._fetched(name), f"{self.folder}/{name}")
        self._open[name] = shard
        while len(self._open) > OPEN_SHARDS:
            self._open.popitem(last=False)
        return shard
