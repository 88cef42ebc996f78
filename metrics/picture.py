"""Picture yardsticks on 8-bit RGB frames: PSNR and SSIM.

Legend: F frames, H height, W width, C = 3 colours in RGB order. Frames are paired by index.
"""

from __future__ import annotations

from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from metrics.score import Score

PEAK = 255.0
MAX_PSNR_DB = 100.0
"""What an identical frame counts as. One level off in one colour of one pixel of 4096x4096 is already 125 dB,
so the cap is stated in the convention and identical frames are counted beside the mean."""
WINDOW_PX, SIGMA_PX = 11, 1.5
K1, K2 = 0.01, 0.03
"""Window and stabilisers of Wang et al. 2004, "Image quality assessment", section III-B and III-C."""

PSNR_CONVENTION = f"8-bit RGB, mean over frames, an identical frame counts {MAX_PSNR_DB:g} dB"
SSIM_CONVENTION = "8-bit RGB, mean over colours, Gaussian 11 px sigma 1.5, biased variance, 5 px border left out"


class Psnr(NamedTuple):
    """Peak signal-to-noise ratio of a clip, dB."""

    mean: Score
    """Mean of the frames' values: the headline."""
    pooled: Score
    """From the squared error pooled over all frames: what torchmetrics and ffmpeg call the average."""
    num_identical: int
    """Frames without any error, each counted as the cap."""


def psnr_db(reference_FHWC: NDArray[np.uint8], distorted_FHWC: NDArray[np.uint8]) -> Psnr:
    """PSNR of a clip, capped at 100 dB.

    Raises:
        ValueError: the clips differ in shape.
    """
    check_pair(reference_FHWC, distorted_FHWC)
    if not len(reference_FHWC):
        missing = Score.missing("the clip has no frames")
        return Psnr(missing, missing, 0)
    mse_F = np.array([frame_mse(*pair) for pair in zip(reference_FHWC, distorted_FHWC, strict=True)])
    return Psnr(
        mean=Score(float(np.mean(to_db(mse_F)))),
        pooled=Score(float(to_db(np.array([mse_F.mean()]))[0])),
        num_identical=int((mse_F == 0).sum()),
    )


def frame_mse(reference_HWC: NDArray[np.uint8], distorted_HWC: NDArray[np.uint8]) -> float:
    """Mean squared error of one frame, squared levels; exact, since the sum stays an integer."""
    difference = reference_HWC.astype(np.int32) - distorted_HWC
    return float(np.sum(difference * difference, dtype=np.int64)) / difference.size


def to_db(mse: NDArray[np.float64]) -> NDArray[np.float64]:
    """Squared error to dB below the peak, at most the cap."""
    smallest = PEAK**2 / 10 ** (MAX_PSNR_DB / 10)
    return 10 * np.log10(PEAK**2 / np.maximum(mse, smallest))


def ssim(reference_FHWC: NDArray[np.uint8], distorted_FHWC: NDArray[np.uint8]) -> Score:
    """Structural similarity of a clip, mean over frames, colours and the pixels whose window lies inside.

    Raises:
        ValueError: the clips differ in shape.
    """
    check_pair(reference_FHWC, distorted_FHWC)
    num_frames, height, width, _ = reference_FHWC.shape
    if not num_frames:
        return Score.missing("the clip has no frames")
    if min(height, width) < WINDOW_PX:
        return Score.missing(f"frames of {width}x{height} px are smaller than the window of {WINDOW_PX} px")
    pairs = zip(reference_FHWC, distorted_FHWC, strict=True)
    return Score(float(np.mean([frame_ssim(reference, distorted) for reference, distorted in pairs])))


def frame_ssim(reference_HWC: NDArray[np.uint8], distorted_HWC: NDArray[np.uint8]) -> float:
    """SSIM of one frame from four blurs: both means, the summed squares and the product."""
    x, y = reference_HWC.astype(np.float64), distorted_HWC.astype(np.float64)
    mean_x, mean_y = blur(x), blur(y)
    squares, product = blur(x * x + y * y), blur(x * y)
    c1, c2 = (K1 * PEAK) ** 2, (K2 * PEAK) ** 2
    means_squared = mean_x * mean_x + mean_y * mean_y
    luminance = (2 * mean_x * mean_y + c1) / (means_squared + c1)
    structure = (2 * (product - mean_x * mean_y) + c2) / (squares - means_squared + c2)
    border = WINDOW_PX // 2
    return float(np.mean((luminance * structure)[border:-border, border:-border]))


def blur(image_HWC: NDArray[np.float64]) -> NDArray[np.float64]:
    """The Gaussian-weighted local mean of every colour."""
    kernel = cv2.getGaussianKernel(WINDOW_PX, SIGMA_PX, cv2.CV_64F)
    return np.asarray(cv2.sepFilter2D(image_HWC, cv2.CV_64F, kernel, kernel), dtype=np.float64)


def check_pair(reference_FHWC: NDArray[np.uint8], distorted_FHWC: NDArray[np.uint8]) -> None:
    """Refuse what cannot be compared frame by frame."""
    for name, frames in (("reference", reference_FHWC), ("distorted", distorted_FHWC)):
        if frames.ndim != 4 or frames.shape[3] != 3 or frames.dtype != np.uint8:
            raise ValueError(f"{name} is {frames.dtype} {frames.shape}; frames are uint8 (frames, height, width, 3)")
    if reference_FHWC.shape != distorted_FHWC.shape:
        raise ValueError(f"reference is {reference_FHWC.shape}, distorted {distorted_FHWC.shape}; retime or resize")
