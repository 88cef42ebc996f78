"""How far lips and sound lie apart at each of 31 shifts, and what is read from it: LSE-D, LSE-C and the offset.

Source: SyncNet (Chung and Zisserman 2016, "Out of time", section 4) as joonson/syncnet_python computes it, and the
names LSE-D and LSE-C of Wav2Lip (Prajwal et al. 2020, arXiv 2008.10010, section 4.2).
W window of 5 pictures, D = 1024 numbers of an embedding, K = 31 shifts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metrics.score import Score

MAX_SHIFT = 15
"""Frames at 25 fps that the sound is moved to either side."""
NUM_SHIFTS = 2 * MAX_SHIFT + 1


class Reading(NamedTuple):
    """What the mean distances over 31 shifts say."""

    lse_d: Score
    """Distance at the best shift; lower is better."""
    lse_c: Score
    """Median of the mean distances minus the smallest: the confidence; higher is better."""
    offset_frames: Score
    """Best shift, frames at 25 fps; positive where the sound leads the picture."""


class Sync(NamedTuple):
    """One face's lips against the sound."""

    compatible: Reading
    """As published: where a shift leaves a window without sound, the distance to an embedding of zeros counts."""
    masked: Reading
    """From the pairs that exist alone; missing below 16 windows, where some shift has none."""
    num_windows: int
    at_edge: bool
    """Whether the compatible offset is the largest that is tried, ±15: the sign of a failed measurement."""
    confidence_W: NDArray[np.float64]
    """Confidence of every window, median over 9 of them; for display only."""


def distances(lips_WD: Tensor, sound_WD: Tensor) -> NDArray[np.float32]:
    """Distances (W, 31) of each window's lips to the sound -15 to 15 windows later; past either end it is zeros.

    Raises:
        ValueError: there are not as many windows of lips as of sound.
    """
    if lips_WD.shape != sound_WD.shape:
        raise ValueError(f"lips are {tuple(lips_WD.shape)}, sound {tuple(sound_WD.shape)}; both need the same windows")
    padded = torch.nn.functional.pad(sound_WD, (0, 0, MAX_SHIFT, MAX_SHIFT))
    moved = (padded[shift : shift + len(lips_WD)] for shift in range(NUM_SHIFTS))
    return torch.stack([torch.nn.functional.pairwise_distance(lips_WD, sound) for sound in moved], 1).cpu().numpy()


def sync(distances_WK: NDArray[np.floating]) -> Sync:
    """What the distances of all windows say.

    Raises:
        ValueError: there is no window, or they are not 31 a window.
    """
    num_windows, num_shifts = distances_WK.shape
    if not num_windows or num_shifts != NUM_SHIFTS:
        raise ValueError(f"distances are {distances_WK.shape}; they must be (at least 1 window, {NUM_SHIFTS} shifts)")
    exact_WK = distances_WK.astype(np.float64)
    mean_K = exact_WK.mean(axis=0)
    compatible = reading(mean_K)
    window, shift = np.indices((num_windows, NUM_SHIFTS))
    partner = window + shift - MAX_SHIFT
    real: NDArray[np.bool_] = (partner >= 0) & (partner < num_windows)
    masked = too_few(num_windows)
    if num_windows > MAX_SHIFT:
        masked = reading((exact_WK * real).sum(axis=0) / real.sum(axis=0))
    best = int(mean_K.argmin())
    return Sync(
        compatible=compatible,
        masked=masked,
        num_windows=num_windows,
        at_edge=abs(best - MAX_SHIFT) == MAX_SHIFT,
        confidence_W=median_filter(np.median(mean_K) - exact_WK[:, best], 9),
    )


def median_filter(values_W: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """The median of the values around each, an odd number of them; beyond both ends are zeros, as in SciPy's medfilt."""
    padded = np.pad(values_W, length // 2)
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, length), axis=1)


def reading(mean_K: NDArray[np.float64]) -> Reading:
    """LSE-D, LSE-C and offset from the mean distance at each shift; the first of equals is the best."""
    best = int(mean_K.argmin())
    return Reading(
        Score(float(mean_K[best])), Score(float(np.median(mean_K) - mean_K[best])), Score(float(MAX_SHIFT - best))
    )


def too_few(num_windows: int) -> Reading:
    """No edge-masked values, and why."""
    return missing(f"{num_windows} windows leave no pair at a shift of {MAX_SHIFT} frames; it takes {MAX_SHIFT + 1}")


def missing(reason: str) -> Reading:
    """None of the three, and why."""
    return Reading(Score.missing(reason), Score.missing(reason), Score.missing(reason))
