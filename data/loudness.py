"""Loudness and true peak by ITU-R BS.1770-5, in pieces of any length and at any sample rate. B block, C channel, T sample."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

OFFSET_LUFS = -0.691
"""Takes the gain of the weighting at 997 Hz away. Source: ITU-R BS.1770-5, equation 2."""
ABSOLUTE_GATE_LUFS, RELATIVE_GATE_LU = -70.0, -10.0
"""Source: ITU-R BS.1770-5, equations 5 and 6."""
WINDOW_BLOCKS = 4
"""Blocks of 0.1 s in a gating window of 0.4 s, which overlap by three quarters. Source: ibid., annex 1."""
SURROUND = {"SL", "SR", "BL", "BR", "SSL", "SSR"}
SURROUND_GAIN = 1.41
"""Of channels beside and behind the listener. Source: ibid., table 3."""
TRUE_PEAK_HZ = 192_000
"""Rate that samples are interpolated to. Source: ibid., annex 2."""
REACH = 12
"""Samples on each side that an interpolated value is made of; with a Kaiser window of `BETA`, sines up to 0.4 of the
rate keep their height within 0.1 dB (tested)."""
BETA = 6.0
STRIDE = 128
"""Samples filtered by one matrix product: a balance of the products and the steps between them."""
SILENT_PEAK = 1e-9
"""Below this a piece changes no measurement: -180 dB."""


def lufs(power: float) -> float:
    """Loudness of a K-weighted power."""
    return OFFSET_LUFS + 10 * math.log10(power)


def integrated(power_B: NDArray[np.float64]) -> float | None:
    """Gated loudness of K-weighted block powers, LUFS; None where all of it is below the absolute gate.

    Sound shorter than one window is one window.
    """
    if not len(power_B):
        return None
    size = min(WINDOW_BLOCKS, len(power_B))
    sums = np.concatenate([[0.0], np.cumsum(power_B, dtype=np.float64)])
    windows = (sums[size:] - sums[:-size]) / size
    heard = windows[windows > 10 ** ((ABSOLUTE_GATE_LUFS - OFFSET_LUFS) / 10)]
    if not len(heard):
        return None
    gate = float(heard.mean()) * 10 ** (RELATIVE_GATE_LU / 10)
    return lufs(float(heard[heard > gate].mean()))


@functools.cache
def weighting(rate_hz: int) -> NDArray[np.float64]:
    """K-weighting as two second-order sections (2, 6) for any rate: a shelf for the head, a high pass for the ear.

    Source: ITU-R BS.1770-5 gives coefficients for 48 kHz alone; these are the analogue filters they come from, put
    through the bilinear transform (the values agree with the standard's to 1e-6, tested).
    """
    high = math.tan(math.pi * min(1681.974450955533, 0.45 * rate_hz) / rate_hz)
    gain, quality = 10 ** (3.999843853973347 / 20), 0.7071752369554196
    middle = gain**0.4996667741545416
    norm = 1 + high / quality + high * high
    shelf = [
        (gain + middle * high / quality + high * high) / norm,
        2 * (high * high - gain) / norm,
        (gain - middle * high / quality + high * high) / norm,
        1.0,
        2 * (high * high - 1) / norm,
        (1 - high / quality + high * high) / norm,
    ]
    low, quality = math.tan(math.pi * 38.13547087602444 / rate_hz), 0.5003270373238773
    norm = 1 + low / quality + low * low
    passes = [1.0, -2.0, 1.0, 1.0, 2 * (low * low - 1) / norm, (1 - low / quality + low * low) / norm]
    return np.array([shelf, passes])


@functools.cache
def interpolator(rate_hz: int) -> NDArray[np.float32]:
    """Weights (2 * REACH, P) of the values at the P points between two samples; P = 0 where the rate is high enough."""
    factor = min(4, math.ceil(TRUE_PEAK_HZ / rate_hz))
    taps = np.arange(-REACH + 1, REACH + 1)
    columns: list[NDArray[np.float64]] = []
    for point in range(1, factor):
        distance = taps - point / factor
        window = np.i0(BETA * np.sqrt(np.maximum(0, 1 - (distance / REACH) ** 2))) / np.i0(BETA)
        weights = np.sinc(distance) * window
        columns.append(weights / weights.sum())
    return np.stack(columns, axis=1).astype(np.float32) if columns else np.zeros((2 * REACH, 0), np.float32)


class Recursion:
    """A cascade of second-order sections over many channels, block by block as matrix products.

    The same numbers as a filter that goes sample by sample, without a compiled library whose import takes a second.
    """

    def __init__(self, sections: NDArray[np.float64], num_channels: int) -> None:
        step, drive, read, through = state_space(sections)
        powers = [np.eye(len(step))]
        while len(powers) <= STRIDE:
            powers.append(powers[-1] @ step)
        self._jumps = powers
        self._reads = np.stack([read @ power for power in powers[:STRIDE]])  # (STRIDE, states)
        echo = [through, *(float(read @ power @ drive) for power in powers[: STRIDE - 1])]
        lag = np.subtract.outer(np.arange(STRIDE), np.arange(STRIDE))
        self._echoes = np.where(lag >= 0, np.array(echo)[np.maximum(lag, 0)], 0.0)
        self._drives = np.stack([power @ drive for power in powers[STRIDE - 1 :: -1]])  # oldest sample first
        self.state_CS: NDArray[np.float64] = np.zeros((num_channels, len(step)))

    def take(self, samples_CT: NDArray[np.float32]) -> NDArray[np.float64]:
        """The filtered samples (C, T)."""
        length = samples_CT.shape[1]
        even = length // STRIDE * STRIDE
        result: NDArray[np.float64] = np.empty(samples_CT.shape)
        blocks_CNT = samples_CT[:, :even].reshape(len(samples_CT), -1, STRIDE).astype(np.float64)
        driven_CNS: NDArray[np.float64] = blocks_CNT @ self._drives
        states_CNS: NDArray[np.float64] = np.empty_like(driven_CNS)
        jump = self._jumps[STRIDE].T
        for number in range(driven_CNS.shape[1]):
            states_CNS[:, number] = self.state_CS
            self.state_CS = self.state_CS @ jump + driven_CNS[:, number]
        filtered_CNT = blocks_CNT @ self._echoes.T + states_CNS @ self._reads.T
        result[:, :even] = filtered_CNT.reshape(len(samples_CT), even)
        if rest := length - even:
            last_CT = samples_CT[:, even:].astype(np.float64)
            result[:, even:] = last_CT @ self._echoes[:rest, :rest].T + self.state_CS @ self._reads[:rest].T
            self.state_CS = self.state_CS @ self._jumps[rest].T + last_CT @ self._drives[STRIDE - rest :]
        return result


def state_space(
    sections: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], float]:
    """The cascade of sections (b0, b1, b2, 1, a1, a2) as s' = A s + b x, y = c s + d x: A, b, c, d."""
    step, drive, read, through = np.zeros((0, 0)), np.zeros(0), np.zeros(0), 1.0
    for b0, b1, b2, _, a1, a2 in sections:
        own = np.array([[-a1, 1.0], [-a2, 0.0]])
        pushed = np.array([b1 - a1 * b0, b2 - a2 * b0])
        step = np.block([[step, np.zeros((len(step), 2))], [np.outer(pushed, read), own]])
        drive = np.concatenate([drive, pushed * through])
        read = np.concatenate([read * b0, [1.0, 0.0]])
        through *= b0
    return step, drive, read, through


class Meter:
    """Measures pieces of sound that follow one another."""

    def __init__(self, rate_hz: int, names: Sequence[str]) -> None:
        self._filter = Recursion(weighting(rate_hz), len(names))
        self._gains_C = np.array([channel_gain(name) for name in names])
        self._between = interpolator(rate_hz)
        self._reach_gain = float(np.abs(self._between).sum(axis=0).max(initial=0.0))
        self._tail_CT = np.zeros((len(names), 2 * REACH - 1), np.float32)
        self.peak = self.true_peak = self.latest_peak = 0.0

    def take(self, samples_CT: NDArray[np.float32], starts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Weighted powers (B,) of the blocks that start at `starts`; the last ends with the piece."""
        latest_C = np.abs(samples_CT).max(axis=1)
        self.latest_peak = float(latest_C.max(initial=0.0))
        self.peak = max(self.peak, self.latest_peak)
        self.true_peak = max(self.true_peak, self.latest_peak)
        self._look_between(samples_CT)
        if self.latest_peak < SILENT_PEAK and np.abs(self._filter.state_CS).max() < SILENT_PEAK:
            return np.zeros(len(starts))
        energy_CB = cast(NDArray[np.float64], np.add.reduceat(np.square(self._filter.take(samples_CT)), starts, axis=1))
        sizes = np.diff([*starts, samples_CT.shape[1]])
        return self._gains_C @ energy_CB / sizes

    def _look_between(self, samples_CT: NDArray[np.float32]) -> None:
        """Raise the true peak by what lies between samples, looking only where it could."""
        joined_CT = np.concatenate([self._tail_CT, samples_CT], axis=1)
        self._tail_CT = joined_CT[:, -(2 * REACH - 1) :]
        num_windows = joined_CT.shape[1] - 2 * REACH + 1
        if not self._between.shape[1] or num_windows <= 0:
            return
        for wave in joined_CT:
            groups = np.abs(wave[: len(wave) // REACH * REACH]).reshape(-1, REACH).max(axis=1)
            rest = float(np.abs(wave[len(groups) * REACH :]).max(initial=0.0))
            loud = np.concatenate([groups, [rest, 0.0, 0.0]])
            near = np.maximum(np.maximum(loud[:-2], loud[1:-1]), loud[2:])  # a window touches three groups
            wanted = np.flatnonzero(near * self._reach_gain > self.true_peak)
            if len(wanted):
                places = (wanted[:, None] * REACH + np.arange(REACH)).ravel()
                windows = np.lib.stride_tricks.sliding_window_view(wave, 2 * REACH)[places[places < num_windows]]
                self.true_peak = max(self.true_peak, float(np.abs(windows @ self._between).max(initial=0.0)))


def channel_gain(name: str) -> float:
    """How much a channel's power counts; the low-frequency channel does not."""
    return 0.0 if name.startswith("LFE") else SURROUND_GAIN if name in SURROUND else 1.0
