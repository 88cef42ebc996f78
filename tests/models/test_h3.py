"""The H3 family against the stock diffusers pipeline and against closed forms."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from diffusers import ModularPipeline
from diffusers.modular_pipelines import MiniMaxH3Blocks
from diffusers.modular_pipelines.minimax_h3.references import MiniMaxH3ImageReference, MiniMaxH3VideoReference
from PIL import Image

from data.conditions import KEYFRAMES, Mode
from data.latents import LatentStore
from data.records import ClipShape
from data.stage import Guidance, NoiseLevels
from data.world import scene
from models.families import Batch, Condition, Family, Noisy, Reference, encode_condition, load_family
from models.families.h3 import PINNED, count_parameters_on_meta
from models.families.h3_encoders import ShortH3Pipeline
from models.flow_matching import CONDITIONS, PICTURE, SOUND, noise_of, seed_of
from models.objective import Levels, Losses, Objective, levels_of
from tests.models.trials import batch_of

SHAPE = ClipShape(num_frames=22, frame_rate=24, height=16, width=16, sample_rate_hz=8000)
SCENE = scene("new", 3, 22 / 24, 24, 16, 8000, "bounce")
OTHER = scene("new", 4, 22 / 24, 24, 32, 8000, "bounce")
REFERENCES = (
    Reference("image", OTHER.frames_FHWC[5:6]),
    Reference("video", OTHER.frames_FHWC, OTHER.waveform_CT),
)


def stock(base: Path, mode: Mode, **given: Any) -> tuple[np.ndarray, np.ndarray]:
    """Generate with the pipeline diffusers ships, only its 5 s floor lowered."""
    loaded = cast(Any, ModularPipeline).from_pretrained(str(base))
    loaded.load_components(pretrained_model_name_or_path=str(base), dtype=torch.float32)
    workflow = mode.split("_", maxsplit=1)[0]
    pipe = cast(Any, MiniMaxH3Blocks()).get_workflow(workflow).init_pipeline(str(base))
    pipe.__class__ = ShortH3Pipeline
    parts = {**loaded.components, "transformer_ref": loaded.components["transformer"]}
    pipe.update_components(**{name: part for name, part in parts.items() if name in pipe.component_names})
    pipe.set_progress_bar_config(disable=True)
    state = pipe(
        num_frames=22, height=16, width=16, num_inference_steps=4, generator=torch.Generator().manual_seed(11),
        output_type="pt", **given,
    )  # fmt: skip
    frames = (state.get("videos")[0].permute(0, 2, 3, 1) * 255).round().to(torch.uint8).numpy()
    return frames, state.get("audio")[0].numpy()


def condition_of(family: Family, mode: Mode) -> Condition:
    """What the scene's generation is given in a mode."""
    ends = {"first": SCENE.frames_FHWC[0], "last": SCENE.frames_FHWC[-1]}
    given = {name: ends[name] for name in KEYFRAMES.get(mode, ())}
    references = REFERENCES if mode == "ref2va" else ()
    condition = encode_condition(family.encoders, SCENE.caption, **given, references=references, shape=SHAPE)
    assert condition.mode == mode
    return condition


@pytest.mark.parametrize("mode", ["t2va", "fl2va_first", "fl2va_last", "fl2va", "ref2va"])
def test_generation_equals_the_stock_pipeline(base: Path, family: Family, mode: Mode) -> None:
    named = {"first": ("image", 0), "last": ("last_image", -1)}
    ends = [named[name] for name in KEYFRAMES.get(mode, ())]
    given: dict[str, Any] = {name: Image.fromarray(SCENE.frames_FHWC[place]) for name, place in ends}
    if mode == "ref2va":
        seen, heard = OTHER.frames_FHWC, torch.from_numpy(OTHER.waveform_CT)
        given = {
            "references": [
                MiniMaxH3ImageReference(Image.fromarray(seen[5])),
                MiniMaxH3VideoReference(seen, 24.0, heard),
            ]
        }
    frames, sound = stock(base, mode, prompt=SCENE.caption, **given)
    made = family.generate(condition_of(family, mode), SHAPE, seed=11, num_inference_steps=4)
    ours = family.encoders.decode(*made, SHAPE)
    assert np.abs(ours[0].astype(int) - frames.astype(int)).max() <= 1
    np.testing.assert_allclose(ours[1], np.clip(sound[:, : SHAPE.num_samples], -1, 1), atol=1e-5)


