"""The sampler: the global batch at a step is a pure function of (seed, stage, step).

So resuming needs no stored position, and any number of processes can take slices of the same batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from data.records import Stage

Key = TypeVar("Key")


class Candidate(NamedTuple):
    """A clip that a stage may draw."""

    clip_id: str
    layout: str
    replay: bool
    """Whether it belongs to the stage's replay groups."""


class StepBatch(NamedTuple):
    """What one optimiser update sees."""

    step: int
    mode: str
    entries: tuple[str, ...]
    variants: tuple[str, ...]
    """How each entry is presented: all of one mode."""


class Sampler:
    """Draws batches of one layout and one conditioning mode.

    An epoch deals every new clip once (the last batch of a bucket is filled up from its start) and adds replay
    batches until they are `replay_share` of all. Conditioning modes are drawn batch by batch.

    Raises:
        ValueError: fewer clips than one batch takes, or replay asked for with no clip to replay.
    """

    def __init__(self, candidates: Sequence[Candidate], stage: Stage, seed: int) -> None:
        self._new = bucketed([item for item in candidates if not item.replay])
        self._replay = bucketed([item for item in candidates if item.replay])
        num_clips = sum(map(len, self._new.values()))
        if not num_clips:
            raise ValueError(f"no clip to train on (of {len(candidates)}); raise max_difficulty or add data")
        if num_clips < stage.batch_size:
            raise ValueError(
                f"{num_clips} clips to train on (of {len(candidates)}) do not fill one batch of batch_size ="
                f" {stage.batch_size}; lower batch_size, raise max_difficulty or add data"
            )
        if stage.replay_share and not self._replay:
            raise ValueError(f"no clip of {stage.replay_groups} to replay; set replay_share to 0")
        self._stage = stage
        self._seed = seed
        self._modes = {name: share for name, share in stage.conditions.items() if share > 0}
        num_new = sum(-(-len(clips) // stage.batch_size) for clips in self._new.values())
        self.epoch_length = num_new + round(num_new * stage.replay_share / (1 - stage.replay_share))
        """Batches of one epoch."""
        self._epoch: tuple[int, list[tuple[str, ...]]] = (-1, [])

    def batch(self, step: int) -> StepBatch:
        """The global batch of a step."""
        epoch, place = divmod(step, self.epoch_length)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._schedule(epoch))
        mode = pick(self._modes, float(np.random.default_rng([self._seed, 1, step]).random()))
        entries = self._epoch[1][place]
        return StepBatch(step, mode, entries, (mode,) * len(entries))

    def _schedule(self, epoch: int) -> list[tuple[str, ...]]:
        """All batches of an epoch, in order."""
        random = np.random.default_rng([self._seed, 0, epoch])
        size = self._stage.batch_size
        batches: list[tuple[str, ...]] = []
        for clips in self._new.values():
            deck: list[str] = [clips[index] for index in random.permutation(len(clips))]
            batches += [
                tuple(deck[(start + place) % len(deck)] for place in range(size)) for start in range(0, len(deck), size)
            ]
        sizes = {layout: float(len(clips)) for layout, clips in self._replay.items()}
        while len(batches) < self.epoch_length:
            clips = self._replay[pick(sizes, float(random.random()))]
            batches.append(tuple(clips[int(random.integers(len(clips)))] for _ in range(size)))
        return [batches[index] for index in random.permutation(len(batches))]


def bucketed(candidates: Sequence[Candidate]) -> dict[str, list[str]]:
    """Clip ids by layout, both sorted, so that the order of the input does not matter."""
    buckets: dict[str, list[str]] = {}
    for item in sorted(candidates):
        buckets.setdefault(item.layout, []).append(item.clip_id)
    return dict(sorted(buckets.items()))


def pick(weights: Mapping[Key, float], at: float) -> Key:
    """The key under `at` (0–1) when the weights are laid end to end, in their own order."""
    total = sum(weights.values())
    reached = 0.0
    for key, weight in weights.items():
        reached += weight / total
        if at < reached:
            return key
    return list(weights)[-1]
