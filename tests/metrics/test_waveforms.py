"""Levels, resampling, channels, and the lag between two sounds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from metrics.sound import level_error_db, lsd_db
from metrics.waveforms import level_db, resample
from tests.metrics.sounds import RATE_HZ, noise, tone


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
