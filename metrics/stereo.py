"""Where on the stage a sound is: level between the sides, likeness of the sides, side by side over time, swapped sides.

Together they show what a single number hides: sides exchanged, one channel sent to both, sound moved to another place.
Legend: C = 2 channels (left, right), T samples, B blocks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from metrics.score import Score
from metrics.spectra import lsd_db
from metrics.waveforms import SILENT_BELOW_DB, Waveform, decibels, level_db, moments, why_not

MAX_BALANCE_DB = 40.0
"""A channel this much quieter than the other is as good as silent; caps the placement of hard-panned sound."""
BLOCK_S = 0.1
"""Step of placement over time, s: about what the ear itself needs to follow movement (Grantham and Wightman 1978)."""

BALANCE_CONVENTION = "absolute difference of the left-to-right level ratio, each capped at 40 dB"
CORRELATION_CONVENTION = "absolute difference of the correlation between left and right at lag 0 (1: one channel twice)"
PLACEMENT_CONVENTION = (
    "mean absolute difference of (left - right) / (left + right) power over blocks of 100 ms in which both sounds are "
    "above -70 dB full scale; 0 same place, 2 opposite sides"
)
SWAP_CONVENTION = "lsd_db with the generated sides exchanged minus lsd_db as it is; below 0 the sides are swapped"


def balance_db(stereo_CT: Waveform) -> float:
    """Level of left over right, dB within ±40: where on the stage the sound is."""
    difference = level_db(stereo_CT[0]) - level_db(stereo_CT[1])
    return float(np.clip(difference, -MAX_BALANCE_DB, MAX_BALANCE_DB))


def balance_error_db(reference_CT: Waveform, degraded_CT: Waveform) -> Score:
    """How far the sound is from where it should be, left to right, dB of level ratio."""
    return why_not_stereo(reference_CT, degraded_CT) or Score(abs(balance_db(degraded_CT) - balance_db(reference_CT)))


def channel_r(stereo_CT: Waveform) -> Score:
    """Correlation of left and right: 1 one channel twice (or panned), 0 nothing in common, -1 opposite polarity."""
    if reason := why_not_stereo(stereo_CT, stereo_CT):
        return reason
    for name, side_T in zip(("left", "right"), stereo_CT, strict=True):
        if decibels(moments(side_T)[1]) < SILENT_BELOW_DB:
            return Score.missing(f"its {name} side is silent (below {SILENT_BELOW_DB:g} dB full scale)")
    left, right = (side_T - side_T.mean(dtype=np.float64) for side_T in stereo_CT)
    return Score(float(left @ right / np.sqrt((left @ left) * (right @ right))))


def channel_r_error(reference_CT: Waveform, degraded_CT: Waveform) -> Score:
    """How far the likeness of the sides is from the reference's, 0–2: large where stereo was made of one channel."""
    if reason := why_not_stereo(reference_CT, degraded_CT):
        return reason
    found: list[float] = []
    for name, sound in (("reference", reference_CT), ("generated sound", degraded_CT)):
        score = channel_r(sound)
        if score.value is None:
            return Score.missing(f"{name}: {score.reason}")
        found.append(score.value)
    return Score(abs(found[1] - found[0]))


def placement_error(reference_CT: Waveform, degraded_CT: Waveform, sample_rate_hz: int) -> Score:
    """How far sounds are from where they should be at each moment, 0–2: seen also where the whole is balanced."""
    if reason := why_not_stereo(reference_CT, degraded_CT):
        return reason
    reference, degraded = (powers(sound, sample_rate_hz) for sound in (reference_CT, degraded_CT))
    floor = 2 * 10 ** (SILENT_BELOW_DB / 10)
    heard_B = (reference.sum(axis=0) > floor) & (degraded.sum(axis=0) > floor)
    if not heard_B.any():
        return Score.missing(
            f"no {1000 * BLOCK_S:g} ms in which both sounds are above {SILENT_BELOW_DB:g} dB full scale"
        )
    places = [(left - right) / (left + right) for left, right in (reference[:, heard_B], degraded[:, heard_B])]
    return Score(float(np.abs(places[1] - places[0]).mean()))


def swap_margin_db(reference_CT: Waveform, degraded_CT: Waveform, sample_rate_hz: int) -> Score:
    """How much worse the sound would fit with its sides exchanged, dB: below 0 they are swapped, 0 says nothing."""
    if reason := why_not_stereo(reference_CT, degraded_CT):
        return reason
    kept, swapped = (lsd_db(reference_CT, sound, sample_rate_hz).value for sound in (degraded_CT, degraded_CT[::-1]))
    assert kept is not None
    assert swapped is not None
    return Score(swapped - kept)


def powers(stereo_CT: Waveform, sample_rate_hz: int) -> NDArray[np.float64]:
    """Mean square of each side in blocks, (C, B); a last short block counts as one."""
    length = stereo_CT.shape[1]
    starts = list(range(0, length, round(BLOCK_S * sample_rate_hz)))
    sums = np.add.reduceat(np.square(stereo_CT, dtype=np.float64), starts, axis=1)
    return sums / np.diff(np.array([*starts, length]))


def why_not_stereo(reference_CT: Waveform, degraded_CT: Waveform) -> Score | None:
    """The reason why the placement of a pair cannot be compared, or None."""
    if reason := why_not(reference_CT, degraded_CT):
        return reason
    if len(reference_CT) != 2:
        return Score.missing(f"placement needs 2 channels; the sound has {len(reference_CT)}")
    return None
