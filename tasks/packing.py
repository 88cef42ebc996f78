"""Where `encode` puts things until its store is whole: single parts of entries, and the shards made of them.

work/done/PART-KEY.safetensors      one part of one entry, until its shard is written
work/shards/PART-HASH.safetensors   a shard, named by what it holds, and beside it the facts of its arrays, sealed JSON
work/ticks                          a line a finished part: how far all processes are
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from data.conditions import NEED_SOUND, Mode, Variant, keyframes_of
from data.files import remove, write_text
from data.latent_shards import Broken, Shard, opened, write_shard
from data.latents import PARTS, fingerprint_of
from data.records import Clip, ClipShape, Frozen
from data.references import Pick

if TYPE_CHECKING:
    from torch import Tensor

    from data.latents import Arrays

Dtype = Literal["float32", "bfloat16", "float16"]
ALONE = "_"
"""Entry under which the one part of a file in `done` is stored: the file's name is its key."""
OURS = re.compile(rf"({'|'.join(PARTS)})-[0-9a-f]{{32}}\.(safetensors|json)")
"""Names of our files in `work`; what else a user put there is nobody's to delete."""


class Settings(Frozen):
    """What decides how an entry is encoded; every process is given the same."""

    base: Path
    work: Path
    modes: tuple[Mode, ...]
    keyframes: tuple[float, ...]
    uncaptioned: bool
    posterior: Literal["mode", "sample"]
    dtype: Dtype
    accelerator: str
    num_readers: int
    batch_size: int


class Job(NamedTuple):
    """One entry to encode."""

    entry: str
    clip: Clip
    canvas: str
    shape: ClipShape
    picks: tuple[tuple[Pick, ...], ...]
    """Its sets of references."""
    keys: tuple[str, ...]
    """Fingerprint of each part, in the order of `PARTS`; empty where it has none."""

    def lacks_references(self, settings: Settings) -> bool:
        """Whether the user gave it references of which one was not accepted: their order counts, so it has none."""
        return "ref2va" in settings.modes and bool(self.clip.references) and not self.picks

    def keyframes(self, settings: Settings) -> list[str]:
        """Names of its keyframes in all modes."""
        modes = settings.modes
        return sorted(
            {name for mode in modes for name in keyframes_of(mode, settings.keyframes, self.shape.num_frames)}
        )

    def variants(self, settings: Settings) -> list[Variant]:
        """Every way in which it can be presented to the model."""
        modes: list[Mode] = [mode for mode in settings.modes if self.clip.has_audio or mode not in NEED_SOUND]
        said = (True, False) if settings.uncaptioned else (True,)
        return [
            Variant(mode, number, captioned)
            for mode in modes
            for number in range(len(self.picks) if mode == "ref2va" else 1)
            for captioned in said
        ]


def done_path(work: Path, part: str, key: str) -> Path:
    """Where one part of an entry is until its shard is written."""
    return work / "done" / f"{part}-{key}.safetensors"


def shard_path(work: Path, part: str, members: Iterable[tuple[str, str]]) -> Path:
    """Where the shard of some entries' parts is kept: named by what it holds."""
    return work / "shards" / f"{part}-{fingerprint_of(sorted(members))[:32]}.safetensors"


def members_of(jobs: Sequence[Job], part: str, without: frozenset[str] = frozenset()) -> list[tuple[str, str]]:
    """Entries and keys of one part, less those of clips that turned out unreadable."""
    place = PARTS.index(part)
    return [(job.entry, job.keys[place]) for job in jobs if job.keys[place] and job.clip.clip_id not in without]


def lacking_of(jobs: Sequence[Job], kept: Mapping[str, object], work: Path) -> set[tuple[str, str]]:
    """Entries and parts that are in no finished shard and in no file of their own."""
    return {
        (job.entry, part)
        for job in jobs
        for part, key in zip(PARTS, job.keys, strict=True)
        if key and key not in kept and not done_path(work, part, key).is_file()
    }


def ours(folder: Path, kind: str) -> Iterator[tuple[str, Path]]:
    """Part and path of our files in a folder of `work`, in order."""
    for path in sorted(folder.glob(f"*.{kind}")):
        if found := OURS.fullmatch(path.name):
            yield found[1], path


def believed(path: Path, place: Callable[[Shard], Path]) -> Shard | None:
    """A file of an earlier run, every byte of it read; where it is not what was written it is removed, and None.

    What is taken over gets a new checksum, which would then vouch for the damage.

    Args:
        path: Of the file.
        place: Where a file with such keys belongs: one that lies elsewhere is another's.
    """
    try:
        shard = opened(path, str(path))
        if place(shard) == path and not any(map(shard.altered, shard.places)):
            return shard
    except Broken:
        pass
    sys.stderr.write(f"encode: {path} of an earlier run is not whole; what it held is made again\n")
    remove(path)
    return None


