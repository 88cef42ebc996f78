"""Training and generating with LTX-2 against diffusers' own pipelines, closed forms and the published sampler."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from diffusers import LTX2ConditionPipeline, LTX2InContextPipeline, LTX2Pipeline, LTX2VideoTransformer3DModel
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from data.conditions import KEYFRAMES, Mode
from data.files import sha256
from data.records import ClipShape
from models import adapters, tiny_ltx2
from models.families import Batch, Condition, Noisy, Reference, encode_condition, load_family
from models.families.ltx2 import LTX2, sigma_at

VERSIONS = ("2.0", "2.3")
SHAPE = ClipShape(num_frames=17, frame_rate=24, height=64, width=96, sample_rate_hz=16000)
CAPTION = "a red ball falls, and rings like a bell"
TRAINED: tuple[Mode, ...] = ("t2va", "fl2va_first", "fl2va_last", "fl2va", "ref2va", "a2v", "v2a")


@pytest.fixture(scope="module")
def bases(ltx2_base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    older = tmp_path_factory.mktemp("zoo") / "tiny-ltx2.0"
    tiny_ltx2.save(tiny_ltx2.build(4, "2.0"), older)
    return {"2.0": older, "2.3": ltx2_base}


@pytest.fixture(scope="module")
def families(bases: dict[str, Path]) -> dict[str, LTX2]:
    return {version: cast(LTX2, load_family(base)) for version, base in bases.items()}


@pytest.fixture(scope="module")
def pipes(bases: dict[str, Path]) -> dict[str, Any]:
    return {version: cast(Any, LTX2Pipeline).from_pretrained(str(base)) for version, base in bases.items()}


@pytest.fixture(scope="module")
def frames_FHWC() -> np.ndarray:  # noqa: N802
    """Smooth moving colour."""
    noise = torch.from_numpy(np.random.default_rng(1).random((1, 3, 3, 3, 3)))
    big = torch.nn.functional.interpolate(noise, (17, 64, 96), mode="trilinear")[0]
    return (big.permute(1, 2, 3, 0).numpy() * 255).astype(np.uint8)


def randn(seed: int, *size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# -- one step ----------------------------------------------------------------------------------------------------------


def batch_of(family: LTX2, mode: Mode, num_clips: int = 2, grid: tuple[int, int, int] = (3, 2, 3)) -> Batch:
    """Clips of random latents in double precision, with real text."""
    texts = [family.encoders.encode_text(mode, CAPTION[: 9 + 9 * clip]) for clip in range(num_clips)]
    conditions = {f"text/{name}": torch.stack([text[name] for text in texts]) for name in texts[0]}
    for number, name in enumerate(KEYFRAMES.get(mode, ())):
        conditions[f"keyframe/{name}"] = randn(10 + number, num_clips, 8, *grid[1:])
    if mode == "ref2va":
        conditions["references/0/video"] = randn(20, num_clips, 8, 2, 2, 3)
        conditions["references/1/image"] = randn(21, num_clips, 8, 1, 3, 2)
    video, audio = randn(1, num_clips, 8, *grid), randn(2, num_clips, 1, 32, 18)
    return Batch(mode, video, audio, torch.ones(num_clips), conditions, frame_rate=24)


NOISE = (3, 4)
"""Seeds of the noise of picture and sound."""


def noisy_of(batch: Batch, sigma_video: float, sigma_audio: float) -> Noisy:
    """The batch at two noise levels; what the mode gives whole lies at none."""
    sigmas = [sigma_video * (batch.mode != "v2a"), sigma_audio * (batch.mode != "a2v")]
    latents = [
        (1 - sigma) * clean + sigma * randn(seed, *clean.shape).to(clean)
        for sigma, clean, seed in zip(sigmas, (batch.video_BCFHW, batch.audio_BSCT), NOISE, strict=True)
    ]
    return Noisy(latents[0], latents[1], sigmas[0], sigmas[1], tuple(range(len(batch.video_BCFHW))))


def losses(family: LTX2, batch: Batch, noisy: Noisy, sign: float = 1.0) -> tuple[Tensor, Tensor]:
    """Mean squared errors of the velocities of picture and sound, without what is given."""
    velocities = family.velocities(batch, noisy)
    num_given = family.num_given_frames(batch.mode)
    errors = [
        sign * predicted - (clean - randn(seed, *clean.shape).to(clean))
        for predicted, clean, seed in zip(velocities, (batch.video_BCFHW, batch.audio_BSCT), NOISE, strict=True)
    ]
    given_whole = (batch.mode == "v2a", batch.mode == "a2v")
    squares = errors[0][:, :, num_given:].square().mean(), errors[1].square().mean()
    return squares[0] * (not given_whole[0]), squares[1] * (not given_whole[1])


def packed(latents_BCFHW: Tensor) -> Tensor:
    return latents_BCFHW.flatten(2).transpose(1, 2)


def boxes(grid: tuple[int, ...]) -> list[list[tuple[float, float]]]:
    """Begin and end of every latent in s, px and px: 8 frames each, but the first, which is one frame at time 0."""
    return [
        [(max(0, 8 * f - 7) / 24, (8 * f + 1) / 24), (32 * h, 32 * h + 32), (32 * w, 32 * w + 32)]
        for f in range(grid[0])
        for h in range(grid[1])
        for w in range(grid[2])
    ]


def by_hand(transformer: Any, pipe: Any, batch: Batch, sigma_video: float, sigma_audio: float) -> tuple[Tensor, Tensor]:
    """Losses of a step written down from the papers and pipelines, with none of the family's code."""
    mode, newer = batch.mode, pipe.connectors.config.per_modality_projections
    sigma_video, sigma_audio = sigma_video * (mode != "v2a"), sigma_audio * (mode != "a2v")
    clean, heard = packed(batch.video_BCFHW), batch.audio_BSCT[:, 0].transpose(1, 2)
    noise = packed(randn(NOISE[0], *batch.video_BCFHW.shape))
    noise_audio = randn(NOISE[1], *batch.audio_BSCT.shape)[:, 0].transpose(1, 2)
    tokens = (1 - sigma_video) * clean + sigma_video * noise
    (_, num_tokens, _), given, where = tokens.shape, torch.zeros(clean.shape[1]), boxes((3, 2, 3))
    if mode in ("fl2va_first", "fl2va"):
        tokens = torch.cat([packed(batch.conditions["keyframe/first"][:, :, None]), tokens[:, 6:]], 1)
        given[:6] = 1
    appended: list[Tensor] = []
    if mode in ("fl2va_last", "fl2va"):
        appended = [batch.conditions["keyframe/last"][:, :, None]]
        where = where + [[(9 / 24, 10 / 24), *box[1:]] for box in boxes((1, 2, 3))]
    if mode == "ref2va":
        appended = [batch.conditions["references/0/video"], batch.conditions["references/1/image"]]
        where = where + boxes((2, 2, 3)) + boxes((1, 3, 2))
    tokens = torch.cat([tokens, *map(packed, appended)], 1)
    timestep = torch.cat([1 - given, torch.zeros(tokens.shape[1] - num_tokens)]) * sigma_video * 1000
    coords = torch.tensor(where).permute(1, 0, 2)[None].repeat(2, 1, 1, 1)
    times = [(max(0, 4 * t - 3) * 160 / 16000, (4 * t + 1) * 160 / 16000) for t in range(18)]
    with torch.no_grad():
        prompts = [CAPTION[:9], CAPTION[:18]]
        states, mask, _, _ = pipe.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=128)
        text, text_audio, mask = pipe.connectors(states, mask, padding_side="left")
    levels = [torch.full((2,), sigma * 1000) for sigma in (sigma_video, sigma_audio)]
    out, out_audio = transformer(
        hidden_states=tokens,
        audio_hidden_states=(1 - sigma_audio) * heard + sigma_audio * noise_audio,
        encoder_hidden_states=text.double(),
        audio_encoder_hidden_states=text_audio.double(),
        timestep=timestep[None].repeat(2, 1),
        audio_timestep=levels[1][:, None].repeat(1, 18),
        sigma=levels[0],
        audio_sigma=levels[1],
        encoder_attention_mask=mask,
        audio_encoder_attention_mask=mask,
        video_coords=coords,
        audio_coords=torch.tensor(times)[None, None].repeat(2, 1, 1, 1),
        use_cross_timestep=newer,
        return_dict=False,
    )
    error = ((out[:, :num_tokens] - (noise - clean)) ** 2)[:, given == 0].mean()
    error_audio = ((out_audio - (noise_audio - heard)) ** 2).mean()
    return error * (mode != "v2a"), error_audio * (mode != "a2v")


