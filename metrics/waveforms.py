"""What every sound yardstick begins with: one resampler, levels, what cannot be compared, the lag between two sounds.

Legend: C channels (left, right), T samples, floats in [-1, 1]. Reference and degraded are paired by sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np
import soxr
from numpy.typing import NDArray

from metrics.score import Score

Waveform = NDArray[np.floating]

SILENCE_DB = -120.0
"""Level of digital silence, dB full scale: far below the 16-bit floor, and what clips record."""
SILENT_BELOW_DB = -70.0
"""Quieter than this is called silent: near the 12-bit floor, unheard beside any ordinary sound."""
MAX_LAG_S = 0.5
"""How far sounds are looked for from each other: sound half a second off is out of sync by any rule (ITU-R BT.1359
ends what is acceptable at 90 ms early and 185 ms late), and codecs delay by under 0.1 s."""
MIN_LAG_R = 0.1
"""Weaker correlation says nothing of a lag: two unrelated noises of a second at 8 kHz reach 0.05 at their best lag."""
BLOCK = 1 << 16
"""Samples looked at together: 1.4 s at 48 kHz."""
LAG_CONVENTION = f"normalised cross-correlation of all channels within ±{MAX_LAG_S * 1000:g} ms; above 0 it is late"


class ChannelScores(NamedTuple):
    """A monaural yardstick applied to every channel: missing as a whole where any channel is."""

    mean: Score
    worst: Score


class Aligned(NamedTuple):
    """Two sounds cut to where they overlap once their lag is taken out, or as they were where the lag is missing."""

    reference_CT: Waveform
    degraded_CT: Waveform
    lag_ms: Score
    """How much later the degraded sound is, ms; a whole number of samples."""


def resample(waveform_CT: Waveform, from_hz: int, to_hz: int) -> Waveform:
    """The sound at another rate, by the one resampler used for both sides of every comparison."""
    if from_hz == to_hz:
        return waveform_CT
    result_TC = cast("Waveform", soxr.resample(waveform_CT.T, from_hz, to_hz, quality="HQ"))
    return result_TC.T


def downmix(waveform_CT: Waveform) -> Waveform:
    """The mean of all channels, (1, T): for a yardstick of the whole; opposite channels cancel in it."""
    return waveform_CT.mean(axis=0, keepdims=True)


def level_db(waveform: Waveform) -> float:
    """Root mean square over all samples, dB full scale; -120 for silence or no samples."""
    return decibels(moments(waveform)[0])


def decibels(power: float) -> float:
    """A mean square as a level, dB full scale; -120 for nothing."""
    return max(SILENCE_DB, 10 * float(np.log10(power))) if power > 0 else SILENCE_DB


def moments(waveform: Waveform) -> tuple[float, float]:
    """Mean square over all samples, and what of it is no constant offset of a channel; without a copy of the sound."""
    square, sums = 0.0, np.zeros(waveform.shape[:-1])
    for start in range(0, waveform.shape[-1], BLOCK):
        block = waveform[..., start : start + BLOCK].astype(np.float64)
        square += float(np.square(block).sum())
        sums += block.sum(axis=-1)
    if not waveform.size:
        return 0.0, 0.0
    offset = float(np.square(sums / waveform.shape[-1]).mean())
    return square / waveform.size, max(0.0, square / waveform.size - offset)


def centred(waveform: Waveform) -> NDArray[np.float64]:
    """The sound without its channels' constant offsets."""
    return waveform - waveform.mean(axis=-1, keepdims=True, dtype=np.float64)


def over_channels(scores: Sequence[Score]) -> ChannelScores:
    """Mean and worst (lowest) of the channels; missing with the first missing channel's reason."""
    for number, score in enumerate(scores):
        if score.value is None:
            reason = score.reason if len(scores) == 1 else f"channel {number}: {score.reason}"
            return ChannelScores(Score.missing(reason), Score.missing(reason))
    values = [score.value for score in scores if score.value is not None]
    return ChannelScores(Score(float(np.mean(values))), Score(min(values)))


