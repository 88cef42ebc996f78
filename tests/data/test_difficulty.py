"""Ranks, difficulty, loss scores and correlations, against scipy and closed forms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from data.difficulty import (
    FEATURES,
    buckets_of,
    correlations,
    count_words,
    difficulty_of,
    feature_ranks,
    hardest,
    longest,
    measured,
    random_order,
    ranked,
    standardised,
)

NAN = float("nan")


@given(st.lists(st.tuples(st.integers(0, 2), st.one_of(st.integers(0, 5), st.none())), max_size=30))
def test_ranks_equal_scipys_average_ranks_inside_buckets(rows: list[tuple[int, int | None]]) -> None:
    buckets = np.array([bucket for bucket, _ in rows], np.int64)
    values = np.array([NAN if value is None else value for _, value in rows], np.float64)
    found = ranked(values, buckets)
    for bucket in range(3):
        own = (buckets == bucket) & ~np.isnan(values)
        count = np.count_nonzero(own)
        expected = (stats.rankdata(values[own]) - 1) / (count - 1) if count > 1 else np.full(count, 0.5)
        assert found[own] == pytest.approx(expected)
    assert np.isnan(found[np.isnan(values)]).all()


def test_one_entry_alone_is_ranked_as_many_equal_ones_are() -> None:
    assert ranked(np.array([7.0, 3.0, 3.0, 3.0]), np.array([0, 1, 1, 1])).tolist() == [0.5] * 4


def test_motion_is_the_rank_of_the_mean_rank_of_its_two_quantiles() -> None:
    columns = {"motion_p50": np.array([1.0, 2.0, 3.0, 4.0]), "motion_p90": np.array([9.0, 2.0, 3.0, 8.0])}
    ranks = feature_ranks(columns, np.zeros(4, np.int64))
    # Mean ranks: (0 + 1) / 2, (1/3 + 0) / 2, (2/3 + 1/3) / 2, (1 + 2/3) / 2; the first and third tie.
    assert ranks["motion"] == pytest.approx([0.5, 0.0, 0.5, 1.0])
    assert np.isnan(ranks["sync"]).all()


def test_directions_are_those_of_the_definitions() -> None:
    harder = {
        "speech_share": [0.1, 0.9], "dnsmos": [4.0, 2.0], "silent_share": [0.5, 0.0], "sharpness_p90": [900.0, 20.0],
        "freeze_share": [0.0, 0.3], "residual_cuts": [0, 1], "num_tokens": [10, 20], "num_words": [3, 9],
        "num_content_words": [2, 5], "motion_p50": [0.1, 0.2], "motion_p90": [0.1, 0.2], "loss": [-1, 1],
    }  # fmt: skip
    for name, values in harder.items():
        ranks = feature_ranks({name: np.array(values, np.float64)}, np.zeros(2, np.int64))
        known = {feature: rank.tolist() for feature, rank in ranks.items() if not np.isnan(rank).any()}
        assert list(known.values()) == [[0.0, 1.0]], name


def test_weights_of_missing_features_fall_to_the_others() -> None:
    buckets = np.zeros(3, np.int64)
    ranks = {"motion": np.array([0.0, 0.5, 1.0]), "sound": np.array([1.0, NAN, 0.2])}
    weights = {"motion": 0.5, "sound": 0.5}
    # Means: 0.5, 0.5 (motion alone: silence is not hard), 0.6.
    assert difficulty_of(ranks, weights, buckets).tolist() == [0.25, 0.25, 1.0]
    assert difficulty_of(ranks, {"motion": 1.0}, buckets).tolist() == [0.0, 0.5, 1.0]
    assert difficulty_of(ranks, {"sound": 1.0}, buckets).tolist() == [1.0, 0.5, 0.0]  # nothing known: in the middle


def test_equal_sums_tie_in_whatever_order_they_were_added() -> None:
    ranks = {name: np.array(pair) for name, pair in {"a": [0.1, 0.3], "b": [0.2, 0.2], "c": [0.3, 0.1]}.items()}
    assert difficulty_of(ranks, dict.fromkeys("abc", 0.1), np.zeros(2, np.int64)).tolist() == [0.5, 0.5]


def test_random_order_is_seeded_and_uniform_in_every_bucket() -> None:
    buckets = np.array([0] * 5 + [1] * 3)
    first, again, other = (random_order(buckets, seed) for seed in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist()
    assert sorted(first[:5]) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert sorted(first[5:]) == [0.0, 0.5, 1.0]


def test_losses_are_standardised_by_level_and_modality_inside_the_bucket() -> None:
    generator = np.random.default_rng(0)
    losses = generator.uniform(0, 9, (40, 2, 3)) * np.array([1.0, 50.0, 0.1])
    buckets = np.repeat([0, 1], [25, 15])
    losses[:10, 1] = NAN  # silent
    losses[39, 0, 0] = np.inf
    expected = np.full((40, 2, 3), NAN)
    for bucket in range(2):
        own = np.where(np.isfinite(losses[buckets == bucket]), losses[buckets == bucket], NAN)
        expected[buckets == bucket] = stats.zscore(own, nan_policy="omit")
    assert standardised(losses, buckets) == pytest.approx(np.nanmean(expected, (1, 2)), abs=1e-8)


def test_a_bucket_of_equal_losses_has_score_zero() -> None:
    losses = np.full((3, 2, 1), 2.0)
    losses[2] = NAN
    assert standardised(losses, np.array([0, 0, 1])) == pytest.approx([0.0, 0.0, NAN], nan_ok=True)


def test_the_hardest_are_a_share_rounded_up_and_above_the_mean() -> None:
    loss = np.array([0.1, 3.0, NAN, -1.0, 3.0, -2.0])
    assert np.flatnonzero(hardest(loss, 0.01)).tolist() == [1]
    assert np.flatnonzero(hardest(loss, 1.0)).tolist() == [0, 1, 4]
    assert not hardest(loss, 0.0).any()


@given(st.integers(0, 99))
def test_correlations_equal_scipys_where_there_is_one_bucket(seed: int) -> None:
    generator = np.random.default_rng(seed)
    values = {name: generator.integers(0, 6, 12).astype(np.float64) for name in "ab"}
    values["b"][generator.random(12) < 0.3] = NAN
    buckets = np.zeros(12, np.int64)
    found = correlations({name: ranked(column, buckets) for name, column in values.items()}, buckets)
    both = ~np.isnan(values["b"])
    expected = stats.spearmanr(values["a"][both], values["b"][both]).statistic if both.sum() > 2 else NAN
    assert found[0, 1] == pytest.approx(expected, nan_ok=True)
    assert found[1, 0] == pytest.approx(found[0, 1], nan_ok=True)


def test_differences_between_buckets_are_not_correlation() -> None:
    generator, buckets = np.random.default_rng(3), np.repeat([0, 1], 200)
    raw = {name: generator.normal(size=400) + 100 * buckets for name in "ab"}
    assert stats.spearmanr(raw["a"], raw["b"]).statistic > 0.7
    found = correlations({name: ranked(column, buckets) for name, column in raw.items()}, buckets)
    assert abs(found[0, 1]) < 0.15


@pytest.mark.parametrize(
    ("caption", "counts"),
    [
        ("A dog runs, and the dog barks.", (7, 3)),  # dog, runs, barks
        ("", (0, 0)),
        ("一只狗在跑", (5, 5)),
        ("狗狗 barks", (3, 2)),
        ("Die Katze schläft auf dem Sofa", (6, 3)),
    ],
)
def test_words_are_counted_in_any_script(caption: str, counts: tuple[int, int]) -> None:
    assert count_words(caption) == counts


def test_length_is_that_of_the_longest_variant() -> None:
    lists = pa.chunked_array([[[3, 9, 4], []], [[5]]], pa.list_(pa.int64()))
    assert longest(lists) == pytest.approx([9, NAN, 5], nan_ok=True)


def test_buckets_are_named_by_canvas_and_shape() -> None:
    sizes = {"canvas": ["b", "a", "b"], "num_frames": [22, 22, 39], "height": [32, 32, 64], "width": [64, 64, 64]}
    names, codes = buckets_of(pa.table(sizes))
    assert names == ["a 22f 64x32", "b 22f 64x32", "b 39f 64x64"]
    assert codes.tolist() == [1, 0, 2]


def test_a_table_of_clips_of_another_version_is_refused(tmp_path: Path) -> None:
    pa.parquet.write_table(pa.table({"clip_id": ["a"]}), tmp_path / "clips.parquet")
    with pytest.raises(ValueError, match="no column motion_p50"):
        measured(pa.table({"clip_id": ["a"]}), tmp_path / "clips.parquet")


def test_a_hundred_thousand_entries_are_ranked_and_correlated() -> None:
    generator, count = np.random.default_rng(0), 100_000
    parts = [part for feature in FEATURES.values() for part, _ in feature.parts]
    columns = {part: np.round(generator.random(count), 4) for part in parts}
    columns["dnsmos"][generator.random(count) < 0.5] = NAN
    buckets = generator.integers(0, 50, count)
    ranks = feature_ranks(columns, buckets)
    difficulty = difficulty_of(ranks, dict.fromkeys(FEATURES, 1.0), buckets)
    assert [difficulty[buckets == 7].min(), difficulty[buckets == 7].max()] == [0.0, 1.0]
    assert np.nanmax(np.abs(np.tril(correlations(ranks, buckets), -1))) < 0.02
