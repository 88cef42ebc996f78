"""Picture yardsticks against others: the same values, how much faster.

* SSIM and PSNR of 49 frames of 512x512 RGB against torchmetrics, frame by frame, in its convention and in ours.
* Two 720p H.264 films, decoding included on both sides, against FFmpeg's psnr and ssim filters in one graph: their own
  scores (`compare_planes`), and everything we score (`compare_films`).

Both sides in one process on one thread each, in turns; processor time, so that what else the machine does is not in
it; the ratio is the median over rounds, with the least and the most. Memory is the most that Python and NumPy held.
Results go to benchmarks/results/picture.json. Example: python -m benchmarks.picture
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import av
import av.error
import cv2
import numpy as np
import torch
from av.filter import Graph
from numpy.typing import NDArray
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

from data.files import write_text
from data.media import write_media
from metrics.films import compare_films, compare_planes
from metrics.picture import psnr_db, ssim
from metrics.ssim import Convention

FRAMES, SIDE_PX, ROUNDS = 49, 512, 5
FILM_FRAMES, HEIGHT_PX, WIDTH_PX = 48, 720, 1280
RESULTS = Path(__file__).parent / "results" / "picture.json"
Frames = NDArray[np.uint8]


def pattern(num_frames: int, height: int, width: int) -> Iterator[Frames]:
    """A smooth moving pattern with grain that stays."""
    grain = np.random.default_rng(0).normal(0, 4, (height, width, 3))
    y, x, c = np.meshgrid(np.arange(height), np.arange(width), np.arange(3), indexing="ij")
    for index in range(num_frames):
        frame = 128 + 60 * np.sin((x + 4 * index) / 9 + c) + 50 * np.cos(y / 7 - c) + grain
        yield frame.clip(0, 255).astype(np.uint8)


def in_turns(sides: dict[str, Callable[[], Any]]) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """What every side returns, and its processor seconds by round; a first round warms up."""
    values: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(ROUNDS + 1):
        for name, function in sides.items():
            start = time.process_time()
            values[name] = function()
            if number:
                seconds[name].append(time.process_time() - start)
    return values, seconds


def ratios(theirs: list[float], ours: list[float]) -> dict[str, float]:
    """How many times as fast ours is."""
    each = sorted(a / b for a, b in zip(theirs, ours, strict=True))
    return {"times_as_fast": statistics.median(each), "least": each[0], "most": each[-1]}


def torchmetrics_side(reference: Frames, distorted: Frames) -> tuple[float, float]:
    """PSNR over all frames, dB, and mean SSIM."""
    similarities: list[float] = []
    errors: list[float] = []
    for pair in zip(reference, distorted, strict=True):
        real, made = (torch.from_numpy(frame).permute(2, 0, 1)[None].float() for frame in pair)
        _, full = cast(
            "tuple[torch.Tensor, torch.Tensor]",
            structural_similarity_index_measure(made, real, data_range=255.0, return_full_image=True),
        )
        similarities.append(float(full.mean()))
        errors.append(10 ** (-float(peak_signal_noise_ratio(made, real, data_range=255.0)) / 10))
    return -10 * math.log10(statistics.fmean(errors)), statistics.fmean(similarities)


def our_side(reference: Frames, distorted: Frames, convention: Convention) -> tuple[float, float]:
    """Likewise ours."""
    return psnr_db(reference, distorted).pooled.value or 0.0, ssim(reference, distorted, convention).value or 0.0


def against_torchmetrics() -> dict[str, Any]:
    """Arrays against arrays."""
    random = np.random.default_rng(1)
    reference = np.stack(list(pattern(FRAMES, SIDE_PX, SIDE_PX)))
    distorted = (reference + random.normal(0, 8, reference.shape)).clip(0, 255).astype(np.uint8)
    values, seconds = in_turns(
        {
            "torchmetrics": lambda: torchmetrics_side(reference, distorted),
            "ours": lambda: our_side(reference, distorted, "gaussian_reflect"),
            "headline": lambda: our_side(reference, distorted, "gaussian"),
        }
    )
    psnrs, ssims = zip(values["torchmetrics"], values["ours"], strict=True)
    return {
        "frames": f"{FRAMES} of {SIDE_PX}x{SIDE_PX}",
        "psnr_db": {"torchmetrics": psnrs[0], "ours": psnrs[1], "difference": abs(psnrs[0] - psnrs[1])},
        "ssim": {"torchmetrics": ssims[0], "ours": ssims[1], "difference": abs(ssims[0] - ssims[1])},
        "in torchmetrics' convention": ratios(seconds["torchmetrics"], seconds["ours"]),
        "in the headline's": ratios(seconds["torchmetrics"], seconds["headline"]),
        "our_ms_a_frame": 1000 * statistics.median(seconds["ours"]) / FRAMES,
    }


def filters(reference: Path, distorted: Path) -> dict[str, float]:
    """FFmpeg's psnr and ssim filters over both files, frames timed by their index."""
    rows: list[dict[str, str]] = []
    with av.open(str(distorted)) as left, av.open(str(reference)) as right:
        videos = [item.streams.video[0] for item in (left, right)]
        for video in videos:
            video.codec_context.thread_count = 1
        graph = Graph()
        graph.threads = 1
        size = f"video_size={WIDTH_PX}x{HEIGHT_PX}:pix_fmt=yuv420p:time_base=1/24"
        buffers, splits = [graph.add("buffer", size) for _ in videos], [graph.add("split") for _ in videos]
        judges = [graph.add("psnr"), graph.add("ssim")]
        sinks = [graph.add("buffersink") for _ in judges]
        for index, (buffer, split) in enumerate(zip(buffers, splits, strict=True)):
            buffer.link_to(split)
            for output, judge in enumerate(judges):
                split.link_to(judge, output, index)
        for judge, sink in zip(judges, sinks, strict=True):
            judge.link_to(sink)
        graph.configure(auto_buffer=False)
        for index, pair in enumerate(zip(left.decode(videos[0]), right.decode(videos[1]), strict=True)):
            for frame, buffer in zip(pair, buffers, strict=True):
                frame.pts, frame.time_base = index, Fraction(1, 24)
                buffer.push(frame)
            rows.append(pulled(sinks))
        for buffer in buffers:
            buffer.push(None)
        rows.append(pulled(sinks))
    mse = statistics.fmean(float(row["lavfi.psnr.mse_avg"]) for row in rows if "lavfi.psnr.mse_avg" in row)
    return {
        "psnr_ffmpeg_average": 10 * math.log10(255**2 / mse),
        "ssim_ffmpeg_all": statistics.fmean(float(row["lavfi.ssim.All"]) for row in rows if "lavfi.ssim.All" in row),
    }


