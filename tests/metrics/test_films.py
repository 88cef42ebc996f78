"""Film against film: FFmpeg's own filters, the reader's pairs, every score the right way, what is missing and why."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import av.error
import numpy as np
import pytest
from av.filter import Graph
from numpy.typing import NDArray

from data.media import write_media
from data.media_timeline import iter_shown
from metrics.films import FILM_MEASURES, PLANE_MEASURES, compare_films, compare_planes
from metrics.picture import psnr_db

FOOTAGE = Path(__file__).parents[2] / "data/footage/bbb_rabbit_wakes.mp4"
NUM_FRAMES = 24


@pytest.fixture(scope="module")
def real() -> list[NDArray[np.uint8]]:
    return [shown.rgb for shown, _ in zip(iter_shown(FOOTAGE, Fraction(24)), range(NUM_FRAMES), strict=False)]


@pytest.fixture(scope="module")
def ladder(real: list[NDArray[np.uint8]], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same frames at several qualities, in containers of unlike clocks."""
    folder = tmp_path_factory.mktemp("ladder")
    paths = {crf: folder / f"{crf}.{'mkv' if crf == 30 else 'mp4'}" for crf in (10, 20, 30, 40)}
    for crf, path in paths.items():
        container = "matroska" if crf == 30 else "mp4"
        write_media(path, real, None, frame_rate=24, sample_rate_hz=48000, crf=crf, container=container)
    return paths


def film(path: Path, frames: list[NDArray[np.uint8]], **options: object) -> Path:
    write_media(path, frames, None, **({"frame_rate": 24, "sample_rate_hz": 48000, "crf": 10} | options))  # pyright: ignore[reportArgumentType]
    return path


def filtered(kind: str, reference: Path, distorted: Path) -> list[dict[str, str]]:
    """What FFmpeg's filter says of every pair, its frames timed by their index."""
    graph = Graph()
    with av.open(str(distorted)) as left, av.open(str(reference)) as right:
        videos = [item.streams.video[0] for item in (left, right)]
        size = f"video_size={videos[0].width}x{videos[0].height}:pix_fmt=yuv420p:time_base=1/24"
        buffers = [graph.add("buffer", size) for _ in videos]
        judge, sink = graph.add(kind), graph.add("buffersink")
        for index, buffer in enumerate(buffers):
            buffer.link_to(judge, 0, index)
        judge.link_to(sink)
        graph.configure(auto_buffer=False)
        found: list[dict[str, str]] = []
        for index, pair in enumerate(zip(left.decode(videos[0]), right.decode(videos[1]), strict=True)):
            for frame, buffer in zip(pair, buffers, strict=True):
                frame.pts, frame.time_base = index, Fraction(1, 24)
                buffer.push(frame)
            found += pulled(sink)
        for buffer in buffers:
            buffer.push(None)
        return found + list(pulled(sink))


def pulled(sink: av.filter.context.FilterContext) -> Iterator[dict[str, str]]:
    with contextlib.suppress(av.error.BlockingIOError, av.error.EOFError):
        while True:
            yield sink.pull().metadata


@pytest.mark.parametrize("crf", [30, 40])
def test_planes_equal_ffmpegs_own_filters_on_a_real_clip(ladder: dict[int, Path], crf: int) -> None:
    found = compare_planes(ladder[10], ladder[crf])
    assert set(found) == set(PLANE_MEASURES)
    rows = filtered("ssim", ladder[10], ladder[crf])
    assert len(rows) == NUM_FRAMES
    for name, theirs in (("y", "Y"), ("u", "U"), ("v", "V"), ("all", "All")):
        expected = np.mean([float(row[f"lavfi.ssim.{theirs}"]) for row in rows])
        assert found[f"ssim_ffmpeg_{name}"].value == pytest.approx(expected, abs=2e-6), name
    rows = filtered("psnr", ladder[10], ladder[crf])
    for name, theirs in (("y", "mse.y"), ("u", "mse.u"), ("v", "mse.v"), ("average", "mse_avg")):
        mse = np.mean([float(row[f"lavfi.psnr.{theirs}"]) for row in rows])
        expected = 20 * math.log10(255) - 10 * math.log10(mse)
        assert found[f"psnr_ffmpeg_{name}"].value == pytest.approx(expected, abs=1e-4), name
    assert compare_films(ladder[10], ladder[crf])["psnr_y_pooled"] == found["psnr_ffmpeg_y"]


def test_rgb_scores_are_those_of_the_frames(ladder: dict[int, Path]) -> None:
    clips = [np.stack([shown.rgb for shown in iter_shown(ladder[crf], Fraction(24))]) for crf in (10, 30)]
    found = compare_films(ladder[10], ladder[30])
    assert set(found) == set(FILM_MEASURES)
    expected = psnr_db(clips[0], clips[1])
    assert (found["psnr_rgb"], found["psnr_rgb_pooled"]) == (expected.mean, expected.pooled)
    assert found["last_psnr_rgb"] == psnr_db(clips[0][-1:], clips[1][-1:]).mean


