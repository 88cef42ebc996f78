"""Batches from the latent store against one pass over the same bytes, other stores of the same latents, and decoding.

Clips of a full-size model at 480x480, 39 frames, in bfloat16: picture 24x12x30x30, sound 2x32x65, text of 128 rows of
5120, both keyframes. Every side yields the same batches of 4, stacked, in a shuffled order, in one process on one
thread; sides alternate, and the median of the ratios is printed. The files are in the page cache: it is the software
that is compared, by processor time, so that what else the machine does is not in it. Example: pip install webdataset litdata; python -m benchmarks.loader
"""

from __future__ import annotations

import io
import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from data.latent_index import LatentRow
from data.latent_shards import write_shard
from data.latents import PARTS, LatentStore, shard_name, write_index
from data.sampler import StepBatch
from models.loading import read_batch

NUM_CLIPS, BATCH, ROUNDS, CLIPS_PER_SHARD, CLIPS_PER_CHUNK = 192, 4, 7, 64, 64
SIZES = {
    "video": (24, 12, 30, 30),
    "audio": (2, 32, 65),
    "keyframe/first": (24, 30, 30),
    "keyframe/last": (24, 30, 30),
    "text/fl2va/rows": (128, 5120),
}
PART = {"video": "picture", "keyframe/first": "picture", "keyframe/last": "picture", "audio": "sound"}
Side = Callable[[], int]
"""Makes every batch once; returns how many bytes there were."""


def clip(number: int) -> dict[str, Tensor]:
    """The arrays of one clip."""
    random = torch.Generator().manual_seed(number)
    return {name: torch.randn(size, generator=random).to(torch.bfloat16) for name, size in SIZES.items()}


def order(round_number: int) -> list[list[int]]:
    """Batches of an epoch."""
    shuffled = np.random.default_rng(round_number).permutation(NUM_CLIPS).tolist()
    return [shuffled[at : at + BATCH] for at in range(0, NUM_CLIPS, BATCH)]


def stacked(clips: list[dict[str, Tensor]]) -> int:
    """Make a batch; its bytes."""
    batch = {name: torch.stack([arrays[name] for arrays in clips]) for name in SIZES}
    return sum(array.numel() * array.element_size() for array in batch.values())


def write_ours(folder: Path) -> None:
    """The latent store."""
    rows: list[LatentRow] = []
    for shard, start in enumerate(range(0, NUM_CLIPS, CLIPS_PER_SHARD)):
        parts: dict[str, dict[str, dict[str, Tensor]]] = {part: {} for part in PARTS[:3]}
        for number in range(start, start + CLIPS_PER_SHARD):
            entry = f"{number:06d}@full"
            for name, array in clip(number).items():
                parts[PART.get(name, "text")].setdefault(entry, {})[name] = array
            rows.append(
                LatentRow(
                    entry=entry, clip_id=entry[:6], source_id=entry[:6], split="train", group="", canvas="full",
                    has_audio=True, num_frames=39, frame_rate=24, height=480, width=480, sample_rate_hz=32000,
                    variants=("fl2va",), layouts=("a",), num_tokens=(3418,), shard=f"{shard:05d}", keys=("k",) * 4,
                )
            )  # fmt: skip
        for part, entries in parts.items():
            write_shard(folder / shard_name(part, f"{shard:05d}"), entries, dict.fromkeys(entries, "k"))
    write_index(folder, rows, {"text_of": {"fl2va": "fl2va"}})


def ours(store: LatentStore, round_number: int) -> int:
    """Batches as training reads them."""
    total = 0
    for numbers in order(round_number):
        entries = tuple(f"{number:06d}@full" for number in numbers)
        batch = read_batch(store, StepBatch(0, "fl2va", entries, ("fl2va",) * len(entries)))
        arrays = [batch.video_BCFHW, batch.audio_BSCT, *batch.conditions.values()]
        total += sum(array.numel() * array.element_size() for array in arrays)
    return total


def one_pass(folder: Path, *, keep: bool) -> int:
    """The same bytes, copied once from memory maps in file order, a batch's worth at a time.

    Args:
        folder: Of the store.
        keep: Copy into one buffer again and again, which the processor's cache then holds; else into new memory each
            time, as whoever gives batches away must.
    """
    step = BATCH * sum(2 * int(np.prod(size)) for size in SIZES.values())
    buffer, total = np.empty(step, np.uint8), 0
    for path in sorted(folder.glob("*-0*.safetensors")):
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            view = np.frombuffer(mapped, np.uint8)
            for at in range(0, len(view), step):
                piece = view[at : at + step]
                target = buffer[: len(piece)] if keep else np.empty(len(piece), np.uint8)
                np.copyto(target, piece)
                total += len(target)
            del view, piece
    return total


def write_webdataset(folder: Path) -> None:
    """Tar shards with one file of tensors a clip."""
    import webdataset

    folder.mkdir()
    with cast(Any, webdataset).ShardWriter(str(folder / "%05d.tar"), maxcount=CLIPS_PER_SHARD, verbose=0) as sink:
        for number in range(NUM_CLIPS):
            buffer = io.BytesIO()
            torch.save(clip(number), buffer)
            sink.write({"__key__": f"{number:06d}", "pth": buffer.getvalue()})


