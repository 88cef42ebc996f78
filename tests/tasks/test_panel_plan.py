"""Orders of a panel, as properties: nothing lost, no neighbours of one source where that can be, its own for each rater."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tasks.panel_plan import Item, Panel, arranged, num_neighbours, order

counts_of_sources = st.lists(st.integers(1, 6), min_size=1, max_size=9)


def item(source: str, system: str = "candidate", *, training: bool = False) -> Item:
    name = f"{source}-{system}-{training}"
    return Item(name=name, source=source, system=system, sha256=name, duration_s=1.0, gain_db=0.0, training=training)


def panel(num_sources: int, num_systems: int, num_repeats: int, seed: int = 0) -> Panel:
    shown = [item(f"s{source}", f"y{system}") for source in range(num_sources) for system in range(num_systems)]
    training = [item("train", f"y{system}", training=True) for system in range(3)]
    return Panel(seed=seed, num_repeats=num_repeats, items=(*training, *shown), left_out={}, quieter={})


@given(counts_of_sources, st.integers(0, 2**32))
def test_arranging_loses_nothing_and_has_no_neighbours_where_none_need_be(counts: list[int], seed: int) -> None:
    items = [item(f"s{source}", f"y{place}") for source, count in enumerate(counts) for place in range(count)]
    found = arranged(items, np.random.default_rng(seed))
    assert Counter(found) == Counter(items)
    neighbours = sum(left.source == right.source for left, right in pairwise(found))
    assert neighbours == max(0, 2 * max(counts) - sum(counts) - 1)  # the least that any order has


@given(st.integers(2, 10), st.integers(2, 4), st.integers(0, 3), st.integers(0, 1000), st.integers(1, 99))
def test_every_rater_meets_training_then_everything_once_and_some_twice(
    num_sources: int, num_systems: int, num_repeats: int, seed: int, rater: int
) -> None:
    made = panel(num_sources, num_systems, num_repeats, seed)
    showings = order(made, rater)
    assert [showing.item.training for showing in showings] == [True] * 3 + [False] * (len(showings) - 3)
    met = Counter(showing.item.name for showing in showings[3:])
    assert met.keys() == {each.name for each in made.shown}
    assert sorted(met.values(), reverse=True)[: num_repeats + 1] == [2] * num_repeats + [1]
    seen: set[str] = set()
    for showing in showings:
        assert showing.is_repeat == (showing.item.name in seen)
        seen.add(showing.item.name)
    most = max(Counter(showing.item.source for showing in showings[3:]).values())
    assert num_neighbours(showings) == max(0, 2 * most - (len(showings) - 3) - 1)
    assert order(made, rater) == showings


def test_orders_differ_between_raters_and_favour_no_place() -> None:
    made = panel(3, 2, 0)
    orders = [tuple(showing.item.name for showing in order(made, rater)[3:]) for rater in range(1, 1201)]
    allowed = [
        each for each in permutations(made.shown) if all(left.source != right.source for left, right in pairwise(each))
    ]
    assert len(set(orders)) > 0.95 * len(allowed)
    firsts = Counter(each[0] for each in orders)
    assert max(firsts.values()) < 1.3 * min(firsts.values())
