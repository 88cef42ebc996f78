"""The curriculum: difficulty of clips, and which of them a stage may draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from data.latents import LatentRow
from data.records import Frozen, Stage
from data.sampler import Candidate


class Planned(Frozen):
    """One training clip of the curriculum."""

    clip_id: str
    group: str
    motion: float
    """Rank of its motion among the training clips, 0–1."""
    tokens: float
    """Rank of its sequence length, 0–1."""
    difficulty: float
    """Rank of the weighted sum, 0 easiest, 1 hardest."""


def ranked(values: Sequence[float]) -> list[float]:
    """Ranks in 0–1, equal values sharing their mean rank: raw features have no common scale."""
    order = sorted(values)
    if len(order) < 2:
        return [0.0 for _ in values]
    first = {value: order.index(value) for value in set(values)}
    count = {value: order.count(value) for value in set(values)}
    return [(first[value] + (count[value] - 1) / 2) / (len(order) - 1) for value in values]


def assign(
    clip_ids: Sequence[str],
    groups: Sequence[str],
    motion: Sequence[float],
    tokens: Sequence[float],
    difficulty: Sequence[float],
) -> list[Planned]:
    """Rows of the curriculum, sorted by clip."""
    columns = zip(clip_ids, groups, motion, tokens, difficulty, strict=True)
    rows = [
        Planned(clip_id=clip_id, group=group, motion=round(m, 6), tokens=round(t, 6), difficulty=round(d, 6))
        for clip_id, group, m, t, d in columns
    ]
    return sorted(rows, key=lambda row: row.clip_id)


def candidates(planned: Sequence[Planned], rows: Mapping[str, LatentRow], stage: Stage) -> list[Candidate]:
    """Clips a stage may draw: easy enough, or of a replay group.

    Raises:
        ValueError: the curriculum names a clip that the latent store does not hold.
    """
    missing = [item.clip_id for item in planned if item.clip_id not in rows]
    if missing:
        raise ValueError(
            f"curriculum names {len(missing)} clips without latents, first {missing[0]}; run `soundstage plan`"
        )
    chosen: list[Candidate] = []
    for item in planned:
        replay = stage.replay_share > 0 and item.group in stage.replay_groups
        if replay or item.difficulty <= stage.max_difficulty:
            chosen.append(Candidate(item.clip_id, rows[item.clip_id].layout, replay))
    return chosen
