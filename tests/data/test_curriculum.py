"""Difficulty ranks and what a stage may draw."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from data.curriculum import assign, candidates, ranked
from data.latents import LatentRow
from data.records import Stage


@given(st.lists(st.integers(0, 9), min_size=2, max_size=30))
def test_ranks_equal_scipys_average_ranks(values: list[int]) -> None:
    expected = (stats.rankdata(values) - 1) / (len(values) - 1)
    assert ranked([float(value) for value in values]) == pytest.approx(list(expected))


def rows() -> dict[str, LatentRow]:
    return {
        f"c{index}": LatentRow(
            clip_id=f"c{index}", source_id="s", split="train", group="g", has_audio=True, shard="x", modes="t2va",
            layout="1", num_tokens=1,
        )
        for index in range(3)
    }  # fmt: skip


def test_a_stage_draws_the_easy_and_what_it_replays() -> None:
    planned = assign(["c0", "c1", "c2"], ["old", "new", "new"], [0] * 3, [0] * 3, [1.0, 0.5, 0.9])
    settings = {"conditions": {"t2va": 1.0}, "num_steps": 1, "learning_rate": 1.0, "max_difficulty": 0.5}
    plain = Stage.model_validate(settings)
    assert [item.clip_id for item in candidates(planned, rows(), plain)] == ["c1"]
    replaying = Stage.model_validate({**settings, "replay_share": 0.5, "replay_groups": ["old"]})
    assert [(item.clip_id, item.replay) for item in candidates(planned, rows(), replaying)] == [
        ("c0", True),
        ("c1", False),
    ]


def test_a_curriculum_of_other_latents_is_refused() -> None:
    planned = assign(["c9"], ["g"], [0], [0], [0])
    stage = Stage.model_validate({"conditions": {"t2va": 1.0}, "num_steps": 1, "learning_rate": 1.0})
    with pytest.raises(ValueError, match="c9"):
        candidates(planned, rows(), stage)
