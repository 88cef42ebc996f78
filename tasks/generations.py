"""What is generated for a report: which clips, under which conditions, kept so that a killed run goes on.

Legend: F frames, H height, W width, C 3 colours or 2 channels, T samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from data.files import whole
from data.records import Clip

if TYPE_CHECKING:
    from models.generation import Generator

Frames = NDArray[np.uint8]
Waveform = NDArray[np.float32]

BASE, TUNED, SWAPPED = "base/fl2va", "tuned/fl2va", "tuned/fl2va_swapped"
BASE_TEXT, TUNED_TEXT = "base/t2va", "tuned/t2va"
CROSSFADE, RECONSTRUCTION = "crossfade", "reconstruction"
REFERENCE = "reference"
SUBSETS = (BASE, TUNED, SWAPPED, BASE_TEXT, TUNED_TEXT, CROSSFADE, RECONSTRUCTION)
WITH_PICTURE = (BASE, TUNED, SWAPPED, CROSSFADE, RECONSTRUCTION)
"""Subsets whose picture has a reference; a text alone does not say where things are."""
WITH_SOUND = (BASE, TUNED, SWAPPED, BASE_TEXT, TUNED_TEXT, RECONSTRUCTION)


class Media(NamedTuple):
    """Picture and sound of one clip; no sound where the subset has none."""

    frames_FHWC: Frames
    waveform_CT: Waveform | None


def choose_clips(clips: Sequence[Clip], shares: Mapping[str, float], max_clips: int, seed: int) -> list[Clip]:
    """At most `max_clips` clips, by group in the given shares, from as many sources as possible.

    A group without a share gets the smallest one; what a small group cannot fill goes to the others. The answer is
    in the order of clip ids.
    """
    queues = {name: spread(members, seed) for name, members in by_group(clips).items()}
    smallest = min(shares.values(), default=1.0)
    taken = dict.fromkeys(queues, 0)
    chosen: list[Clip] = []
    while len(chosen) < max_clips and any(queues.values()):
        # whichever group is furthest behind its share goes next
        name = min(
            (name for name in queues if queues[name]), key=lambda name: (taken[name] + 1) / shares.get(name, smallest)
        )
        chosen.append(queues[name].pop(0))
        taken[name] += 1
    return sorted(chosen, key=lambda clip: clip.clip_id)


def by_group(clips: Sequence[Clip]) -> dict[str, list[Clip]]:
    """Clips of every group, groups in order of name."""
    ordered = sorted(clips, key=lambda clip: (clip.group, clip.clip_id))
    return {name: list(members) for name, members in groupby(ordered, key=lambda clip: clip.group)}


def spread(clips: Sequence[Clip], seed: int) -> list[Clip]:
    """Clips in an order that visits every source once before any twice; which comes first is drawn by hash."""

    def draw(text: str) -> str:
        return hashlib.sha256(f"{seed} {text}".encode()).hexdigest()

    visits: dict[str, int] = {}
    ranked: list[tuple[int, str, Clip]] = []
    for clip in sorted(clips, key=lambda clip: draw(clip.clip_id)):
        visit = visits[clip.source_id] = visits.get(clip.source_id, -1) + 1
        ranked.append((visit, draw(clip.source_id), clip))
    return [clip for _, _, clip in sorted(ranked, key=lambda item: item[:2])]


def partner_of(clip: Clip, clips: Sequence[Clip]) -> Clip | None:
    """Whose keyframes a clip gets in the swapped subset: the next of its group from another source."""
    others = [each for each in by_group(clips).get(clip.group, []) if each.source_id != clip.source_id]
    later = [each for each in others if each.clip_id > clip.clip_id]
    return (later or others or [None])[0]


def noise_seed(seed: int, clip_id: str) -> int:
    """The clip's own noise, the same for every model and condition, so that differences are paired."""
    return int.from_bytes(hashlib.sha256(f"{seed} {clip_id}".encode()).digest()[:4])


def crossfade(first_HWC: Frames, last_HWC: Frames, num_frames: int) -> Frames:
    """The two keyframes blended linearly: what a model that learned no motion should be able to do."""
    weight_F111 = np.linspace(0, 1, num_frames)[:, None, None, None]
    blend = (1 - weight_F111) * first_HWC + weight_F111 * last_HWC
    return np.rint(blend).astype(np.uint8)


class Cache:
    """Generations on disk, one file each: whole or absent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, subset: str, clip_id: str) -> Path:
        """Where one generation lies."""
        return self.folder / subset.replace("/", "_") / f"{clip_id}.safetensors"

    def has(self, subset: str, clip_id: str) -> bool:
        """Whether it is there."""
        return self.path(subset, clip_id).is_file()

    def read(self, subset: str, clip_id: str) -> Media | None:
        """It, or None where it could not be made."""
        from safetensors.numpy import load_file  # pyright: ignore[reportUnknownVariableType]

        if not self.has(subset, clip_id):
            return None
        arrays = load_file(self.path(subset, clip_id))
        return Media(cast("Frames", arrays["frames"]), cast("Waveform | None", arrays.get("waveform")))

    def write(self, subset: str, clip_id: str, media: Media) -> None:
        """Keep it."""
        from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

        arrays: dict[str, NDArray[Any]] = {"frames": np.ascontiguousarray(media.frames_FHWC)}
        if media.waveform_CT is not None:
            arrays["waveform"] = np.ascontiguousarray(media.waveform_CT)
        with whole(self.path(subset, clip_id)) as temporary:
            save_file(arrays, temporary)


class Job(NamedTuple):
    """One generation to make."""

    subset: str
    clip: Clip
    condition: Clip | None
    """Whose keyframes it gets; None is the text alone."""


def tuned_jobs(clips: Sequence[Clip], partners: Mapping[str, Clip]) -> list[Job]:
    """What the fine-tuned model is asked for."""
    own = [Job(TUNED, clip, clip) for clip in clips]
    swapped = [Job(SWAPPED, clip, partners[clip.clip_id]) for clip in clips if clip.clip_id in partners]
    return [*own, *swapped, *(Job(TUNED_TEXT, clip, None) for clip in clips)]


def base_jobs(clips: Sequence[Clip]) -> list[Job]:
    """What the base model is asked for: before fine-tuning, and the autoencoders' ceiling."""
    own = [Job(subset, clip, clip) for subset in (BASE, RECONSTRUCTION) for clip in clips]
    return [*own, *(Job(BASE_TEXT, clip, None) for clip in clips)]


class Sampler(NamedTuple):
    """How generations are drawn."""

    num_inference_steps: int
    seed: int

    def make(self, generator: Generator, job: Job, cache: Cache) -> Media | None:
        """The generation, or None where the clip it is conditioned on could not be read."""
        reference = cache.read(REFERENCE, job.condition.clip_id) if job.condition else None
        if job.condition and reference is None:
            return None
        if job.subset == RECONSTRUCTION and reference and reference.waveform_CT is not None:
            made = generator.reconstruct(reference.frames_FHWC, reference.waveform_CT)
            return Media(made.frames_FHWC, made.waveform_CT)
        first, last = ([reference.frames_FHWC[0]], [reference.frames_FHWC[-1]]) if reference else (None, None)
        made = generator.generate(
            [job.clip.caption],
            first=first,
            last=last,
            seed=noise_seed(self.seed, job.clip.clip_id),
            num_inference_steps=self.num_inference_steps,
        )[0]
        return Media(made.frames_FHWC, made.waveform_CT)
