"""Camera shots between transitions, and the clips of exactly one training length that fit into them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from data.boundaries import Boundary
from data.records import BoundaryReason

MICROSECOND = 10**6


class Shot(NamedTuple):
    """A span `[start_s, end_s)` between transitions, s after the first frame shown."""

    start_s: float
    end_s: float
    opens: Boundary | None
    """None at the source's start."""
    closes: Boundary | None


class Window(NamedTuple):
    """A span of exactly one clip, s after the first frame shown, to the microsecond."""

    start_s: float
    end_s: float
    reason: BoundaryReason
    score: float


def shots(boundaries: Sequence[Boundary], end_s: float, min_shot_s: float) -> list[Shot]:
    """The spans between transitions, these themselves belonging to none; shorter ones than `min_shot_s` are left out."""
    starts = [0.0, *(item.end_s for item in boundaries)]
    ends = [*(item.start_s for item in boundaries), end_s]
    sides = [None, *boundaries, None]
    found = [Shot(start, end, sides[i], sides[i + 1]) for i, (start, end) in enumerate(zip(starts, ends, strict=True))]
    return [shot for shot in found if shot.end_s - shot.start_s >= min_shot_s]


def windows(shot: Shot, duration_s: Fraction, margin_s: float) -> list[Window]:
    """Consecutive spans of exactly `duration_s` that fit into a shot, `margin_s` away from its transitions."""
    margin = Fraction(margin_s)
    first = exact(shot.start_s) + (margin if shot.opens else 0)
    limit = exact(shot.end_s) - (margin if shot.closes else 0)
    room = limit - first + Fraction(1, MICROSECOND)  # ends are rounded to the microsecond
    result: list[Window] = []
    for number in range(max(0, int(room // duration_s))):
        start = first + number * duration_s
        opening = (shot.opens.reason, shot.opens.score) if shot.opens else ("start", 0.0)
        reason, score = opening if number == 0 else ("stride", 0.0)
        result.append(Window(rounded(start), rounded(start + duration_s), reason, score))
    return result


def no_room(boundaries: Sequence[Boundary], end_s: float, min_shot_s: float, black_share: float) -> tuple[str, str]:
    """Which rule leaves out a source whose shots hold no clip, and what was measured; where all is black, no setting."""
    found = shots(boundaries, end_s, 0.0)
    longest = max(shot.end_s - shot.start_s for shot in found)
    if black_share and longest < min_shot_s:
        return "black", f"{black_share:.1%} of the frames are black"
    which = "the only shot" if len(found) == 1 else f"the longest of {len(found)} shots"
    return "shape", f"{which} is {longest:.3f} s" + (
        f"; {black_share:.0%} of the frames are black" if black_share else ""
    )


def exact(seconds: float) -> Fraction:
    """A time as a whole number of microseconds."""
    return Fraction(round(seconds * MICROSECOND), MICROSECOND)


def rounded(seconds: Fraction) -> float:
    """The float nearest to a time rounded to the microsecond."""
    return round(seconds * MICROSECOND) / MICROSECOND
