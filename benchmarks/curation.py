"""What it costs to ingest, validate and cut, beside decoding alone and beside the usual three tools.

Processor seconds (user + system) of every process that a command starts, all on one core, the sides alternating, median
of several rounds: ratios survive a noisy machine, seconds do not. Ours are the real commands with the settings of
params.yaml. What they cost on one tiny film, start-up, is shown apart: it does not grow with the films.
Needs ffmpeg, ffprobe and PySceneDetect (`pip install -e '.[benchmarks]'`).
Example: python -m benchmarks.curation ~/trailer.mp4 --rounds 5
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from data.media_write import write_media

ROOT = Path(__file__).parents[1]
GOAL_DECODE, GOAL_TOOLS = 2.5, 0.5
"""Most that our pass may cost, times decoding; and times the usual tools."""
FRAME_RATE, SAMPLE_RATE_HZ, SHOT_S = 24, 48000, 4
WIDTH, HEIGHT = 1280, 720
GRAIN = 6
"""Levels of noise that make a picture cost about what a filmed one costs to decode; a smooth one costs a third."""


def film(path: Path, seconds: float, grain: int = 0, width: int = WIDTH, height: int = HEIGHT) -> Path:
    """A panning texture with a cut every four seconds and so much grain (levels), and a tone that changes with it."""
    times = np.arange(round(seconds * FRAME_RATE)) / FRAME_RATE
    samples = np.arange(round(seconds * SAMPLE_RATE_HZ)) / SAMPLE_RATE_HZ
    tone = 0.2 * np.sin(2 * np.pi * (300 + 100 * (samples // SHOT_S)) * samples)
    frames = (picture(time, grain, width, height) for time in times)
    waveform = np.stack([tone, tone]).astype(np.float32)
    write_media(path, frames, waveform, frame_rate=FRAME_RATE, sample_rate_hz=SAMPLE_RATE_HZ, crf=20)
    return path


def picture(time: float, grain: int, width: int, height: int) -> NDArray[np.uint8]:
    """What the film shows at a time: (H, W, 3)."""
    shot = int(time // SHOT_S)
    coarse = np.random.default_rng(shot).integers(0, 255, (12, 24, 3), dtype=np.uint8)
    texture = cv2.resize(coarse, (2 * width, height), interpolation=cv2.INTER_CUBIC)
    shift = round((time - shot * SHOT_S) * width / 8)
    noise = np.random.default_rng(round(time * FRAME_RATE)).integers(0, grain + 1, (height, width, 1), dtype=np.uint8)
    return cv2.add(np.ascontiguousarray(texture[:, shift : shift + width]), np.repeat(noise, 3, axis=2))


def cpu_s(command: Sequence[str | Path], folder: Path) -> float:
    """Processor seconds of a command and of all it waited for; a failed one shows what it said."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
    said = folder / "said"
    with said.open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {process.returncode}:\n{said.read_text()[-2000:]}")
    return usage.ru_utime + usage.ru_stime


def decoding(files: Sequence[Path], folder: Path) -> float:
    """Decode everything, keep nothing."""
    words = ("ffmpeg", "-v", "error", "-nostdin", "-threads", "1", "-i")
    return sum(cpu_s([*words, file, "-f", "null", "-"], folder) for file in files)


def ours(files: Sequence[Path], folder: Path) -> dict[str, float]:
    """Our three verbs on a table of the files, from nothing."""
    shutil.rmtree(folder / "data", ignore_errors=True)
    given = folder / "given"
    shutil.rmtree(given, ignore_errors=True)
    given.mkdir()
    for number, file in enumerate(files):
        shutil.copyfile(file, given / f"{number}{file.suffix}")
        (given / f"{number}.txt").write_text("something moves")
    soundstage = (sys.executable, "-m", "tasks", "--params", ROOT / "params.yaml")
    settings = {
        "ingest": [f"source={given}", "engine.num_workers=1"],
        "validate": ["min_sources=1"],
        "cut": ["engine.num_workers=1"],
    }
    return {verb: cpu_s([*soundstage, verb, *words], folder) for verb, words in settings.items()}


def tools(files: Sequence[Path], folder: Path, *, copy: bool) -> float:
    """Find and split scenes, read the headers, decode to the end: PySceneDetect, ffprobe, ffmpeg."""
    scenedetect = Path(sys.executable).with_name("scenedetect")
    split = ["split-video", "--copy"] if copy else ["split-video"]
    total = 0.0
    for file in files:
        total += cpu_s([scenedetect, "-i", file, "-o", folder / "scenes", "detect-content", *split], folder)
        total += cpu_s(["ffprobe", "-v", "error", "-show_format", "-show_streams", "-of", "json", file], folder)
        total += decoding([file], folder)
    return total


def row(name: str, files: Sequence[Path], start_s: float, rounds: int) -> None:
    """Measure one set of files and print its line."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        costs: dict[str, list[float]] = {"decode": [], "ours": [], "encode": [], "copy": []}
        verbs: list[dict[str, float]] = []
        for _ in range(rounds):
            costs["decode"].append(decoding(files, folder))
            verbs.append(ours(files, folder))
            costs["ours"].append(sum(verbs[-1].values()) - start_s)
            costs["encode"].append(tools(files, folder, copy=False))
            costs["copy"].append(tools(files, folder, copy=True))
    middle = {side: statistics.median(values) for side, values in costs.items()}
    ratios = sorted(a / b for a, b in zip(costs["ours"], costs["decode"], strict=True))
    parts = ", ".join(f"{verb} {statistics.median(found[verb] for found in verbs):.1f}" for verb in verbs[0])
    print(
        f"{name}: decode {middle['decode']:.2f} s, ours {middle['ours']:.2f} s + start-up {start_s:.1f} s ({parts})\n"
        f"  ours = {middle['ours'] / middle['decode']:.2f} x decoding ({ratios[0]:.2f} to {ratios[-1]:.2f}; goal"
        f" {GOAL_DECODE:g}); {(middle['ours'] + start_s) / middle['decode']:.2f} x with start-up\n"
        f"  ours = {middle['ours'] / middle['encode']:.2f} x the usual tools (goal {GOAL_TOOLS:g}),"
        f" {middle['ours'] / middle['copy']:.2f} x where they cut without encoding",
        flush=True,
    )


def main() -> None:
    """Print one block a set of files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("films", nargs="*", type=Path, help="further films, each a set of its own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=24.0, help="length of the generated film")
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tiny = film(folder / "tiny.mp4", 1.0, width=64, height=64)
        start_s = statistics.median(sum(ours([tiny], folder).values()) for _ in range(options.rounds))
        for name, grain in (("smooth", 0), ("grainy", GRAIN)):
            generated = film(folder / f"{name}.mp4", options.seconds, grain)
            row(f"generated, {name}, {options.seconds:g} s of {HEIGHT}p", [generated], start_s, options.rounds)
        row("footage of the repository", sorted((ROOT / "data/footage").glob("*.mp4")), start_s, options.rounds)
        for path in options.films:
            row(path.name, [path.resolve()], start_s, options.rounds)


if __name__ == "__main__":
    main()
