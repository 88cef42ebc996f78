from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.splits import assign, counts

shares = st.tuples(st.floats(0, 0.4), st.floats(0.01, 0.5))
corpora = st.dictionaries(
    st.integers(0, 10**6).map(lambda number: f"{number:016x}"),
    st.sampled_from(["", "a", "b", "c"]),
    min_size=3,
    max_size=60,
)


@given(corpora, st.integers(0, 5), shares)
def test_every_source_is_in_exactly_one_split_and_the_draw_is_the_same_in_any_order(
    groups: dict[str, str], seed: int, share: tuple[float, float]
):
    drawn = assign(groups, seed, *share)
    assert drawn.keys() == groups.keys()
    assert set(drawn.values()) <= {"train", "val", "test"}
    assert drawn == assign(dict(reversed(groups.items())), seed, *share)


@given(corpora, st.integers(0, 5), shares)
def test_every_group_of_three_is_in_train_and_test_with_its_share_to_the_nearest_source(
    groups: dict[str, str], seed: int, share: tuple[float, float]
):
    val_share, test_share = share
    drawn = assign(groups, seed, val_share, test_share)
    for group, size in Counter(groups.values()).items():
        found = Counter(drawn[source_id] for source_id in groups if groups[source_id] == group)
        if size >= 3:
            assert found["train"] >= 1
            assert found["test"] >= 1
            if list(drawn.values()).count("val") != 1:  # a lone val source may have been taken from the others
                assert abs(found["test"] - size * test_share) <= (0.5 if found["test"] > 1 else 1) + 1e-9
                assert found["val"] <= size * val_share + 0.5


@given(corpora, st.integers(0, 5), shares)
def test_three_sources_are_enough_for_three_splits(groups: dict[str, str], seed: int, share: tuple[float, float]):
    alone = dict.fromkeys(groups, "")
    found = Counter(assign(alone, seed, *share).values())
    assert min(found["train"], found["test"]) >= 1
    assert (found["val"] >= 1) == (share[0] > 0)


@given(corpora, st.sampled_from(["", "a", "b", "c"]), st.integers(0, 5), shares)
def test_a_new_source_moves_at_most_one_other_across_each_border_of_its_own_group(
    groups: dict[str, str], group: str, seed: int, share: tuple[float, float]
):
    new = "f" * 16
    sizes = Counter(groups.values())
    if sizes[group] < 3:
        return
    before, after = assign(groups, seed, *share), assign({**groups, new: group}, seed, *share)
    if any(list(drawn.values()).count("val") < 2 for drawn in (before, after)):
        return
    moved = [source_id for source_id in groups if before[source_id] != after[source_id]]
    assert {groups[source_id] for source_id in moved} <= {group}
    assert len(moved) <= 2
    assert len({frozenset((before[source_id], after[source_id])) for source_id in moved}) == len(moved)


def test_small_groups_are_shared_out_together():
    groups = {f"{number:016x}": f"folder {number}" for number in range(100)}
    assert Counter(assign(groups, 0, 0.1, 0.2).values()) == {"train": 70, "val": 10, "test": 20}


def test_another_seed_is_another_draw():
    groups = {f"{number:016x}": "" for number in range(50)}
    assert assign(groups, 0, 0.1, 0.2) != assign(groups, 1, 0.1, 0.2)


def test_groups_are_drawn_evenly_by_their_sizes():
    groups = {f"{number:016x}": "base" if number < 24 else "new" for number in range(96)}
    drawn = assign(groups, 0, 0.08, 0.2)
    found = Counter((groups[source_id], name) for source_id, name in drawn.items())
    assert found == {
        ("base", "test"): 5, ("base", "val"): 2, ("base", "train"): 17,
        ("new", "test"): 14, ("new", "val"): 6, ("new", "train"): 52,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("num_sources", "expected"), [(0, (0, 0)), (2, (0, 0)), (3, (1, 0)), (4, (1, 0)), (10, (2, 1)), (100, (20, 8))]
)
def test_counts_are_the_nearest_that_leave_something_to_train(num_sources: int, expected: tuple[int, int]):
    assert counts(num_sources, 0.08, 0.2) == expected


def test_large_shares_leave_one_source_to_train():
    assert counts(3, 0.4, 0.59) == (2, 0)
    assert counts(10, 0.3, 0.69) == (7, 2)


@pytest.mark.parametrize("test_share", [0.01, 0.2, 0.5])
def test_three_sources_give_one_to_each_split(test_share: float):
    drawn = assign(dict.fromkeys("abc", ""), 0, 0.4, test_share)
    assert sorted(drawn.values()) == ["test", "train", "val"]


def test_fewer_than_three_sources_are_an_error_with_numbers():
    with pytest.raises(ValueError, match="2 sources; train, val and test need at least 3"):
        assign({"a": "", "b": ""}, 0, 0.1, 0.2)
