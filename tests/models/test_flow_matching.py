"""Rectified flow against its closed forms."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from models.flow_matching import draw, noised, shifted, velocity


@given(st.floats(0, 1), st.floats(0.1, 20))
def test_shift_keeps_the_ends_and_is_undone_by_its_inverse(u: float, shift: float) -> None:
    sigma = shifted(u, shift)
    assert 0 <= sigma <= 1 + 1e-12
    assert shifted(0, shift) == 0
    assert abs(shifted(1, shift) - 1) < 1e-12
    assert abs(shifted(sigma, 1 / shift) - u) < 1e-9


def test_euler_with_the_true_velocity_recovers_the_data_from_any_level() -> None:
    clean, noise = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).unbind()
    for sigma in (1.0, 0.6, 0.1):
        point = noised(clean, noise, sigma)
        assert torch.allclose(point + sigma * velocity(clean, noise), clean, atol=1e-6)


def test_draws_repeat_by_step_and_cover_the_noise_levels_evenly() -> None:
    assert draw(1, 5).u == draw(1, 5).u != draw(2, 5).u
    left, right = (torch.randn(4, generator=draw(1, 5).generator) for _ in range(2))
    assert torch.equal(left, right)
    counts = torch.histc(torch.tensor([draw(7, step).u for step in range(100)]), bins=10, min=0, max=1)
    assert counts.min() >= 9
    assert counts.max() <= 11
