"""Camera cuts, found from how much each picture differs from the one before.

Method: mean difference in hue, saturation and value, as PySceneDetect's content detector measures it
(github.com/Breakthrough/PySceneDetect), held against its neighbourhood as its adaptive detector does; ours weighs hue
by saturation (grey has no hue), treats hue as a circle, and does not take a flash for two cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

MIN_CHANGE = 0.06
"""Smallest change that can be a cut, 0–1; PySceneDetect's adaptive detector asks 15 of 255 of its score."""
MIN_RATIO = 3.0
"""How many times the mean change of the neighbours a cut changes; PySceneDetect's adaptive default."""
NEIGHBOURS = 2
"""Frames on either side that a change is held against."""
FLASH_S = 0.25
"""A picture that is back after this long was interrupted by a flash, not cut, s."""
MICROSECOND = 10**6


class Shot(NamedTuple):
    """A span `[start_s, end_s)` between cuts, s after the first frame shown."""

    start_s: float
    end_s: float
    opens_with_cut: bool
    closes_with_cut: bool


class Window(NamedTuple):
    """A span of exactly one clip, s after the first frame shown, to the microsecond."""

    start_s: float
    end_s: float
    reason: Literal["start", "cut", "stride"]


def change(before_HWC: NDArray[np.uint8], after_HWC: NDArray[np.uint8]) -> float:
    """How different two HSV pictures (as OpenCV has them, hue 0–179) are, 0–1."""
    difference = cv2.absdiff(before_HWC, after_HWC).astype(np.float32)
    hue, saturation, value = difference[..., 0], difference[..., 1], difference[..., 2]
    colour = np.minimum(before_HWC[..., 1], after_HWC[..., 1]).astype(np.float32) / 255
    turned = np.minimum(hue, 180 - hue) / 90 * colour
    return float(np.mean(turned) + np.mean(saturation) / 255 + np.mean(value) / 255) / 3


def find_cuts(changes: NDArray[np.float64], times_s: NDArray[np.float64], thumbs_FHW: NDArray[np.uint8]) -> list[int]:
    """Indices of frames that open a new shot.

    Args:
        changes: `change` of each frame from the one before, 0 for the first.
        times_s: presentation times, s.
        thumbs_FHW: small luma pictures, to tell a flash from a cut.
    """
    found: list[int] = []
    for at in np.flatnonzero(changes >= MIN_CHANGE).tolist():
        around: list[float] = [
            *changes[max(at - NEIGHBOURS, 1) : at].tolist(),
            *changes[at + 1 : at + 1 + NEIGHBOURS].tolist(),
        ]
        usual = sum(around) / max(len(around), 1)
        if changes[at] >= MIN_RATIO * usual and not is_flash(at, times_s, thumbs_FHW):
            found.append(at)
    return found


def is_flash(index: int, times_s: NDArray[np.float64], thumbs_FHW: NDArray[np.uint8]) -> bool:
    """Whether the picture before `index` comes back at once, or the one at `index` was there just before."""
    thumbs = thumbs_FHW.astype(np.float32)
    before, after = thumbs[index - 1], thumbs[index]
    limit = 0.5 * float(np.abs(after - before).mean())
    soon = (times_s > times_s[index]) & (times_s <= times_s[index - 1] + FLASH_S)
    recent = (times_s < times_s[index - 1]) & (times_s >= times_s[index] - FLASH_S)
    returns = np.abs(thumbs[soon] - before).mean(axis=(1, 2))
    returned = np.abs(thumbs[recent] - after).mean(axis=(1, 2))
    return bool((returns < limit).any() or (returned < limit).any())


def shots(cuts: Sequence[int], times_s: NDArray[np.float64], end_s: float, min_shot_s: float) -> list[Shot]:
    """The spans between cuts; those shorter than `min_shot_s` are left out, their cuts kept."""
    edges = [0.0, *(float(times_s[cut]) for cut in cuts), end_s]
    last = len(edges) - 2
    spans = [Shot(edges[i], edges[i + 1], i > 0, i < last) for i in range(last + 1)]
    return [shot for shot in spans if shot.end_s - shot.start_s >= min_shot_s]


def windows(shot: Shot, duration_s: Fraction, margin_s: float) -> list[Window]:
    """Consecutive spans of exactly `duration_s` that fit into a shot, `margin_s` away from its cuts."""
    margin = Fraction(margin_s)
    first = exact(shot.start_s) + (margin if shot.opens_with_cut else 0)
    limit = exact(shot.end_s) - (margin if shot.closes_with_cut else 0)
    room = limit - first + Fraction(1, MICROSECOND)  # ends are rounded to the microsecond
    result: list[Window] = []
    for number in range(max(0, int(room // duration_s))):
        start = first + number * duration_s
        reason = "stride" if number else "cut" if shot.opens_with_cut else "start"
        result.append(Window(rounded(start), rounded(start + duration_s), reason))
    return result


def exact(seconds: float) -> Fraction:
    """A time as a whole number of microseconds."""
    return Fraction(round(seconds * MICROSECOND), MICROSECOND)


def rounded(seconds: Fraction) -> float:
    """The float nearest to a time rounded to the microsecond."""
    return round(seconds * MICROSECOND) / MICROSECOND
