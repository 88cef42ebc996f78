"""The door to lip sync: a clip whose brightness and loudness say the same, by every protocol, and every missing value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from metrics.lipsync import protocols
from metrics.lipsync.distances import Reading
from metrics.lipsync.lse import LipSync, lip_sync
from metrics.lipsync.mfcc import mfcc
from metrics.lipsync.protocols import PROTOCOLS, Protocol, joined
from metrics.lipsync.syncnet import Network
from metrics.score import Score

NUM_FRAMES, SIDE_PX = 60, 240
QUICK = Protocol("quick", min_track=20)
BOX = np.array([[65.0, 65, 175, 175, 0.99]])


def tone(levels: NDArray[np.float64]) -> NDArray[np.float64]:
    """A tone whose amplitude says the brightness of each picture; one level is 1/64 of a natural logarithm."""
    wave = np.sin(2 * np.pi * 1000 * np.arange(640) / 16_000)
    return np.concatenate([0.1 * np.exp((level - 128) / 64) * wave for level in levels])


class Meter(Network):
    """Embeds five pictures as their brightness above mid grey, and the sound beside them as what it says of it."""

    def embed_lips(self, pictures_NHWC: NDArray[np.uint8]) -> torch.Tensor:
        level_N = pictures_NHWC[:, 60:160, 60:160].mean(axis=(1, 2, 3)) - 128
        return torch.from_numpy(np.lib.stride_tricks.sliding_window_view(level_N, 5).astype(np.float32))

    def embed_sound(self, windows_WCM: NDArray[np.floating]) -> torch.Tensor:
        quiet = mfcc((32768 * tone(np.array([128.0]))).astype(np.int16))[1, 0]
        return torch.from_numpy((32 * (windows_WCM[:, 0, 1::4] - quiet)).astype(np.float32))


METER = Meter("meter", "1" * 64, nn.Identity(), nn.Identity(), "cpu")


class Fixed:
    """Finds what it is told to, frame by frame."""

    name = "fixed"
    weights_sha256 = "2" * 64

    def __init__(self, boxes: list[NDArray[np.float64]]) -> None:
        self.boxes = iter(boxes)

    def faces(self, picture_HWC: NDArray[np.uint8], scale: float, min_confidence: float) -> NDArray[np.float64]:
        return next(self.boxes)


class Clip:
    """A face whose brightness changes at random, below what makes a cut."""

    def __init__(self, num_frames: int = NUM_FRAMES, lead: int = 0) -> None:
        levels = np.random.default_rng(0).integers(100, 160, num_frames + 40).astype(float)
        self.levels, self.opened = levels[20 : 20 + num_frames], 0
        self.sound = tone(levels[20 + lead : 20 + lead + num_frames])

    def frames(self) -> Iterator[NDArray[np.uint8]]:
        self.opened += 1
        for level in self.levels:
            yield np.full((SIDE_PX, SIDE_PX, 3), int(level), np.uint8)


def measured(
    clip: Clip, protocol: Protocol = QUICK, boxes: list[NDArray[np.float64]] | None = None, **changed: Any
) -> LipSync:
    found: dict[str, Any] = {"detector": Fixed(boxes or [BOX] * len(clip.levels)), "network": METER, "jpeg": False}
    found |= changed
    return lip_sync(clip.frames, found.pop("sound", clip.sound), protocol, **found)


@pytest.mark.parametrize("lead", [-10, -3, -1, 0, 1, 3, 10])
def test_injected_delay_is_recovered_exactly_through_the_whole_path(lead: int) -> None:
    result = measured(Clip(lead=lead))
    assert result.headline.offset_frames.value == lead
    assert result.masked["mean"].offset_frames.value == lead
    assert result.masked["mean"].lse_d.value == pytest.approx(0, abs=2)
    assert result.coverage == 1
    assert result.num_windows == NUM_FRAMES - 5
    assert result.num_at_edge == 0


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
def test_every_protocol_measures_and_says_by_what(protocol: Protocol) -> None:
    clip = Clip(120, lead=2)
    result = measured(clip, protocol, jpeg=True)
    assert result.headline.offset_frames.value == 2
    assert tuple(result.values) == protocol.rules
    assert (result.headline.lse_d.value is None) == protocol.confidence_only
    assert clip.opened == (1 if protocol.whole_frame else 2)
    assert (result.detector == "whole frame") == protocol.whole_frame
    assert protocol.name in result.convention
    assert "JPEG round trip" in result.convention


def test_sound_that_belongs_to_another_clip_has_less_confidence() -> None:
    own, other = Clip(), Clip()
    other.sound = tone(np.random.default_rng(9).integers(100, 160, NUM_FRAMES).astype(float))
    right, wrong = measured(own).masked["mean"], measured(other).masked["mean"]
    assert right.lse_d.value is not None
    assert wrong.lse_d.value is not None
    assert right.lse_d.value < wrong.lse_d.value
    assert (right.lse_c.value or 0) > (wrong.lse_c.value or 0)


def test_track_is_held_against_the_sound_beside_it_and_the_rest_lowers_coverage() -> None:
    boxes = [np.empty((0, 5))] * 20 + [BOX] * 40
    result = measured(Clip(lead=1), boxes=boxes)
    assert [(track.first, track.num_pictures) for track in result.tracks] == [(20, 40)]
    assert result.headline.offset_frames.value == 1
    assert result.coverage == pytest.approx(40 / 60)


def test_two_faces_are_two_tracks_and_their_frames_count_once() -> None:
    two = np.concatenate([BOX, BOX + np.array([0, 113, 0, 113, 0])])
    result = measured(Clip(), boxes=[two] * NUM_FRAMES)
    assert len(result.tracks) == 2
    assert result.coverage == 1


def test_edge_offset_is_flagged() -> None:
    result = measured(Clip(lead=15))
    assert result.headline.offset_frames.value == 15
    assert result.num_at_edge == 1


ABSENT: dict[str, tuple[dict[str, Any], str]] = {
    "weights": ({"network": None}, "export SOUNDSTAGE_SYNCNET"),
    "detector": ({"detector": None}, "export SOUNDSTAGE_S3FD"),
    "sound": ({"sound": np.zeros(0)}, "has no sound"),
    "silence": ({"sound": np.zeros(640 * NUM_FRAMES)}, "silent"),
    "finite": ({"sound": np.full(640, np.nan)}, "not finite"),
    "face": ({"boxes": [np.empty((0, 5))] * NUM_FRAMES}, "no face in 60 frames"),
    "small": ({"boxes": [BOX * [1.2, 1.2, 0.9, 0.9, 1]] * NUM_FRAMES}, "face too small: the largest is 80 px"),
    "track": ({"boxes": [BOX] * 20 + [np.empty((0, 5))] * 40}, "track too short: .* 20 frames; quick needs more than 20"),
    "shot": ({"protocol": replace(QUICK, min_track=61)}, "shot too short: the longest is 60 frames"),
    "short": ({"sound": 0.1 * np.ones(5 * 640)}, "5 frames have picture and sound; a window takes 6"),
}  # fmt: skip


@pytest.mark.parametrize("case", ABSENT)
def test_what_cannot_be_measured_is_missing_with_its_reason(case: str) -> None:
    changed, words = ABSENT[case]
    result = measured(Clip(), **changed)
    for score in (*result.headline, *result.masked["mean"]):
        assert score.value is None
        assert score.reason == result.headline.lse_d.reason
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(result.headline.lse_d.reason)
    assert result.tracks == ()
    assert result.coverage == 0


def test_a_clip_without_frames_is_missing() -> None:
    clip = Clip()
    clip.levels = clip.levels[:0]
    assert "no frames" in measured(clip).headline.lse_d.reason
    assert "0 frames have picture" in measured(clip, protocols.WAV2LIP_LRS).headline.lse_d.reason


def test_pictures_that_are_not_of_one_size_are_a_mistake() -> None:
    pictures = [np.zeros((64, 64, 3), np.uint8), np.zeros((64, 65, 3), np.uint8)]
    with pytest.raises(ValueError, match="frame 1 is"):
        lip_sync(lambda: pictures, np.ones(9600) * 0.1, protocols.WAV2LIP_LRS, None, METER)
    with pytest.raises(ValueError, match="float64"):
        lip_sync(lambda: [np.zeros((64, 64, 3))], np.ones(9600) * 0.1, protocols.WAV2LIP_LRS, None, METER)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="one channel"):
        lip_sync(lambda: pictures, np.ones((2, 9600)), protocols.WAV2LIP_LRS, None, METER)


def read(lse_d: float, lse_c: float, offset: float) -> Reading:
    return Reading(Score(lse_d), Score(lse_c), Score(offset))


def test_rules_join_tracks_as_the_projects_do() -> None:
    both = [read(7, 5, 1), read(6, 3, -4)]
    assert joined(both, "mean") == read(6.5, 4, -1.5)
    assert joined(both, "best") == read(6, 5, 1)
    assert joined(both, "widest_margin") == read(7, 5, 1)
    half = [both[0], Reading(Score.missing("gone"), Score.missing("gone"), Score.missing("gone"))]
    assert joined(half, "mean").lse_d == Score.missing("gone")


def test_protocols_have_their_published_numbers() -> None:
    assert {name: (p.whole_frame, p.min_track, p.rules) for name, p in PROTOCOLS.items()} == {
        "wav2lip_lrs": (True, 100, ("mean",)),
        "wav2lip_real": (False, 100, ("mean",)),
        "latentsync": (False, 50, ("mean",)),
        "mochabench": (False, 50, ("best",)),
        "mova": (False, 20, ("mean", "widest_margin")),
    }
    with pytest.raises(ValueError, match="min_track is 5"):
        Protocol("short", min_track=5)
    with pytest.raises(ValueError, match="rules"):
        Protocol("none", rules=())
