"""LTX-2's encoders against the stock diffusers pipelines, against librosa and against closed forms."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from diffusers import LTX2ConditionPipeline, LTX2InContextPipeline, LTX2Pipeline
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from data.conditions import MODES
from data.files import sha256
from data.records import ClipShape
from models import tiny_ltx2
from models.families import Reference, encode_condition, load_encoders
from models.families.ltx2_encoders import LTX2Encoders, log_mel, projected_text, text_streams

VERSIONS = ("2.0", "2.3")
SHAPE = ClipShape(num_frames=17, frame_rate=24, height=64, width=96, sample_rate_hz=16000)
CAPTION = "a red ball falls, and rings like a bell"


def at_rest(num_frames: int) -> ClipShape:
    return SHAPE.model_copy(update={"num_frames": num_frames})


@pytest.fixture(scope="module")
def bases(ltx2_base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    older = tmp_path_factory.mktemp("zoo") / "tiny-ltx2.0"
    tiny_ltx2.save(tiny_ltx2.build(4, "2.0"), older)
    return {"2.0": older, "2.3": ltx2_base}


@pytest.fixture(scope="module")
def encoders(bases: dict[str, Path]) -> dict[str, LTX2Encoders]:
    return {version: cast(LTX2Encoders, load_encoders(base)) for version, base in bases.items()}


@pytest.fixture(scope="module")
def ltx2(encoders: dict[str, LTX2Encoders]) -> LTX2Encoders:
    return encoders["2.3"]


@pytest.fixture(scope="module")
def pipes(bases: dict[str, Path]) -> dict[str, Any]:
    loaded = {version: cast(Any, LTX2Pipeline).from_pretrained(str(base)) for version, base in bases.items()}
    for pipe in loaded.values():
        pipe.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="module")
def frames_BFHWC() -> np.ndarray:  # noqa: N802
    """Two clips of smooth moving colour."""
    noise = np.random.default_rng(1).random((2, 3, 3, 3, 3))
    big = torch.nn.functional.interpolate(torch.from_numpy(noise), (17, 64, 96), mode="trilinear")
    return (big.permute(0, 2, 3, 4, 1).numpy() * 255).astype(np.uint8)


@pytest.fixture(scope="module")
def waveform_BCT() -> np.ndarray:  # noqa: N802
    return (np.random.default_rng(2).standard_normal((2, 2, SHAPE.num_samples)) * 0.1).astype(np.float32)


# -- sound front end ---------------------------------------------------------------------------------------------------


def test_log_mel_equals_librosa() -> None:
    """The asset was made with librosa 0.11.0: log(maximum(mel, 1e-5)), T before M, of
    `librosa.feature.melspectrogram(y=waveform, sr=16000, n_fft=1024, hop_length=160, win_length=1024, window="hann",
    center=True, pad_mode="reflect", power=1.0, n_mels=64, fmin=0, fmax=8000, htk=False, norm="slaney")`
    of the two channels below.
    """
    time = np.arange(4800) / 16000
    chirp = 0.5 * np.sin(2 * np.pi * (200 * time + 5000 * time**2))
    late = 0.1 * np.sin(2 * np.pi * 3000 * time) * (time > 0.1)
    ours = log_mel(torch.from_numpy(np.stack([chirp, late]).astype(np.float32))[None], 16000, 160, 64)[0]
    golden = np.load(Path(__file__).parents[1] / "assets" / "ltx2_log_mel.npz")["log_mel"]
    assert ours.shape == golden.shape == (2, 31, 64)
    loud = golden > -9
    np.testing.assert_allclose(ours.numpy()[loud], golden[loud], atol=2e-3)
    np.testing.assert_allclose(ours.exp().numpy(), np.exp(golden), rtol=1e-3, atol=2e-6)
    assert golden.min() == ours.min() == np.log(np.float32(1e-5))


def test_a_click_is_loudest_in_the_mel_frame_of_its_time() -> None:
    click = torch.zeros(1, 2, 16000)
    click[0, 1, 4800] = 1  # 300 ms, right side only
    left, right = log_mel(click, 16000, 160, 64)[0].sum(-1)
    assert int(right.argmax()) == 30
    assert float(left.max()) == float(left.min())


# -- grids and lengths -------------------------------------------------------------------------------------------------


@given(duration_s=st.floats(0.36, 30), height=st.floats(10, 900), width=st.floats(10, 900))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_shape_is_the_longest_on_the_grid_and_passes_the_check(
    ltx2: LTX2Encoders, duration_s: float, height: float, width: float
) -> None:
    shape = ltx2.shape(duration_s, height, width)
    ltx2.check(shape)
    assert shape.num_frames % 8 == 1
    assert shape.num_frames <= math.floor(duration_s * 24 + 0.5) < shape.num_frames + 8
    assert abs(shape.height - max(64, height)) <= 16
    assert abs(shape.width - max(64, width)) <= 16


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [("num_frames", 16, "8n"), ("num_frames", 1, "8n"), ("frame_rate", 25, "24 frames"), ("width", 80, "of 32"),
     ("sample_rate_hz", 24000, "16000 Hz")],
)  # fmt: skip
def test_a_shape_off_the_grid_is_refused_with_what_it_may_be(
    ltx2: LTX2Encoders, field: str, value: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        ltx2.check(SHAPE.model_copy(update={field: value}))


def test_a_picture_that_could_not_be_decoded_is_refused_by_its_size(ltx2: LTX2Encoders) -> None:
    small, least = (SHAPE.model_copy(update={"height": side}) for side in (32, 64))
    latents = [torch.zeros(size) for size in ltx2.latent_shapes(small)]
    with pytest.raises(RuntimeError, match=r"[Pp]adding"):
        ltx2.decode(latents[0], latents[1], small)
    with pytest.raises(ValueError, match=r"96x32 px; .* needs 64 px a side or more; raise shape\.height"):
        ltx2.check(small)
    ltx2.check(least)
    latents = [torch.zeros(size) for size in ltx2.latent_shapes(least)]
    assert ltx2.decode(latents[0], latents[1], least)[0].shape[1] == 64
    unmirrored = ltx2.grid._replace(num_mirrored=0)  # as autoencoders whose borders are zeros
    unmirrored.check(small)


def test_a_clip_below_nine_frames_is_too_short(ltx2: LTX2Encoders) -> None:
    assert ltx2.shape(0.36, 64, 64).num_frames == 9
    with pytest.raises(ValueError, match=r"at least 9 frames .* 0\.375 s"):
        ltx2.shape(0.34, 64, 64)


class Asked(Exception):
    pass


def test_latent_sizes_are_those_that_the_pipeline_generates(
    ltx2: LTX2Encoders, pipes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = pipes["2.3"]
    seen: dict[str, Any] = {}
    prepare = pipe.prepare_latents

    def pictured(*args: Any) -> torch.Tensor:
        latents = prepare(*args)
        seen["video"] = latents.shape[1:]
        return latents

    def asked(*args: Any, **given: Any) -> None:
        seen["audio"] = given["num_channels_latents"] * given["num_mel_bins"] // 4, given["audio_latent_length"]
        raise Asked

    monkeypatch.setattr(pipe, "prepare_latents", pictured)
    monkeypatch.setattr(pipe, "prepare_audio_latents", asked)
    text = {"prompt_embeds": torch.zeros(1, 16, 72), "prompt_attention_mask": torch.ones(1, 16, dtype=torch.long)}
    for num_frames in range(9, 1450, 8):
        with pytest.raises(Asked):
            pipe(
                **text,
                height=64,
                width=96,
                num_frames=num_frames,
                frame_rate=24.0,
                audio_guidance_scale=1.0,
                guidance_scale=1.0,
            )
        video, audio = ltx2.latent_shapes(at_rest(num_frames))
        assert (video[1] * video[2] * video[3], video[0]) == seen["video"]
        assert audio == (1, *seen["audio"])


@given(num_steps=st.integers(1, 40), missing=st.integers(-400, 2000))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sound_has_inference_length_whatever_is_heard(ltx2: LTX2Encoders, num_steps: int, missing: int) -> None:
    shape = at_rest(8 * num_steps + 1)
    sound = np.ones((1, 2, shape.num_samples - missing), np.float32)
    assert tuple(ltx2.encode_sound(sound, shape).shape[1:]) == ltx2.latent_shapes(shape)[1]


def test_the_last_latent_that_inference_lacks_is_dropped(ltx2: LTX2Encoders) -> None:
    shape = at_rest(121)
    sound = np.random.default_rng(5).standard_normal((1, 2, shape.num_samples)).astype(np.float32)
    mel = log_mel(torch.from_numpy(sound), 16000, 160, 64)
    network = cast(Any, ltx2)._audio_vae.encode(mel).latent_dist.mode()
    latents = ltx2.encode_sound(sound, shape)
    assert network.shape == (1, 2, 127, 16)
    assert latents.shape == (1, 1, 32, 126)
    mean, std = cast(Any, ltx2)._sound_scale()
    undone = (latents[0, 0].T * std + mean).unflatten(1, (2, 16)).transpose(0, 1)
    torch.testing.assert_close(undone, network[0, :, :126], atol=1e-5, rtol=1e-5)


# -- autoencoders ------------------------------------------------------------------------------------------------------


def test_pictures_are_normalised_once_a_channel(ltx2: LTX2Encoders, frames_BFHWC: np.ndarray) -> None:
    vae = cast(Any, ltx2)._vae
    pixels = torch.from_numpy(frames_BFHWC).permute(0, 4, 1, 2, 3).float() / 255 * 2 - 1
    wanted = vae.encode(pixels).latent_dist.mode()
    latents = ltx2.encode_picture(frames_BFHWC)
    assert tuple(latents.shape[1:]) == ltx2.latent_shapes(SHAPE)[0] == (8, 3, 2, 3)
    undone = latents * vae.latents_std.view(-1, 1, 1, 1) + vae.latents_mean.view(-1, 1, 1, 1)
    torch.testing.assert_close(undone, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("posterior", ["mode", "sample"])
def test_a_batch_of_two_equals_one_by_one(
    ltx2: LTX2Encoders, frames_BFHWC: np.ndarray, waveform_BCT: np.ndarray, posterior: Any
) -> None:
    seen, heard = ltx2.encode_picture(frames_BFHWC, posterior), ltx2.encode_sound(waveform_BCT, SHAPE, posterior)
    for one in range(2):
        alone = ltx2.encode_picture(frames_BFHWC[one : one + 1], posterior)
        torch.testing.assert_close(alone[0], seen[one], atol=1e-5, rtol=1e-5)
        alone = ltx2.encode_sound(waveform_BCT[one : one + 1], SHAPE, posterior)
        torch.testing.assert_close(alone[0], heard[one], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(seen[0], seen[1])


def test_a_sample_differs_from_the_mode_and_repeats(ltx2: LTX2Encoders, frames_BFHWC: np.ndarray) -> None:
    sample = ltx2.encode_picture(frames_BFHWC, "sample")
    assert torch.equal(sample, ltx2.encode_picture(frames_BFHWC, "sample"))
    assert not torch.allclose(sample, ltx2.encode_picture(frames_BFHWC), atol=1e-2)


def test_the_two_sides_of_sound_are_told_apart(ltx2: LTX2Encoders, waveform_BCT: np.ndarray) -> None:
    swapped = ltx2.encode_sound(waveform_BCT[:, ::-1], SHAPE)
    assert not torch.allclose(swapped, ltx2.encode_sound(waveform_BCT, SHAPE), atol=1e-3)


@pytest.mark.parametrize("version", VERSIONS)
def test_decoding_equals_the_pipeline_and_has_the_clips_length(
    encoders: dict[str, LTX2Encoders], pipes: dict[str, Any], version: str
) -> None:
    ours, pipe = encoders[version], pipes[version]
    made: dict[str, Any] = {}
    for kind in ("latent", "pt"):
        made[kind] = pipe(
            prompt=CAPTION, height=64, width=96, num_frames=17, frame_rate=24.0, num_inference_steps=2,
            guidance_scale=1.0, use_cross_timestep=version == "2.3", max_sequence_length=128,
            generator=torch.Generator().manual_seed(0), output_type=kind,
        )  # fmt: skip
    raw_video, raw_audio = made["latent"].frames, made["latent"].audio
    video = (raw_video - pipe.vae.latents_mean.view(-1, 1, 1, 1)) / pipe.vae.latents_std.view(-1, 1, 1, 1)
    audio = (raw_audio.transpose(1, 2).flatten(2) - pipe.audio_vae.latents_mean) / pipe.audio_vae.latents_std
    frames, sound = ours.decode(video[0], audio.transpose(1, 2), SHAPE)
    stock = (made["pt"].frames[0].permute(0, 2, 3, 1) * 255).round().numpy()
    assert frames.shape == (17, 64, 96, 3)
    assert np.abs(frames.astype(int) - stock).max() <= 1
    assert ours.decoded_rate_hz == pipe.vocoder.config.output_sampling_rate == (24000 if version == "2.0" else 48000)
    assert sound.shape == (2, 17 * ours.decoded_rate_hz // 24)
    heard = made["pt"].audio[0, :, : sound.shape[1]].numpy()
    np.testing.assert_allclose(sound[:, : heard.shape[1]], heard, atol=1e-5)
    assert 0 <= sound.shape[1] - heard.shape[1] <= 0.05 * ours.decoded_rate_hz
    assert not sound[:, heard.shape[1] :].any()


def test_a_decoder_that_takes_a_timestep_is_told_clean(tmp_path: Path) -> None:
    parts = tiny_ltx2.build(5)
    given = {name: value for name, value in parts["vae"].config.items() if not name.startswith("_")}
    torch.manual_seed(6)
    parts["vae"] = vae = type(parts["vae"])(**given | {"timestep_conditioning": True}).eval()
    tiny_ltx2.save(parts, tmp_path)
    ours = load_encoders(tmp_path)
    video, audio = (torch.randn(size) for size in ours.latent_shapes(SHAPE))
    frames, _ = ours.decode(video, audio, SHAPE)
    with torch.no_grad():
        clean, noisy = (vae.decode(video[None], torch.tensor([t])).sample[0] for t in (0.0, 0.5))
    wanted = ((clean / 2 + 0.5).clamp(0, 1) * 255).round().permute(1, 2, 3, 0).numpy()
    assert np.abs(frames.astype(int) - wanted).max() <= 1
    assert not torch.allclose(clean, noisy)


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("prompt", [CAPTION, " " + CAPTION * 9, "", None, "Ein Bär läuft"])
def test_text_equals_the_pipeline_behind_its_connectors(
    encoders: dict[str, LTX2Encoders], pipes: dict[str, Any], version: str, prompt: str | None
) -> None:
    pipe = pipes[version]
    with torch.no_grad():
        states, mask, _, _ = pipe.encode_prompt(
            prompt or "", do_classifier_free_guidance=False, max_sequence_length=128
        )
        wanted = pipe.connectors(states, mask, padding_side="left")
        text = encoders[version].encode_text("t2va", prompt)
        batch = {name: torch.stack([array, array]) for name, array in text.items()}
        streams = text_streams(pipe.connectors, batch)
    for ours, stock in zip(streams, wanted, strict=True):
        torch.testing.assert_close(ours[:1], stock, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours[1:], stock, atol=1e-5, rtol=1e-5)


def test_every_mode_says_the_same_and_no_caption_is_shared(ltx2: LTX2Encoders) -> None:
    said = {ltx2.text_of(f"{mode}{'.1' if mode == 'ref2va' else ''}") for mode in MODES}
    unsaid = {ltx2.text_of(f"{mode}{'.1' if mode == 'ref2va' else ''}-uncaptioned") for mode in MODES}
    assert (said, unsaid) == ({"t2va"}, {"shared/uncaptioned"})
    told, other = ltx2.encode_text("t2va", CAPTION), ltx2.encode_text("a2v", CAPTION)
    assert all(torch.equal(array, other[name]) for name, array in told.items())
    assert not torch.equal(told["video"], ltx2.encode_text("t2va", None)["video"])


FULL_SIZE: dict[str, dict[str, Any]] = {
    "2.0": {},
    "2.3": {
        "video_connector_num_attention_heads": 32, "video_connector_num_layers": 8, "video_gated_attn": True,
        "audio_connector_num_attention_heads": 32, "audio_connector_attention_head_dim": 64,
        "audio_connector_num_layers": 8, "audio_gated_attn": True,
        "per_modality_projections": True, "proj_bias": True, "rope_type": "split",
    },
}  # fmt: skip
"""Arguments of the released connectors beside the class's defaults, which are 2.0's."""


@pytest.mark.parametrize(
    ("version", "billions", "stored_mb", "read_mb"), [("2.0", 1.4, 7.9, 15.7), ("2.3", 3.2, 12.6, 12.6)]
)
def test_a_stored_caption_is_below_15_mb_at_full_size(
    version: str, billions: float, stored_mb: float, read_mb: float
) -> None:
    with torch.device("meta"):
        connectors = LTX2TextConnectors(**FULL_SIZE[version]).to(torch.bfloat16)
        states = torch.empty(1, 1024, 3840 * 49, dtype=torch.bfloat16)
        text = projected_text(connectors, states, torch.ones(1, 1024, dtype=torch.long))
        read = text_streams(connectors, text)
    stored = sum(array.numel() * array.itemsize for array in text.values())
    assert sum(weight.numel() for weight in connectors.parameters()) / 1e9 == pytest.approx(billions, abs=0.05)
    assert stored / 1e6 == pytest.approx(stored_mb, abs=0.05)
    assert stored <= 15e6
    assert states.nbytes / 1e6 == pytest.approx(385, abs=1)
    assert sum(array.nbytes for array in read[:2]) / 1e6 == pytest.approx(read_mb, abs=0.05)


# -- conditions --------------------------------------------------------------------------------------------------------


def stock_tokens(pipe: Any, kind: Any, **conditions: Any) -> Any:
    """What a conditioned stock pipeline starts from."""
    conditioned = kind(**{name: part for name, part in pipe.components.items() if name != "duration_head"})
    return conditioned.prepare_latents(
        **conditions, num_channels_latents=8, height=64, width=96, num_frames=17, dtype=torch.float32,
        device=torch.device("cpu"), generator=torch.Generator().manual_seed(0),
    )  # fmt: skip


def packed(latents_CFHW: torch.Tensor) -> torch.Tensor:
    return latents_CFHW.flatten(1).T


def num_tokens(ltx2: LTX2Encoders, condition: Any) -> int:
    sizes = {name: array.shape for name, array in condition.arrays.items()}
    return ltx2.layout(SHAPE, condition.mode, sizes)[1]


def test_keyframes_are_the_stock_ones_and_only_the_last_adds_tokens(
    ltx2: LTX2Encoders, pipes: dict[str, Any], frames_BFHWC: np.ndarray
) -> None:
    first, last = frames_BFHWC[0, 0], frames_BFHWC[0, -1]
    given = [LTX2VideoCondition(frames=Image.fromarray(frame), index=at) for frame, at in ((first, 0), (last, -1))]
    with torch.no_grad():
        latents, _, clean, _ = stock_tokens(pipes["2.3"], LTX2ConditionPipeline, conditions=given)
    condition = encode_condition(ltx2, CAPTION, first, last)
    assert condition.arrays["keyframe/first"].shape == (8, 2, 3)
    torch.testing.assert_close(clean[0, :6], packed(condition.arrays["keyframe/first"]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(clean[0, 18:], packed(condition.arrays["keyframe/last"]), atol=1e-5, rtol=1e-5)
    num_sounds = ltx2.latent_shapes(SHAPE)[1][-1]
    assert num_tokens(ltx2, condition) == latents.shape[1] + num_sounds == 18 + 6 + num_sounds
    assert num_tokens(ltx2, encode_condition(ltx2, CAPTION, first)) == 18 + num_sounds


def test_one_frame_alone_is_encoded_as_at_the_start_of_a_clip(ltx2: LTX2Encoders, frames_BFHWC: np.ndarray) -> None:
    alone, whole = ltx2.encode_picture(frames_BFHWC[:1, :1]), ltx2.encode_picture(frames_BFHWC[:1])
    assert alone.shape[2] == 1
    torch.testing.assert_close(alone[:, :, 0], whole[:, :, 0], atol=1e-5, rtol=1e-5)


def test_references_are_the_stock_ones_at_the_clips_size(
    ltx2: LTX2Encoders, pipes: dict[str, Any], frames_BFHWC: np.ndarray
) -> None:
    wide = np.repeat(np.concatenate([frames_BFHWC[0], frames_BFHWC[1]])[:25], 2, axis=2)  # 25 frames, twice as wide
    given = [Reference("video", wide), Reference("image", frames_BFHWC[1, 3:4]), Reference("video", wide[:11])]
    frames = [wide[:17], frames_BFHWC[1, 3:4], wide[:9]]
    stock = [LTX2ReferenceCondition(frames=[Image.fromarray(frame) for frame in item]) for item in frames]
    with torch.no_grad():
        latents, _, clean, *_ = stock_tokens(pipes["2.3"], LTX2InContextPipeline, reference_conditions=stock)
    condition = encode_condition(ltx2, CAPTION, references=given, shape=SHAPE)
    names = ["references/0/video", "references/1/image", "references/2/video"]
    ours = torch.cat([packed(condition.arrays[name]) for name in names])
    torch.testing.assert_close(clean[0, 18:], ours, atol=1e-5, rtol=1e-5)
    assert num_tokens(ltx2, condition) == latents.shape[1] + ltx2.latent_shapes(SHAPE)[1][-1]


def test_a_sound_for_a_reference_is_refused(ltx2: LTX2Encoders, waveform_BCT: np.ndarray) -> None:
    with pytest.raises(ValueError, match="reference 0 is audio"):
        ltx2.encode_references([Reference("audio", None, waveform_BCT[0])], SHAPE)
    with pytest.raises(ValueError, match="at least one"):
        ltx2.encode_references([], SHAPE)


def test_layouts_differ_by_what_shapes_a_batch_and_not_by_the_caption(ltx2: LTX2Encoders) -> None:
    def key(shape: ClipShape, mode: Any, **sizes: Any) -> str:
        return ltx2.layout(shape, mode, {"text/mask": (128,)} | sizes)[0]

    image, last = {"references/0/image": (8, 1, 2, 3)}, {"keyframe/last": (8, 2, 3)}
    keys = [
        key(SHAPE, "t2va"), key(at_rest(25), "t2va"), key(SHAPE.model_copy(update={"width": 64}), "t2va"),
        key(SHAPE, "a2v"), key(SHAPE, "fl2va_last", **last), key(SHAPE, "ref2va", **image),
        key(SHAPE, "ref2va", **{"references/0/video": (8, 2, 2, 3)}),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    for prompt in (CAPTION, "short", None):
        sizes = {f"text/{name}": array.shape for name, array in ltx2.encode_text("t2va", prompt).items()}
        assert ltx2.layout(SHAPE, "t2va", sizes)[0] == keys[0]


# -- folders -----------------------------------------------------------------------------------------------------------


def everything(ltx2: Any, frames: np.ndarray, sound: np.ndarray) -> dict[str, torch.Tensor]:
    condition = encode_condition(ltx2, CAPTION, frames[0, 0], frames[0, -1])
    found = dict(condition.arrays) | {"video": ltx2.encode_picture(frames), "audio": ltx2.encode_sound(sound, SHAPE)}
    return found | ltx2.encode_references([Reference("video", frames[1])], SHAPE)


def test_encoding_needs_neither_transformer_nor_vocoder_and_repeats_to_the_bit(
    ltx2: LTX2Encoders, ltx2_base: Path, tmp_path: Path, frames_BFHWC: np.ndarray, waveform_BCT: np.ndarray
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(ltx2_base, bare, ignore=shutil.ignore_patterns("transformer", "vocoder", "scheduler"))
    again = load_encoders(bare)
    wanted, found = (everything(item, frames_BFHWC, waveform_BCT) for item in (ltx2, again))
    assert wanted.keys() == found.keys()
    assert all(torch.equal(array, found[name]) for name, array in wanted.items())
    assert again.latent_shapes(SHAPE) == ltx2.latent_shapes(SHAPE)
    with pytest.raises(RuntimeError, match="vocoder"):
        again.decode(found["video"][0], found["audio"][0], SHAPE)


def test_half_precision_weights_keep_text_as_stored_and_autoencoders_exact(
    tmp_path: Path, frames_BFHWC: np.ndarray, waveform_BCT: np.ndarray
) -> None:
    parts = tiny_ltx2.build(3)
    tiny_ltx2.save(
        {name: part.bfloat16() if hasattr(part, "bfloat16") else part for name, part in parts.items()}, tmp_path
    )
    released = load_encoders(tmp_path)
    text = released.encode_text("t2va", CAPTION)
    assert (text["video"].dtype, text["audio"].dtype) == (torch.bfloat16, torch.bfloat16)
    assert (
        released.encode_picture(frames_BFHWC).dtype == released.encode_sound(waveform_BCT, SHAPE).dtype == torch.float32
    )


def test_the_tiny_model_has_the_same_bytes_wherever_it_is_built(ltx2_base: Path, tmp_path: Path) -> None:
    tiny_ltx2.save(tiny_ltx2.build(3), tmp_path)
    files = sorted(path.relative_to(ltx2_base) for path in ltx2_base.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert [sha256(tmp_path / name) for name in files] == [sha256(ltx2_base / name) for name in files]