def test_a_lower_quality_scores_worse_at_every_rung(ladder: dict[int, Path]) -> None:
    rungs = [compare_films(ladder[10], ladder[crf]) for crf in (10, 20, 30, 40)]
    planes = [compare_planes(ladder[10], ladder[crf]) for crf in (10, 20, 30, 40)]
    assert rungs[0]["identical_frames"].value == NUM_FRAMES
    for name in ("psnr_rgb", "psnr_y", "psnr_rgb_pooled", "ssim_rgb", "ssim_y", "first_psnr_rgb", "last_ssim_rgb"):
        values = [rung[name].value or 0.0 for rung in rungs]
        assert values == sorted(set(values), reverse=True), name
    for name in PLANE_MEASURES:
        values = [rung[name].value or 0.0 for rung in planes]
        assert values == sorted(set(values), reverse=True), name


def test_a_delay_costs_the_more_the_longer_it_is(real: list[NDArray[np.uint8]], tmp_path: Path) -> None:
    moving = [np.roll(real[0], 3 * index, axis=1) for index in range(16)]
    reference = film(tmp_path / "reference.mp4", moving)
    values = []
    for delay in (0, 1, 3, 6):
        late = film(tmp_path / f"{delay}.mp4", [moving[0]] * delay + moving[: 16 - delay])
        scores = compare_films(reference, late)
        assert scores["frozen_frames"].value == scores["longest_freeze"].value == delay
        assert (scores["first_psnr_rgb"].value or 0) > 40
        values.append((scores["psnr_rgb"].value, scores["ssim_rgb"].value))
    assert values == sorted(values, reverse=True)


def test_another_rate_is_compared_at_the_instants_of_the_reference(tmp_path: Path) -> None:
    greys = [np.full((32, 48, 3), 8 * index, np.uint8) for index in range(24)]
    slow = film(tmp_path / "12.mp4", greys[::2], frame_rate=12)
    fast = film(tmp_path / "24.mp4", greys)
    assert (compare_films(slow, fast)["psnr_rgb"].value or 0) > 45
    scores = compare_films(fast, slow)  # every second frame is the one before: 8 levels off
    assert scores["frozen_frames"].value == 12
    assert scores["identical_frames"].value == 12
    assert scores["psnr_rgb_pooled"].value == pytest.approx(20 * math.log10(255 / 8) + 10 * math.log10(2), abs=0.3)


def test_a_film_stored_lying_is_compared_upright(real: list[NDArray[np.uint8]], tmp_path: Path) -> None:
    upright = film(tmp_path / "upright.mp4", real[:4])
    lying = film(tmp_path / "lying.mp4", [np.rot90(frame) for frame in real[:4]], rotation_deg=90)
    scores = compare_films(upright, lying)
    assert (scores["psnr_rgb"].value or 0) > 35
    assert (
        "coded differently"
        in compare_planes(upright, film(tmp_path / "444.mp4", real[:4], pixel_format="yuv444p"))["psnr_ffmpeg_y"].reason
    )


def test_keyframes_are_compared_with_the_first_and_the_last_frame(
    ladder: dict[int, Path], real: list[NDArray[np.uint8]]
) -> None:
    right = compare_films(ladder[10], ladder[20], first_HWC=real[0], last_HWC=real[-1])
    swapped = compare_films(ladder[10], ladder[20], first_HWC=real[-1], last_HWC=255 - real[-1])
    for name in ("first_psnr_rgb", "first_ssim_rgb", "last_psnr_rgb", "last_ssim_rgb"):
        assert (right[name].value or 0) > (swapped[name].value or 0), name
    assert right["psnr_rgb"] == swapped["psnr_rgb"]
    small = compare_films(ladder[10], ladder[20], first_HWC=real[0][::2, ::2])
    assert small["first_psnr_rgb"].reason == "the keyframe is 160x90 px, the film 320x180 px"
    assert small["last_psnr_rgb"].value is not None


def test_what_cannot_be_compared_is_missing_under_every_name(ladder: dict[int, Path], tmp_path: Path) -> None:
    frames = [np.full((32, 48, 3), index, np.uint8) for index in range(8)]
    reference = film(tmp_path / "reference.mp4", frames)
    (tmp_path / "empty.mp4").touch()
    for other, reason in (
        (
            film(tmp_path / "short.mp4", frames[:6]),
            "short.mp4 ends after 6 frames at 24 frames/s, reference.mp4 goes on; limit 1 frame",
        ),
        (
            film(tmp_path / "wide.mp4", [np.zeros((32, 64, 3), np.uint8)] * 8),
            "reference.mp4 is 48x32 px, wide.mp4 is 64x32 px",
        ),
        (tmp_path / "empty.mp4", "empty.mp4 is empty"),
        (tmp_path / "none.mp4", "none.mp4 there is no such file"),
    ):
        for scores, names in (
            (compare_films(reference, other), FILM_MEASURES),
            (compare_planes(reference, other), PLANE_MEASURES),
        ):
            assert set(scores) == set(names)
            assert {(score.value, score.reason) for score in scores.values()} == {(None, reason)}
    assert compare_films(reference, film(tmp_path / "less.mp4", frames[:7]))["psnr_rgb"].value is not None
    tiny = film(tmp_path / "tiny.mp4", [np.zeros((8, 48, 3), np.uint8)] * 3)
    assert "smaller than the window of 11 px" in compare_films(tiny, tiny)["ssim_rgb"].reason
    assert compare_films(tiny, tiny)["psnr_rgb"].value == 100
    assert "24x4 px are smaller than the window of 8 px" in compare_planes(tiny, tiny)["ssim_ffmpeg_all"].reason
