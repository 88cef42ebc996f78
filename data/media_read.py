"""Frames and sound of a media file by presentation time, upright, in RGB, in stereo.

Seconds are on the picture's timeline: 0 is when the first frame is shown. Arrays: F frame, H height, W width,
C channel, T sample.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import av
import av.error
import numpy as np
import soxr
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.reformatter import Colorspace, Interpolation
from av.video.stream import VideoStream
from numpy.typing import NDArray

from data.media_layout import Orientation, channel_names, orientation, to_stereo
from data.records import ClipShape

ACCURATE = Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT
"""Without these swscale halves chroma cheaply: 37 dB instead of 48 dB after a lossless round trip (measured)."""
RESYNC_S = 0.005
"""A sound packet this far from where its predecessor ended is a real gap; less is rounding of timestamps."""
PREROLL_S = 0.5
"""Decoded and dropped after a seek: MP3's bit reservoir, AAC's overlap and Opus's 80 ms settle well within it."""
MARGIN_S = 0.05
"""Extra sound on both sides of a clip, so that the resampler's filter does not see its edges."""
TAIL_FRAMES = 2
"""Codec frames by which decoded sound may exceed the track's length; a larger excess means a wrong header."""
TEXT_CODECS = ("ansi", "bintext", "xbin", "idf")
"""What the demuxer calls a picture although it is a text file."""


class Unreadable(RuntimeError):
    """A file that cannot be decoded; the message is a sentence that says why."""


@contextmanager
def opened(path: Path) -> Generator[InputContainer]:
    """The file's container; every error of decoding, or of arithmetic on odd headers, becomes `Unreadable`."""
    if not path.is_file():
        raise Unreadable("there is no such file")
    try:
        with av.open(str(path), metadata_errors="replace") as container:
            yield container
    except (av.error.FFmpegError, EOFError, ValueError, ArithmeticError) as error:
        raise Unreadable(f"does not decode: {getattr(error, 'strerror', None) or error}") from error


def picture_stream(container: InputContainer) -> VideoStream:
    """The largest picture that is not cover art.

    Raises:
        Unreadable: there is none.
    """
    art = Disposition.attached_pic | Disposition.timed_thumbnails
    streams = [item for item in container.streams.video if not item.disposition & art and item.codec_context]
    if not streams:
        raise Unreadable("holds no picture, only sound" if container.streams.audio else "holds no picture")
    stream = max(streams, key=lambda item: (item.width * item.height, _preferred(item), -item.index))
    if stream.codec_context.name in TEXT_CODECS:
        raise Unreadable("is text, not a video")
    stream.codec_context.thread_count = 1  # workers are processes; more threads only fight over the cores
    return stream


def sound_stream(container: InputContainer) -> AudioStream | None:
    """The sound that plays by default, or None."""
    streams = [item for item in container.streams.audio if item.codec_context and item.codec_context.sample_rate > 0]
    return max(streams, key=lambda item: (_preferred(item), -item.index), default=None)


def _preferred(stream: VideoStream | AudioStream) -> bool:
    return bool(stream.disposition & Disposition.default)


class PictureClock:
    """Seconds of container time at which each decoded frame is shown, also where the file leaves it out."""

    def __init__(self, stream: VideoStream) -> None:
        self._tick = cast(Fraction, stream.time_base)
        self._interval = float(1 / (stream.average_rate or stream.guessed_rate or Fraction(25)))
        self._previous: float | None = None
        self.tolerance_s = min(float(self._tick), 0.002)
        """Rounding of a timestamp: Matroska stores milliseconds."""

    def seconds(self, frame: VideoFrame) -> float:
        """When `frame` is shown."""
        if frame.pts is not None:
            tick = frame.time_base or self._tick
            self._previous = frame.pts * tick.numerator / tick.denominator
        else:
            self._previous = 0.0 if self._previous is None else self._previous + self._interval
        return self._previous


class SoundClock:
    """Sample positions in container time of decoded sound: contiguous, unless timestamps show a real gap."""

    def __init__(self, stream: AudioStream) -> None:
        self.rate = stream.codec_context.sample_rate
        self.names: tuple[str, ...] | None = None
        self._tick = cast(Fraction, stream.time_base)
        self._next: int | None = None
        self._end = math.inf
        if stream.duration is not None:
            self._end = round(((stream.start_time or 0) + stream.duration) * self._tick * self.rate)

    def place(self, frame: AudioFrame) -> tuple[int, NDArray[np.float32]]:
        """Position of the first sample at `rate`, and samples (C, T).

        Raises:
            Unreadable: rate or channels change in mid-file.
        """
        names = channel_names(frame.layout)
        if self.names is None:
            self.names, self.rate = names, frame.sample_rate
        if names != self.names or frame.sample_rate != self.rate:
            raise Unreadable(
                f"sound changes from {len(self.names)} channels at {self.rate} Hz"
                f" to {len(names)} at {frame.sample_rate} Hz in mid-file"
            )
        samples = _float_samples(frame, len(names))
        stamp = self._next if frame.pts is None else round(frame.pts * (frame.time_base or self._tick) * self.rate)
        position = stamp if stamp is not None else 0
        if self._next is not None and abs(position - self._next) <= RESYNC_S * self.rate:
            position = self._next
        after = self._next = position + samples.shape[1]
        excess = after - self._end  # the last packet is padded to a whole codec frame
        if 0 < excess <= TAIL_FRAMES * max(frame.samples, 1024):
            samples = samples[:, : max(0, samples.shape[1] - int(excess))]
        return position, samples


