"""Encode every clip once into latents and projected text, for all conditioning modes.

example: soundstage encode clips_per_shard=16
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

from pydantic import Field
from tqdm import tqdm

from data.files import Holds, link_or_copy, read_records, remove, sha256, whole
from data.records import Clip, ClipShape, Frozen
from data.workers import Lost, map_isolated

if TYPE_CHECKING:
    from data.expectations import LatentFacts
    from data.latents import Arrays, LatentRow
    from models.families import Family, Frames

CODE_VERSION = 2
"""Raise when the same inputs would encode to other bytes, so that old stores are refused."""


class Config(Frozen):
    """Settings of the encode verb."""

    splits: Path
    """Folder of `train`, `val` and `test` tables that `split` wrote."""
    base: Path
    """Model whose autoencoders and text side encode, a diffusers folder."""
    latents: Annotated[Path, Holds(("index.parquet", "fingerprint.json"))]
    """Where the latent store goes."""
    expectations: Path
    """JSON of what every expectation on the latents found."""
    docs: Annotated[Path, Holds(("index.html",), below="latents")]
    """Folder of Great Expectations' pages; the latents' are in `latents/`."""
    shape: ClipShape
    """What one clip is: frames, rate, size, sound rate."""
    num_workers: int = Field(default=2, gt=0)
    """Processes that encode, each with the encoders in its own memory; the result does not depend on it."""
    max_shard_s: float = Field(default=3600, gt=0)
    """Longest time for one shard, s."""
    clips_per_shard: int = Field(default=32, gt=0)
    """Clips of one safetensors shard, which is also what a killed run does again at most."""
    accelerator: str = "cpu"
    """Torch device that encodes, e.g. `cuda`."""
    work: Path = Path("data/store/work/encode")
    """Finished shards of an interrupted run, by fingerprint."""


def run(config: Config) -> Path:
    """Write the latent store; returns its folder.

    Raises:
        ValueError: the shape is not on the model's grid.
        RuntimeError: no model in `base`, or no split.
        DataRefused: a critical expectation on the latents failed; nothing is written then but the evidence.
    """
    from data.latents import fingerprint_of, write_index
    from models.families import load_family

    clips = read_splits(config.splits)
    family = load_family(config.base)
    family.check(config.shape)
    parts = {
        "encoders": {
            name: sha256(config.base / name) for name in ("vae", "audio_vae", "text_encoder", "tokenizer", "processor")
        },
        "shape": config.shape.model_dump(),
        "posterior": "mode",
        "dtype": "float32",
        "code_version": CODE_VERSION,
        "clips": [[split, clip.clip_id, clip.caption, *other_sound(clip)] for split, clip in clips],
    }
    fingerprint = fingerprint_of(parts)
    cutting = {"store": fingerprint, "clips_per_shard": config.clips_per_shard, "accelerator": config.accelerator}
    work = config.work / fingerprint_of(cutting)[:16]  # shards of other sizes bear the same names
    parts_of = list(shards(clips, config.clips_per_shard))
    left = [Part(config, work / name, members) for name, members in parts_of if not (work / name).is_file()]
    with tqdm(total=len(clips), desc="encode", unit="clip", disable=None) as progress:
        progress.update(len(clips) - sum(len(part.members) for part in left))
        for index, answer in map_isolated(encode_part, left, config.num_workers, config.max_shard_s):
            if isinstance(answer, Lost):
                raise RuntimeError(f"shard {left[index].path.name}: {answer.reason}; lower encode.num_workers")  # noqa: TRY004 # an accident
            progress.update(len(left[index].members))
    rows = [row for name, members in parts_of for row in index_rows(work / name, name, members)]
    judge(config, rows, clips, family.latent_shapes(config.shape), work)
    with whole(config.latents) as temporary:
        temporary.mkdir()
        for name in {row.shard for row in rows}:
            link_or_copy(work / name, temporary / name)  # a kill here must not lose the finished shard
        del parts["clips"]  # the fingerprint covers them; the index lists them
        write_index(temporary, sorted(rows, key=lambda row: row.clip_id), fingerprint, parts)
    remove(config.work)
    return config.latents


def other_sound(clip: Clip) -> list[str]:
    """Content of the file that the sound comes from, where it is not the video: the clip's id does not know it."""
    from data.remote import local

    return [] if clip.sound_path is None else [sha256(local(clip.sound_path))]


def judge(
    config: Config,
    rows: list[LatentRow],
    clips: list[tuple[str, Clip]],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    work: Path,
) -> None:
    """Hold the latents against their expectations.

    Raises:
        DataRefused: a critical one failed.
    """
    from data import expectations
    from tasks import judging

    found, place = facts(rows, shapes, work), work / "asked.sqlite"
    with expectations.latents_frame(rows, (clip for _, clip in clips), found, place) as table:
        judging.enforce("latents", table, expectations.latents_suite(), config.expectations, config.docs)


