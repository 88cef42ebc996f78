"""At which noise levels LTX-2 was trained."""

from __future__ import annotations

from bisect import bisect_left
from math import exp, log
from statistics import NormalDist

LEAST_SIGMA = 1e-3
"""Noise levels below are folded back above it. Source: the LTX-2 trainer's `ShiftedLogitNormalTimestepSampler`."""
UNIFORM_SHARE = 0.1
"""Of the draws that are uniform instead. Source: likewise."""
STRETCH = (-2.5758, 3.0902)
"""Half a percent and 99.9 percent of a normal distribution, which are put at 0 and 1. Source: likewise."""


def sigma_at(u: float, num_tokens: int) -> float:
    """Noise level at a position `u` in [0, 1] of the distribution that `num_tokens` tokens are trained with.

    A normal draw around a mean that grows with the tokens, 0.95 at 1,024 to 2.05 at 4,096 and no higher, through a
    sigmoid, stretched to [0, 1] with its lowest half percent folded back and its highest 0.1 percent at 1; a tenth of
    all draws is uniform. Source: `ShiftedLogitNormalTimestepSampler` of Lightricks/LTX-2's ltx-trainer at 400fd31.
    """
    mean = 0.95 + (2.05 - 0.95) * (min(num_tokens, 4096) - 1024) / (4096 - 1024)
    low, high = (1 / (1 + exp(-mean - place)) for place in STRETCH)
    normal = NormalDist(mean)

    def below(sigma: float) -> float:
        """Share of the sigmoid's draws below a stretched noise level."""
        raw = low + sigma * (high - low)
        return normal.cdf(log(raw / (1 - raw))) if raw > 0 else 0.0

    def share(place: int) -> float:
        """Share of all draws up to a noise level, in parts of 2^30."""
        sigma = place / 2**30
        if sigma < LEAST_SIGMA:
            return 0.0
        uniform = (sigma - LEAST_SIGMA) / (1 - LEAST_SIGMA)
        return (1 - UNIFORM_SHARE) * (below(sigma) - below(2 * LEAST_SIGMA - sigma)) + UNIFORM_SHARE * uniform

    return max(LEAST_SIGMA, bisect_left(range(2**30), u, key=share) / 2**30)
