from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import files
from data.cards import EDGES, bins, cell, describe, histogram, markdown
from data.records import Clip, Source, Treatment


@given(st.lists(st.floats(-100, 5000) | st.just(math.nan), max_size=60), st.sampled_from(sorted(EDGES)))
def test_a_histogram_counts_every_value_once_and_where_it_belongs(values: list[float], name: str):
    found = histogram(name, np.array(values, np.float64))
    borders = (-math.inf, *found.edges, math.inf)
    expected = [sum(low <= value < high for value in values) for low, high in pairwise(borders)]
    assert list(found.counts) == expected
    assert sum(found.counts) + found.num_missing == len(values)


def test_bins_go_from_the_first_to_the_last_that_holds_something():
    found = histogram("duration", np.array([2.5, 7.0, 100.0, math.nan]))
    assert bins(found)[:2] == [("2 – 3", 1), ("3 – 5", 0)]
    assert bins(found)[-2:] == [("≥ 34", 1), ("none", 1)]
    assert bins(histogram("duration", np.array([]))) == []


@given(st.text())
def test_no_text_leaves_its_cell(text: str):
    shown = cell(text)
    assert "\n" not in shown
    assert all(shown[place - 1] == "\\" for place, char in enumerate(shown) if char in "|<>*`" and place)
    assert shown[0] not in "|<>*`"


@pytest.fixture
def place(tmp_path: Path, make_clip: Callable[..., Clip], make_source: Callable[..., Source]) -> Path:
    """A split of three clips of two sources, a third source that is not in it."""
    sources = [make_source(f"{name}.mp4", source_id=name * 16, width=640, height=48 + ord(name)) for name in "abc"]
    clips = [make_clip("a" * 16), make_clip("a" * 16, 1, loudness_lufs=None, has_audio=False), make_clip("b" * 16)]
    files.write_records(tmp_path / "test.parquet", clips, Clip)
    files.write_records(tmp_path / "accepted.parquet", sources, Source)
    rows = [Treatment(item=name * 16, path="", treatment="retime", detail="") for name in "ac"]
    files.write_records(tmp_path / "treatments.parquet", rows, Treatment)
    return tmp_path


def test_a_card_is_of_its_own_clips_and_sources_alone(place: Path):
    card = describe("test", place / "test.parquet", place / "accepted.parquet", place / "treatments.parquet")
    assert (card.num_clips, card.num_sources, card.num_clusters, card.num_with_sound) == (3, 2, 2, 2)
    assert card.counts["treatment"] == {"retime": 1}
    assert card.counts["licence"] == {"not stated": 3}
    sides = next(item for item in card.histograms if item.name == "short side")
    assert dict(bins(sides)) == {"128 – 256": 3}
    assert next(item for item in card.histograms if item.name == "loudness").num_missing == 1
    text = markdown(card, {"group “x”": "as expected"})
    assert "3 clips of 2 sources" in text
    assert "- group “x”: as expected" in text


def test_a_clip_of_an_unknown_source_is_named(place: Path, make_source: Callable[..., Source]):
    files.write_records(place / "accepted.parquet", [make_source("a.mp4", source_id="a" * 16)], Source)
    with pytest.raises(ValueError, match=f"source {'b' * 16} has clips but is not among the accepted"):
        describe("test", place / "test.parquet", place / "accepted.parquet", place / "treatments.parquet")