def kept_parts(work: Path) -> dict[str, tuple[str, str]]:
    """What the finished shards of earlier runs hold: file and entry, by key; damaged files are removed, in `done` too."""
    for part, path in ours(work / "done", "safetensors"):
        believed(path, lambda shard, part=part: done_path(work, part, shard.keys.get(ALONE, "")))
    found: dict[str, tuple[str, str]] = {}
    for part, path in ours(work / "shards", "safetensors"):
        try:
            read_facts(path)
        except Broken:
            remove(path)  # written, and killed before it was read back
            continue
        shard = believed(path, lambda shard, part=part: shard_path(work, part, shard.keys.items()))
        if shard is not None:
            found |= {key: (str(path), entry) for entry, key in shard.keys.items()}
    return found


def keep(settings: Settings, part: str, key: str, arrays: Mapping[str, Tensor]) -> None:
    """Put one part of an entry away, in the store's precision, and count its bytes."""
    stored = {name: in_precision(array, settings.dtype) for name, array in arrays.items()}
    write_shard(done_path(settings.work, part, key), {ALONE: stored}, {ALONE: key})
    num_bytes = sum(array.numel() * array.element_size() for array in stored.values())
    with (settings.work / "ticks").open("ab", buffering=0) as stream:  # one write each: lines of processes never mix
        stream.write(f"{part} {num_bytes}\n".encode())


def in_precision(array: Tensor, dtype: Dtype) -> Tensor:
    """An array on the CPU; floats in the store's precision, tags and masks as they are."""
    import torch

    plain = array.detach().cpu()
    return (plain.to(getattr(torch, dtype)) if plain.is_floating_point() else plain).contiguous()


def pack(work: Path, part: str, members: Sequence[tuple[str, str]], kept: Mapping[str, tuple[str, str]]) -> None:
    """Write one part of a shard, if there is anything of it, and beside it what was found when it was read back.

    Args:
        work: Folder of everything unfinished.
        part: Of the store.
        members: Entries with their keys.
        kept: Parts that finished shards hold: file and entry, by key.
    """
    path = shard_path(work, part, members)
    if not members or (path.is_file() and path.with_suffix(".json").is_file()):
        return
    keys = [key for _, key in members]
    shards: dict[str, Shard] = {}
    entries: dict[str, Arrays] = {}
    for entry, key in members:
        own = done_path(work, part, key)
        place, name = (str(own), ALONE) if own.is_file() else kept[key]
        if place not in shards:
            shards[place] = opened(Path(place), place)
        arrays = {array: shards[place].array(f"{name}/{array}") for array in shards[place].names[name]}
        # Where the text does not see the clip it is the same at every canvas, and safetensors writes no tensor twice.
        again = keys.count(key) > 1
        entries[entry] = {name: array.clone() if again else array for name, array in arrays.items()}
    write_shard(path, entries, dict(members))
    facts = facts_of(path)
    write_text(path.with_suffix(".json"), json.dumps({"seal": fingerprint_of(facts), "facts": facts}, sort_keys=True))


def read_facts(path: Path) -> dict[str, Any]:
    """What `pack` found a shard to hold, by entry.

    Raises:
        Broken: it is missing, or not what was written.
    """
    beside = path.with_suffix(".json")
    try:
        known = json.loads(beside.read_text(encoding="utf-8"))
        facts, sound = known["facts"], known["seal"] == fingerprint_of(known["facts"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Broken(f"{beside} is missing or damaged; run `soundstage encode` again") from error
    if not sound:
        raise Broken(f"{beside} is altered; run `soundstage encode` again")
    return facts


def facts_of(path: Path) -> dict[str, Any]:
    """What the arrays of a written shard really hold, by entry: sizes, precision, whether they are finite, and vary."""
    import torch

    found: dict[str, Any] = {}
    shard = opened(path, str(path))
    for entry, names in shard.names.items():
        arrays = {name: shard.array(f"{entry}/{name}") for name in names}
        floats = [array for array in arrays.values() if array.is_floating_point()]
        found[entry] = {
            "sizes": {name: list(array.shape) for name, array in arrays.items()},
            "dtypes": sorted({str(array.dtype).removeprefix("torch.") for array in floats}),
            "finite": all(bool(torch.isfinite(array).all()) for array in floats),
            "varies": any(bool(array.float().std(unbiased=False) > 0) for array in floats),
        }
    return found
