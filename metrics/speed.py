"""How fast work is done and what it costs: typical and slow items, throughput, and how much faster one way is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from metrics.score import Score

CONVENTION = "wall clock of whole items, one after another in a process, decoding included and writing left out"
NUM_DRAWS = 2000
"""Ends of a 95 % interval then move by 1.5 % of its width (one standard deviation) between seeds."""


class Speed(NamedTuple):
    """Of timed items that each make or use as many seconds of media."""

    num_items: int
    """That were measured, without those of the warm-up."""
    p50_s: Score
    """Median time of an item, s."""
    p95_s: Score
    """Time that one item of twenty exceeds, s."""
    items_per_s: Score
    media_s_per_s: Score
    """Seconds of media in a second of wall clock; above 1 is faster than it plays."""
    price_per_media_minute: Score
    """In the currency of the machine's price."""


def speed(
    times_s: Sequence[float], media_s: float, *, num_warm_up: int = 1, price_per_hour: float | None = None
) -> Speed:
    """What timed items say of a machine.

    Args:
        times_s: Of the items in order, s; the device had finished each before the clock was read.
        media_s: Media in an item, s.
        num_warm_up: First items left out: they load, compile and allocate.
        price_per_hour: Of all that worked on an item, in any currency.
    """
    measured = np.asarray(times_s[num_warm_up:], np.float64)
    if not len(measured) or measured.sum() <= 0:
        missing = Score.missing(f"{len(times_s)} items were timed, and the first {num_warm_up} are warm-up")
        return Speed(0, missing, missing, missing, missing, missing)
    per_second = len(measured) / float(measured.sum())
    price = Score.missing("no price an hour is set")
    if price_per_hour is not None:
        price = Score(price_per_hour / 60 / (per_second * media_s))
    return Speed(
        len(measured),
        Score(float(np.median(measured))),
        Score(float(np.quantile(measured, 0.95))),
        Score(per_second),
        Score(per_second * media_s),
        price,
    )


def speed_up(before_s: Sequence[float], after_s: Sequence[float], *, seed: int = 0) -> tuple[float, float, float]:
    """How many times faster the second way is: ratio of the medians, with a 95 % percentile bootstrap interval.

    Both ways have done the same work; what they made has to be compared elsewhere.

    Raises:
        ValueError: fewer than two times of either, or one that is not positive.
    """
    sides = [np.asarray(times, np.float64) for times in (before_s, after_s)]
    for times in sides:
        if len(times) < 2 or not (times > 0).all():
            raise ValueError(f"times {times.tolist()}: a speed-up needs at least two of each way, all above 0 s")
    rng = np.random.default_rng(seed)
    drawn = [medians(times, rng) for times in sides]
    low, high = np.quantile(drawn[0] / drawn[1], [0.025, 0.975])
    return float(np.median(sides[0]) / np.median(sides[1])), float(low), float(high)


def medians(times: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Of samples drawn with replacement."""
    return np.asarray(np.median(rng.choice(times, (NUM_DRAWS, len(times))), axis=1), np.float64)
