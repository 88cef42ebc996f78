"""What `encode` costs beside the bare autoencoders and text side: reading, writing, checking, packing.

Scenes of the sample world as files, encoded by the real verb's worker in this process, against the same calls of the
encoders on media that are already in memory. One thread, sides alternate, the median of the ratios is printed. The
heavier the model the smaller the share: the tiny one is the hardest case there is. Example: python -m benchmarks.encode
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from data.clips import Media, read
from data.conditions import KEYFRAMES, Mode
from data.media import write_mp4
from data.records import Canvas, Clip
from data.references import References
from data.world import scene
from models.families import Encoders
from tasks.encode import Config
from tasks.encoding import Task, encode_shard, loaded
from tasks.jobs import jobs_of, lineage_of
from tasks.packing import Job

ZOO = Path(__file__).parents[1] / "models" / "zoo" / "tiny-h3"
MODES: tuple[Mode, ...] = ("t2va", "fl2va_first", "fl2va")
NUM_CLIPS, ROUNDS, NUM_FRAMES = 8, 5, 39


class Size(NamedTuple):
    """What is encoded."""

    side_px: int
    source_px: int


def films(folder: Path, size: Size) -> list[tuple[str, Clip]]:
    """Scenes as files."""
    clips: list[tuple[str, Clip]] = []
    for number in range(NUM_CLIPS):
        seen = scene("new", number, NUM_FRAMES / 24, 24, size.source_px, 8000)
        path = folder / f"{number}.mp4"
        write_mp4(path, seen.frames_FHWC, seen.waveform_CT, 24, 8000)
        clip = Clip.model_construct(
            clip_id=f"c{number}", source_id=f"c{number}", path=str(path), sound_path=None, references=(), group="",
            caption=seen.caption, start_s=0.0, end_s=NUM_FRAMES / 24, width=size.source_px, height=size.source_px,
            has_audio=True,
        )  # fmt: skip
        clips.append(("train", clip))
    return clips


def bare(encoders: Encoders, media: list[Media], jobs: list[Job]) -> None:
    """Nothing but the calls."""
    for (frames, waveform), job in zip(media, jobs, strict=True):
        encoders.encode_picture(frames[None])
        encoders.encode_sound(waveform[None], job.shape)
        ends = {"first": frames[0], "last": frames[-1]}
        for frame in ends.values():
            encoders.encode_keyframe(frame)
        for mode in MODES:
            encoders.encode_text(mode, job.clip.caption, [ends[name] for name in KEYFRAMES.get(mode, ())])


def whole(task: Task) -> None:
    """From files to a packed shard."""
    shutil.rmtree(task.settings.work, ignore_errors=True)
    for name in ("done", "shards"):
        (task.settings.work / name).mkdir(parents=True)
    encode_shard(task)


def measure(size: Size, num_readers: int) -> tuple[float, list[float]]:
    """Seconds of the bare calls for a clip, and time of the whole over theirs, pair by pair."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        clips = films(folder, size)
        names = ("splits", "latents", "work", "docs", "expectations", "rejects", "accepted")
        canvas = Canvas(area_px=size.side_px**2, durations_s=(NUM_FRAMES / 24,))
        config = Config(
            **{name: folder / name for name in names}, base=ZOO, canvases={"a": canvas}, modes=MODES,
            references=References(), num_readers=num_readers,
        )  # fmt: skip
        encoders = loaded(ZOO, "cpu")
        jobs, _ = jobs_of(clips, config, encoders, lineage_of(config, encoders))
        media = [read(job.clip, job.shape) for job in jobs]
        task = Task(config.settings, tuple(jobs), {})
        pairs: list[tuple[float, float]] = []
        for _ in range(ROUNDS + 1):
            began = time.perf_counter()
            bare(encoders, media, jobs)
            between = time.perf_counter()
            whole(task)
            pairs.append((between - began, time.perf_counter() - between))
    return statistics.median(one for one, _ in pairs[1:]) / NUM_CLIPS, [two / one for one, two in pairs[1:]]


def main() -> None:
    """Print the ratio for each size, with and without threads that read ahead."""
    torch.set_num_threads(1)
    for size in (Size(32, 96), Size(64, 128)):
        for num_readers in (1, 2):
            seconds, ratios = measure(size, num_readers)
            ordered = sorted(ratios)
            sys.stdout.write(
                f"{size.side_px} px of {size.source_px}, {NUM_FRAMES} frames, {num_readers} readers: bare"
                f" {1000 * seconds:.0f} ms a clip; whole / bare {statistics.median(ordered):.3f}"
                f" ({ordered[0]:.3f} to {ordered[-1]:.3f})\n"
            )


if __name__ == "__main__":
    main()
