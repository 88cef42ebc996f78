"""Judges a report: fixed limits, then the champion, with a stated rate of errors; a model that fails stops the line.

soundstage gate min_right_swapped_gap_db=6
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from data.files import sha256, write_text
from data.opinions import Opinions
from data.records import Check, GateFailed, Report, Verdict
from tasks import gating, tracking
from tasks.champion import Champion, find_opponent
from tasks.gating import TUNED, Limit, judge, paired


class Config(gating.Strictness):
    """Limits a model must keep."""

    report: Path
    """What `evaluate` found, JSON."""
    verdict: Path
    """Where the judgement goes, JSON; written before a failure is raised."""
    checkpoints: Path = Path("data/store/checkpoints")
    """Curriculum stages whose loss curves are shown beside the judgement."""
    splits: Path = Path("data/store/splits")
    """Splits shown beside the judgement."""
    params: Path = Path("params.yaml")
    """Settings shown beside the judgement."""
    lock: Path = Path("dvc.lock")
    """Where DVC wrote the hashes of its outputs, shown beside the judgement."""
    mlflow: Path = Path("data/store/mlflow")
    """Folder of the local tracking store and registry, used unless MLFLOW_TRACKING_URI names a server."""
    model_name: str = "soundstage-tiny-h3"
    """Registered model whose `champion` must not be lost against."""
    learned_group: str = "new"
    """Group of clips that fine-tuning was for; `all` is judged where the report has no such group."""
    kept_group: str = "base"
    """Group the base model knew already, on which forgetting is judged; no check where the report lacks it."""
    require_better: tuple[str, ...] = ("psnr_db", "ssim", "lsd_db")
    """Metrics in which the tuned model must surely beat the base on `learned_group`: a lower training loss is no proof,
    since a model with a flipped velocity sign trains to the same loss."""
    min_right_swapped_gap_db: float | None = 4.0
    """How many dB of PSNR a clip's own keyframes must be worth over another clip's. A model that ignores its
    conditions shows 0; 4 dB is what the project asks of a model that has learned to follow them. The gap must surely be
    above 0 too. None lets any model pass."""
    require_beats_crossfade: bool = True
    """Whether PSNR of the middle half must surely beat a cross-fade of the two keyframes: one that does not has learned
    no motion. Beside its keyframes a cross-fade is nearly right by construction; in between motion shows."""
    max_forgetting_db: float = 1.5
    """PSNR that may be lost on `kept_group`, dB, as a mean. Without replay a trial of ours lost 8 to 9 dB on old clips;
    the limit is a choice: far below that, and within what few test clips can tell from nothing."""
    limits: tuple[Limit, ...] = ()
    """Absolute limits on any metric of the report: `{metric: ssim, subset: tuned/fl2va, group: all, minimum: 0.4}`."""
    min_coverage: dict[str, float] = {"psnr_db": 1.0}
    """Share of the attempted clips that must have a value, a metric: a clip that cannot be generated is a fault."""
    champion_report: Path | None = None
    """Report of the champion measured anew, JSON, where the one it was registered with is on other clips."""
    max_loss_vs_champion: dict[str, float] = {"psnr_db": 0.5, "ssim": 0.01, "lsd_db": 0.5}
    """How much worse than the champion each metric may be, in its unit: the loss must surely be smaller. The margins
    are choices: losses that small are hard to see or hear, and a worse model still cannot creep in by luck."""
    superior_in_one_of: tuple[str, ...] = ()
    """Metrics of which at least one must surely be better than the champion's; none asks for no gain."""
    min_coverage_vs_champion: float = Field(default=1.0, ge=0, le=1)
    """Share of the clips with a champion's value that must have one of the model: to fail is not to be better."""
    mos: Path | None = None
    """Opinions of a panel, `mos.json`, where `min_mos` asks for them. DVC does not watch it: judge again by hand."""
    mos_system: str = "candidate"
    """What the model is called there."""
    min_mos: dict[str, float] = {}
    """Least mean opinion a scale (`picture`, `sound`, `sync`, `overall`), 1 to 5, which the whole 95 % interval must
    reach; with under 5 raters it is not decided."""


