"""What a run of the pipeline left behind, as records, tables and sentences: for the terminal and for Prefect's pages."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from data.files import num_records
from data.records import Frozen, Report, Verdict

Params = dict[str, Any]
"""params.yaml as read: sections by verb."""


class Outcome(Frozen):
    """What became of one DVC stage."""

    stage: str
    """A verb, or `train@NAME` for a stage of the curriculum."""
    ran: bool
    """False where DVC found nothing changed, or took the result from its cache."""
    seconds: float
    outputs: dict[str, str] = {}
    """MD5 by output path, from dvc.lock: the lineage of whatever is made of them."""
    status: int = 0
    """Exit status of the verb; 0 is success, 4 a failed gate, 5 a refused dataset."""
    error: str = ""
    """The verb's own line where it failed."""


class Journal(Frozen):
    """The outcomes of one run, in order, kept beside the logs."""

    outcomes: tuple[Outcome, ...] = ()


LOGS = Path("data/store/logs")
JOURNAL = LOGS / "run.json"
MAX_NAMED = 3
"""Expectations named in the one line on the data."""


def load_params(path: Path = Path("params.yaml")) -> Params:
    """The settings of all verbs.

    Raises:
        ValueError: there is no such file.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist; run from the checkout")
    return cast(Params, yaml.safe_load(path.read_text(encoding="utf-8")))


def timing_table(outcomes: Sequence[Outcome]) -> str:
    """Seconds by verb, and which of them had nothing to do."""
    width = max((len(outcome.stage) for outcome in outcomes), default=4)
    lines: list[str] = []
    for outcome in outcomes:
        note = f"  failed: {outcome.error}" if outcome.status else "" if outcome.ran else "  unchanged"
        lines.append(f"  {outcome.stage:<{width}} {outcome.seconds:8.1f} s{note}")
    return "\n".join(lines)


def places(params: Params, root: Path = Path()) -> str:
    """Where report, videos, model and logs are, and the commands that open the two web pages."""
    report = root / str(params["evaluate"]["report"]) / "report.html"
    generations = root / str(params["generate"]["generations"])
    videos = sorted(generations.rglob("*.mp4"))
    page = root / str(params.get("browse", {}).get("pages", "data/store/data")) / "index.html"
    rows = [
        ("verdict", verdict_line(params, root)),
        ("data", f"{page}; {data_line(params, root)}" if page.is_file() else "not made yet"),
        ("report", str(report) if report.is_file() else "not made yet"),
        ("videos", f"{generations}/ ({len(videos)} mp4 files)" if videos else "not made yet"),
        ("model", registered_model(root / str(params["register"]["registered"]))),
        ("logs", f"{root / LOGS}/"),
        ("MLflow", f"{program('mlflow')} ui --backend-store-uri {tracking_uri(params)} --port 5001"),
        ("Prefect", f"PREFECT_HOME=$PWD/data/store/prefect {program('prefect')} server start"),
    ]
    return "\n".join(f"  {name:<8} {text}" for name, text in rows)


def verdict_line(params: Params, root: Path) -> str:
    """What the gate said, and by how much the picture of the learned group got better."""
    path = root / str(params.get("gate", {}).get("verdict", ""))
    report = root / str(params["evaluate"]["report"]) / "report.json"
    if not path.is_file() or not report.is_file():
        return "not judged yet"
    verdict = Verdict.model_validate_json(path.read_bytes())
    group = str(params["evaluate"].get("learned_group", "all"))
    failed = ", ".join(check.name for check in verdict.checks if not check.passed)
    said = "passed" if verdict.passed else f"failed: {failed}"
    for pair in Report.model_validate_json(report.read_bytes()).comparisons:
        if (pair.name, pair.group, pair.right) == ("psnr_db", group, "base/fl2va") and pair.left == "tuned/fl2va":
            gain = (
                f"{pair.difference:+.2f} [{pair.low:.2f}, {pair.high:.2f}] dB PSNR on `{group}`, {pair.num_items} clips"
            )
            return f"{said}; tuned − base {gain}"
    return said


def data_line(params: Params, root: Path) -> str:
    """How many files and clips there are, how many were left out, and which expectations warn."""

    def rows(verb: str, name: str) -> int:
        path = root / str(params.get(verb, {}).get(name, ""))
        return num_records(path) if path.is_file() else 0

    def outcomes(verb: str) -> list[dict[str, Any]]:
        path = root / str(params.get(verb, {}).get("expectations", ""))
        return cast(list[dict[str, Any]], json.loads(path.read_bytes())["outcomes"]) if path.is_file() else []

    given, accepted = rows("ingest", "manifest"), rows("validate", "accepted")
    left = rows("cut", "rejects") + rows("split", "rejects")
    said = f"{given} files, {accepted} accepted; {rows('cut', 'clips')} clips, {left} left out"
    asked = [item for verb in ("validate", "cut", "split", "encode") for item in outcomes(verb)]
    failed = [f"{item['name']} {item['measured']}" for item in asked if not item["success"]]
    names = ", ".join(failed[:MAX_NAMED]) + (" …" if len(failed) > MAX_NAMED else "")
    return f"{said}; {len(failed)} of {len(asked)} expectations warn: {names}" if failed else said


def tracking_uri(params: Params) -> str:
    """Where `gate` and `register` keep runs and models."""
    folder = params["register"].get("mlflow", "data/store/mlflow")
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder}/mlflow.db"


def registered_model(path: Path) -> str:
    """Name and version of the model that `register` made known."""
    if not path.is_file():
        return "not registered yet"
    registered = cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8")))
    return f"{registered.get('name', '?')} version {registered.get('version', '?')}"


def program(name: str) -> str:
    """How to type a command of this environment from the working directory."""
    path = Path(sys.executable).parent / name
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def metrics_markdown(report: Report, html: Path) -> str:
    """The report as a Markdown page: what improved, then every metric with interval and coverage."""
    lines = [f"# {report.model}", "", f"Whole report, with videos: [{html}]({html.absolute().as_uri()})", ""]
    lines += ["| what improved | where | difference | 95 % interval | clips | |", "|---|---|---|---|---|---|"]
    for row in report.comparisons:
        verdict = "better" if row.better else ""
        lines.append(
            f"| {row.name} | {row.group}: {row.left} − {row.right} | {row.difference:+.3g} {row.unit} "
            f"| {row.low:.3g} … {row.high:.3g} | {row.num_items} | {verdict} |"
        )
    lines += ["", "| metric | subset | group | value | 95 % interval | items |", "|---|---|---|---|---|---|"]
    for metric in report.metrics:
        value = f"missing: {metric.reason}" if metric.value is None else f"{metric.value:.4g} {metric.unit}"
        interval = "" if metric.low is None or metric.high is None else f"{metric.low:.4g} … {metric.high:.4g}"
        lines.append(
            f"| {metric.name} | {metric.subset} | {metric.group} | {value} | {interval} "
            f"| {metric.num_items} of {metric.num_attempted} |"
        )
    return "\n".join(lines) + "\n"
