"""Picture yardsticks on 8-bit frames: PSNR and SSIM of RGB and of luma, frame after frame in constant memory.

Legend: F frames, H height, W width, C = 3 colours in RGB order. Frames are paired by index.
"""

from __future__ import annotations

from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from metrics.score import Score
from metrics.ssim import PEAK, Convention, picture_ssim, smallest_px

MAX_PSNR_DB = 100.0
"""What an identical frame counts as. One level off in one colour of one pixel of 4096x4096 is already 125 dB,
so the cap is stated in the convention and identical frames are counted beside the mean."""
LUMA = np.array([[0.2126, 0.7152, 0.0722, 0.0]]) * (219 / 255) + np.array([[0, 0, 0, 16.0]])
"""Y of 8-bit RGB: 16 + 219/255 · (0.2126 R + 0.7152 G + 0.0722 B), rounded to 8 bits. Source: ITU-R BT.709-6, 3.2, 4.6."""
NO_FRAMES = "the clip has no frames"

PSNR_CONVENTION = f"8-bit RGB, mean over frames, an identical frame counts {MAX_PSNR_DB:g} dB"
SSIM_CONVENTION = "8-bit RGB, mean over colours, Gaussian 11 px sigma 1.5, biased variance, 5 px border left out"
LUMA_CONVENTION = "Y: 8-bit BT.709 of limited range, rounded; peak 255"


class Psnr(NamedTuple):
    """Peak signal-to-noise ratio of a clip, dB."""

    mean: Score
    """Mean of the frames' values: the headline."""
    pooled: Score
    """From the squared error pooled over all frames: what torchmetrics and ffmpeg call the average."""
    num_identical: int
    """Frames without any error, each counted as the cap."""


class PictureScores(NamedTuple):
    """What `PictureMeter` found; SSIM is the mean over frames."""

    num_frames: int
    psnr_rgb: Psnr
    psnr_y: Psnr
    ssim_rgb: Score
    ssim_y: Score


class PsnrMeter:
    """PSNR of frames given one after the other, by their mean squared errors."""

    def __init__(self) -> None:
        self._num_frames, self._num_identical, self._sum_db, self._sum_mse = 0, 0, 0.0, 0.0

    def add(self, mse: float) -> None:
        """The next frame's mean squared error, squared levels."""
        self._num_frames += 1
        self._num_identical += mse == 0
        self._sum_db += to_db(mse)
        self._sum_mse += mse

    def result(self) -> Psnr:
        """Of the frames so far."""
        if not self._num_frames:
            missing = Score.missing(NO_FRAMES)
            return Psnr(missing, missing, 0)
        mean, pooled = self._sum_db / self._num_frames, to_db(self._sum_mse / self._num_frames)
        return Psnr(Score(mean), Score(pooled), self._num_identical)


class SsimMeter:
    """SSIM of pictures given one after the other, (H, W) or (H, W, C)."""

    def __init__(self, convention: Convention = "gaussian") -> None:
        self._convention: Convention = convention
        self._num_frames, self._sum, self._reason = 0, 0.0, ""

    def add(self, reference: NDArray[np.uint8], distorted: NDArray[np.uint8]) -> None:
        """The next pair."""
        height, width = reference.shape[:2]
        if min(height, width) < (least := smallest_px(self._convention)):
            self._reason = f"frames of {width}x{height} px are smaller than the window of {least} px"
            return
        self._num_frames += 1
        self._sum += picture_ssim(reference, distorted, self._convention)

    def result(self) -> Score:
        """Mean over the frames so far."""
        if self._num_frames and not self._reason:
            return Score(self._sum / self._num_frames)
        return Score.missing(self._reason or NO_FRAMES)


