"""Offsets between picture and sound are recovered, and AV-Align falls as they grow."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics.alignment import av_align, event_offset, flash_offset, flash_times_s, matches
from tests.data.small_films import FLASH, flash_and_click
from tests.metrics.test_onsets import events_of

HZ = 48_000
JERKS = (12, 26, 35, 51, 60)
"""Frames at which a body jumps, at no regular distance."""


def jerky(num_frames: int = 72) -> tuple[list[np.ndarray], np.ndarray]:
    """A body that jumps and stands, with a click at each jump, at 24 frames a second."""
    x, frames = 20, []
    backdrop = np.random.default_rng(0).integers(0, 60, (96, 128, 1), np.uint8).repeat(3, 2)
    for number in range(num_frames):
        x += (9 if number % 2 else -7) if number in JERKS else 0
        frame = backdrop.copy()
        frame[30:62, x : x + 32] = 220
        frames.append(frame)
    sound = np.zeros((2, num_frames * HZ // 24), np.float32)
    sound[:, [number * HZ // 24 for number in JERKS if number < num_frames]] = 0.8
    return frames, sound


def moved(sound: np.ndarray, samples: int) -> np.ndarray:
    """The sound later by so many samples, silence around it."""
    return np.roll(np.pad(sound, ((0, 0), (HZ, HZ))), samples, axis=1)[:, HZ:-HZ]


@pytest.mark.parametrize("rate", [24, 25, Fraction(30000, 1001)])
@pytest.mark.parametrize("frames_off", [-10, -3, -1, 0, 1, 2, 10])
def test_a_flash_tells_the_offset_of_its_click_to_the_sample(rate: Fraction | int, frames_off: int) -> None:
    frames, sound = flash_and_click(rate=rate)
    sound[1] = 0
    samples = round(frames_off / Fraction(rate) * HZ)
    offset, share = flash_offset(frames, moved(sound, samples), rate, HZ)
    assert flash_times_s(frames, rate) == pytest.approx([FLASH / rate])
    assert offset.value == pytest.approx(1000 * samples / HZ, abs=1000 / HZ)
    assert share.value == 1


@settings(max_examples=25)
@given(st.integers(-10 * HZ // 24, 10 * HZ // 24))
def test_an_offset_that_irregular_events_share_is_recovered_to_the_sample(samples: int) -> None:
    _, sound = jerky()
    offset, share = event_offset([number / 24 for number in JERKS], moved(sound, samples), HZ)
    assert offset.value == pytest.approx(1000 * samples / HZ, abs=1e-6)
    assert share.value == 1


@pytest.mark.parametrize("frames_off", [-10, -1, 0, 1, 10])
def test_the_sample_world_knows_how_late_its_collisions_are(monkeypatch: pytest.MonkeyPatch, frames_off: int) -> None:
    events, sound = events_of(monkeypatch, 3, "collide")
    samples = frames_off * 32_000 // 24
    padded = np.roll(np.pad(sound, ((0, 0), (HZ, HZ))), samples, axis=1)
    offset, share = event_offset([time_s + HZ / 32_000 for time_s in events], padded, 32_000)
    assert offset.value == pytest.approx(1000 * frames_off / 24, abs=1)
    assert share.value == 1


def test_a_lost_click_costs_its_share_and_not_the_offset() -> None:
    _, sound = jerky()
    sound[:, : 20 * HZ // 24] = 0
    offset, share = event_offset([number / 24 for number in JERKS], sound, HZ)
    assert offset.value == pytest.approx(0, abs=1e-6)
    assert share.value == pytest.approx(0.8)


def test_av_align_is_one_for_clicks_at_jumps_and_falls_with_their_delay() -> None:
    frames, sound = jerky()
    found = [av_align(frames, moved(sound, off * HZ // 24), 24, HZ).value for off in (0, 1, 2, 3, 10)]
    assert found[0] == 1
    assert 1 > found[1] > max(found[2:])
    assert max(found[2:]) < 0.2  # what chance leaves
    assert av_align(frames, sound[:, : 30 * HZ // 24], 24, HZ).value == pytest.approx(2 / 5)
    assert av_align(frames, moved(sound, 2 * HZ // 24), 24, HZ, num_frames_off=3).value == 1


def test_each_peak_is_matched_once_and_within_the_tolerance_only() -> None:
    assert matches([1.0, 1.1], np.array([1.05, 1.06, 1.07]), 0.1) == [(0, 0), (1, 1)]
    assert matches([1.0], np.array([1.1]), 0.1) == []


def test_what_cannot_be_aligned_is_missing_with_the_reason() -> None:
    frames, sound = jerky(24)
    still, broken = frames[:1] * 24, sound.copy()
    broken[0, 3] = np.inf
    tone = 0.1 * np.sin(2 * np.pi * 440 * np.arange(HZ) / HZ)[None]
    for made, reason in ((None, "no sound"), (0 * sound, "silent"), (broken, "not finite")):
        assert reason in av_align(frames, made, 24, HZ).reason
        assert reason in flash_offset(frames, made, 24, HZ).offset_ms.reason
    assert "from 3 frames on; there are 2" in av_align(frames[:2], sound, 24, HZ).reason
    assert "no flash in the picture" in flash_offset(still, sound, 24, HZ).offset_ms.reason
    assert av_align(still, tone, 24, HZ).value == 0
    far = event_offset([9.0], tone, HZ)
    assert "no onset within 1 s of any known event" in far.offset_ms.reason
    assert far.share.value == 0
