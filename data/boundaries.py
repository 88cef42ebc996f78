"""Where a source changes from one scene to the next, from its `Track`: cuts, fades and dissolves, without false alarms.

Method: proposals (content change as PySceneDetect measures it; blends of two pictures; darkness; drops of similarity
between neighbouring vectors, as Panda-70M's stitching turned round, arXiv 2402.19479), those within 0.75 s taken
together, then each held against what is seen either side of it: where that is the same scene, it was a flash, a lamp
or a whip of the camera. F frame, E sample, P value of a tiny picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data import semantics
from data.features import ASIDE_S, PROPOSED, Track

ABRUPT = 0.106
"""Change that is proposed whatever its neighbourhood. Source: PySceneDetect's content threshold, 27 of 255."""
MIN_RATIO = 3.0
"""How many times the mean change of its neighbours a smaller one must be. Source: PySceneDetect's adaptive detector."""
NEIGHBOURS = 2
"""Frames either side that are the neighbourhood. Source: likewise."""
LIGHT_ALONE = 0.92
"""Correlation of two tiny pictures that differ in light alone, found on the tuning half of `benchmarks/shots.py`."""
LEAST_SPREAD = 4.0
"""Standard deviation of a tiny picture, levels of 255, below which it has nothing to correlate."""
TOGETHER_S = 0.75
"""Proposals this near are one. Source: the research behind this method; shorter shots hold no clip."""
BLEND_S = (0.2, 0.4, 0.6, 0.8, 1.2)
"""Half lengths of dissolves looked for, s."""
BLEND_LEVELS = 18.0
"""Least root-mean-square difference, of 255, of the two pictures of a dissolve."""
FADING = 0.004
"""Luma that a fade loses or gains with every frame, 0–1: a level of 255, or four seconds for a bright picture at 60 fps."""
EVEN_LEVEL = 100.0
"""Mean level, of 255, that pictures are brought to, by a gain of 4 at most."""
BLEND_REST = 0.3
"""Largest share of that difference that a blend of the two does not explain; moving pictures leave 0.5 and more."""
PURE = 0.08
"""Share of the other picture that no longer shows."""
REACH_S = ASIDE_S[-1] + 0.1
"""How far from a proposal the scenes either side of it are looked at, s: to the last vector taken for it."""
STILL_LEVELS, STILL_SHARE = 12, 0.5
"""A scene goes on in which at least this share of the tiny picture differs by no more than these levels of 255."""
GRADUAL = 0.06
"""How much less alike than either side of a cut the pictures either side of a gradual change must be: a camera that
moves meanwhile makes them so too."""
MOVED_ALONG = 0.85
"""Correlation from which on a picture is another one moved; halfway through a dissolve of unlike ones it is 0.7."""
DROP_S = 0.4
"""Least distance of vectors that are held against each other where nothing was proposed, s."""


class Boundary(NamedTuple):
    """A transition: the old shot ends at `start_s`, the new one begins with the frame at `end_s`; equal for a cut."""

    start_s: float
    end_s: float
    reason: Literal["cut", "drop"]
    score: float
    """Similarity lost across it, 0–1."""


class Proposal(NamedTuple):
    """A possible transition between frames: `first` is the first not purely old, `last` the first purely new."""

    first: int
    last: int
    reason: Literal["cut", "drop"]
    dark: bool = False
    strength: float = 0.0
    """Of a blend: difference that it explains, levels of 255."""


def find(track: Track, stricter: float = 0.0) -> list[Boundary]:
    """The transitions, in order; `stricter` adds to the similarity that counts as one scene."""
    limits = semantics.thresholds(track.encoder)
    same = limits.same + stricter
    abrupt = sorted([*cuts(track), *darkness(track)])
    marks = np.array([item.first for item in abrupt], np.int64)
    real = [item for item in abrupt if item.dark or across(track, item, marks) < same]
    real += gradual(track, [*blends(track), *drops(track, limits.other, abrupt)], real, same - GRADUAL)
    found: list[Boundary] = []
    for item in together(real, track):
        lost = min(1.0, max(0.0, 1 - across(track, item, marks)))
        found.append(Boundary(at(track, item.first), at(track, item.last), item.reason, lost))
    return found


def gradual(track: Track, proposals: Sequence[Proposal], known: Sequence[Proposal], same: float) -> list[Proposal]:
    """Of gradual changes that overlap, the one that explains most; each is held against what lies between those known."""
    kept: list[Proposal] = []
    for item in sorted(proposals, key=lambda item: -item.strength):
        edges = np.array([edge for other in (*known, *kept) for edge in (other.first, other.last)], np.int64)
        apart = all(item.last < other.first or item.first > other.last for other in kept)
        if apart and across(track, item, edges) < same and not stays(track, item) and not pans(track, item):
            kept.append(item)
    return kept


def at(track: Track, frame: int) -> float:
    """When a frame is shown; one past the last is shown at the end."""
    return float(track.times_s[min(frame, len(track.times_s) - 1)])