@pytest.mark.parametrize("mode", TRAINED)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_step_equals_one_written_by_hand_in_loss_and_all_gradients(
    bases: dict[str, Path], pipes: dict[str, Any], version: str, mode: Mode
) -> None:
    family = cast(LTX2, load_family(bases[version]))
    family.transformer.double()
    raw = cast(Any, LTX2VideoTransformer3DModel).from_pretrained(str(bases[version] / "transformer")).double()
    batch = batch_of(family, mode)
    ours = losses(family, batch, noisy_of(batch, 0.7, 0.4))
    wanted = by_hand(raw, pipes[version], batch, 0.7, 0.4)
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    sum(ours).backward()  # type: ignore[union-attr]
    sum(wanted).backward()  # type: ignore[union-attr]
    others = dict(raw.named_parameters())
    for name, weight in family.transformer.named_parameters():
        assert (weight.grad is None) == (others[name].grad is None), name
        if weight.grad is not None:
            torch.testing.assert_close(weight.grad, others[name].grad, rtol=1e-6, atol=1e-10, msg=name)
    told = {name: float(weight.grad.abs().max()) for name, weight in family.transformer.named_parameters()
            if weight.grad is not None}  # fmt: skip
    for stream in ("", "audio_"):  # given whole, a stream is still looked at by the other
        assert told[f"transformer_blocks.0.{stream}ff.net.2.weight"] > 0
        assert told[f"{stream}proj_in.weight"] > 0