def facts(rows: list[LatentRow], shapes: tuple[tuple[int, ...], tuple[int, ...]], work: Path) -> dict[str, LatentFacts]:
    """What the arrays of every clip really hold, read back from the written shards."""
    import numpy as np
    from safetensors import safe_open

    from data.expectations import LatentFacts

    found: dict[str, LatentFacts] = {}
    for name in sorted({row.shard for row in rows}):
        with cast(Any, safe_open(work / name, framework="numpy")) as tensors:
            names = sorted(cast(list[str], tensors.keys()))
            for row in (row for row in rows if row.shard == name):
                own = [key for key in names if key.startswith(f"{row.clip_id}/")]
                arrays = {key.partition("/")[2]: tensors.get_tensor(key) for key in own}
                floats = [array for key, array in arrays.items() if not key.startswith("tags.")]
                found[row.clip_id] = LatentFacts(
                    finite=all(bool(np.isfinite(array).all()) for array in floats),
                    as_planned=(arrays["video"].shape, arrays["audio"].shape) == shapes,
                    dtype="/".join(sorted({str(array.dtype) for array in floats})),
                    has_audio=row.has_audio and bool(arrays["audio"].std() > 0),
                )
    return found


class Part(NamedTuple):
    """One shard to write."""

    config: Config
    path: Path
    members: list[tuple[str, Clip]]


def encode_part(part: Part) -> None:
    """Encode the clips of one shard and write it; runs in a process of its own, which keeps the encoders loaded."""
    from data.latents import write_shard

    family = loaded(part.config.base, part.config.accelerator)
    write_shard(part.path, {clip.clip_id: encode(family, clip, part.config.shape) for _, clip in part.members})


@functools.cache
def loaded(base: Path, device: str) -> Family:
    """The family, once a process."""
    from models.families import load_family
    from models.threads import use_one_thread

    use_one_thread()
    return load_family(base, device=device)


def read_splits(folder: Path) -> list[tuple[str, Clip]]:
    """Every clip with its split, in the order shards are filled."""
    return [
        (name, clip)
        for name in ("train", "val", "test")
        for clip in sorted(read_records(folder / f"{name}.parquet", Clip), key=lambda clip: clip.clip_id)
    ]


def shards(clips: list[tuple[str, Clip]], size: int) -> Iterator[tuple[str, list[tuple[str, Clip]]]]:
    """Shard names with their clips."""
    for start in range(0, len(clips), size):
        yield f"shard-{start // size:05d}.safetensors", clips[start : start + size]


def encode(family: Family, clip: Clip, shape: ClipShape) -> Arrays:
    """All arrays of one clip: `video` (C, F, H, W), `audio` (2, C, T), and text, tags and keyframes of each mode."""
    from data.clips import read

    frames, waveform = read(clip, shape)
    video, audio = family.encode_clip(frames, waveform)
    return {"video": video.numpy(), "audio": audio.numpy(), **conditions_of(family, clip.caption, frames)}


def conditions_of(family: Family, caption: str, frames_FHWC: Frames) -> Arrays:
    """Text, tags and keyframes of every conditioning mode."""
    first, last = frames_FHWC[0], frames_FHWC[-1]
    arrays: Arrays = {}
    for keyframes in ((None, None), (first, None), (first, last)):
        condition = family.encode_condition(caption, *keyframes)
        arrays[f"text.{condition.mode}"] = condition.text_SD.numpy()
        arrays[f"tags.{condition.mode}"] = condition.tags_S.numpy().astype("uint8")
        arrays[f"keyframes.{condition.mode}"] = condition.keyframes_KCHW.numpy()
    return arrays


def index_rows(shard: Path, name: str, members: list[tuple[str, Clip]]) -> list[LatentRow]:
    """Index rows of a written shard."""
    from safetensors import safe_open

    from data.latents import LatentRow

    rows: list[LatentRow] = []
    with cast(Any, safe_open(shard, framework="numpy")) as tensors:
        for split, clip in members:
            texts = f"{clip.clip_id}/text."
            modes = sorted(key.removeprefix(texts) for key in cast(list[str], tensors.keys()) if key.startswith(texts))
            shapes = [tensors.get_slice(f"{clip.clip_id}/{part}").get_shape() for part in ("video", "audio")]
            lengths = [tensors.get_slice(f"{clip.clip_id}/text.{mode}").get_shape()[0] for mode in modes]
            layout = "x".join(str(size) for size in (*shapes[0][1:], shapes[1][-1], *lengths))
            num_tokens = max(lengths) + shapes[0][1] * shapes[0][2] * shapes[0][3] + 2 * shapes[1][-1]
            rows.append(
                LatentRow(
                    clip_id=clip.clip_id,
                    source_id=clip.source_id,
                    split=split,
                    group=clip.group,
                    has_audio=clip.has_audio,
                    shard=name,
                    modes=",".join(modes),
                    layout=layout,
                    num_tokens=num_tokens,
                )
            )
    return rows
