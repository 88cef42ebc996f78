"""Frames anywhere in the clip: from files through store, plan and training to what is generated, with a tiny LTX-2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLLTX2Video
from PIL import Image

from data.clips import read
from data.conditions import frame_of, keyframes_of, mode_of
from data.files import read_records, write_records
from data.latents import LatentStore
from data.media import write_mp4
from data.records import Clip, ClipShape
from data.sampler import StepBatch
from data.stage import Stage
from models.families import Condition, Family, Noisy, encode_condition, load_family
from models.generation import Generator
from models.loading import read_batch
from tasks import encode, generate, plan, train
from tasks.__main__ import EXIT_CONFIGURATION, main
from tests.tasks.test_encode import config_of, installed, made_by

SHAPE = ClipShape(num_frames=17, frame_rate=24, height=64, width=64, sample_rate_hz=16000)
CANVASES = {"small": {"area_px": 64 * 64, "aspects": ["1:1"], "durations_s": [17 / 24]}}
STAGE = Stage.model_validate(
    {"conditions": {"kf2va": 1.0}, "num_steps": 220, "batch_size": 2, "learning_rate": 5e-3, "warmup_steps": 10,
     "guidance": {"form": "none"}}
)  # fmt: skip


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory, make_clip: Callable[..., Clip]) -> list[Clip]:
    """Three films of smooth moving colour, of 33 frames; the caption tells none from another."""
    folder, made = tmp_path_factory.mktemp("films"), list[Clip]()
    for name in "abc":
        noise = torch.from_numpy(np.random.default_rng(ord(name)).random((1, 3, 5, 2, 2)))
        big = torch.nn.functional.interpolate(noise, (33, 64, 64), mode="trilinear")[0]
        frames = np.ascontiguousarray((big.permute(1, 2, 3, 0).numpy() * 255).astype(np.uint8))
        write_mp4(folder / f"{name}.mp4", frames, np.zeros((2, 22000), np.float32), 24, 16000)
        made.append(make_clip(name, path=str(folder / f"{name}.mp4"), end_s=33 / 24, width=64, height=64))
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, ltx2_base: Path, films: list[Clip]) -> Path:
    """The tiny model, its latents normalised over the films: those of random weights hardly tell one from another."""
    folder = shutil.copytree(ltx2_base, tmp_path_factory.mktemp("zoo") / "normalised")
    vae = cast(Any, AutoencoderKLLTX2Video).from_pretrained(folder / "vae")
    seen = [torch.from_numpy(read(film, SHAPE)[0]).permute(3, 0, 1, 2)[None] / 127.5 - 1 for film in films]
    with torch.no_grad():
        latents = torch.cat([vae.encode(pixels).latent_dist.mode() for pixels in seen])
        vae.latents_mean.copy_(latents.mean((0, 2, 3, 4)))
        vae.latents_std.copy_(latents.std((0, 2, 3, 4)))
    vae.save_pretrained(folder / "vae")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: Path, films: list[Clip]) -> Path:
    """A store of the films, the last one in `test`; kf2va has the middle frame alone, as by default."""
    made = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        installed(patch)
        encode.run(config_of(made, model, films, canvases=CANVASES, modes=("t2va", "fl2va", "kf2va")))
    return made


def test_places_become_frames_of_every_length() -> None:
    assert keyframes_of("kf2va", (1.0, 0.5, 0.0, 0.501), 17) == ("first", "8", "16")
    assert keyframes_of("kf2va", (0.5,), 121) == ("60",)
    assert keyframes_of("fl2va", (0.5,), 17) == ("first", "last")
    assert keyframes_of("t2va", (0.5,), 17) == ()
    assert [frame_of(name) for name in ("first", "8", "last")] == [0, 8, -1]
    assert mode_of(("first", "8"), references=False) == mode_of(("8",), references=False) == "kf2va"
    assert mode_of(("first", "last"), references=False) == "fl2va"
    with pytest.raises(ValueError, match="references"):
        mode_of(("8",), references=True)


def test_the_store_gives_the_frame_that_the_clip_has_there(folder: Path, model: Path) -> None:
    store = LatentStore(folder / "latents")
    assert store.record["keyframes"] == [0.5]
    encoders = load_family(model).encoders
    for row in store.index.rows():
        given = store.conditions(row, "kf2va")
        assert {name for name in given if name.startswith("keyframe/")} == {"keyframe/8"}
        frames, _ = read(clip_of(folder, row.clip_id), SHAPE)
        assert torch.equal(given["keyframe/8"], encoders.encode_keyframe(frames[8]))
        assert set(store.conditions(row, "fl2va")) >= {"keyframe/first", "keyframe/last"}
        assert "keyframe/8" not in store.conditions(row, "fl2va")
        text, middle = (row.variants.index(mode) for mode in ("t2va", "kf2va"))
        assert row.num_tokens[middle] == row.num_tokens[text] + 4
        assert "8 2x2" in row.layouts[middle]


def clip_of(folder: Path, clip_id: str) -> Clip:
    clips = [clip for name in ("train", "test") for clip in read_records(folder / "splits" / f"{name}.parquet", Clip)]
    return next(clip for clip in clips if clip.clip_id == clip_id)


def test_places_decide_pictures_alone_and_only_of_clips_where_they_move(
    ltx2_base: Path, films: list[Clip], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = installed(monkeypatch)
    monkeypatch.setattr("tasks.indexing.judge", lambda *_: None)
    canvases = {**CANVASES, "long": {**CANVASES["small"], "durations_s": [33 / 24]}}

    def again(**changes: Any) -> dict[str, int]:
        return made_by(pool, config_of(tmp_path, ltx2_base, films[:1], **{"canvases": canvases, **changes}))

    both = ("t2va", "kf2va")
    assert again(modes=("t2va",)) == {"picture": 2, "sound": 2, "text": 2}
    bare = LatentStore(tmp_path / "latents").fingerprint
    assert again(modes=("t2va",), keyframes=(0.25,)) == {}
    assert LatentStore(tmp_path / "latents").fingerprint == bare
    assert again(modes=both) == {"picture": 2}
    assert again(modes=both, keyframes=(0.48,)) == {"picture": 1}  # frame 8 of 17 still, frame 16 of 33 no more
    assert again(modes=both, keyframes=(0, 0.48)) == {"picture": 2}
    store = LatentStore(tmp_path / "latents")
    found = [sorted(name for name in store.conditions(row, "kf2va") if "key" in name) for row in store.index.rows()]
    assert found == [["keyframe/15", "keyframe/first"], ["keyframe/8", "keyframe/first"]]


def planned(folder: Path, work: Path) -> Path:
    """The curriculum of the store's clips, for the one stage."""
    write_records(work / "clips.parquet", [clip_of(folder, f"{name}-000000") for name in "abc"], Clip)
    names = {"picture": "plan.png", "summary": "plan.json", "curriculum": "curriculum.parquet", "work": "plan"}
    paths = {name: work / file for name, file in names.items()} | {"clips": work / "clips.parquet"}
    config = plan.Config.model_validate({**paths, "latents": folder / "latents", "stages": {"all": STAGE}})
    plan.run(config)
    return config.curriculum


