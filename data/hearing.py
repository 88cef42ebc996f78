"""What sound is like, in bounded memory: loudness, peaks, silence, clipping, speech, in blocks of a tenth of a second.

Arrays: B block, C channel, T sample; full scale = 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from data import loudness, speech

BLOCK_S = 0.1
"""Length of a block, s: the step of the loudness meter's 0.4 s windows (ITU-R BS.1770-5), so nothing is lost to it."""
SILENCE_DB = -60.0
"""Below this, dB full scale, a block is silent; the quietest rooms are recorded at about -60."""
SILENT_POWER = 10 ** (SILENCE_DB / 10)
DEAD_SHARE = 0.99
"""A side is dead that is silent in this share of the blocks in which the other is not; the rest forgives clicks."""
CLIPPED = 32767 / 32768
"""Full scale as 16 bits reach it."""
SPEECH = 0.5
"""A window counts as speech from this probability on. Source: silero-vad's default."""
CHUNK_BLOCKS = 10
"""Blocks worked on at once: one second."""


@dataclass(frozen=True)
class SoundTrack:
    """One source's sound as numbers; block b covers [start_s + b * block_s, start_s + (b + 1) * block_s)."""

    start_s: float
    """On the picture's timeline: 0 is when the first frame is shown."""
    duration_s: float
    loudness_B: NDArray[np.float32]
    """Mean K-weighted power, channels weighted and summed (ITU-R BS.1770-5)."""
    power_B: NDArray[np.float32]
    """Mean square over samples and channels."""
    speech_B: NDArray[np.float32] | None = None
    """Mean probability of speech; None where it was not measured."""
    block_s: float = BLOCK_S

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything as named arrays."""
        arrays: dict[str, NDArray[Any]] = {
            "span_s": np.array([self.start_s, self.duration_s, self.block_s]),
            "loudness_B": self.loudness_B,
            "power_B": self.power_B,
        }
        return arrays if self.speech_B is None else {**arrays, "speech_B": self.speech_B}

    @staticmethod
    def from_arrays(arrays: dict[str, NDArray[Any]]) -> SoundTrack:
        """What `to_arrays` gave."""
        start_s, duration_s, block_s = (float(value) for value in arrays["span_s"])
        speech_B = arrays.get("speech_B")
        return SoundTrack(start_s, duration_s, arrays["loudness_B"], arrays["power_B"], speech_B, block_s)


def overlaps(track: SoundTrack, start_s: float, end_s: float) -> NDArray[np.float64]:
    """Seconds (B,) that each block shares with a span of the picture's timeline."""
    low = track.start_s + np.arange(len(track.power_B)) * track.block_s
    high = np.minimum(low + track.block_s, track.start_s + track.duration_s)
    return np.clip(np.minimum(high, end_s) - np.maximum(low, start_s), 0.0, None)


def loudness_lufs(track: SoundTrack, start_s: float, end_s: float) -> float | None:
    """Ungated loudness of a span, LUFS; what is missing counts as silence. None for digital silence."""
    power = float(overlaps(track, start_s, end_s) @ track.loudness_B) / max(end_s - start_s, 1e-9)
    return loudness.lufs(power) if power > 0 else None


def silent_share(track: SoundTrack, start_s: float, end_s: float) -> float:
    """Share of a span that is silent or has no sound."""
    heard = float(overlaps(track, start_s, end_s) @ (track.power_B > SILENT_POWER))
    return min(1.0, max(0.0, 1 - heard / max(end_s - start_s, 1e-9)))


def speech_share(track: SoundTrack, start_s: float, end_s: float) -> float | None:
    """Share of a span that is speech; None where it was not measured."""
    if track.speech_B is None:
        return None
    spoken = float(overlaps(track, start_s, end_s) @ (track.speech_B >= SPEECH))
    return min(1.0, spoken / max(end_s - start_s, 1e-9))