def cuts(track: Track) -> list[Proposal]:
    """Frames that differ much from the one before, in more than light."""
    found: list[Proposal] = []
    for index in np.flatnonzero(track.change >= PROPOSED).tolist():
        around = np.r_[track.change[max(index - NEIGHBOURS, 1) : index], track.change[index + 1 :][:NEIGHBOURS]]
        usual = float(around.mean()) if len(around) else 0.0
        if track.change[index] < max(PROPOSED, min(ABRUPT, MIN_RATIO * usual)):
            continue
        if alike(track.tiny_FHWC[index - 1], track.tiny_FHWC[index]) < LIGHT_ALONE:
            found.append(Proposal(index, index, "cut"))
    chances = np.flatnonzero(track.cut_chance >= 0.5).tolist()
    return sorted([*found, *(Proposal(index + 1, index + 1, "cut") for index in chances)])


def alike(left_HWC: NDArray[np.uint8], right_HWC: NDArray[np.uint8]) -> float:
    """Correlation of two tiny pictures, blind to brightness and contrast; 1 where neither has any detail."""
    left, right = left_HWC.astype(np.float64), right_HWC.astype(np.float64)
    spread = min(left.std(), right.std())
    if spread < LEAST_SPREAD:
        return 1.0 if max(left.std(), right.std()) < LEAST_SPREAD else 0.0
    return float(((left - left.mean()) * (right - right.mean())).mean() / (left.std() * right.std()))


def darkness(track: Track) -> list[Proposal]:
    """Runs of black frames with something either side, and the fades that lead into and out of them."""
    edges = np.flatnonzero(np.diff(np.r_[False, track.black, False].astype(np.int8)))
    found: list[Proposal] = []
    for start, end in edges.reshape(-1, 2).tolist():  # `end` may lie one behind the last frame
        first, last = start, end
        while first > 1 and track.luma[first - 2] > track.luma[first - 1] + FADING:
            first -= 1
        while last < len(track.luma) - 1 and track.luma[last + 1] > track.luma[last] + FADING:
            last += 1
        found.append(Proposal(first, last, "cut", dark=True))
    return found


def blends(track: Track) -> list[Proposal]:
    """Frames that are a mixture of what was shown before and what is shown after, where the two differ."""
    tiny_FP = evened(track.tiny_FHWC)
    found: list[Proposal] = []
    for half_s in BLEND_S:
        before = np.searchsorted(track.times_s, track.times_s - half_s)
        after = np.minimum(np.searchsorted(track.times_s, track.times_s + half_s), len(tiny_FP) - 1)
        inside = np.flatnonzero((track.times_s >= half_s) & (track.times_s <= track.times_s[-1] - half_s))
        rests = np.full(len(tiny_FP), np.inf)
        for index in inside.tolist():
            share, rest = mixture(tiny_FP[before[index]], tiny_FP[index], tiny_FP[after[index]])
            if 0.25 < share < 0.75:
                rests[index] = rest
        for index in np.flatnonzero(rests < BLEND_REST).tolist():
            window = rests[before[index] : after[index] + 1]
            if rests[index] <= window.min():
                way = float(np.linalg.norm(tiny_FP[after[index]] - tiny_FP[before[index]]))
                strength = way * (1 - float(rests[index])) / tiny_FP.shape[1] ** 0.5
                blend = spread(tiny_FP, int(before[index]), index, int(after[index]))
                found.append(blend._replace(strength=strength))
    return sorted(found)


