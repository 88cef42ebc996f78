"""Everything about one file, from one pass over its packets: facts, what the picture is like, what the sound is like.

Measurements are remembered on disk under the file's content and everything else they depend on, so that a verb that
runs again, or the next verb, decodes nothing twice.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import re
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from data import files
from data.features import Track
from data.hearing import SoundTrack
from data.media_open import Unreadable, opened, picture_stream, pictures, sound_stream, sounds
from data.media_pass import Span, Watcher, decode_all, skim
from data.media_probe import (
    Facts,
    PictureNotes,
    SoundNotes,
    promised_s,
    refuse_cut_short,
    sound_stream_facts,
    stream_facts,
)
from data.media_type import foreign, head_of, is_animated_webp, media_type
from data.sensing import Sensing

__all__ = ["Facts", "Measurement", "Sensing", "measure", "probe", "remembered"]

DAMAGED = (
    OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, MemoryError, ArithmeticError, NotImplementedError,
    RuntimeError, struct.error, zlib.error, zipfile.BadZipFile, SyntaxError, tokenize.TokenError,
)  # fmt: skip
"""What reading an archive of arrays raises when any of its bytes is wrong; found by flipping them."""
BESIDE_THE_POINT = ("files", "records")
"""Files of this room whose code decides nothing that a measurement says."""
LIBRARIES = ("av", "numpy", "onnxruntime", "opencv-python-headless", "soxr")


class Measurement(NamedTuple):
    """What one file holds."""

    facts: Facts
    """Measured fields of `records.Source`; `error` says why the file cannot be used, where it cannot."""
    picture: Track | None
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
    whole = sensing.decode == "all"
    if path.is_file() and (kind := foreign(head_of(path))) is not None:
        facts["media_type"] = kind
    with opened(path, sensing.decoder) as container:
        shown, heard = pictures(container), sounds(container)
        facts |= {
            "media_type": media_type(container, head_of(path), has_picture=bool(shown)),
            "num_video_streams": len(shown),
            "num_audio_streams": len(heard),
            "num_frames": 0,
            "decoded": sensing.decode,
        }
        if is_animated_webp(head_of(path)):
            raise Unreadable("is an animated WebP, which nothing here decodes; make it a GIF, an APNG or a video")
        video = picture_stream(container) if shown or not heard else None
        audio = None if sound_path is not None else sound_stream(container)
        facts |= stream_facts(container, video, audio)
        notes = None if video is None else PictureNotes(video, from_packets=not whole)
        sound = None if audio is None else SoundNotes(audio, sensing.speech)
        watcher = Watcher(sensing)
        span = (decode_all if whole else skim)(container, notes, sound, watcher)
        promised = promised_s(container, [item for item in (video, audio) if item is not None])
        if notes is not None:
            _describe(notes, facts)
    picture = watcher.finish() if watcher.num_taken > 1 else None
    if picture is not None:
        facts |= picture_shares(picture, whole=whole)
    if sound_path is None:
        track = _hear(sound, facts, None if video is None else float(facts["video_start_s"] or 0), span)
        refuse_cut_short(facts, promised)
    else:
        refuse_cut_short(facts, promised)
        sound, span = _other_sound(sound_path, sensing, facts)
        track = _hear(sound, facts, None, span)
        facts["audio_start_s"] = facts.get("video_start_s", 0.0)
    return Measurement(facts, picture, track) if whole else Measurement(facts, None, None)


def _describe(notes: PictureNotes, facts: Facts) -> None:
    """Add the picture's facts.

    Raises:
        Unreadable: nothing decoded, or something is damaged.
    """
    if not notes.times or notes.turned is None:
        raise Unreadable(f"holds no frame that decodes{notes.fault}")
    facts |= notes.facts()
    if notes.num_damaged:
        raise Unreadable(f"{notes.num_damaged} of {len(notes.times)} frames are damaged")


def _hear(sound: SoundNotes | None, facts: Facts, origin_s: float | None, span: Span | None) -> SoundTrack | None:
    """Add the sound's facts; its track, on the timeline that starts at `origin_s` (None: with the sound itself)."""
    if sound is not None:
        sound.end()
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


