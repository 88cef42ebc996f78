"""How time and memory grow with the number of rows: the lister, ingest of tiny films, validate and split of rows.

Every step runs in a process of its own; seconds are processor seconds, memory is the highest resident. Beside the
step: how many times the cost a row grew since the smallest set beyond start-up (1 is linear), and the memory a row.
Example: python -m benchmarks.rows 100 10000 1000000
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from data.files import num_records, write_records
from data.media_write import write_mp4
from data.records import Clip, Source, Treatment

ROOT = Path(__file__).parents[1]
DISTINCT = 20
"""Clips that share one source."""
MAX_FILMS = 10_000
"""Most real films that are made and measured; further counts are left to the steps that read rows alone."""


def digest(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def sources(count: int) -> Iterator[Source]:
    """Rows of ordinary two-second films, with a caption each."""
    for number in range(count):
        yield Source(
            source_id=digest(number)[:16], sha256=digest(number), path=f"films/{number:07d}.mp4", group=f"g{number % 7}",
            size_bytes=1000 + number, caption=f"film {number} shows a number of things", caption_from="sidecar",
            media_type="video/mp4", container="mov,mp4,m4a,3gp,3g2,mj2", num_video_streams=1, num_audio_streams=1,
            video_stream=0, audio_stream=1, video_codec="h264", pixel_format="yuv420p", color_transfer="bt709",
            width=64, height=64, frame_rate="24", time_base="1/12288", num_frames=48, header_num_frames=48,
            header_duration_s=2.0, video_duration_s=2.0, audio_codec="aac", num_channels=2, channel_layout="stereo",
            sample_rate_hz=48000, audio_duration_s=2.0, peak=0.5, true_peak_db=-6.0, loudness_lufs=-20.0,
        )  # fmt: skip


def clips(count: int) -> Iterator[Clip]:
    """Rows of clips, twenty a source."""
    for number in range(count):
        source = digest(number // DISTINCT)[:16]
        start = float(number % DISTINCT)
        yield Clip(
            clip_id=f"{source}-{round(start * 1000):06d}", source_id=source, path=f"films/{number // DISTINCT}.mp4",
            group=f"g{number % 7}", caption="something", start_s=start, end_s=start + 0.916667,
            boundary_reason="stride", has_audio=True, motion_p50=0.1, motion_p90=0.3, luma=0.5, sharpness_p90=500.0,
            loudness_lufs=-20.0, cluster=source,
        )  # fmt: skip


def section(verb: str) -> dict[str, Any]:
    """The verb's settings of params.yaml."""
    return yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))[verb]


def list_table() -> int:
    """The table of films in the working directory, listed."""
    from data.listing import Listing
    from data.sources import Reading, given_by

    listing = Listing()
    listing.add(given_by("table.jsonl", Reading()))
    return len(listing)


def ingest() -> int:
    """The films in the working directory, measured; the memory is that of the process that leads the children."""
    from tasks.ingest import Config, run

    return run(Config.model_validate(section("ingest") | {"source": "films"}))


def validate() -> int:
    """The manifest there, judged."""
    from tasks.validate import Config, run

    run(Config.model_validate(section("validate")))
    return num_records(Path(section("validate")["accepted"]))


def split() -> int:
    """The clips there, split."""
    from tasks.split import Config, run

    run(Config.model_validate(section("split")))
    splits = Path(section("split")["splits"])
    return sum(num_records(splits / f"{name}.parquet") for name in ("train", "val", "test"))


STEPS = {"list": list_table, "ingest": ingest, "validate": validate, "split": split}


def make_films(count: int, folder: Path) -> None:
    """Half-second films that differ by their last bytes alone, in a box that no player reads."""
    still = np.full((12, 32, 32, 3), 90, np.uint8)
    film = folder / "0.mp4"
    write_mp4(film, still, None, 24, 48000)
    content = film.read_bytes()
    for number in range(count):
        (folder / f"{number}.mp4").write_bytes(content + struct.pack(">I4sQ", 16, b"free", number))


def prepare(step: str, count: int, folder: Path) -> None:
    """Write what the step reads."""
    if step == "list":
        with (folder / "table.jsonl").open("w", encoding="utf-8") as table:
            for number in range(count):
                table.write(json.dumps({"video": f"{number:07d}.mp4", "caption": f"film {number}"}) + "\n")
    elif step == "ingest":
        make_films(count, folder / "films")
    elif step == "validate":
        write_records(folder / section("validate")["manifest"], sources(count), Source)
    else:
        write_records(folder / section("split")["clips"], clips(count), Clip)
        write_records(folder / section("split")["accepted"], sources(-(-count // DISTINCT)), Source)
        write_records(folder / section("split")["treatments"], (), Treatment)


def measured(step: str, folder: str, answer: Any) -> None:
    """Run a step in this process; what it cost, and how many rows came out, goes to `answer`."""
    os.chdir(folder)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):  # noqa: PTH123
        found = STEPS[step]()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = usage.ru_utime + usage.ru_stime + children.ru_utime + children.ru_stime
    answer.send((seconds, usage.ru_maxrss * 1024, found))


def cost(step: str, count: int) -> tuple[float, int]:
    """Processor seconds and highest resident memory, bytes, of a step in a fresh process."""
    folder = tempfile.mkdtemp()
    try:
        maker = multiprocessing.get_context("spawn").Process(target=prepare, args=(step, count, Path(folder)))
        maker.start()
        maker.join()
        ours, theirs = multiprocessing.Pipe()
        worker = multiprocessing.get_context("spawn").Process(target=measured, args=(step, folder, theirs))
        worker.start()
        theirs.close()
        seconds, memory, found = ours.recv()
        worker.join()
        if found != count:
            raise SystemExit(f"{step}: {found} of {count} rows came through")
        return seconds, memory
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Print one line a step and count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("counts", nargs="*", type=int, default=[100, 10_000, 1_000_000])
    parser.add_argument("--steps", nargs="*", choices=list(STEPS), default=list(STEPS))
    options = parser.parse_args()
    for step in options.steps:
        first: tuple[int, float, int] | None = None
        previous: float | None = None
        for count in [count for count in options.counts if step != "ingest" or count <= MAX_FILMS]:
            seconds, memory = cost(step, count)
            line = f"{step}, {count:>9,} rows: {seconds:8.1f} s, {memory / 1e6:7.0f} MB"
            if first is None:
                first = count, seconds, memory
            else:
                rows = count - first[0]
                a_row = (seconds - first[1]) / rows
                line += f"; {1e6 * a_row:.0f} µs and {(memory - first[2]) / rows:.0f} bytes a row beyond the first"
                line += f"; a row costs {a_row / previous:.2f} times what it did" if previous else ""
                previous = a_row
            print(line, flush=True)


if __name__ == "__main__":
    main()
