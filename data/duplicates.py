"""Clips of different sources that look the same: re-encoded, resized, regraded, slightly cropped, mirrored copies.

A signature holds a clip's mean picture, how it moves, and its mean vector, a byte a number. Pairs are candidates that
fall into one bucket of random hyperplanes (Charikar 2002, doi:10.1145/509907.509965); each is then measured. So
a million clips take a dozen sorts, not 5 x 10^11 comparisons. N clip, P value of a signature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import cv2
import numpy as np
from numpy.typing import NDArray

from data.features import TINY_PX, Track

NUM_TIMES = 8
"""Moments of a clip that are compared: every third frame of the shortest clip."""
LAYOUT, MOVES = TINY_PX[0] * TINY_PX[1] * 3, NUM_TIMES * TINY_PX[0] * TINY_PX[1]
"""Bytes of a signature's first two parts; the vector is the rest."""
NUM_BITS, NUM_TABLES = 16, 12
"""Hyperplanes of a bucket and sets of buckets: two pictures 10 degrees apart share one with 0.996 probability."""
NUM_MIRRORED = 4
"""Sets of buckets in which a picture and its mirror image share one; those of the vector may find them too."""
MAX_BUCKET, NEAREST = 64, 16
"""In a bucket of more clips than the first, each is compared with this many neighbours along one more projection."""
SAME_LAYOUT, SAME_VECTOR, SAME_MOVES, SAME_STILL = 0.9, 0.65, 0.92, 0.985
"""Least products of the parts; the last is the layout's where nothing moves. Found on the sample world and footage,
re-encoded, cropped and regraded (tests/data/test_duplicates.py)."""
MIRROR_LAYOUT, MIRROR_MOVES = 0.97, 0.97
"""The same for mirror images, which a machine makes exactly: those of footage have 0.99; a ball that is thrown to the
left in one scene of the sample world and to the right in another, 0.94 to 0.98 and 0.94 to 0.96."""
STILL_LEVELS = 1.5
"""Root-mean-square change of a tiny picture over a clip, levels of 255, below which nothing moves."""
CHUNK = 4096
"""Pairs measured at once: 16 MB."""


class Pair(NamedTuple):
    """Two clips, by their numbers, that look the same."""

    left: int
    right: int
    likeness: float


def signature(track: Track, start_s: float, end_s: float) -> NDArray[np.int8]:
    """What a span looks like, (P,)."""
    grid = start_s + (np.arange(NUM_TIMES) + 0.5) / NUM_TIMES * (end_s - start_s)
    index = np.maximum(np.searchsorted(track.times_s, grid, side="right") - 1, 0)
    shown = track.tiny_FHWC[index].astype(np.float32)
    mean = shown.mean(axis=0)
    grey = shown.mean(axis=3)
    moves = grey - grey.mean(axis=0)
    blurred = np.stack([cast(Any, cv2).GaussianBlur(move, (0, 0), 0.8) for move in moves])  # a crop shifts what moves
    if float(np.sqrt(np.square(moves).mean())) < STILL_LEVELS:
        blurred[:] = 0
    times = track.times_s[track.sample_frames]
    near = np.flatnonzero((times >= start_s) & (times < end_s))
    if not len(near):
        near = np.array([np.abs(times - (start_s + end_s) / 2).argmin()])
    vector = track.sample_vectors[near].astype(np.float32).mean(axis=0)
    return np.concatenate([bytes_of(mean - mean.mean()), bytes_of(blurred), bytes_of(vector)])


def bytes_of(values: NDArray[np.floating[Any]]) -> NDArray[np.int8]:
    """Values scaled so that the largest is 127; zeros stay zeros."""
    flat = values.ravel().astype(np.float32)
    top = float(np.abs(flat).max())
    return np.round(flat * (127 / top) if top > 1e-6 else flat * 0).astype(np.int8)


def near_duplicates(signatures_NP: NDArray[np.int8], owners: NDArray[np.int64]) -> Iterator[Pair]:
    """Pairs of clips of different owners (sources) that look the same, mirrored or not, each at least once.

    Args:
        signatures_NP: may lie on disk; rows are read as they are needed.
    """
    if len(signatures_NP) < 2:
        return
    for table in range(NUM_TABLES + NUM_MIRRORED):
        for pairs in candidates(signatures_NP, table):
            apart = pairs[owners[pairs[:, 0]] != owners[pairs[:, 1]]]
            for low in range(0, len(apart), CHUNK):
                chunk = apart[low : low + CHUNK]
                left, right = signatures_NP[chunk[:, 0]], signatures_NP[chunk[:, 1]]
                alike = np.maximum(likeness(left, right), likeness(left, mirrored(right), MIRROR_LAYOUT, MIRROR_MOVES))
                for at in np.flatnonzero(alike > 0).tolist():
                    yield Pair(int(chunk[at, 0]), int(chunk[at, 1]), float(alike[at]))


