"""Sound yardsticks on float samples in [-1, 1]: PESQ, STOI, log-spectral distance, level, placement, envelope.

Legend: C channels (left, right), T samples. Reference and degraded are paired by sample; nothing is aligned first.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Literal, NamedTuple, cast

import numpy as np
import soxr
from numpy.typing import NDArray

from metrics.score import Score

Waveform = NDArray[np.floating]
Mode = Literal["nb", "wb"]

SILENCE_DB = -120.0
"""Level of digital silence, dB full scale: far below the 16-bit floor, and what clips record."""
SILENT_BELOW_DB = -70.0
"""Quieter than this is called silent: near the 12-bit floor, unheard beside any ordinary sound."""
WINDOW_S, HOP_S = 0.032, 0.008
"""Short-time spectrum: 32 ms windows every 8 ms, the customary speech analysis window."""
FLOOR_DB = -60.0
"""Spectra are floored here, dB of a full-scale sine: a sound 60 dB down counts as died away (ISO 3382)."""
MAX_BALANCE_DB = 40.0
"""A channel this much quieter than the other is as good as silent; caps the placement of hard-panned sound."""
ENVELOPE_S = 0.010
STOI_RATE_HZ = 10_000
"""STOI's own rate (Taal et al. 2011); we resample, so that one resampler serves every yardstick."""
PESQ_LIMIT_S = 60.0
"""A clip's PESQ takes 0.02–0.03 s per second of sound; a minute means it hangs."""

LSD_CONVENTION = "Hann 32 ms, hop 8 ms, floor -60 dB full scale; RMS over frequency, mean over frames and channels"
PESQ_CONVENTION = "pesq 0.0.4, mean over channels, no alignment of ours, soxr HQ where the rate must change"
STOI_CONVENTION = "pystoi 0.4.1, mean over channels, soxr HQ to 10 kHz, no alignment"
BALANCE_CONVENTION = "absolute difference of the left-to-right level ratio, each capped at 40 dB"
ENVELOPE_CONVENTION = "Pearson correlation of 10 ms RMS envelopes, channels summed in power"
LEVEL_CONVENTION = "absolute difference of RMS level over all channels"


class ChannelScores(NamedTuple):
    """A monaural yardstick applied to every channel: missing as a whole where any channel is."""

    mean: Score
    worst: Score


def resample(waveform_CT: Waveform, from_hz: int, to_hz: int) -> Waveform:
    """The sound at another rate, by the one resampler used for both sides of every comparison."""
    if from_hz == to_hz:
        return waveform_CT
    result_TC = cast("Waveform", soxr.resample(waveform_CT.T, from_hz, to_hz, quality="HQ"))
    return result_TC.T


def level_db(waveform: Waveform) -> float:
    """Root mean square over all samples, dB full scale; -120 for silence or no samples."""
    power = float(np.mean(np.square(waveform, dtype=np.float64))) if waveform.size else 0.0
    return max(SILENCE_DB, 10 * float(np.log10(power))) if power > 0 else SILENCE_DB


def level_error_db(reference_CT: Waveform, degraded_CT: Waveform) -> Score:
    """How much louder or quieter the whole is, as an absolute value, dB."""
    return why_not(reference_CT, degraded_CT) or Score(abs(level_db(degraded_CT) - level_db(reference_CT)))


def lsd_db(reference_CT: Waveform, degraded_CT: Waveform, sample_rate_hz: int) -> Score:
    """Log-spectral distance: RMS over frequency of the dB difference, mean over frames and channels.

    Source: Gray and Markel 1976, "Distance measures for speech processing", the RMS log spectral measure,
    with a floor as any implementation on digital silence needs.
    """
    if reason := why_not(reference_CT, degraded_CT, silence_matters=False):
        return reason
    reference, degraded = (spectrum_db(waveform, sample_rate_hz) for waveform in (reference_CT, degraded_CT))
    power: NDArray[np.float64] = np.square(reference - degraded).mean(axis=-1)
    return Score(float(np.sqrt(power).mean()))


