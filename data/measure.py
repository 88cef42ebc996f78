"""Everything about one file, from one pass over its packets: facts, what the picture is like, what the sound is like.

Measurements are remembered on disk under the file's content and everything else they depend on, so that a verb that
runs again, or the next verb, decodes nothing twice.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import zipfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, cast

import av.error
import numpy as np
from av.audio.frame import AudioFrame
from av.container import InputContainer
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray

from data import features, files
from data.hearing import SoundTrack
from data.media_layout import orientation
from data.media_open import Unreadable, opened, picture_stream, pictures, reason, sound_stream, sounds
from data.media_picture import Painter
from data.media_probe import Facts, PictureNotes, SoundNotes, refuse_cut_short, sound_stream_facts, stream_facts
from data.media_type import foreign, head_of, media_type
from data.sensing import Sensing

__all__ = ["Facts", "Measurement", "Sensing", "measure", "probe", "remembered"]

SENSED_PX = 256
"""Long side of the pictures that are looked at, px: the motion and sharpness columns are defined at it."""
SPOT_S, SPOT_EVERY_S, SETTLE_S = 2.0, 30.0, 0.2
"""With key frames alone, this much sound is decoded of every so many seconds, less what a decoder needs to settle, s."""
MEASURING = (
    "features", "hearing", "loudness", "measure", "media_layout", "media_open", "media_picture", "media_probe",
    "media_sound", "media_type", "semantics", "sensing", "shots", "speech",
)  # fmt: skip
"""Files whose code decides what a measurement says."""
LIBRARIES = ("av", "numpy", "onnxruntime", "opencv-python-headless", "scipy", "soxr")


class Measurement(NamedTuple):
    """What one file holds."""

    facts: Facts
    """Measured fields of `records.Source`; `error` says why the file cannot be used, where it cannot."""
    picture: features.Track | None
    """None where there is no moving picture, or where key frames alone were decoded."""
    sound: SoundTrack | None
    """None where there is no sound, or likewise."""


def measure(path: Path, sensing: Sensing, sound_path: Path | None = None) -> Measurement:
    """Decode a file once and say all that it holds; a bad file gives `error`, never an exception.

    A still picture gives one frame and a sound file none, both without error: they may be references.

    Args:
        sound_path: File whose sound is measured instead; it starts with the first frame shown.

    Raises:
        RuntimeError: something that the settings need is not installed.
    """
    facts: Facts = {}
    try:
        return _measured(path, sensing, sound_path, facts)
    except Unreadable as error:
        facts["error"] = str(error)
        return Measurement(facts, None, None)


def probe(path: Path) -> Facts:
    """The facts alone, without speech: for files that we wrote ourselves."""
    return measure(path, Sensing(speech=False)).facts


def _measured(path: Path, sensing: Sensing, sound_path: Path | None, facts: Facts) -> Measurement:
    """The measurement; `facts` holds what was found before an error."""
    if path.is_file() and (kind := foreign(head_of(path))) is not None:
        facts["media_type"] = kind
    with opened(path, sensing.decoder) as container:
        shown, heard = pictures(container), sounds(container)
        facts |= {
            "media_type": media_type(container, head_of(path), has_picture=bool(shown)),
            "num_video_streams": len(shown),
            "num_audio_streams": len(heard),
        }
        video = picture_stream(container) if shown or not heard else None
        audio = None if sound_path is not None else sound_stream(container)
        facts |= stream_facts(container, video, audio)
        notes = None if video is None else PictureNotes(video, from_packets=sensing.decode == "keyframes")
        sound = None if audio is None else SoundNotes(audio, sensing.speech)
        watcher = Watcher(sensing)
        if sensing.decode == "keyframes":
            span = _skim(container, notes, sound, watcher)
        else:
            span = None
            _decode(container, notes, sound, watcher)
        _describe(notes, facts)
        track = watcher.finish() if sensing.decode == "all" and watcher.num_taken > 1 else None
    start_s = float(facts.get("video_start_s") or 0.0)
    if sound_path is not None:
        sound, span = _other_sound(sound_path, sensing, facts)
        heard_track = _hear(sound, facts, None, span)
        facts["audio_start_s"] = start_s
    else:
        heard_track = _hear(sound, facts, start_s if video is not None else None, span)
        refuse_cut_short(facts)
    facts["decoded"] = sensing.decode
    if track is not None:
        facts |= picture_shares(track)
    return Measurement(facts, track, heard_track if sensing.decode == "all" else None)


class _Blind:
    """Sees nothing: until the picture's sense is there."""

    def __init__(self, sensing: Sensing) -> None: ...

    def take(self, seconds: float, picture_HWC: NDArray[np.uint8]) -> None: ...

    def finish(self) -> None: ...