# -- generation --------------------------------------------------------------------------------------------------------

STEPS, SEED = 3, 11


def stock(pipe: Any, kind: Any, **given: Any) -> tuple[Tensor, Tensor]:
    """Normalised latents that a stock pipeline ends with, without guidance, as tokens of the clip alone."""
    chosen = kind(**{name: part for name, part in pipe.components.items() if name in parts_of(kind)})
    chosen.set_progress_bar_config(disable=True)
    chosen._callback_tensor_inputs = ["latents", "audio_latents"]
    seen: dict[str, Tensor] = {}
    chosen(
        prompt=CAPTION, height=64, width=96, num_frames=17, frame_rate=24.0, num_inference_steps=STEPS,
        guidance_scale=1.0, stg_scale=0.0, modality_scale=1.0, guidance_rescale=0.0, audio_guidance_scale=1.0,
        audio_stg_scale=0.0, audio_modality_scale=1.0, audio_guidance_rescale=0.0,
        use_cross_timestep=pipe.connectors.config.per_modality_projections, max_sequence_length=128,
        generator=torch.Generator().manual_seed(SEED), output_type="latent",
        callback_on_step_end=lambda *told: seen.update(told[3]) or {},
        callback_on_step_end_tensor_inputs=["latents", "audio_latents"], **given,
    )  # fmt: skip
    return seen["latents"][:, :18], seen["audio_latents"]


def parts_of(kind: Any) -> set[str]:
    return set(kind._get_signature_types())


def assert_equal_to_the_bit(made: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    assert made[0].isfinite().all()
    assert torch.equal(packed(made[0][None]), wanted[0])
    assert torch.equal(made[1].transpose(1, 2), wanted[1])


@pytest.mark.parametrize("version", VERSIONS)
def test_generation_from_text_equals_the_stock_pipeline(
    families: dict[str, LTX2], pipes: dict[str, Any], version: str
) -> None:
    family = families[version]
    made = family.generate(encode_condition(family.encoders, CAPTION), SHAPE, SEED, STEPS)
    assert_equal_to_the_bit(made, stock(pipes[version], LTX2Pipeline))


@pytest.mark.parametrize("mode", [*KEYFRAMES, "numbered"])
@pytest.mark.parametrize("version", VERSIONS)
def test_generation_from_keyframes_equals_the_stock_pipeline(
    families: dict[str, LTX2], pipes: dict[str, Any], frames_FHWC: np.ndarray, version: str, mode: str
) -> None:
    family, ends = families[version], {"first": (0, 0), "last": (16, -1), "1": (5, 1)}
    names = KEYFRAMES[cast(Mode, mode)] if mode in KEYFRAMES else ("first", "1", "last")
    asked = [LTX2VideoCondition(Image.fromarray(frames_FHWC[ends[name][0]]), ends[name][1]) for name in names]
    ours = {name: frames_FHWC[ends[name][0]] for name in names if name != "1"}
    condition = encode_condition(family.encoders, CAPTION, **ours)
    if "1" in names:
        condition.arrays["keyframe/1"] = family.encoders.encode_keyframe(frames_FHWC[5])
    made = family.generate(condition, SHAPE, SEED, STEPS)
    assert_equal_to_the_bit(made, stock(pipes[version], LTX2ConditionPipeline, conditions=asked))
    if "first" in names:
        assert torch.equal(made[0][:, 0], condition.arrays["keyframe/first"])


@pytest.mark.parametrize("version", VERSIONS)
def test_generation_from_references_equals_the_stock_pipeline(
    families: dict[str, LTX2], pipes: dict[str, Any], frames_FHWC: np.ndarray, version: str
) -> None:
    family = families[version]
    references = [Reference("video", frames_FHWC[:9]), Reference("image", frames_FHWC[12:13])]
    frames = [[Image.fromarray(frame) for frame in cast(Any, item.frames_FHWC)] for item in references]
    asked = [LTX2ReferenceCondition(item) for item in frames]
    condition = encode_condition(family.encoders, CAPTION, references=references, shape=SHAPE)
    made = family.generate(condition, SHAPE, SEED, STEPS)
    assert_equal_to_the_bit(made, stock(pipes[version], LTX2InContextPipeline, reference_conditions=asked))
