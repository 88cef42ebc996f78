"""The index of a latent store, from what its shards were found to hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from data.conditions import Variant, keyframes_of
from data.latent_index import LatentRow
from data.latents import PARTS, SHARED
from data.records import Clip
from tasks.packing import Job, Settings, members_of, read_facts, shard_path

if TYPE_CHECKING:
    from data.expectations import LatentFacts
    from models.families import Encoders
    from tasks.encode import Config

Sizes = dict[str, list[int]]
"""Sizes of arrays by their names in the store."""
Found = dict[str, dict[str, Any]]
"""What was found of each part of one entry."""


def index_rows(
    parted: Sequence[Sequence[Job]],
    lost: frozenset[str],
    splits: Mapping[str, str],
    settings: Settings,
    encoders: Encoders,
    shared: str,
) -> tuple[list[LatentRow], dict[str, LatentFacts]]:
    """Rows of everything that was encoded, and what each entry's arrays were found to hold.

    Args:
        parted: Entries of every shard.
        lost: Clips that could not be read.
        splits: Of every clip.
        settings: How it was encoded.
        encoders: What encoded it.
        shared: Key of the texts that all clips share.
    """
    common: Sizes = {}
    if shared:
        common = found_in(settings, "text", [(SHARED, shared)])[SHARED]["sizes"]
    rows: list[LatentRow] = []
    facts: dict[str, LatentFacts] = {}
    for number, jobs in enumerate(parted):
        parts = {part: found_in(settings, part, members_of(jobs, part, lost)) for part in PARTS}
        for job in (job for job in jobs if job.clip.clip_id not in lost):
            own = {part: found[job.entry] for part, found in parts.items() if job.entry in found}
            sizes: Sizes = {name: size for fact in own.values() for name, size in fact["sizes"].items()}
            rows.append(row_of(job, f"{number:05d}", splits[job.clip.clip_id], settings, encoders, sizes, common))
            facts[job.entry] = facts_of(job, own, sizes, settings, encoders)
    return rows, facts


def found_in(settings: Settings, part: str, members: Sequence[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """What a shard was found to hold when it had been written, by entry."""
    if not members:
        return {}
    return read_facts(shard_path(settings.work, part, members))


def row_of(
    job: Job, shard: str, split: str, settings: Settings, encoders: Encoders, sizes: Sizes, common: Sizes
) -> LatentRow:
    """One row of the index."""
    variants = job.variants(settings)
    laid = [
        encoders.layout(job.shape, item.mode, given_to(job, item, settings, sizes, common, encoders))
        for item in variants
    ]
    clip = job.clip
    return LatentRow(
        entry=job.entry, clip_id=clip.clip_id, source_id=clip.source_id, split=split, group=clip.group,
        canvas=job.canvas, has_audio=clip.has_audio, **job.shape.model_dump(), variants=tuple(map(str, variants)),
        layouts=tuple(layout for layout, _ in laid), num_tokens=tuple(num_tokens for _, num_tokens in laid),
        shard=shard, keys=job.keys,
    )  # fmt: skip


def given_to(job: Job, variant: Variant, settings: Settings, sizes: Sizes, common: Sizes, encoders: Encoders) -> Sizes:
    """Sizes of what the model is given of an entry in a variant, by the names of `Condition.arrays`."""
    said = encoders.text_of(str(variant))
    where, below = (common, said.removeprefix(f"{SHARED}/")) if said.startswith(f"{SHARED}/") else (sizes, said)
    result = renamed(where, f"text/{below}/", "text/")
    names = keyframes_of(variant.mode, settings.keyframes, job.shape.num_frames)
    result |= {f"keyframe/{name}": sizes[f"keyframe/{name}"] for name in names}
    if variant.mode == "ref2va":
        result |= renamed(sizes, f"references/{variant.references}/", "references/")
    return result


def renamed(sizes: Sizes, prefix: str, new_prefix: str) -> Sizes:
    """Those whose names begin with a prefix, with another one."""
    return {new_prefix + name.removeprefix(prefix): size for name, size in sizes.items() if name.startswith(prefix)}


def facts_of(job: Job, own: Found, sizes: Sizes, settings: Settings, encoders: Encoders) -> LatentFacts:
    """What expectations ask of one entry."""
    from data.expectations import LatentFacts

    shapes = encoders.latent_shapes(job.shape)
    dtypes = {dtype for fact in own.values() for dtype in fact["dtypes"]}
    return LatentFacts(
        finite=all(fact["finite"] for fact in own.values()),
        as_planned=(tuple(sizes["video"]), tuple(sizes["audio"])) == shapes,
        dtype="/".join(sorted(dtypes)),
        has_audio=job.clip.has_audio and bool(own["sound"]["varies"]),
        referenced=not job.lacks_references(settings),
    )


def text_of(rows: Sequence[LatentRow], encoders: Encoders) -> dict[str, str]:
    """Under which name each variant's text is stored."""
    names = sorted({name for row in rows for name in row.variants})
    return {name: encoders.text_of(name) for name in names}


def judge(config: Config, rows: Sequence[LatentRow], clips: Sequence[Clip], facts: dict[str, LatentFacts]) -> None:
    """Hold the latents against their expectations.

    Raises:
        DataRefused: a critical one failed.
    """
    from data import expectations
    from tasks import judging

    with expectations.latents_frame(rows, clips, facts, config.work / "asked.sqlite") as table:
        suite = expectations.latents_suite((config.dtype,))
        judging.enforce("latents", table, suite, config.expectations, config.docs)