def spectrum_db(waveform_CT: Waveform, sample_rate_hz: int) -> NDArray[np.float64]:
    """Magnitudes (channel, frame, frequency), dB of a full-scale sine, floored; the end is padded with zeros."""
    window_size, hop = round(WINDOW_S * sample_rate_hz), round(HOP_S * sample_rate_hz)
    missing = max(0, window_size - waveform_CT.shape[1]) or -(waveform_CT.shape[1] - window_size) % hop
    padded = np.pad(waveform_CT.astype(np.float64), ((0, 0), (0, missing)))
    window = np.hanning(window_size + 1)[:-1]
    frames = np.lib.stride_tricks.sliding_window_view(padded, window_size, axis=1)[:, ::hop]
    magnitude = np.abs(np.fft.rfft(frames * window, axis=-1)) / (window.sum() / 2)
    return np.maximum(20 * np.log10(np.maximum(magnitude, 1e-12)), FLOOR_DB)


def balance_db(stereo_CT: Waveform) -> float:
    """Level of left over right, dB within ±40: where on the stage the sound is."""
    difference = level_db(stereo_CT[0]) - level_db(stereo_CT[1])
    return float(np.clip(difference, -MAX_BALANCE_DB, MAX_BALANCE_DB))


def balance_error_db(reference_CT: Waveform, degraded_CT: Waveform) -> Score:
    """How far the sound is from where it should be, left to right, dB of level ratio."""
    if reason := why_not(reference_CT, degraded_CT):
        return reason
    if len(reference_CT) != 2:
        return Score.missing(f"placement needs 2 channels; the sound has {len(reference_CT)}")
    return Score(abs(balance_db(degraded_CT) - balance_db(reference_CT)))


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


def stoi(
    reference_CT: Waveform, degraded_CT: Waveform, sample_rate_hz: int, *, extended: bool = False
) -> ChannelScores:
    """Short-time objective intelligibility of every channel, 0–1 (extended: Jensen and Taal 2016)."""
    if reason := why_not(reference_CT, degraded_CT, silence_matters=False):
        return ChannelScores(reason, reason)
    pairs = zip(*(resample(sound, sample_rate_hz, STOI_RATE_HZ) for sound in (reference_CT, degraded_CT)), strict=True)
    return over_channels([channel_stoi(reference_T, degraded_T, extended) for reference_T, degraded_T in pairs])


def channel_stoi(reference_T: Waveform, degraded_T: Waveform, extended: bool) -> Score:
    """STOI of one channel at 10 kHz; the library answers 0 or 1e-5 where it has no answer, we say so."""
    import pystoi

    if reason := why_not(reference_T, degraded_T):
        return reason
    if len(reference_T) < 512:
        return Score.missing("sound too short for STOI")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            value = cast("float", pystoi.stoi(reference_T, degraded_T, STOI_RATE_HZ, extended=extended))  # pyright: ignore[reportUnknownMemberType]
        except RuntimeWarning:
            return Score.missing("under 30 frames (0.4 s) of sound within 40 dB of its peak, too few for STOI")
    return Score(float(value))


def pesq_nb(reference_CT: Waveform, degraded_CT: Waveform, sample_rate_hz: int) -> ChannelScores:
    """Narrow-band PESQ (ITU-T P.862, MOS-LQO) of every channel of one clip; see `pesq_many`."""
    return pesq_many([(reference_CT, degraded_CT)], sample_rate_hz, "nb")[0]


def pesq_wb(reference_CT: Waveform, degraded_CT: Waveform, sample_rate_hz: int) -> ChannelScores:
    """Wide-band PESQ (ITU-T P.862.2) of every channel of one clip; see `pesq_many`."""
    return pesq_many([(reference_CT, degraded_CT)], sample_rate_hz, "wb")[0]


