"""What one process does for `encode`: a shard, from what is kept of earlier runs and what is missing.

Every part of every entry is a file of its own until its shard is written, so a kill costs at most one batch.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from data.conditions import Variant, frame_of, keyframes_of
from data.files import remove
from data.latents import PARTS, SHARED
from data.media_open import Unreadable
from data.records import Clip, ClipShape, Reject
from data.references import read
from tasks.packing import Job, Settings, done_path, keep, lacking_of, members_of, pack

if TYPE_CHECKING:
    from data.clips import Media
    from data.latents import Arrays
    from models.families import Encoders, Reference


class Task(NamedTuple):
    """Entries of one shard; without `pack`, only what they lack is made."""

    settings: Settings
    jobs: tuple[Job, ...]
    kept: dict[str, tuple[str, str]]
    """Parts that finished shards hold: file and entry, by key."""
    pack: bool = True
    shared: str = ""
    """Key of the texts that all clips share, where this task is to make them."""


class Outcome(NamedTuple):
    """What became of a task."""

    rejects: tuple[Reject, ...]
    seconds: tuple[float, ...] = ()
    """From one finished batch to the next, s; the first has the loading of the model in it."""


class Loaded(NamedTuple):
    """The media of one clip: one item a job of it."""

    jobs: tuple[Job, ...]
    media: tuple[Media, ...]
    references: tuple[tuple[tuple[Reference, ...], ...], ...]


def encode_shard(task: Task) -> Outcome:
    """Encode what a shard lacks, and write it."""
    work = task.settings.work
    lacking = lacking_of(task.jobs, task.kept, work)
    rejects: list[Reject] = []
    seconds: list[float] = []
    if lacking:
        rejects, seconds = encode_lacking(task, lacking, loaded(task.settings.base, task.settings.accelerator))
    if task.shared:
        encode_shared(task, loaded(task.settings.base, task.settings.accelerator))
    if task.pack:
        without = frozenset(reject.item for reject in rejects)
        for part in PARTS:
            pack(work, part, members_of(task.jobs, part, without), task.kept)
        for job in task.jobs:
            for part, key in zip(PARTS, job.keys, strict=True):
                remove(done_path(work, part, key))
    return Outcome(tuple(rejects), tuple(seconds))


def encode_shared(task: Task, encoders: Encoders) -> None:
    """Write the texts that all clips share as a shard of their own."""
    settings = task.settings
    arrays: Arrays = {}
    for name in shared_by(settings, encoders):
        variant = Variant("t2va", captioned=False)
        for array_name, array in encoders.encode_text(variant.mode, None).items():
            arrays[f"text/{name.removeprefix(f'{SHARED}/')}/{array_name}"] = array
    keep(settings, "text", task.shared, arrays)
    pack(settings.work, "text", [(SHARED, task.shared)], {})
    remove(done_path(settings.work, "text", task.shared))


def shared_by(settings: Settings, encoders: Encoders) -> list[str]:
    """Names of the texts that all clips share."""
    if not settings.uncaptioned:
        return []
    names = {encoders.text_of(str(Variant(mode, captioned=False))) for mode in settings.modes}
    return sorted(name for name in names if name.startswith(f"{SHARED}/"))


def encode_lacking(task: Task, lacking: set[tuple[str, str]], encoders: Encoders) -> tuple[list[Reject], list[float]]:
    """Make the parts that are lacking, each in a file of its own; the next clips are read meanwhile."""
    settings, rejects, seconds = task.settings, list[Reject](), list[float]()
    began = time.perf_counter()
    batches = Batches(
        task.jobs, settings.batch_size, {entry for entry, part in lacking if part in ("picture", "sound")}
    )
    needed = {"picture", "sound", "references", *(("text",) if encoders.text_sees else ())}
    reading: list[tuple[Job, ...]] = []
    for _, group in itertools.groupby(task.jobs, key=lambda job: job.clip.clip_id):
        jobs = tuple(group)
        if any(batches.wants(job) or (job.entry, part) in lacking for job in jobs for part in needed):
            reading.append(jobs)
        else:
            for job in jobs:
                keep_conditions(settings, encoders, job, None, (), lacking)
    for jobs, answer in ahead(reading, load, settings.num_readers):
        if isinstance(answer, Unreadable):
            rejects.append(unreadable(jobs[0].clip, answer))
            batches.leave_out(jobs)
        elif fault := conditions_fault(settings, encoders, answer, lacking):
            rejects.append(fault)
            batches.leave_out(jobs)
        else:
            batches.take(answer)
        for group in batches.full():
            keep_latents(settings, encoders, group, lacking)
            seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
    return rejects, seconds


def load(jobs: tuple[Job, ...]) -> Loaded:
    """The media of one clip, decoded once for all its canvases, with its references.

    Raises:
        Unreadable: a file does not decode.
    """
    from data.clips import read_all

    clip = jobs[0].clip
    media = tuple(read_all(clip, [job.shape for job in jobs]))
    references = tuple(tuple(tuple(read(pick, job.shape) for pick in picks) for picks in job.picks) for job in jobs)
    return Loaded(jobs, media, references)


def ahead(
    items: Sequence[tuple[Job, ...]], function: Callable[[tuple[Job, ...]], Loaded], num_threads: int
) -> Iterator[tuple[tuple[Job, ...], Loaded | Unreadable]]:
    """Results in order, `num_threads` being made while one is used: decoders leave Python's lock alone."""
    with ThreadPoolExecutor(num_threads) as pool:
        waiting: list[tuple[tuple[Job, ...], Future[Loaded]]] = []
        for item in items:
            waiting.append((item, pool.submit(function, item)))
            if len(waiting) > num_threads:
                yield settled(*waiting.pop(0))
        for item, future in waiting:
            yield settled(item, future)


