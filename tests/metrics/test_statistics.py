"""Bootstrap intervals against scipy, closed forms and simulation."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from metrics.statistics import bootstrap_mean, is_better, paired_difference


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