def evened(tiny_FHWC: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Tiny pictures (F, P) of one brightness, so that flicker mixes nothing; dark ones stay dark."""
    tiny_FP = tiny_FHWC.reshape(len(tiny_FHWC), -1).astype(np.float32)
    return tiny_FP * (EVEN_LEVEL / np.maximum(tiny_FP.mean(axis=1, keepdims=True), EVEN_LEVEL / 4))


def mixture(
    left_P: NDArray[np.float32], middle_P: NDArray[np.float32], right_P: NDArray[np.float32]
) -> tuple[float, float]:
    """Share of `right` in `middle`, and how much of the difference of both the mixture leaves unexplained."""
    way = right_P - left_P
    length = float(np.linalg.norm(way))
    if length < BLEND_LEVELS * len(way) ** 0.5:
        return 0.0, float("inf")
    share = float((middle_P - left_P) @ way) / length**2
    return share, float(np.linalg.norm(middle_P - left_P - share * way)) / length


def spread(tiny_FP: NDArray[np.float32], before: int, middle: int, after: int) -> Proposal:
    """The mixture around `middle`, grown outwards until one picture alone is seen."""
    way = tiny_FP[after] - tiny_FP[before]
    share = (tiny_FP[before : after + 1] - tiny_FP[before]) @ way / max(float(way @ way), 1e-9)
    pure_old = np.flatnonzero(share[: middle - before + 1] < PURE)
    pure_new = np.flatnonzero(share[middle - before :] > 1 - PURE)
    first = before + (int(pure_old[-1]) + 1 if len(pure_old) else 0)
    last = middle + (int(pure_new[0]) if len(pure_new) else after - middle)
    return Proposal(min(first, last), last, "drop")


def drops(track: Track, other: float, known: Sequence[Proposal]) -> list[Proposal]:
    """Where neighbouring vectors show different scenes although nothing known lies between them."""
    times = track.times_s[track.sample_frames]
    found: list[Proposal] = []
    for number, frame in enumerate(track.sample_frames.tolist()):
        later = int(np.searchsorted(times, float(times[number]) + DROP_S))
        if later >= len(times):
            break
        following = int(track.sample_frames[later])
        if any(frame < item.last and item.first <= following for item in known):
            continue
        likeness = float(
            track.sample_vectors[number].astype(np.float32) @ track.sample_vectors[later].astype(np.float32)
        )
        if likeness < other:
            found.append(steepest(track, frame, following))
    return found


def steepest(track: Track, before: int, after: int) -> Proposal:
    """The cut between two frames if one step makes most of the change, else the stretch that mixes them."""
    steps = track.change[before + 1 : after + 1]
    top = before + 1 + int(steps.argmax())
    if track.change[top] >= 0.5 * float(steps.sum()):
        return Proposal(top, top, "drop")
    tiny_FP = evened(track.tiny_FHWC[before : after + 1])
    found = spread(tiny_FP, 0, (after - before) // 2, after - before)
    return Proposal(found.first + before, found.last + before, "drop")


def together(proposals: Sequence[Proposal], track: Track) -> list[Proposal]:
    """Proposals in order, those that overlap or lie near each other as one."""
    result: list[Proposal] = []
    for item in sorted(proposals):
        if result and at(track, item.first) - at(track, result[-1].last) < TOGETHER_S:
            last = result.pop()
            reason = "cut" if "cut" in {last.reason, item.reason} else "drop"
            item = Proposal(last.first, max(last.last, item.last), reason, last.dark or item.dark)  # noqa: PLW2901
        result.append(item)
    return result


def stays(track: Track, proposal: Proposal) -> bool:
    """Whether most of the picture is what it was, where only a change of content was proposed: something moved."""
    if proposal.reason == "cut":
        return False
    before, after = track.tiny_FHWC[[max(proposal.first - 1, 0), min(proposal.last, len(track.tiny_FHWC) - 1)]]
    moved = np.abs(before.astype(np.int16) - after).max(axis=2) > STILL_LEVELS
    return float(moved.mean()) < 1 - STILL_SHARE


def pans(track: Track, proposal: Proposal) -> bool:
    """Whether the picture before reaches the one after by moving along: halfway, a dissolve shows half of each."""
    before, after = max(proposal.first - 1, 0), min(proposal.last, len(track.tiny_FHWC) - 1)
    halves = track.tiny_FHWC[[before, (before + after) // 2, after]]
    return min(shifted(halves[0], halves[1]), shifted(halves[1], halves[2])) >= MOVED_ALONG


def shifted(left_HWC: NDArray[np.uint8], right_HWC: NDArray[np.uint8]) -> float:
    """Best `alike` of what two tiny pictures have in common where one is moved by up to half its width and a third of its height."""
    height, width = left_HWC.shape[:2]
    best = -1.0
    for down in range(-(height // 3), height // 3 + 1):
        for along in range(-(width // 2), width // 2 + 1):
            left = left_HWC[max(0, down) : height + down, max(0, along) : width + along]
            right = right_HWC[max(0, -down) : height - down, max(0, -along) : width - along]
            best = max(best, alike(left, right))
    return best


def across(track: Track, proposal: Proposal, marks: NDArray[np.int64]) -> float:
    """Best similarity of what is seen before and after, no further than the next mark that is not close by."""
    start, end = at(track, proposal.first), at(track, proposal.last)
    marked_s = track.times_s[np.minimum(marks, len(track.times_s) - 1)]
    near_s = TOGETHER_S if proposal.reason == "cut" else 0.0
    low = max([start - REACH_S, *marked_s[marked_s <= start - near_s].tolist()])
    high = min([end + REACH_S, *marked_s[marked_s >= end + near_s].tolist()])
    frames = track.sample_frames
    times = track.times_s[frames]
    before = np.flatnonzero((frames < proposal.first) & (times >= low))
    after = np.flatnonzero((frames >= proposal.last) & (times < high))
    if proposal.reason == "drop":  # between two cuts, whatever lies there
        before = before if len(before) else np.flatnonzero(times >= low)[:1]
        after = after if len(after) else np.flatnonzero(times < high)[-1:]
    if not len(before) or not len(after):
        return alike(
            track.tiny_FHWC[max(proposal.first - 1, 0)], track.tiny_FHWC[min(proposal.last, len(track.tiny_FHWC) - 1)]
        )
    vectors = track.sample_vectors.astype(np.float32)
    return float((vectors[before] @ vectors[after].T).max())
