"""What `encode` has to make: entries, the fingerprint of each of their parts, and the shards they lie in."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from data.canvases import Fit, fits, impossible
from data.files import iter_records, sha256
from data.latents import fingerprint_of
from data.media_open import Unreadable
from data.records import Clip, Reject, Source
from data.references import Pick, drawn, given
from tasks.encoding import shared_by, unreadable
from tasks.packing import Job

if TYPE_CHECKING:
    from models.families import Encoders
    from tasks.encode import Config

CODE_VERSION = 3
"""Raise when the same inputs would encode to other bytes, so that old latents are refused."""


class Lineage(NamedTuple):
    """What decides the latents beside the clips themselves."""

    weights: dict[str, dict[str, str]]
    """SHA-256 of the model's folders that decide each part of the store."""
    record: dict[str, Any]
    """What the store says of itself."""
    shared: str
    """Key of the texts that all clips share; empty where there is none."""


def lineage_of(config: Config, encoders: Encoders) -> Lineage:
    """Hash the weights that encode, and write down every setting that decides a byte."""
    hashed = functools.cache(sha256)
    weights = {part: {name: hashed(config.base / name) for name in names} for part, names in encoders.parts.items()}
    named = {"canvases", "modes", "uncaptioned", "references", "posterior", "dtype"}
    named |= {"keyframes"} if "kf2va" in config.modes else set()  # elsewhere it decides nothing
    settings = config.model_dump(mode="json", include=named)
    rates = {"frame_rate": encoders.frame_rate, "sample_rate_hz": encoders.sample_rate_hz, "resampler": "soxr HQ"}
    record = {"family": encoders.name, "encoders": weights, **settings, **rates, "code_version": CODE_VERSION}
    names = shared_by(config.settings, encoders)
    shared = fingerprint_of(["shared", CODE_VERSION, weights["text"], config.dtype, names])[:32] if names else ""
    return Lineage(weights, record, shared)


def jobs_of(
    clips: Sequence[tuple[str, Clip]], config: Config, encoders: Encoders, lineage: Lineage
) -> tuple[list[Job], list[Reject]]:
    """Entries of all clips in the order that shards are filled, and the clips that no canvas takes."""
    jobs: list[Job] = []
    rejects: list[Reject] = []
    wanted = "ref2va" in config.modes
    files = reference_files(config.accepted) if wanted else {}
    siblings = by_source([clip for _, clip in clips if impossible(clip) is None]) if wanted else {}
    for clip in sorted((clip for _, clip in clips), key=lambda clip: clip.clip_id):
        found = fits(clip, config.canvases, encoders.shape)
        if isinstance(found, Reject):
            rejects.append(found)
            continue
        picks = picks_of(clip, siblings.get(clip.source_id, []), files, config) if wanted else ()
        try:
            jobs += [job_of(clip, fit, picks, config, encoders, lineage) for fit in found]
        except (Unreadable, OSError) as error:  # the other file that its sound comes from
            rejects.append(unreadable(clip, error))
    return jobs, rejects


def by_source(clips: Sequence[Clip]) -> dict[str, list[Clip]]:
    """Clips that references of each other may be drawn from."""
    found: dict[str, list[Clip]] = {}
    for clip in clips:
        found.setdefault(clip.source_id, []).append(clip)
    return found


def reference_files(accepted: Path) -> dict[str, Source]:
    """Accepted references by path."""
    return {source.path: source for source in iter_records(accepted, Source) if source.use == "reference"}


def picks_of(
    clip: Clip, siblings: Sequence[Clip], files: Mapping[str, Source], config: Config
) -> tuple[tuple[Pick, ...], ...]:
    """Sets of references of a clip: the user's own, else drawn ones; sets that came out equal are one."""
    if clip.references:
        own = given(clip, files)
        return (own,) if own else ()
    sets = [drawn(clip, siblings, config.references, number) for number in range(config.references.num_sets)]
    return tuple(dict.fromkeys(picks for picks in sets if picks))


def job_of(
    clip: Clip, fit: Fit, picks: tuple[tuple[Pick, ...], ...], config: Config, encoders: Encoders, lineage: Lineage
) -> Job:
    """An entry with its keys. No key knows a path: a file that was moved or renamed is the same."""
    shape, weights = fit.shape, lineage.weights
    # The clip is part of every key, or two clips that say the same would share a file that either may put away.
    how = [CODE_VERSION, encoders.name, config.dtype, clip.clip_id, config.accelerator.partition(":")[0]]
    span = [clip.start_s, clip.end_s, shape.model_dump()]
    heard = clip.source_id if clip.sound_path is None else content_of(clip.sound_path)
    shown = [[item._replace(path="", sound_path=sounding(item)) for item in items] for items in picks]
    bare = Job("", clip, "", shape, picks, ())
    variants = [str(variant) for variant in bare.variants(config.settings)]
    sees = [clip.source_id, span, shown] if encoders.text_sees else []
    parts = [
        [
            weights["picture"],
            clip.source_id,
            span,
            config.posterior,
            config.batch_size,
            bare.keyframes(config.settings),
        ],
        [weights["sound"], heard, span, config.posterior, config.batch_size],
        [weights["text"], clip.caption, sorted({encoders.text_of(name) for name in variants}), sees],
        [weights["references"], shown, shape.model_dump()] if picks else None,
    ]
    keys = tuple(fingerprint_of([*how, part])[:32] if part is not None else "" for part in parts)
    return Job(f"{clip.clip_id}@{fit.canvas}", clip, fit.canvas, shape, picks, keys)


def sounding(pick: Pick) -> str | None:
    """Content of the other file that a reference's sound comes from."""
    return None if pick.sound_path is None else content_of(pick.sound_path)


@functools.cache
def content_of(path: str) -> str:
    """Hash of a file's bytes, wherever it lies."""
    from data.remote import local

    return sha256(local(path))


def shards(jobs: Sequence[Job], size: int) -> Iterator[tuple[Job, ...]]:
    """Entries in groups of about `size` clips.

    A group ends where the hash of a clip says so, so that a clip that is added or taken away changes the shards around
    it and no others.
    """
    group: list[Job] = []
    clips: set[str] = set()
    least = max(1, size // 2)
    for job in jobs:
        if job.clip.clip_id not in clips:
            ends = int(hashlib.sha256(job.clip.clip_id.encode()).hexdigest()[:8], 16) % least == 0
            if group and ((len(clips) >= least and ends) or len(clips) >= 2 * size):
                yield tuple(group)
                group, clips = [], set()
            clips.add(job.clip.clip_id)
        group.append(job)
    if group:
        yield tuple(group)
