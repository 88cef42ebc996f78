"""Picture yardsticks of two media files, whose frames are paired by index on the reference's timeline.

Memory does not grow with the films. What cannot be compared is missing under its name, with the reason.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.media_open import Unreadable
from data.media_timeline import Shown, iter_shown, stated_rate
from metrics.motion import BLOCK_PX, MOVING_LEVELS, STILL_LEVELS, MotionMeter
from metrics.picture import (
    LUMA_CONVENTION,
    MAX_PSNR_DB,
    PSNR_CONVENTION,
    SSIM_CONVENTION,
    PictureMeter,
    PsnrMeter,
    SsimMeter,
    frame_mse,
    luma,
    psnr_db,
    ssim,
)
from metrics.score import Measure, Score

MAX_UNPAIRED = 1
"""So many frames may one film have more than the other, at the end; containers and retiming cost or give one."""
Pair = tuple[Shown, Shown]


_Y = "Y as stored where both files share 8-bit planar format, matrix and range, else " + LUMA_CONVENTION[3:]
_SSIM_Y = f"{_Y}; {SSIM_CONVENTION.partition(', mean over colours, ')[2]}"
_POOLED = "squared error pooled over all frames"
_BLOCKS = f"luma over {BLOCK_PX} px blocks, no warping"
_STILL = f"mean absolute luma difference to the frame before ≤ {STILL_LEVELS} levels, where the reference's is ≥ {MOVING_LEVELS}"
_PLANES = f"planes as stored, {_POOLED}, at most {MAX_PSNR_DB:g} dB: FFmpeg's psnr filter"
_BOXES = "planes as stored, 8x8 px every 4 px, mean over frames: FFmpeg's ssim filter"
_FIRST, _LAST = "the first frame against the given one", "the last frame against the given one"

FILM_MEASURES = {
    "psnr_rgb": Measure("dB", True, PSNR_CONVENTION),
    "psnr_rgb_pooled": Measure("dB", True, f"8-bit RGB, {_POOLED}"),
    "psnr_y": Measure("dB", True, f"{_Y}; mean over frames, an identical frame counts {MAX_PSNR_DB:g} dB"),
    "psnr_y_pooled": Measure("dB", True, f"{_Y}; {_POOLED}"),
    "ssim_rgb": Measure("", True, SSIM_CONVENTION),
    "ssim_y": Measure("", True, _SSIM_Y),
    "identical_frames": Measure("frames", None, "8-bit RGB without any error"),
    "flicker": Measure("levels", False, f"{_BLOCKS}; half the absolute second difference over time"),
    "flicker_excess": Measure("levels", False, f"{_BLOCKS}; flicker less the reference's"),
    "frozen_frames": Measure("frames", False, _STILL),
    "longest_freeze": Measure("frames", False, _STILL),
    "motion_ratio": Measure("", None, f"{_BLOCKS}; absolute frame difference over the reference's"),
    "motion_error": Measure("octaves", False, f"{_BLOCKS}; |log2| of absolute frame difference over the reference's"),
    "first_psnr_rgb": Measure("dB", True, f"{_FIRST}; 8-bit RGB, at most {MAX_PSNR_DB:g} dB"),
    "first_ssim_rgb": Measure("", True, f"{_FIRST}; {SSIM_CONVENTION}"),
    "last_psnr_rgb": Measure("dB", True, f"{_LAST}; 8-bit RGB, at most {MAX_PSNR_DB:g} dB"),
    "last_ssim_rgb": Measure("", True, f"{_LAST}; {SSIM_CONVENTION}"),
}
"""What `compare_films` scores."""
PLANE_MEASURES = {
    **{f"psnr_ffmpeg_{name}": Measure("dB", True, _PLANES) for name in ("y", "u", "v", "average")},
    **{f"ssim_ffmpeg_{name}": Measure("", True, _BOXES) for name in ("y", "u", "v", "all")},
}
"""What `compare_planes` scores; `average` and `all` weigh planes by their area."""


def compare_films(
    reference: Path,
    generated: Path,
    *,
    first_HWC: NDArray[np.uint8] | None = None,
    last_HWC: NDArray[np.uint8] | None = None,
) -> dict[str, Score]:
    """Every score of `FILM_MEASURES`.

    Args:
        first_HWC: RGB keyframe that the generated film should begin with; None is the reference's first frame.
        last_HWC: The one that it should end with; None is the reference's last.
    """
    pictures, motion = PictureMeter(), MotionMeter()
    first = last = None
    try:
        for pair in paired(reference, generated):
            lumas = lumas_of(pair)
            pictures.add(pair[0].rgb, pair[1].rgb, lumas)
            motion.add(*lumas)
            first, last = first or pair, pair
    except (Unreadable, Unpaired) as error:
        return dict.fromkeys(FILM_MEASURES, Score.missing(str(error)))
    found = pictures.result()
    scores = {
        "psnr_rgb": found.psnr_rgb.mean,
        "psnr_rgb_pooled": found.psnr_rgb.pooled,
        "psnr_y": found.psnr_y.mean,
        "psnr_y_pooled": found.psnr_y.pooled,
        "ssim_rgb": found.ssim_rgb,
        "ssim_y": found.ssim_y,
        "identical_frames": Score(float(found.psnr_rgb.num_identical)),
        **motion.result()._asdict(),
    }
    for name, pair, keyframe_HWC in (("first", first, first_HWC), ("last", last, last_HWC)):
        assert pair is not None  # a film without frames is unreadable
        given_HWC = pair[0].rgb if keyframe_HWC is None else keyframe_HWC
        scores[f"{name}_psnr_rgb"], scores[f"{name}_ssim_rgb"] = keyframe_scores(given_HWC, pair[1].rgb)
    return scores


def keyframe_scores(given_HWC: NDArray[np.uint8], made_HWC: NDArray[np.uint8]) -> tuple[Score, Score]:
    """PSNR, dB, and SSIM of a frame against the keyframe it was made from; missing where sizes differ."""
    if given_HWC.shape != made_HWC.shape:
        missing = Score.missing(f"the keyframe is {size_of(given_HWC)}, the film {size_of(made_HWC)}")
        return missing, missing
    return psnr_db(given_HWC[None], made_HWC[None]).mean, ssim(given_HWC[None], made_HWC[None])


def compare_planes(reference: Path, generated: Path) -> dict[str, Score]:
    """Every score of `PLANE_MEASURES`, for a comparison with published numbers; no colour is converted."""
    errors, similarities = [PsnrMeter() for _ in range(3)], [SsimMeter("ffmpeg") for _ in range(3)]
    average = PsnrMeter()
    areas = np.ones(3)
    try:
        for left, right in paired(reference, generated):
            if left.coding is None or left.coding != right.coding:
                raise Unpaired(f"planes are coded differently: {left.coding} and {right.coding}")
            areas = np.array([plane.size for plane in left.planes], np.float64)
            squared: list[float] = []
            for index, pair in enumerate(zip(left.planes, right.planes, strict=True)):
                squared.append(frame_mse(*pair))
                errors[index].add(squared[-1])
                similarities[index].add(*pair)
            average.add(float(np.average(squared, weights=areas)))
    except (Unreadable, Unpaired) as error:
        return dict.fromkeys(PLANE_MEASURES, Score.missing(str(error)))
    psnrs = [meter.result().pooled for meter in (*errors, average)]
    ssims = [meter.result() for meter in similarities]
    lacking = next((item for item in ssims if item.value is None), None)
    everything = lacking or Score(float(np.average([item.value or 0.0 for item in ssims], weights=areas)))
    return dict(zip(PLANE_MEASURES, (*psnrs, *ssims, everything), strict=True))


class Unpaired(ValueError):
    """Films whose frames cannot be compared one by one; the message says why."""


def paired(reference: Path, generated: Path) -> Generator[Pair]:
    """Frames of both films that are on screen at the same instant, every one of the reference's frame times.

    Raises:
        Unpaired: their sizes differ, or one outlasts the other by more than `MAX_UNPAIRED` frames.
        Unreadable: one does not decode; the message begins with its name.
    """
    with naming(reference):
        rate = stated_rate(reference)
    num_unpaired = 0
    with (
        contextlib.closing(frames_of(reference, rate)) as left,
        contextlib.closing(frames_of(generated, rate)) as right,
    ):
        for index, pair in enumerate(itertools.zip_longest(left, right)):
            if pair[0] is None or pair[1] is None:
                shorter, longer = (reference, generated) if pair[0] is None else (generated, reference)
                num_unpaired += 1
                if num_unpaired > MAX_UNPAIRED:
                    ends = f"{shorter.name} ends after {index + 1 - num_unpaired} frames at {float(rate):g} frames/s"
                    raise Unpaired(f"{ends}, {longer.name} goes on; limit {MAX_UNPAIRED} frame")
                continue
            if (sizes := [item.size for item in pair])[0] != sizes[1]:
                texts = [
                    f"{path.name} is {width}x{height} px"
                    for path, (height, width) in zip((reference, generated), sizes, strict=True)
                ]
                raise Unpaired(", ".join(texts))
            yield pair


def frames_of(path: Path, rate: Fraction) -> Generator[Shown]:
    """The film's pictures; what is wrong with it is told with its name."""
    with naming(path):
        yield from iter_shown(path, rate)


@contextlib.contextmanager
def naming(path: Path) -> Generator[None]:
    """Put the file's name before what is wrong with it."""
    try:
        yield
    except Unreadable as error:
        raise Unreadable(f"{path.name} {error}") from error


def lumas_of(pair: Pair) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Y of both, as stored where that means the same, else of RGB."""
    left, right = pair
    if left.coding is not None and left.coding == right.coding:
        return left.planes[0], right.planes[0]
    return luma(left.rgb), luma(right.rgb)


def size_of(frame_HWC: NDArray[np.uint8]) -> str:
    """Width and height in words."""
    return f"{frame_HWC.shape[1]}x{frame_HWC.shape[0]} px"
