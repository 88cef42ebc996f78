"""Flicker, freezes and motion in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from metrics.motion import MotionMeter, MotionScores


def measured(reference_FHW: NDArray[np.uint8], distorted_FHW: NDArray[np.uint8]) -> MotionScores:
    meter = MotionMeter()
    for pair in zip(reference_FHW, distorted_FHW, strict=True):
        meter.add(*pair)
    return meter.result()


def rolling(num_frames: int = 20, speed_px: int = 2) -> NDArray[np.uint8]:
    """A texture that runs to the right."""
    texture = np.random.default_rng(0).integers(40, 200, (32, 8)).repeat(8, axis=1).astype(np.uint8)
    return np.stack([np.roll(texture, speed_px * index, axis=1) for index in range(num_frames)])


def test_flicker_is_the_swing_of_the_light_and_a_fade_is_none() -> None:
    still = np.full((9, 24, 40), 100, np.uint8)
    blinking = still.copy()
    blinking[::2] += 6
    found = measured(still, blinking)
    assert found.flicker.value == pytest.approx(6)
    assert found.flicker_excess.value == pytest.approx(6)
    fading = still + 5 * np.arange(9, dtype=np.uint8)[:, None, None]
    assert measured(still, fading).flicker.value == pytest.approx(0, abs=1e-5)
    assert measured(blinking, blinking).flicker_excess.value == 0


def test_repeats_count_only_where_the_reference_moves_and_the_longest_run_is_told() -> None:
    reference = rolling()
    frozen = reference.copy()
    frozen[3:5], frozen[10:14] = frozen[2], frozen[9]
    found = measured(reference, frozen)
    assert (found.frozen_frames.value, found.longest_freeze.value) == (6, 4)
    clean = measured(reference, reference)
    assert (clean.frozen_frames.value, clean.longest_freeze.value) == (0, 0)
    still = np.repeat(reference[:1], 20, axis=0)
    assert measured(still, still).frozen_frames.value == 0


def test_motion_is_a_ratio_to_the_references_and_its_error_in_octaves() -> None:
    ramp = np.zeros((6, 16, 16), np.uint8) + 4 * np.arange(6, dtype=np.uint8)[:, None, None]
    found = measured(ramp, ramp // 2)
    assert found.motion_ratio.value == pytest.approx(0.5)
    assert found.motion_error.value == pytest.approx(1)
    assert measured(ramp, ramp).motion_error.value == 0
    stopped = measured(ramp, np.zeros_like(ramp))
    assert stopped.motion_ratio.value == 0
    assert stopped.motion_error.value == pytest.approx(math.log2(4 / 0.255))


def test_more_speed_is_more_motion() -> None:
    reference = rolling(speed_px=2)
    ratios = [measured(reference, rolling(speed_px=speed)).motion_ratio.value or 0.0 for speed in (0, 1, 2, 4)]
    assert ratios[0] < ratios[1] < ratios[2] < ratios[3]
    assert ratios[2] == 1


def test_what_is_undefined_is_missing_under_its_name() -> None:
    reference = rolling(1)
    assert measured(reference, reference).frozen_frames.reason == "the clip has 1 frames; motion needs 2"
    short = measured(rolling(2), rolling(2))
    assert short.flicker.reason == "the clip has 2 frames; flicker needs 3"
    assert short.motion_ratio.value == 1
    still = np.zeros((4, 16, 16), np.uint8)
    assert "the reference moves by less than 0.255 levels" in measured(still, still).motion_ratio.reason
    with pytest.raises(ValueError, match="resize"):
        MotionMeter().add(np.zeros((8, 8), np.uint8), np.zeros((8, 9), np.uint8))
