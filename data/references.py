"""References that a clip is conditioned on in `ref2va`: those the user gave, and draws from the same source.

A draw never shows what it is meant to help generate: it comes from clips of the same source whose spans do not touch
the target's, unless `own_span` asks for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from data.files import sha256
from data.records import Clip, ClipShape, Frozen, Source

Kind = Literal["image", "video", "audio"]


class Reference(NamedTuple):
    """A picture, video or sound that a generation is conditioned on; their order carries meaning."""

    kind: Kind
    frames_FHWC: NDArray[np.uint8] | None = None
    """At the family's rate; one frame for an image; None for sound alone."""
    waveform_CT: NDArray[np.float32] | None = None
    """Stereo at the family's rate; None for an image or a silent video."""


class References(Frozen):
    """How references are drawn; what the user put beside a file comes first, in its order."""

    num_sets: int = Field(default=1, gt=0)
    """Sets of references of each clip, so that it is not always seen with the same."""
    num_images: int = Field(default=1, ge=0)
    """Frames drawn for one set, each from another instant."""
    num_videos: int = Field(default=0, ge=0)
    """Excerpts drawn for one set, as long as the clip at most, with their sound."""
    num_sounds: int = Field(default=0, ge=0)
    """Excerpts of sound alone drawn for one set, as long as the clip at most."""
    own_span: bool = False
    """Draw from the clip itself too: then the model may learn to copy."""
    seed: int = Field(default=0, ge=0)
    """Seed of the draws."""

    @model_validator(mode="after")
    def _sound_is_not_alone(self) -> References:
        if self.num_sounds and not (self.num_images or self.num_videos):
            raise ValueError("num_sounds: sound cannot be the only reference; set num_images or num_videos")
        return self


class Pick(NamedTuple):
    """One reference, as a place in a file."""

    kind: Kind
    path: str
    sound_path: str | None
    content: str
    """What identifies the file's bytes."""
    start_s: float
    end_s: float
    """No frame and no sound at or after this is used; of an image it says nothing."""
    has_audio: bool


def given(clip: Clip, sources: Mapping[str, Source]) -> tuple[Pick, ...]:
    """The references that the user gave a clip, in order; none where one of them was not accepted: their order counts.

    Args:
        clip: The clip.
        sources: Accepted reference files, by path.
    """
    if not all(path in sources for path in clip.references):
        return ()
    return tuple(_of_file(sources[path]) for path in clip.references)


def of_path(path: str) -> Pick:
    """All of a reference file that was never ingested, measured as `ingest` does.

    Raises:
        Unreadable: it is no picture, video or sound that decodes.
    """
    from data.media import Unreadable, probe
    from data.remote import local

    file = local(path)
    facts = probe(file)
    if facts.get("error") is not None:
        raise Unreadable(str(facts["error"]))
    digest = sha256(file)
    known = {"source_id": digest[:16], "sha256": digest, "path": path, "group": "", "use": "reference"}
    return _of_file(Source.model_validate({**known, "size_bytes": file.stat().st_size, **facts}))


def _of_file(source: Source) -> Pick:
    """All of a reference file, from its start."""
    kind: Kind = "audio" if not source.width else "image" if (source.media_type or "").startswith("image/") else "video"
    sound_path = source.path if kind == "audio" else source.sound_path  # it has no picture whose timeline could count
    length_s = source.video_duration_s if kind == "video" else source.audio_duration_s
    return Pick(kind, source.path, sound_path, source.sha256, 0.0, length_s, source.audio_codec is not None)


def drawn(clip: Clip, siblings: Sequence[Clip], settings: References, number: int) -> tuple[Pick, ...]:
    """Set `number` of a clip's drawn references: a pure function of settings, clip and siblings; empty without any.

    Args:
        clip: The target.
        siblings: Clips of the same source, in any order; the target may be among them.
        settings: What to draw.
        number: Which of the sets.
    """
    apart = [other for other in siblings if other.end_s <= clip.start_s or other.start_s >= clip.end_s]
    pool = sorted([*apart, clip] if settings.own_span else apart, key=lambda other: other.clip_id)
    if not pool:
        return ()
    random = np.random.default_rng(
        [settings.seed, number, int(hashlib.sha256(clip.clip_id.encode()).hexdigest()[:8], 16)]
    )
    return tuple(_draws(pool, settings, random))


def _draws(pool: Sequence[Clip], settings: References, random: np.random.Generator) -> Iterator[Pick]:
    heard = [other for other in pool if other.has_audio]
    wanted: list[tuple[Kind, int, Sequence[Clip]]] = [
        ("image", settings.num_images, pool),
        ("video", settings.num_videos, pool),
        ("audio", settings.num_sounds, heard),
    ]
    for kind, count, clips in wanted:
        for _ in range(count if clips else 0):
            other = clips[int(random.integers(len(clips)))]
            start_s = other.start_s
            if kind == "image":  # not the last tenth: a frame's time is rounded, and must stay inside
                start_s += round(float(random.random()) * 0.9 * (other.end_s - other.start_s), 6)
            sounding = kind != "image" and other.has_audio
            yield Pick(kind, other.path, other.sound_path, other.source_id, start_s, other.end_s, sounding)


def read(pick: Pick, shape: ClipShape) -> Reference:
    """The media of a reference at the rates of `shape`, and as long as it at most.

    Raises:
        Unreadable: its file does not decode.
    """
    from data.media import read_clip, read_excerpt
    from data.remote import local

    path, sound_path = local(pick.path), None if pick.sound_path is None else local(pick.sound_path)
    length_s = min(pick.end_s - pick.start_s, float(shape.duration_s))
    if pick.kind == "audio":
        return Reference("audio", None, read_excerpt(path, pick.start_s, length_s, shape.sample_rate_hz, sound_path))
    num_frames = 1 if pick.kind == "image" else max(1, int(length_s * shape.frame_rate + 0.5))
    shown = shape.model_copy(update={"num_frames": num_frames})
    frames, waveform = read_clip(path, pick.start_s, pick.end_s if pick.kind == "video" else None, shown, sound_path)
    return Reference(pick.kind, frames, waveform if pick.kind == "video" and pick.has_audio else None)
