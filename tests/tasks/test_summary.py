"""What a run says at its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from data.files import write_records
from data.records import Check, Clip, Comparison, MetricValue, Reject, Report, Source, Verdict
from tasks.summary import Outcome, data_line, load_params, metrics_markdown, places, timing_table, verdict_line

PARAMS = {
    "evaluate": {"report": "store/report"},
    "generate": {"generations": "store/generations"},
    "register": {"registered": "store/registered.json"},
}


def test_timing_table_tells_skipped_and_failed_apart() -> None:
    outcomes = [
        Outcome(stage="cut", ran=True, seconds=12.34),
        Outcome(stage="train@easy", ran=False, seconds=0),
        Outcome(stage="gate", ran=True, seconds=1, status=4, error="too dark"),
    ]
    assert timing_table(outcomes).splitlines() == [
        "  cut            12.3 s",
        "  train@easy      0.0 s  unchanged",
        "  gate            1.0 s  failed: too dark",
    ]


def test_places_name_only_what_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    before = places(PARAMS, tmp_path)
    assert before.count("not made yet") == 3
    assert "not judged yet" in before
    assert "not registered yet" in before
    for name in ("report/report.html", "generations/a/b.mp4"):
        (tmp_path / "store" / name).parent.mkdir(parents=True)
        (tmp_path / "store" / name).touch()
    (tmp_path / "store/registered.json").write_text(json.dumps({"name": "soundstage-tiny-h3", "version": 2}))
    after = places(PARAMS, tmp_path)
    assert str(tmp_path / "store/report/report.html") in after
    assert "(1 mp4 files)" in after
    assert "soundstage-tiny-h3 version 2" in after
    assert "sqlite:///data/store/mlflow/mlflow.db" in after


def test_data_line_counts_what_came_in_and_what_was_left_out(
    tmp_path: Path, make_source: Callable[..., Source], make_clip: Callable[..., Clip]
) -> None:
    left = Reject(item="0", path="a", verb="cut", rule="cut.min_luma", measured="0", limit="0.02")
    write_records(tmp_path / "manifest", [make_source(name) for name in "abc"], Source)
    write_records(tmp_path / "accepted", [make_source(name) for name in "ab"], Source)
    write_records(tmp_path / "clips", [make_clip("a" * 16, number) for number in range(5)], Clip)
    write_records(tmp_path / "left", [left], Reject)
    outcomes = [{"name": f"e{number}", "measured": "1 of 3 rows", "success": number > 3} for number in range(6)]
    (tmp_path / "found.json").write_text(json.dumps({"outcomes": outcomes}))
    params = {
        "ingest": {"manifest": "manifest"},
        "validate": {"accepted": "accepted", "expectations": "found.json"},
        "cut": {"clips": "clips", "rejects": "left"},
    }
    assert data_line(params, tmp_path) == (
        "3 files, 2 accepted; 5 clips, 1 left out; "
        "4 of 6 expectations warn: e0 1 of 3 rows, e1 1 of 3 rows, e2 1 of 3 rows …"
    )
    assert data_line(params, tmp_path / "nowhere") == "0 files, 0 accepted; 0 clips, 0 left out"


def test_verdict_line_says_whether_and_by_how_much(tmp_path: Path, make_comparison: Callable[..., Comparison]) -> None:
    gain = make_comparison(
        name="psnr_db", left="tuned/fl2va", right="base/fl2va", group="new", difference=4.63, low=4.06, high=5.26
    )
    report = Report(
        model="m", checkpoint_sha256="a", base_sha256="b", seed=0, metrics=(), comparisons=(gain,), per_clip=()
    )
    (tmp_path / "store/report").mkdir(parents=True)
    (tmp_path / "store/report/report.json").write_text(report.model_dump_json())
    checks = (Check(name="forgetting", measured="2 dB", limit="1 dB", passed=False),)
    verdict = Verdict(report_sha256="a", checkpoint_sha256="b", passed=False, checks=checks, champion=None)
    (tmp_path / "store/verdict.json").write_text(verdict.model_dump_json())
    params = {**PARAMS, "gate": {"verdict": "store/verdict.json"}}
    params["evaluate"] = {**PARAMS["evaluate"], "learned_group": "new"}
    assert verdict_line(params, tmp_path).startswith(
        "failed: forgetting; tuned − base +4.63 [4.06, 5.26] dB PSNR on `new`"
    )


def test_tracking_server_of_the_environment_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert "http://tracking:5000" in places(PARAMS, tmp_path)


def test_markdown_shows_intervals_coverage_and_why_a_metric_is_missing(
    make_metric: Callable[..., MetricValue], make_comparison: Callable[..., Comparison]
) -> None:
    missing = make_metric(name="lse_d", value=None, reason="no face in any clip", num_items=0, num_attempted=8)
    report = Report(
        model="tiny-h3 + all",
        checkpoint_sha256="a",
        base_sha256="b",
        seed=0,
        metrics=(make_metric(), missing),
        comparisons=(make_comparison(),),
        per_clip=(),
    )
    lines = metrics_markdown(report, Path("/store/report.html")).splitlines()
    assert "[/store/report.html](file:///store/report.html)" in lines[2]
    rows = [line for line in lines if line.startswith(("| psnr_db", "| lse_d"))]
    assert rows == [
        "| psnr_db | new: tuned/fl2va − base/fl2va | +3 dB | 2 … 4 | 8 | better |",
        "| psnr_db | tuned/fl2va | new | 20 dB | 19 … 21 | 8 of 8 |",
        "| lse_d | tuned/fl2va | new | missing: no face in any clip |  | 0 of 8 |",
    ]


@pytest.fixture
def make_metric() -> Callable[..., MetricValue]:
    def make(**fields: object) -> MetricValue:
        ordinary = {
            "name": "psnr_db",
            "subset": "tuned/fl2va",
            "group": "new",
            "unit": "dB",
            "value": 20.0,
            "low": 19.0,
            "high": 21.0,
            "num_items": 8,
            "num_attempted": 8,
            "higher_is_better": True,
            "convention": "RGB",
        }
        return MetricValue.model_validate(
            ordinary | ({"low": None, "high": None} if "reason" in fields else {}) | fields
        )

    return make


@pytest.fixture
def make_comparison() -> Callable[..., Comparison]:
    def make(**fields: object) -> Comparison:
        ordinary = {
            "name": "psnr_db",
            "left": "tuned/fl2va",
            "right": "base/fl2va",
            "group": "new",
            "unit": "dB",
            "difference": 3.0,
            "low": 2.0,
            "high": 4.0,
            "num_items": 8,
            "num_sources": 8,
            "better": True,
        }
        return Comparison.model_validate(ordinary | fields)

    return make


def test_settings_are_asked_for_from_the_checkout(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run from the checkout"):
        load_params(tmp_path / "params.yaml")
