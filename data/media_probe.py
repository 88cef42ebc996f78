"""What a media file really holds, found by decoding all of it: headers promise, decoders tell."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import cast

import numpy as np
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.reformatter import ColorTrc
from av.video.stream import VideoStream

from data.media_layout import Orientation, orientation
from data.media_open import Unreadable, opened, picture_stream, sound_stream
from data.media_picture import PictureClock
from data.media_sound import SoundClock

Facts = dict[str, str | int | float | None]
"""Fields of `records.Source`."""

MISSING_S = 0.25
"""A stream that ends this much before its header says is cut short; less is rounding of headers."""


def probe(path: Path) -> Facts:
    """The picture and sound fields of `records.Source`; what is wrong with the file is in `error`, never raised.

    Decodes every frame and all sound of the streams that would be used, and holds none of them.
    """
    try:
        with opened(path) as container:
            return _measure(container)
    except Unreadable as error:
        return {"error": str(error)}


@dataclass
class _Picture:
    """What is learned while frames pass."""

    stream: VideoStream
    clock: PictureClock = field(init=False)
    times: list[float] = field(default_factory=list[float])
    last_duration_s: float = 0.0
    num_damaged: int = 0
    turned: Orientation = field(default_factory=Orientation)
    size: tuple[int, int] = (0, 0)
    transfer: int = 0
    format: str = ""

    def __post_init__(self) -> None:
        self.clock = PictureClock(self.stream)

    def take(self, frame: VideoFrame) -> None:
        """Note one frame."""
        if not self.times:
            self.turned, self.size = orientation(frame), (frame.height, frame.width)
            self.transfer, self.format = frame.color_trc, frame.format.name
        self.times.append(self.clock.seconds(frame))
        self.num_damaged += frame.is_corrupt
        self.last_duration_s = float(frame.duration * (frame.time_base or 0)) if frame.duration else 0.0


@dataclass
class _Sound:
    """What is learned while sound passes."""

    stream: AudioStream
    clock: SoundClock = field(init=False)
    start: int | None = None
    stop: int = 0
    peak: float = 0.0
    layout: str = ""

    def __post_init__(self) -> None:
        self.clock = SoundClock(self.stream)

    def take(self, frame: AudioFrame) -> None:
        """Note one block of sound."""
        position, block = self.clock.place(frame)
        if self.start is None:
            self.start, self.layout = position, frame.layout.name
        self.stop = max(self.stop, position + block.shape[1])
        self.peak = max(self.peak, float(np.abs(block).max(initial=0.0)))


def _measure(container: InputContainer) -> Facts:
    """Decode both streams in one pass and describe them.

    Raises:
        Unreadable: no picture, a still, damaged or cut short.
    """
    picture = _Picture(picture_stream(container))
    audio = sound_stream(container)
    sound = None if audio is None else _Sound(audio)
    for frame in _frames(container, picture.stream, audio):
        if isinstance(frame, VideoFrame):
            picture.take(frame)
        elif sound is not None:
            sound.take(frame)
    if not picture.times:
        raise Unreadable("holds no frame that decodes")
    if len(picture.times) == 1:
        raise Unreadable("holds one frame: a still, not a video")
    if picture.num_damaged:
        raise Unreadable(f"{picture.num_damaged} of {len(picture.times)} frames are damaged")
    facts = {"container": container.format.name, **_picture_facts(picture), **_sound_facts(sound)}
    _refuse_cut_short(container, facts)
    return facts


def _frames(
    container: InputContainer, video: VideoStream, audio: AudioStream | None
) -> Iterator[VideoFrame | AudioFrame]:
    """All frames of the two streams in the order of the file."""
    streams = (video,) if audio is None else (video, audio)
    for packet in container.demux(*streams):
        if packet.is_corrupt:
            raise Unreadable("is damaged or cut short: a packet is incomplete")
        yield from cast(Sequence[VideoFrame | AudioFrame], packet.decode())


def _picture_facts(picture: _Picture) -> Facts:
    times = sorted(picture.times)
    intervals = [later - earlier for earlier, later in itertools.pairwise(times)]
    median = statistics.median(intervals)
    tick = float(picture.stream.time_base or 0)
    deviation = max(0.0, max(abs(interval - median) for interval in intervals) - 1.001 * tick)
    aspect = picture.stream.codec_context.sample_aspect_ratio or Fraction(1)
    height, width = picture.size[0], round(picture.size[1] * aspect)
    if picture.turned.turns % 2:
        height, width = width, height
    transfer = picture.transfer
    return {
        "video_codec": picture.stream.codec_context.codec.canonical_name,
        "pixel_format": picture.format,
        "color_transfer": ColorTrc(transfer).name.lower() if transfer in list(ColorTrc) and transfer != 2 else None,
        "width": width,
        "height": height,
        "rotation_deg": 90 * picture.turned.turns,
        "frame_rate": str(_average_rate(times, picture.stream, tick)),
        "num_frames": len(times),
        "frame_jitter": round(deviation / median, 4) if median > 0 else 0.0,
        "video_start_s": times[0],
        "video_duration_s": times[-1] - times[0] + (picture.last_duration_s or median),
    }


def _average_rate(times: Sequence[float], stream: VideoStream, tick: float) -> Fraction:
    """The header's exact rate where the timestamps agree with it, else what they show."""
    span = times[-1] - times[0]
    if span <= 0:
        return Fraction(0)
    measured = (len(times) - 1) / span
    for stated in (stream.average_rate, stream.guessed_rate, stream.base_rate):
        if stated and abs(measured / float(stated) - 1) <= 1.001 * tick / span + 1e-6:
            return stated
    return Fraction(measured).limit_denominator(1000)


def _sound_facts(sound: _Sound | None) -> Facts:
    if sound is None or sound.start is None or sound.clock.names is None:
        return {"audio_codec": None}
    rate = sound.clock.rate
    return {
        "audio_codec": sound.stream.codec_context.codec.canonical_name,
        "num_channels": len(sound.clock.names),
        "channel_layout": sound.layout,
        "sample_rate_hz": rate,
        "audio_start_s": sound.start / rate,
        "audio_duration_s": (sound.stop - sound.start) / rate,
        "peak": round(sound.peak, 6),
    }


def _refuse_cut_short(container: InputContainer, facts: Facts) -> None:
    """Compare what decoded with what the header promised, where nothing else noticed a missing end.

    Raises:
        Unreadable: more than `MISSING_S` is missing from the longer stream.
    """
    if container.duration is None:
        return
    start_s = min(float(facts["video_start_s"] or 0), float(facts.get("audio_start_s") or 0))
    ends = [float(facts["video_start_s"] or 0) + float(facts["video_duration_s"] or 0)]
    if facts["audio_codec"] is not None:
        ends.append(float(facts["audio_start_s"] or 0) + float(facts["audio_duration_s"] or 0))
    promised_s, decoded_s = container.duration / 1_000_000, max(ends) - start_s
    if promised_s - decoded_s > MISSING_S:
        raise Unreadable(f"is cut short: {decoded_s:.2f} s of {promised_s:.2f} s decode")
