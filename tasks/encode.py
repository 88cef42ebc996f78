"""Encode every clip once into latents and projected text, for all conditioning modes.

Only what is missing is encoded: a part of a clip is made again when its content, a setting, the weights or the code
that decide it have changed, and never because a file was moved: an edited caption costs its text alone.

example: soundstage encode 'modes=[t2va,fl2va]' accelerator=cuda num_workers=1 num_readers=8 dtype=bfloat16
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from data.conditions import Mode
from data.files import Holds, alone, link_or_copy, read_records, remove, whole, write_records
from data.records import Canvas, Clip, DataRefused, Frozen, Reject
from data.references import References

if TYPE_CHECKING:
    from data.latent_index import LatentRow
    from models.families import Encoders
    from tasks.packing import Settings


class Config(Frozen):
    """Settings of the encode verb."""

    splits: Path
    """Folder of `train`, `val` and `test` tables that `split` wrote."""
    accepted: Path
    """Table of accepted files, for the references that clips name."""
    base: Path
    """Model whose autoencoders and text side encode, a diffusers folder of MiniMax-H3 or LTX-2."""
    latents: Annotated[Path, Holds(("index.arrow", "fingerprint.json"))]
    """Where the latent store goes."""
    rejects: Path
    """Where the clips that cannot be encoded go, with reasons."""
    expectations: Path
    """JSON of what every expectation on the latents found."""
    docs: Annotated[Path, Holds(("index.html",), below="latents")]
    """Folder of Great Expectations' pages; the latents' are in `latents/`."""
    canvases: dict[str, Canvas]
    """Sizes that every clip is encoded at, by a name that stages choose them by; frame and sample rate are the family's."""
    modes: tuple[Mode, ...] = ("t2va", "fl2va_first", "fl2va")
    """Conditioning modes to encode for; stages draw from these."""
    keyframes: tuple[float, ...] = (0.5,)
    """Where the frames lie that `kf2va` gives, as fractions of the clip: 0 is its first frame, 1 its last."""
    uncaptioned: bool = False
    """Encode every mode without its caption too, for stages with `caption_dropout`."""
    references: References = References()
    """What is drawn for `ref2va` where the user gave no references."""
    posterior: Literal["mode", "sample"] = "mode"
    """Of the autoencoders: the most likely latents, or a draw by a fixed seed."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision that latents and text are stored in; bfloat16 halves the store."""
    num_workers: int = Field(default=2, gt=0)
    """Processes that encode, each with the encoders in its own memory; the result does not depend on it. 1 a device."""
    num_readers: int = Field(default=2, gt=0)
    """Threads of each process that decode the next clips meanwhile; as many clips lie decoded in memory, and one more."""
    batch_size: int = Field(default=1, gt=0)
    """Clips of equal shape that the autoencoders take at once, which is also what a killed process does again at most.
    Above 1, what a clip is encoded beside shows in the last bits of its latents (1e-6, measured)."""
    max_clip_s: float = Field(default=600, gt=0)
    """Longest time for one clip, s."""
    max_hours: float | None = Field(default=None, gt=0)
    """Refuse to go on where the whole would take longer, h; None is no limit."""
    clips_per_shard: int = Field(default=32, gt=0)
    """Clips of a safetensors shard, about; aim at tens to hundreds of MB."""
    accelerator: str = "cpu"
    """`auto` (the first there is of CUDA, NPU, CPU), `cpu`, `cuda`, `npu`, or one of several: `cuda:1`."""
    work: Path = Path("data/store/work/encode")
    """Parts and shards of this run and the last, by content; they share their bytes with the store where links can."""

    @model_validator(mode="after")
    def _has_something_to_do(self) -> Config:
        if not self.canvases or not self.modes:
            raise ValueError("canvases and modes: name at least one of each")
        if odd := [name for name in self.canvases if not name.replace("_", "").replace("-", "").isalnum()]:
            raise ValueError(f"canvases: {odd[0]!r} is no name; use letters, digits, - and _")
        if outside := [place for place in self.keyframes if not 0 <= place <= 1]:
            raise ValueError(f"keyframes: {outside[0]:g} is outside the clip; limits 0 and 1, its first and last frame")
        if "kf2va" in self.modes and not any(self.keyframes):
            raise ValueError("keyframes: mode kf2va needs a place behind 0; the first frame alone is mode fl2va_first")
        return self

    @property
    def settings(self) -> Settings:
        """What the processes that encode need to know."""
        from tasks.packing import Settings

        names = Settings.model_fields
        return Settings.model_validate({name: value for name, value in self if name in names})


def run(config: Config) -> Path:
    """Write the latent store; returns its folder.

    Raises:
        ValueError: a canvas is below the model's grid, or it has no such mode; no such name of an accelerator; a clip is there twice; a
            file lies where a folder is to be.
        RuntimeError: no model in `base`, no such device, no split, too little disk or time, or another run is at work in `work`.
        DataRefused: no clip can be encoded, or a critical expectation failed; only the evidence is written then.
    """
    from models.accelerators import device_of

    # The processes that encode would say much later that it is not there.
    config = config.model_copy(update={"accelerator": str(device_of(config.accelerator, "encode.accelerator"))})
    with alone(config.work, "encode.work"):
        return encoded(config)


