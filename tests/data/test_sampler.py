"""The sampler's promises, as properties."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.sampler import Candidate, Sampler
from data.stage import Stage


def stage(**changes: object) -> Stage:
    settings = {"conditions": {"t2va": 0.25, "fl2va": 0.75}, "num_steps": 10, "batch_size": 3, "learning_rate": 1e-3}
    return Stage.model_validate({**settings, **changes})


def pool(num_new: int, num_replay: int = 0) -> list[Candidate]:
    new = [Candidate(f"new-{index}", str(index % 2), replay=False) for index in range(num_new)]
    return new + [Candidate(f"old-{index}", "0", replay=True) for index in range(num_replay)]


@given(st.integers(5, 40), st.integers(1, 5), st.integers(0, 3))
def test_an_epoch_deals_every_new_clip_and_never_mixes_layouts(num_new: int, batch_size: int, seed: int) -> None:
    sampler = Sampler(pool(num_new), stage(batch_size=batch_size), seed)
    dealt = [sampler.batch(step) for step in range(sampler.epoch_length)]
    assert {clip for batch in dealt for clip in batch.clip_ids} == {f"new-{index}" for index in range(num_new)}
    for batch in dealt:
        assert len({int(clip.split("-")[1]) % 2 for clip in batch.clip_ids}) == 1
        assert len(batch.clip_ids) == batch_size


@given(st.integers(0, 200), st.integers(0, 5))
def test_a_batch_depends_on_seed_and_step_alone(step: int, seed: int) -> None:
    warm = Sampler(pool(11, 5), stage(replay_share=0.3, replay_groups=("old",)), seed)
    for other in range(0, 30, 7):
        warm.batch(other)
    cold = Sampler(list(reversed(pool(11, 5))), stage(replay_share=0.3, replay_groups=("old",)), seed)
    assert warm.batch(step) == cold.batch(step)


def test_shares_of_replay_and_conditions_are_kept() -> None:
    sampler = Sampler(pool(40, 6), stage(replay_share=0.25, replay_groups=("old",)), 0)
    dealt = [sampler.batch(step) for step in range(20 * sampler.epoch_length)]
    replayed = sum(batch.clip_ids[0].startswith("old") for batch in dealt) / len(dealt)
    assert abs(replayed - 0.25) < 0.03
    modes = Counter(batch.mode for batch in dealt)
    assert abs(modes["t2va"] / len(dealt) - 0.25) < 0.06


def test_fewer_clips_than_a_batch_are_refused_with_both_numbers() -> None:
    with pytest.raises(
        ValueError, match=r"3 clips to train on \(of 8\) do not fill one batch of batch_size = 4; lower"
    ):
        Sampler(pool(3, 5), stage(batch_size=4), 0)
    assert len(set(Sampler(pool(4), stage(batch_size=4), 0).batch(0).clip_ids)) == 2  # of one layout: filled up


def test_nothing_to_draw_is_refused_with_the_option_to_change() -> None:
    with pytest.raises(ValueError, match="max_difficulty"):
        Sampler(pool(0, 3), stage(), 0)
    with pytest.raises(ValueError, match="replay_share"):
        Sampler(pool(3), stage(replay_share=0.2, replay_groups=("old",)), 0)