def settled(jobs: tuple[Job, ...], future: Future[Loaded]) -> tuple[tuple[Job, ...], Loaded | Unreadable]:
    """What came of reading a clip."""
    try:
        return jobs, future.result()
    except Unreadable as error:
        return jobs, error


def unreadable(clip: Clip, error: Exception) -> Reject:
    """A clip that was accepted, and whose file cannot be read any more."""
    return Reject(
        item=clip.clip_id, path=clip.path, verb="encode", rule="encode.readable", measured=str(error),
        limit="decodes as when it was accepted",
    )  # fmt: skip


class Batches:
    """Jobs of equal shape in batches that depend on the shard alone, so that a run that was killed makes the same.

    Args:
        jobs: All of the shard.
        size: Of a batch.
        wanted: Entries that lack something; the rest of their batches is made with them.
    """

    def __init__(self, jobs: Sequence[Job], size: int, wanted: set[str]) -> None:
        order: dict[ClipShape, list[Job]] = {}
        for job in jobs:
            order.setdefault(job.shape, []).append(job)
        groups = [same[at : at + size] for same in order.values() for at in range(0, len(same), size)]
        self._waiting = {
            job.entry: group for group in groups if any(job.entry in wanted for job in group) for job in group
        }
        self._media: dict[str, Media] = {}

    def wants(self, job: Job) -> bool:
        """Whether a job's media are needed for a batch."""
        return job.entry in self._waiting

    def take(self, loaded: Loaded) -> None:
        """Keep the media that a batch waits for."""
        for job, media in zip(loaded.jobs, loaded.media, strict=True):
            if job.entry in self._waiting:
                self._media[job.entry] = media

    def leave_out(self, jobs: Sequence[Job]) -> None:
        """Do not wait for a clip that cannot be read."""
        for job in jobs:
            group = self._waiting.pop(job.entry, None)
            if group is not None:
                group.remove(job)

    def full(self) -> Iterator[list[tuple[Job, Media]]]:
        """Batches that nothing is missing from any more; each comes once."""
        for group in {id(group): group for group in self._waiting.values()}.values():
            if group and all(job.entry in self._media for job in group):
                for job in group:
                    del self._waiting[job.entry]
                yield [(job, self._media.pop(job.entry)) for job in group]


