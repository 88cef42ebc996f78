"""Distances of short-time spectra: one resolution in decibels, several as vocoders are trained with.

Legend: C channels, T samples, N frames, B frequencies. Frames are read block by block, so memory does not grow with T.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from metrics.score import Score
from metrics.waveforms import Waveform, why_not

WINDOW_S, HOP_S = 0.032, 0.008
"""Short-time spectrum: 32 ms windows every 8 ms, the customary speech analysis window."""
FLOOR_DB = -60.0
"""Spectra are floored here, dB of a full-scale sine: a sound 60 dB down counts as died away (ISO 3382)."""
RESOLUTIONS_S = ((0.010, 0.002), (0.025, 0.005), (0.050, 0.010))
"""Window and hop of each resolution: 240/50, 600/120 and 1200/240 samples at 24 kHz, to a tenth of a millisecond.
Source: Yamamoto et al. 2020, "Parallel WaveGAN" (arXiv 1910.11480)."""
FLOOR_POWER = 1e-7
"""Least power of a bin. Source: the authors' code (kan-bayashi/ParallelWaveGAN), whose windows are not normalised."""
BLOCK_FRAMES = 512

LSD_CONVENTION = "Hann 32 ms, hop 8 ms, floor -60 dB full scale; RMS over frequency, mean over frames and channels"
STFT_CONVENTION = (
    "mean of spectral convergence + L1 of natural log magnitude over Hann windows of 10, 25 and 50 ms "
    "(hops 2, 5, 10 ms) and channels; FFT of the next power of two"
)


def lsd_db(reference_CT: Waveform, degraded_CT: Waveform, sample_rate_hz: int) -> Score:
    """Log-spectral distance: RMS over frequency of the dB difference, mean over frames and channels.

    Source: Gray and Markel 1976, "Distance measures for speech processing", the RMS log spectral measure,
    with a floor as any implementation on digital silence needs.
    """
    if reason := why_not(reference_CT, degraded_CT, silence_matters=False):
        return reason
    total, count = 0.0, 0
    pieces = (spectra_db(waveform, sample_rate_hz) for waveform in (reference_CT, degraded_CT))
    for reference_CNB, degraded_CNB in zip(*pieces, strict=True):
        distance_CN = np.sqrt(np.square(reference_CNB - degraded_CNB).mean(axis=-1))
        total += float(distance_CN.sum())
        count += distance_CN.size
    return Score(total / count)


def stft_distance(reference_CT: Waveform, degraded_CT: Waveform, sample_rate_hz: int) -> Score:
    """Multi-resolution STFT distance, 0 for equal sounds: where energy is missing or too much, however narrow or short.

    Source: Yamamoto et al. 2020 (arXiv 1910.11480), equations 4 to 6; silence has no spectral convergence.
    """
    if reason := why_not(reference_CT, degraded_CT):
        return reason
    distances: list[float] = []
    for window_s, hop_s in RESOLUTIONS_S:
        size, hop = round(window_s * sample_rate_hz), max(1, round(hop_s * sample_rate_hz))
        missed_C, energy_C, logs_C = (np.zeros(len(reference_CT)) for _ in range(3))
        count = 0
        for pair in zip(
            *(magnitudes(sound, size, hop, padded=True) for sound in (reference_CT, degraded_CT)), strict=True
        ):
            real, made = (np.sqrt(np.maximum(np.square(piece), FLOOR_POWER)) for piece in pair)
            missed_C += np.square(real - made).sum(axis=(1, 2))
            energy_C += np.square(real).sum(axis=(1, 2))
            logs_C += np.abs(np.log(real / made)).sum(axis=(1, 2))
            count += real.shape[1] * real.shape[2]
        distances += list(np.sqrt(missed_C / energy_C) + logs_C / count)
    return Score(float(np.mean(distances)))


def spectra_db(waveform_CT: Waveform, sample_rate_hz: int) -> Iterator[NDArray[np.float64]]:
    """Magnitudes (C, ≤ 512, B) of successive frames, dB of a full-scale sine, floored."""
    size, hop = round(WINDOW_S * sample_rate_hz), round(HOP_S * sample_rate_hz)
    gain = hann(size).sum() / 2
    for piece in magnitudes(waveform_CT, size, hop):
        yield np.maximum(20 * np.log10(np.maximum(piece / gain, 1e-12)), FLOOR_DB)


def magnitudes(waveform_CT: Waveform, size: int, hop: int, *, padded: bool = False) -> Iterator[NDArray[np.float64]]:
    """Magnitudes (C, ≤ 512, B) of successive windows; the end is filled up with zeros, so that every sample counts.

    `padded` asks for an FFT of the next power of two instead of the window's own length.
    """
    num_frames = 1 + max(0, -(-(waveform_CT.shape[1] - size) // hop))
    window = hann(size)
    for first in range(0, num_frames, BLOCK_FRAMES):
        count = min(BLOCK_FRAMES, num_frames - first)
        piece = waveform_CT[:, first * hop : (first + count - 1) * hop + size].astype(np.float64)
        piece = np.pad(piece, ((0, 0), (0, (count - 1) * hop + size - piece.shape[1])))
        frames_CNT = np.lib.stride_tricks.sliding_window_view(piece, size, axis=1)[:, ::hop]
        yield np.abs(np.fft.rfft(frames_CNT * window, 1 << (size - 1).bit_length() if padded else size, axis=-1))


def hann(size: int) -> NDArray[np.float64]:
    """The periodic Hann window."""
    return np.hanning(size + 1)[:-1]