def run(config: Config) -> Verdict:
    """Write the verdict, show it in the tracking store, and stop the line where the model failed.

    Raises:
        GateFailed: names every limit that was not kept.
    """
    report = Report.model_validate_json(config.report.read_text(encoding="utf-8"))
    opponent = find_opponent(config.mlflow, config.model_name, report.checkpoint_sha256)
    if config.champion_report is not None:
        opponent = measured_anew(config.champion_report, opponent)
    checks = (
        *limit_checks(config, report), *champion_checks(config, report, opponent), *opinion_checks(config)
    )  # fmt: skip
    verdict = Verdict(
        report_sha256=sha256(config.report),
        checkpoint_sha256=report.checkpoint_sha256,
        passed=all(check.passed for check in checks),
        checks=checks,
        statement=gating.statement(checks, config.family_level),
        champion=opponent.label if opponent else None,
    )
    write_text(config.verdict, verdict.model_dump_json(indent=1) + "\n")
    if tracking.available():
        evidence = tracking.Evidence(
            report=config.report,
            checkpoints=config.checkpoints,
            splits=config.splits,
            params=config.params,
            lock=config.lock,
        )
        run_id = tracking.ensure_run(config.mlflow, evidence)
        tracking.note_verdict(config.mlflow, run_id, verdict, config.verdict)
    if not verdict.passed:
        failed = [f"{check.name}: {check.measured}; limit {check.limit}" for check in checks if not check.passed]
        raise GateFailed(f"{report.model} fails {len(failed)} of {len(checks)} checks: " + "; ".join(failed))
    return verdict


def limit_checks(config: Config, report: Report) -> Iterator[Check]:
    """The rules that need no champion."""
    groups = {str(row["group"]) for row in report.per_clip}
    learned = config.learned_group if config.learned_group in groups else "all"
    wanted = [(name, "base/fl2va", "require_better") for name in config.require_better]
    if config.require_beats_crossfade:
        wanted.append(("psnr_middle_db", "crossfade", "require_beats_crossfade"))
    for name, right, option in wanted:
        title, limit = f"{name} of {TUNED} against {right} on {learned}", f"gate.{option}: surely on the good side of 0"
        yield judge(title, limit, paired(report, name, right, learned), config, above=0.0)
    if (gap_db := config.min_right_swapped_gap_db) is not None:
        title = "psnr_db of right against swapped keyframes on all"
        limit = f"gate.min_right_swapped_gap_db = {gap_db:g} dB, and surely above 0"
        yield judge(title, limit, paired(report, "psnr_db", "tuned/fl2va_swapped"), config, above=0.0, least=gap_db)
    if config.kept_group in groups:
        title = f"psnr_db of {TUNED} against base/fl2va on {config.kept_group} (forgetting)"
        limit = f"gate.max_forgetting_db = {config.max_forgetting_db:g} dB"
        found = paired(report, "psnr_db", "base/fl2va", config.kept_group)
        yield judge(title, limit, found, config, above=None, least=-config.max_forgetting_db)
    yield from (gating.judge_limit(limit, report, config) for limit in config.limits)
    yield from (gating.judge_coverage(report, name, least) for name, least in config.min_coverage.items())


def champion_checks(config: Config, report: Report, opponent: Champion | None) -> Iterator[Check]:
    """Surely no great loss, and where asked surely a gain, clip by clip; none without a champion."""
    if opponent is None:
        return
    names = dict.fromkeys((*config.max_loss_vs_champion, *config.superior_in_one_of))
    found = {name: paired(report, name, TUNED, other=opponent.report) for name in names}
    for name, margin in config.max_loss_vs_champion.items():
        yield judge(
            f"{name} against {opponent.label}", f"gate.max_loss_vs_champion.{name} = {margin:g}", found[name], config,
            above=-margin, min_coverage=config.min_coverage_vs_champion,
        )  # fmt: skip
    if config.superior_in_one_of:
        chosen = {name: found[name] for name in config.superior_in_one_of}
        limit = "gate.superior_in_one_of: surely on the good side of 0"
        yield gating.judge_superior(limit, opponent.label, chosen, config, config.min_coverage_vs_champion)


def opinion_checks(config: Config) -> Iterator[Check]:
    """What people think of the model, where that is asked for.

    Raises:
        RuntimeError: there is no panel's file.
    """
    if not config.min_mos:
        return
    if config.mos is None or not config.mos.is_file():
        raise RuntimeError(f"gate.min_mos needs the panel's answer, but gate.mos = {config.mos} is no file")
    opinions = Opinions.model_validate_json(config.mos.read_text(encoding="utf-8")).systems.get(config.mos_system, {})
    yield from (gating.judge_opinion(scale, opinions.get(scale), least) for scale, least in config.min_mos.items())


def measured_anew(path: Path, champion: Champion | None) -> Champion:
    """The champion with another report of the same weights.

    Raises:
        RuntimeError: the report is of other weights than the champion's.
    """
    report = Report.model_validate_json(path.read_text(encoding="utf-8"))
    if champion is not None and champion.report.checkpoint_sha256 != report.checkpoint_sha256:
        raise RuntimeError(
            f"{path} is of weights {report.checkpoint_sha256[:12]}, but {champion.label} has"
            f" {champion.report.checkpoint_sha256[:12]}; give gate.champion_report a report of these"
        )
    return Champion(champion.label if champion else report.model, report)
