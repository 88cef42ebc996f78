"""The published ways to measure LSE, which differ in whose face is cut out, what counts as a track and how tracks join.

Numbers of two protocols are not comparable. Source: the projects named; research on why their papers disagree is in
Wav2Lip issues 445 and 579 and LipVoicer issue 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from metrics.lipsync.distances import Reading, missing
from metrics.score import Score

Rule = Literal["mean", "best", "widest_margin"]
"""How the tracks of a clip become one value: `mean` of each value over tracks; `best`, the largest LSE-C and, from
whichever track, the smallest LSE-D; `widest_margin`, the track whose LSE-C minus LSE-D is largest."""


@dataclass(frozen=True)
class Protocol:
    """One way to measure. Defaults are those of joonson/syncnet_python (run_pipeline.py), which all inherit."""

    name: str
    rules: tuple[Rule, ...] = ("mean",)
    """How tracks are joined; the first gives the headline."""
    whole_frame: bool = False
    """Show SyncNet the whole picture, squeezed to 224 px square, instead of a face that was found."""
    min_track: int = 100
    """Pictures that a shot must have, and pictures with the face found that a track must exceed."""
    max_gap: int = 25
    """Frames by which a face may follow the last one of its track."""
    min_overlap: float = 0.5
    """Intersection over union with the face before that must be exceeded."""
    min_face_px: float = 100
    """What the mean longer side of a track's face must exceed."""
    scale: float = 0.25
    """By how much pictures are scaled before S3FD looks at them."""
    min_confidence: float = 0.9
    """What the confidence of a face must exceed."""
    aac: bool = False
    """Put each track's sound through AAC, as the protocol's MP4 crops do."""
    confidence_only: bool = False
    """The protocol tells no LSE-D."""
    vocals: bool = False
    """The protocol hears the separated voice; the caller gives it instead of the mix."""

    def __post_init__(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            ValueError: no rule is given, or tracks would be too short to smooth and to shift.
        """
        if not self.rules:
            raise ValueError(f"protocol {self.name}: rules is empty; it needs at least one, such as 'mean'")
        if not self.whole_frame and self.min_track < MIN_TRACK:
            raise ValueError(f"protocol {self.name}: min_track is {self.min_track}; the least is {MIN_TRACK} frames")


MIN_TRACK = 12
"""A longer track fills the median filter of 13 pictures."""
WAV2LIP_LRS = Protocol("wav2lip_lrs", whole_frame=True)
"""Wav2Lip's calculate_scores_LRS.py: for data that are face crops already; a data set's value is the mean over videos."""
WAV2LIP_REAL = Protocol("wav2lip_real")
"""Wav2Lip's calculate_scores_real_videos.sh: it prints one line a track, and a data set's value is the mean over lines,
so weigh clips by their `tracks` to repeat it; a clip's value here is the mean over its own."""
LATENTSYNC = Protocol("latentsync", min_track=50, aac=True, confidence_only=True)
"""LatentSync's eval_sync_conf.py; the sound of its crops is AAC, and it tells the confidence alone."""
MOCHABENCH = Protocol("mochabench", rules=("best",), min_track=50, vocals=True)
"""MoChaBench's eval-lipsync. Its tracker stops at the first face that does not match; ours goes on."""
MOVA = Protocol("mova", rules=("mean", "widest_margin"), min_track=20)
"""MOVA's eval_lip_sync.py. It leaves failed clips out of its mean; here they are missing and counted."""
PROTOCOLS = {protocol.name: protocol for protocol in (WAV2LIP_LRS, WAV2LIP_REAL, LATENTSYNC, MOCHABENCH, MOVA)}


def joined(readings: Sequence[Reading], rule: Rule) -> Reading:
    """One value for the tracks of a clip; missing where any track's is.

    The offset is the mean, not cut to an integer, under `mean`; else that of the track with the largest LSE-C or
    margin.
    """
    values = [[score.value for score in track] for track in readings]
    for track, scores in zip(readings, values, strict=True):
        if None in scores:
            return missing(next(score.reason for score in track if score.value is None))
    triples = [(float(d or 0), float(c or 0), float(offset or 0)) for d, c, offset in values]
    if not triples:
        return missing("no track")
    if rule == "mean":
        chosen = tuple(fmean(column) for column in zip(*triples, strict=True))
    elif rule == "widest_margin":
        chosen = max(triples, key=lambda triple: triple[1] - triple[0])
    else:
        surest = max(triples, key=lambda triple: triple[1])
        chosen = (min(triple[0] for triple in triples), surest[1], surest[2])
    return Reading(*(Score(value) for value in chosen))
