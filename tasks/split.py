"""Divide clips into train, val and test by their source, the same way every time.

Example: soundstage split seed=1 test_share=0.1
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field, model_validator

from data import files, splits
from data.records import Clip, DataRefused, Frozen


class Config(Frozen):
    """How clips are divided."""

    clips: Path
    """Parquet of clips."""
    splits: Path
    """Folder for train.parquet, val.parquet, test.parquet and summary.json."""
    seed: int = 0
    """Another seed is another draw."""
    val_share: float = Field(default=0.08, ge=0, lt=1)
    """Share of the sources of each group that is watched during training."""
    test_share: float = Field(default=0.2, gt=0, lt=1)
    """Share of the sources of each group that is never seen before `evaluate`."""

    @model_validator(mode="after")
    def _some_are_left_to_train(self) -> Config:
        if self.val_share + self.test_share >= 1:
            raise ValueError(f"val_share {self.val_share:g} + test_share {self.test_share:g} leave nothing to train on")
        return self


class Result(Frozen):
    """Clips in each split."""

    num_train: int
    num_val: int
    num_test: int


def run(config: Config) -> Result:
    """Write the three splits and a summary.

    Raises:
        DataRefused: fewer than three sources have clips.
    """
    clips = sorted(files.read_records(config.clips, Clip), key=lambda clip: clip.clip_id)
    groups = {clip.source_id: clip.group for clip in clips}
    if len(groups) < splits.MIN_STRATUM:
        raise DataRefused(
            f"{config.clips} holds {len(clips)} clips of {len(groups)} sources;"
            f" at least {splits.MIN_STRATUM} sources are needed, one for each split"
        )
    chosen = splits.assign(groups, config.seed, config.val_share, config.test_share)
    divided: dict[splits.SplitName, list[Clip]] = {
        name: [clip for clip in clips if chosen[clip.source_id] == name] for name in splits.SPLITS
    }
    check_no_leak(divided)
    for name, members in divided.items():
        files.write_records(config.splits / f"{name}.parquet", members, Clip)
    files.write_text(config.splits / "summary.json", json.dumps(summary(divided), indent=2, ensure_ascii=False) + "\n")
    return Result(**{f"num_{name}": len(members) for name, members in divided.items()})


def check_no_leak(divided: Mapping[splits.SplitName, Sequence[Clip]]) -> None:
    """No source, and so no copy of its content, is in two splits.

    Raises:
        DataRefused: one is; a source id is the hash of the content, so this finds exact copies under other names too.
    """
    owners = {(clip.source_id, name) for name, members in divided.items() for clip in members}
    twice = [source_id for source_id, count in Counter(source_id for source_id, _ in owners).items() if count > 1]
    if twice:
        raise DataRefused(f"sources in more than one split: {', '.join(sorted(twice))}")


def summary(divided: Mapping[splits.SplitName, Sequence[Clip]]) -> dict[str, object]:
    """Clips and sources of every split and group, and what was checked."""
    groups = sorted({clip.group for members in divided.values() for clip in members})

    def numbers(members: Sequence[Clip]) -> dict[str, int]:
        return {"num_clips": len(members), "num_sources": len({clip.source_id for clip in members})}

    counts = {
        name: numbers(members) | {"groups": {g: numbers([c for c in members if c.group == g]) for g in groups}}
        for name, members in divided.items()
    }
    return {"splits": counts, "leaks": {"sources_and_exact_copies": 0, "near_duplicates": "not checked"}}
