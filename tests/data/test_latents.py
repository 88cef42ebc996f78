"""The latent store: what is written is read, what is altered or stale is refused by name."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.conditions import MODES, Variant
from data.files import sha256
from data.latent_shards import Broken, write_shard
from data.latents import PARTS, SHARED, LatentRow, LatentStore, fingerprint_of, write_index


def row(entry: str, **changes: Any) -> LatentRow:
    """An entry of shard 00000 with every part."""
    facts = {
        "entry": entry, "clip_id": entry.partition("@")[0], "source_id": "s", "split": "train", "group": "",
        "canvas": "base", "has_audio": True, "num_frames": 22, "frame_rate": 24, "height": 32, "width": 32,
        "sample_rate_hz": 8000, "variants": ("t2va", "fl2va", "ref2va.1", "t2va-uncaptioned"),
        "layouts": ("a", "b", "c", "d"), "num_tokens": (1, 2, 3, 4), "shard": "00000",
        "keys": tuple(f"{part} of {entry}" for part in PARTS),
    }  # fmt: skip
    return LatentRow.model_validate({**facts, **changes})


TEXT_OF = {"t2va": "t2va", "fl2va": "fl2va", "ref2va.1": "ref2va.1", "t2va-uncaptioned": f"{SHARED}/uncaptioned"}
ENTRIES = ("a@base", "b@base")


def write(folder: Path, value: float = 0.0) -> list[LatentRow]:
    """A store of two entries whose arrays are their number plus `value`."""
    rows = [row(entry) for entry in ENTRIES]
    names = {
        "picture": ("video", "keyframe/first", "keyframe/last"),
        "sound": ("audio",),
        "text": ("text/t2va/rows", "text/fl2va/rows", "text/ref2va.1/rows"),
        "references": ("references/0/0/image", "references/1/0/video", "references/1/0/audio"),
    }
    for place, part in enumerate(PARTS):
        arrays = {
            item.entry: {name: torch.full((2, 3), number + value, dtype=torch.bfloat16) for name in names[part]}
            for number, item in enumerate(rows)
        }
        keys = {item.entry: item.keys[place] for item in rows}
        write_shard(folder / f"{part}-00000.safetensors", arrays, keys)
    shared = {SHARED: {"text/uncaptioned/rows": torch.full((1, 3), 9.0)}}
    write_shard(folder / f"text-{SHARED}.safetensors", shared, {SHARED: "x"})
    write_index(folder, rows, {"text_of": TEXT_OF, "family": "none"})
    return rows


def test_arrays_are_read_by_entry_and_conditions_by_variant(tmp_path: Path) -> None:
    rows = write(tmp_path)
    store = LatentStore(tmp_path)
    assert [store.index.row(place) for place in range(2)] == rows == list(store.index.rows())
    assert store.index.find("b@base").entry == "b@base"
    assert store.read(rows[1], "video").equal(torch.ones((2, 3), dtype=torch.bfloat16))
    given_names = {variant: sorted(store.conditions(rows[0], variant)) for variant in rows[0].variants}
    assert given_names == {
        "t2va": ["text/rows"],
        "fl2va": ["keyframe/first", "keyframe/last", "text/rows"],
        "ref2va.1": ["references/0/audio", "references/0/video", "text/rows"],
        "t2va-uncaptioned": ["text/rows"],
    }
    assert store.conditions(rows[0], "t2va-uncaptioned")["text/rows"].tolist() == [[9.0, 9.0, 9.0]]
    store.verify()


def test_a_store_travels_to_other_processes(tmp_path: Path) -> None:
    rows = write(tmp_path)
    store = LatentStore(tmp_path)
    store.read(rows[0], "video")
    again = pickle.loads(pickle.dumps(store))
    assert again.read(rows[1], "audio").equal(store.read(rows[1], "audio"))


def test_an_altered_array_is_refused_by_shard_and_name_when_it_is_read(tmp_path: Path) -> None:
    rows = write(tmp_path)
    shard = tmp_path / "sound-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1  # of the second entry
    shard.write_bytes(bytes(data))
    store = LatentStore(tmp_path)
    assert store.read(rows[0], "audio").shape == (2, 3)
    with pytest.raises(Broken, match=r"sound-00000\.safetensors is altered: b@base/audio"):
        store.read(rows[1], "audio")
    with pytest.raises(Broken, match=r"sound-00000\.safetensors is altered: SHA-256"):
        store.verify()


@pytest.mark.parametrize("spoil", ["header", "cut", "empty"])
def test_a_damaged_shard_is_refused_by_name(tmp_path: Path, spoil: str) -> None:
    rows = write(tmp_path)
    shard = tmp_path / "text-00000.safetensors"
    data = shard.read_bytes()
    shard.write_bytes({"header": b"\xff" * 12 + data[12:], "cut": data[:100], "empty": b""}[spoil])
    with pytest.raises(Broken, match=r"text-00000\.safetensors is missing or damaged"):
        LatentStore(tmp_path).conditions(rows[0], "t2va")


def test_a_whole_shard_of_another_store_is_stale(tmp_path: Path) -> None:
    rows = write(tmp_path / "new")
    write_shard(
        tmp_path / "old.safetensors",
        {entry: {"video": torch.zeros((2, 3), dtype=torch.bfloat16)} for entry in ENTRIES},
        dict.fromkeys(ENTRIES, "other"),
    )
    shutil.copyfile(tmp_path / "old.safetensors", tmp_path / "new" / "picture-00000.safetensors")
    with pytest.raises(Broken, match=r"picture-00000\.safetensors is stale.*picture of a@base"):
        LatentStore(tmp_path / "new").read(rows[0], "video")


def test_a_missing_shard_or_store_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "references-00000.safetensors").unlink()
    with pytest.raises(Broken, match=r"references-00000\.safetensors is missing"):
        LatentStore(tmp_path)
    with pytest.raises(RuntimeError, match="soundstage encode"):
        LatentStore(tmp_path / "nothing")


def test_an_index_or_record_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    index = tmp_path / "index.arrow"
    kept = index.read_bytes()
    index.write_bytes(b"ARROW1 nonsense")
    with pytest.raises(Broken, match=r"index\.arrow is altered"):
        LatentStore(tmp_path)
    with pytest.raises(Broken, match=r"index\.arrow cannot be read"):
        LatentStore(tmp_path, check=False)
    index.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(Broken, match=r"index\.arrow cannot be read"):
        LatentStore(tmp_path, check=False)
    index.write_bytes(kept)
    (tmp_path / "fingerprint.json").write_text('{"fingerprint": "x"}')
    with pytest.raises(Broken, match="another version"):
        LatentStore(tmp_path)


def test_the_same_store_has_the_same_bytes_and_fingerprint(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name)
    assert sha256(tmp_path / "one") == sha256(tmp_path / "two")
    record = json.loads((tmp_path / "one" / "fingerprint.json").read_text())
    assert record["fingerprint"] == LatentStore(tmp_path / "two").fingerprint
    changed = [row(ENTRIES[0], keys=("another", "", "", "")), row(ENTRIES[1])]
    assert write_index(tmp_path / "two", changed, {"text_of": TEXT_OF, "family": "none"}) != record["fingerprint"]


def test_fingerprints_change_with_every_part_and_not_with_order() -> None:
    parts = {"encoder": "x", "shape": [1, 2]}
    assert fingerprint_of(parts) == fingerprint_of(dict(reversed(parts.items())))
    assert fingerprint_of(parts) != fingerprint_of({**parts, "encoder": "y"})


@given(st.sampled_from(MODES), st.integers(0, 20), st.booleans())
def test_variants_are_parsed_back(mode: Any, number: int, captioned: bool) -> None:
    variant = Variant(mode, number if mode == "ref2va" else 0, captioned)
    assert Variant.parse(str(variant)) == variant


@pytest.mark.parametrize("text", ["", "t3va", "fl2va_middle", "t2va-uncaptioned-", "ref2va.", "T2VA"])
def test_what_is_no_variant_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no variant"):
        Variant.parse(text)
