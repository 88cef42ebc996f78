from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.splits import EMPTY, OUT, SPLITS, Drawn, Ledger, assign, draw_name, merged, read_ledger, unit, write_ledger

shares = st.tuples(st.floats(0, 0.4), st.floats(0.01, 0.5))
ids = st.lists(st.integers(0, 10**6).map(lambda number: f"{number:016x}"), min_size=12, max_size=60, unique=True)
links = st.lists(st.tuples(st.integers(0, 59), st.integers(0, 59)), max_size=30)


def draw(
    members: dict[str, str], seed: int = 0, val: float = 0.1, test: float = 0.2, ledger: Ledger = EMPTY
) -> tuple[dict[str, str], Ledger, Drawn]:
    """Split by source ("out" where left out), the new ledger, and all that was found."""
    source_id = pa.array(list(members))
    drawn = assign(source_id, pa.array(list(members.values())), seed, val, test, ledger)
    names = {source: "out" if code == OUT else SPLITS[code] for source, code in zip(members, drawn.split, strict=True)}
    return names, merged(ledger, source_id, drawn), drawn


def alone(count: int) -> dict[str, str]:
    return {f"{number:016x}": f"{number:016x}" for number in range(count)}


def components(sources: list[str], pairs: list[tuple[int, int]]) -> dict[str, str]:
    """Smallest id among the sources that pairs connect, by repeated relabelling (an implementation of its own)."""
    label = {source: source for source in sources}
    edges = [(sources[a], sources[b]) for a, b in pairs if a < len(sources) and b < len(sources)]
    for _ in sources:
        for a, b in edges:
            label[a] = label[b] = min(label[a], label[b])
    return label


def apart(cluster: dict[str, str], split: dict[str, str]) -> bool:
    """Whether no cluster has members in two splits."""
    seen: dict[str, set[str]] = {}
    for source, name in split.items():
        if name != "out":
            seen.setdefault(cluster[source], set()).add(name)
    return all(len(names) == 1 for names in seen.values())


def test_the_hash_is_the_one_of_the_definition():
    assert unit(0, "a") == int.from_bytes(bytes.fromhex("cf6d9263cf71ceca"), "big") / 2**64


@given(ids, links, st.integers(0, 5), shares)
def test_no_cluster_is_in_two_splits_and_order_changes_nothing(
    sources: list[str], pairs: list[tuple[int, int]], seed: int, share: tuple[float, float]
):
    cluster = components(sources, pairs)
    if len(set(cluster.values())) < 3:
        return
    split, ledger, _ = draw(cluster, seed, *share)
    assert apart(cluster, split)
    assert set(split.values()) <= set(SPLITS)
    backwards, same, _ = draw(dict(reversed(cluster.items())), seed, *share)
    assert backwards == split
    assert (ledger.source_id, ledger.cluster, list(ledger.split)) == (same.source_id, same.cluster, list(same.split))


@given(ids, links, st.integers(0, 5), shares, st.randoms(use_true_random=False))
def test_no_clip_changes_split_when_sources_are_added_in_any_order(
    sources: list[str], pairs: list[tuple[int, int]], seed: int, share: tuple[float, float], random
):
    """Each addition may join, bridge and rename clusters; splits of old sources stay, and no two share a cluster."""
    first = sources[:6]
    ledger, before = EMPTY, {}
    rest = sources[6:]
    random.shuffle(rest)
    steps = [first, *(rest[start : start + 5] for start in range(0, len(rest), 5))]
    present: set[str] = set()
    for step in steps:
        present |= set(step)
        there = sorted(present)
        named = [(sources[a], sources[b]) for a, b in pairs if max(a, b) < len(sources)]
        label = components(there, [(there.index(a), there.index(b)) for a, b in named if {a, b} <= present])
        if len(set(label.values())) < 3:
            return
        split, ledger, drawn = draw(label, seed, *share, ledger)
        kept = {source: name for source, name in before.items() if name != "out"}
        assert {source: split[source] for source in kept} == kept
        assert apart(dict(zip(label, drawn.cluster.to_pylist(), strict=True)), split)
        again, unchanged, _ = draw(label, seed, *share, ledger)
        assert (again, unchanged.source_id) == (split, ledger.source_id), "a run killed after its ledger gives the same"
        before = before | split


@given(st.integers(0, 200))
@settings(max_examples=20)
def test_without_a_ledger_the_hash_alone_keeps_every_old_clip_of_a_set_large_enough(seed: int):
    old, new = draw(alone(200), seed)[0], draw(alone(400), seed)[0]
    assert {source: new[source] for source in old} == old


