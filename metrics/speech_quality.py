"""Yardsticks made for speech: STOI against a reference, DNSMOS without one. Long sound is scored in pieces.

Legend: C channels (left, right), T samples, floats in [-1, 1]. Nothing is aligned here; see `waveforms.align`.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import cast

import numpy as np
from numpy.typing import NDArray

from data import detectors, hearing, speech
from metrics.pieces import described, pieces, pooled, why_not_piece
from metrics.score import Score
from metrics.waveforms import ChannelScores, Waveform, by_channel, downmix, resample, why_not

STOI_PIECE_S = 48.0
"""The library holds 130 MB for a minute of sound, 200 MB for the extended measure (measured)."""
DNSMOS_PIECE_S = 12.0
"""The network holds 75 MB an activation for each of the windows of a piece, which are a second apart."""

STOI_CONVENTION = (
    "pystoi 0.4.1 with its own resampler (Octave's) to 10 kHz, mean over channels, no alignment; "
    + described(STOI_PIECE_S)
)
DNSMOS_CONVENTION = (
    "DNSMOS P.835 overall, all channels mixed to one at 16 kHz, mean by duration over pieces of about "
    f"{DNSMOS_PIECE_S:g} s of which at least {detectors.MIN_SPEECH:.0%} is speech (silero-vad, chance {hearing.SPEECH:g})"
)


def stoi(
    reference_CT: Waveform, degraded_CT: Waveform, sample_rate_hz: int, *, extended: bool = False
) -> ChannelScores:
    """Short-time objective intelligibility of every channel, 0–1 (Taal et al. 2011; extended: Jensen and Taal 2016)."""

    def in_pieces(reference_T: Waveform, degraded_T: Waveform) -> Score:
        cuts = pieces(reference_T, sample_rate_hz, STOI_PIECE_S)
        pairs = ((reference_T[cut], degraded_T[cut]) for cut in cuts)
        scores = [why_not_piece(*pair) or piece_stoi(*pair, sample_rate_hz, extended=extended) for pair in pairs]
        return pooled(cuts, scores, sample_rate_hz)

    return by_channel(reference_CT, degraded_CT, in_pieces)


def piece_stoi(reference_T: Waveform, degraded_T: Waveform, sample_rate_hz: int, *, extended: bool) -> Score:
    """STOI of one channel; the library answers 0 or 1e-5 where it has no answer, we say so."""
    import pystoi

    if len(reference_T) < 0.0512 * sample_rate_hz:  # two of its windows, without which it fails
        return Score.missing("sound too short for STOI, which needs 0.4 s")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            value = cast("float", pystoi.stoi(reference_T, degraded_T, sample_rate_hz, extended=extended))  # pyright: ignore[reportUnknownMemberType]
        except RuntimeWarning:
            return Score.missing("under 30 frames (0.4 s) of sound within 40 dB of its peak, too few for STOI")
    return Score(float(value))


def dnsmos(waveform_CT: Waveform, sample_rate_hz: int) -> Score:
    """Quality of speech without a reference, 1–5 (DNSMOS P.835, overall), of what pieces hold speech.

    Without speech the network's answer means nothing: silence gets more than noise.
    """
    package, remedy = detectors.PACKAGES["dnsmos"]
    if importlib.util.find_spec(package) is None:
        return Score.missing(f"{package} is not installed; {remedy}")
    if reason := why_not(waveform_CT, waveform_CT):
        return reason
    mono_T = resample(downmix(waveform_CT), sample_rate_hz, detectors.SPEECH_HZ)[0].astype(np.float32)
    cuts = pieces(mono_T, detectors.SPEECH_HZ, DNSMOS_PIECE_S)
    try:
        shares = [speech_share(mono_T[cut], detectors.SPEECH_HZ) for cut in cuts]
    except RuntimeError as error:
        return Score.missing(str(error))
    spoken = [cut for cut, share in zip(cuts, shares, strict=True) if share >= detectors.MIN_SPEECH]
    if not spoken:
        return Score.missing(f"at most {max(shares):.0%} of the sound is speech; limit {detectors.MIN_SPEECH:.0%}")
    values = [detectors.dnsmos(mono_T[cut]) for cut in spoken]
    return Score(float(np.average(values, weights=[cut.stop - cut.start for cut in spoken])))


def speech_share(mono_T: NDArray[np.float32], sample_rate_hz: int) -> float:
    """Share of blocks of 0.1 s that are speech.

    Raises:
        RuntimeError: silero-vad or onnxruntime is not installed.
    """
    ear = speech.Ear(sample_rate_hz)
    ear.take(mono_T)
    num_blocks = max(1, round(len(mono_T) / sample_rate_hz / hearing.BLOCK_S))
    return float((ear.finish(num_blocks, hearing.BLOCK_S) >= hearing.SPEECH).mean())
