"""Sources that sound the same while they look different: mirrored, cropped or framed copies, new pictures under a sound.

A sound is what `hearing` keeps of it: loudness, and how much louder it is by ear than by power (`tilt`: dull or sharp),
in blocks of 0.1 s. Loud moments and onsets are anchors; the three seconds around each fall into buckets of random
hyperplanes, as pictures do (`duplicates`), so that a million sources do not become pairs. Anchors of one bucket are
laid over each other, at quarters of a block, and everything that both sources have within four seconds is compared.

A match must be far better than the sound's likeness to itself a little later (Lowe's ratio test, 2004,
doi:10.1023/B:VISI.0000029664.99615.94): hum, beats, metronomes and loops are as much like themselves as like others.
What is silent, steady, or holds one event never matches.

Not caught: less than 3.1 s in common; a common part that does not reach four seconds, or the end of one source, either
side of an anchor; another speed; a voice or music put over it; music of a steady beat whose start was moved by part of a
block, or that was equalised by 6 dB; most of what is moved and shorter than 5 s (how much: benchmarks/sounds.py). One
recording of a song under two films is caught, and should be. N pair, S block, K level and tilt.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from data import duplicates
from data.hearing import BLOCK_S, SoundTrack

Levels = NDArray[np.floating[Any]]
HALF = 15
"""Blocks either side of an anchor that are hashed, so 3.1 s."""
REACH = 40
"""Blocks either side of an anchor that are compared."""
APART = 4
"""Blocks around an anchor without a greater one."""
MAX_ANCHORS = 1024
"""Most of one source, the clearest: half an hour of speech."""
NUM_BITS, NUM_TABLES = 14, 12
"""As in `duplicates`; there are fewer numbers to tell apart."""
NEAR = 0.85
"""Least product of the hashed parts of a pair that is compared in full."""
FLOOR_DB, QUIET_DB = 30.0, -65.0
"""What is so far below the span's loudest block, dB, or below so many LUFS, counts as equally silent."""
FLAT_DB = 0.4
"""Spread of the tilt, dB, below which it tells nothing."""
LIVELY_DB, NUM_EVENTS = 0.7, 6.0
"""Least root-mean-square step between blocks, dB, and least number of steps that make it up: what is steady or holds
one click has fewer."""
LIKE = ((60, 0.93, 0.07), (45, 0.95, 0.06), (29, 0.98, 0.04))
"""Blocks in common, least likeness of sounds that are the same, and its distance from 1 as a share of the distance of
the sound from itself. Chosen on seeds 0 and 1000 of benchmarks/sounds.py so that no two pieces by one drum kit match."""
REPEATING = 0.95
"""Likeness to itself some blocks later from which a sound is steady or goes round; the next of the set is 0.93."""
LAGS = range(3, 41)
"""Blocks by which a sound is shifted against itself."""
SHIFTS = tuple(np.arange(-4, 5) / 4)
"""Blocks by which two anchors may lie apart: half a block each."""
CHUNK = 512
"""Pairs compared at once."""


class Match(NamedTuple):
    """Two sources, by their numbers, that sound the same."""

    left: int
    right: int
    likeness: float


def levels(track: SoundTrack | None) -> NDArray[np.float16]:
    """Loudness and tilt (S, 2) of all whole blocks, dB; none where there is no sound."""
    if track is None or track.block_s != BLOCK_S:
        return np.zeros((0, 2), np.float16)
    count = min(len(track.loudness_B), int(track.duration_s / BLOCK_S + 1e-6))
    loud = decibels(track.loudness_B[:count])
    return np.stack([loud, loud - decibels(track.power_B[:count])], axis=1).astype(np.float16)


def decibels(power: Levels) -> Levels:
    """10 log10, no less than -100 dB."""
    return 10 * np.log10(np.maximum(power.astype(np.float64), 1e-10))


