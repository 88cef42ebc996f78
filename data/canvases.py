"""Which size every clip is encoded at: the nearest aspect and the longest duration that a canvas offers it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from data.records import Canvas, Clip, ClipShape, Reject

OnGrid = Callable[[float, float, float], ClipShape]
"""A family's `shape(duration_s, height, width)`."""
MAX_SIDE_PX = 65_536
"""Longest side that a video can have: AV1's."""
HALF_FRAME_S = 0.5 / 24
"""Cut at a frame of another rate, a clip may be this much shorter than what it was cut for, s."""


class Fit(NamedTuple):
    """A clip at a canvas."""

    canvas: str
    shape: ClipShape


def fits(clip: Clip, canvases: Mapping[str, Canvas], on_grid: OnGrid) -> list[Fit] | Reject:
    """The clip's shape at every canvas that takes it; a reject where none does, or its row cannot be true.

    Raises:
        ValueError: a canvas is below the family's grid.
    """
    if (fault := impossible(clip)) is not None:
        return fault
    found: list[Fit] = []
    for name, canvas in canvases.items():
        lasting = [length for length in canvas.durations_s if length <= clip.end_s - clip.start_s + HALF_FRAME_S]
        height, width = size(clip, canvas)
        if lasting and (canvas.max_upscale is None or enlargement(clip, height, width) <= canvas.max_upscale):
            found.append(Fit(name, on_grid(max(lasting), height, width)))
    return found or refusal(clip, canvases)


def size(clip: Clip, canvas: Canvas) -> tuple[float, float]:
    """Height and width of a canvas in the aspect nearest to the clip's, px, before the family rounds them."""
    given = math.log(clip.width / clip.height) if clip.width and clip.height else 0.0
    ratios = [int(width) / int(height) for width, _, height in (aspect.partition(":") for aspect in canvas.aspects)]
    ratio = min(ratios, key=lambda ratio: abs(math.log(ratio) - given))
    return math.sqrt(canvas.area_px / ratio), math.sqrt(canvas.area_px * ratio)


def enlargement(clip: Clip, height: float, width: float) -> float:
    """How many times a clip's sides grow to cover a size; 1 where its own size is unknown."""
    return max(height / clip.height, width / clip.width) if clip.width and clip.height else 1.0


def impossible(clip: Clip) -> Reject | None:
    """What no clip can be, in a table that something else wrote: it would be read for ever, or decide for another shape."""
    if not 0 <= clip.start_s < clip.end_s < math.inf:
        rule, measured, limit = "span", f"{clip.start_s:g} to {clip.end_s:g} s", "0 <= start_s < end_s, both finite"
    elif not (0 <= clip.width <= MAX_SIDE_PX and 0 <= clip.height <= MAX_SIDE_PX):
        rule, measured, limit = "size", f"{clip.width}x{clip.height} px", f"0 (unknown) to {MAX_SIDE_PX} px a side"
    else:
        return None
    return Reject(
        item=clip.clip_id, path=clip.path, verb="encode", rule=f"encode.{rule}", measured=measured, limit=limit
    )


def refusal(clip: Clip, canvases: Mapping[str, Canvas]) -> Reject:
    """Why no canvas takes a clip: it is too short for all, else too small."""
    shortest = min(length for canvas in canvases.values() for length in canvas.durations_s)
    if clip.end_s - clip.start_s + HALF_FRAME_S < shortest:
        rule, measured, limit = "durations_s", f"{clip.end_s - clip.start_s:.3f} s", f"at least {shortest:g} s"
    else:
        limits = [canvas.max_upscale for canvas in canvases.values() if canvas.max_upscale is not None]
        rule, measured = "max_upscale", f"{clip.width}x{clip.height} px, {clip.end_s - clip.start_s:.3f} s"
        limit = f"enlarged {max(limits, default=1.0):g} times at most at any canvas that is short enough"
    return Reject(
        item=clip.clip_id, path=clip.path, verb="encode", rule=f"encode.canvases.{rule}", measured=measured, limit=limit
    )
