from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from data.asking import Expectation, Outcome
from data.expectations import frame, suite
from data.records import Source
from data.limits import Limits
from tasks.judging import judge

Maker = Callable[..., Source]


@pytest.fixture(scope="module")
def good(make_source: Maker) -> list[Source]:
    return [make_source(f"{name}.mp4") for name in "abcdef"]


HDR_REFUSED = Limits(hdr="reject")


def failed(sources: list[Source]) -> dict[str, Outcome]:
    """Expectations of the suite that the sources fail, by name."""
    return {item.name: item for item in judge(frame(sources, HDR_REFUSED), suite(HDR_REFUSED, 3)) if not item.success}


def test_good_sources_meet_every_expectation_in_the_order_of_the_table(good: list[Source]):
    table = suite(Limits(), 3)
    outcomes = judge(frame(good), table)
    assert [item.name for item in outcomes] == [item.name for item in table]
    assert [item.name for item in outcomes if not item.success] == []


BAD: dict[str, list[dict[str, object]]] = {
    "content_hash": [{"sha256": "x" * 64}],
    "id_of_content": [{"source_id": "3f2a"}],
    "caption_known": [{"caption": None}],
    "long_enough": [{"video_duration_s": 0.1, "audio_duration_s": 0.1}],
    "not_fast": [{"frame_rate": "1000"}],
    "not_slow": [{"frame_rate": "1"}],
    "tall_enough": [{"height": 8}],
    "wide_enough": [{"width": 8}],
    "quarter_turns": [{"rotation_deg": 45}],
    "known_layouts": [{"num_channels": 16}],
    "full_scale": [{"peak": 32768.0}],
    "not_empty": [{"size_bytes": 0}],
    "moves": [{"num_frames": 1, "header_num_frames": 1}],
    "fits_memory": [{"width": 9000}],
    "hdr_is_settled": [{"color_transfer": "smpte2084"}],
    "rate_known": [{"sample_rate_hz": 12345}],
    "starts_together": [{"audio_start_s": 1.5}],
    "ends_together": [{"audio_duration_s": 0.5}, {"audio_duration_s": 0.9}],
    "caption_length": [{"caption": "x"}],
    "captions_describe": [{"caption": "I'm sorry, but as an AI I cannot see videos."}, {"caption": "IMG_0042.mp4"}],
}
"""Expectation → rows that break it and no other."""


def test_bad_rows_fail_their_expectation_and_no_other_and_are_named(good: list[Source], make_source: Maker):
    rows = {
        name: [make_source(f"{name}{number}", **fields) for number, fields in enumerate(bad)]
        for name, bad in BAD.items()
    }
    found = failed([*good, *(source for bad in rows.values() for source in bad)])
    expected = {name: tuple(sorted(f"{item.source_id} {item.path}" for item in bad)) for name, bad in rows.items()}
    assert {name: outcome.unexpected for name, outcome in found.items()} == expected
    assert {name: outcome.num_unexpected for name, outcome in found.items()} == {k: len(v) for k, v in BAD.items()}


def test_dataset_wide_faults_are_measured(good: list[Source]):
    silent = [item.model_copy(update={"audio_codec": None, "caption": "same"}) for item in good]
    found = failed([*silent, *silent])
    assert found["mostly_sound"].measured == "0"
    assert found["captions_differ"].measured == "0.0833333"
    assert found["one_row_a_content"].num_unexpected == found["one_row_a_file"].num_unexpected == 12


def test_an_empty_dataset_fails_instead_of_raising():
    assert failed([])["enough_sources"].measured == "0"


def test_an_expectation_that_cannot_be_computed_has_failed_and_says_why(good: list[Source]):
    unknown = Expectation(name="x", kind="ColumnValuesToBeUnique", options={"column": "nowhere"}, why="")
    (found,) = judge(frame(good), [unknown])
    assert not found.success
    assert "nowhere" in found.measured


def test_an_unknown_kind_is_a_fault_of_the_table(good: list[Source]):
    with pytest.raises(ValueError, match="expectation x: Great Expectations has no ExpectMiracles"):
        judge(frame(good), [Expectation(name="x", kind="Miracles", options={}, why="")])


def test_pages_are_written_and_logging_is_left_as_it_was(good: list[Source], tmp_path: Path):
    before = logging.root.manager.disable
    judge(frame(good), suite(Limits(), 3)[:2], tmp_path / "docs")
    assert "manifest" in (tmp_path / "docs/index.html").read_text()
    assert logging.root.manager.disable == before
