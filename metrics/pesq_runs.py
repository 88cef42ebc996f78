"""PESQ in processes of its own, piece by piece: its C code may end the interpreter, and does beyond 50 utterances.

Legend: C channels (left, right), T samples, floats in [-1, 1]. PESQ aligns by itself.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Literal, NamedTuple

import numpy as np

from metrics.pieces import described, pieces, pooled, why_not_piece
from metrics.score import Score
from metrics.waveforms import ChannelScores, Waveform, over_channels, resample, why_not

Mode = Literal["nb", "wb"]
Pair = tuple[Waveform, Waveform]

PIECE_S = 12.0
"""P.862.3 asks for test signals of 8 to 30 s. Utterances are at least 0.4 s apart (0.2 s of speech, 0.2 s of pause, in
the C code), so no piece, 15 s at most, overruns its table of 50."""
LIMIT_S = 60.0
"""A piece's PESQ takes 0.02–0.03 s per second of sound; a minute means it hangs."""

PESQ_CONVENTION = (
    "pesq 0.0.4, mean over channels, no alignment of ours, soxr HQ where the rate must change; " + described(PIECE_S)
)


class Piece(NamedTuple):
    """A part of one channel of one clip, and the reason why it has no score, if there is one."""

    clip: int
    channel: int
    cut: slice
    reason: Score | None


def pesq_nb(reference_CT: Waveform, degraded_CT: Waveform, sample_rate_hz: int) -> ChannelScores:
    """Narrow-band PESQ (ITU-T P.862, MOS-LQO) of every channel of one clip; see `pesq_many`."""
    return pesq_many([(reference_CT, degraded_CT)], sample_rate_hz, "nb")[0]


def pesq_wb(reference_CT: Waveform, degraded_CT: Waveform, sample_rate_hz: int) -> ChannelScores:
    """Wide-band PESQ (ITU-T P.862.2) of every channel of one clip; see `pesq_many`."""
    return pesq_many([(reference_CT, degraded_CT)], sample_rate_hz, "wb")[0]


def pesq_many(
    pairs: Sequence[Pair], sample_rate_hz: int, mode: Mode, *, limit_s: float = LIMIT_S
) -> list[ChannelScores]:
    """PESQ of many clips in one child process, every channel by itself; (reference, degraded) pairs.

    8 kHz sound is scored narrow-band at 8 kHz; all else is brought to 16 kHz. What the standard does not define,
    what makes its C code crash and what takes over `limit_s` a piece is missing with that reason.
    """
    if mode == "wb" and sample_rate_hz < 16_000:
        missing = Score.missing(f"sound at {sample_rate_hz} Hz holds no wide band; it needs 16000 Hz")
        return [ChannelScores(missing, missing)] * len(pairs)
    rate_hz = 8000 if sample_rate_hz == 8000 else 16_000
    found = list(pieces_of(pairs, sample_rate_hz))
    wanted = [number for number, piece in enumerate(found) if piece.reason is None]
    with tempfile.TemporaryDirectory(prefix="soundstage-pesq-") as folder:
        for place, number in enumerate(wanted):  # one at a time: no second copy of a long sound is ever held
            clip, channel, cut, _ = found[number]
            both = np.stack([sound[channel, cut] for sound in pairs[clip]])
            np.save(Path(folder) / f"{place}.npy", resample(both, sample_rate_hz, rate_hz).astype(np.float32))
        answers = dict(zip(wanted, run_pesq(Path(folder), len(wanted), rate_hz, mode, limit_s), strict=True))
    scores = [piece.reason or answers[number] for number, piece in enumerate(found)]
    channels: list[list[Score]] = [[] for _ in pairs]
    for (clip, _), group in itertools.groupby(zip(found, scores, strict=True), lambda each: each[0][:2]):
        members = list(group)
        cuts = [piece.cut for piece, _ in members]
        channels[clip].append(pooled(cuts, [score for _, score in members], sample_rate_hz))
    return [over_channels(scores) for scores in channels]


def pieces_of(pairs: Sequence[Pair], sample_rate_hz: int) -> Iterator[Piece]:
    """Every channel's pieces, in order; what cannot be compared as a whole is one piece."""
    for clip, (reference_CT, degraded_CT) in enumerate(pairs):
        whole = slice(0, reference_CT.shape[-1])
        if reason := why_not(reference_CT, degraded_CT, silence_matters=False):
            yield Piece(clip, 0, whole, reason)
            continue
        for channel, pair in enumerate(zip(reference_CT, degraded_CT, strict=True)):
            if reason := why_not(*pair):
                yield Piece(clip, channel, whole, reason)
                continue
            for cut in pieces(pair[0], sample_rate_hz, PIECE_S):
                yield Piece(clip, channel, cut, why_not_piece(pair[0][cut], pair[1][cut]))


def run_pesq(folder: Path, count: int, rate_hz: int, mode: Mode, limit_s: float) -> list[Score]:
    """Scores of 0.npy, 1.npy … (2, T) from child processes; one that dies or hangs costs its piece alone."""
    scores: list[Score] = []
    while len(scores) < count:
        answers, ending = ask_child([str(folder), str(len(scores)), str(count), str(rate_hz), mode], limit_s)
        scores += answers
        if len(scores) < count:
            scores.append(Score.missing(ending))
    return scores


def ask_child(arguments: list[str], limit_s: float) -> tuple[list[Score], str]:
    """The answers one child gave before it ended, and how it ended."""
    command = [sys.executable, "-m", "metrics.pesq_child", *arguments]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    answers: list[Score] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        lines: queue.Queue[str] = queue.Queue()
        reader = threading.Thread(target=forward, args=(child.stdout, lines), daemon=True)
        reader.start()
        try:
            while line := lines.get(timeout=limit_s):
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
