"""The latent store: what is written is read, what is altered or stale is refused by name."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.conditions import MODES, Variant
from data.files import sha256
from data.latent_index import LatentRow
from data.latent_shards import Broken, write_shard
from data.latents import PARTS, SHARED, LatentStore, fingerprint_of, write_index


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


def all_of(store: LatentStore, rows: list[LatentRow]) -> list[Any]:
    """Everything that training would read."""
    return [
        {name: (str(array.dtype), array.tolist()) for name, array in arrays.items()}
        for item in rows
        for arrays in (
            *(store.conditions(item, variant) for variant in item.variants),
            {"video": store.read(item, "video"), "audio": store.read(item, "audio")},
        )
    ]


@pytest.mark.parametrize("name", [*(f"{part}-00000.safetensors" for part in PARTS), f"text-{SHARED}.safetensors"])
def test_no_flipped_bit_of_a_shard_is_read_as_something_else(tmp_path: Path, name: str) -> None:
    rows = write(tmp_path)
    file, store = tmp_path / name, LatentStore(tmp_path)
    truth, whole = all_of(store, rows), file.read_bytes()
    num_refused = 0
    for place in range(0, len(whole), 2):
        data = bytearray(whole)
        data[place] ^= 1 << place // 2 % 8
        file.unlink()  # what is open stays mapped
        file.write_bytes(bytes(data))
        store._open.clear()
        try:
            assert all_of(store, rows) == truth, f"byte {place}"
        except Broken as error:
            assert name in str(error)  # noqa: PT017
            num_refused += 1
    assert num_refused > len(whole) // 2 * 0.9  # the rest is padding, and letters that JSON reads alike


def test_no_flipped_bit_of_the_record_is_believed(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "fingerprint.json"
    whole, truth = file.read_bytes(), LatentStore(tmp_path).record
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        file.write_bytes(bytes(data))
        try:
            assert LatentStore(tmp_path).record == truth
        except Broken as error:
            assert "fingerprint.json" in str(error)  # noqa: PT017


@pytest.mark.parametrize("text", ["[]", "null", "[" * 100_000, "{}", '{"seal": ""}', '{"seal": 1, "shards": null}'])
def test_a_record_of_another_kind_is_refused_by_name(tmp_path: Path, text: str) -> None:
    write(tmp_path)
    (tmp_path / "fingerprint.json").write_text(text)
    with pytest.raises(Broken, match=r"fingerprint\.json is (damaged|altered)"):
        LatentStore(tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "picture-00000.safetensors/../x", "x"])
def test_a_record_that_names_files_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    file = tmp_path / "fingerprint.json"
    record = json.loads(file.read_text())
    del record["seal"]
    record["shards"][name] = "0"
    file.write_text(json.dumps({**record, "seal": fingerprint_of(record)}))
    with pytest.raises(Broken, match="is no shard of a latent store"):
        LatentStore(tmp_path)


def test_what_no_store_can_hold_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"latents are float32, .*, not float64"):
        write_shard(tmp_path / "x.safetensors", {"a": {"video": torch.zeros(1, dtype=torch.float64)}}, {"a": "k"})
    with pytest.raises(ValueError, match="'a/b' has a slash"):
        write_shard(tmp_path / "x.safetensors", {"a/b": {"video": torch.zeros(1)}}, {"a/b": "k"})
    twice = [row(ENTRIES[0]), row(ENTRIES[0], split="val")]
    with pytest.raises(ValueError, match="a@base is there twice, in train and in val"):
        write_index(tmp_path, twice, {"text_of": TEXT_OF, "family": "none"})
    assert not list(tmp_path.iterdir())


def test_a_condition_that_is_not_there_is_no_empty_one(tmp_path: Path) -> None:
    rows = write(tmp_path)
    write_index(tmp_path, rows, {"text_of": {**TEXT_OF, "fl2va_last": "fl2va_last"}, "family": "none"})
    with pytest.raises(Broken, match=r"text-00000\.safetensors has nothing under a@base/text/fl2va_last/"):
        LatentStore(tmp_path).conditions(rows[0], "fl2va_last")


def test_shards_may_be_read_by_whom_other_new_files_may(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "new").touch()
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {(tmp_path / "new").stat().st_mode}


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
    for name in ("references-00000.safetensors", "index.arrow"):
        (tmp_path / name).unlink()
        with pytest.raises(Broken, match=rf"{re.escape(name)} is missing"):
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
