"""Sound by presentation time: on the picture's timeline, in stereo, at the model's rate.

Arrays: C channel, T sample; full scale = 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np
import soxr
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from numpy.typing import NDArray

from data.media_layout import channel_names, to_stereo
from data.media_open import Unreadable, frames_of, opened, pictures, seek, sound_stream
from data.media_picture import first_frame_s

Block = tuple[int, NDArray[np.float32]]
"""Position of the first sample in container time, and samples (C, T)."""
RESYNC_S = 0.005
"""A sound packet this far from where its predecessor ended is a real gap; less is rounding of timestamps."""
ROUNDING_TICKS = 1.5
"""Most that rounding alone moves two timestamps apart: half a tick each, and half for a frame that was cut."""
PREROLL_S = 0.5
"""Decoded and dropped after a seek: MP3's bit reservoir, AAC's overlap and Opus's 80 ms settle well within it."""
MARGIN_S = 0.05
"""Extra sound on both sides of a clip, so that the resampler's filter does not see its edges."""
TAIL_FRAMES = 2
"""Codec frames by which decoded sound may exceed the track's length; a larger excess means a wrong header."""


MAX_GAP_S = 600.0
"""Longest hole in the sound that is filled with silence, s: it is held in memory, or measured block by block."""
MIN_RATE_HZ, MAX_RATE_HZ, MAX_CHANNELS = 4000, 768_000, 32
"""Half of telephone sound, twice the highest rate converters sell, more channels than the largest layout (22.2)."""


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

    def begin(self, first: AudioFrame, second: AudioFrame) -> None:
        """Choose where a first frame that was cut starts by the second's timestamp, where those are coarse.

        A decoder that drops the start of a frame rounds its timestamp a second time: 1 ms late in Matroska (measured).
        """
        tick = first.time_base or self._tick
        if first.pts is None or second.pts is None or first.samples >= second.samples or tick * first.sample_rate <= 1:
            return
        shift = second.pts - first.pts - first.samples / (tick * first.sample_rate)
        if abs(shift) <= ROUNDING_TICKS:
            self._next = round((first.pts + shift) * tick * first.sample_rate)

    def place(self, frame: AudioFrame) -> Block:
        """Position of the first sample at `rate`, and samples (C, T).

        Raises:
            Unreadable: rate or channels are absurd, or change in mid-file.
        """
        names = channel_names(frame.layout)
        if self.names is None:
            if not (MIN_RATE_HZ <= frame.sample_rate <= MAX_RATE_HZ and 0 < len(names) <= MAX_CHANNELS):
                limits = f"limits {MIN_RATE_HZ}-{MAX_RATE_HZ} Hz, {MAX_CHANNELS} channels"
                raise Unreadable(f"claims sound of {len(names)} channels at {frame.sample_rate} Hz; {limits}")
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
        stop = self._next = position + samples.shape[1]
        return position, samples[:, : max(0, samples.shape[1] - self._padding(frame, stop))]

    def _padding(self, frame: AudioFrame, stop: int) -> int:
        """Samples at the end of a frame that ends at `stop` which only fill the last packet to a whole codec frame.

        By the track's length, and by the last packet's own: of sound that an edit list both delays and trims FFmpeg
        states a length that is too large by what is trimmed.
        """
        excess, tail = stop - self._end, TAIL_FRAMES * max(frame.samples, 1024)
        if not -tail < excess <= tail:
            return 0
        tick = frame.time_base or self._tick
        exact = frame.duration > 0 and tick * self.rate <= 1
        short = frame.samples - round(frame.duration * tick * self.rate) if exact else 0
        return max(int(excess), short, 0)


def begun(clock: SoundClock, frames: Iterable[AudioFrame]) -> Iterator[AudioFrame]:
    """The same frames, after the clock has seen the first two."""
    waiting = iter(frames)
    first = next(waiting, None)
    second = None if first is None else next(waiting, None)
    if first is not None:
        if second is not None:
            clock.begin(first, second)
        yield first
    if second is not None:  # a compiled generator that has ended must not be asked again: it raises
        yield second
        yield from waiting


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


