"""The sampler: the global batch at a step is a pure function of (seed, stage, step).

So resuming needs no stored position, and any number of processes can take slices of the same batch. Items are dealt
from *decks*, one for each part of the mixture, conditioning mode, and with or without caption; a step uses one deck.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from data.candidates import Candidates, Component, Kind, Places, Pool, components_of, kinds_of, nothing, pool_of
from data.dealing import Deck, Fork, deck_of, forked
from data.stage import Stage

NUM_SEGMENTS = 10
"""Steps in which competence grows over a stage."""


class StepBatch(NamedTuple):
    """What one optimiser update sees, or one process's share of it."""

    step: int
    mode: str
    entries: tuple[str, ...]
    variants: tuple[str, ...]
    """How each entry is presented: all of one mode and one layout."""


class DeckFacts(NamedTuple):
    """One deck, for people."""

    deck: str
    clips: int
    items: int
    """Clips in each of their variants: more where a clip has several sets of references."""
    buckets: int
    pass_length: int
    """Batches that deal every item once."""
    share: float
    """Of the clips that are drawn while it is in use."""
    num_steps: int
    """Of the stage, in this deck."""
    passes: float


class Coverage(NamedTuple):
    """What some steps draw of the clips that a stage may draw."""

    clips: int
    drawn: int
    """Clips drawn at least once."""
    most: int
    """How often the clip drawn most often is."""


class Segment(NamedTuple):
    """A part of a stage in which the same clips are open."""

    first_step: int
    decks: tuple[Deck, ...]
    fork: Fork


class Sampler:
    """Draws batches of one layout and one conditioning mode, as many clips as `batch_size` and `max_tokens` allow.

    A deck deals each of its items exactly once a pass, in batches of nearly equal size. Shares are shares of drawn
    clips. A part of the mixture that lacks a mode gets more of the others, so that its weight is kept.

    Raises:
        ValueError: the stage asks for what the candidates do not have; the message names the option.
    """

    def __init__(self, candidates: Candidates, stage: Stage, seed: int) -> None:
        self._entries, self._variant_names = candidates.entries, candidates.variant_names
        self._seed, self._num_steps = seed, stage.num_steps
        self._pool = pool_of(candidates, stage)
        openings = opened(stage)
        refuse(candidates, self._pool, stage, openings[0][1])
        parts = components_of(stage), kinds_of(stage)
        self._segments = [
            segment_of(self._pool, *parts, step, limit, f"{place}", seed)
            for place, (step, limit) in enumerate(openings)
        ]
        self._first_steps = [segment.first_step for segment in self._segments]

    def batch(self, step: int) -> StepBatch:
        """The global batch of a step."""
        segment = self._segments[bisect_right(self._first_steps, step) - 1]
        number, use = segment.fork.at(step - segment.first_step)
        deck = segment.decks[number]
        places = deck.deal(use)
        entries = tuple(str(self._entries[int(row)]) for row in self._pool.rows[places])
        variants = tuple(self._variant_names[int(code)] for code in self._pool.variants[places])
        return StepBatch(step, deck.mode, entries, variants)

    def summary(self) -> list[DeckFacts]:
        """Every deck of the stage."""
        rows: list[DeckFacts] = []
        for segment, num_steps in zip(self._segments, self._lengths(self._num_steps), strict=True):
            uses = segment.fork.uses(num_steps)
            for number, deck in enumerate(segment.decks):
                places = np.zeros(len(self._pool.rows), np.int64)
                deck.tally(deck.pass_length, places)
                clips, items = self._pool.num_entries(places > 0), int(deck.sizes.sum())
                length, used = deck.pass_length, uses[number]
                facts = DeckFacts(deck.name, clips, items, len(deck.sizes), length, deck.share, used, used / length)
                rows.append(facts)
        return rows

    def draws(self, num_steps: int) -> Places:
        """How often the first steps draw each training entry, in the order of their names; exact."""
        counts = np.zeros(len(self._pool.rows), np.int64)
        for segment, length in zip(self._segments, self._lengths(num_steps), strict=True):
            for number, uses in segment.fork.uses(length).items():
                segment.decks[number].tally(uses, counts)
        return np.bincount(self._pool.rows, counts, len(self._entries)).astype(np.int64)

    def coverage(self, num_steps: int) -> Coverage:
        """How many of the clips that the stage may draw the first steps do draw."""
        draws = self.draws(num_steps)
        may = self._pool.num_entries(np.ones(len(self._pool.rows), np.bool_))
        return Coverage(may, int((draws > 0).sum()), int(draws.max()))

    def _lengths(self, num_steps: int) -> list[int]:
        """Of the first steps, how many fall into each segment."""
        ends = [*self._first_steps[1:], max(num_steps, self._first_steps[-1])]
        return [max(0, min(num_steps, end) - first) for first, end in zip(self._first_steps, ends, strict=True)]


