"""Long sound cut into pieces: so that memory stays flat and no reference implementation overruns its tables.

Legend: T samples of one channel.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from metrics.score import Score
from metrics.waveforms import SILENT_BELOW_DB, Waveform, level_db, why_not

WHOLE = 1.25
"""Sound of up to this many times a piece's length is scored whole."""
MOVED = 1 / 8
"""How far a cut may move to a quiet place, shares of a piece: so no piece is longer than what is scored whole."""
QUIET_S = 0.1
"""Length of the quietest place, s."""
PAUSE = Score.missing("the reference is silent here")


def described(piece_s: float) -> str:
    """The rule in words, for a convention."""
    return (
        f"sound over {WHOLE * piece_s:g} s in pieces of about {piece_s:g} s, cut where the reference is quietest, "
        "mean by duration, pauses of the reference left out"
    )


def pieces(reference_T: Waveform, sample_rate_hz: int, piece_s: float) -> list[slice]:
    """How a sound is cut: whole up to 1.25 pieces, else into equal parts whose ends move to the quietest 0.1 s near."""
    length, size = len(reference_T), piece_s * sample_rate_hz
    if length <= WHOLE * size:
        return [slice(0, length)]
    count = int(np.ceil(length / size))
    reach, block = round(MOVED * size), round(QUIET_S * sample_rate_hz)
    cuts = [0]
    for number in range(1, count):
        start = round(number * length / count) - reach
        near = reference_T[start : start + 2 * reach // block * block].reshape(-1, block)
        cuts.append(start + int(np.square(near, dtype=np.float64).sum(axis=1).argmin()) * block + block // 2)
    return [slice(start, stop) for start, stop in zip(cuts, [*cuts[1:], length], strict=True)]


def pooled(cuts: Sequence[slice], scores: Sequence[Score], sample_rate_hz: int) -> Score:
    """Mean by duration; missing where a piece is missing, pauses excepted."""
    for cut, score in zip(cuts, scores, strict=True):
        if score.value is None and (score != PAUSE or len(cuts) == 1):
            place = f"from {cut.start / sample_rate_hz:.1f} to {cut.stop / sample_rate_hz:.1f} s: "
            return Score.missing((place if len(cuts) > 1 else "") + score.reason)
    kept = [
        (score.value, cut.stop - cut.start) for cut, score in zip(cuts, scores, strict=True) if score.value is not None
    ]
    if not kept:
        return PAUSE
    values, weights = zip(*kept, strict=True)
    return Score(float(np.average(values, weights=weights)))


def why_not_piece(reference_T: Waveform, degraded_T: Waveform) -> Score | None:
    """The reason why a piece has no score, or None: a pause of the reference is no fault of the other side."""
    return PAUSE if level_db(reference_T) < SILENT_BELOW_DB else why_not(reference_T, degraded_T)