def keep_latents(
    settings: Settings, encoders: Encoders, group: Sequence[tuple[Job, Media]], lacking: set[tuple[str, str]]
) -> None:
    """Encode picture and sound of one batch where they are lacking, and put them away."""
    import numpy as np

    shape, lacks = group[0][0].shape, {part for job, _ in group for part in PARTS if (job.entry, part) in lacking}
    if "picture" in lacks:
        video = encoders.encode_picture(np.stack([media[0] for _, media in group]), settings.posterior)
        for place, (job, media) in enumerate(group):
            keyframes = {
                f"keyframe/{name}": encoders.encode_keyframe(media[0][frame_of(name)])
                for name in job.keyframes(settings)
            }
            keep(settings, "picture", job.keys[0], {"video": video[place], **keyframes})
    if "sound" in lacks:
        audio = encoders.encode_sound(np.stack([media[1] for _, media in group]), shape, settings.posterior)
        for place, (job, _) in enumerate(group):
            keep(settings, "sound", job.keys[1], {"audio": audio[place]})


def conditions_fault(
    settings: Settings, encoders: Encoders, loaded: Loaded, lacking: set[tuple[str, str]]
) -> Reject | None:
    """Put text and references of a clip away; what is wrong with its references, where the family refuses them."""
    for job, media, references in zip(*loaded, strict=True):
        try:
            keep_conditions(settings, encoders, job, media, references, lacking)
        except ValueError as error:
            if not job.clip.references:
                raise  # drawn ones are our own choice: a setting is wrong
            return Reject(
                item=job.clip.clip_id, path=job.clip.path, verb="encode", rule="encode.references",
                measured=str(error), limit=f"what {encoders.name} takes",
            )  # fmt: skip
    return None


def keep_conditions(
    settings: Settings,
    encoders: Encoders,
    job: Job,
    media: Media | None,
    references: Sequence[Sequence[Reference]],
    lacking: set[tuple[str, str]],
) -> None:
    """Encode text and references of one entry where they are lacking, and put them away."""
    if (job.entry, "text") in lacking:
        arrays: Arrays = {}
        for said in said_by(settings, encoders, job):
            for name, array in text(encoders, Variant.parse(said), job, settings, media, references).items():
                arrays[f"text/{said}/{name}"] = array
        keep(settings, "text", job.keys[2], arrays)
    if (job.entry, "references") in lacking:
        latents = [encoders.encode_references(items, job.shape) for items in references]
        named = {
            f"references/{number}/{name}": array
            for number, items in enumerate(latents)
            for name, array in items.items()
        }
        keep(settings, "references", job.keys[3], named)


def said_by(settings: Settings, encoders: Encoders, job: Job) -> list[str]:
    """Names of the texts that an entry's variants need and no other entry shares."""
    names = {encoders.text_of(str(variant)) for variant in job.variants(settings)}
    return sorted(name for name in names if not name.startswith(f"{SHARED}/"))


def text(
    encoders: Encoders,
    variant: Variant,
    job: Job,
    settings: Settings,
    media: Media | None,
    references: Sequence[Sequence[Reference]],
) -> Arrays:
    """What the text side makes of an entry in one variant."""
    names = keyframes_of(variant.mode, settings.keyframes, job.shape.num_frames)
    keyframes = () if media is None else [media[0][frame_of(name)] for name in names]
    shown = references[variant.references] if variant.mode == "ref2va" and references else ()
    return encoders.encode_text(
        variant.mode, job.clip.caption if variant.captioned else None, keyframes, shown, job.shape
    )


@functools.cache
def loaded(base: Path, device: str) -> Encoders:
    """The encoders, once a process."""
    from models.accelerators import device_of
    from models.families import load_encoders
    from models.threads import use_one_thread

    use_one_thread()
    return load_encoders(base, device=str(device_of(device, "encode.accelerator")))
