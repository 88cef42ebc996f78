"""Shuffling and sharing out in closed form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from data.dealing import SMALL, forked, shuffled


@given(st.integers(1, 3000), st.integers(0, 2**63))
def test_shuffling_loses_and_doubles_nothing(count: int, key: int) -> None:
    places = np.arange(count)
    result = shuffled(places, count, key)
    assert np.array_equal(np.sort(result), places)
    some = places[:: max(1, count // 5)]
    assert np.array_equal(shuffled(some, count, key), result[some])


@pytest.mark.parametrize("count", [3, 10, SMALL, SMALL + 1, 1000, 100_003])
def test_every_place_is_as_likely_and_neighbours_are_parted(count: int) -> None:
    ends = np.array([0, count - 1])
    found = np.array([shuffled(ends, count, key) for key in range(3000)])
    bins = min(count, 10)
    for place in (0, 1):
        seen = np.bincount(found[:, place] * bins // count, minlength=bins)
        expected = np.bincount(np.arange(count) * bins // count, minlength=bins) / count * 3000
        assert stats.chisquare(seen, expected).pvalue > 1e-4
    if count > SMALL:
        many = np.array([shuffled(np.arange(200), count, key) for key in range(30)]) / count
        assert abs(np.corrcoef(many[:, :-1].ravel(), many[:, 1:].ravel())[0, 1]) < 0.05
        assert stats.kstest(many.ravel(), "uniform").pvalue > 1e-4


@settings(deadline=None)
@given(st.lists(st.floats(1e-4, 1), min_size=1, max_size=12), st.integers(0, 10**9))
def test_every_deck_is_used_as_often_as_its_rate_says_at_every_step(rates: list[float], far: int) -> None:
    fork, counts = forked(rates), [0] * len(rates)
    exact = np.array(rates) / sum(rates)
    for step in range(300):
        assert fork.uses(step) == dict(enumerate(counts))
        deck, use = fork.at(step)
        assert use == counts[deck]
        counts[deck] += 1
        assert np.abs(np.array(counts) - exact * (step + 1)).max() < 2
    uses = fork.uses(far)
    assert sum(uses.values()) == far
    assert max(abs(uses[deck] - far * share) for deck, share in enumerate(exact)) < 2
    deck, use = fork.at(far)
    assert use == uses[deck]