def find(sounds: Path, lengths: NDArray[np.int64], scratch: Path) -> Iterator[Match]:
    """Pairs of sources that sound the same, at least those that join every group of them.

    Args:
        sounds: file of the `levels` of all sources, one behind the other.
        lengths: blocks of each source.
        scratch: file to write what is hashed to.
    """
    if not lengths.sum():
        return
    levels_TK = np.memmap(sounds, np.float16, "r").reshape(-1, 2)
    starts = np.r_[0, np.cumsum(lengths)]
    owners, places = hashed(levels_TK, starts, scratch)
    if len(owners) < 2:
        return
    table = np.memmap(scratch, np.int8, "r").reshape(len(owners), -1)
    groups = duplicates.Groups(len(lengths))
    for number in range(NUM_TABLES):
        for pairs in duplicates.pairs_in_buckets(*keys(table, number)):
            for low in range(0, len(pairs), CHUNK * 16):
                chunk = pairs[low : low + CHUNK * 16]
                chunk = chunk[owners[chunk[:, 0]] != owners[chunk[:, 1]]]
                near = duplicates.products(table[chunk[:, 0]], table[chunk[:, 1]]) >= NEAR
                for match in confirmed(levels_TK, starts, owners, places, chunk[near], groups):
                    groups.join(match.left, match.right)
                    yield match


