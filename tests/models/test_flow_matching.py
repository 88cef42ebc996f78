"""Rectified flow against its closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.flow_matching import (
    CONDITIONS,
    PICTURE,
    SOUND,
    logit_normal,
    min_snr,
    noise_of,
    noised,
    positions,
    seed_of,
    shifted,
    velocity,
)

norm, qmc = cast(Any, scipy.stats).norm, cast(Any, scipy.stats).qmc
expit = cast("Callable[[float], float]", cast(Any, scipy.special).expit)


@given(st.floats(0, 1), st.floats(0.1, 20))
def test_shift_keeps_the_ends_and_is_undone_by_its_inverse(u: float, shift: float) -> None:
    sigma = shifted(u, shift)
    assert 0 <= sigma <= 1 + 1e-12
    assert shifted(0, shift) == 0
    assert abs(shifted(1, shift) - 1) < 1e-12
    assert abs(shifted(sigma, 1 / shift) - u) < 1e-9


@given(st.floats(1e-5, 1 - 1e-5), st.floats(-2, 2), st.floats(0.1, 3))
def test_logit_normal_is_the_inverse_of_its_cumulative_function(u: float, mean: float, std: float) -> None:
    assert logit_normal(u, mean, std) == pytest.approx(expit(norm.ppf(u, mean, std)), rel=1e-9, abs=1e-12)


def test_logit_normal_has_a_level_at_its_ends_too() -> None:
    assert 0 < logit_normal(0.0, 0.0, 1.0) < 0.01
    assert 0.99 < logit_normal(1.0, 0.0, 1.0) < 1


def test_euler_with_the_true_velocity_recovers_the_data_from_any_level() -> None:
    clean, noise = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).unbind()
    for sigma in (1.0, 0.6, 0.1):
        point = noised(clean, noise, sigma)
        assert torch.allclose(point + sigma * velocity(clean, noise), clean, atol=1e-6)


@pytest.mark.parametrize("sigma", [0.05, 0.2, 0.31, 0.5, 0.9])
@pytest.mark.parametrize("gamma", [1.0, 5.0])
def test_min_snr_weighs_the_error_of_the_data_by_the_clamped_signal_to_noise(sigma: float, gamma: float) -> None:
    clean, noise, wrong = torch.randn(3, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    signal, spoiled = (1 - sigma) * clean, sigma * noise
    ratio = float(signal.square().sum() / clean.square().sum() / (spoiled.square().sum() / noise.square().sum()))
    predicted = velocity(clean, noise) + wrong
    data = noised(clean, noise, sigma) + sigma * predicted
    expected = min(ratio, gamma) * (data - clean).square().mean()
    found = min_snr(sigma, gamma) * (predicted - velocity(clean, noise)).square().mean()
    assert float(found) == pytest.approx(float(expected), rel=1e-9)


def test_min_snr_counts_nothing_at_the_ends() -> None:
    assert (min_snr(0.0, 5.0), min_snr(1.0, 5.0)) == (0.0, 0.0)


def star_discrepancy(points: list[float]) -> float:
    """Of points on a line: the largest difference of their share below a place and the place. Niederreiter 1992, 2.6."""
    ordered, count = sorted(points), len(points)
    return max(max((rank + 1) / count - place, place - rank / count) for rank, place in enumerate(ordered))


@pytest.mark.parametrize("seed", [0, 7, 123])
def test_shared_draws_lie_evenly_on_the_line_from_any_draw_on(seed: int) -> None:
    for first in (0, 1000):
        drawn = [positions(seed, first + number, shared=True) for number in range(100)]
        assert all(video == audio for video, audio in drawn)
        assert star_discrepancy([video for video, _ in drawn]) < 0.04  # random ones have about 0.09


@pytest.mark.parametrize("seed", [0, 7, 123])
def test_separate_draws_lie_evenly_in_the_square_and_on_both_its_sides(seed: int) -> None:
    drawn = [positions(seed, number, shared=False) for number in range(100)]
    random = [qmc.discrepancy(np.random.default_rng(trial).random((100, 2))) for trial in range(20)]
    assert qmc.discrepancy(np.array(drawn)) < min(random) / 2
    for side in zip(*drawn, strict=True):
        assert star_discrepancy(list(side)) < 0.05


def test_positions_are_a_function_of_seed_and_number() -> None:
    for shared in (True, False):
        assert positions(1, 5, shared=shared) == positions(1, 5, shared=shared)
        assert positions(1, 5, shared=shared) != positions(2, 5, shared=shared)
        assert positions(1, 5, shared=shared) != positions(1, 6, shared=shared)
    assert len(set(positions(1, 5, shared=False))) == 2


def test_noise_of_a_clip_does_not_depend_on_the_clips_beside_it() -> None:
    seeds = [seed_of(3, 9, place, PICTURE) for place in range(5)]
    whole = noise_of(seeds, torch.zeros(5, 2, 3, 4))
    assert torch.equal(noise_of(seeds[2:3], torch.zeros(1, 2, 3, 4)), whole[2:3])
    assert torch.equal(noise_of(seeds[::-1], torch.zeros(5, 2, 3, 4)), whole.flip(0))
    assert torch.equal(noise_of(seeds, torch.zeros(5, 2, 3, 4, dtype=torch.float64)), whole.double())


def test_every_clip_step_and_stream_has_noise_of_its_own() -> None:
    places = [
        (seed, step, place, stream)
        for seed in (0, 1)
        for step in (0, 1, 2)
        for place in (0, 1, 2)
        for stream in (CONDITIONS, PICTURE, SOUND)
    ]
    seeds = [seed_of(*place) for place in places]
    assert len(set(seeds)) == len(places)
    noise = noise_of(seeds, torch.zeros(len(seeds), 1000))
    assert float(torch.corrcoef(noise).fill_diagonal_(0).abs().max()) < 0.2
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.02)
    assert float(noise.std()) == pytest.approx(1.0, abs=0.02)