def _other_sound(path: Path, sensing: Sensing, facts: Facts) -> tuple[SoundNotes, Span | None]:
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
            read = decode_all if sensing.decode == "all" else skim
            return sound, read(container, None, sound, Watcher(sensing))
    except Unreadable as error:
        raise Unreadable(f"its sound file {path.name} {error}") from error


def picture_shares(track: Track, *, whole: bool) -> Facts:
    """The picture fields of `Source` that the track tells; key frames alone (not `whole`) cannot tell repeats."""
    lit = track.bars[~track.black]
    top, bottom, left, right = (float(side) for side in lit.min(axis=0)) if len(lit) else (0.0, 0.0, 0.0, 0.0)
    return {
        "black_share": round(float(track.black.mean()), 4),
        "freeze_share": round(float(track.repeat.mean()), 4) if whole else 0.0,
        "letterbox_share": round(1 - (1 - top - bottom) * (1 - left - right), 4),
    }


def remembered(path: Path, sha256: str, sensing: Sensing, work: Path, sound_path: Path | None = None) -> Measurement:
    """`measure`, or what it said before of the same content; an entry that does not read is measured again.

    Args:
        sha256: Content hash of `path`.
        work: Folder of scratch files; entries go to `measured/` in it.
    """
    found = recall(sha256, sensing, work, sound_path)
    if found is None:
        found = measure(path, sensing, sound_path)
        _keep(_entry(sha256, sensing, work, sound_path), found)
    return found


def recall(sha256: str, sensing: Sensing, work: Path, sound_path: Path | None = None) -> Measurement | None:
    """What `remembered` would say without looking at the file; None where it would have to."""
    return _recall(_entry(sha256, sensing, work, sound_path))


def _entry(sha256: str, sensing: Sensing, work: Path, sound_path: Path | None) -> Path:
    name = key(sha256, sensing, sound_path)
    return work / "measured" / name[:2] / f"{name}.npz"


def key(sha256: str, sensing: Sensing, sound_path: Path | None = None) -> str:
    """Name of a measurement: a hash over all that it depends on."""
    sound = files.sha256(sound_path) if sound_path is not None and sound_path.is_file() else str(sound_path)
    settings = sensing.model_dump(mode="json", exclude={"semantics_weights"})
    weights = None if sensing.semantics_weights is None else _weights_hash(sensing.semantics_weights)
    parts = [sha256, sound, settings, weights, code_hash()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@functools.cache
def _weights_hash(path: Path) -> str:
    known = path.is_file() or (path / "config.json").is_file()  # a mistyped folder may hold a whole disk
    return files.sha256(path) if known else "absent"


@functools.cache
def code_hash() -> str:
    """Hash of the code that measures, found by following the imports, and of the libraries below it."""
    folder, waiting, found = Path(__file__).parent, ["measure"], set[str]()
    while waiting:
        name = waiting.pop()
        if name in found or name in BESIDE_THE_POINT or not (folder / f"{name}.py").is_file():
            continue
        found.add(name)
        waiting += imported((folder / f"{name}.py").read_text(encoding="utf-8"))
    parts = [f"{name} {files.sha256(folder / f'{name}.py')}" for name in sorted(found)]
    parts += [f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def imported(code: str) -> list[str]:
    """Files of this room that code imports, at its top or within a function."""
    names = re.findall(r"^\s*from data\.(\w+) import", code, re.MULTILINE)
    for group in re.findall(r"^\s*from data import ([\w, ]+)", code, re.MULTILINE):
        names += [name.split()[0] for name in cast(str, group).split(",") if name.strip()]
    return names


def _keep(entry: Path, found: Measurement) -> None:
    arrays: dict[str, NDArray[Any]] = {"facts": np.frombuffer(json.dumps(found.facts).encode(), np.uint8)}
    for prefix, track in (("picture", found.picture), ("sound", found.sound)):
        if track is not None:
            arrays |= {f"{prefix}.{name}": array for name, array in track.to_arrays().items()}
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
        picture = Track.from_arrays(parts["picture"]) if parts["picture"] else None
        return Measurement(facts, picture, SoundTrack.from_arrays(parts["sound"]) if parts["sound"] else None)
    except DAMAGED:
        return None
