"""Rectified flow: the path between data and noise, and the noise of every clip as a function of its place in training.

sigma is the noise level, 0 at the data. Source: Liu et al. 2022 (arXiv 2209.03003), equation 1, with velocities that
point towards the data as in the released H3 scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

GOLDEN = (0.6180339887498949,)
PLASTIC = (0.7548776662466927, 0.5698402909980532)
"""Fractional steps whose multiples fill a line and a square evenly, so a few draws already see every noise level.

Source: Roberts 2018, "The unreasonable effectiveness of quasirandom sequences", for one and two dimensions."""
CONDITIONS, PICTURE, SOUND = range(3)
"""Streams of noise of one clip."""


def shifted(u: float, shift: float) -> float:
    """Noise level at position `u` under a shift: more of them lie near pure noise as `shift` grows.

    Source: Esser et al. 2024 (arXiv 2403.03206), equation 23; H3 uses 12 for picture and 3 for sound.
    """
    return shift * u / (1 + (shift - 1) * u)


def logit_normal(u: float, mean: float, std: float) -> float:
    """Noise level at position `u` of a logit-normal distribution. Source: Esser et al. 2024, equation 19."""
    edge = 1e-6  # the ends lie at infinity
    return 1 / (1 + float(np.exp(-(mean + std * NormalDist().inv_cdf(min(max(u, edge), 1 - edge))))))


def min_snr(sigma: float, gamma: float) -> float:
    """Weight of a squared velocity error that gives the squared error of the data the weight min(SNR, gamma).

    The data's error is sigma times the velocity's and SNR is ((1 - sigma) / sigma)². Source: Hang et al. 2023
    (arXiv 2303.09556), equation 8.
    """
    return min((1 - sigma) ** 2, gamma * sigma**2)


def noised(clean: Tensor, noise: Tensor, sigma: float) -> Tensor:
    """The point at noise level `sigma` on the straight path from data to noise."""
    return (1 - sigma) * clean + sigma * noise


def velocity(clean: Tensor, noise: Tensor) -> Tensor:
    """What the model regresses: the path's direction towards the data."""
    return clean - noise


def positions(seed: int, number: int, *, shared: bool) -> tuple[float, float]:
    """Where on the distributions of noise levels draw `number` lies, for picture and sound; even over a few draws.

    Args:
        seed: Decides where the sequence begins.
        number: Of the draw, from 0.
        shared: One position for both.
    """
    offsets = np.random.SeedSequence([seed, 0]).generate_state(2, np.uint64) / 2.0**64
    steps = GOLDEN * 2 if shared else PLASTIC
    first, second = ((float(offset) + step * number) % 1.0 for offset, step in zip(offsets, steps, strict=True))
    return first, first if shared else second


def seed_of(seed: int, step: int, place: int, stream: int) -> int:
    """Seed of one stream of noise of the clip at a place in a step's global batch.

    So it does not matter which process computes the clip, beside which others, or whether the run was resumed.
    """
    state = np.random.SeedSequence([seed, 1, step, place, stream]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))  # torch takes 63 bits


def noise_of(seeds: Sequence[int], like_B: Tensor) -> Tensor:
    """Standard normal noise of the shape, type and device of `like_B`, each item's from its own seed.

    Drawn on the CPU in single precision, so that every device sees the same.
    """
    items = [torch.randn(like_B.shape[1:], generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(items).to(like_B)
