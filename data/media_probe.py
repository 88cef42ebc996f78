"""What the frames and the sound of a file say about it, noted while they pass: headers promise, decoders tell."""

from __future__ import annotations

import itertools
import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.reformatter import ColorTrc
from av.video.stream import VideoStream

from data.hearing import Listener
from data.media_layout import Orientation, orientation, pixel_aspect
from data.media_open import Unreadable
from data.media_picture import PictureClock
from data.media_sound import MAX_GAP_S, SoundClock

Facts = dict[str, str | int | float | None]
"""Fields of `records.Source`."""

MISSING_S = 0.25
"""A stream that ends this much before its header says is cut short; less is rounding of headers."""
BACK_S = 1.0
"""Timestamps that go back by more belong to another recording; less is a muxer's clumsiness."""
MAX_SPAN_S = 48 * 3600.0
"""Longest film, s; a time scale far off looks like one of years."""


@dataclass
class PictureNotes:
    """What is learned while frames pass; with `from_packets`, times come from packets and frames give the rest."""

    stream: VideoStream
    from_packets: bool = False
    clock: PictureClock = field(init=False)
    times: array[float] = field(default_factory=lambda: array("d"))
    last_duration_s: float = 0.0
    num_damaged: int = 0
    num_decoded: int = 0
    num_interlaced: int = 0
    fault: str = ""
    """Why the first packets did not decode, where they did not."""
    turned: Orientation | None = None
    size: tuple[int, int] = (0, 0)
    transfer: int = 0
    format: str = ""

    def __post_init__(self) -> None:
        self.clock = PictureClock(self.stream)

    def take(self, frame: VideoFrame) -> float:
        """Note one frame; its time in the container, s."""
        seconds = self.clock.seconds(frame)
        if self.turned is None:
            self.turned, self.size = orientation(frame), (frame.height, frame.width)
            self.transfer, self.format = frame.color_trc, frame.format.name
        self.num_damaged += frame.is_corrupt
        self.num_decoded += 1
        self.num_interlaced += frame.interlaced_frame
        if not self.from_packets:
            duration = frame.duration * (frame.time_base or 0) if frame.duration else 0
            self.note_time(seconds, float(duration))
        return seconds

    def take_packet(self, packet: Packet[VideoStream]) -> None:
        """Note a packet's timestamps; those that are decoded for others' sake alone are never shown."""
        stamp = self.clock.stamp(packet)
        if stamp is not None and packet.time_base and not packet.is_discard:
            self.note_time(float(stamp * packet.time_base), float((packet.duration or 0) * packet.time_base))

    def note_time(self, seconds: float, duration_s: float) -> None:
        """Note when one frame is shown.

        Raises:
            Unreadable: it is far from all others.
        """
        back_s = MAX_SPAN_S if self.from_packets else BACK_S  # packets come in the order of decoding
        if self.times and self.times[-1] - seconds > back_s:
            raise Unreadable(
                f"timestamps go back from {self.times[-1]:.2f} s to {seconds:.2f} s at frame {len(self.times)}"
            )
        if self.times and abs(seconds - self.times[0]) > MAX_SPAN_S:
            raise Unreadable(f"frames lie {abs(seconds - self.times[0]):.0f} s apart; limit {MAX_SPAN_S:.0f} s")
        self.times.append(seconds)
        self.last_duration_s = duration_s

    def facts(self) -> Facts:
        """The picture fields of `records.Source`."""
        times, tick = sorted(self.times), float(self.stream.time_base or 0)
        intervals = [later - earlier for earlier, later in itertools.pairwise(times)]
        median = statistics.median(intervals) if intervals else 0.0
        deviation = max(0.0, max((abs(item - median) for item in intervals), default=0.0) - 1.001 * tick)
        rate = average_rate(times, self.stream, tick)
        height, width = upright_size(self)
        transfer = self.transfer
        return {
            "pixel_format": self.format,
            "color_transfer": ColorTrc(transfer).name.lower() if transfer in list(ColorTrc) and transfer != 2 else None,
            "width": width,
            "height": height,
            "rotation_deg": 90 * (self.turned or Orientation()).turns,
            "frame_rate": str(rate),
            "num_frames": len(times),
            "interlaced_share": round(self.num_interlaced / max(1, self.num_decoded), 4),
            "frame_jitter": round(deviation / median, 4) if median > 0 else 0.0,
            "video_start_s": times[0],
            "video_duration_s": times[-1] - times[0] + (self.last_duration_s or median) if intervals else 0.0,
        }


