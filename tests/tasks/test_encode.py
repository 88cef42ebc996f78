from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.files import refuse_foreign_outputs, sha256, write_records
from data.latents import LatentStore
from data.media import write_mp4
from data.records import Clip, ClipShape, DataRefused
from data.world import scene
from tasks import encode
from tasks.encode import Config, run

SHAPE = ClipShape(num_frames=22, frame_rate=24, height=16, width=16, sample_rate_hz=8000)
MakeClip = Callable[..., Clip]


@pytest.fixture
def clips(tmp_path: Path, make_clip: MakeClip) -> list[Clip]:
    """Two short films, the second one silent."""
    made: list[Clip] = []
    for index, name in enumerate(("bell", "silent")):
        seen = scene("base", index, 22 / 24, 24, 48, 8000, "bounce")
        path = tmp_path / f"{name}.mp4"
        write_mp4(path, seen.frames_FHWC, seen.waveform_CT if name == "bell" else None, 24, 8000)
        made.append(make_clip(name, path=str(path), caption=seen.caption, has_audio=name == "bell"))
    return made


def config_of(folder: Path, base: Path, clips: Sequence[Clip], **changes: Any) -> Config:
    """One clip a shard, everything below `folder`; the last clip is held out."""
    splits = {"train": clips[:-1], "val": clips[:0], "test": clips[-1:]}
    for name, rows in splits.items():
        write_records(folder / "splits" / f"{name}.parquet", rows, Clip)
    names = ("splits", "latents", "work", "docs")
    paths = {name: folder / name for name in names} | {"base": base, "expectations": folder / "expectations.json"}
    return Config.model_validate({**paths, "shape": SHAPE, "clips_per_shard": 1, "num_workers": 1, **changes})


class InProcess:
    """Stands in for the pool of processes: encodes here, or is killed before the shard at `stop_at`."""

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self.stop_at: int | None = None

    def __call__(self, function: Callable[[Any], Any], parts: Sequence[Any], *_: object) -> Iterator[tuple[int, Any]]:
        for index, part in enumerate(parts):
            if index == self.stop_at:
                raise KeyboardInterrupt
            self.encoded.append(part.path.name)
            yield index, function(part)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> InProcess:
    result = InProcess()
    monkeypatch.setattr(encode, "map_isolated", result)
    return result


def test_a_run_killed_after_a_shard_does_only_the_rest_and_gives_the_same_bytes(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess
) -> None:
    undisturbed = run(config_of(tmp_path / "undisturbed", base, clips))
    config = config_of(tmp_path / "killed", base, clips)
    pool.stop_at = 1
    with pytest.raises(KeyboardInterrupt):
        run(config)
    assert not config.latents.exists()
    pool.encoded, pool.stop_at = [], None
    assert sha256(run(config)) == sha256(undisturbed)
    assert pool.encoded == ["shard-00001.safetensors"]
    assert not config.work.exists()


def test_every_clip_is_in_the_store_with_all_modes(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess
) -> None:
    config = config_of(tmp_path, base, clips, clips_per_shard=8)
    store = LatentStore(run(config))
    refuse_foreign_outputs(config)
    assert pool.encoded == ["shard-00000.safetensors"]
    assert {name: (row.split, row.has_audio) for name, row in store.rows.items()} == {
        "bell-000000": ("train", True),
        "silent-000000": ("test", False),
    }
    for name, row in store.rows.items():
        assert row.modes == "fl2va,fl2va_first,t2va"
        assert store.read(name, "video").shape == (24, 7, 4, 4)  # 17 frames to 5, 5 to 2; 4 px to 1
        assert store.read(name, "audio").shape == (2, 32, 37)  # 40 a second
        assert [len(store.read(name, f"keyframes.{mode}")) for mode in ("t2va", "fl2va_first", "fl2va")] == [0, 1, 2]
    bell, silent = (store.read(name, "audio") for name in sorted(store.rows))
    assert np.array_equal(silent[0], silent[1])  # both sides of nothing; the bell is heard from where it is
    assert not np.array_equal(bell[0], bell[1])


def test_a_changed_caption_changes_the_fingerprint_and_the_text_alone(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess
) -> None:
    reworded = [clips[0].model_copy(update={"caption": "a blue ball bounces"}), clips[1]]
    stores = [
        LatentStore(run(config_of(tmp_path / name, base, rows))) for name, rows in (("old", clips), ("new", reworded))
    ]
    assert stores[0].fingerprint != stores[1].fingerprint
    name = clips[0].clip_id
    same = [np.array_equal(stores[0].read(name, part), stores[1].read(name, part)) for part in ("video", "text.t2va")]
    assert same == [True, False]
    assert len(pool.encoded) == 4  # shards of another fingerprint are never taken


def test_latents_of_another_model_or_shape_or_sound_are_never_taken(
    base: Path, clips: list[Clip], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: object, parts: Sequence[Any], *__: object) -> Iterator[tuple[int, Any]]:
        asked.extend(part.path.parent.name for part in parts[:1])
        raise KeyboardInterrupt

    def shards_of(model: Path = base, **changes: Any) -> str:
        """The folder of shards that a run would go on in."""
        with pytest.raises(KeyboardInterrupt):
            run(config_of(tmp_path, model, clips, **changes))
        return asked[-1]

    asked: list[str] = []
    monkeypatch.setattr(encode, "map_isolated", stop)
    before = shards_of()
    assert shards_of() == before
    other = tmp_path / "other"
    shutil.copytree(base, other)
    assert shards_of(other) == before  # a copy elsewhere is the same model
    weights = other / "vae/diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    found = {before, shards_of(other), shards_of(shape=SHAPE.model_copy(update={"width": 32}))}
    (tmp_path / "song.wav").write_bytes(b"one")
    clips[0] = clips[0].model_copy(update={"sound_path": str(tmp_path / "song.wav")})
    found.add(shards_of())
    (tmp_path / "song.wav").write_bytes(b"another")
    assert len({*found, shards_of()}) == 5


def test_a_shape_off_the_grid_is_refused_before_anything_is_encoded(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess
) -> None:
    with pytest.raises(ValueError, match="num_frames"):
        run(config_of(tmp_path, base, clips, shape=SHAPE.model_copy(update={"num_frames": 24})))
    assert not pool.encoded


def test_latents_that_are_no_numbers_are_refused_by_name(
    base: Path, clips: list[Clip], tmp_path: Path, pool: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(family: Any, clip: Clip, shape: ClipShape) -> dict[str, Any]:
        arrays = honest(family, clip, shape)
        if clip.source_id == "silent":
            arrays["video"][0, 0, 0, 0] = np.nan
        return arrays

    honest = encode.encode
    monkeypatch.setattr(encode, "encode", spoilt)
    config = config_of(tmp_path, base, clips)
    with pytest.raises(DataRefused, match=r"latent_finite.*silent-000000") as refused:
        run(config)
    assert "bell-000000" not in str(refused.value)
    assert not config.latents.exists()
    found = json.loads(config.expectations.read_text())
    assert [item["name"] for item in found["outcomes"] if not item["success"]] == ["latent_finite"]