def sampled(family: Family, store: LatentStore, clip: str, keyframe_of: str) -> torch.Tensor:
    """The picture latents around the given frame, of a generation from one clip's caption and another's keyframe."""
    arrays = dict(store.conditions(store.index.find(f"{clip}-000000@small"), "kf2va"))
    arrays["keyframe/8"] = store.read(store.index.find(f"{keyframe_of}-000000@small"), "keyframe/8")
    return family.generate(Condition("kf2va", arrays), SHAPE, 7, 12)[0][:, 1]


@pytest.mark.timeout(600)
def test_a_model_trained_on_middle_frames_shows_the_one_it_is_given(folder: Path, model: Path, tmp_path: Path) -> None:
    store = LatentStore(folder / "latents")
    batch = read_batch(store, StepBatch(0, "kf2va", tuple(f"{n}-000000@small" for n in "ab"), ("kf2va", "kf2va")))
    before = load_family(model)
    noisy = Noisy(batch.video_BCFHW, batch.audio_BSCT, 0.5, 0.5, (0, 1))
    assert before.velocities(batch, noisy).video_BCFHW.shape == (2, 8, 3, 2, 2)
    assert before.num_given_frames(batch) == 0
    checkpoint = train.run(
        train.Config.model_validate(
            {"base": model, "latents": folder / "latents", "checkpoints": tmp_path / "checkpoints", "seed": 0,
             "curriculum": planned(folder, tmp_path), "work": tmp_path / "work", "stages": {"all": STAGE},
             "converted": tmp_path / "converted", "strategy": "ddp", "precision": "fp32", "recompute": "none",
             "accelerator": "cpu", "save_every": 100_000}
        ), "all",
    )  # fmt: skip
    after = load_family(model, weights=checkpoint / "transformer")
    for own, other in ("ab", "ba"):
        real = store.read(store.index.find(f"{own}-000000@small"), "video")[:, 1]
        right, swapped, untrained = (
            float((sampled(family, store, own, keyframe) - real).square().mean())
            for family, keyframe in ((after, own), (after, other), (before, own))
        )
        assert right < 0.5 * swapped
        assert right < 0.5 * untrained


