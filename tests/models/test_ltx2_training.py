"""Training and generating with LTX-2 against diffusers' own pipelines, closed forms and the published sampler."""

from __future__ import annotations

import copy
import re
import shutil
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
from models.families.weights import load_transformer, save_transformer

VERSIONS = ("2.0", "2.3")
SHAPE = ClipShape(num_frames=17, frame_rate=24, height=64, width=96, sample_rate_hz=16000)
CAPTION = "a red ball falls, and rings like a bell"
TRAINED: tuple[Mode, ...] = ("t2va", "fl2va_first", "fl2va_last", "fl2va", "ref2va", "a2v", "v2a", "kf2va")
BETWEEN = "5"
"""Where the batches below have a keyframe in mode kf2va, beside the first one."""


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
    for number, name in enumerate(("first", BETWEEN) if mode == "kf2va" else KEYFRAMES.get(mode, ())):
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
    num_given = family.num_given_frames(batch)
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
    if mode in ("fl2va_first", "fl2va", "kf2va"):
        tokens = torch.cat([packed(batch.conditions["keyframe/first"][:, :, None]), tokens[:, 6:]], 1)
        given[:6] = 1
    appended: list[Tensor] = []
    if mode in ("fl2va_last", "fl2va"):
        appended = [batch.conditions["keyframe/last"][:, :, None]]
        where = where + [[(9 / 24, 10 / 24), *box[1:]] for box in boxes((1, 2, 3))]
    if mode == "kf2va":
        appended = [batch.conditions["keyframe/5"][:, :, None]]
        where = where + [[(5 / 24, 6 / 24), *box[1:]] for box in boxes((1, 2, 3))]
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

    def keep(_pipe: Any, _step: int, _timestep: Any, told: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.update(told)
        return {}

    chosen(
        prompt=CAPTION, height=64, width=96, num_frames=17, frame_rate=24.0, num_inference_steps=STEPS,
        guidance_scale=1.0, stg_scale=0.0, modality_scale=1.0, guidance_rescale=0.0, audio_guidance_scale=1.0,
        audio_stg_scale=0.0, audio_modality_scale=1.0, audio_guidance_rescale=0.0,
        use_cross_timestep=pipe.connectors.config.per_modality_projections, max_sequence_length=128,
        generator=torch.Generator().manual_seed(SEED), output_type="latent",
        callback_on_step_end=keep,
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
    between = {1: frames_FHWC[5]} if "1" in names else {}
    condition = encode_condition(family.encoders, CAPTION, **ours, keyframes=between)
    assert condition.mode == ("kf2va" if between else mode)
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


def test_generation_from_sound_or_picture_alone_is_refused(families: dict[str, LTX2]) -> None:
    condition = encode_condition(families["2.3"].encoders, CAPTION)
    for mode in ("a2v", "v2a"):
        with pytest.raises(ValueError, match=f"mode {mode} is for training only"):
            families["2.3"].generate(condition._replace(mode=mode), SHAPE, 0, 2)


def test_sound_has_one_length_in_training_generation_and_encoding(families: dict[str, LTX2]) -> None:
    """The autoencoder would give 127 latents for 121 frames; the pipelines generate 126."""
    family, shape = families["2.3"], SHAPE.model_copy(update={"num_frames": 121, "height": 64, "width": 64})
    sound = np.random.default_rng(5).standard_normal((1, 2, shape.num_samples)).astype(np.float32)
    encoded = family.encoders.encode_sound(sound, shape)
    picture, heard = family.generate(encode_condition(family.encoders, CAPTION), shape, SEED, 2)
    assert picture.shape == family.encoders.latent_shapes(shape)[0] == (8, 16, 2, 2)
    assert encoded[0].shape == heard.shape == family.encoders.latent_shapes(shape)[1] == (1, 32, 126)
    frames, waveform = family.encoders.decode(picture, heard, shape)
    assert (len(frames), waveform.shape[1]) == (121, 121 * 2000)
    text = {name: array[None] for name, array in encode_condition(family.encoders, CAPTION).arrays.items()}
    batch = Batch("t2va", picture[None], encoded, torch.ones(1), text, frame_rate=24)
    velocities = family.velocities(batch, noisy_of(batch, 0.5, 0.5))
    assert (velocities.audio_BSCT.shape, velocities.video_BCFHW.shape) == (encoded.shape, picture[None].shape)


# -- training shown by sampling ----------------------------------------------------------------------------------------

NUM_STEPS = 200


def distance(family: LTX2, batch: Batch, keyframe_of: int, clip: int) -> tuple[float, float]:
    """How far a generation from one clip's keyframe is from a clip, as mean squares of what was not given."""
    arrays = {name: array[keyframe_of] for name, array in batch.conditions.items()}
    height, width = (32 * side for side in batch.video_BCFHW.shape[3:])
    shape = SHAPE.model_copy(update={"height": height, "width": width})
    video, audio = family.generate(Condition(batch.mode, arrays), shape, SEED, 8)
    errors = video - batch.video_BCFHW[clip], audio - batch.audio_BSCT[clip]
    return float(errors[0][:, family.num_given_frames(batch) :].square().mean()), float(errors[1].square().mean())


def overfit(family: LTX2, batch: Batch) -> None:
    weights = list(family.transformer.parameters())
    optimiser = torch.optim.AdamW(weights, lr=5e-3, weight_decay=0)
    for step in range(NUM_STEPS):
        for group in optimiser.param_groups:
            group["lr"] = 5e-3 * min(1, (step + 1) / 20, max(0.02, 1 - step / NUM_STEPS))
        sigmas = family.sigmas(step * 0.618 % 1, step * 0.377 % 1, batch)
        clean = (batch.video_BCFHW, batch.audio_BSCT)
        noise = [randn(1000 + 2 * step + place, *latents.shape).float() for place, latents in enumerate(clean)]
        video, audio = ((1 - s) * x + s * n for s, x, n in zip(sigmas, clean, noise, strict=True))
        velocities = family.velocities(batch, Noisy(video, audio, *sigmas, (0, 1)))
        errors = [v - (x - n) for v, x, n in zip(velocities, clean, noise, strict=True)]
        loss = errors[0][:, :, family.num_given_frames(batch) :].square().mean() + errors[1].square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        optimiser.zero_grad()


@pytest.mark.parametrize("mode", ["fl2va_first", "fl2va_last"])
def test_a_trained_keyframe_decides_the_clip_and_a_wrong_sign_shows_in_samples_alone(
    ltx2_base: Path, mode: Mode
) -> None:
    family = cast(LTX2, load_family(ltx2_base))
    batch = batch_of(family, mode, grid=(3, 1, 1))
    texts = {name: array[:1].expand_as(array) for name, array in batch.conditions.items() if name.startswith("text/")}
    name, frame = ("first", 0) if mode == "fl2va_first" else ("last", -1)
    conditions = texts | {f"keyframe/{name}": batch.video_BCFHW[:, :, frame].float()}
    batch = batch._replace(
        video_BCFHW=batch.video_BCFHW.float(), audio_BSCT=batch.audio_BSCT.float(), conditions=conditions
    )
    before = [distance(family, batch, clip, clip) for clip in range(2)]
    overfit(family, batch)
    noisy = noisy_of(batch, 0.6, 0.6)
    loss = losses(family, batch, noisy)
    for clip in range(2):
        right, swapped = distance(family, batch, clip, clip), distance(family, batch, 1 - clip, clip)
        assert right[0] < 0.5 * before[clip][0]
        assert right[0] < 0.5 * swapped[0]
        assert right[1] < 0.9 * before[clip][1]
    # The network that training with the other sign ends at: Adam's every step is mirrored, and so is every loss.
    mirrored = copy.copy(family)
    mirrored.transformer = copy.deepcopy(family.transformer)
    for layer in ("proj_out", "audio_proj_out"):
        for weight in cast(Any, mirrored.transformer).get_submodule(layer).parameters():
            weight.data.neg_()
    assert losses(mirrored, batch, noisy, sign=-1.0) == loss
    for clip in range(2):
        wrong = distance(mirrored, batch, clip, clip)
        assert wrong[0] > before[clip][0]


# -- noise levels ------------------------------------------------------------------------------------------------------


def published(num_tokens: int, num_draws: int) -> np.ndarray:
    """Draws as the LTX-2 trainer makes them."""
    random = np.random.default_rng(num_tokens)
    mean = 0.95 + (min(num_tokens, 4096) - 1024) * (2.05 - 0.95) / 3072

    def sigmoid(x: Any) -> Any:
        return 1 / (1 + np.exp(-x))

    low, high = sigmoid(mean - 2.5758), sigmoid(mean + 3.0902)
    drawn: np.ndarray = (sigmoid(random.standard_normal(num_draws) + mean) - low) / (high - low)
    drawn = np.clip(np.where(drawn >= 1e-3, drawn, 2e-3 - drawn), 0, 1)
    return np.where(random.random(num_draws) > 0.1, drawn, 1e-3 + (1 - 1e-3) * random.random(num_draws))


@pytest.mark.parametrize("num_tokens", [18, 126, 1024, 2500, 4096, 8160])
def test_noise_levels_are_the_published_sampler_s_at_every_position(num_tokens: int) -> None:
    draws = np.sort(published(num_tokens, 400_000))
    for u in (0.001, 0.003, 0.01, *np.linspace(0.05, 0.95, 19), 0.99, 0.998):
        below = np.searchsorted(draws, sigma_at(float(u), num_tokens)) / len(draws)
        assert abs(below - u) < 5 * np.sqrt(u * (1 - u) / len(draws)) + 1e-8
    assert sigma_at(0.5, num_tokens) == pytest.approx(float(np.median(draws)), abs=2e-3)


@given(u=st.tuples(st.floats(0, 1), st.floats(0, 1)), tokens=st.tuples(st.integers(1, 9000), st.integers(1, 9000)))
@settings(max_examples=100, deadline=None)
def test_noise_levels_grow_with_the_position_and_with_the_middle_s_tokens(
    u: tuple[float, float], tokens: tuple[int, int]
) -> None:
    low, high = sorted(u)
    assert 1e-3 <= sigma_at(low, tokens[0]) <= sigma_at(high, tokens[0]) <= 1
    assert sigma_at(0.5, min(tokens)) <= sigma_at(0.5, max(tokens))
    assert (sigma_at(0, tokens[0]), sigma_at(1, tokens[0])) == (1e-3, 1)


def test_each_modality_s_noise_follows_its_own_tokens_and_position(families: dict[str, LTX2]) -> None:
    batch = batch_of(families["2.3"], "t2va")
    assert families["2.3"].sigmas(0.3, 0.8, batch) == (sigma_at(0.3, 18), sigma_at(0.8, 18))
    longer = batch._replace(audio_BSCT=torch.zeros(2, 1, 32, 126))
    assert families["2.3"].sigmas(0.3, 0.8, longer) == (sigma_at(0.3, 18), sigma_at(0.8, 126))
    assert sigma_at(0.8, 126) > sigma_at(0.8, 18)
    assert sigma_at(0.8, 9000) == sigma_at(0.8, 4096)
    assert (LTX2.shared_draw, LTX2.guidance_scale) == (False, 1.0)


# -- misuse ------------------------------------------------------------------------------------------------------------


def test_a_silent_clip_neither_gives_nor_learns_sound(families: dict[str, LTX2]) -> None:
    silent = torch.tensor([1.0, 0.0])
    for mode in cast("list[Mode]", ["a2v", "v2a"]):
        batch = batch_of(families["2.3"], mode)
        with pytest.raises(ValueError, match=f"without sound in mode {mode}"):
            families["2.3"].velocities(batch._replace(has_audio_B=silent), noisy_of(batch, 0.5, 0.5))


def test_what_is_given_whole_must_be_clean(families: dict[str, LTX2]) -> None:
    for mode in cast("list[Mode]", ["a2v", "v2a"]):
        batch = batch_of(families["2.3"], mode)
        noisy = noisy_of(batch, 0.5, 0.5)._replace(sigma_video=0.5, sigma_audio=0.5)
        with pytest.raises(ValueError, match=f"what mode {mode} gives lies at noise level 0.5"):
            families["2.3"].velocities(batch, noisy)


@pytest.mark.parametrize(
    ("mode", "changed", "said"),
    [
        ("fl2va", "-keyframe/last", "first given, first and last needed"),
        ("t2va", "+keyframe/first", "mode t2va: first given, none needed"),
        ("kf2va", "+keyframe/17", "keyframe/17 is not in frames 1 to 16"),
        ("kf2va", "+keyframe/0", "frame 0 is keyframe/first"),
        ("kf2va", "-keyframe/first -keyframe/5", "mode kf2va: none given, some needed"),
        ("fl2va_first", "+keyframe/5", "mode fl2va_first: 5 and first given, first needed"),
        ("ref2va", "-references/0/video -references/1/image", "mode ref2va: none given"),
        ("t2va", "+references/0/image", "mode t2va: references/0/image given"),
        ("ref2va", "+references/2/audio", "references/2/audio: LTX-2 takes images and videos only"),
    ],
)
def test_conditions_of_another_mode_are_refused_by_name(
    families: dict[str, LTX2], mode: Mode, changed: str, said: str
) -> None:
    batch = batch_of(families["2.3"], mode)
    for change in changed.split():
        if change[0] == "+":
            batch.conditions[change[1:]] = torch.zeros(2, 8, 2, 3)
        else:
            del batch.conditions[change[1:]]
    with pytest.raises(ValueError, match=said):
        families["2.3"].velocities(batch, noisy_of(batch, 0.5, 0.5))


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_targets_are_what_they_say(families: dict[str, LTX2], version: str) -> None:
    family = families[version]
    modules, weights = (
        dict(cast(Any, family.transformer).named_modules()),
        [name for name, _ in family.transformer.named_parameters()],
    )

    def chosen(pattern: str) -> set[str]:
        return {name for name in modules if re.fullmatch(pattern, name)}

    linear = {name for name, module in modules.items() if isinstance(module, torch.nn.Linear)}
    assert chosen(family.blocks) == {"transformer_blocks.0", "transformer_blocks.1"}
    assert {name for name in linear if name.startswith("transformer_blocks")} - chosen(family.lora_targets) == {
        name for name in linear if name.endswith("to_gate_logits")
    }
    assert len(chosen(family.lora_targets)) == 2 * (6 * 4 + 2 * 2)
    rest = linear - chosen(family.lora_targets) - chosen(family.modulation_targets)
    projected = {name for name in rest if "proj" in name}
    assert {name for name in rest - projected if not name.endswith("to_gate_logits")} == set()
    assert chosen(family.modulation_targets) <= linear
    assert len(chosen(family.modulation_targets)) == 3 * (6 if version == "2.0" else 8)
    text = {name.split(".")[0] for name in weights if re.fullmatch(family.text_side, name)}
    kind = "caption_projection" if version == "2.0" else "prompt_adaln"
    assert text == {kind, f"audio_{kind}"}


def test_adapters_of_both_streams_learn(ltx2_base: Path) -> None:
    family = cast(LTX2, load_family(ltx2_base))
    adapters.add(family, 2, seed=0)
    batch = batch_of(family, "fl2va")
    sum(losses(family, batch, noisy_of(batch, 0.5, 0.5))).backward()  # type: ignore[union-attr]
    learning = {name for name, weight in family.transformer.named_parameters() if weight.grad is not None}
    assert all("lora_" in name for name in learning)
    told = {name.split(".")[2] for name in learning}
    assert told >= {"attn1", "audio_attn1", "attn2", "audio_attn2", "ff", "audio_ff"}
    assert told >= {"audio_to_video_attn", "video_to_audio_attn"}


def test_the_connectors_of_older_texts_stay_as_they_are(bases: dict[str, Path]) -> None:
    family = cast(LTX2, load_family(bases["2.0"]))
    batch = batch_of(family, "t2va")
    sum(losses(family, batch, noisy_of(batch, 0.5, 0.5))).backward()  # type: ignore[union-attr]
    connectors = list(cast(Any, family)._connectors.parameters())
    assert connectors
    assert all(not weight.requires_grad and weight.grad is None for weight in connectors)
    assert not {id(weight) for weight in connectors} & {id(weight) for weight in family.transformer.parameters()}


def test_half_precision_is_fed_in_kind_and_answers_in_the_latents_type(bases: dict[str, Path]) -> None:
    for base in bases.values():
        family = cast(LTX2, load_family(base))
        batch = batch_of(family, "fl2va")
        batch = batch._replace(video_BCFHW=batch.video_BCFHW.float(), audio_BSCT=batch.audio_BSCT.float())
        noisy = noisy_of(batch, 0.5, 0.5)
        with torch.no_grad():
            exact = family.velocities(batch, noisy)
            family.transformer.bfloat16()
            half = family.velocities(batch, noisy)
        assert half.video_BCFHW.dtype == half.audio_BSCT.dtype == torch.float32
        for one, other in zip(exact, half, strict=True):
            torch.testing.assert_close(one, other, rtol=0.1, atol=0.1)


def test_a_saved_transformer_has_the_same_bytes_and_loads_again(ltx2_base: Path, tmp_path: Path) -> None:
    family = cast(LTX2, load_family(ltx2_base))
    save_transformer(family, tmp_path / "once")
    for path in sorted((ltx2_base / "transformer").iterdir()):
        assert sha256(tmp_path / "once" / path.name) == sha256(path)
    kept = {name: array.clone() for name, array in family.transformer.state_dict().items()}
    with torch.no_grad():
        for weight in family.transformer.parameters():
            weight.add_(1)
    load_transformer(family, tmp_path / "once")
    assert all(torch.equal(array, kept[name]) for name, array in family.transformer.state_dict().items())


def test_training_from_latents_needs_nothing_but_transformer_and_scheduler(ltx2_base: Path, tmp_path: Path) -> None:
    bare, whole = tmp_path / "bare", cast(LTX2, load_family(ltx2_base))
    left_out = shutil.ignore_patterns("text_encoder", "tokenizer", "connectors", "vocoder")
    shutil.copytree(ltx2_base, bare, ignore=left_out)
    for name in ("vae", "audio_vae"):
        (bare / name / "diffusion_pytorch_model.safetensors").unlink()
    batch = batch_of(whole, "fl2va_last")
    noisy = noisy_of(batch, 0.5, 0.5)
    wanted, found = whole.velocities(batch, noisy), load_family(bare).velocities(batch, noisy)
    assert torch.equal(wanted.video_BCFHW, found.video_BCFHW)
    assert torch.equal(wanted.audio_BSCT, found.audio_BSCT)
