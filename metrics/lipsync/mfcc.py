"""Mel-frequency cepstra of speech at 16 kHz, as SyncNet was trained on them.

Source: python_speech_features 0.6 (James Lyons, MIT) at its defaults, which the published SyncNet calls; this equals
it, without its copy of every frame's window. T sample, M frame of 10 ms, W window of five pictures.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

RATE_HZ = 16_000
FRAME, HOP, FFT = 400, 160, 512
"""Samples of a frame (25 ms, rectangular), of the step between frames (10 ms) and of the transform."""
NUM_FILTERS, NUM_CEPSTRA, LIFTER = 26, 13, 22
PRE_EMPHASIS = 0.97
FRAMES_A_PICTURE, FRAMES_A_WINDOW = 4, 20
"""At 25 pictures a second; a window of sound is as long as one of five pictures."""
TINY = float(np.finfo(np.float64).eps)
"""What no energy at all counts as before the logarithm."""


def mfcc(sound_T: NDArray[np.int16]) -> NDArray[np.float64]:
    """Cepstra (M, 13) of sound on the scale of 16-bit samples, the first replaced by the log energy of the frame.

    M = 1 + ceil((T - 400) / 160), and 1 for shorter sound; the end is filled up with zeros.

    Raises:
        ValueError: there are no samples.
    """
    if not sound_T.size:
        raise ValueError("sound of 0 samples has no cepstra; it needs at least 1")
    samples = sound_T.astype(np.float64)
    emphasised = np.append(samples[0], samples[1:] - PRE_EMPHASIS * samples[:-1])
    num_frames = 1 + max(0, -(-(len(samples) - FRAME) // HOP))
    padded = np.pad(emphasised, (0, (num_frames - 1) * HOP + FRAME - len(samples)))
    frames = np.lib.stride_tricks.sliding_window_view(padded, FRAME)[::HOP]
    power = np.square(np.abs(np.fft.rfft(frames, FFT))) / FFT
    order = np.arange(NUM_CEPSTRA, dtype=np.float64)
    waves = np.sqrt(2 / NUM_FILTERS) * np.cos(np.pi * np.outer(np.arange(NUM_FILTERS) + 0.5, order) / NUM_FILTERS)
    result = np.log(positive(power @ filters().T)) @ waves * (1 + LIFTER / 2 * np.sin(np.pi * order / LIFTER))
    result[:, 0] = np.log(positive(power.sum(axis=1)))
    return result


def sound_windows(cepstra_MC: NDArray[np.float64], num_windows: int) -> NDArray[np.float64]:
    """Cepstra (W, 13, 20) beside each window of five pictures: columns 4w to 4w + 19.

    Raises:
        ValueError: there are too few frames for so many windows.
    """
    needed = FRAMES_A_PICTURE * (num_windows - 1) + FRAMES_A_WINDOW
    if len(cepstra_MC) < needed:
        raise ValueError(f"{num_windows} windows need {needed} frames of cepstra; there are {len(cepstra_MC)}")
    return np.lib.stride_tricks.sliding_window_view(cepstra_MC, FRAMES_A_WINDOW, axis=0)[::FRAMES_A_PICTURE][
        :num_windows
    ]


def positive(energy: NDArray[np.float64]) -> NDArray[np.float64]:
    """Energies, nought replaced by the smallest step of a float."""
    return np.where(energy == 0, TINY, energy)


@functools.cache
def filters() -> NDArray[np.float64]:
    """Triangles (26, 257) over the bins of the transform, evenly spaced in mel from 0 to 8000 Hz."""
    mel = np.linspace(0.0, 2595 * math.log10(1 + RATE_HZ / 2 / 700), NUM_FILTERS + 2)
    edges = np.floor((FFT + 1) * 700 * (10 ** (mel / 2595) - 1) / RATE_HZ)
    bins = np.arange(FFT // 2 + 1)
    left, middle, right = (edges[start : start + NUM_FILTERS, None] for start in range(3))
    rising, falling = (bins - left) / (middle - left), (right - bins) / (right - middle)
    return np.where((bins >= left) & (bins < middle), rising, np.where((bins >= middle) & (bins < right), falling, 0))
