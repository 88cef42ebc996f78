from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from data.files import sha256
from data.records import Check, GateFailed, Report, Verdict
from tasks import tracking
from tasks.champion import Champion, find_opponent
from tasks.gate import Config, champion_checks, limit_checks, measured_anew, opinion_checks, run

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
    without = tuple(row for row in report.per_clip if row["subset"] != "tuned/fl2va_swapped")
    checks = list(limit_checks(config_of(tmp_path), report.model_copy(update={"per_clip": without})))
    assert failed(checks) == ["psnr_db of right against swapped keyframes on all"]
    assert [check.decided for check in checks if not check.passed] == [False]
    fewer = tuple(metric.model_copy(update={"num_items": metric.num_items - 1}) for metric in report.metrics)
    assert failed(limit_checks(config_of(tmp_path), report.model_copy(update={"metrics": fewer}))) == [
        "coverage of psnr_db of tuned/fl2va"
    ]


def test_a_corpus_without_our_groups_is_judged_as_a_whole(tmp_path: Path, make_report: Maker) -> None:
    report = make_report()
    rows = tuple(row | {"group": ""} for row in report.per_clip)
    checks = list(limit_checks(config_of(tmp_path), report.model_copy(update={"per_clip": rows})))
    assert not failed(checks)
    assert any(check.name.endswith("on all") for check in checks)
    assert not any("forgetting" in check.name for check in checks)


@pytest.mark.parametrize(("gain_db", "passes"), [(1.0, True), (-0.1, True), (-0.45, False), (-2.0, False)])
def test_a_candidate_may_be_a_little_worse_than_the_champion_but_not_more(
    tmp_path: Path, make_report: Maker, gain_db: float, passes: bool
) -> None:
    """At -0.45 dB the mean is within 0.5 dB, and not surely so."""
    champion = Champion("m version 1", make_report(seed=0))
    candidate = make_report(gain_db=gain_db, seed=0)
    noisy = tuple(
        row | {"psnr_db": row["psnr_db"] + 0.2 * (-1) ** number} if row["subset"] == "tuned/fl2va" else row
        for number, row in enumerate(candidate.per_clip)
    )
    checks = list(champion_checks(config_of(tmp_path), candidate.model_copy(update={"per_clip": noisy}), champion))
    psnr = next(check for check in checks if check.name.startswith("psnr_db"))
    assert psnr.passed is passes
    assert (psnr.num_items, psnr.num_sources, psnr.num_attempted) == (19, 19, 19)
    assert psnr.value == pytest.approx(gain_db, abs=0.02)
    assert psnr.p_value is not None
    assert (psnr.p_value <= 0.025) is passes
    assert "intersection-union" in psnr.correction


def test_a_champion_of_other_test_clips_decides_nothing_until_it_is_measured_anew(
    tmp_path: Path, make_report: Maker, write_report: Writer
) -> None:
    champion = Champion("m version 1", make_report(clip_prefix="old-", weights="c" * 64))
    checks = list(champion_checks(config_of(tmp_path), make_report(gain_db=1.0), champion))
    assert len(checks) == 3
    assert not any(check.passed or check.decided for check in checks)
    anew = measured_anew(write_report(make_report(weights="c" * 64)), champion)
    assert anew.label == "m version 1"
    assert not failed(champion_checks(config_of(tmp_path), make_report(gain_db=1.0), anew))
    with pytest.raises(RuntimeError, match=r"weights dddddddddddd, but m version 1 has cccccccccccc"):
        measured_anew(write_report(make_report(weights="d" * 64)), champion)


@pytest.mark.usefixtures("without_tracking")
def test_the_verdict_says_how_often_it_errs_and_names_what_it_does_not_test(
    tmp_path: Path, make_report: Maker, write_report: Writer
) -> None:
    path = write_report(make_report(weights="c" * 64))
    champion = path.rename(tmp_path / "champion.json")
    write_report(make_report(gain_db=1.0))
    verdict = run(config_of(tmp_path, champion_report=champion, superior_in_one_of=["ssim", "psnr_db"]))
    assert "probability 0.025 at most" in verdict.statement
    assert "Holm" in verdict.statement
    assert "(forgetting); coverage of psnr_db" in verdict.statement
    superior = verdict.checks[-1]
    assert (superior.correction, superior.passed) == ("Holm over 2 metrics", True)
    assert "psnr_db +1.000 dB on 19 clips of 19 sources" in superior.measured


def test_without_a_store_there_is_no_champion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert find_opponent(tmp_path / "mlflow", "m", "a" * 64) is None
    assert not (tmp_path / "mlflow").exists()


def test_no_gap_asked_for_is_no_rule(tmp_path: Path, make_report: Maker) -> None:
    names = [check.name for check in limit_checks(config_of(tmp_path, min_right_swapped_gap_db=None), make_report())]
    assert names
    assert not any("swapped" in name for name in names)