def share(batch: StepBatch, rank: int, world_size: int) -> StepBatch:
    """One process's part of a batch; all of them in order are the batch.

    A process that gets none has the first clip, so that it takes part in what all do together; it does not count.

    Raises:
        ValueError: there is no such process.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size} processes: ranks run from 0 to {world_size - 1}")
    num_clips = len(batch.entries)
    first, end = rank * num_clips // world_size, (rank + 1) * num_clips // world_size
    part = slice(first, end) if end > first else slice(0, 1)
    return batch._replace(entries=batch.entries[part], variants=batch.variants[part])


def opened(stage: Stage) -> list[tuple[int, float]]:
    """First step of each segment, and the difficulty up to which clips are open in it.

    Source: Platanios et al. 2019, arXiv 1903.09848, equation 7 with p = 2, in `NUM_SEGMENTS` steps.
    """
    low, high = stage.difficulty
    if stage.pacing == "window":
        return [(0, high)]
    count, start = min(NUM_SEGMENTS, stage.num_steps), stage.competence_start
    found: list[tuple[int, float]] = []
    for place in range(count - 1):
        competence = math.sqrt(place / (count - 1) * (1 - start**2) + start**2)
        found.append((place * stage.num_steps // count, low + min(1.0, competence) * (high - low)))
    return [*found, ((count - 1) * stage.num_steps // count, high)]


def segment_of(
    pool: Pool, components: list[Component], kinds: list[Kind], first_step: int, limit: float, name: str, seed: int
) -> Segment:
    """The decks of the items that are open up to a difficulty."""
    sizes = pool.sizes(limit)
    codes = pool.components * len(kinds) + pool.kinds
    held = np.bincount(codes, sizes, len(components) * len(kinds)).reshape(len(components), len(kinds)) > 0
    full = [place for place in range(len(components)) if held[place].any()]
    replay = sum(components[place].share for place in full if components[place].replay)
    new = sum(components[place].share for place in full if not components[place].replay)
    decks: list[Deck] = []
    for place in full:
        component, present = components[place], np.flatnonzero(held[place]).tolist()
        part = component.share if component.replay else component.share / new * (1 - replay)
        for number in present:
            kind, buckets = kinds[number], codes == place * len(kinds) + number
            share_of_kind = part * kind.share / sum(kinds[other].share for other in present)
            title = "/".join(word for word in (name, component.name, str(kind)) if word)
            key = seed, int.from_bytes(hashlib.sha256(title.encode()).digest()[:8])
            which = pool.starts[buckets], sizes[buckets], pool.capacity[buckets]
            decks.append(deck_of(title, kind.mode, share_of_kind, key, *which))
    return Segment(first_step, tuple(decks), forked([deck.rate for deck in decks]))


def refuse(candidates: Candidates, pool: Pool, stage: Stage, limit: float) -> None:
    """Hold what a stage asks for against what there is; `limit` is the difficulty that is open at first.

    Raises:
        ValueError: there is too little of it.
    """
    num_clips = pool.num_entries((pool.opens >= 0) & (pool.opens <= limit))
    remedy = "raise competence_start, widen difficulty" if stage.pacing == "competence" else "widen difficulty"
    if not (pool.opens >= 0).any():
        raise ValueError(nothing(candidates, stage))
    if num_clips < stage.batch_size:
        raise ValueError(
            f"{num_clips} clips to train on (of {candidates.num_entries}) do not fill one batch of batch_size ="
            f" {stage.batch_size}; lower batch_size, {remedy} or add data"
        )
    for place, component in enumerate(components_of(stage)):
        if place not in pool.components and component.replay:
            what = f"of {', '.join(stage.replay_groups)}" if stage.replay_groups else f"below {stage.difficulty[0]:g}"
            raise ValueError(f"no clip {what} to replay (of {candidates.num_entries}); set replay_share to 0")
        if place not in pool.components:
            raise ValueError(
                f"mixture: no clip of group {component.name!r} to train on; there are"
                f" {', '.join(map(repr, candidates.group_names))}; leave it out, widen difficulty or add data"
            )
