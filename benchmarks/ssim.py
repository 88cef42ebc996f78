"""SSIM against scikit-image: same value, how much faster.

Both sides in one process on one thread, alternating, median of several; a ratio survives a noisy machine, seconds
do not. Example: python -m benchmarks.ssim
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any, cast

import cv2
import numpy as np
from numpy.typing import NDArray
from skimage.metrics import structural_similarity  # pyright: ignore[reportUnknownVariableType] # has no types

from metrics.picture import ssim

FRAMES, SIDE_PX, ROUNDS = 8, 256, 7


def clips() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """A smooth moving pattern, and the same with noise."""
    random = np.random.default_rng(0)
    y, x, t = np.meshgrid(np.arange(SIDE_PX), np.arange(SIDE_PX), np.arange(FRAMES), indexing="ij")
    clean = np.stack([128 + 60 * np.sin((x + 4 * t) / 9 + c) + 50 * np.cos(y / 7 - c) for c in range(3)], axis=-1)
    clean = np.moveaxis(clean, 2, 0).clip(0, 255)
    noisy = (clean + random.normal(0, 8, clean.shape)).clip(0, 255)
    return clean.astype(np.uint8), noisy.astype(np.uint8)


def theirs(reference: NDArray[np.uint8], distorted: NDArray[np.uint8]) -> float:
    """scikit-image with the settings of Wang et al. 2004."""
    settings: dict[str, Any] = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    scores = [
        cast(float, cast(Any, structural_similarity)(a, b, channel_axis=-1, data_range=255, **settings))
        for a, b in zip(reference, distorted, strict=True)
    ]
    return statistics.fmean(scores)


def ours(reference: NDArray[np.uint8], distorted: NDArray[np.uint8]) -> float:
    """The project's."""
    return ssim(reference, distorted).value or 0.0


def main() -> None:
    """Print both values and the ratio of the median times."""
    cv2.setNumThreads(1)
    reference, distorted = clips()
    seconds: dict[str, list[float]] = {"ours": [], "scikit-image": []}
    values: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, function in (("ours", ours), ("scikit-image", theirs)):
            start = time.perf_counter()
            values[name] = function(reference, distorted)
            seconds[name].append(time.perf_counter() - start)
    ratio = statistics.median(seconds["scikit-image"]) / statistics.median(seconds["ours"])
    ratios = sorted(a / b for a, b in zip(seconds["scikit-image"], seconds["ours"], strict=True))
    sys.stdout.write(
        f"SSIM of {FRAMES} frames of {SIDE_PX}x{SIDE_PX} px: ours {values['ours']:.7f}, "
        f"scikit-image {values['scikit-image']:.7f}\n"
        f"ours is {ratio:.1f} times as fast (of {ROUNDS} pairs: {ratios[0]:.1f} to {ratios[-1]:.1f})\n"
    )


if __name__ == "__main__":
    main()
