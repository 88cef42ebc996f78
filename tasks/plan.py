"""Plan the curriculum: how difficult every training clip is, and a picture of it.

example: soundstage plan weights.motion=1 weights.tokens=0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field, model_validator

from data.curriculum import Planned, assign, ranked
from data.files import read_records, whole, write_records
from data.records import Clip, Frozen

if TYPE_CHECKING:
    from data.latents import LatentRow


class Config(Frozen):
    """Settings of the plan verb."""

    clips: Path
    """Table of clips with their measured features, from `cut`."""
    latents: Path
    """Latent store, for the length of every packed sequence."""
    curriculum: Path
    """Where the table of difficulties goes."""
    picture: Path
    """Where its picture goes, PNG."""
    weights: dict[str, float] = Field(default_factory=lambda: {"motion": 0.7, "tokens": 0.3})
    """Share of each rank in the difficulty: `motion` (mean luma change) and `tokens` (rows of the sequence)."""

    @model_validator(mode="after")
    def _known_features(self) -> Config:
        unknown = set(self.weights) - {"motion", "tokens"}
        if unknown or sum(self.weights.values()) <= 0:
            raise ValueError(f"weights {dict(self.weights)}: features are motion and tokens, and must not all be 0")
        return self


def run(config: Config) -> list[Planned]:
    """Write the difficulty of every training clip, 0 (easiest) to 1, ranked; returns the rows."""
    from data.latents import LatentStore

    store = LatentStore(config.latents)
    clips = {clip.clip_id: clip for clip in read_records(config.clips, Clip)}
    rows = [row for row in store.rows.values() if row.split == "train"]
    planned = plan(rows, clips, config.weights)
    write_records(config.curriculum, planned, Planned)
    draw(planned, config.picture)
    return planned


def plan(rows: Sequence[LatentRow], clips: Mapping[str, Clip], weights: Mapping[str, float]) -> list[Planned]:
    """Difficulty of every clip: the weighted sum of its feature ranks, ranked again."""
    motion = ranked([clips[row.clip_id].motion_p50 for row in rows])
    tokens = ranked([float(row.num_tokens) for row in rows])
    mixed = [weights.get("motion", 0) * m + weights.get("tokens", 0) * t for m, t in zip(motion, tokens, strict=True)]
    return assign([row.clip_id for row in rows], [row.group for row in rows], motion, tokens, ranked(mixed))


def draw(planned: Sequence[Planned], path: Path) -> None:
    """Draw difficulty by group, and how the two features relate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = cast("tuple[Any, Any]", figure.subplots(1, 2))
    groups = sorted({row.group for row in planned})
    members = [[row for row in planned if row.group == group] for group in groups]
    colours = ["#0e8a7b", "#7a5bc7", "#e0a030", "#c2542d", "#5f6b7d"]
    left.hist(
        [[row.difficulty for row in rows] for rows in members],
        bins=[tenth / 10 for tenth in range(11)],
        stacked=True,
        color=[colours[index % len(colours)] for index in range(len(groups))],
        label=[group or "(no group)" for group in groups],
    )
    for index, rows in enumerate(members):
        ink = colours[index % len(colours)]
        right.scatter([row.tokens for row in rows], [row.motion for row in rows], s=10, alpha=0.7, color=ink)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    left.set(xlabel="difficulty (rank)", ylabel="training clips")
    right.set(xlabel="sequence length (rank)", ylabel="motion (rank)")
    figure.legend(loc="outside upper center", ncols=len(groups), frameon=False)
    with whole(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110, metadata={"Software": None})
