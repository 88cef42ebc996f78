"""The latent store: what is written is read, what is altered is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.latents import LatentRow, LatentStore, fingerprint_of, write_index, write_shard


def write(folder: Path) -> None:
    arrays = {f"clip-{index}": {"video": np.full((2, 3), index, np.float32)} for index in range(2)}
    write_shard(folder / "shard-00000.safetensors", arrays)
    rows = [
        LatentRow(
            clip_id=clip_id, source_id="s", split="train", group="", has_audio=True, shard="shard-00000.safetensors",
            modes="t2va", layout="1", num_tokens=1,
        )
        for clip_id in arrays
    ]  # fmt: skip
    write_index(folder, rows, "abc", {"a": 1})


def test_arrays_are_read_by_clip(tmp_path: Path) -> None:
    write(tmp_path)
    store = LatentStore(tmp_path)
    assert store.fingerprint == "abc"
    np.testing.assert_array_equal(store.read("clip-1", "video"), np.ones((2, 3), np.float32))


def test_an_altered_shard_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path)
    shard = tmp_path / "shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(RuntimeError, match="shard-00000"):
        LatentStore(tmp_path)
    shard.unlink()
    with pytest.raises(RuntimeError, match="shard-00000"):
        LatentStore(tmp_path, verify=False)


def test_a_missing_store_says_which_verb_writes_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="soundstage encode"):
        LatentStore(tmp_path)


def test_fingerprints_change_with_every_part_and_not_with_order() -> None:
    parts = {"encoder": "x", "shape": [1, 2]}
    assert fingerprint_of(parts) == fingerprint_of(dict(reversed(parts.items())))
    assert fingerprint_of(parts) != fingerprint_of({**parts, "encoder": "y"})
