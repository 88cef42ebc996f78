"""Rectified flow, as H3 states it: t = 1 is clean, velocity points from noise to data.

sigma = 1 - t is the noise level. Source: Liu et al. 2022 (arXiv 2209.03003), equation 1, with time reversed as in the
released H3 scheduler.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def shifted(u: float, shift: float) -> float:
    """Noise level of a uniform draw `u` under a shift: more draws fall near pure noise as `shift` grows.

    Source: Esser et al. 2024 (arXiv 2403.03206), equation 23; H3 uses 12 for picture and 3 for sound.
    """
    return shift * u / (1 + (shift - 1) * u)


def noised(clean: Tensor, noise: Tensor, sigma: float) -> Tensor:
    """The point at noise level `sigma` on the straight path from data to noise."""
    return (1 - sigma) * clean + sigma * noise


def velocity(clean: Tensor, noise: Tensor) -> Tensor:
    """What the model regresses: the path's direction towards the data."""
    return clean - noise


class Draw(NamedTuple):
    """The randomness of one training batch."""

    u: float
    """Uniform position on the noise schedule, shared by picture and sound through their two shifts."""
    generator: torch.Generator
    """Source of the noise tensors, in the order conditions, picture, sound."""


GOLDEN = 0.6180339887498949
"""Fractional golden ratio: its multiples fill [0, 1) evenly, so a few steps already see every noise level."""


def draw(seed: int, step: int, micro_batch: int = 0) -> Draw:
    """The randomness of a batch as a pure function of (seed, step, micro-batch): resuming needs no stored state."""
    start = torch.Generator().manual_seed(seed)
    offset = float(torch.rand((), generator=start))
    u = (offset + GOLDEN * (step + 0.5 * micro_batch)) % 1.0
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 64 + micro_batch)
    return Draw(u, generator)
