"""H3 between media and latents: batches, sides, grids, references and texts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.conditions import Variant
from data.records import ClipShape
from data.world import scene
from models.families import Encoders, Posterior, Reference, load_encoders
from models.families.h3_layout import MODES

SHAPE = ClipShape(num_frames=22, frame_rate=24, height=16, width=16, sample_rate_hz=8000)
SCENES = [scene("new", seed, 22 / 24, 24, 16, 8000, "bounce") for seed in (3, 4)]
IMAGE = Reference("image", SCENES[0].frames_FHWC[:1])
VIDEO = Reference("video", SCENES[0].frames_FHWC, SCENES[0].waveform_CT)
SOUND = Reference("audio", None, SCENES[1].waveform_CT)


@pytest.fixture(scope="module")
def encoders(base: Path) -> Encoders:
    return load_encoders(base)


def test_a_batch_encodes_as_its_items_do(encoders: Encoders) -> None:
    frames, sound = (np.stack([getattr(seen, name) for seen in SCENES]) for name in ("frames_FHWC", "waveform_CT"))
    for posterior in ("mode", "sample"):
        together = encoders.encode_picture(frames, posterior), encoders.encode_sound(sound, SHAPE, posterior)
        for index in range(2):
            alone = (
                encoders.encode_picture(frames[index : index + 1], posterior),
                encoders.encode_sound(sound[index : index + 1], SHAPE, posterior),
            )
            assert (
                alone[0][0] - together[0][index]
            ).abs().max() < 1e-5  # not bit equal: convolutions sum in another order
            assert (alone[1][0] - together[1][index]).abs().max() < 1e-5
    assert [tuple(array.shape[1:]) for array in together] == list(encoders.latent_shapes(SHAPE))


def test_a_posterior_draw_differs_from_its_mode_and_repeats(encoders: Encoders) -> None:
    frames, sound = SCENES[0].frames_FHWC[None], SCENES[0].waveform_CT[None]
    ways: tuple[Posterior, ...] = ("mode", "sample", "sample")
    pictures = [encoders.encode_picture(frames, how) for how in ways]
    sounds = [encoders.encode_sound(sound, SHAPE, how) for how in ways]
    for mode, once, again in (pictures, sounds):
        assert torch.equal(once, again)
        assert not torch.equal(once, mode)


def test_the_two_sides_of_sound_are_not_swapped(encoders: Encoders) -> None:
    sound = SCENES[0].waveform_CT.copy()
    sound[1] = 0
    latents = encoders.encode_sound(np.stack([sound, sound[::-1].copy()]), SHAPE)
    silence = encoders.encode_sound(np.zeros_like(sound)[None], SHAPE)[0, 0]
    assert (latents[0, 1] - silence).abs().max() < 1e-5
    assert (latents[0, 0] - silence).abs().max() > 1e-3
    assert (latents[0] - latents[1].flip(0)).abs().max() < 1e-5
    picture = torch.zeros(encoders.latent_shapes(SHAPE)[0])
    left, right = (encoders.decode(picture, latents[index], SHAPE)[1] for index in range(2))
    np.testing.assert_allclose(left, right[::-1], atol=1e-5)
    given = encoders.encode_references([IMAGE, Reference("audio", None, sound)], SHAPE)["1/audio"]
    assert (given - latents[0][..., : given.shape[-1]]).abs().max() < 1e-5


def test_grids_and_texts_load_no_more_than_they_use(base: Path, tmp_path: Path) -> None:
    """`encode` asks for grids in one process and encodes in others."""
    bare = tmp_path / "bare"
    shutil.copytree(base, bare)
    for name in ("vae", "audio_vae"):
        (bare / name / "diffusion_pytorch_model.safetensors").unlink()
    encoders = load_encoders(bare)
    assert encoders.encode_text("ref2va", "a", references=[IMAGE, VIDEO], shape=SHAPE)["rows"].isfinite().all()
    (bare / "text_encoder" / "model.safetensors").unlink()
    assert load_encoders(bare).latent_shapes(SHAPE) == ((24, 7, 4, 4), (2, 32, 37))


def test_encoders_load_without_a_transformer(base: Path, encoders: Encoders, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(base, bare, ignore=shutil.ignore_patterns("transformer", "scheduler", "audio_scheduler"))
    frames = SCENES[0].frames_FHWC
    assert torch.equal(load_encoders(bare).encode_keyframe(frames[0]), encoders.encode_keyframe(frames[0]))
    assert load_encoders(bare).shape(1, 16, 16) == encoders.shape(1, 16, 16)


@pytest.mark.parametrize(
    ("duration_s", "num_frames"), [(22 / 24, 22), (0.916667, 22), (0.9, 22), (1.6, 22), (1.625, 39), (5.17, 124)]
)
def test_a_shape_fills_the_duration_on_the_grid(encoders: Encoders, duration_s: float, num_frames: int) -> None:
    shape = encoders.shape(duration_s, 35.9, 3)
    assert shape == ClipShape(num_frames=num_frames, frame_rate=24, height=32, width=8, sample_rate_hz=8000)
    encoders.check(shape)


def test_a_duration_below_the_shortest_is_refused(encoders: Encoders) -> None:
    with pytest.raises(ValueError, match=r"0\.5 s .* at least 22 frames"):
        encoders.shape(0.5, 16, 16)


def test_shapes_off_the_grid_are_refused_by_name(encoders: Encoders) -> None:
    for wrong, word in (
        ({"num_frames": 23}, "17n"),
        ({"num_frames": 5}, "17n"),
        ({"frame_rate": 25}, "24"),
        ({"height": 20}, "multiples"),
        ({"sample_rate_hz": 16000}, "8000"),
    ):
        with pytest.raises(ValueError, match=word):
            encoders.check(ClipShape(**{**SHAPE.model_dump(), **wrong}))


def test_a_missing_caption_is_a_text_too(encoders: Encoders) -> None:
    text = encoders.encode_text("t2va", None)
    assert text["rows"].shape == (1, 32)
    assert text["rows"].isfinite().all()
    assert text["tags"].tolist() == [1]
    frame = SCENES[0].frames_FHWC[0]
    silent, said = (encoders.encode_text("fl2va_first", prompt, [frame]) for prompt in (None, "a"))
    assert torch.equal(silent["rows"], said["rows"][:-1])  # the label and the keyframe, and nothing after it
    shown = encoders.encode_text("ref2va", None, references=[IMAGE], shape=SHAPE)
    assert shown["tags"].unique().tolist() == [0, 1]


def test_variants_with_the_same_text_share_it(encoders: Encoders) -> None:
    captioned = {mode: encoders.text_of(str(Variant(mode))) for mode in MODES}
    assert captioned["t2va"] == captioned["a2v"] == captioned["v2a"] == "t2va"
    assert len(set(captioned.values())) == len(MODES) - 2
    assert captioned["ref2va"] == "ref2va.0" != encoders.text_of("ref2va.1")
    assert {encoders.text_of(f"{mode}-uncaptioned") for mode in ("t2va", "a2v", "v2a")} == {"shared/uncaptioned"}
    assert encoders.text_of("fl2va-uncaptioned") == "fl2va-uncaptioned"


def test_texts_see_their_keyframes_and_refuse_other_numbers(encoders: Encoders) -> None:
    first, last = SCENES[0].frames_FHWC[0], 255 - SCENES[0].frames_FHWC[0]
    one, other = (encoders.encode_text("fl2va_last", "a", [frame])["rows"] for frame in (first, last))
    assert not torch.equal(one, other)
    with pytest.raises(ValueError, match="1 keyframes given; fl2va takes first, last"):
        encoders.encode_text("fl2va", "a", [first])
    with pytest.raises(ValueError, match="without a shape"):
        encoders.encode_text("ref2va", "a", references=[IMAGE])


def test_references_are_named_by_place_and_kind(encoders: Encoders) -> None:
    sizes = {
        name: tuple(array.shape) for name, array in encoders.encode_references([SOUND, VIDEO, IMAGE], SHAPE).items()
    }
    assert sizes == {
        "0/audio": (2, 32, 37),
        "1/video": (24, 7, 8, 8),
        "1/audio": (2, 32, 37),
        "2/image": (24, 1, 16, 16),
    }


@pytest.mark.parametrize(
    ("references", "word"),
    [
        (list[Reference](), "at least one"),
        ([IMAGE] * 10, "at most 9 image"),
        ([VIDEO] * 4, "at most 3 video"),
        ([IMAGE, *[SOUND] * 4], "at most 3 audio"),
        ([*[IMAGE] * 9, *[VIDEO] * 2, *[SOUND] * 2], "at most 12"),
        ([SOUND], "on its own|own"),
        ([Reference("image")], "without its image"),
    ],
)
def test_references_the_family_does_not_take_are_refused(
    encoders: Encoders, references: list[Reference], word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        encoders.encode_references(references, SHAPE)


def test_layouts_tell_apart_what_packs_differently(encoders: Encoders) -> None:
    """Tags of the text follow from the key: a video a little longer adds nothing, one chunk longer another key."""
    wide, sizes = encoders.shape(40 / 24, 16, 16), dict[str, tuple[int, ...]]()
    keys: dict[int, str] = {}
    tags: dict[int, list[int]] = {}
    for length in (22, 30, 39):
        seen = scene("new", 5, length / 24, 24, 16, 8000, "bounce")
        video = [Reference("video", seen.frames_FHWC)]
        text = encoders.encode_text("ref2va", "a", references=video, shape=wide)
        latents = encoders.encode_references(video, wide)
        sizes = {f"references/{name}": tuple(array.shape) for name, array in latents.items()}
        keys[length], _ = encoders.layout(wide, "ref2va", {"text/rows": (50,), **sizes})
        tags[length] = text["tags"].tolist()
    assert keys[22] == keys[30] != keys[39]
    assert tags[22] == tags[30] != tags[39]
    plain: dict[str, Any] = {"text/rows": (50,)}
    modes = {encoders.layout(wide, mode, plain) for mode in MODES}
    assert len(modes) == len(MODES)
    assert encoders.layout(wide, "t2va", plain)[0] != encoders.layout(wide, "t2va", {"text/rows": (51,)})[0]
    assert encoders.layout(SHAPE, "t2va", plain)[0] != encoders.layout(wide, "t2va", plain)[0]
