"""Spectral distances against closed forms and computations frame by frame."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from metrics.spectra import lsd_db, spectra_db, stft_distance
from tests.metrics.sounds import RATE_HZ, noise, tone


def test_log_spectral_distance_of_a_gain_is_the_gain() -> None:
    sounds = noise(level=0.3)
    assert lsd_db(sounds, sounds / 2, RATE_HZ).value == pytest.approx(20 * math.log10(2), abs=0.05)
    assert lsd_db(sounds, sounds, RATE_HZ).value == 0


def test_log_spectral_distance_equals_a_frame_by_frame_computation() -> None:
    reference, degraded = noise(0, 0.1, channels=1), noise(1, 0.1, channels=1)  # 800 samples: 10 windows, padded
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(256) / 256)
    distances = []
    for start in range(0, 800 - 256 + 64, 64):
        levels = []
        for waveform in (reference, degraded):
            piece = np.zeros(256)
            piece[: len(waveform[0, start : start + 256])] = waveform[0, start : start + 256]
            magnitude = np.abs(np.fft.fft(piece * window))[:129] / 64
            levels.append(np.maximum(20 * np.log10(magnitude), -60))
        distances.append(math.sqrt(np.mean((levels[0] - levels[1]) ** 2)))
    assert lsd_db(reference, degraded, RATE_HZ).value == pytest.approx(np.mean(distances), rel=1e-9)


def test_spectra_are_in_db_of_a_full_scale_sine_and_floored() -> None:
    spectrum = np.concatenate(list(spectra_db(tone(1000, 0.1), RATE_HZ)), axis=1)
    assert spectrum.max() == pytest.approx(-20, abs=0.01)
    assert spectrum.min() == -60
    assert lsd_db(np.zeros((2, 4000)), np.full((2, 4000), 1e-6), RATE_HZ).value == 0


def test_stft_distance_equals_torchs_spectra() -> None:
    rate_hz = 24_000
    sounds = [0.1 * np.random.default_rng(seed).standard_normal((2, 30_001)) for seed in (0, 1)]
    expected = []
    for size, hop in ((240, 48), (600, 120), (1200, 240)):
        fft = 1 << (size - 1).bit_length()
        padded = [np.pad(each, ((0, 0), (0, -(30_001 - size) % hop + fft - size))) for each in sounds]
        window = torch.hann_window(size, dtype=torch.float64)
        # torch centres a short window in its FFT, which changes phases alone when the frames start earlier by as much
        early = (fft - size) // 2
        spectra = [
            torch.stft(
                torch.from_numpy(np.pad(each, ((0, 0), (early, 0)))),
                fft, hop, size, window, center=False, return_complex=True,
            ).abs().square().clamp(min=1e-7).sqrt()
            for each in padded
        ]  # fmt: skip
        frames = 1 + -(-(30_001 - size) // hop)
        real, made = (each[..., :frames] for each in spectra)
        for channel in range(2):
            missed = torch.linalg.norm(real[channel] - made[channel]) / torch.linalg.norm(real[channel])
            expected.append(float(missed + (real[channel].log() - made[channel].log()).abs().mean()))
    assert stft_distance(*sounds, rate_hz).value == pytest.approx(np.mean(expected), rel=1e-9)


def test_stft_distance_is_nothing_for_the_same_and_grows_with_noise() -> None:
    reference, other = noise(0), noise(1)
    found = [stft_distance(reference, reference + part * other, RATE_HZ).value for part in (0, 0.1, 0.5, 2)]
    assert found[0] == 0
    assert found == sorted(found)
    assert "reference is silent" in stft_distance(0 * reference, reference, RATE_HZ).reason
    assert "generated sound is silent" in stft_distance(reference, 0 * reference, RATE_HZ).reason
