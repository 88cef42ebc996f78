"""The latent store: safetensors shards of four parts, one Arrow index, a fingerprint for every part of every entry.

An *entry* is one clip at one canvas. Its arrays, by part and name:

    picture     video (C, F, H, W); keyframe/first, keyframe/last and keyframe/FRAME (C, H, W)
    sound       audio (S, C, T): S = 2 sides, or 1 for networks that take both at once
    text        text/VARIANT/NAME, what the family's text side makes of the caption, after projection
    references  references/SET/PLACE/image, /video or /audio; a video with sound has both

Reads are memory-mapped and random by entry. A part is valid only for the fingerprint it was written under.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from data.conditions import Variant, keyframes_of
from data.files import sha256, write_text
from data.latent_index import Entry, LatentIndex, LatentRow, write_rows
from data.latent_shards import Broken, Shard, opened
from data.remote import is_remote, local

if TYPE_CHECKING:
    from torch import Tensor

    Arrays = dict[str, Tensor]

PARTS = ("picture", "sound", "text", "references")
PART_OF = {"video": "picture", "keyframe": "picture", "audio": "sound", "text": "text", "references": "references"}
"""Part by the first word of an array's name."""
SHARED = "shared"
"""Entry of the arrays that every clip shares, such as the text of no caption; in the index it has no row."""
INDEX, RECORD = "index.arrow", "fingerprint.json"
SHARD_NAME = re.compile(rf"(?:{'|'.join(PARTS)})-(?:\d{{5,}}|{SHARED})\.safetensors")
"""What a record may name: files of its own folder."""
OPEN_SHARDS = 256
"""Shards that one process keeps mapped: far below the 65,530 maps that Linux allows."""


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
        record: What else a reader must know: `family`, `text_of`, for `kf2va` its `keyframes`, and whatever decided the
            latents.

    Returns:
        The fingerprint of the whole store.

    Raises:
        ValueError: an entry is there twice.
    """
    ordered = sorted(rows, key=lambda row: row.entry)
    for one, other in itertools.pairwise(ordered):
        if one.entry == other.entry:
            raise ValueError(f"{store}: entry {one.entry} is there twice, in {one.split} and in {other.split}")
    write_rows(store / INDEX, ordered)
    shards = {path.name: sha256(path) for path in sorted(store.glob("*.safetensors"))}
    fingerprint = fingerprint_of([dict(record), [[row.entry, row.split, *row.keys] for row in ordered]])
    text = {"fingerprint": fingerprint, **record, "shards": shards, "index": sha256(store / INDEX)}
    sealed = {**text, "seal": fingerprint_of(json.loads(json.dumps(text)))}
    write_text(store / RECORD, json.dumps(sealed, indent=1, sort_keys=True) + "\n")
    return fingerprint


def read_record(path: Path, shown: str) -> dict[str, Any]:
    """What `write_index` wrote last.

    Raises:
        Broken: it is not what was written, or names files of other folders.
    """
    try:
        record = cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8")))
        sound = record.pop("seal") == fingerprint_of(record)
        odd = [name for name in record["shards"] if not SHARD_NAME.fullmatch(name)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Broken(f"{shown} is damaged or of another version; run `soundstage encode` again") from error
    if not sound:
        raise Broken(f"{shown} is altered: it is not what was written; run `soundstage encode` again")
    if odd:
        raise Broken(f"{shown} names {odd[0]!r}, which is no shard of a latent store")
    return record


class LatentStore:
    """A written store, opened for random reads; it may lie on S3 or OSS, its shards then come through a local cache.

    Cheap to open and safe to pickle: shards are opened when they are read, in each process anew. While it is open its
    files may be replaced or deleted, as all of ours do; one that is cut short in place ends the process with SIGBUS, as
    whatever is mapped does, and no check that is made before can help that.

    Args:
        folder: Where `encode` wrote it, or a copy of that.
        check: Compare the index with its checksum now, and every array when a process first reads it.

    Raises:
        Broken: the store is missing, or its record, its index or a shard is missing, stale or altered; the message
            names it.
    """

    def __init__(self, folder: Path | str, *, check: bool = True) -> None:
        self.folder, self._check = str(folder), check
        record = self._fetched(RECORD)
        if not record.is_file():
            raise Broken(f"no latent store in {folder}; run `soundstage encode` first")
        self.record = read_record(record, f"{folder}/{RECORD}")
        self.fingerprint: str = self.record["fingerprint"]
        self.text_of: dict[str, str] = self.record["text_of"]
        if not is_remote(self.folder):
            for name in (INDEX, *self.record["shards"]):
                if not (Path(self.folder) / name).is_file():
                    what = "index" if name == INDEX else "shard"
                    raise Broken(f"latent {what} {folder}/{name} is missing; run `soundstage encode` again")
        if check:
            self.verify_file(INDEX)  # what is mapped is believed: an altered one could end the process
        self.index = LatentIndex(self._fetched(INDEX))
        self._open: OrderedDict[str, Shard] = OrderedDict()

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
        """What the model is given of an entry beside noise: `text/NAME`, `keyframe/first`, `references/0/image`…

        Raises:
            Broken: a shard is missing, stale or altered, or holds nothing of the kind.
            KeyError: the store has no such variant.
        """
        facts, said = Variant.parse(variant), self.text_of[variant]
        result: Arrays = {}
        if said.startswith(f"{SHARED}/"):
            prefix, shard = f"text/{said.removeprefix(f'{SHARED}/')}/", self._shard("text", SHARED)
            result |= self._below(shard, ("text", SHARED, SHARED), prefix, "text/")
        else:
            result |= self._below_of(row, f"text/{said}/", "text/")
        for which in keyframes_of(facts.mode, self.record.get("keyframes", ()), row.num_frames):
            result[f"keyframe/{which}"] = self.read(row, f"keyframe/{which}")
        if facts.mode == "ref2va":
            result |= self._below_of(row, f"references/{facts.references}/", "references/")
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

    def _below_of(self, row: LatentRow | Entry, prefix: str, new_prefix: str) -> Arrays:
        part = PART_OF[prefix.partition("/")[0]]
        return self._below(self._of(row, part), (part, row.shard, row.entry), prefix, new_prefix)

    def _below(self, shard: Shard, where: tuple[str, str, str], prefix: str, new_prefix: str) -> Arrays:
        """Arrays of an entry whose names begin with a prefix; `where` is its part, its shard's number and itself."""
        part, number, entry = where
        found = {
            new_prefix + name[len(prefix) :]: self._array(shard, part, number, f"{entry}/{name}")
            for name in shard.names.get(entry, ())
            if name.startswith(prefix)
        }
        if not found:  # a model that is trained without what it should be given learns to do without
            raise Broken(
                f"latent shard {self.folder}/{shard_name(part, number)} has nothing under {entry}/{prefix}; run"
                " `soundstage encode` again"
            )
        return found

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
