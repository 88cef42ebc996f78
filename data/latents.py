"""The latent store: safetensors shards, one Parquet index, one fingerprint.

A store is valid only for the fingerprint it was written under. Reads are memory-mapped and random by clip.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import safe_open

from data.files import read_records, sha256, whole, write_records, write_text
from data.records import Frozen

Arrays = dict[str, NDArray[Any]]


class LatentRow(Frozen):
    """One clip of the index."""

    clip_id: str
    source_id: str
    split: str
    group: str
    has_audio: bool
    shard: str
    """File of the shard, relative to the store."""
    modes: str
    """Conditioning modes encoded, comma-separated."""
    layout: str
    """Clips with equal layout share a packed sequence in every mode, and so may share a batch."""
    num_tokens: int
    """Rows of the packed sequence with both keyframes."""


def fingerprint_of(parts: Mapping[str, object]) -> str:
    """Hash of everything that decides the latents: contents, parameters, encoder weights, code version."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def write_shard(path: Path, clips: Mapping[str, Arrays]) -> None:
    """Write the arrays of some clips as one safetensors file, keys `clip_id/name`."""
    flat = {
        f"{clip_id}/{name}": np.ascontiguousarray(array)
        for clip_id, arrays in clips.items()
        for name, array in arrays.items()
    }
    with whole(path) as temporary:
        safetensors.numpy.save_file(flat, temporary)


def write_index(store: Path, rows: list[LatentRow], fingerprint: str, parts: Mapping[str, object]) -> None:
    """Write the index and the fingerprint with a checksum of every shard; the store is whole once this returns."""
    write_records(store / "index.parquet", rows, LatentRow)
    shards = {name: sha256(store / name) for name in sorted({row.shard for row in rows})}
    text = json.dumps({"fingerprint": fingerprint, "parts": parts, "shards": shards}, indent=1, sort_keys=True)
    write_text(store / "fingerprint.json", text + "\n")


class LatentStore:
    """A written store, opened for random reads.

    Raises:
        RuntimeError: the store is missing, or a shard is missing or altered; the message names the shard.
    """

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        manifest = folder / "fingerprint.json"
        if not manifest.is_file():
            raise RuntimeError(f"no latent store in {folder}; run `soundstage encode` first")
        recorded = json.loads(manifest.read_text(encoding="utf-8"))
        self.fingerprint: str = recorded["fingerprint"]
        self.rows = {row.clip_id: row for row in read_records(folder / "index.parquet", LatentRow)}
        for name, digest in recorded["shards"].items():
            if not (folder / name).is_file() or (verify and sha256(folder / name) != digest):
                raise RuntimeError(f"latent shard {folder / name} is missing or altered; run `soundstage encode` again")
        self._shards = {name: safe_open(folder / name, framework="numpy") for name in recorded["shards"]}

    def read(self, clip_id: str, name: str) -> NDArray[Any]:
        """One array of one clip, e.g. `video`, `audio`, `text.fl2va`."""
        return cast(NDArray[Any], self._shards[self.rows[clip_id].shard].get_tensor(f"{clip_id}/{name}"))