def encoded(config: Config) -> Path:
    """`run`, in a working folder of its own."""
    from data.latents import PARTS, SHARED, shard_name, write_index
    from models.families import load_encoders
    from tasks import indexing
    from tasks.jobs import jobs_of, lineage_of, shards
    from tasks.packing import members_of, shard_path
    from tasks.supply import encode_all

    clips = read_splits(config.splits)
    encoders = load_encoders(config.base)  # for its grids alone: weights are loaded by the processes that encode
    check_modes(config, encoders)
    lineage = lineage_of(config, encoders)
    jobs, rejects = jobs_of(clips, config, encoders, lineage)
    if not jobs:
        refuse(config, rejects, len(clips))
    parted = list(shards(jobs, config.clips_per_shard))
    unreadable = encode_all(parted, config, encoders, lineage)
    rejects += unreadable
    lost = frozenset(reject.item for reject in unreadable)
    files = {
        shard_name(part, f"{number:05d}"): shard_path(config.work, part, members)
        for number, jobs in enumerate(parted)
        for part in PARTS
        if (members := members_of(jobs, part, lost))
    }
    if lineage.shared:
        files[shard_name("text", SHARED)] = shard_path(config.work, "text", [(SHARED, lineage.shared)])
    splits = {clip.clip_id: split for split, clip in clips}
    rows, facts = indexing.index_rows(parted, lost, splits, config.settings, encoders, lineage.shared)
    refused = {reject.item for reject in rejects}
    indexing.judge(config, rows, [clip for _, clip in clips if clip.clip_id not in refused], facts)
    with whole(config.latents) as temporary:
        temporary.mkdir()
        for name, path in files.items():
            link_or_copy(path, temporary / name)  # a kill here must not lose the finished shard
        write_index(temporary, rows, {**lineage.record, "text_of": indexing.text_of(rows, encoders)})
    write_records(config.rejects, rejects, Reject)
    tidy(config.work, {path.stem for path in files.values()})
    bare = sorted(
        {job.clip.clip_id for group in parted for job in group if job.lacks_references(config.settings)} - lost
    )
    sys.stderr.write(said(config, rows, rejects, bare))
    return config.latents


def read_splits(folder: Path) -> list[tuple[str, Clip]]:
    """Every clip with its split.

    Raises:
        ValueError: a clip is there twice, or its name cannot be one of a file.
    """
    clips = [
        (name, clip) for name in ("train", "val", "test") for clip in read_records(folder / f"{name}.parquet", Clip)
    ]
    seen: dict[str, str] = {}
    for split, clip in clips:
        if clip.clip_id in seen:
            raise ValueError(
                f"{folder}: clip {clip.clip_id} is in {seen[clip.clip_id]} and in {split}; it may be in one split, once:"
                " run `soundstage split` again"
            )
        if not clip.clip_id or "/" in clip.clip_id:
            raise ValueError(f"{folder}/{split}.parquet: clip_id {clip.clip_id!r} is empty or has a slash in it")
        seen[clip.clip_id] = split
    return clips


def check_modes(config: Config, encoders: Encoders) -> None:
    """Raise ValueError where a mode is asked for that the family does not have."""
    if missing := [mode for mode in config.modes if mode not in encoders.modes]:
        raise ValueError(
            f"encode.modes: {encoders.name} has no {', '.join(missing)}; it has {', '.join(encoders.modes)}"
        )


def refuse(config: Config, rejects: Sequence[Reject], num_clips: int) -> None:
    """Leave the evidence, and stop.

    Raises:
        DataRefused: always; the message says what most clips lack.
    """
    write_records(config.rejects, rejects, Reject)
    if not rejects:
        raise DataRefused(f"{config.splits} holds no clip; run `soundstage split` first")
    rule, count = Counter(reject.rule for reject in rejects).most_common(1)[0]
    first = next(reject for reject in rejects if reject.rule == rule)
    raise DataRefused(
        f"none of {num_clips} clips can be encoded, {count} by {rule}, first {first.item}: {first.measured}; limit"
        f" {first.limit}. All are in {config.rejects}"
    )


def tidy(work: Path, used: set[str]) -> None:
    """Keep what the store is made of, for the next run to take up, and nothing else of ours."""
    from tasks.packing import ours

    for name in ("done", "ticks"):
        remove(work / name)
    for _, path in (*ours(work / "shards", "safetensors"), *ours(work / "shards", "json")):
        if path.stem not in used:
            remove(path)


def said(config: Config, rows: Sequence[LatentRow], rejects: Sequence[Reject], bare: Sequence[str]) -> str:
    """The last line: what came of it; `bare` are clips whose own references cannot be used."""
    num_bytes = sum(path.stat().st_size for path in config.latents.iterdir())
    num_clips = len({row.clip_id for row in rows})
    left = f", {len(rejects)} cannot be encoded ({config.rejects})" if rejects else ""
    if bare:
        left += f", {len(bare)} without ref2va since a reference of theirs was not accepted, first {bare[0]}"
        left += f" ({config.expectations})"
    sizes = Counter(f"{row.num_frames} frames {row.width}x{row.height}" for row in rows)
    listed = ", ".join(f"{size} ({count})" for size, count in sorted(sizes.items()))
    return f"encode: {num_clips} clips, {num_bytes / 1e9:.3g} GB in {config.latents}{left}: {listed}\n"