def by_channel(
    reference_CT: Waveform, degraded_CT: Waveform, yardstick: Callable[[Waveform, Waveform], Score]
) -> ChannelScores:
    """A yardstick of mono pairs (T,) on every channel; a channel that cannot be compared has its reason."""
    if reason := why_not(reference_CT, degraded_CT, silence_matters=False):
        return ChannelScores(reason, reason)
    pairs = zip(reference_CT, degraded_CT, strict=True)
    return over_channels([why_not(*pair) or yardstick(*pair) for pair in pairs])


def why_not(reference: Waveform, degraded: Waveform, *, silence_matters: bool = True) -> Score | None:
    """The reason why a pair cannot be compared, or None.

    Raises:
        ValueError: the sounds differ in shape, which is a mistake of the caller and no property of the sound.
    """
    if reference.shape != degraded.shape:
        raise ValueError(f"reference is {reference.shape}, degraded {degraded.shape}; cut both to the same length")
    if not reference.size:
        return Score.missing("no samples")
    for name, sound in (("reference", reference), ("generated sound", degraded)):
        if not np.isfinite(sound).all():
            return Score.missing(f"{name} holds values that are not finite")
        if not silence_matters:
            continue
        power, without_offset = moments(sound)
        if decibels(power) < SILENT_BELOW_DB:
            return Score.missing(f"{name} is silent (below {SILENT_BELOW_DB:g} dB full scale)")
        if decibels(without_offset) < SILENT_BELOW_DB:
            return Score.missing(f"{name} is constant: an offset without any sound")
    return None


def align(reference_CT: Waveform, degraded_CT: Waveform, sample_rate_hz: int, max_lag_s: float = MAX_LAG_S) -> Aligned:
    """Both sounds shifted to where they agree best, one lag for all channels.

    A correlation is divided by the power of what overlaps, so that a lag costs nothing for the samples it leaves out.
    """
    raw = Aligned(reference_CT, degraded_CT, Score.missing(""))
    if reason := why_not(reference_CT, degraded_CT):
        return raw._replace(lag_ms=reason)
    # At least half must overlap: what little is left at a longer lag agrees by chance.
    limit = min(round(max_lag_s * sample_rate_hz), reference_CT.shape[1] // 2)
    correlation = correlations(centred(reference_CT), centred(degraded_CT), limit)
    best = int(correlation.argmax())
    lag, strength = best - limit, float(correlation[best])
    if strength < MIN_LAG_R:
        reason = f"the sounds correlate by {strength:.2f} at their best lag; limit {MIN_LAG_R:g}"
        return raw._replace(lag_ms=Score.missing(reason))
    if abs(lag) == limit:
        reason = f"the sounds agree best at the end of the search, {1000 * limit / sample_rate_hz:g} ms; see max_lag_s"
        return raw._replace(lag_ms=Score.missing(reason))
    start, stop = max(0, -lag), reference_CT.shape[1] - max(0, lag)
    return Aligned(
        reference_CT[:, start:stop], degraded_CT[:, start + lag : stop + lag], Score(1000 * lag / sample_rate_hz)
    )


def correlations(reference_CT: Waveform, degraded_CT: Waveform, limit: int) -> NDArray[np.float64]:
    """Normalised cross-correlation (2 * limit + 1,) at the lags -limit … limit of the degraded sound."""
    length = reference_CT.shape[1]
    size = 1 << (length + limit - 1).bit_length()
    product = np.zeros(size // 2 + 1, np.complex128)
    for reference_T, degraded_T in zip(reference_CT, degraded_CT, strict=True):
        product += np.conj(np.fft.rfft(reference_T, size)) * np.fft.rfft(degraded_T, size)
    circular = np.fft.irfft(product, size)
    lags = np.arange(-limit, limit + 1)
    before, after = (running_energy(sound) for sound in (reference_CT, degraded_CT))
    start, stop = np.maximum(0, -lags), length - np.maximum(0, lags)
    energy = (before[stop] - before[start]) * (after[stop + lags] - after[start + lags])
    floor = 1e-6 * before[-1] * after[-1]  # where next to nothing overlaps, rounding would decide
    return circular[lags] / np.sqrt(np.maximum(energy, max(floor, 1e-30)))


def running_energy(waveform_CT: Waveform) -> NDArray[np.float64]:
    """Energy of all channels before each sample, (T + 1,)."""
    energy_T = np.square(waveform_CT, dtype=np.float64).sum(axis=0)
    return np.concatenate([[0.0], np.cumsum(energy_T, dtype=np.float64)])
