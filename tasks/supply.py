"""Every shard of a latent store, made in processes of their own: estimate first, show how far it is, go on where it was."""

from __future__ import annotations

import math
import shutil
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from data.isolation import Limits, Lost
from data.latents import PARTS, SHARED
from data.records import Reject
from data.workers import Pool
from tasks.encoding import Outcome, Task, encode_shard
from tasks.packing import Job, done_path, kept_parts, lacking_of, members_of, shard_path

if TYPE_CHECKING:
    from models.families import Encoders
    from tasks.encode import Config
    from tasks.jobs import Lineage

PILOT_FROM = 16
"""Entries to encode from which on two are tried first, so that the whole can be estimated from the second."""
LOOK_S = 0.5
"""How often the bar looks how far the processes are, s."""
RESERVE = 1.1
"""Room asked for, as a share of what will be written: shards are written before their parts are deleted."""


def encode_all(parted: Sequence[tuple[Job, ...]], config: Config, encoders: Encoders, lineage: Lineage) -> list[Reject]:
    """Make every shard that is not there yet; returns the clips that could not be read.

    Raises:
        RuntimeError: too little disk or time for the whole, or a process ended twice on the same shard.
    """
    settings, work = config.settings, config.work
    (work / "done").mkdir(parents=True, exist_ok=True)
    (work / "shards").mkdir(exist_ok=True)
    kept = kept_parts(work)
    lacking = lacking_of([job for jobs in parted for job in jobs], kept, work)
    jobs = [job for group in parted for job in group if any((job.entry, part) in lacking for part in PARTS)]
    num_parts = sum(bool(key) for group in parted for job in group for key in job.keys)
    sys.stderr.write(f"encode: {len(lacking)} of {num_parts} parts to make, {num_parts - len(lacking)} are kept\n")
    check_disk(jobs, lacking, config, encoders)
    pilot = [Task(settings, tuple(jobs[: 2 * config.batch_size]), {}, pack=False)] if len(jobs) >= PILOT_FROM else []
    tasks = [Task(settings, group, own_of(group, kept)) for group in parted if not packed(group, work)]
    if lineage.shared and not shard_path(work, "text", [(SHARED, lineage.shared)]).is_file():
        tasks.insert(0, Task(settings, (), {}, shared=lineage.shared))
    longest = max((len(task.jobs) for task in [*pilot, *tasks]), default=1)
    rejects: list[Reject] = []
    with (
        Pool(encode_shard, config.num_workers, Limits(config.max_clip_s * max(1, longest))) as pool,
        bar(work, len(lacking)),
    ):
        for outcome in answered(pool, pilot):
            check_time(outcome, jobs, config)
        for outcome in answered(pool, tasks):
            rejects += outcome.rejects
    return rejects


def answered(pool: Pool[Task, Outcome], tasks: Sequence[Task]) -> Iterator[Outcome]:
    """What came of tasks.

    Raises:
        RuntimeError: a process ended without an answer.
    """
    for index, answer in pool.answers(tasks):
        if isinstance(answer, Lost):
            first = tasks[index].jobs[0].clip if tasks[index].jobs else None
            where = f"the shard that begins with {first.clip_id} ({first.path})" if first else "the shared texts"
            raise RuntimeError(f"{where}: {answer.reason}; lower encode.num_workers or raise encode.max_clip_s")  # noqa: TRY004 # an accident
        yield answer


def own_of(jobs: Sequence[Job], kept: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Of everything that is kept, what a shard can use."""
    return {key: kept[key] for job in jobs for key in job.keys if key in kept}


def packed(jobs: Sequence[Job], work: Path) -> bool:
    """Whether every part of a shard is written."""
    members = [(part, members_of(jobs, part)) for part in PARTS]
    paths = [shard_path(work, part, items) for part, items in members if items]
    return all(path.is_file() and path.with_suffix(".json").is_file() for path in paths)


def check_disk(jobs: Sequence[Job], lacking: set[tuple[str, str]], config: Config, encoders: Encoders) -> None:
    """Raise RuntimeError where the latents alone do not fit the disk; their sizes are known beforehand."""
    size = {"float32": 4, "bfloat16": 2, "float16": 2}[config.dtype]
    needed = 0
    for job in jobs:
        shapes = dict(zip(("picture", "sound"), encoders.latent_shapes(job.shape), strict=True))
        needed += sum(math.prod(shape) * size for part, shape in shapes.items() if (job.entry, part) in lacking)
    refuse_space(needed, config, "latents")


def refuse_space(needed: float, config: Config, what: str) -> None:
    """Raise RuntimeError where what is to be written does not fit the disk."""
    free = shutil.disk_usage(config.work).free
    if needed * RESERVE > free:
        raise RuntimeError(
            f"{what} need {needed * RESERVE / 1e9:.3g} GB in {config.work}, where {free / 1e9:.3g} GB are free; free"
            " some, set encode.dtype = bfloat16, or choose smaller or fewer encode.canvases"
        )


def check_time(outcome: Outcome, jobs: Sequence[Job], config: Config) -> None:
    """Say what the whole will take, judged by the second batch of the pilot.

    Raises:
        RuntimeError: it does not fit `max_hours` or the disk.
    """
    if len(outcome.seconds) < 2:  # the first has the loading of the model in it
        return
    pixels = [job.shape.num_frames * job.shape.height * job.shape.width for job in jobs]
    second = jobs[config.batch_size : 2 * config.batch_size]
    tried = sum(pixels[config.batch_size : 2 * config.batch_size])
    hours = outcome.seconds[1] * sum(pixels) / tried / config.num_workers / 3600
    written, text = (
        sum(done_path(config.work, part, job.keys[PARTS.index(part)]).stat().st_size for job in second)
        for part in ("picture", "text")
    )
    total = written * sum(pixels) / tried + text * len(jobs) / len(second)
    sys.stderr.write(f"encode: {len(jobs)} entries to make, about {hours:.2g} h and {total / 1e9:.2g} GB\n")
    if config.max_hours is not None and hours > config.max_hours:
        raise RuntimeError(
            f"encoding would take about {hours:.3g} h; limit encode.max_hours = {config.max_hours:g}. Choose smaller or"
            " fewer canvases or modes, more num_workers, or raise it"
        )
    refuse_space(total, config, "latents and text")


@contextmanager
def bar(work: Path, total: int) -> Generator[None]:
    """A progress bar over the parts of entries that all processes finish, fed by the lines they write."""
    ticks, over = work / "ticks", threading.Event()
    ticks.write_bytes(b"")

    def watch(shown: Any) -> None:
        place, num_bytes = 0, 0
        while not over.wait(LOOK_S) or place < ticks.stat().st_size:
            with ticks.open("rb") as stream:
                stream.seek(place)
                lines = stream.read().split(b"\n")
            place += sum(len(line) + 1 for line in lines[:-1])
            num_bytes += sum(int(line.split()[1]) for line in lines[:-1])
            shown.set_postfix_str(f"{num_bytes / 1e9:.3g} GB", refresh=False)
            shown.update(len(lines) - 1)

    with tqdm(total=total, desc="encode", unit="part", disable=None) as shown:
        watcher = threading.Thread(target=watch, args=(shown,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join(timeout=5)
