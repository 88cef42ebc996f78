"""The H3 family against the stock diffusers pipeline and against closed forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from diffusers import ModularPipeline
from diffusers.modular_pipelines import MiniMaxH3Blocks
from PIL import Image

from data.latents import LatentStore
from data.records import ClipShape
from data.sampler import StepBatch
from data.world import scene
from models.families import Family
from models.families.h3 import ShortH3Pipeline, count_parameters_on_meta
from models.flow_matching import draw
from models.sft import read_batch

SHAPE = ClipShape(num_frames=22, frame_rate=24, height=16, width=16, sample_rate_hz=8000)
SCENE = scene("new", 3, 22 / 24, 24, 16, 8000, "bounce")


def stock(base: Path, mode: str, **given: Any) -> tuple[np.ndarray, np.ndarray]:
    """Generate with the pipeline diffusers ships, only its 5 s floor lowered."""
    loaded = cast(Any, ModularPipeline).from_pretrained(str(base))
    loaded.load_components(pretrained_model_name_or_path=str(base), dtype=torch.float32)
    pipe = cast(Any, MiniMaxH3Blocks()).get_workflow(mode).init_pipeline()
    pipe.__class__ = ShortH3Pipeline
    pipe.update_components(**{name: part for name, part in loaded.components.items() if name in pipe.component_names})
    pipe.set_progress_bar_config(disable=True)
    state = pipe(
        num_frames=22, height=16, width=16, num_inference_steps=4, generator=torch.Generator().manual_seed(11),
        output_type="pt", **given,
    )  # fmt: skip
    frames = (state.get("videos")[0].permute(0, 2, 3, 1) * 255).round().to(torch.uint8).numpy()
    return frames, state.get("audio")[0].numpy()


@pytest.mark.parametrize("mode", ["t2va", "fl2va_first", "fl2va"])
def test_generation_equals_the_stock_pipeline(base: Path, family: Family, mode: str) -> None:
    first = SCENE.frames_FHWC[0] if mode != "t2va" else None
    last = SCENE.frames_FHWC[-1] if mode == "fl2va" else None
    named = {"image": first, "last_image": last}
    given = {name: Image.fromarray(frame) for name, frame in named.items() if frame is not None}
    frames, sound = stock(base, mode.split("_", maxsplit=1)[0], prompt=SCENE.caption, **given)
    condition = family.encode_condition(SCENE.caption, first, last)
    ours = family.decode(*family.generate(condition, SHAPE, seed=11, num_inference_steps=4), SHAPE)
    assert condition.mode == mode
    assert np.abs(ours[0].astype(int) - frames.astype(int)).max() <= 1
    np.testing.assert_allclose(ours[1], np.clip(sound[:, : SHAPE.num_samples], -1, 1), atol=1e-5)


def test_generation_repeats_by_seed_and_follows_its_keyframes(family: Family) -> None:
    condition = family.encode_condition(SCENE.caption, SCENE.frames_FHWC[0], None)
    other = family.encode_condition(SCENE.caption, 255 - SCENE.frames_FHWC[0], None)
    once, again, turned = (family.generate(item, SHAPE, 1, 3)[0] for item in (condition, condition, other))
    assert torch.equal(once, again)
    assert not torch.equal(once, turned)
    assert not torch.equal(once, family.generate(condition, SHAPE, 2, 3)[0])


def test_a_perfect_velocity_has_no_loss_and_silence_carries_none(family: Family, store_folder: Path) -> None:
    store = LatentStore(store_folder)
    batch = read_batch(store, StepBatch(0, "fl2va", ("clip-4", "clip-5")))
    h3 = cast(Any, family)
    randomness = draw(0, 3)
    replay = draw(0, 3).generator
    torch.randn(batch.keyframes_BKCHW.shape, generator=replay)
    clean = (h3.video_rows(batch.video_BCFHW), batch.audio_BSCT.permute(0, 1, 3, 2).flatten(1, 2))
    noise = [torch.randn(item.shape, generator=replay) for item in clean]
    h3.predict = Mock(return_value=tuple(a - b for a, b in zip(clean, noise, strict=True)))
    losses = family.losses(batch, randomness)
    assert float(losses.video_B.max()) < 1e-10
    h3.predict = Mock(return_value=tuple(torch.zeros_like(rows) for rows in clean))
    losses = h3.losses(batch, draw(0, 3))
    assert float(losses.audio_B[0]) > 0.1
    assert float(losses.audio_B[1]) == 0.0


def test_shapes_off_the_grid_are_refused_by_name(family: Family) -> None:
    for wrong, word in (
        ({"num_frames": 23}, "17n"),
        ({"frame_rate": 25}, "24"),
        ({"height": 20}, "multiples"),
        ({"sample_rate_hz": 16000}, "8000"),
    ):
        with pytest.raises(ValueError, match=word):
            family.check(ClipShape(**{**SHAPE.model_dump(), **wrong}))


def test_the_released_configuration_builds_on_the_meta_device() -> None:
    released: dict[str, Any] = {}  # diffusers' defaults are the released model
    assert count_parameters_on_meta(released) == 33_122_992_896


def test_text_layouts_are_equally_long_within_a_kind(base: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = cast(Any, AutoTokenizer).from_pretrained(base / "tokenizer")
    lengths = {
        kind: {
            len(tokenizer(scene(half, seed, 0.1, 24, 8, 8000, kind).caption)["input_ids"])
            for half in ("base", "new")
            for seed in range(12)
        }
        for kind in ("bounce", "collide", "speak")
    }
    assert all(len(values) == 1 for values in lengths.values())


def test_the_model_folder_names_no_place(base: Path) -> None:
    index = json.loads((base / "modular_model_index.json").read_text())
    assert index["vae"][2]["pretrained_model_name_or_path"] == "."
    assert str(base) not in (base / "modular_model_index.json").read_text()