def pulled(sinks: list[Any]) -> dict[str, str]:
    """What the filters say of the frame that is ready, if one is."""
    found: dict[str, str] = {}
    for sink in sinks:
        with contextlib.suppress(av.error.BlockingIOError, av.error.EOFError):
            found |= sink.pull().metadata
    return found


def decoded(*paths: Path) -> None:
    """Both files, for what decoding alone takes."""
    for path in paths:
        with av.open(str(path)) as container:
            video = container.streams.video[0]
            video.codec_context.thread_count = 1
            for _ in container.decode(video):
                pass


def held_mib(function: Callable[[], Any]) -> float:
    """The most memory that it held at once, MiB."""
    tracemalloc.start()
    function()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most / 2**20


def against_ffmpeg(folder: Path) -> dict[str, Any]:
    """Files against files, and how our memory grows with them."""
    paths: dict[str, tuple[Path, Path]] = {}
    for name, count in (("short", FILM_FRAMES // 4), ("long", FILM_FRAMES)):
        paths[name] = folder / f"{name}-10.mp4", folder / f"{name}-30.mp4"
        for path, crf in zip(paths[name], (10, 30), strict=True):
            frames = pattern(count, HEIGHT_PX, WIDTH_PX)
            write_media(path, frames, None, frame_rate=24, sample_rate_hz=48000, crf=crf)
    pair = paths["long"]
    values, seconds = in_turns(
        {
            "ffmpeg": lambda: filters(*pair),
            "planes": lambda: compare_planes(*pair),
            "films": lambda: compare_films(*pair),
            "decoding": lambda: decoded(*pair),
        }
    )
    milliseconds = {name: 1000 * statistics.median(item) / FILM_FRAMES for name, item in seconds.items()}
    return {
        "frames": f"{FILM_FRAMES} of {WIDTH_PX}x{HEIGHT_PX}",
        "ffmpeg": values["ffmpeg"],
        "ours": {name: values["planes"][name].value for name in values["ffmpeg"]},
        "FFmpeg's own scores": ratios(seconds["ffmpeg"], seconds["planes"]),
        "all our scores": ratios(seconds["ffmpeg"], seconds["films"]),
        "ms_a_frame": milliseconds,
        "films_held_mib": {name: held_mib(lambda pair=pair: compare_films(*pair)) for name, pair in paths.items()},
    }


def main() -> None:
    """Print and keep the ratios."""
    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "versions": {name: version(name) for name in ("numpy", "opencv-python-headless", "torchmetrics", "av")},
            "torchmetrics": against_torchmetrics(),
            "ffmpeg": against_ffmpeg(Path(folder)),
        }
    text = json.dumps(found, indent=1) + "\n"
    write_text(RESULTS, text)
    print(text, end="")


if __name__ == "__main__":
    main()