@dataclass
class SoundNotes:
    """What is learned while sound passes."""

    stream: AudioStream
    speech_too: bool = False
    clock: SoundClock = field(init=False)
    listener: Listener | None = None
    start: int | None = None
    stop: int = 0
    layout: str = ""
    held: AudioFrame | None = None
    """The first frame, which waits for the second."""

    def __post_init__(self) -> None:
        self.clock = SoundClock(self.stream)

    @property
    def begun(self) -> bool:
        """Whether anything has decoded."""
        return self.held is not None or self.start is not None

    def take(self, frame: AudioFrame) -> None:
        """Note one piece of sound.

        Raises:
            Unreadable: rate or channels change, or timestamps leap.
        """
        if not self.begun:
            self.held = frame
            return
        if self.held is not None:
            self.clock.begin(self.held, frame)
            self.end()
        self._take(frame)

    def end(self) -> None:
        """Note the first frame without waiting any longer."""
        if self.held is not None:
            self._take(self.held)
            self.held = None

    def _take(self, frame: AudioFrame) -> None:
        position, samples_CT = self.clock.place(frame)
        if self.listener is None or self.start is None:
            self.start = self.stop = position
            self.layout = frame.layout.name
            self.listener = Listener(self.clock.rate, self.clock.names or (), speech_too=self.speech_too)
        gap_s, span_s = (position - self.stop) / self.clock.rate, (position - self.start) / self.clock.rate
        if gap_s < -BACK_S or gap_s > MAX_GAP_S or span_s > MAX_SPAN_S:
            at_s = self.stop / self.clock.rate
            raise Unreadable(
                f"sound leaps from {at_s:.2f} s to {at_s + gap_s:.2f} s; limits -{BACK_S:g} s, +{MAX_GAP_S:g} s"
            )
        if position > self.stop:
            self.listener.take_silence(position - self.stop)
        fresh_CT = samples_CT[:, max(0, self.stop - position) :]
        if fresh_CT.shape[1]:
            self.listener.take(fresh_CT)
        self.stop = max(self.stop, position + samples_CT.shape[1])


def average_rate(times: Sequence[float], stream: VideoStream, tick: float) -> Fraction:
    """The header's exact rate where the timestamps agree with it, else what they show."""
    span = times[-1] - times[0]
    if span <= 0:
        return Fraction(0)
    measured = (len(times) - 1) / span
    for stated in (stream.average_rate, stream.guessed_rate, stream.base_rate):
        if stated and abs(measured / float(stated) - 1) <= 1.001 * tick / span + 1e-6:
            return stated
    return Fraction(measured).limit_denominator(1000)


def upright_size(notes: PictureNotes) -> tuple[int, int]:
    """Height and width as displayed, px."""
    height, width = notes.size[0], max(1, round(notes.size[1] * pixel_aspect(notes.stream)))
    return (width, height) if notes.turned is not None and notes.turned.turns % 2 else (height, width)


def stream_facts(container: InputContainer, video: VideoStream | None, audio: AudioStream | None) -> Facts:
    """What the headers say of the streams that are used."""
    facts: Facts = {
        "container": container.format.name,
        "header_duration_s": None if container.duration is None else container.duration / 1_000_000,
    }
    if video is not None:
        facts |= {
            "video_stream": video.index,
            "video_codec": video.codec_context.codec.canonical_name,
            "time_base": str(video.time_base),
            "header_num_frames": video.frames or None,
        }
    return facts | sound_stream_facts(audio)


def sound_stream_facts(audio: AudioStream | None) -> Facts:
    """Likewise of the sound."""
    if audio is None:
        return {"audio_stream": None, "audio_codec": None}
    return {"audio_stream": audio.index, "audio_codec": audio.codec_context.codec.canonical_name}


def promised_s(container: InputContainer, used: Sequence[VideoStream | AudioStream]) -> float | None:
    """Until when the used streams last by the headers, s of container time; None where they do not say so.

    Headers that speak of other streams as well count only where a used stream's own agrees: a subtitle may outlast
    the picture.
    """
    if container.duration is None:
        return None
    # Headers count from zero, MP4's with the empty edit and Matroska's to the last timestamp, but for what lies before.
    end_s = (min(0, container.start_time or 0) + container.duration) / 1_000_000
    if len(container.streams) == len(used):
        return end_s
    own = [
        float(((item.start_time or 0) + item.duration) * item.time_base)
        for item in used
        if item.duration and item.time_base
    ]
    return min(end_s, max(own)) if own else None


def refuse_cut_short(facts: Facts, promised: float | None) -> None:
    """Compare when the last stream ends with what the header promised, where nothing else noticed a missing end.

    Raises:
        Unreadable: more than `MISSING_S` is missing.
    """
    kinds = [kind for kind in ("video", "audio") if facts.get(f"{kind}_duration_s")]
    if promised is None or not kinds:
        return
    end_s = max(float(facts[f"{kind}_start_s"] or 0) + float(facts[f"{kind}_duration_s"] or 0) for kind in kinds)
    if promised - end_s > MISSING_S:
        raise Unreadable(f"is cut short: {end_s:.2f} s of {promised:.2f} s decode")