class Listener:
    """Takes sound in pieces, in order, and holds about a second of it."""

    def __init__(self, rate_hz: int, names: Sequence[str], *, speech_too: bool) -> None:
        self.rate_hz = rate_hz
        self._meter = loudness.Meter(rate_hz, names)
        self._ear = speech.Ear(rate_hz) if speech_too else None
        self._pending: list[NDArray[np.float32]] = []
        self._num_pending = self._num_samples = self._num_blocks = 0
        self._loudness: list[NDArray[np.float64]] = []
        self._powers: list[NDArray[np.float64]] = []
        self._clipping = _Clipping(len(names))
        self._num_channels = len(names)

    def take(self, samples_CT: NDArray[np.float32]) -> None:
        """The next samples; they follow those before without a gap."""
        self._pending.append(samples_CT)
        self._num_pending += samples_CT.shape[1]
        while self._num_pending >= (wanted := self._edge(self._num_blocks + CHUNK_BLOCKS) - self._num_samples):
            joined = self._pending[0] if len(self._pending) == 1 else np.concatenate(self._pending, axis=1)
            self._pending, self._num_pending = [joined[:, wanted:]], joined.shape[1] - wanted
            self._measure(np.ascontiguousarray(joined[:, :wanted]))

    def take_silence(self, num_samples: int) -> None:
        """A gap, filled with zeros."""
        step = self.rate_hz
        for low in range(0, num_samples, step):
            self.take(np.zeros((self._num_channels, min(step, num_samples - low)), np.float32))

    def finish(self, start_s: float) -> tuple[SoundTrack, dict[str, str | int | float | None]]:
        """The track, its first sample at `start_s` on the picture's timeline, and the sound fields of `Source`."""
        if self._num_pending:
            self._measure(np.ascontiguousarray(np.concatenate(self._pending, axis=1)))
        loud_B = np.concatenate([np.zeros(0), *self._loudness])
        power_BC = np.concatenate([np.zeros((0, self._num_channels)), *self._powers])
        speech_B = None if self._ear is None else self._ear.finish(len(loud_B), BLOCK_S)
        duration_s = self._num_samples / self.rate_hz
        power_B = power_BC.mean(axis=1).astype(np.float32)
        track = SoundTrack(start_s, duration_s, loud_B.astype(np.float32), power_B, speech_B)
        whole = (start_s, start_s + duration_s)
        spoken = speech_share(track, *whole)
        full = loud_B[: int(duration_s / BLOCK_S + 1e-6)]
        integrated = loudness.integrated(full if len(full) >= loudness.WINDOW_BLOCKS else loud_B)
        return track, {
            "peak": round(self._meter.peak, 6),
            "true_peak_db": rounded_db(self._meter.true_peak),
            "loudness_lufs": None if integrated is None else round(integrated, 2),
            "silent_share": round(silent_share(track, *whole), 4) if duration_s else 0.0,
            "clipped_share": round(self._clipping.count / max(1, self._num_samples * self._num_channels), 8),
            "speech_share": None if spoken is None else round(spoken, 4),
            "dead_side": dead_side(power_BC),
        }

    def _edge(self, block: int) -> int:
        """First sample of a block."""
        return round(block * self.rate_hz * BLOCK_S)

    def _measure(self, samples_CT: NDArray[np.float32]) -> None:
        length = samples_CT.shape[1]
        first = self._num_samples
        count = 1
        while self._edge(self._num_blocks + count) < first + length:
            count += 1
        starts = np.array([self._edge(self._num_blocks + block) - first for block in range(count)])
        sizes = np.diff([*starts, length])
        squares = cast(NDArray[np.float64], np.add.reduceat(np.square(samples_CT, dtype=np.float64), starts, axis=1))
        self._powers.append((squares / sizes).T)
        self._loudness.append(self._meter.take(samples_CT, starts))
        if self._meter.latest_peak >= CLIPPED:
            self._clipping.take(samples_CT)
        else:
            self._clipping.skip()
        if self._ear is not None:
            self._ear.take(samples_CT.mean(axis=0, dtype=np.float32))
        self._num_samples += length
        self._num_blocks += count


class _Clipping:
    """Counts samples at full scale that have a neighbour there, across pieces."""

    def __init__(self, num_channels: int) -> None:
        self.count = 0
        self._num_channels = num_channels
        self.skip()

    def skip(self) -> None:
        """A piece without such samples."""
        self._last = np.zeros((self._num_channels, 1), bool)
        self._counted = self._last

    def take(self, samples_CT: NDArray[np.float32]) -> None:
        """A piece that has some."""
        full = np.concatenate([self._last, np.abs(samples_CT) >= CLIPPED], axis=1)
        beside = full[:, 1:] & full[:, :-1]
        clipped = np.zeros_like(full)
        clipped[:, 1:] |= beside
        clipped[:, :-1] |= beside
        self.count += int(clipped.sum()) - int((clipped[:, :1] & self._counted).sum())
        self._last, self._counted = full[:, -1:], clipped[:, -1:]


def dead_side(power_BC: NDArray[np.float64]) -> str | None:
    """`left` or `right`: the side of stereo sound that is silent while the other is not."""
    if power_BC.shape[1] != 2:
        return None
    quiet_BC = power_BC <= SILENT_POWER
    for side, name in enumerate(("left", "right")):
        heard = ~quiet_BC[:, 1 - side]
        if heard.any() and quiet_BC[heard, side].mean() >= DEAD_SHARE:
            return name
    return None


def rounded_db(amplitude: float) -> float | None:
    """Decibels full scale to two places; None for nothing."""
    return round(20 * math.log10(amplitude), 2) if amplitude > 0 else None