def candidates(signatures_NP: NDArray[np.int8], table: int) -> Iterator[NDArray[np.int64]]:
    """Pairs (any, 2) that share a bucket of one table; even tables hash the layout, odd ones the vector, the last ones
    the layout turned so that a picture and its mirror image agree.
    """
    random = np.random.default_rng(table)  # fixed: the same clips give the same buckets for ever
    turned = table >= NUM_TABLES
    layout = turned or table % 2 == 0
    part = slice(0, LAYOUT) if layout else slice(LAYOUT + MOVES, signatures_NP.shape[1])
    planes = random.normal(size=(part.stop - part.start, NUM_BITS + 1)).astype(np.float32)
    side = random.normal(size=LAYOUT).astype(np.float32) if turned else None

    def prepared(values: NDArray[np.float32]) -> NDArray[np.float32]:
        if side is not None:
            flipped = mirrored_layout(values)
            return np.where(((values - flipped) @ side < 0)[:, None], flipped, values)
        return values if layout else values - values.mean(axis=1, keepdims=True)  # shares are never negative

    yield from pairs_in_buckets(*buckets(signatures_NP, planes, part, prepared))


def mirrored(signatures_NP: NDArray[np.int8]) -> NDArray[np.int8]:
    """Signatures of the clips' mirror images, but for the vector, which only some encoders could turn."""
    moves = signatures_NP[:, LAYOUT : LAYOUT + MOVES].reshape(len(signatures_NP), -1, TINY_PX[0])[:, :, ::-1]
    parts = (mirrored_layout(signatures_NP[:, :LAYOUT]), moves.reshape(-1, MOVES), signatures_NP[:, LAYOUT + MOVES :])
    return np.concatenate(parts, axis=1)


def mirrored_layout(layout_NP: NDArray[Any]) -> NDArray[Any]:
    """Mean pictures with left and right changed."""
    return layout_NP.reshape(len(layout_NP), -1, TINY_PX[0], 3)[:, :, ::-1].reshape(layout_NP.shape)


def buckets(
    values_NP: NDArray[np.int8],
    planes: NDArray[np.float32],
    part: slice = slice(None),
    prepared: Callable[[NDArray[np.float32]], NDArray[np.float32]] = lambda values: values,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The bucket (N,) of each row by all hyperplanes but the last, and its place along that one."""
    num_bits = planes.shape[1] - 1
    keys, along = np.zeros(len(values_NP), np.int64), np.zeros(len(values_NP), np.float32)
    for low in range(0, len(values_NP), CHUNK):
        sides = prepared(values_NP[low : low + CHUNK, part].astype(np.float32)) @ planes
        keys[low : low + CHUNK] = (sides[:, :num_bits] > 0) @ (1 << np.arange(num_bits))
        along[low : low + CHUNK] = sides[:, num_bits]
    return keys, along


def pairs_in_buckets(keys: NDArray[np.int64], along: NDArray[np.float32]) -> Iterator[NDArray[np.int64]]:
    """Pairs (any, 2) of rows in one bucket, the smaller number first."""
    order = np.lexsort((along, keys))
    starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    sizes = np.diff(np.r_[starts, len(order)])
    reach = np.repeat(np.where(sizes > MAX_BUCKET, NEAREST, sizes), sizes)
    ends = np.repeat(starts + sizes, sizes)
    places = np.arange(len(order))
    for step in range(1, min(MAX_BUCKET, int(sizes.max())) + 1):
        left = places[(step <= reach) & (places + step < ends)]
        yield np.sort(np.stack([order[left], order[left + step]], axis=1), axis=1)


def likeness(
    left_NP: NDArray[np.int8],
    right_NP: NDArray[np.int8],
    same_layout: float = SAME_LAYOUT,
    same_moves: float = SAME_MOVES,
) -> NDArray[np.float32]:
    """How alike pairs look, (N,): the layouts' product, or 0 where any part differs."""
    layout = products(left_NP[:, :LAYOUT], right_NP[:, :LAYOUT])
    moves = products(left_NP[:, LAYOUT : LAYOUT + MOVES], right_NP[:, LAYOUT : LAYOUT + MOVES])
    vector = products(left_NP[:, LAYOUT + MOVES :], right_NP[:, LAYOUT + MOVES :])
    stills = ~left_NP[:, LAYOUT : LAYOUT + MOVES].any(axis=1) & ~right_NP[:, LAYOUT : LAYOUT + MOVES].any(axis=1)
    moving = (layout >= same_layout) & (moves >= same_moves) & (vector >= SAME_VECTOR)
    return np.where(moving | (stills & (layout >= SAME_STILL)), layout, 0).astype(np.float32)


def products(left_NP: NDArray[np.int8], right_NP: NDArray[np.int8]) -> NDArray[np.float32]:
    """Cosines of rows; 0 where one is all zeros."""
    left, right = left_NP.astype(np.float32), right_NP.astype(np.float32)
    length = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return ((left * right).sum(axis=1) / np.maximum(length, 1e-6)).astype(np.float32)


class Groups:
    """Which numbers belong together (union-find); the smallest of a group stands for it."""

    def __init__(self, size: int) -> None:
        self._parents = np.arange(size)

    def find(self, item: int) -> int:
        """The smallest number of the item's group."""
        parents = self._parents
        while parents[item] != item:
            parents[item] = parents[parents[item]]
            item = int(parents[item])
        return item

    def join(self, left: int, right: int) -> None:
        """Make one group of two."""
        low, high = sorted((self.find(left), self.find(right)))
        self._parents[high] = low
