"""One pass over a file's packets: everything decoded, or key frames and spots of sound alone."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, cast

from av.audio.frame import AudioFrame
from av.container import InputContainer
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from data.features import PictureSense, Track
from data.media_layout import orientation, pixel_aspect
from data.media_open import UNDECODED, Unreadable, reason
from data.media_picture import Painter
from data.media_probe import PictureNotes, SoundNotes
from data.sensing import Sensing

Span = tuple[float, float]
"""Start and end of the sound by its packets, s of container time."""
SENSED_PX = 256
"""Long side of the pictures that are looked at, px: the motion and sharpness columns are defined at it."""
SPOT_S, SPOT_EVERY_S, SETTLE_S = 2.0, 30.0, 0.2
"""With key frames alone, this much sound is decoded of every so many seconds, less what a decoder needs to settle, s."""


class Watcher:
    """Paints frames small, upright and whole, and shows them to the picture's sense."""

    def __init__(self, sensing: Sensing) -> None:
        self._sense = PictureSense(sensing)
        self._brush: Painter | None = None
        self._first_s = self._last_s = 0.0
        self.num_taken = 0

    def take(self, notes: PictureNotes, frame: VideoFrame, seconds: float) -> None:
        """The next frame, shown at `seconds` of container time; one that is not later than the last is never shown."""
        if self._brush is None:
            self._brush, self._first_s = whole_picture(notes.stream, frame), seconds
        elif seconds <= self._last_s:
            return
        self._last_s = seconds
        self.num_taken += 1
        self._sense.take(seconds - self._first_s, self._brush.paint(frame))

    def finish(self) -> Track:
        """What was seen."""
        return self._sense.finish()


def whole_picture(stream: VideoStream, frame: VideoFrame) -> Painter:
    """A painter that shows all of the picture with its long side at `SENSED_PX`, never enlarged beyond 2 px."""
    turned, aspect = orientation(frame), pixel_aspect(stream)
    width, height = frame.width * aspect, Fraction(frame.height)
    if turned.turns % 2:
        width, height = height, width
    scale = min(Fraction(1), SENSED_PX / max(width, height))
    return Painter(max(2, round(height * scale)), max(2, round(width * scale)), turned, aspect)


def decode_all(
    container: InputContainer, notes: PictureNotes | None, sound: SoundNotes | None, watcher: Watcher
) -> Span | None:
    """Decode all frames of both streams in the order of the file; no span, since all sound decodes.

    Raises:
        Unreadable: something is damaged.
    """
    streams = [item.stream for item in (notes, sound) if item is not None]
    for packet in container.demux(streams):
        for frame in decoded(packet, notes, sound):
            if isinstance(frame, VideoFrame) and notes is not None:
                watcher.take(notes, frame, notes.take(frame))
            elif isinstance(frame, AudioFrame) and sound is not None:
                sound.take(frame)
    return None


def decoded(
    packet: Packet[Any], notes: PictureNotes | None, sound: SoundNotes | None
) -> Sequence[VideoFrame | AudioFrame]:
    """A packet's frames. What does not decode before a stream's first frame is skipped: recordings start anywhere.

    Raises:
        Unreadable: it is damaged; the message says where.
    """
    is_picture = notes is not None and packet.stream is notes.stream
    begun = bool(notes.times) if notes is not None and is_picture else sound is not None and sound.begun
    where = f" at {float(packet.pts * packet.time_base):.2f} s" if packet.pts is not None and packet.time_base else ""
    if packet.is_corrupt:
        raise Unreadable(f"is damaged or cut short: a packet{where} is incomplete")
    try:
        return cast(Sequence[VideoFrame | AudioFrame], packet.decode())
    except UNDECODED as error:
        if begun:
            what = f"frame {len(notes.times)}" if notes is not None and is_picture else "sound"
            raise Unreadable(f"is damaged: {what} does not decode{where}: {reason(error)}") from error
        if notes is not None and is_picture:
            notes.fault = f": {reason(error)}"
        return ()


def skim(
    container: InputContainer, notes: PictureNotes | None, sound: SoundNotes | None, watcher: Watcher
) -> Span | None:
    """Read every packet but decode key frames and spots of sound alone."""
    streams = [item.stream for item in (notes, sound) if item is not None]
    span: Span | None = None
    spot, settled_s = -1, 0.0
    for packet in container.demux(streams):
        if notes is not None and packet.stream is notes.stream:
            notes.take_packet(cast("Packet[VideoStream]", packet))
            if packet.is_keyframe or packet.pts is None:
                for frame in decoded(packet, notes, sound):
                    watcher.take(notes, cast(VideoFrame, frame), notes.take(cast(VideoFrame, frame)))
        elif sound is not None and packet.pts is not None and packet.time_base:
            seconds = float(packet.pts * packet.time_base)
            span = (span[0] if span else seconds, seconds + float((packet.duration or 0) * packet.time_base))
            number, within_s = divmod(seconds - span[0], SPOT_EVERY_S)
            if within_s >= SPOT_S:
                continue
            if number != spot:
                sound.stream.codec_context.flush_buffers()
                spot, settled_s = number, 0.0 if number == 0 else seconds + SETTLE_S
            _listen_at(packet, sound, settled_s)
            if number == 0 and sound.start is not None:
                span = (sound.start / sound.clock.rate, span[1])  # what a decoder drops at the start is no sound
    return span


def _listen_at(packet: Packet[Any], sound: SoundNotes, settled_s: float) -> None:
    """Decode sound of a spot and lay it beside that of the spot before."""
    try:
        frames = cast(Sequence[AudioFrame], packet.decode())
    except UNDECODED:
        return
    for frame in frames:
        if frame.pts is not None and frame.time_base and frame.pts * frame.time_base >= settled_s:
            if settled_s:
                frame.pts = None
            sound.take(frame)
