"""Endless dealing without state: which deck a step uses, and what the deck's n-th batch holds.

Both are closed forms: the first batch of a resumed run costs what every other one does, and no process keeps anything.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]
Numbers = NDArray[np.uint64]

ROUNDS = 6
"""Of the Feistel network; four already make a permutation that nobody can tell from a random one (Luby and Rackoff
1988, doi 10.1137/0217022)."""
SMALL = 256
"""Up to this count the whole permutation is sorted out: as quick, and so small a network has few permutations."""
WEIGHT_BITS = 40
"""Rates are rounded to this many bits, so that counts are exact integers on every machine."""


def mixed(numbers: Numbers) -> Numbers:
    """Random-looking numbers, another for each (the finaliser of SplitMix64, Steele et al. 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def shuffled(places: Places, count: int, *key: int) -> Places:
    """What lies at some places of `count` shuffled things; neither time nor memory grows with `count`.

    Above `SMALL`, places pass a Feistel network over the next square number, again where they fall beyond `count`
    (Black and Rogaway 2002, doi 10.1007/3-540-45760-7_9: generalised Feistel, cycle walking).

    Args:
        places: From 0, below `count`.
        count: Number of things.
        key: Decides the permutation.
    """
    keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)
    if count <= SMALL:
        step = np.uint64(0x9E3779B97F4A7C15)
        return np.argsort(mixed(np.arange(count, dtype=np.uint64) * step + keys[0]), kind="stable")[places]
    side = np.uint64(math.isqrt(count - 1) + 1)
    result = places.astype(np.uint64)
    outside = np.arange(len(result))
    while len(outside):
        left, right = result[outside] // side, result[outside] % side
        for secret in keys:
            left, right = right, (left + mixed(right + secret)) % side
        result[outside] = left * side + right
        outside = outside[result[outside] >= count]
    return result.astype(np.int64)


class Fork(NamedTuple):
    """A binary tree that shares steps out among decks: each fork sends its n-th step left or right by rounding."""

    weight: int
    deck: int = -1
    """At a leaf: number of its deck."""
    left: Fork | None = None
    right: Fork | None = None

    def left_uses(self, uses: int) -> int:
        """How many of the first `uses` go left: its share of them, rounded."""
        assert self.left is not None
        return (2 * uses * self.left.weight + self.weight) // (2 * self.weight)

    def at(self, step: int) -> tuple[int, int]:
        """The deck of a step, and how often it was used before."""
        fork, uses = self, step
        while fork.left is not None and fork.right is not None:
            before = fork.left_uses(uses)
            goes_left = fork.left_uses(uses + 1) > before
            fork, uses = (fork.left, before) if goes_left else (fork.right, uses - before)
        return fork.deck, uses

    def uses(self, num_steps: int) -> dict[int, int]:
        """How often each deck is used in the first steps."""
        if self.left is None or self.right is None:
            return {self.deck: num_steps}
        left = self.left_uses(num_steps)
        return self.left.uses(left) | self.right.uses(num_steps - left)


def forked(rates: Sequence[float]) -> Fork:
    """The tree for decks with these rates, common decks near its root (Huffman 1952), where rounding errs least.

    No deck is ever two steps away from its exact share: each fork adds at most half a step, and passes on what came
    from above by its own share, in such a tree two thirds at most except at the leaf.
    """
    scale = 2**WEIGHT_BITS / max(rates)
    weights = [max(1, round(rate * scale)) for rate in rates]
    heap = [(weight, number, Fork(weight, number)) for number, weight in enumerate(weights)]
    heapq.heapify(heap)
    while len(heap) > 1:
        weight, number, left = heapq.heappop(heap)
        other, _, right = heapq.heappop(heap)
        heapq.heappush(heap, (weight + other, number, Fork(weight + other, -1, left, right)))
    return heap[0][2]


class Deck(NamedTuple):
    """Items that are dealt without end, each exactly once a pass, in batches that stay within one bucket."""

    name: str
    mode: str
    share: float
    """Of all clips that are drawn."""
    key: tuple[int, ...]
    """Decides its shuffling."""
    starts: Places
    """Of each bucket: place of its first item in the pool."""
    sizes: Places
    """Of each bucket: its items."""
    num_batches: Places
    """Of each bucket: batches a pass, sizes of which differ by one at most."""
    ends: Places
    """Of each bucket: batches up to its end."""

    @property
    def pass_length(self) -> int:
        """Batches that deal every item once."""
        return int(self.ends[-1])

    @property
    def rate(self) -> float:
        """Steps it takes, up to a factor common to all decks: its share of the clips, over its mean batch."""
        return self.share * self.pass_length / int(self.sizes.sum())

    def deal(self, use: int) -> Places:
        """Places in the pool of the items of a batch.

        Args:
            use: How often the deck was used before.
        """
        number, place = divmod(use, self.pass_length)
        at = int(shuffled(np.array([place]), self.pass_length, *self.key, number, 0)[0])
        bucket = int(np.searchsorted(self.ends, at, side="right"))
        size, batches = int(self.sizes[bucket]), int(self.num_batches[bucket])
        batch = at - int(self.ends[bucket]) + batches
        dealt = np.arange(batch * size // batches, (batch + 1) * size // batches)
        return self.starts[bucket] + shuffled(dealt, size, *self.key, number, 1 + bucket)

    def tally(self, uses: int, counts: Places) -> None:
        """Add to `counts`, by place in the pool, how often the first `uses` batches deal each item."""
        number, rest = divmod(uses, self.pass_length)
        for start, size in zip(self.starts, self.sizes, strict=True):
            counts[start : start + size] += number
        at = shuffled(np.arange(rest), self.pass_length, *self.key, number, 0)
        buckets = np.searchsorted(self.ends, at, side="right")
        for bucket in np.unique(buckets).tolist():
            size, batches = int(self.sizes[bucket]), int(self.num_batches[bucket])
            begun = np.zeros(batches, np.bool_)
            begun[at[buckets == bucket] - int(self.ends[bucket]) + batches] = True
            dealt = np.flatnonzero(begun[((np.arange(size) + 1) * batches - 1) // size])
            counts[self.starts[bucket] + shuffled(dealt, size, *self.key, number, 1 + bucket)] += 1


def deck_of(name: str, mode: str, share: float, key: tuple[int, ...], starts: Any, sizes: Any, capacity: Any) -> Deck:
    """A deck of the buckets that hold anything.

    Args:
        name: For people.
        mode: Of its items.
        share: Of all clips that are drawn.
        key: Decides its shuffling.
        starts: Of each bucket: place of its first item in the pool.
        sizes: Of each bucket: its items.
        capacity: Of each bucket: clips that a batch may hold.
    """
    full = sizes > 0
    starts, sizes, capacity = starts[full], sizes[full], capacity[full]
    num_batches = -(-sizes // capacity)
    return Deck(name, mode, share, key, starts, sizes, num_batches, np.cumsum(num_batches))
