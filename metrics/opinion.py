"""What people think of clips: mean opinion scores, raters' biases, raters who cannot be used, and how sure all that is.

Legend: S stimuli, R raters, C clips (sources), Y systems, D draws. A vote is 1 (bad) to 5 (excellent), ITU-T P.800.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

Votes = NDArray[np.float64]
LOWEST, HIGHEST = 1, 5
LEVEL = 0.95
MIN_RATERS = 5
"""Fewer give no opinion worth a number: four raters' t-interval is ±1.1 at the usual spread of 0.7."""
MIN_RATERS_BT500 = 8
"""Below, BT.500 never fires: five raters cannot lie beyond (n−1)/√n = 1.79 deviations of their mean."""
MIN_CORRELATION = 0.75
"""Of a rater with the mean of the others. Source: the threshold in the manner of ITU-T P.913."""
NUM_DRAWS = 2000


class Opinion(NamedTuple):
    """Means over raters of every stimulus, with their uncertainty; arrays (S,)."""

    mos_S: Votes
    standard_error_S: Votes
    half_width_S: Votes
    """Of the 95 % interval by Student's t with R − 1 degrees of freedom."""


class Screened(NamedTuple):
    """What BT.500 says of a rater."""

    outlying_share: float
    """Votes far from the others', of all votes; limit `MAX_OUTLYING`."""
    one_sidedness: float
    """|high − low| ÷ (high + low) of those: a rater far off on both sides guesses, one on one side is only biased."""
    is_rejected: bool


class Estimate(NamedTuple):
    """A mean and where it would lie for other raters and other clips of the same kind."""

    mean: float
    low: float
    high: float


MAX_OUTLYING, MAX_ONE_SIDEDNESS = 0.05, 0.3
"""Source: ITU-R BT.500, screening of observers."""


def checked(votes_SR: Votes) -> Votes:
    """The votes, every rater's of every stimulus.

    Raises:
        ValueError: a vote is missing or out of range, or the shape is no table.
    """
    if votes_SR.ndim != 2 or not votes_SR.size:
        raise ValueError(f"votes of shape {votes_SR.shape}; need stimuli × raters")
    if not ((votes_SR >= LOWEST) & (votes_SR <= HIGHEST)).all():
        raise ValueError(f"a vote is missing or not within {LOWEST} to {HIGHEST}")
    return votes_SR


def student_t(freedom: int) -> float:
    """The quantile that a 95 % interval reaches to; infinite without any freedom."""
    from scipy.stats import t

    return float(cast(float, t.ppf((1 + LEVEL) / 2, freedom))) if freedom > 0 else float("inf")


def opinion(votes_SR: Votes) -> Opinion:
    """Mean opinion scores with t-intervals. Votes may have been freed of biases, and then lie between the numbers.

    Source: ITU-T P.800, P.910.
    """
    num_raters = votes_SR.shape[1]
    spread_S = votes_SR.std(axis=1, ddof=1) if num_raters > 1 else np.full(len(votes_SR), np.inf)
    error_S = spread_S / np.sqrt(num_raters)
    return Opinion(votes_SR.mean(axis=1), error_S, student_t(num_raters - 1) * error_S)


def biases(votes_SR: Votes) -> Votes:
    """By how much each rater (R,) votes above the mean of all, over all stimuli.

    Source: ITU-T P.913; van Dijk et al. 1995, "Quality assessment of coded images using numerical category scaling".
    """
    return (votes_SR - votes_SR.mean(axis=1, keepdims=True)).mean(axis=0)


def without_bias(votes_SR: Votes) -> Votes:
    """The votes less each rater's bias: means stay, what raters only differ in by severity is no longer uncertainty."""
    return votes_SR - biases(votes_SR)


def screen_bt500(votes_SR: Votes) -> list[Screened]:
    """For each rater whether they are to be left out. Needs `MIN_RATERS_BT500` raters to be able to fire.

    A stimulus that all agree on says nothing of anyone. Source: ITU-R BT.500, screening of observers.
    """
    centred_SR = votes_SR - votes_SR.mean(axis=1, keepdims=True)
    centred_SR = centred_SR[np.abs(centred_SR).max(axis=1) > 1e-9]
    square_S = (centred_SR**2).mean(axis=1)
    kurtosis_S = (centred_SR**4).mean(axis=1) / square_S**2
    factor_S = np.where((kurtosis_S >= 2) & (kurtosis_S <= 4), 2.0, np.sqrt(20))
    limit_S1 = (factor_S * centred_SR.std(axis=1, ddof=1))[:, None] if len(centred_SR) else np.zeros((0, 1))
    high_R, low_R = (centred_SR >= limit_S1).sum(axis=0), (centred_SR <= -limit_S1).sum(axis=0)
    return [_screened(int(high), int(low), len(votes_SR)) for high, low in zip(high_R, low_R, strict=True)]


def _screened(num_high: int, num_low: int, num_votes: int) -> Screened:
    outlying = num_high + num_low
    share, sided = outlying / num_votes, abs(num_high - num_low) / max(outlying, 1)
    return Screened(share, sided, share > MAX_OUTLYING and sided < MAX_ONE_SIDEDNESS)


def agreement(votes_SR: Votes) -> list[float | None]:
    """Each rater's Pearson correlation with the mean of the others; None where the others see no difference.

    One who gives the same vote to all, where others see differences, agrees with nobody: 0.
    """
    result: list[float | None] = []
    for rater in range(votes_SR.shape[1]):
        own_S, others_S = votes_SR[:, rater], np.delete(votes_SR, rater, axis=1).mean(axis=1)
        if votes_SR.shape[1] < 2 or np.ptp(others_S) < 1e-9:
            result.append(None)
        else:
            result.append(float(np.corrcoef(own_S, others_S)[0, 1]) if np.ptp(own_S) > 1e-9 else 0.0)
    return result


def mean_agreement(scales: list[Votes]) -> list[float | None]:
    """`agreement` of each rater, mean over the scales where there is any."""
    found = [agreement(votes_SR) for votes_SR in scales]
    columns = [[value for value in column if value is not None] for column in zip(*found, strict=True)]
    return [sum(values) / len(values) if values else None for values in columns]


def cluster_bootstrap(votes_RCY: Votes, *, seed: int, num_draws: int = NUM_DRAWS) -> Votes:
    """Means (D, Y) of every system when raters and clips are both drawn anew, whole, with replacement.

    Votes of one rater, or on one clip, are not independent: pooling them makes intervals several times too narrow.
    With both drawn, intervals err on the wide side. Source: Owen 2007, "The pigeonhole bootstrap".
    """
    num_raters, num_clips, _ = votes_RCY.shape
    rng = np.random.default_rng(seed)
    raters_DR = rng.multinomial(num_raters, np.full(num_raters, 1 / num_raters), num_draws)
    clips_DC = rng.multinomial(num_clips, np.full(num_clips, 1 / num_clips), num_draws)
    return np.einsum("dr,rcy,dc->dy", raters_DR, votes_RCY, clips_DC, optimize=True) / (num_raters * num_clips)


def estimate(mean: float, means_D: Votes) -> Estimate:
    """The mean with the 95 % percentile interval of its draws."""
    low, high = np.quantile(means_D, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(mean, float(low), float(high))