@pytest.mark.parametrize(
    ("limit", "passes"),
    [
        ({"metric": "psnr_db", "minimum": 24}, True),
        ({"metric": "psnr_db", "minimum": 26.9}, False),
        ({"metric": "psnr_db", "minimum": 26.9, "sure": False}, True),
        ({"metric": "psnr_db", "minimum": 30, "sure": False}, False),
        ({"metric": "lsd_db", "maximum": 10, "group": "new"}, True),
        ({"metric": "lsd_db", "maximum": 7, "group": "new"}, False),
        ({"metric": "psnr_db", "subset": "crossfade", "maximum": 30}, True),
    ],
)
def test_an_absolute_limit_is_kept_for_sure_or_as_a_mean(
    tmp_path: Path, make_report: Maker, limit: dict[str, object], passes: bool
) -> None:
    config = config_of(tmp_path, limits=[limit])
    (check,) = (each for each in limit_checks(config, make_report()) if each.limit.startswith("gate.limits"))
    assert check.passed is passes
    assert check.decided
    assert (check.p_value is None) is (limit.get("sure") is False)


def test_a_limit_on_what_could_not_be_measured_is_not_decided_and_says_why(tmp_path: Path, make_report: Maker) -> None:
    config = config_of(
        tmp_path, limits=[{"metric": "lse_d", "maximum": 8, "sure": False}, {"metric": "x", "minimum": 1}]
    )
    lip, unknown = (each for each in limit_checks(config, make_report()) if each.limit.startswith("gate.limits"))
    assert "SyncNet weights are not installed" in lip.measured
    assert "no x of a clip" in unknown.measured
    assert not any(each.passed or each.decided for each in (lip, unknown))
    with pytest.raises(ValueError, match="needs either minimum or maximum"):
        config_of(tmp_path, limits=[{"metric": "ssim"}])


def test_with_too_few_clips_or_sources_nothing_is_decided(tmp_path: Path, make_report: Maker) -> None:
    report = make_report(gain_db=1.0)
    clips = limit_checks(config_of(tmp_path, min_clips=10), report)
    assert "ssim of tuned/fl2va against base/fl2va on new" in failed(clips)  # 9 clips
    one = report.model_copy(update={"per_clip": tuple(row | {"source_id": "same"} for row in report.per_clip)})
    checks = [check for check in limit_checks(config_of(tmp_path), one) if "coverage" not in check.name]
    assert not any(check.passed or check.decided for check in checks)
    assert "of 1 sources" in checks[0].measured
    assert "gate.min_sources = 6" in checks[0].measured


def test_what_failed_where_the_champion_did_not_fails_the_gate(tmp_path: Path, make_report: Maker) -> None:
    champion = Champion("m version 1", make_report())
    report = make_report(gain_db=3.0)
    gone = next(place for place, row in enumerate(report.per_clip) if row["subset"] == "tuned/fl2va")
    rows = tuple(row | {"psnr_db": None} if place == gone else row for place, row in enumerate(report.per_clip))
    worse = report.model_copy(update={"per_clip": rows})
    checks = list(champion_checks(config_of(tmp_path), worse, champion))
    assert failed(checks) == ["psnr_db against m version 1"]
    assert (checks[0].num_items, checks[0].num_attempted) == (18, 19)
    assert "coverage below 1" in checks[0].measured
    assert not failed(champion_checks(config_of(tmp_path, min_coverage_vs_champion=0.9), worse, champion))


@pytest.mark.parametrize(
    ("low", "num_raters", "passes", "decided"), [(3.6, 5, True, True), (3.4, 5, False, True), (4.9, 4, False, False)]
)
def test_peoples_opinion_counts_from_five_raters(
    tmp_path: Path, low: float, num_raters: int, passes: bool, decided: bool
) -> None:
    opinion = {"mean": 4.95, "low": low, "high": 5.0, "num_raters": num_raters, "num_clips": 9, "num_votes": 45}
    (tmp_path / "mos.json").write_text(json.dumps({"seed": 0, "systems": {"candidate": {"overall": opinion}}}))
    config = config_of(tmp_path, mos=tmp_path / "mos.json", min_mos={"overall": 3.5, "smell": 1})
    overall, unknown = opinion_checks(config)
    assert (overall.passed, overall.decided) == (passes, decided)
    assert f"by {num_raters} raters on 9 clips" in overall.measured
    assert (unknown.passed, unknown.decided) == (False, False)
    with pytest.raises(RuntimeError, match=r"gate\.min_mos needs the panel's answer, but gate\.mos = .*gone\.json"):
        list(opinion_checks(config_of(tmp_path, mos=tmp_path / "gone.json", min_mos={"overall": 3.5})))
    assert not list(opinion_checks(config_of(tmp_path)))