class Watcher:
    """Paints frames small, upright and whole, and shows them to the picture's sense."""

    def __init__(self, sensing: Sensing) -> None:
        self._sense: Any = getattr(features, "PictureSense", _Blind)(sensing)
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

    def finish(self) -> features.Track:
        """What was seen."""
        return self._sense.finish()


def whole_picture(stream: VideoStream, frame: VideoFrame) -> Painter:
    """A painter that shows all of the picture with its long side at `SENSED_PX`, never enlarged."""
    turned, aspect = orientation(frame), stream.codec_context.sample_aspect_ratio or Fraction(1)
    width, height = frame.width * aspect, Fraction(frame.height)
    if turned.turns % 2:
        width, height = height, width
    scale = min(Fraction(1), SENSED_PX / max(width, height))
    return Painter(max(1, round(height * scale)), max(1, round(width * scale)), turned, aspect)


def _decode(container: InputContainer, notes: PictureNotes | None, sound: SoundNotes | None, watcher: Watcher) -> None:
    """Decode all frames of both streams in the order of the file.

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


def decoded(
    packet: Packet[Any], notes: PictureNotes | None, sound: SoundNotes | None
) -> Sequence[VideoFrame | AudioFrame]:
    """A packet's frames. What does not decode before a stream's first frame is skipped: recordings start anywhere.

    Raises:
        Unreadable: it is damaged; the message says where.
    """
    is_picture = notes is not None and packet.stream is notes.stream
    begun = bool(notes.times) if notes is not None and is_picture else sound is not None and sound.start is not None
    where = f" at {float(packet.pts * packet.time_base):.2f} s" if packet.pts is not None and packet.time_base else ""
    if packet.is_corrupt:
        raise Unreadable(f"is damaged or cut short: a packet{where} is incomplete")
    try:
        return cast(Sequence[VideoFrame | AudioFrame], packet.decode())
    except av.error.InvalidDataError as error:
        if begun:
            what = f"frame {len(notes.times)}" if notes is not None and is_picture else "sound"
            raise Unreadable(f"is damaged: {what} does not decode{where}: {reason(error)}") from error
        return ()


def _skim(
    container: InputContainer, notes: PictureNotes | None, sound: SoundNotes | None, watcher: Watcher
) -> tuple[float, float] | None:
    """Read every packet but decode key frames and spots of sound alone; start and end of the sound by its packets, s."""
    streams = [item.stream for item in (notes, sound) if item is not None]
    span: tuple[float, float] | None = None
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
    return span


def _listen_at(packet: Packet[Any], sound: SoundNotes, settled_s: float) -> None:
    """Decode sound of a spot and lay it beside that of the spot before."""
    try:
        frames = cast(Sequence[AudioFrame], packet.decode())
    except av.error.InvalidDataError:
        return
    for frame in frames:
        if frame.pts is not None and frame.time_base and frame.pts * frame.time_base >= settled_s:
            frame.pts = None
            sound.take(frame)


def _describe(notes: PictureNotes | None, facts: Facts) -> None:
    """Add the picture's facts.

    Raises:
        Unreadable: nothing decoded, or something is damaged.
    """
    if notes is None:
        facts["num_frames"] = 0
        return
    if not notes.times or notes.turned is None:
        raise Unreadable("holds no frame that decodes")
    facts |= notes.facts()
    if notes.num_damaged:
        raise Unreadable(f"{notes.num_damaged} of {len(notes.times)} frames are damaged")


def _hear(
    sound: SoundNotes | None, facts: Facts, origin_s: float | None, span: tuple[float, float] | None
) -> SoundTrack | None:
    """Add the sound's facts; its track, on the timeline that starts at `origin_s` (None: with the sound itself)."""
    if sound is None or sound.listener is None or sound.start is None or sound.clock.names is None:
        return None
    rate = sound.clock.rate
    start_s = sound.start / rate
    track, heard = sound.listener.finish(0.0 if origin_s is None else start_s - origin_s)
    facts |= {
        "num_channels": len(sound.clock.names),
        "channel_layout": sound.layout,
        "sample_rate_hz": rate,
        "audio_start_s": start_s if span is None else span[0],
        "audio_duration_s": (sound.stop - sound.start) / rate if span is None else span[1] - span[0],
        **heard,
    }
    return track


