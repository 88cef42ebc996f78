"""All sound yardsticks by one name: what `measure` gives of a pair, with unit, direction and convention of each.

Legend: C channels (left, right), T samples, floats in [-1, 1]. Reference and degraded are paired by sample; nothing is
aligned first, except for what is named `_aligned`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from data import hearing, loudness
from metrics.pesq_runs import PESQ_CONVENTION, pesq_many, pesq_nb, pesq_wb
from metrics.score import Measure, Score
from metrics.spectra import LSD_CONVENTION, STFT_CONVENTION, lsd_db, stft_distance
from metrics.speech_quality import DNSMOS_CONVENTION, STOI_CONVENTION, dnsmos, stoi
from metrics.stereo import (
    BALANCE_CONVENTION,
    CORRELATION_CONVENTION,
    PLACEMENT_CONVENTION,
    SWAP_CONVENTION,
    balance_error_db,
    channel_r_error,
    placement_error,
    swap_margin_db,
)
from metrics.waveforms import (
    LAG_CONVENTION,
    ChannelScores,
    Waveform,
    align,
    by_channel,
    level_db,
    resample,
    why_not,
)

__all__ = [
    "BALANCE_CONVENTION", "ENVELOPE_CONVENTION", "LEVEL_CONVENTION", "LSD_CONVENTION", "PESQ_CONVENTION",
    "SOUND_METRICS", "STOI_CONVENTION", "Waveform", "balance_error_db", "envelope_r", "level_error_db", "lsd_db",
    "measure", "pesq_many", "pesq_nb", "pesq_wb", "resample", "si_sdr_db", "stoi",
]  # fmt: skip

ENVELOPE_S = 0.010
MAX_SDR_DB = 100.0
"""What equal sounds count as, and minus this what unrelated ones do: 24 bits hold 144 dB, ears 100."""

ENVELOPE_CONVENTION = "Pearson correlation of 10 ms RMS envelopes, channels summed in power"
LEVEL_CONVENTION = "absolute difference of RMS level over all channels"
LOUDNESS_CONVENTION = "absolute difference of integrated loudness, ITU-R BS.1770-5 with both gates"
SDR_CONVENTION = f"zero-mean, mean over channels, within ±{MAX_SDR_DB:g} dB, no alignment"


SOUND_METRICS: dict[str, Measure] = {
    "lsd_db": Measure("dB", False, LSD_CONVENTION),
    "stft_distance": Measure("", False, STFT_CONVENTION),
    "envelope_r": Measure("", True, ENVELOPE_CONVENTION),
    "level_db": Measure("dB", False, LEVEL_CONVENTION),
    "loudness_lu": Measure("LU", False, LOUDNESS_CONVENTION),
    "balance_db": Measure("dB", False, BALANCE_CONVENTION),
    "channel_r_error": Measure("", False, CORRELATION_CONVENTION),
    "placement_error": Measure("", False, PLACEMENT_CONVENTION),
    "swap_margin_db": Measure("dB", True, SWAP_CONVENTION),
    "lag_ms": Measure("ms", None, LAG_CONVENTION),
    "si_sdr": Measure("dB", True, SDR_CONVENTION),
    "stoi": Measure("", True, STOI_CONVENTION),
    "estoi": Measure("", True, STOI_CONVENTION),
    "dnsmos": Measure("MOS", True, DNSMOS_CONVENTION),
    "pesq_nb": Measure("MOS-LQO", True, PESQ_CONVENTION),
    "pesq_wb": Measure("MOS-LQO", True, PESQ_CONVENTION),
}
for _name in ("si_sdr", "stoi", "estoi"):
    SOUND_METRICS[f"{_name}_aligned"] = SOUND_METRICS[_name]._replace(convention=f"as {_name}, after taking out lag_ms")
for _name in ("si_sdr", "stoi", "estoi", "pesq_nb", "pesq_wb"):
    SOUND_METRICS[f"{_name}_worst"] = SOUND_METRICS[_name]._replace(convention=f"as {_name}, the worse channel")


def measure(reference_CT: Waveform, degraded_CT: Waveform, sample_rate_hz: int) -> dict[str, Score]:
    """Every metric of `SOUND_METRICS` but PESQ, which is cheaper for many clips at once: see `pesq_many`."""
    pair = (reference_CT, degraded_CT)
    aligned_reference_CT, aligned_CT, lag_ms = align(*pair, sample_rate_hz)
    found = {
        "lsd_db": lsd_db(*pair, sample_rate_hz),
        "stft_distance": stft_distance(*pair, sample_rate_hz),
        "envelope_r": envelope_r(*pair, sample_rate_hz),
        "level_db": level_error_db(*pair),
        "loudness_lu": loudness_error_lu(*pair, sample_rate_hz),
        "balance_db": balance_error_db(*pair),
        "channel_r_error": channel_r_error(*pair),
        "placement_error": placement_error(*pair, sample_rate_hz),
        "swap_margin_db": swap_margin_db(*pair, sample_rate_hz),
        "lag_ms": lag_ms,
        "dnsmos": dnsmos(degraded_CT, sample_rate_hz),
    }
    for name, raw, aligned in (
        ("si_sdr", si_sdr_db(*pair), si_sdr_db(aligned_reference_CT, aligned_CT)),
        ("stoi", stoi(*pair, sample_rate_hz), stoi(aligned_reference_CT, aligned_CT, sample_rate_hz)),
        (
            "estoi",
            stoi(*pair, sample_rate_hz, extended=True),
            stoi(aligned_reference_CT, aligned_CT, sample_rate_hz, extended=True),
        ),
    ):
        missing = None if lag_ms.value is not None else Score.missing(f"no lag to take out: {lag_ms.reason}")
        found |= {name: raw.mean, f"{name}_worst": raw.worst, f"{name}_aligned": missing or aligned.mean}
    return found


def level_error_db(reference_CT: Waveform, degraded_CT: Waveform) -> Score:
    """How much louder or quieter the whole is, as an absolute value, dB."""
    return why_not(reference_CT, degraded_CT) or Score(abs(level_db(degraded_CT) - level_db(reference_CT)))


def loudness_lufs(waveform_CT: Waveform, sample_rate_hz: int) -> float | None:
    """Integrated loudness, both gates, LUFS; None where all is below -70."""
    listener = hearing.Listener(sample_rate_hz, [str(channel) for channel in range(len(waveform_CT))], speech_too=False)
    for start in range(0, waveform_CT.shape[1], sample_rate_hz):
        listener.take(np.asarray(waveform_CT[:, start : start + sample_rate_hz], np.float32))
    track, _ = listener.finish(0.0)
    whole = track.loudness_B[: int(track.duration_s / track.block_s + 1e-6)]
    return loudness.integrated((whole if len(whole) >= loudness.WINDOW_BLOCKS else track.loudness_B).astype(np.float64))


def loudness_error_lu(reference_CT: Waveform, degraded_CT: Waveform, sample_rate_hz: int) -> Score:
    """How much louder or quieter the sound is to the ear, as an absolute value, LU."""
    if reason := why_not(reference_CT, degraded_CT):
        return reason
    found = [loudness_lufs(sound, sample_rate_hz) for sound in (reference_CT, degraded_CT)]
    if found[0] is None or found[1] is None:
        return Score.missing(f"{'reference' if found[0] is None else 'generated sound'} is below -70 LUFS throughout")
    return Score(abs(found[1] - found[0]))


def envelope(waveform_CT: Waveform, sample_rate_hz: int) -> NDArray[np.float64]:
    """Loudness over time: root of the mean power of all channels in 10 ms pieces; a last short piece is left out."""
    size = round(ENVELOPE_S * sample_rate_hz)
    power_T = np.square(waveform_CT, dtype=np.float64).mean(axis=0)
    whole = len(power_T) // size * size
    return np.sqrt(power_T[:whole].reshape(-1, size).mean(axis=1))


def envelope_r(reference_CT: Waveform, degraded_CT: Waveform, sample_rate_hz: int) -> Score:
    """Pearson correlation of the envelopes: whether things sound when they should."""
    if reason := why_not(reference_CT, degraded_CT):
        return reason
    reference, degraded = envelope(reference_CT, sample_rate_hz), envelope(degraded_CT, sample_rate_hz)
    if len(reference) < 3:
        return Score.missing(f"the sound is shorter than {3 * ENVELOPE_S:g} s")
    reference, degraded = reference - reference.mean(), degraded - degraded.mean()
    norm = float(np.linalg.norm(reference) * np.linalg.norm(degraded))
    if norm < 1e-12:
        return Score.missing("an envelope is constant")
    return Score(float(reference @ degraded) / norm)


def si_sdr_db(reference_CT: Waveform, degraded_CT: Waveform) -> ChannelScores:
    """Scale-invariant signal-to-distortion ratio of every channel, dB: what of the sound is the reference, at any level.

    Source: Le Roux et al. 2019, "SDR – half-baked or well done?" (arXiv 1811.02508), equation 5; means are taken out.
    """
    return by_channel(reference_CT, degraded_CT, channel_si_sdr)


def channel_si_sdr(reference_T: Waveform, degraded_T: Waveform) -> Score:
    """SI-SDR of one channel, capped at ±100 dB."""
    reference, degraded = (sound_T - sound_T.mean(dtype=np.float64) for sound_T in (reference_T, degraded_T))
    target = reference * (degraded @ reference / (reference @ reference))
    error, kept = degraded - target, 10 ** (-MAX_SDR_DB / 10)
    ratio = (target @ target) / max(error @ error, kept * (target @ target), 1e-300)
    return Score(10 * float(np.log10(max(ratio, kept))))
