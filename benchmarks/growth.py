"""How the latent index and the sampler grow with the number of clips: seconds to open, milliseconds a batch.

Each count is measured in processes of its own on one thread, the counts alternating; medians are printed, and what the
larger count costs in times of the smaller. Times are of the processor: what else the machine does is not in them.
Loading the libraries is not in the time to open. Example: python -m benchmarks.growth 10000 1000000
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from pyarrow import parquet

arrow, pq = cast(Any, pa), cast(Any, parquet)
ROUNDS, BATCHES = 5, 2000
VARIANTS = ("t2va", "fl2va", "ref2va.0")
CANVASES = {"small": ((64, 64), (48, 80)), "large": ((128, 128), (96, 160))}
DURATIONS = (39, 56, 73, 90, 107)
"""Frames; with two canvases of two aspects and three variants, some fifty layouts."""
TARGETS = {"open_s": 2.0, "batch_median_ms": 5.0}
STAGE = {
    "conditions": {"t2va": 0.3, "fl2va": 0.5, "ref2va": 0.2},
    "num_steps": 100_000, "batch_size": 16, "max_tokens": 60_000, "learning_rate": 1e-4,
    "mixture": {"g1": 1, "g2": 2, "g3": 3}, "replay_share": 0.2, "replay_groups": ["g0"],
}  # fmt: skip


def picked(names: list[str], places: Any) -> Any:
    """A column of few distinct strings."""
    return arrow.DictionaryArray.from_arrays(arrow.array(places, arrow.int32()), names).cast(arrow.string())


def listed(columns: list[Any]) -> Any:
    """A column of lists, as long as there are columns."""
    count, length = len(columns[0]), len(columns)
    order = np.arange(count * length).reshape(length, count).T.ravel()
    starts = np.arange(0, count * length + 1, length).astype(np.int32)
    return arrow.ListArray.from_arrays(starts, arrow.concat_arrays(columns).take(order))


def write(count: int, folder: Path) -> None:
    """An index and a curriculum of ordinary clips."""
    random = np.random.default_rng(0)
    sides = [side for sizes in CANVASES.values() for side in sizes]
    size, frames = random.integers(len(sides), size=count), np.array(DURATIONS)[random.integers(5, size=count)]
    height, width = np.array(sides)[size].T
    source = [f"{number // 20:016x}" for number in range(count)]
    clip = [f"{name}-{number % 20 * 1000:06d}" for number, name in enumerate(source)]
    canvas = picked(list(CANVASES), size // 2)
    entry = arrow.array([f"{name}@{where}" for name, where in zip(clip, canvas.to_pylist(), strict=True)])
    group = picked([f"g{number}" for number in range(7)], random.integers(7, size=count))
    tokens = frames // 17 * (height // 16) * (width // 16) + 200
    layout = [f"{f}x{h}x{w}" for f, h, w in zip(frames, height, width, strict=True)]
    keys = [arrow.array([f"{part}{number:063x}" for number in range(count)]) for part in range(4)]
    index = arrow.table({
        "entry": entry, "clip_id": clip, "source_id": source,
        "split": picked(["train", "val", "test"], np.searchsorted([0.9, 0.95], random.random(count))), "group": group,
        "canvas": canvas, "has_audio": random.random(count) < 0.9, "num_frames": frames,
        "frame_rate": np.full(count, 24), "height": height, "width": width, "sample_rate_hz": np.full(count, 32000),
        "variants": listed([picked([name], np.zeros(count)) for name in VARIANTS]),
        "layouts": listed([arrow.array([f"{name} {of}" for of in layout]) for name in VARIANTS]),
        "num_tokens": listed([arrow.array(tokens + 300 * place) for place in range(3)]),
        "shard": [f"{number // 100:05d}" for number in range(count)], "keys": listed(keys),
    })  # fmt: skip
    with arrow.OSFile(str(folder / "index.arrow"), "wb") as sink, arrow.ipc.new_file(sink, index.schema) as file:
        file.write_table(index.combine_chunks())
    planned = arrow.table({"entry": entry, "group": group, "difficulty": random.permutation(count) / count})
    trained = np.array(index["split"].to_pylist()) == "train"
    pq.write_table(planned.filter(arrow.array(trained)), folder / "curriculum.parquet", row_group_size=10_000)


def measure(folder: Path, seed: int) -> dict[str, float]:
    """What one process pays, from the files to many batches."""
    from data.candidates import candidates_of
    from data.latent_index import LatentIndex
    from data.sampler import Sampler
    from data.stage import Stage

    arrow.set_cpu_count(1)
    pq.read_table(folder / "curriculum.parquet").slice(0, 1).to_pylist()  # loads the libraries
    start = time.process_time()
    index = LatentIndex(folder / "index.arrow")
    opened = time.process_time()
    candidates = candidates_of(index, pq.read_table(folder / "curriculum.parquet"))
    joined = time.process_time()
    sampler = Sampler(candidates, Stage.model_validate(STAGE), seed)
    built = time.process_time()
    times: list[float] = []
    for step in np.random.default_rng(seed).integers(100_000, size=BATCHES).tolist():
        before = time.process_time()
        sampler.batch(step)
        times.append(1000 * (time.process_time() - before))
    places = {"median": np.median(times), "p99": np.percentile(times, 99), "max": max(times)}
    seconds = {"open_s": opened - start, "candidates_s": joined - opened, "sampler_s": built - joined}
    return seconds | {f"batch_{name}_ms": float(value) for name, value in places.items()}


def child(folder: Path, seed: int) -> dict[str, float]:
    """`measure` in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.growth", "--measure", str(folder), "--seed", str(seed)]
    done = subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return json.loads(done.stdout)


def main() -> None:
    """Print one line a measure: the median of either count, the ratio, and the target where there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("counts", nargs="*", type=int, default=[10_000, 1_000_000])
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.seed)))
        return
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / str(count) for count in options.counts]
        for count, place in zip(options.counts, folders, strict=True):
            place.mkdir()
            write(count, place)
        found = [[child(place, seed) for place in folders] for seed in range(ROUNDS)]
    print(f"{ROUNDS} rounds of {BATCHES} batches at random steps; clips: {', '.join(f'{c:,}' for c in options.counts)}")
    for name in found[0][0]:
        values = [statistics.median(row[place][name] for row in found) for place in range(len(folders))]
        line = f"{name:16} " + " ".join(f"{value:9.3f}" for value in values) + f"  ratio {values[-1] / values[0]:6.2f}"
        print(line + (f"  (target at most {TARGETS[name]:g})" if name in TARGETS else ""))


if __name__ == "__main__":
    main()