@pytest.mark.parametrize("seed", range(5))
def test_shares_are_within_binomial_bounds(seed: int):
    count = 20_000
    found = Counter(draw(alone(count), seed, 0.08, 0.2)[0].values())
    for name, share in (("val", 0.08), ("test", 0.2), ("train", 0.72)):
        assert abs(found[name] - count * share) < 4 * math.sqrt(count * share * (1 - share))


@given(st.integers(3, 30), st.integers(0, 50), shares)
def test_three_clusters_are_enough_for_three_splits(count: int, seed: int, share: tuple[float, float]):
    found = Counter(draw(alone(count), seed, *share)[0].values())
    assert min(found["train"], found["test"]) >= 1
    assert (found["val"] >= 1) or share[0] == 0


def test_an_empty_split_gets_the_smallest_hashes_first():
    members = alone(10)
    hashes = sorted(members, key=lambda source: unit(0, source))
    split = draw(members, 0, 1e-6, 1e-6)[0]
    assert [split[source] for source in hashes] == ["test", "val", *["train"] * 8]


def test_fewer_than_three_clusters_cannot_be_split():
    with pytest.raises(ValueError, match=r"2 clusters of sources, since .* train, val and test need at least 3"):
        draw({"a": "a", "b": "a", "c": "c"})


def test_a_split_that_lost_its_last_source_is_not_filled_with_what_was_trained_on():
    split, ledger, _ = draw(alone(30))
    trained = {source: source for source, name in split.items() if name == "train"}
    with pytest.raises(ValueError, match="test is empty and every source was drawn before; add sources, or delete"):
        draw(trained, ledger=ledger)
    with pytest.raises(ValueError, match="val is empty"):
        draw(trained | {"new": "new"}, ledger=ledger)
    grown = draw(trained | {"new": "new", "newer": "newer"}, ledger=ledger)[0]
    assert {grown["new"], grown["newer"]} == {"test", "val"}


def two_of(split: dict[str, str], left: str, right: str) -> tuple[str, str]:
    return next(s for s, name in split.items() if name == left), next(s for s, name in split.items() if name == right)


def test_a_new_source_goes_where_its_cluster_is_and_takes_its_name():
    split, ledger, _ = draw(alone(30))
    for old, name in split.items():
        joined = alone(30) | {old: " first", " first": " first"}  # the newcomer's id is smaller: the cluster is renamed
        after, later, drawn = draw(joined, ledger=ledger)
        assert after == split | {" first": name}
        assert drawn.cluster.to_pylist()[-1] == old
        assert draw(joined, ledger=later)[0] == after


def test_new_sources_that_bridge_two_splits_are_left_out_and_the_old_stay_apart():
    split, ledger, _ = draw(alone(30))
    left, right = two_of(split, "train", "test")
    bridged = alone(30) | dict.fromkeys((left, right, "bridge", "bridge 2"), min(left, right))
    after, later, drawn = draw(bridged, ledger=ledger)
    assert after == split | {"bridge": "out", "bridge 2": "out"}
    assert drawn.met[list(bridged).index("bridge")] == 0b101
    assert later.source_id == ledger.source_id
    assert apart(dict(zip(bridged, drawn.cluster.to_pylist(), strict=True)), after)


@pytest.mark.parametrize(("left", "right"), [("train", "val"), ("train", "test"), ("val", "test")])
def test_old_sources_found_alike_across_splits_give_way_to_the_split_that_counts_more(left: str, right: str):
    split, ledger, _ = draw(alone(60))
    low, high = two_of(split, left, right)
    after, later, _ = draw(alone(60) | {low: min(low, high), high: min(low, high)}, ledger=ledger)
    assert after == split | {low: "out"}
    assert draw(alone(60), ledger=later)[0] == split, "it comes back where it was when they are alike no more"


def test_a_ledger_comes_back_as_written_and_only_for_its_own_draw(tmp_path: Path):
    _, ledger, _ = draw(alone(30))
    path = tmp_path / "ledger.parquet"
    write_ledger(path, ledger, draw_name(0, 0.1, 0.2))
    read = read_ledger(path, draw_name(0, 0.1, 0.2))
    assert (read.source_id, read.cluster, list(read.split)) == (ledger.source_id, ledger.cluster, list(ledger.split))
    assert len(read_ledger(path, draw_name(1, 0.1, 0.2))) == 0
    assert len(read_ledger(tmp_path / "none.parquet", "")) == 0


def test_another_seed_is_another_draw():
    assert draw(alone(50), 0)[0] != draw(alone(50), 1)[0]