def webdataset_pass(folder: Path, round_number: int) -> int:
    """Its own reader: shards in another order, clips through a shuffle buffer."""
    import webdataset

    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    dataset = cast(Any, webdataset).WebDataset(urls, shardshuffle=len(urls), seed=round_number)
    waiting: list[dict[str, Tensor]] = []
    total = 0
    for sample in dataset.shuffle(CLIPS_PER_SHARD):
        waiting.append(torch.load(io.BytesIO(sample["pth"]), weights_only=True))
        if len(waiting) == BATCH:
            total += stacked(waiting)
            waiting = []
    return total


def write_litdata(folder: Path) -> None:
    """Its chunks."""
    from litdata.streaming import Cache

    cache = cast(Any, Cache)(str(folder), chunk_size=CLIPS_PER_CHUNK)
    for number in range(NUM_CLIPS):
        cache[number] = {name: array.view(torch.int16) for name, array in clip(number).items()}  # it has no bfloat16
    cache.done()
    cache.merge()


def litdata_pass(dataset: Any) -> int:
    """Its own reader, shuffled."""
    waiting: list[dict[str, Tensor]] = []
    total = 0
    for sample in cast(Iterator[dict[str, Tensor]], iter(dataset)):
        waiting.append({name: array.view(torch.bfloat16) for name, array in sample.items()})
        if len(waiting) == BATCH:
            total += stacked(waiting)
            waiting = []
    return total


def film(path: Path) -> Path:
    """Six seconds of moving noise at 480x480 with sound."""
    from data.media import write_mp4

    random = np.random.default_rng(0)
    tile = random.integers(0, 255, (60, 60, 3)).astype(np.uint8).repeat(16, 0).repeat(16, 1)
    frames = np.stack([np.roll(tile, 5 * number, axis=1)[:480, :480] for number in range(144)])
    sound = random.normal(0, 0.1, (2, 6 * 32000)).astype(np.float32)
    write_mp4(path, frames, sound, 24, 32000)
    return path


def decoding(path: Path) -> float:
    """Seconds to read one clip's pixels and sound, without what the encoders would take."""
    from data.media import read_clip
    from data.records import ClipShape

    shape = ClipShape(num_frames=39, frame_rate=24, height=480, width=480, sample_rate_hz=32000)
    began = time.process_time()
    for start_s in (0.0, 1.5, 3.0):
        read_clip(path, start_s, None, shape)
    return (time.process_time() - began) / 3


def main() -> None:
    """Print ratios of throughput, ours over each other side."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        write_ours(root / "ours")
        store = LatentStore(root / "ours")
        sides: dict[str, Callable[[int], int]] = {
            "ours": lambda number: ours(store, number),
            "ours, the first time, with checksums": lambda number: ours(LatentStore(root / "ours"), number),
            "one pass over the bytes": lambda _: one_pass(root / "ours", keep=False),
            "one pass into the same buffer": lambda _: one_pass(root / "ours", keep=True),
            **others(root),
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        sizes: dict[str, int] = {}
        for number in range(-1, ROUNDS):  # the first warms the page cache
            for name, side in sides.items():
                began = time.process_time()
                sizes[name] = side(number + 1)
                if number >= 0:
                    seconds[name].append(time.process_time() - began)
        reading = statistics.median(decoding(film(root / "film.mp4")) for _ in range(3)) * NUM_CLIPS
    report(seconds, sizes, reading)


def others(root: Path) -> dict[str, Callable[[int], int]]:
    """The other stores that are installed."""
    found: dict[str, Callable[[int], int]] = {}
    try:
        write_webdataset(root / "webdataset")
        found["webdataset"] = lambda number: webdataset_pass(root / "webdataset", number)
    except ImportError:
        sys.stdout.write("webdataset is not installed\n")
    try:
        from litdata import StreamingDataset

        write_litdata(root / "litdata")
        dataset = cast(Any, StreamingDataset)(str(root / "litdata"), shuffle=True)
        found["litdata"] = lambda _: litdata_pass(dataset)
    except ImportError:
        sys.stdout.write("litdata is not installed\n")
    return found


def report(seconds: dict[str, list[float]], sizes: dict[str, int], reading: float) -> None:
    """Print throughput of ours over that of each side, by the bytes of the batches."""
    base = sizes["ours"]
    sys.stdout.write(f"{NUM_CLIPS} clips, {base / NUM_CLIPS / 1e6:.2f} MB each, batches of {BATCH}, {ROUNDS} rounds\n")
    for name in (name for name in seconds if name != "ours"):
        ratios = sorted(theirs / own for own, theirs in zip(seconds["ours"], seconds[name], strict=True))
        rate = base / statistics.median(seconds[name]) / 1e9
        sys.stdout.write(
            f"ours / {name}: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}); {rate:.2f} GB/s\n"
        )
    sys.stdout.write(f"ours: {base / statistics.median(seconds['ours']) / 1e9:.2f} GB/s\n")
    sys.stdout.write(f"ours / decoding pixels and sound: {reading / statistics.median(seconds['ours']):.0f}\n")


if __name__ == "__main__":
    main()
