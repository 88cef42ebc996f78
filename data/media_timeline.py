"""Pictures of a film one after the other on an even timeline, as shown and as stored, in constant memory.

Arrays: H height, W width.
"""

from __future__ import annotations

import functools
from collections.abc import Generator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange
from av.video.stream import VideoStream
from numpy.typing import NDArray

from data import tone_map
from data.media_color import matrix_of
from data.media_layout import Orientation, orientation, pixel_aspect
from data.media_open import Unreadable, frames_of, opened, picture_stream
from data.media_picture import Painter, PictureClock

PLANAR = ("yuv420p", "yuv422p", "yuv444p", "yuvj420p", "yuvj422p", "yuvj444p")
"""Formats whose luma and chroma lie in three planes of 8 bits; with a j, of full range."""


class Coding(NamedTuple):
    """What stored levels mean; planes of equal coding can be compared as they are."""

    format: str
    matrix: int
    is_full_range: bool


class Shown:
    """A picture on screen; what is asked of it is made once."""

    def __init__(self, frame: VideoFrame, brush: Painter) -> None:
        self._frame, self._brush = frame, brush

    @property
    def size(self) -> tuple[int, int]:
        """Height and width it is shown at, px."""
        return self._brush.height, self._brush.width

    @functools.cached_property
    def rgb(self) -> NDArray[np.uint8]:
        """Upright RGB (H, W, 3) of the size it is shown at.

        Raises:
            Unreadable: its colours cannot be converted.
        """
        return self._brush.paint(self._frame)

    @functools.cached_property
    def coding(self) -> Coding | None:
        """Of its planes; None where they are not of 8 bits, not shown as they lie, or not what is shown."""
        frame = self._frame
        name = frame.format.name
        as_it_lies = self._brush.orientation == Orientation() and self._brush.pixel_aspect == 1
        if name not in PLANAR or not as_it_lies or frame.interlaced_frame or frame.color_trc in tone_map.HDR:
            return None
        is_full = name.startswith("yuvj") or frame.color_range == ColorRange.JPEG
        return Coding(name.replace("j", ""), matrix_of(frame), is_full)

    @functools.cached_property
    def planes(self) -> tuple[NDArray[np.uint8], ...]:
        """Luma (H, W) and both chromas as they are stored; only where there is a `coding`."""
        return tuple(
            np.frombuffer(cast("memoryview", plane), np.uint8).reshape(plane.height, plane.line_size)[:, : plane.width]
            for plane in self._frame.planes
        )


def stated_rate(path: Path) -> Fraction:
    """Frames a second by the file's header.

    Raises:
        Unreadable: it cannot be opened, or states none.
    """
    with opened(path) as container:
        stream = picture_stream(container)
        if rate := stream.average_rate or stream.guessed_rate:
            return rate
    raise Unreadable("states no frame rate")


def iter_shown(path: Path, frame_rate: Fraction) -> Generator[Shown]:
    """What is on screen at `index / frame_rate` seconds after the first frame appears, until the last one goes.

    A film of even timestamps gives, at its own rate, each of its frames once.

    Raises:
        Unreadable: the file does not decode.
    """
    with opened(path) as container:
        stream = picture_stream(container)
        clock, brush, shown = PictureClock(stream), None, None
        origin_s, end_s, index = 0.0, 0.0, 0
        for frame in frames_of(container, stream):
            seconds = clock.seconds(frame)
            if brush is None:
                origin_s, brush = seconds, natural(stream, frame)
            while shown is not None and index / frame_rate + clock.tolerance_s < seconds - origin_s:
                yield shown
                index += 1
            shown = Shown(frame, brush)
            lasts_s = float(frame.duration * frame.time_base) if frame.duration and frame.time_base else 0.0
            end_s = seconds - origin_s + (lasts_s or float(1 / frame_rate))
        if shown is None:
            raise Unreadable("holds no frame that decodes")
        while index / frame_rate + clock.tolerance_s < end_s:
            yield shown
            index += 1


def natural(stream: VideoStream, frame: VideoFrame) -> Painter:
    """A painter of a film's own size: upright, with square pixels."""
    turned, aspect = orientation(frame), pixel_aspect(stream)
    height, width = frame.height, round(frame.width * aspect)
    if turned.turns % 2:
        height, width = width, height
    return Painter(height, width, turned, aspect)