def pesq_many(
    pairs: Sequence[tuple[Waveform, Waveform]], sample_rate_hz: int, mode: Mode, *, limit_s: float = PESQ_LIMIT_S
) -> list[ChannelScores]:
    """PESQ of many clips in one child process, every channel by itself; (reference, degraded) pairs.

    8 kHz sound is scored narrow-band at 8 kHz; all else is brought to 16 kHz. What the standard does not define,
    what makes its C code crash and what takes over `limit_s` a channel is missing with that reason.
    """
    if mode == "wb" and sample_rate_hz < 16_000:
        missing = Score.missing(f"sound at {sample_rate_hz} Hz holds no wide band; it needs 16000 Hz")
        return [ChannelScores(missing, missing)] * len(pairs)
    rate_hz = 8000 if sample_rate_hz == 8000 else 16_000
    scores: list[list[Score]] = []
    waiting: list[tuple[Waveform, Waveform]] = []
    places: list[tuple[int, int]] = []
    for number, (reference_CT, degraded_CT) in enumerate(pairs):
        if reason := why_not(reference_CT, degraded_CT, silence_matters=False):
            scores.append([reason])
            continue
        scores.append([why_not(*channel) or Score(0) for channel in zip(reference_CT, degraded_CT, strict=True)])
        resampled = (resample(sound, sample_rate_hz, rate_hz) for sound in (reference_CT, degraded_CT))
        for channel, pair in enumerate(zip(*resampled, strict=True)):
            if scores[number][channel].value is not None:
                waiting.append(pair)
                places.append((number, channel))
    for (number, channel), score in zip(places, run_pesq(waiting, rate_hz, mode, limit_s), strict=True):
        scores[number][channel] = score
    return [over_channels(channels) for channels in scores]


def run_pesq(pairs: Sequence[tuple[Waveform, Waveform]], rate_hz: int, mode: Mode, limit_s: float) -> list[Score]:
    """Scores of mono pairs from child processes; one that dies or hangs costs its pair alone."""
    scores: list[Score] = []
    with tempfile.TemporaryDirectory(prefix="soundstage-pesq-") as folder:
        path = Path(folder) / "pairs.npz"
        arrays = {f"reference_{number}": np.asarray(pair[0], np.float64) for number, pair in enumerate(pairs)}
        arrays |= {f"degraded_{number}": np.asarray(pair[1], np.float64) for number, pair in enumerate(pairs)}
        np.savez(path, num_pairs=len(pairs), rate_hz=rate_hz, mode=mode, **arrays)  # pyright: ignore[reportArgumentType]
        while len(scores) < len(pairs):
            answers, ending = ask_child(path, len(scores), len(pairs), limit_s)
            scores += answers
            if len(scores) < len(pairs):
                scores.append(Score.missing(ending))
    return scores


def ask_child(path: Path, first: int, num_pairs: int, limit_s: float) -> tuple[list[Score], str]:
    """The answers one child gave before it ended, and how it ended."""
    command = [sys.executable, "-m", "metrics.pesq_child", str(path), str(first)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    answers: list[Score] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        lines: queue.Queue[str] = queue.Queue()
        reader = threading.Thread(target=forward, args=(child.stdout, lines), daemon=True)
        reader.start()
        try:
            while len(answers) + first < num_pairs and (line := lines.get(timeout=limit_s)):
                answers.append(Score(**json.loads(line)))
        except queue.Empty:
            child.kill()
            return answers, f"PESQ took over {limit_s:g} s"
        _, errors = child.communicate()
    if child.returncode > 0:
        raise RuntimeError(f"PESQ does not run here: {errors.strip().splitlines()[-1]}; pip install pesq==0.0.4")
    return answers, f"PESQ crashed with signal {-child.returncode}"


def forward(stream: IO[str], lines: queue.Queue[str]) -> None:
    """Hand a stream's lines on; an empty one marks its end."""
    for line in stream:
        lines.put(line)
    lines.put("")


def over_channels(scores: Sequence[Score]) -> ChannelScores:
    """Mean and worst of the channels; missing with the first missing channel's reason."""
    for number, score in enumerate(scores):
        if score.value is None:
            reason = score.reason if len(scores) == 1 else f"channel {number}: {score.reason}"
            return ChannelScores(Score.missing(reason), Score.missing(reason))
    values = [score.value for score in scores if score.value is not None]
    return ChannelScores(Score(float(np.mean(values))), Score(min(values)))


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
        if silence_matters and level_db(sound) < SILENT_BELOW_DB:
            return Score.missing(f"{name} is silent (below {SILENT_BELOW_DB:g} dB full scale)")
    return None
