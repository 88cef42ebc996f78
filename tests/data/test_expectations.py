from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from data.asking import NAME, Outcome, Table, failures
from data.expectations import frame, suite
from data.limits import Limits
from data.records import Source

Maker = Callable[..., Source]


def test_every_expectation_has_a_name_of_its_own_and_a_reason():
    table = suite(Limits(), min_sources=3)
    assert len({item.name for item in table}) == len(table) >= 12
    assert all(item.why for item in table)
    assert {item.critical for item in table} == {True, False}


def test_every_column_that_is_expected_of_exists(make_source: Maker, tmp_path: Path):
    columns = set(frame([make_source("a.mp4")], tmp_path / "asked").columns)
    assert {item.options["column"] for item in suite(Limits(), 3) if "column" in item.options} <= columns


def test_limits_of_the_rules_are_the_limits_of_the_expectations():
    by_name = {item.name: item.options for item in suite(Limits(min_duration_s=2, max_frame_rate=60), min_sources=7)}
    assert by_name["enough_sources"]["min_value"] == 7
    assert by_name["long_enough"]["min_value"] == 2 - 1e-6
    assert by_name["not_fast"]["max_value"] == 60


def test_a_silent_source_has_no_offset_and_a_late_one_has_its_own(make_source: Maker, tmp_path: Path):
    late = make_source("a.mp4", video_start_s=1.0, audio_start_s=1.4, audio_duration_s=1.0)
    silent = make_source("b.mp4", audio_codec=None, num_channels=0)
    with frame([late, silent], tmp_path / "asked") as table:
        assert table.values("sound_offset_s") == [pytest.approx(0.4), None]
        assert table.values("sound_gap_s") == [pytest.approx(0.6), None]
        assert table.values("has_sound") == [1.0, 0.0]
    assert not (tmp_path / "asked").exists()


def test_a_full_disk_is_an_error_of_the_disk_that_names_the_file(tmp_path: Path):
    numbers = "WITH n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 5000) SELECT i FROM n"
    with Table(tmp_path / "asked", ["number"]) as table:
        table.ask("PRAGMA max_page_count = 3")
        with pytest.raises(OSError, match=r"disk is full.*asked") as caught:
            table.ask(f"INSERT INTO {NAME} {numbers}")
        assert caught.value.errno == errno.ENOSPC


def test_only_failed_critical_expectations_are_failures_and_they_name_their_rows():
    def outcome(*, critical: bool, success: bool) -> Outcome:
        rows = tuple(f"{number:016x} {number}.mp4" for number in range(12))
        return Outcome(
            name="full_scale", kind="ColumnValuesToBeBetween", column="peak", critical=critical, success=success,
            measured="12 of 40 rows", limit="max_value 2", num_unexpected=12, unexpected=rows, why="",
        )  # fmt: skip

    assert failures([outcome(critical=False, success=False), outcome(critical=True, success=True)]) == []
    (line,) = failures([outcome(critical=True, success=False)])
    assert line.startswith("full_scale (peak): 12 of 40 rows, expected max_value 2; 0000000000000000 0.mp4")
    assert line.endswith("9.mp4 and 2 more")