def read_sound(path: Path) -> tuple[NDArray[np.float32], int, float]:
    """All sound as samples (C, T), its rate in Hz, and when it starts on the picture's timeline, s.

    A file without sound gives an array of shape (0, 0), rate 0 and start 0; sound without a picture starts at 0.

    Raises:
        Unreadable: the file does not decode.
    """
    with opened(path) as container:
        has_picture = bool(pictures(container))
    origin_s = first_frame_s(path) if has_picture else None
    with opened(path) as container:
        stream = sound_stream(container)
        if stream is None:
            return np.zeros((0, 0), np.float32), 0, 0.0
        clock = SoundClock(stream)
        blocks = [clock.place(frame) for frame in begun(clock, frames_of(container, stream))]
    if not blocks:
        return np.zeros((0, 0), np.float32), 0, 0.0
    start = blocks[0][0]
    stop = max(position + block.shape[1] for position, block in blocks)
    gaps_s = (stop - start - sum(block.shape[1] for _, block in blocks)) / clock.rate
    if gaps_s > MAX_GAP_S:
        raise Unreadable(f"sound has gaps of {gaps_s:.0f} s in all; limit {MAX_GAP_S:.0f} s")
    return _laid_out(blocks, start, stop), clock.rate, 0.0 if origin_s is None else start / clock.rate - origin_s


def first_sound_s(path: Path) -> float:
    """Container time of the first sample, s; 0 where the file has no sound.

    Raises:
        Unreadable: the file does not decode.
    """
    with opened(path) as container:
        stream = sound_stream(container)
        if stream is None:
            return 0.0
        clock = SoundClock(stream)
        for frame in begun(clock, frames_of(container, stream)):
            return clock.place(frame)[0] / clock.rate
    return 0.0


def read_stereo(
    path: Path, start_s: float, duration_s: float, rate_hz: int, *, may_seek: bool = True
) -> NDArray[np.float32]:
    """Stereo (2, T) at `rate_hz` from `start_s` in container time; silence where the file has no sound.

    Raises:
        Unreadable: the file does not decode.
    """
    if may_seek and start_s > PREROLL_S:
        try:
            return _stereo(path, start_s, duration_s, rate_hz, may_seek=True)
        except Unreadable:  # the index may be what is wrong
            pass
    return _stereo(path, start_s, duration_s, rate_hz, may_seek=False)


def _stereo(path: Path, start_s: float, duration_s: float, rate_hz: int, *, may_seek: bool) -> NDArray[np.float32]:
    num_samples, skip = max(0, round(duration_s * rate_hz)), round(MARGIN_S * rate_hz)
    with opened(path) as container:
        stream = sound_stream(container)
        if stream is None:
            return np.zeros((2, num_samples), np.float32)
        clock = SoundClock(stream)
        sought = may_seek and seek(container, stream, start_s - PREROLL_S)
        start = stop = 0
        blocks: list[Block] = []
        for number, frame in enumerate(begun(clock, frames_of(container, stream))):
            if number == 0 and sought and frame.pts is None:
                raise Unreadable("cannot be entered in the middle: its sound carries no times")
            position, block = clock.place(frame)
            start = round((start_s - skip / rate_hz) * clock.rate)  # whole output samples before: no rounding later
            stop = math.ceil((start_s + duration_s + MARGIN_S) * clock.rate)
            if number == 0 and sought and position > start:
                raise Unreadable("its index points behind the start")
            if position + block.shape[1] > start:
                blocks.append((position, block))
            if position >= stop:
                break
    if not blocks or clock.names is None:
        return np.zeros((2, num_samples), np.float32)
    stereo = to_stereo(_laid_out(blocks, start, stop), clock.names)
    if clock.rate != rate_hz:
        stereo = np.asarray(soxr.resample(stereo.T, clock.rate, rate_hz, quality="HQ"), np.float32).T
    return stereo[:, skip : skip + num_samples]


def _laid_out(blocks: Sequence[Block], start: int, stop: int) -> NDArray[np.float32]:
    """Blocks placed on a silent strip (C, stop − start) by their positions."""
    strip = np.zeros((blocks[0][1].shape[0], stop - start), np.float32)
    for position, block in blocks:
        low, high = max(start, position), min(stop, position + block.shape[1])
        if low < high:
            strip[:, low - start : high - start] = block[:, low - position : high - position]
    return strip