def hashed(levels_TK: Levels, starts: NDArray[np.int64], scratch: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Write what is hashed of every anchor; returns its source and its block."""
    owners, places = list[NDArray[np.int64]](), list[NDArray[np.int64]]()
    with scratch.open("wb") as stream:
        for source in range(len(starts) - 1):
            own = np.asarray(levels_TK[starts[source] : starts[source + 1]], np.float64)
            found = anchors(own)
            stream.write(around(own, found).tobytes())
            owners.append(np.full(len(found), source, np.int64))
            places.append(np.round(found).astype(np.int64))
    return np.concatenate(owners), np.concatenate(places)


def anchors(levels_SK: Levels) -> NDArray[np.float64]:
    """Where the sound is loudest, or rises most, for half a second around, in blocks and parts of one."""
    if len(levels_SK) <= 2 * HALF:
        return np.zeros(0)
    level = floored(smooth(smooth(levels_SK[:, 0])))
    rise = np.r_[0, level[2:] - level[:-2], 0]
    found, clear = list[float](), list[float]()
    for curve in (level, rise):
        padded = np.pad(curve, APART, constant_values=-np.inf)
        around = np.lib.stride_tricks.sliding_window_view(padded, 2 * APART + 1)
        for at in np.flatnonzero((curve == around.max(axis=1)) & (curve > around.mean(axis=1, where=around > -1e9))):
            window = slice(at - HALF, at + HALF + 1)
            inside = HALF <= at < len(level) - HALF
            if inside and (lively(levels_SK[window, 0]) or lively(level[window])):
                below, top, above = curve[at - 1 : at + 2]
                bend = below - 2 * top + above
                found.append(at + (float(0.5 * (below - above) / bend) if bend < 0 else 0.0))
                near = curve[at - APART : at + APART + 1]
                clear.append(float(top - near.min()))
    order = np.argsort(-np.array(clear), kind="stable")[:MAX_ANCHORS]
    return np.sort(np.array(found)[order]) if found else np.zeros(0)


def around(levels_SK: Levels, at_A: NDArray[np.float64]) -> NDArray[np.int8]:
    """What is hashed of anchors: level and half as much tilt around each, (A, 62)."""
    if not len(at_A):
        return np.zeros((0, 2 * (2 * HALF + 1)), np.int8)
    grid = np.clip(at_A[:, None] + np.arange(-HALF, HALF + 1), 0, len(levels_SK) - 1)
    smoothed = smooth(smooth(levels_SK[:, 0]))
    parts = [np.interp(grid, np.arange(len(levels_SK)), curve) for curve in (smoothed, smooth(levels_SK[:, 1]))]
    heard = parts[0] > parts[0].max(axis=1, keepdims=True) - FLOOR_DB
    level = np.maximum(parts[0], parts[0].max(axis=1, keepdims=True) - FLOOR_DB)
    tilt = np.where(heard, parts[1], parts[1].mean(axis=1, keepdims=True, where=heard))
    centred = [part - part.mean(axis=1, keepdims=True) for part in (level, tilt / 2)]
    return np.stack([duplicates.bytes_of(row) for row in np.concatenate(centred, axis=1)])


def smooth(values: Levels) -> Levels:
    """Over neighbouring blocks, dB."""
    padded = np.pad(values, 1, mode="edge")
    return (padded[:-2] + 2 * padded[1:-1] + padded[2:]) / 4


def floored(level: Levels) -> Levels:
    """With all silence equally silent."""
    return np.maximum(level, max(float(level.max()) - FLOOR_DB, QUIET_DB))


def lively(level_S: Levels) -> bool:
    """Whether enough happens for a likeness to mean something."""
    steps = np.square(np.diff(floored(level_S)))
    return bool(steps.mean() >= LIVELY_DB**2 and steps.sum() ** 2 / np.square(steps).sum() >= NUM_EVENTS)


def keys(table_NP: NDArray[np.int8], number: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Bucket of every anchor, and its place along one more direction."""
    random = np.random.default_rng(number)  # fixed: the same sounds give the same buckets for ever
    planes = random.normal(size=(table_NP.shape[1], NUM_BITS + 1)).astype(np.float32)
    return duplicates.buckets(table_NP, planes)


def confirmed(
    levels_TK: Levels,
    starts: NDArray[np.int64],
    owners: NDArray[np.int64],
    places: NDArray[np.int64],
    pairs: NDArray[np.int64],
    groups: duplicates.Groups,
) -> Iterator[Match]:
    """Pairs of anchors around which two sources sound the same; those already in one group are passed over."""
    for low in range(0, len(pairs), CHUNK):
        chunk = [
            pair
            for pair in pairs[low : low + CHUNK]
            if groups.find(int(owners[pair[0]])) != groups.find(int(owners[pair[1]]))
        ]
        if not chunk:
            continue
        sides = np.array(chunk).T
        spans = [span(levels_TK, starts[owners[side]], starts[owners[side] + 1], places[side]) for side in sides]
        for at, found in enumerate(compared(*spans)):
            left, right = (int(owners[side[at]]) for side in sides)
            if found > 0 and groups.find(left) != groups.find(right):
                yield Match(left, right, found)


class Span(NamedTuple):
    """Sound around anchors, as power."""

    power_NSK: Levels
    """By ear and plain."""
    known_NS: NDArray[np.bool_]
    """Whether the source has such a block."""


def span(levels_TK: Levels, start_N: NDArray[np.int64], stop_N: NDArray[np.int64], place_N: NDArray[np.int64]) -> Span:
    """The blocks around anchors, with three more on either side to shift by."""
    at = (start_N + place_N)[:, None] + np.arange(-REACH - 3, REACH + 4)
    known = (at >= start_N[:, None]) & (at < stop_N[:, None])
    found = np.asarray(levels_TK[np.clip(at, 0, len(levels_TK) - 1)], np.float64)
    return Span(10 ** (np.stack([found[..., 0], found[..., 0] - found[..., 1]], axis=-1) / 10), known)


def compared(left: Span, right: Span) -> list[float]:
    """Likeness of every pair of spans at its best shift, 0 where they are not the same."""
    scores, commons = list[Levels](), list[NDArray[np.bool_]]()
    for shift in SHIFTS:
        moved, fixed = shifted(left, shift), evened(right, shift)
        common = moved.known_NS & fixed.known_NS
        scores.append(likeness(moved.power_NSK, fixed.power_NSK, common))
        commons.append(common)
    best = np.argmax(scores, axis=0)
    results: list[float] = []
    for row, choice in enumerate(cast(list[int], best.tolist())):
        score, common = float(scores[choice][row]), commons[choice][row]
        good = score >= LIKE[0][1] and same(score, left.power_NSK[row], right.power_NSK[row], common)
        results.append(score if good else 0.0)
    return results


def same(score: float, left_SK: Levels, right_SK: Levels, common_S: NDArray[np.bool_]) -> bool:
    """Whether a likeness is great enough for its length, and for how much the sounds are like themselves."""
    count = int(common_S.sum())
    limits = next(((least, share) for blocks, least, share in LIKE if count >= blocks), None)
    if limits is None or score < limits[0]:
        return False
    for side in (left_SK, right_SK):
        heard = side[3:-3][common_S]
        if not lively(decibels(heard[:, 0])):
            return False
        itself = self_likeness(heard)
        if itself >= REPEATING or 1 - score > limits[1] * (1 - itself):
            return False
    return True


def self_likeness(power_SK: Levels) -> float:
    """The greatest likeness of a sound to itself some blocks later."""
    count = len(power_SK)
    lags = np.array([lag for lag in LAGS if lag <= count * 0.6])
    at = np.arange(count) + lags[:, None]
    later = power_SK[np.minimum(at, count - 1)]
    return float(likeness(np.broadcast_to(power_SK, later.shape), later, at < count).max())


def shifted(side: Span, shift: float) -> Span:
    """Spans moved by blocks and parts of one, without the blocks to shift by."""
    whole = int(np.floor(shift))
    part = shift - whole
    early, late = (slice(3 + whole + step, len(side.known_NS[0]) - 3 + whole + step) for step in (0, 1))
    power = (1 - part) * side.power_NSK[:, early] + part * side.power_NSK[:, late]
    return Span(power, side.known_NS[:, early] & (side.known_NS[:, late] if part else True))


def evened(side: Span, shift: float) -> Span:
    """Spans blurred as much as a shift by part of a block blurs the other side: by a kernel of the same variance."""
    part = shift - np.floor(shift)
    blur = part * (1 - part)
    power = blur / 2 * (side.power_NSK[:, 2:-4] + side.power_NSK[:, 4:-2]) + (1 - blur) * side.power_NSK[:, 3:-3]
    known = side.known_NS[:, 3:-3]
    return Span(power, known & side.known_NS[:, 2:-4] & side.known_NS[:, 4:-2] if blur else known)


def likeness(left_NSK: Levels, right_NSK: Levels, common_NS: NDArray[np.bool_]) -> Levels:
    """Mean correlation (N,) of levels, of steps between blocks, and of tilts unless both are flat."""
    inner = common_NS[:, 2:] & common_NS[:, 1:-1] & common_NS[:, :-2]
    sides = [(side[:, 2:] + 2 * side[:, 1:-1] + side[:, :-2]) / 4 for side in (left_NSK, right_NSK)]
    loud = [decibels(side[..., 0]) for side in sides]
    floor = [
        np.maximum(np.where(inner, side, -np.inf).max(axis=1, keepdims=True) - FLOOR_DB, QUIET_DB) for side in loud
    ]
    level = [np.maximum(side, low) for side, low in zip(loud, floor, strict=True)]
    steps = [np.diff(side) for side in level]
    heard = inner & (loud[0] > floor[0]) & (loud[1] > floor[1])
    tilt = [side - decibels(power[..., 1]) for side, power in zip(loud, sides, strict=True)]
    first = correlation(level[0], level[1], inner)[0] + correlation(steps[0], steps[1], inner[:, 1:] & inner[:, :-1])[0]
    third, spread = correlation(tilt[0], tilt[1], heard)
    return np.where(spread < FLAT_DB, first / 2, (first + third) / 3)


def correlation(left_NS: Levels, right_NS: Levels, common_NS: NDArray[np.bool_]) -> tuple[Levels, Levels]:
    """Pearson's, and the greater spread of the two, each (N,); 0 where one does not vary."""
    count = np.maximum(common_NS.sum(axis=1), 1)
    centred = [
        (side - np.where(common_NS, side, 0).sum(axis=1, keepdims=True) / count[:, None]) * common_NS
        for side in (left_NS, right_NS)
    ]
    squares = [np.square(side).sum(axis=1) for side in centred]
    length = np.sqrt(squares[0] * squares[1])
    product = np.where(length > 1e-6, (centred[0] * centred[1]).sum(axis=1) / np.maximum(length, 1e-6), 0)
    return product, np.sqrt(np.maximum(*squares) / count)