def test_generation_repeats_by_seed_and_follows_its_conditions(family: Family) -> None:
    first = SCENE.frames_FHWC[0]
    seen, turned = (encode_condition(family.encoders, SCENE.caption, frame) for frame in (first, 255 - first))
    once, again, other = (family.generate(item, SHAPE, 1, 3)[0] for item in (seen, seen, turned))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    assert not torch.equal(once, family.generate(seen, SHAPE, 2, 3)[0])
    there, back = (
        encode_condition(family.encoders, SCENE.caption, references=given, shape=SHAPE)
        for given in (REFERENCES, REFERENCES[::-1])
    )
    assert not torch.equal(family.generate(there, SHAPE, 1, 3)[0], family.generate(back, SHAPE, 1, 3)[0])


def levels(family: Family, batch: Batch) -> Levels:
    return levels_of(family, NoiseLevels(), batch, 0, 3)


def losses_of(family: Family, batch: Batch) -> Losses:
    """Of a step's first clips."""
    seeds = [(0, 3, place) for place in range(len(batch.has_audio_B))]
    return Objective(family, Guidance(form="none")).losses(batch, levels(family, batch), seeds)


def clean_and_noise(family: Family, batch: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Rows of picture and sound, as `losses_of` mixes them."""
    places = range(len(batch.has_audio_B))
    seeds = [[seed_of(0, 3, place, stream) for place in places] for stream in (PICTURE, SOUND)]
    noise = [noise_of(seeds[0], batch.video_BCFHW), noise_of(seeds[1], batch.audio_BSCT)]
    clean, noisy = (
        [cast(Any, family).video_rows(video), audio.permute(0, 1, 3, 2).flatten(1, 2)]
        for video, audio in ((batch.video_BCFHW, batch.audio_BSCT), noise)
    )
    return clean, noisy


@pytest.mark.parametrize("variant", ["t2va", "fl2va", "ref2va.0", "a2v", "v2a"])
def test_a_perfect_velocity_has_no_loss(family: Family, store_folder: Path, variant: str) -> None:
    batch = batch_of(store_folder, variant, 1, 2)
    clean, noise = clean_and_noise(family, batch)
    h3 = cast(Any, family)
    h3.predict = Mock(return_value=tuple(a - b for a, b in zip(clean, noise, strict=True)))
    losses = losses_of(family, batch)
    assert float(torch.cat([losses.video_B, losses.audio_B]).max()) < 1e-10
    h3.predict = Mock(return_value=tuple(torch.zeros_like(rows) for rows in clean))
    losses = losses_of(family, batch)
    for found, given_in in ((losses.video_B, "v2a"), (losses.audio_B, "a2v")):
        assert (found == 0).all() if variant == given_in else (found > 0.1).all()


@pytest.mark.parametrize(("variant", "given"), [("a2v", 1), ("v2a", 0)])
def test_what_is_given_whole_stays_clean_at_its_end_of_time(
    family: Family, store_folder: Path, variant: str, given: int
) -> None:
    batch, h3 = batch_of(store_folder, variant, 1, 2), cast(Any, family)
    clean, _ = clean_and_noise(family, batch)
    seen = Mock(wraps=family.transformer.forward)
    h3.transformer.forward = seen
    losses_of(family, batch)
    passed = seen.call_args.kwargs
    rows = (passed["hidden_states"], passed["audio_hidden_states"])
    assert torch.equal(rows[given], clean[given])
    assert not torch.equal(rows[1 - given], clean[1 - given])
    times = passed["timestep"][passed["timestep_indices"]]
    assert (times[passed["audio_indices" if given else "video_indices"]] == 1).all()
    assert (times[passed["video_indices" if given else "audio_indices"]] < 0.999).all()
    assert levels(family, batch)[given] == 0.0


def test_references_are_pinned_or_clean_and_carry_no_loss(family: Family, store_folder: Path) -> None:
    batch, h3 = batch_of(store_folder, "ref2va.0", 1, 2), cast(Any, family)
    seen = Mock(wraps=family.transformer.forward)
    h3.transformer.forward = seen
    losses = losses_of(family, batch)
    passed, conditions = seen.call_args.kwargs, batch.conditions
    times = passed["timestep"][passed["timestep_indices"]]
    sound = conditions["references/1/audio"].permute(0, 1, 3, 2).flatten(1, 2)
    picture = torch.cat([h3.video_rows(conditions[f"references/{name}"]) for name in ("0/image", "1/video")], dim=1)
    assert torch.equal(passed["audio_hidden_states"][:, : sound.shape[1]], sound)
    assert (times[passed["audio_indices"][: sound.shape[1]]] == 1).all()
    shown = passed["hidden_states"][:, : picture.shape[1]]
    assert 0 < float((shown - picture).abs().max()) < 0.01
    assert torch.equal(times[passed["video_indices"][: picture.shape[1]]].unique(), torch.tensor([PINNED]))
    (losses.video_B.sum() + losses.audio_B.sum()).backward()
    assert len(passed["token_tags"]) == num_tokens(store_folder, "ref2va.0")


def test_keyframes_are_pinned_by_noise_of_their_own_clip(family: Family, store_folder: Path) -> None:
    h3, shown = cast(Any, family), []
    for numbers in ((1, 2), (2,)):
        batch = batch_of(store_folder, "fl2va", *numbers)
        seen = Mock(wraps=family.transformer.forward)
        h3.transformer.forward = seen
        noisy = Noisy(
            batch.video_BCFHW, batch.audio_BSCT, 0.5, 0.5, tuple(seed_of(0, 3, place, CONDITIONS) for place in numbers)
        )
        family.velocities(batch, noisy)
        h3.transformer.forward = seen._mock_wraps
        frames = [h3.video_rows(batch.conditions[f"keyframe/{name}"][:, :, None]) for name in ("first", "last")]
        rows = torch.cat(frames, dim=1)
        shown.append(seen.call_args.kwargs["hidden_states"][:, : rows.shape[1]])
    assert torch.equal(shown[0][1:], shown[1])
    noise = ((shown[1] - PINNED * rows) / (1 - PINNED)).unflatten(1, (2, -1))[0].flatten(1)
    assert float(noise.std()) == pytest.approx(1.0, abs=0.1)
    assert abs(float(torch.corrcoef(noise)[0, 1])) < 0.2


def num_tokens(store_folder: Path, variant: str) -> int:
    row = LatentStore(store_folder).index.row(1)
    return row.num_tokens[row.variants.index(variant)]


def test_num_tokens_equals_the_stock_layout_in_every_variant(family: Family, store_folder: Path) -> None:
    row = LatentStore(store_folder).index.row(1)
    assert len(row.variants) == 8
    for variant in row.variants:
        batch = batch_of(store_folder, variant, 1)
        grid, num_audio = tuple(batch.video_BCFHW.shape[2:]), batch.audio_BSCT.shape[-1]
        layout = cast(Any, family).layout(batch.mode, batch.conditions, grid, num_audio)
        assert len(layout.fields["token_tags"]) == num_tokens(store_folder, variant)


def test_texts_of_other_layout_are_not_packed_together(family: Family, store_folder: Path) -> None:
    batch = batch_of(store_folder, "fl2va", 1, 2)
    batch.conditions["text/tags"][1, 0] += 1
    with pytest.raises(ValueError, match="differ in the layout of their text"):
        losses_of(family, batch)


def test_generation_from_sound_or_picture_alone_is_refused(family: Family) -> None:
    with pytest.raises(ValueError, match="mode a2v"):
        family.generate(condition_of(family, "t2va")._replace(mode="a2v"), SHAPE, 0, 2)


def test_the_text_side_is_what_takes_the_text_in(family: Family) -> None:
    names = [name for name, _ in family.transformer.named_parameters()]
    chosen = [name for name in names if re.fullmatch(family.text_side, name)]
    assert {name.partition(".")[0] for name in chosen} == {"context_embedder", "token_refiner"}
    assert 0 < len(chosen) < len(names)
    assert not [name for name in set(names) - set(chosen) if "refiner" in name or "context" in name]


def test_training_from_latents_needs_no_encoder_weights(base: Path, store_folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(base, bare, ignore=shutil.ignore_patterns("text_encoder", "tokenizer", "processor"))
    for name in ("vae", "audio_vae"):
        (bare / name / "diffusion_pytorch_model.safetensors").unlink()
    batch = batch_of(store_folder, "fl2va", 1, 2)
    expected, found = (losses_of(load_family(folder), batch) for folder in (base, bare))
    assert torch.equal(expected.video_B, found.video_B)


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
