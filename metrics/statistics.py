"""How sure we are: bootstrap intervals that respect that clips of one source are not independent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_DRAWS = 2000
"""With 30 sources the ends then move by 1.5 % of the interval's width (one standard deviation) between seeds."""
LEVEL = 0.95
CONVENTION = f"95 % percentile bootstrap over sources, {NUM_DRAWS} draws"


class Interval(NamedTuple):
    """A mean over items and where it would lie for other sources of the same kind."""

    mean: float
    low: float | None
    """None with fewer than two sources: one source says nothing of the spread between them."""
    high: float | None
    num_items: int
    num_sources: int


def bootstrap_mean(
    values: Sequence[float], sources: Sequence[str], *, seed: int = 0, num_draws: int = NUM_DRAWS, level: float = LEVEL
) -> Interval | None:
    """Mean of `values` with a percentile interval; whole sources are drawn with replacement. None without values.

    Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 13; Field and Welsh 2007,
    "Bootstrapping clustered data".
    """
    if len(values) != len(sources):
        raise ValueError(f"{len(values)} values but {len(sources)} sources")
    if not values:
        return None
    array = np.asarray(values, dtype=np.float64)
    names, index = np.unique(np.asarray(sources), return_inverse=True)
    mean = float(array.mean())
    if len(names) < 2:
        return Interval(mean, None, None, len(values), len(names))
    sums = np.bincount(index, weights=array, minlength=len(names)).astype(np.float64)
    sizes = np.bincount(index, minlength=len(names)).astype(np.float64)
    means = draw_means(sums, sizes, seed, num_draws)
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(mean, float(low), float(high), len(values), len(names))


def draw_means(sums: NDArray[np.float64], sizes: NDArray[np.float64], seed: int, num_draws: int) -> NDArray[np.float64]:
    """Means of `num_draws` resamples; how often each source is drawn is multinomial."""
    num_sources = len(sums)
    counts = np.random.default_rng(seed).multinomial(num_sources, np.full(num_sources, 1 / num_sources), num_draws)
    return (counts @ sums) / (counts @ sizes)


def paired_difference(
    left: Mapping[str, float], right: Mapping[str, float], source_of: Mapping[str, str], *, seed: int = 0
) -> Interval | None:
    """Mean of left − right over the items both have, with its interval; None where they share no item."""
    shared = sorted(left.keys() & right.keys())
    differences = [left[item] - right[item] for item in shared]
    return bootstrap_mean(differences, [source_of[item] for item in shared], seed=seed)


def is_better(interval: Interval, *, higher_is_better: bool) -> bool:
    """Whether the whole interval lies on the good side of zero."""
    if interval.low is None or interval.high is None:
        return False
    return interval.low > 0 if higher_is_better else interval.high < 0
