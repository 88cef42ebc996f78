"""When sounds begin: spectral flux finds the moments, the sharpest rise of energy places them within a millisecond.

Legend: C channels, T samples, N frames of 4 ms, G bands of a third of an octave.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from metrics.spectra import magnitudes
from metrics.waveforms import SILENT_BELOW_DB, Waveform, level_db, running_energy

WINDOW_S, HOP_S = 0.016, 0.004
LOWEST_HZ, BANDS_AN_OCTAVE = 100.0, 3
FLOOR_DB = 60.0
"""Bands are floored so far below the loudest: a sound 60 dB down counts as died away (ISO 3382)."""
MIN_RISE_DB = 2.0
"""Least mean rise over the bands from frame to frame: a syllable that swells over 0.1 s has 2.3 to 3.4. Steady noise
has up to 2.9, but not `DELTA` above its mean (both measured)."""
DELTA = 0.07
MAX_BEFORE_S, MEAN_AROUND_S, WAIT_S = 0.03, 0.1, 0.03
"""An onset is the largest flux of the last 30 ms, `DELTA` of the largest of all above the mean of ±100 ms, and 30 ms
after the one before. Source: the defaults of librosa.onset.onset_detect (librosa 0.11)."""
RISE_S = 0.005
"""Energy is compared over so much before and after an instant."""
BEGUN = 0.01
"""Of the window after it, the first sample with this share of its largest power is the onset: -20 dB."""
RESIDUE = 1e-3
"""Share of the largest energy near that counts as none: what a rise from silence is measured from."""

ONSET_CONVENTION = (
    "onsets: flux of third-octave levels (16 ms windows every 4 ms), peaks as librosa picks them, moved to the sharpest "
    "rise of energy"
)


def onset_times_s(waveform_CT: Waveform, sample_rate_hz: int) -> NDArray[np.float64]:
    """When sounds begin, s, rising; none in silence. A click is placed within a millisecond, a swell within its rise.

    What begins within 30 ms of another onset is one with it.
    """
    if waveform_CT.shape[1] < 2 or level_db(waveform_CT) < SILENT_BELOW_DB:
        return np.zeros(0)
    lead = round(WINDOW_S * sample_rate_hz)  # so that a sound that begins at once has a silence to begin from
    padded_CT = np.pad(waveform_CT, ((0, 0), (lead, 0)))
    flux_N = spectral_flux(padded_CT, sample_rate_hz)
    energy_T = running_energy(padded_CT)
    hop = round(HOP_S * sample_rate_hz)
    times = [sharpest_rise(energy_T, frame * hop, sample_rate_hz) - lead for frame in picked(flux_N)]
    return np.unique(np.maximum(0, np.array(times, np.float64))) / sample_rate_hz


def spectral_flux(waveform_CT: Waveform, sample_rate_hz: int) -> NDArray[np.float64]:
    """Mean over the bands of how much each one's level rises from the frame before, dB, (N,); the first is 0."""
    size, hop = round(WINDOW_S * sample_rate_hz), round(HOP_S * sample_rate_hz)
    count = int(BANDS_AN_OCTAVE * np.log2(sample_rate_hz / 2 / LOWEST_HZ)) + 1
    edges_hz = LOWEST_HZ * 2 ** (np.arange(count) / BANDS_AN_OCTAVE)
    edges = np.unique(np.round(edges_hz * size / sample_rate_hz).astype(np.int64))
    blocks = [
        np.add.reduceat(np.square(piece).sum(axis=0), edges[edges < piece.shape[-1]], axis=-1)
        for piece in magnitudes(waveform_CT, size, hop)
    ]
    # Windows that reach beyond the end hear it as a cut, which is a sound of its own.
    power_NG = np.concatenate(blocks)[: max(1, (waveform_CT.shape[1] - size) // hop + 1)]
    loudest = float(power_NG.max())
    level_NG = 10 * np.log10(np.maximum(power_NG, max(loudest, 1e-30) * 10 ** (-FLOOR_DB / 10)))
    return np.concatenate([[0.0], np.maximum(0, np.diff(level_NG, axis=0)).mean(axis=1)])


def picked(flux_N: NDArray[np.float64]) -> list[int]:
    """Frames at which something begins."""
    before, around, wait = (round(seconds / HOP_S) for seconds in (MAX_BEFORE_S, MEAN_AROUND_S, WAIT_S))
    threshold = DELTA * float(flux_N.max())
    found: list[int] = []
    for frame in np.flatnonzero(flux_N >= MIN_RISE_DB):
        here, start = flux_N[frame], max(0, frame - before)
        mean = flux_N[max(0, frame - around) : frame + around + 1].mean()
        if here >= flux_N[start : frame + 1].max() and here >= mean + threshold:
            if found and frame - found[-1] <= wait:
                continue
            found.append(int(frame))
    return found


def sharpest_rise(energy_T: NDArray[np.float64], start: int, sample_rate_hz: int) -> int:
    """The sample in a window, and a hop on each side of it, at which most energy follows on least."""
    reach, margin = round(RISE_S * sample_rate_hz), round(HOP_S * sample_rate_hz)
    last = len(energy_T) - 1
    low, high = max(0, start - margin), min(last, start + round(WINDOW_S * sample_rate_hz) + margin)
    places = np.arange(low, high)
    here = energy_T[places]
    after = energy_T[np.minimum(last, places + reach)] - here
    before = here - energy_T[np.maximum(0, places - reach)]
    rise = int(places[int((after / (before + RESIDUE * after.max())).argmax())])
    power = np.diff(energy_T[rise : rise + reach + 1])
    return rise + int((power >= BEGUN * power.max()).argmax())