def _float_samples(frame: AudioFrame, num_channels: int) -> NDArray[np.float32]:
    """Samples (C, T), full scale = 1, whatever the codec's format."""
    raw = cast(NDArray[Any], frame.to_ndarray())
    if not frame.format.is_planar:
        raw = raw.reshape(-1, num_channels).T
    if raw.dtype == np.uint8:
        return ((raw.astype(np.float32) - 128) / 128).astype(np.float32)
    if np.issubdtype(raw.dtype, np.integer):
        return (raw / -float(np.iinfo(raw.dtype).min)).astype(np.float32)
    return raw.astype(np.float32)


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
        height, width = self.size(frame)
        shrinks = width < frame.width or height < frame.height
        matrix = frame.colorspace
        if matrix == 2:  # untagged; players assume BT.709 from 720 lines on
            matrix = Colorspace.ITU709.value if frame.height >= 720 else Colorspace.ITU601.value
        picture = frame.reformat(
            width,
            height,
            "rgb24",
            src_colorspace=matrix,
            interpolation=int((Interpolation.AREA if shrinks else Interpolation.BICUBIC) | ACCURATE),
            threads=1,
        ).to_ndarray()
        upright = self.orientation.apply(cast(NDArray[np.uint8], picture))
        top, left = (upright.shape[0] - self.height) // 2, (upright.shape[1] - self.width) // 2
        return np.ascontiguousarray(upright[top : top + self.height, left : left + self.width])


def painter(stream: VideoStream, frame: VideoFrame, height: int, width: int) -> Painter:
    """A painter for a stream whose first frame is `frame`."""
    return Painter(height, width, orientation(frame), stream.codec_context.sample_aspect_ratio or Fraction(1))


def iter_frames(path: Path, height: int, width: int) -> Iterator[tuple[float, NDArray[np.uint8]]]:
    """Every frame in one decoding pass: seconds since the first shown frame, and RGB (H, W, 3), upright.

    Raises:
        Unreadable: the file does not decode.
    """
    with opened(path) as container:
        stream = picture_stream(container)
        clock, first, brush = PictureClock(stream), None, None
        for frame in container.decode(stream):
            seconds = clock.seconds(frame)
            if first is None or brush is None:
                first, brush = seconds, painter(stream, frame, height, width)
            yield seconds - first, brush.paint(frame)


def first_frame_s(path: Path) -> float:
    """Container time at which the first frame is shown, s."""
    with opened(path) as container:
        stream = picture_stream(container)
        clock = PictureClock(stream)
        for frame in container.decode(stream):
            return clock.seconds(frame)
    raise Unreadable("holds no frame that decodes")


def read_sound(path: Path) -> tuple[NDArray[np.float32], int, float]:
    """All sound as samples (C, T), its rate in Hz, and when it starts on the picture's timeline, s.

    A file without sound gives an array of shape (0, 0), rate 0 and start 0.

    Raises:
        Unreadable: the file does not decode.
    """
    origin_s = first_frame_s(path)
    with opened(path) as container:
        stream = sound_stream(container)
        if stream is None:
            return np.zeros((0, 0), np.float32), 0, 0.0
        clock = SoundClock(stream)
        blocks = [clock.place(frame) for frame in container.decode(stream)]
    if not blocks:
        return np.zeros((0, 0), np.float32), 0, 0.0
    start = blocks[0][0]
    stop = max(position + block.shape[1] for position, block in blocks)
    return _laid_out(blocks, start, stop), clock.rate, start / clock.rate - origin_s


