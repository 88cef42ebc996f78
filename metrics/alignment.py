"""Whether what is heard goes with what is seen, beyond lips: motion against onsets, flashes and known events against clicks.

Legend: F frames, H height, W width, C = 3 colours or channels, T samples. Frame n is shown from n / frame_rate on, and
sample 0 is heard at time 0. Frames are taken one by one, so memory does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, cast

import cv2
import numpy as np
from numpy.typing import NDArray

from data.features import on_grid
from metrics.onsets import ONSET_CONVENTION, onset_times_s
from metrics.score import Score
from metrics.waveforms import SILENT_BELOW_DB, Waveform, level_db

cv = cast(Any, cv2)
Frames = Iterable[NDArray[np.uint8]]
Rate = float | Fraction

MIN_FLOW_PX = 0.1
"""Mean flow below which nothing moves, pixels of a grid whose long side is 256: noise alone has less. The published
code has no such limit and counts noise of a still picture as motion."""
MIN_FLASH = 0.05
"""Least rise of mean luma between neighbouring frames, of full scale, that is a flash; half of the largest too."""
MAX_OFFSET_S = 1.0
"""How far an event is looked for from its sound: further apart nobody takes them for one."""
AGREES_S = 0.010
"""Events have an offset in common if theirs differ by less than this: the spread of onsets in ringing sound."""

AV_ALIGN_CONVENTION = (
    "intersection over union of onsets and peaks of mean Farneback flow (grid of 256 px, peaks of at least 0.1 px), "
    "matched within one frame, each once; " + ONSET_CONVENTION
)
EVENT_CONVENTION = (
    "offset that most events have in common within 10 ms, searched to ±1 s, median; above 0 the sound is late; "
    + ONSET_CONVENTION
)


class EventOffset(NamedTuple):
    """How far sound is from what it belongs to."""

    offset_ms: Score
    """Above 0: heard after it is seen."""
    share: Score
    """Of the events, those that have a sound at this offset; 0 where none has."""


def av_align(
    frames: Frames, waveform_CT: Waveform | None, frame_rate: Rate, sample_rate_hz: int, *, num_frames_off: float = 1.0
) -> Score:
    """AV-Align, 0–1: the share of onsets and motion peaks that have each other. Weak in complex scenes, as published.

    `num_frames_off` is how far an onset may be from a peak, frames, exclusive.
    Source: Yariv et al. 2023, "Diverse and aligned audio-to-video generation" (arXiv 2309.16429), section 4.2.
    """
    if reason := unheard(waveform_CT):
        return reason
    assert waveform_CT is not None
    flow_F = np.array(list(mean_flow(frames)))
    if len(flow_F) < 3:
        return Score.missing(f"motion has peaks from 3 frames on; there are {len(flow_F)}")
    seen = peaks(flow_F) / float(frame_rate)
    heard = onset_times_s(waveform_CT, sample_rate_hz)
    if not len(seen) and not len(heard):
        return Score.missing("neither an onset nor a peak of motion")
    matched = len(matches(seen, heard, num_frames_off / float(frame_rate)))
    return Score(matched / (len(seen) + len(heard) - matched))


def mean_flow(frames: Frames) -> Iterator[float]:
    """Mean optical flow from the frame before, grid pixels; the first frame has the second's, as in the source."""
    before: NDArray[np.uint8] | None = None
    for number, frame in enumerate(frames):
        grey = on_grid(cast("NDArray[np.uint8]", cv.cvtColor(frame, cv.COLOR_RGB2GRAY)))
        if before is not None:
            flow = cv.calcOpticalFlowFarneback(before, grey, None, 0.5, 3, 15, 3, 5, 1.2, 0)
            mean = float(np.hypot(flow[..., 0], flow[..., 1]).mean())
            if number == 1:
                yield mean
            yield mean
        before = grey


def peaks(flow_F: NDArray[np.float64]) -> NDArray[np.int64]:
    """Frames that move more than both neighbours, and at all."""
    middle = flow_F[1:-1]
    is_peak = (middle > flow_F[:-2]) & (middle > flow_F[2:]) & (middle >= MIN_FLOW_PX)
    return np.flatnonzero(is_peak) + 1


def matches(seen: Sequence[float] | NDArray[Any], heard: NDArray[np.float64], within_s: float) -> list[tuple[int, int]]:
    """Pairs of indices closer than a time, each index once, in the order of what is heard."""
    left = dict(enumerate(seen))
    pairs: list[tuple[int, int]] = []
    for number, time_s in enumerate(heard):
        near = next((place for place, seen_s in left.items() if abs(seen_s - time_s) < within_s), None)
        if near is not None:
            del left[near]
            pairs.append((near, number))
    return pairs


def flash_times_s(frames: Frames, frame_rate: Rate) -> NDArray[np.float64]:
    """When the picture becomes suddenly brighter, s: the start of the frame that is."""
    luma_F = np.array([float(cv.mean(cv.cvtColor(frame, cv.COLOR_RGB2GRAY))[0]) / 255 for frame in frames])
    rise_F = np.diff(luma_F)
    if not len(rise_F):
        return np.zeros(0)
    return (np.flatnonzero(rise_F >= max(MIN_FLASH, float(rise_F.max()) / 2)) + 1) / float(frame_rate)


def flash_offset(frames: Frames, waveform_CT: Waveform | None, frame_rate: Rate, sample_rate_hz: int) -> EventOffset:
    """How far the clicks are from the flashes."""
    return event_offset(flash_times_s(frames, frame_rate), waveform_CT, sample_rate_hz, "flash in the picture")


def event_offset(
    events_s: Sequence[float] | NDArray[np.float64],
    waveform_CT: Waveform | None,
    sample_rate_hz: int,
    name: str = "known event",
) -> EventOffset:
    """How far sounds are from events whose times are known, s; extra sounds and lost ones cost the share alone.

    Regular events cannot tell an offset from one that is a period away: the smaller one counts.
    """
    reason = unheard(waveform_CT) or (None if len(events_s) else Score.missing(f"no {name}"))
    if reason:
        return EventOffset(reason, reason)
    assert waveform_CT is not None
    heard = onset_times_s(waveform_CT, sample_rate_hz)
    apart = np.subtract.outer(heard, np.asarray(events_s, np.float64)).ravel()
    offsets = apart[np.abs(apart) <= MAX_OFFSET_S]
    if not len(offsets):
        return EventOffset(Score.missing(f"no onset within {MAX_OFFSET_S:g} s of any {name}"), Score(0))
    agreeing = (np.abs(np.subtract.outer(offsets, offsets)) < AGREES_S).sum(axis=1)
    best = offsets[np.lexsort((np.abs(offsets), -agreeing))[0]]
    common = offsets[np.abs(offsets - best) < AGREES_S]
    share = min(1.0, len(common) / len(events_s))
    return EventOffset(Score(1000 * float(np.median(common))), Score(share))


def unheard(waveform_CT: Waveform | None) -> Score | None:
    """The reason why there is nothing to align with, or None."""
    if waveform_CT is None or not waveform_CT.size:
        return Score.missing("no sound")
    if not np.isfinite(waveform_CT).all():
        return Score.missing("the sound holds values that are not finite")
    if level_db(waveform_CT) < SILENT_BELOW_DB:
        return Score.missing(f"the sound is silent (below {SILENT_BELOW_DB:g} dB full scale)")
    return None
