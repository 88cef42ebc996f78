"""Bootstrap intervals against scipy, closed forms and simulation."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from metrics.statistics import bootstrap_mean, holm, is_better, p_above, paired_difference


def each_its_own(count: int) -> list[str]:
    """One source an item."""
    return [f"source-{number:03d}" for number in range(count)]


def test_one_item_a_source_agrees_with_scipys_percentile_bootstrap() -> None:
    values = np.random.default_rng(5).exponential(size=40)
    ours = bootstrap_mean(list(values), each_its_own(40), num_draws=20_000)
    theirs = scipy.stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(1)
    ).confidence_interval
    assert ours is not None
    width = theirs.high - theirs.low
    assert ours.low == pytest.approx(theirs.low, abs=0.03 * width)
    assert ours.high == pytest.approx(theirs.high, abs=0.03 * width)


def test_many_items_give_the_normal_interval() -> None:
    values = np.random.default_rng(2).normal(3, 2, 900)
    interval = bootstrap_mean(list(values), each_its_own(900))
    assert interval is not None
    assert interval.low is not None
    assert interval.high is not None
    half_width = 1.96 * values.std() / 30
    assert interval.mean == pytest.approx(values.mean())
    assert (interval.high - interval.low) / 2 == pytest.approx(half_width, rel=0.06)


def test_copies_of_a_source_do_not_narrow_the_interval() -> None:
    values = list(np.random.default_rng(3).normal(size=20))
    once = bootstrap_mean(values, each_its_own(20))
    copied = bootstrap_mean(values * 9, each_its_own(20) * 9)
    assert once is not None
    assert copied is not None
    assert copied.low == pytest.approx(once.low)
    assert copied.high == pytest.approx(once.high)
    assert (copied.num_items, copied.num_sources) == (180, 20)


def test_clustered_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(11)
    sources = [f"s{number}" for number in range(25) for _ in range(4)]
    hits = 0
    for _ in range(200):
        values = np.repeat(rng.normal(size=25), 4) + 0.2 * rng.normal(size=100)
        interval = bootstrap_mean(list(values), sources, num_draws=400)
        assert interval is not None
        assert interval.low is not None
        assert interval.high is not None
        hits += interval.low <= 0 <= interval.high
    assert 0.87 <= hits / 200 <= 0.99  # treating the items as independent covers about 0.67


def test_paired_difference_uses_only_shared_items_and_removes_their_spread() -> None:
    rng = np.random.default_rng(4)
    hard = {f"clip{number}": float(value) for number, value in enumerate(rng.normal(0, 10, 30))}
    left = {clip: value + 1 + float(rng.normal(0, 0.1)) for clip, value in hard.items()} | {"only left": 999.0}
    source_of = {clip: clip for clip in left}
    interval = paired_difference(left, hard, source_of)
    assert interval is not None
    assert interval.num_items == 30
    assert interval.mean == pytest.approx(1, abs=0.1)
    assert is_better(interval, higher_is_better=True)
    assert not is_better(interval, higher_is_better=False)


def test_same_seed_same_interval_other_seed_another() -> None:
    values = [1.0, 2.0, 4.0, 8.0, 16.0]
    first = bootstrap_mean(values, each_its_own(5), seed=7)
    assert first == bootstrap_mean(values, each_its_own(5), seed=7)
    assert first != bootstrap_mean(values, each_its_own(5), seed=8)


def test_one_source_has_a_mean_but_no_interval_and_proves_nothing() -> None:
    interval = bootstrap_mean([1.0, 2.0], ["a", "a"])
    assert interval is not None
    assert (interval.mean, interval.low, interval.high) == (1.5, None, None)
    assert not is_better(interval, higher_is_better=True)


def test_nothing_gives_nothing_and_unequal_lengths_are_refused() -> None:
    assert bootstrap_mean([], []) is None
    assert paired_difference({"a": 1.0}, {"b": 1.0}, {"a": "a", "b": "b"}) is None
    with pytest.raises(ValueError, match="2 values but 1 sources"):
        bootstrap_mean([1.0, 2.0], ["a"])


def test_p_above_agrees_with_students_test_where_that_holds() -> None:
    for seed in range(5):
        values = np.random.default_rng(seed).normal(0.3, 1, 60)
        theirs = scipy.stats.ttest_1samp(values, 0.1, alternative="greater").pvalue
        assert p_above(list(values), each_its_own(60), 0.1) == pytest.approx(theirs, rel=0.15, abs=0.02)


def test_p_above_rejects_a_true_null_no_more_often_than_its_level() -> None:
    """Sources of 1 to 6 items that resemble each other; deviations are symmetric with heavy tails."""
    rng = np.random.default_rng(1)
    false, percentile = 0, 0
    for _ in range(1000):
        sizes = rng.choice([1, 1, 2, 3, 6], 8)
        values = np.repeat(rng.laplace(size=8), sizes) + rng.laplace(size=sizes.sum())
        sources = [f"s{place}" for place in np.repeat(np.arange(8), sizes)]
        false += p_above(list(values), sources) <= 0.025
        interval = bootstrap_mean(list(values), sources, num_draws=200)
        assert interval is not None
        percentile += interval.low is not None and interval.low > 0
    assert false <= 25
    assert percentile > 40  # what the test is for: an interval's end alone is too sure with few sources


def test_p_above_of_equal_few_or_clustered_values() -> None:
    assert p_above([0.3] * 12, each_its_own(12)) < 0.001
    assert p_above([0.0] * 12, each_its_own(12)) == 1
    assert p_above([0.3] * 12, each_its_own(12), 0.3) == 1
    assert p_above([0.3] * 5, each_its_own(5)) == pytest.approx(1 / 32, abs=0.012)
    assert p_above([1.0, 2.0], ["a", "a"]) == 1
    assert p_above([], []) == 1
    once = list(np.random.default_rng(3).normal(0.4, 1, 20))
    assert p_above(once * 9, each_its_own(20) * 9) == p_above(once, each_its_own(20))


def test_p_above_notices_that_rare_disasters_may_be_missing_by_luck() -> None:
    """A mean of zero through a long tail of bad items: seldom seen, and then Student's test is too sure."""
    rng = np.random.default_rng(2)
    tables = 1 - rng.exponential(size=(1000, 20))
    ours = sum(p_above(list(values), each_its_own(20)) <= 0.025 for values in tables)
    students = int((scipy.stats.ttest_1samp(tables, 0, axis=1, alternative="greater").pvalue <= 0.025).sum())
    assert ours <= 45
    assert ours < 0.75 * students


def test_holm_against_a_table_worked_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1, 1]
    assert holm([]) == []
