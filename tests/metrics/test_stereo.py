"""Every way to lose stereo is seen in a number."""

from __future__ import annotations

import math

import numpy as np
import pytest

from metrics.stereo import balance_error_db
from tests.metrics.sounds import noise


@pytest.mark.parametrize("right_gain", [1.0, 0.5, 0.1])
def test_placement_error_is_the_difference_of_the_channel_ratio(right_gain: float) -> None:
    mono = noise(channels=1)[0]
    reference, degraded = np.stack([mono, mono]), np.stack([mono, right_gain * mono])
    assert balance_error_db(reference, degraded).value == pytest.approx(-20 * math.log10(right_gain), abs=1e-6)
    assert balance_error_db(degraded, degraded * 0.3).value == pytest.approx(0, abs=1e-9)


def test_sound_on_the_wrong_side_is_twice_its_placement_away_and_capped() -> None:
    mono = noise(channels=1)[0]
    left, right = np.stack([mono, 0 * mono]), np.stack([0 * mono, mono])
    assert balance_error_db(left, right).value == 80
    assert "2 channels" in balance_error_db(mono[None], mono[None]).reason
