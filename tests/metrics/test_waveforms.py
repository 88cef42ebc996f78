"""Levels, resampling, channels, and the lag between two sounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrics.sound import level_error_db, lsd_db
from metrics.waveforms import align, downmix, level_db, resample, why_not
from tests.metrics.sounds import RATE_HZ, noise, speech, tone


def test_level_of_a_sine_is_three_db_under_its_peak_and_silence_has_a_floor() -> None:
    assert level_db(tone(100, 0.5)) == pytest.approx(20 * math.log10(0.5 / math.sqrt(2)), abs=1e-6)
    assert level_db(np.zeros((2, 10))) == level_db(np.zeros((2, 0))) == -120
    sounds = noise()
    assert level_error_db(sounds, 2 * sounds).value == pytest.approx(6.0206, abs=1e-4)


def test_resampling_keeps_a_tone_and_the_length() -> None:
    result = resample(tone(440, 0.5), RATE_HZ, 16_000)
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    assert result.shape == (1, 16_000)
    assert np.abs(result[0, 400:-400] - expected[400:-400]).max() < 1e-3


def test_sounds_of_other_lengths_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="same length"):
        lsd_db(noise(), noise()[:, :-1], RATE_HZ)


@pytest.mark.parametrize("frames", [-10, -3, -1, 0, 1, 2, 10])
def test_a_delay_in_frames_is_recovered_exactly_and_taken_out(frames: int) -> None:
    rate_hz = 16_000
    whole = np.concatenate([speech(), speech()[:, ::-1]])
    lag = frames * rate_hz // 25
    moved = np.roll(whole, lag, axis=1) + noise(5, whole.shape[1] / RATE_HZ, 0.003)[:, : whole.shape[1]]
    reference_CT, degraded_CT, lag_ms = align(whole, moved, rate_hz)
    assert lag_ms.value == 40 * frames
    assert reference_CT.shape == degraded_CT.shape == (2, whole.shape[1] - abs(lag))
    assert np.abs(reference_CT - degraded_CT).max() < 0.02


@given(st.integers(-4000, 4000), st.sampled_from([0.01, 1.0, 3.0]), st.floats(-0.2, 0.2))
def test_any_lag_is_recovered_whatever_the_level_and_offset(lag: int, gain: float, offset: float) -> None:
    sounds = noise(3, 2.0)
    found = align(sounds[:, 4000:-4000], (gain * sounds + offset)[:, 4000 - lag : 12_000 - lag], RATE_HZ).lag_ms
    if abs(lag) == 4000:
        assert "at the end of the search, 500 ms" in found.reason
    else:
        assert found.value == 1000 * lag / RATE_HZ


def test_a_lag_that_means_nothing_is_missing_and_the_sounds_stay_as_they_were() -> None:
    first, second = noise(0), noise(1)
    raw = align(first, second, RATE_HZ)
    assert "correlate by 0.0" in raw.lag_ms.reason
    assert raw.reference_CT is first
    assert raw.degraded_CT is second
    assert "generated sound is silent" in align(first, 0 * first, RATE_HZ).lag_ms.reason


def test_an_offset_without_sound_is_named() -> None:
    sounds = noise()
    assert why_not(np.full_like(sounds, 0.2), sounds).reason == "reference is constant: an offset without any sound"
    assert why_not(sounds + 0.2, sounds) is None
    assert why_not(sounds[:, :0], sounds[:, :0]).reason == "no samples"


def test_opposite_channels_cancel_in_the_downmix_and_equal_ones_do_not() -> None:
    left = noise(channels=1)
    assert np.abs(downmix(np.concatenate([left, -left]))).max() == 0
    assert np.allclose(downmix(np.concatenate([left, left])), left)