def test_generate_takes_keyframes_by_number(ltx2_base: Path, tmp_path: Path) -> None:
    shades = {name: np.full((64, 64, 3), shade, np.uint8) for name, shade in (("dark", 20), ("light", 220))}
    for name, image in shades.items():
        Image.fromarray(image).save(tmp_path / f"{name}.png")
    given = {"base": ltx2_base, "splits": tmp_path, "generations": tmp_path / "generations", "prompt": "a red ball"}
    dark, light = tmp_path / "dark.png", tmp_path / "light.png"

    def made(name: str, **keyframes: Any) -> Path:
        settings = {**given, "shape": SHAPE, "num_inference_steps": 2, "output": tmp_path / name, **keyframes}
        return generate.run(generate.Config.model_validate(settings))[0]

    one = made("one", keyframes={9: light})
    frames, waveform = Generator.load(ltx2_base, None, SHAPE).generate(
        ["a red ball"], keyframes=[{9: shades["light"]}], seed=0, num_inference_steps=2
    )[0]
    write_mp4(tmp_path / "own.mp4", frames, waveform, 24, 16000)
    assert one.read_bytes() == (tmp_path / "own.mp4").read_bytes()
    assert json.loads(one.with_suffix(".json").read_text())["request"]["keyframes"] == {"9": str(light)}
    others = [{9: dark}, {10: light}, {0: light}, {0: dark, 9: light}]
    assert len({one.read_bytes(), *(made(f"other{n}", keyframes=it).read_bytes() for n, it in enumerate(others))}) == 5
    start = made("start", first_frame=dark, keyframes={9: light})
    assert start.read_bytes() == (tmp_path / "other3" / start.name).read_bytes()


def test_a_model_that_has_no_place_for_a_keyframe_says_so_in_one_line(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    shape = SHAPE.model_copy(update={"num_frames": 22, "height": 16, "width": 16, "sample_rate_hz": 8000})
    (tmp_path / "params.yaml").write_text(json.dumps({"generate": {
        "base": str(base), "splits": "s", "generations": "g", "num_inference_steps": 2, "prompt": "a ball",
        "shape": shape.model_dump(), "output": str(tmp_path / "out")
    }}))  # fmt: skip
    asked = ["generate", "--params", str(tmp_path / "params.yaml"), f"keyframes.9={tmp_path / 'a.png'}"]
    assert main(asked) == EXIT_CONFIGURATION
    said = capsys.readouterr().err
    assert "MiniMax-H3 has no kf2va: it takes keyframes at the first and the last frame alone" in said
    assert main([*asked[:3], f"keyframes.22={tmp_path / 'a.png'}"]) == EXIT_CONFIGURATION
    assert "keyframes.22: the clip has no frame 22; shape.num_frames = 22 gives frames 0 to 21" in (
        capsys.readouterr().err
    )
    with pytest.raises(ValueError, match="MiniMax-H3 has no kf2va"):
        encode_condition(load_family(base).encoders, "a ball", keyframes={9: np.zeros((16, 16, 3), np.uint8)})
