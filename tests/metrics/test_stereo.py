"""Every way to lose stereo is seen in a number."""

from __future__ import annotations

import math

import numpy as np
import pytest

from metrics.stereo import balance_error_db, channel_r, channel_r_error, placement_error, swap_margin_db
from tests.metrics.sounds import RATE_HZ, noise


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


def stage(seed: int = 0, duration_s: float = 2.0) -> np.ndarray:
    """A sound that goes from the left to the right and back over a quiet wide one, (2, T): balanced as a whole."""
    moving, wide = noise(seed, duration_s, channels=1)[0], noise(seed + 100, duration_s, 0.01)
    angle = np.pi / 4 * (1 + 0.9 * np.sin(np.linspace(0, 4 * np.pi, len(moving))))
    return np.stack([np.cos(angle), np.sin(angle)]) * moving + wide


@pytest.mark.parametrize(
    "loss", ["swapped", "one channel twice", "panned", "half panned", "antiphase", "unrelated sides"]
)
def test_every_way_to_lose_stereo_is_seen(loss: str) -> None:
    reference = stage()
    mono = reference.mean(axis=0)
    made = {
        "swapped": reference[::-1],
        "one channel twice": np.stack([mono, mono]),
        "panned": np.stack([mono, 0.01 * mono]),
        "half panned": reference * [[1.0], [0.5]],
        "antiphase": reference * [[1.0], [-1.0]],
        "unrelated sides": np.stack([reference[0], np.roll(reference[1], 4000)]),
    }[loss]
    found = {
        "balance": balance_error_db(reference, made).value,
        "likeness": channel_r_error(reference, made).value,
        "placement": placement_error(reference, made, RATE_HZ).value,
        "swap": swap_margin_db(reference, made, RATE_HZ).value,
    }
    kept = swap_margin_db(reference, reference, RATE_HZ).value
    assert kept > 3
    seen = {
        "swapped": found["swap"] == pytest.approx(-kept) and found["placement"] > 0.8,
        "one channel twice": found["likeness"] > 0.3 and found["placement"] > 0.4 and abs(found["swap"]) < 1e-9,
        "panned": found["balance"] > 35 and found["placement"] > 0.8,
        "half panned": found["balance"] == pytest.approx(20 * math.log10(2)) and found["placement"] > 0.1,
        "antiphase": found["likeness"] > 0.5,
        "unrelated sides": found["likeness"] > 0.3,
    }
    assert seen[loss], found
    assert placement_error(reference, reference, RATE_HZ).value == channel_r_error(reference, reference).value == 0


def test_a_moving_sound_that_stands_still_is_seen_though_both_are_balanced() -> None:
    reference = stage()
    still = np.stack([reference.mean(axis=0)] * 2)
    assert balance_error_db(reference, still).value < 0.5
    assert placement_error(reference, still, RATE_HZ).value > 0.4


def test_placement_and_likeness_have_their_closed_forms() -> None:
    left, right = noise()
    assert placement_error(np.stack([left, 0 * left]), np.stack([0 * left, left]), RATE_HZ).value == pytest.approx(2)
    assert placement_error(np.stack([left, left]), np.stack([left, 0 * left]), RATE_HZ).value == pytest.approx(1)
    assert channel_r(np.stack([left, left])).value == pytest.approx(1)
    assert channel_r(np.stack([left, -left])).value == pytest.approx(-1)
    assert channel_r(np.stack([left, right])).value == pytest.approx(np.corrcoef(left, right)[0, 1])


def test_placement_that_cannot_be_judged_is_missing_with_the_reason() -> None:
    sounds = noise(duration_s=1)
    one_sided = sounds * [[1.0], [0.0]]
    assert "generated sound: its right side is silent" in channel_r_error(sounds, one_sided).reason
    early, late = sounds.copy(), sounds.copy()
    early[:, RATE_HZ // 2 :], late[:, : RATE_HZ // 2] = 0, 0
    assert "no 100 ms in which both" in placement_error(early, late, RATE_HZ).reason
    for yardstick in (channel_r_error, balance_error_db):
        assert "2 channels; the sound has 1" in yardstick(sounds[:1], sounds[:1]).reason
        assert "reference is silent" in yardstick(0 * sounds, sounds).reason
    assert "2 channels" in swap_margin_db(sounds[:1], sounds[:1], RATE_HZ).reason
