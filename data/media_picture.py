"""Frames by presentation time: upright, in accurate RGB, at the model's size and rate.

Arrays: F frame, H height, W width, C channel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import cast

import numpy as np
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray

from data.media_color import rgb
from data.media_layout import Orientation, orientation, pixel_aspect
from data.media_open import Unreadable, frames_of, opened, picture_stream, seek
from data.records import ClipShape


class PictureClock:
    """Seconds of container time at which each decoded frame is shown, also where the file leaves it out.

    AVI stores no times: its frames are shown one slot each from 0 on. What FFmpeg makes of that for H.264 jumps to and
    fro (measured: frames 0, 3, 2, 4, 1), so there the slots are counted by the packets that bring the frames out.
    """

    def __init__(self, stream: VideoStream) -> None:
        self._tick = cast(Fraction, stream.time_base)
        self._interval = float(1 / (stream.average_rate or stream.guessed_rate or Fraction(25)))
        self._previous: float | None = None
        self._slotted = stream.container.format.name == "avi"
        self._delay: int | None = None
        self.tolerance_s = min(float(self._tick), 0.002)
        """Rounding of a timestamp: Matroska stores milliseconds."""

    def stamp(self, item: VideoFrame | Packet[VideoStream]) -> int | None:
        """The time that a frame or packet bears, in ticks."""
        if not self._slotted or item.dts is None:
            return None if self._slotted else item.pts
        if self._delay is None:
            self._delay = item.dts
        return item.dts - self._delay

    def seconds(self, frame: VideoFrame) -> float:
        """When `frame` is shown; each frame is asked about once."""
        stamp = self.stamp(frame)
        if stamp is not None:
            tick = frame.time_base or self._tick
            self._previous = stamp * tick.numerator / tick.denominator
        else:
            self._previous = 0.0 if self._previous is None else self._previous + self._interval
        return self._previous


@dataclass(frozen=True)
class Painter:
    """Turns decoded frames into upright RGB that covers a canvas: scaled by area, cropped at the centre."""

    height: int
    width: int
    orientation: Orientation
    pixel_aspect: Fraction

    def size(self, frame: VideoFrame) -> tuple[int, int]:
        """Height and width before turning, of the smallest picture that covers the canvas."""
        height, width = (self.width, self.height) if self.orientation.turns % 2 else (self.height, self.width)
        shown = frame.width * self.pixel_aspect
        scale = max(Fraction(width) / shown, Fraction(height, frame.height))
        return max(height, round(frame.height * scale)), max(width, round(shown * scale))

    def paint(self, frame: VideoFrame) -> NDArray[np.uint8]:
        """The frame as (H, W, 3)."""
        picture = rgb(frame, *self.size(frame))
        upright = self.orientation.apply(picture)
        top, left = (upright.shape[0] - self.height) // 2, (upright.shape[1] - self.width) // 2
        return np.ascontiguousarray(upright[top : top + self.height, left : left + self.width])


def painter(stream: VideoStream, frame: VideoFrame, height: int, width: int) -> Painter:
    """A painter for a stream whose first frame is `frame`."""
    return Painter(height, width, orientation(frame), pixel_aspect(stream))


def iter_frames(path: Path, height: int, width: int) -> Iterator[tuple[float, NDArray[np.uint8]]]:
    """Every frame in one decoding pass: seconds since the first shown frame, and RGB (H, W, 3), upright.

    Raises:
        Unreadable: the file does not decode.
    """
    with opened(path) as container:
        stream = picture_stream(container)
        clock, first, brush = PictureClock(stream), None, None
        for frame in frames_of(container, stream):
            seconds = clock.seconds(frame)
            if first is None or brush is None:
                first, brush = seconds, painter(stream, frame, height, width)
            yield seconds - first, brush.paint(frame)


def first_frame_s(path: Path) -> float:
    """Container time at which the first frame is shown, s."""
    with opened(path) as container:
        stream = picture_stream(container)
        clock = PictureClock(stream)
        for frame in frames_of(container, stream):
            return clock.seconds(frame)
    raise Unreadable("holds no frame that decodes")


def read_pictures(
    path: Path, start_s: float, end_s: float | None, shapes: Sequence[ClipShape]
) -> tuple[list[NDArray[np.uint8]], float]:
    """Frames of each shape in one decoding pass, and the container time of the first shown frame.

    The shapes share one frame rate: they differ in size and length alone.

    Raises:
        Unreadable: the file does not decode, or shows no frame in the span.
    """
    try:
        return _pictures(path, start_s, end_s, shapes, may_seek=start_s > 0)
    except Unreadable:
        if start_s <= 0:
            raise
    return _pictures(path, start_s, end_s, shapes, may_seek=False)  # the index may be what is wrong


def _pictures(
    path: Path, start_s: float, end_s: float | None, shapes: Sequence[ClipShape], *, may_seek: bool
) -> tuple[list[NDArray[np.uint8]], float]:
    (frame_rate,) = {shape.frame_rate for shape in shapes}
    with opened(path) as container:
        stream = picture_stream(container)
        clock = PictureClock(stream)
        first = next(frames_of(container, stream), None)
        if first is None:
            raise Unreadable("holds no frame that decodes")
        origin_s = clock.seconds(first)
        canvases = [_Canvas(painter(stream, first, shape.height, shape.width), shape.num_frames) for shape in shapes]
        sought = may_seek and seek(container, stream, origin_s + start_s)
        later = _timed(frames_of(container, stream, begun=not sought), clock, origin_s, sought=sought)
        timed = later if sought else itertools.chain([(0.0, first)], later)
        times = [start_s + index / frame_rate for index in range(max(shape.num_frames for shape in shapes))]
        limit_s = math.inf if end_s is None else end_s - clock.tolerance_s
        shown = _on_grid(timed, times, limit_s, clock.tolerance_s, canvases, may_start_late=not sought)
    if not shown:
        raise Unreadable(f"shows no frame at {start_s:g} s")
    return [canvas.frames_FHWC for canvas in canvases], origin_s


class _Canvas:
    """The frames of one shape, as they are filled."""

    def __init__(self, brush: Painter, num_frames: int) -> None:
        self._brush = brush
        self.frames_FHWC = np.empty((num_frames, brush.height, brush.width, 3), np.uint8)

    def fill(self, frame: VideoFrame, start: int, stop: int) -> None:
        """Show a frame from index `start` until before `stop`."""
        if start < min(stop, len(self.frames_FHWC)):
            self.frames_FHWC[start:stop] = self._brush.paint(frame)


def _timed(
    frames: Iterable[VideoFrame], clock: PictureClock, origin_s: float, *, sought: bool
) -> Iterator[tuple[float, VideoFrame]]:
    """Frames with the seconds since `origin_s` at which they are shown.

    Raises:
        Unreadable: after a seek, the first does not say when; its predecessors would have to be counted.
    """
    for number, frame in enumerate(frames):
        if sought and number == 0 and clock.stamp(frame) is None:
            raise Unreadable("cannot be entered in the middle: its frames carry no times")
        yield clock.seconds(frame) - origin_s, frame


def _on_grid(
    timed: Iterable[tuple[float, VideoFrame]],
    times: Sequence[float],
    limit_s: float,
    tolerance_s: float,
    canvases: Sequence[_Canvas],
    *,
    may_start_late: bool,
) -> bool:
    """Fill each canvas with what is on screen at each of `times`; False where the first decoded frame is later."""
    shown: VideoFrame | None = None
    filled = 0
    for seconds, frame in timed:
        if seconds >= limit_s and shown is not None:
            break
        if shown is None and not may_start_late and seconds > times[0] + tolerance_s:
            return False
        ready = sum(1 for time in times[filled:] if time + tolerance_s < seconds) if shown is not None else 0
        if shown is not None and ready:
            for canvas in canvases:
                canvas.fill(shown, filled, filled + ready)
            filled += ready
        if filled == len(times):
            return True
        shown = frame
    if shown is None:
        return False
    for canvas in canvases:
        canvas.fill(shown, filled, len(times))
    return True