class PictureMeter:
    """PSNR and SSIM of RGB and luma of frames given one after the other; memory does not grow with the clip."""

    def __init__(self, convention: Convention = "gaussian") -> None:
        self._num_frames, self._shape = 0, (0, 0, 0)
        self._psnr_rgb, self._psnr_y = PsnrMeter(), PsnrMeter()
        self._ssim_rgb, self._ssim_y = SsimMeter(convention), SsimMeter(convention)

    def add(
        self,
        reference_HWC: NDArray[np.uint8],
        distorted_HWC: NDArray[np.uint8],
        lumas: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None = None,
    ) -> None:
        """The next pair of frames.

        Args:
            lumas: Y (H, W) of both as their files store it; None is Y of the RGB, see `LUMA`.

        Raises:
            ValueError: they differ in shape, from each other or from those before.
        """
        check_pair(reference_HWC[None], distorted_HWC[None])
        if self._num_frames and reference_HWC.shape != self._shape:
            raise ValueError(f"frame {self._num_frames} is {reference_HWC.shape}, those before {self._shape}")
        self._shape = reference_HWC.shape
        self._num_frames += 1
        reference_HWC, distorted_HWC = np.ascontiguousarray(reference_HWC), np.ascontiguousarray(distorted_HWC)
        self._psnr_rgb.add(frame_mse(reference_HWC, distorted_HWC))
        self._ssim_rgb.add(reference_HWC, distorted_HWC)
        lumas = lumas or (luma(reference_HWC), luma(distorted_HWC))
        self._psnr_y.add(frame_mse(*lumas))
        self._ssim_y.add(*lumas)

    def result(self) -> PictureScores:
        """Of the frames so far."""
        return PictureScores(
            self._num_frames,
            self._psnr_rgb.result(),
            self._psnr_y.result(),
            self._ssim_rgb.result(),
            self._ssim_y.result(),
        )


def psnr_db(reference_FHWC: NDArray[np.uint8], distorted_FHWC: NDArray[np.uint8]) -> Psnr:
    """PSNR of a clip, capped at 100 dB.

    Raises:
        ValueError: the clips differ in shape.
    """
    check_pair(reference_FHWC, distorted_FHWC)
    meter = PsnrMeter()
    for pair in zip(reference_FHWC, distorted_FHWC, strict=True):
        meter.add(frame_mse(*pair))
    return meter.result()


def ssim(
    reference_FHWC: NDArray[np.uint8], distorted_FHWC: NDArray[np.uint8], convention: Convention = "gaussian"
) -> Score:
    """Structural similarity of a clip, mean over frames, colours and the pixels that the convention counts.

    Raises:
        ValueError: the clips differ in shape.
    """
    check_pair(reference_FHWC, distorted_FHWC)
    meter = SsimMeter(convention)
    for reference_HWC, distorted_HWC in zip(reference_FHWC, distorted_FHWC, strict=True):
        meter.add(np.ascontiguousarray(reference_HWC), np.ascontiguousarray(distorted_HWC))
    return meter.result()


def luma(frame_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Y (H, W) of 8-bit RGB by `LUMA`."""
    return np.asarray(cv2.transform(np.ascontiguousarray(frame_HWC), LUMA), np.uint8)


def frame_mse(reference: NDArray[np.uint8], distorted: NDArray[np.uint8]) -> float:
    """Mean squared error of one frame, squared levels; exact, since the sum is a whole number."""
    summed = cv2.norm(np.ascontiguousarray(reference), np.ascontiguousarray(distorted), cv2.NORM_L2SQR)
    return round(summed) / reference.size


def to_db(mse: float) -> float:
    """Squared error to dB below the peak, at most the cap."""
    smallest = PEAK**2 / 10 ** (MAX_PSNR_DB / 10)
    return float(10 * np.log10(PEAK**2 / max(mse, smallest)))


def check_pair(reference_FHWC: NDArray[np.uint8], distorted_FHWC: NDArray[np.uint8]) -> None:
    """Refuse what cannot be compared frame by frame."""
    for name, frames in (("reference", reference_FHWC), ("distorted", distorted_FHWC)):
        if frames.ndim != 4 or frames.shape[3] != 3 or frames.dtype != np.uint8:
            raise ValueError(f"{name} is {frames.dtype} {frames.shape}; frames are uint8 (frames, height, width, 3)")
    if reference_FHWC.shape != distorted_FHWC.shape:
        raise ValueError(f"reference is {reference_FHWC.shape}, distorted {distorted_FHWC.shape}; retime or resize")