def _other_sound(path: Path, sensing: Sensing, facts: Facts) -> tuple[SoundNotes | None, tuple[float, float] | None]:
    """Listen to another file's sound.

    Raises:
        Unreadable: it holds none.
    """
    try:
        with opened(path) as container:
            audio = sound_stream(container)
            if audio is None:
                raise Unreadable("holds no sound")
            facts |= {"num_audio_streams": len(sounds(container)), **sound_stream_facts(audio)}
            sound = SoundNotes(audio, sensing.speech)
            watcher = Watcher(sensing)
            if sensing.decode == "keyframes":
                return sound, _skim(container, None, sound, watcher)
            _decode(container, None, sound, watcher)
            return sound, None
    except Unreadable as error:
        raise Unreadable(f"its sound file {path.name} {error}") from error


def picture_shares(track: features.Track) -> Facts:
    """The picture fields of `Source` that the track tells."""
    names = ("black_share", "freeze_share", "letterbox_share")
    return {name: float(getattr(track, name)) for name in names if hasattr(track, name)}


def remembered(path: Path, sha256: str, sensing: Sensing, work: Path, sound_path: Path | None = None) -> Measurement:
    """`measure`, or what it said before of the same content; an entry that does not read is measured again.

    Args:
        sha256: Content hash of `path`.
        work: Folder of scratch files; entries go to `measured/` in it.
    """
    name = key(sha256, sensing, sound_path)
    entry = work / "measured" / name[:2] / f"{name}.npz"
    found = _recall(entry)
    if found is None:
        found = measure(path, sensing, sound_path)
        _keep(entry, found)
    return found


def key(sha256: str, sensing: Sensing, sound_path: Path | None = None) -> str:
    """Name of a measurement: a hash over all that it depends on."""
    sound = files.sha256(sound_path) if sound_path is not None and sound_path.is_file() else str(sound_path)
    settings = sensing.model_dump(mode="json", exclude={"semantics_weights"})
    weights = None if sensing.semantics_weights is None else _weights_hash(sensing.semantics_weights)
    parts = [sha256, sound, settings, weights, _code()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@functools.cache
def _weights_hash(path: Path) -> str:
    return files.sha256(path) if path.exists() else "absent"


@functools.cache
def _code() -> str:
    """Hash of the measuring code and of the libraries below it."""
    folder = Path(__file__).parent
    paths = [folder / f"{name}.py" for name in MEASURING]
    parts = [f"{path.name} {files.sha256(path)}" for path in paths if path.is_file()]
    parts += [f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _keep(entry: Path, found: Measurement) -> None:
    arrays: dict[str, NDArray[Any]] = {"facts": np.frombuffer(json.dumps(found.facts).encode(), np.uint8)}
    for prefix, track in (("picture", found.picture), ("sound", found.sound)):
        if track is not None:
            arrays |= {f"{prefix}.{name}": array for name, array in cast(Any, track).to_arrays().items()}
    with files.whole(entry) as temporary, temporary.open("wb") as stream:
        np.savez(stream, **cast(Any, arrays))


def _recall(entry: Path) -> Measurement | None:
    """A remembered measurement; None where there is none, or it is damaged."""
    try:
        with np.load(entry, allow_pickle=False) as stored:
            arrays: dict[str, NDArray[Any]] = {name: stored[name] for name in stored.files}
        facts = cast(Facts, json.loads(arrays["facts"].tobytes()))
        parts = {
            prefix: {
                name.removeprefix(f"{prefix}."): array for name, array in arrays.items() if name.startswith(prefix)
            }
            for prefix in ("picture", "sound")
        }
        picture = cast(Any, features.Track).from_arrays(parts["picture"]) if parts["picture"] else None
        return Measurement(facts, picture, SoundTrack.from_arrays(parts["sound"]) if parts["sound"] else None)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
