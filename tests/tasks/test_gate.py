from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from data.files import sha256
from data.records import Check, GateFailed, Report, Verdict
from tasks import tracking
from tasks.champion import Champion, find_opponent
from tasks.gate import Config, champion_checks, limit_checks, run

Maker = Callable[..., Report]
Writer = Callable[[Report], Path]


def config_of(tmp_path: Path, **limits: object) -> Config:
    """A gate whose files all lie in the test's folder."""
    places = {name: tmp_path / name for name in ("checkpoints", "splits", "mlflow")}
    paths = {
        "report": tmp_path / "report/report.json",
        "verdict": tmp_path / "verdict.json",
        "params": tmp_path / "p.yaml",
    }
    return Config.model_validate(places | paths | limits)


def failed(checks: Iterable[Check]) -> list[str]:
    """Names of the checks that were not passed."""
    return [check.name for check in checks if not check.passed]


@pytest.fixture
def without_tracking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "available", lambda: False)


@pytest.mark.usefixtures("without_tracking")
def test_a_model_that_learned_passes_and_the_verdict_names_what_it_judged(
    tmp_path: Path, make_report: Maker, write_report: Writer
) -> None:
    path = write_report(make_report())
    verdict = run(config_of(tmp_path))
    assert verdict.passed
    assert verdict.champion is None
    assert verdict == Verdict.model_validate_json((tmp_path / "verdict.json").read_text())
    assert (verdict.report_sha256, verdict.checkpoint_sha256) == (sha256(path), "a" * 64)
    first = (tmp_path / "verdict.json").read_bytes()
    run(config_of(tmp_path))
    assert (tmp_path / "verdict.json").read_bytes() == first


@pytest.mark.usefixtures("without_tracking")
def test_a_failing_model_leaves_a_verdict_and_the_error_names_measure_limit_and_option(
    tmp_path: Path, make_report: Maker, write_report: Writer
) -> None:
    write_report(make_report())
    with pytest.raises(GateFailed, match=r"swapped keyframes.*dB.*limit gate\.min_right_swapped_gap_db = 20 dB"):
        run(config_of(tmp_path, min_right_swapped_gap_db=20))
    assert json.loads((tmp_path / "verdict.json").read_text())["passed"] is False


def test_a_model_no_better_than_the_base_fails_each_limit_of_learning(tmp_path: Path, make_report: Maker) -> None:
    names = failed(limit_checks(config_of(tmp_path), make_report(gain_db=-7.0)))
    assert "psnr_db of tuned/fl2va against base/fl2va on new" in names
    assert "ssim of tuned/fl2va against base/fl2va on new" in names
    assert "psnr_middle_db of tuned/fl2va against crossfade on new" in names
    assert "lsd_db of tuned/fl2va against base/fl2va on new" not in names


def test_forgetting_more_than_allowed_fails_and_less_passes(tmp_path: Path, make_report: Maker) -> None:
    report = make_report(gain_db=-8.0)  # a dB below the base model everywhere
    assert not [name for name in failed(limit_checks(config_of(tmp_path), report)) if "forgetting" in name]
    strict = failed(limit_checks(config_of(tmp_path, max_forgetting_db=0.5), report))
    assert [name for name in strict if "forgetting" in name]


def test_a_missing_comparison_or_an_incomplete_coverage_is_not_a_pass(tmp_path: Path, make_report: Maker) -> None:
    report = make_report()
    assert "psnr_db of right against swapped keyframes on all" in failed(
        limit_checks(config_of(tmp_path), report.model_copy(update={"comparisons": ()}))
    )
    fewer = tuple(metric.model_copy(update={"num_items": metric.num_items - 1}) for metric in report.metrics)
    assert failed(limit_checks(config_of(tmp_path), report.model_copy(update={"metrics": fewer}))) == [
        "coverage of tuned/fl2va"
    ]


def test_a_corpus_without_our_groups_is_judged_as_a_whole(tmp_path: Path, make_report: Maker) -> None:
    report = make_report()
    pairs = tuple(pair for pair in report.comparisons if pair.group == "all")
    checks = list(limit_checks(config_of(tmp_path), report.model_copy(update={"comparisons": pairs})))
    assert not failed(checks)
    assert any(check.name.endswith("on all") for check in checks)
    assert not any("forgetting" in check.name for check in checks)


@pytest.mark.parametrize(("gain_db", "passes"), [(1.0, True), (-0.1, True), (-0.45, False), (-2.0, False)])
def test_a_candidate_may_be_a_little_worse_than_the_champion_but_not_more(
    tmp_path: Path, make_report: Maker, gain_db: float, passes: bool
) -> None:
    """At -0.45 dB the mean is within 0.5 dB and the end of the interval is not."""
    champion = Champion("m version 1", make_report(seed=0))
    candidate = make_report(gain_db=gain_db, seed=0)
    noisy = tuple(
        row | {"psnr_db": row["psnr_db"] + 0.2 * (-1) ** number} if row["subset"] == "tuned/fl2va" else row
        for number, row in enumerate(candidate.per_clip)
    )
    checks = list(champion_checks(config_of(tmp_path), candidate.model_copy(update={"per_clip": noisy}), champion))
    psnr = next(check for check in checks if check.name.startswith("psnr_db"))
    assert psnr.passed is passes
    assert "paired on 16 clips" in psnr.measured


def test_other_test_clips_are_compared_by_their_means_with_a_note(tmp_path: Path, make_report: Maker) -> None:
    champion = Champion("m version 1", make_report(clip_prefix="old-"))
    checks = list(champion_checks(config_of(tmp_path), make_report(gain_db=1.0), champion))
    assert all(check.passed and "0 in common" in check.measured for check in checks)
    worse = list(champion_checks(config_of(tmp_path), make_report(gain_db=-3.0), champion))
    assert failed(worse) == ["psnr_db against m version 1", "ssim against m version 1"]


def test_without_a_store_there_is_no_champion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert find_opponent(tmp_path / "mlflow", "m", "a" * 64) is None
    assert not (tmp_path / "mlflow").exists()


def test_a_negative_gap_asks_for_no_more_than_it_says(make_report: Maker) -> None:
    report = make_report()
    ignoring = [
        pair.model_copy(update={"difference": -0.2, "low": -0.7, "high": 0.3})
        if pair.right == "tuned/fl2va_swapped"
        else pair
        for pair in report.comparisons
    ]
    report = report.model_copy(update={"comparisons": tuple(ignoring)})
    title = "psnr_db of right against swapped keyframes on all"
    assert [
        title in failed(limit_checks(Config(report=Path(), verdict=Path(), min_right_swapped_gap_db=gap_db), report))
        for gap_db in (0.0, -0.5, -1.0)
    ] == [True, True, False]
