"""Opinion scores against the golden matrix, scipy, loops written by the definition, and simulation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from metrics import opinion

ASSETS = Path(__file__).parents[1] / "assets/eval"


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads((ASSETS / "audio_mos_golden.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def votes(golden: dict[str, Any]) -> np.ndarray:
    return np.array(golden["mos_matrix_6_stimuli_x_5_raters"], np.float64)


def panel(num_raters: int, seed: int, *, noise: float = 0.4) -> np.ndarray:
    """Votes of ordinary raters on thirty stimuli over the whole scale."""
    rng = np.random.default_rng(seed)
    quality = np.linspace(1.3, 4.7, 30)[:, None]
    return np.clip(np.rint(quality + rng.normal(0, 0.2, num_raters) + rng.normal(0, noise, (30, num_raters))), 1, 5)


def test_golden_matrix_to_1e_4(golden: dict[str, Any], votes: np.ndarray) -> None:
    raw, freed = opinion.opinion(votes), opinion.opinion(opinion.without_bias(votes))
    assert raw.mos_S == pytest.approx(golden["mos"], abs=1e-9)
    assert freed.mos_S == pytest.approx(golden["mos"], abs=1e-9)
    assert raw.half_width_S == pytest.approx(golden["ci95_t_halfwidth"], abs=1e-4)
    assert raw.standard_error_S == pytest.approx(golden["se_raw"], abs=1e-4)
    assert freed.standard_error_S == pytest.approx(golden["se_bias_removed"], abs=1e-4)
    assert opinion.biases(votes) == pytest.approx(golden["rater_bias"], abs=1e-4)


def test_intervals_are_scipys(votes: np.ndarray) -> None:
    found = opinion.opinion(votes)
    for place, row in enumerate(votes):
        low, high = scipy.stats.t.interval(0.95, len(row) - 1, loc=row.mean(), scale=scipy.stats.sem(row))
        assert found.mos_S[place] - found.half_width_S[place] == pytest.approx(low, abs=1e-12)
        assert found.mos_S[place] + found.half_width_S[place] == pytest.approx(high, abs=1e-12)


def test_one_rater_has_a_mean_and_no_bounds() -> None:
    found = opinion.opinion(np.array([[4.0], [2.0]]))
    assert list(found.mos_S) == [4, 2]
    assert np.isinf(found.half_width_S).all()


@given(st.lists(st.lists(st.integers(1, 5), min_size=4, max_size=4), min_size=2, max_size=8), st.integers(0, 3))
def test_a_severe_rater_changes_neither_differences_nor_freed_errors(rows: list[list[int]], rater: int) -> None:
    votes = np.array(rows, np.float64)
    severe = votes.copy()
    severe[:, rater] -= 0.7
    before, after = (opinion.opinion(opinion.without_bias(each)) for each in (votes, severe))
    assert after.standard_error_S == pytest.approx(before.standard_error_S, abs=1e-9)
    assert np.diff(after.mos_S) == pytest.approx(np.diff(before.mos_S), abs=1e-9)
    assert opinion.biases(severe).sum() == pytest.approx(0, abs=1e-9)


def bt500_by_hand(votes: np.ndarray) -> list[tuple[int, int]]:
    """How often each rater lies far above and below, vote by vote as the recommendation says it."""
    counts = [[0, 0] for _ in range(votes.shape[1])]
    for row in votes:
        mean, spread = row.mean(), row.std(ddof=1)
        if spread == 0:
            continue
        kurtosis = scipy.stats.kurtosis(row, fisher=False)
        limit = (2 if 2 <= kurtosis <= 4 else math.sqrt(20)) * spread
        for rater, vote in enumerate(row):
            counts[rater][0] += bool(vote >= mean + limit)
            counts[rater][1] += bool(vote <= mean - limit)
    return [(high, low) for high, low in counts]


@pytest.mark.parametrize("seed", range(20))
def test_bt500_is_the_recommendation_vote_by_vote(seed: int) -> None:
    votes = panel(12, seed)
    votes[:, 3] = np.random.default_rng(seed).integers(1, 6, 30)
    for (high, low), found in zip(bt500_by_hand(votes), opinion.screen_bt500(votes), strict=True):
        assert found.outlying_share == pytest.approx((high + low) / 30)
        rejected = (high + low) / 30 > 0.05 and abs(high - low) / (high + low) < 0.3
        assert found.is_rejected == rejected


def test_bt500_finds_a_guesser_and_spares_the_severe() -> None:
    caught = severe = good = 0
    for seed in range(40):
        votes = panel(15, seed)
        votes[:, 3] = np.random.default_rng(seed + 1000).integers(1, 6, 30)
        votes[:, 7] = np.clip(votes[:, 7] - 1, 1, 5)
        found = [each.is_rejected for each in opinion.screen_bt500(votes)]
        caught, severe = caught + found[3], severe + found[7]
        good += sum(found) - found[3] - found[7]
    assert caught >= 20  # 25: a guesser whose far votes fall on one side by chance passes, as the recommendation has it
    assert severe == 0
    assert good <= 2


def test_bt500_cannot_fire_with_five_raters() -> None:
    for seed in range(20):
        votes = panel(5, seed)
        votes[:, 2] = np.random.default_rng(seed).integers(1, 6, 30)
        assert not any(each.outlying_share for each in opinion.screen_bt500(votes))


def test_where_all_agree_nobody_is_screened_out() -> None:
    votes = np.repeat(np.arange(1.0, 6)[:, None], 9, axis=1)
    assert not any(each.is_rejected for each in opinion.screen_bt500(votes))


def test_agreement_is_pearsons_with_the_mean_of_the_others(votes: np.ndarray) -> None:
    for rater, value in enumerate(opinion.agreement(votes)):
        others = votes[:, [other for other in range(5) if other != rater]].mean(axis=1)
        assert value == pytest.approx(scipy.stats.pearsonr(votes[:, rater], others).statistic)
        assert value is not None
        assert value > opinion.MIN_CORRELATION


def test_a_constant_rater_agrees_with_nobody_and_equal_stimuli_say_nothing(votes: np.ndarray) -> None:
    constant = votes.copy()
    constant[:, 1] = 3
    assert opinion.agreement(constant)[1] == 0
    assert opinion.agreement(np.full((6, 5), 4.0)) == [None] * 5
    with_nothing = opinion.mean_agreement([votes, np.full((6, 5), 4.0)])
    assert with_nothing == opinion.agreement(votes)
    assert opinion.mean_agreement([np.full((6, 5), 4.0)]) == [None] * 5


def test_bootstrap_is_that_of_whole_raters_and_whole_clips() -> None:
    votes = np.random.default_rng(1).integers(1, 6, (7, 5, 2)).astype(float)
    ours = opinion.cluster_bootstrap(votes, seed=3, num_draws=4000)
    rng = np.random.default_rng(9)
    theirs = np.array([votes[rng.integers(0, 7, 7)][:, rng.integers(0, 5, 5)].mean(axis=(0, 1)) for _ in range(4000)])
    assert ours.mean(axis=0) == pytest.approx(votes.mean(axis=(0, 1)), abs=0.03)
    assert ours.std(axis=0) == pytest.approx(theirs.std(axis=0), rel=0.06)
    assert np.corrcoef(ours.T)[0, 1] == pytest.approx(np.corrcoef(theirs.T)[0, 1], abs=0.06)
    assert (opinion.cluster_bootstrap(votes, seed=3) == opinion.cluster_bootstrap(votes, seed=3)).all()
    assert (opinion.cluster_bootstrap(votes, seed=3) != opinion.cluster_bootstrap(votes, seed=4)).any()


def test_bootstrap_covers_the_truth_where_pooled_votes_do_not() -> None:
    rng = np.random.default_rng(5)
    hits = pooled = 0
    for seed in range(200):
        votes = 3 + rng.normal(0, 0.5, (10, 1, 1)) + rng.normal(0, 0.5, (1, 10, 1)) + rng.normal(0, 0.3, (10, 10, 1))
        found = opinion.estimate(votes.mean(), opinion.cluster_bootstrap(votes, seed=seed, num_draws=400)[:, 0])
        hits += found.low <= 3 <= found.high
        pooled += abs(votes.mean() - 3) <= 1.96 * votes.std(ddof=1) / 10
    assert hits >= 0.87 * 200
    assert pooled <= 0.75 * 200


@pytest.mark.parametrize("wrong", [np.array([[1.0, np.nan]]), np.array([[0.0, 3]]), np.array([[6.0]]), np.array([3.0])])
def test_votes_that_are_none_are_refused(wrong: np.ndarray) -> None:
    with pytest.raises(ValueError, match="vote"):
        opinion.checked(wrong)