def read_clip(
    path: Path, start_s: float, end_s: float | None, shape: ClipShape
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Frames (F, H, W, 3) and stereo sound (2, T) of `shape`, from `start_s` on the picture's timeline.

    The frame at index i is the one on screen at `start_s + i / frame_rate`, whatever the file's own rate. Nothing at
    or after `end_s` is used: the last frame stays, and the sound is silent. Mono goes to both sides, more channels are
    mixed down by ITU-R BS.775, no sound is silence.

    Raises:
        Unreadable: the file does not decode, or shows no frame in the span.
    """
    frames, origin_s = _read_pictures(path, start_s, end_s, shape)
    duration_s = float(shape.duration_s) if end_s is None else min(float(shape.duration_s), end_s - start_s)
    waveform = _read_stereo(path, origin_s + start_s, duration_s, shape.sample_rate_hz)
    result = np.zeros((2, shape.num_samples), np.float32)
    length = min(shape.num_samples, waveform.shape[1])
    result[:, :length] = waveform[:, :length]
    return frames, result


def _read_pictures(
    path: Path, start_s: float, end_s: float | None, shape: ClipShape, *, seek: bool = True
) -> tuple[NDArray[np.uint8], float]:
    """Frames of `shape`, and the container time of the first shown frame."""
    with opened(path) as container:
        stream = picture_stream(container)
        clock = PictureClock(stream)
        first = next(container.decode(stream), None)
        if first is None:
            raise Unreadable("holds no frame that decodes")
        origin_s = clock.seconds(first)
        brush = painter(stream, first, shape.height, shape.width)
        sought = seek and start_s > 0 and _seek(container, stream, origin_s + start_s)
        decoded: Iterable[VideoFrame] = container.decode(stream)
        timed = ((clock.seconds(frame) - origin_s, frame) for frame in (decoded if sought else _chain(first, decoded)))
        times = [start_s + index / shape.frame_rate for index in range(shape.num_frames)]
        limit_s = math.inf if end_s is None else end_s - clock.tolerance_s
        frames = _on_grid(timed, times, limit_s, clock.tolerance_s, brush, may_start_late=not sought)
    if frames is None and sought:  # the index pointed behind the start
        return _read_pictures(path, start_s, end_s, shape, seek=False)
    if frames is None:
        raise Unreadable(f"shows no frame at {start_s:g} s")
    return frames, origin_s


def _chain(first: VideoFrame, rest: Iterable[VideoFrame]) -> Iterator[VideoFrame]:
    yield first
    yield from rest


def _on_grid(
    timed: Iterable[tuple[float, VideoFrame]],
    times: Sequence[float],
    limit_s: float,
    tolerance_s: float,
    brush: Painter,
    *,
    may_start_late: bool,
) -> NDArray[np.uint8] | None:
    """The frame on screen at each of `times`, (F, H, W, 3); None where the first decoded frame is already later."""
    result = np.empty((len(times), brush.height, brush.width, 3), np.uint8)
    shown: VideoFrame | None = None
    filled = 0
    for seconds, frame in timed:
        if seconds >= limit_s and shown is not None:
            break
        if shown is None and not may_start_late and seconds > times[0] + tolerance_s:
            return None
        ready = sum(1 for time in times[filled:] if time + tolerance_s < seconds) if shown is not None else 0
        if shown is not None and ready:
            result[filled : filled + ready] = brush.paint(shown)
            filled += ready
        if filled == len(times):
            return result
        shown = frame
    if shown is None:
        return None
    result[filled:] = brush.paint(shown)
    return result


def _read_stereo(
    path: Path, start_s: float, duration_s: float, rate_hz: int, *, seek: bool = True
) -> NDArray[np.float32]:
    """Stereo (2, T) at `rate_hz` from `start_s` in container time; silence where the file has no sound."""
    num_samples = max(0, round(duration_s * rate_hz))
    with opened(path) as container:
        stream = sound_stream(container)
        if stream is None:
            return np.zeros((2, num_samples), np.float32)
        clock = SoundClock(stream)
        sought = seek and _seek(container, stream, start_s - PREROLL_S)
        start = stop = 0
        blocks: list[tuple[int, NDArray[np.float32]]] = []
        for frame in container.decode(stream):
            position, block = clock.place(frame)
            start = math.floor((start_s - MARGIN_S) * clock.rate)
            stop = math.ceil((start_s + duration_s + MARGIN_S) * clock.rate)
            if not blocks and sought and position > start:
                return _read_stereo(path, start_s, duration_s, rate_hz, seek=False)
            blocks = (
                [*blocks[-1:], (position, block)] if position + block.shape[1] < start else [*blocks, (position, block)]
            )
            if position >= stop:
                break
    if not blocks or clock.names is None:
        return np.zeros((2, num_samples), np.float32)
    stereo = to_stereo(_laid_out(blocks, start, stop), clock.names)
    if clock.rate != rate_hz:
        stereo = np.asarray(soxr.resample(stereo.T, clock.rate, rate_hz, quality="HQ"), np.float32).T
    skip = round((start_s - start / clock.rate) * rate_hz)
    return stereo[:, skip : skip + num_samples]


def _laid_out(blocks: Sequence[tuple[int, NDArray[np.float32]]], start: int, stop: int) -> NDArray[np.float32]:
    """Blocks placed on a silent strip (C, stop − start) by their positions."""
    strip = np.zeros((blocks[0][1].shape[0], stop - start), np.float32)
    for position, block in blocks:
        low, high = max(start, position), min(stop, position + block.shape[1])
        if low < high:
            strip[:, low - start : high - start] = block[:, low - position : high - position]
    return strip


def _seek(container: InputContainer, stream: VideoStream | AudioStream, seconds: float) -> bool:
    """Go to the key frame at or before `seconds` of container time; False where nothing was moved."""
    if seconds <= 0:
        return False
    try:
        container.seek(math.floor(seconds / cast(Fraction, stream.time_base)), stream=stream)
    except av.error.FFmpegError:
        container.seek(0)  # some containers have no index: start over
    return True
