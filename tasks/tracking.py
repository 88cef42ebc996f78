"""The tracking store: one MLflow run for every judged model, made once however often it is asked for."""

from __future__ import annotations

import getpass
import json
import logging
import os
import sqlite3
import subprocess
import tempfile
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

from data.files import sha256, whole
from data.records import Frozen, Report, Verdict

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "soundstage"
SERVER = "MLFLOW_TRACKING_URI"
"""Environment variable that names a server; without it the store is a local folder."""
DATABASE = "mlflow.db"
LOSSES = ("loss_video", "loss_audio", "learning_rate")
PARAMS_A_CALL, METRICS_A_CALL = 100, 1000
"""MLflow's limits for one batched call."""
MAX_PARAM_CHARACTERS, MAX_DIGEST_CHARACTERS = 6000, 36


class Evidence(Frozen):
    """The files that one run is made of."""

    report: Path
    """`report.json`; the page and the media lie beside it."""
    checkpoints: Path
    """One folder a curriculum stage, each with its `log.jsonl`."""
    splits: Path
    """Folder of the splits, each logged as a data set."""
    params: Path
    """The settings, logged flat."""
    lock: Path = Path("dvc.lock")
    """Where DVC wrote the hashes of all outputs; absent where DVC does not run."""


def available() -> bool:
    """Whether the MLflow library is installed; our folder `mlflow/` is no package and does not count."""
    spec = find_spec("mlflow")
    return spec is not None and spec.origin is not None


def has_store(folder: Path) -> bool:
    """Whether there is a store to ask: a server is named, or the local one has been made."""
    return available() and (SERVER in os.environ or (folder / DATABASE).is_file())


def connect(folder: Path) -> MlflowClient:
    """A client of the server in MLFLOW_TRACKING_URI, else of SQLite and files below `folder`."""
    for name in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        os.environ.setdefault(name, "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    import mlflow

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    server = os.environ.get(SERVER)
    database = folder / DATABASE
    if not server and not database.is_file():
        make_store(database)
    uri = server or sqlite_uri(database)
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    if not server:
        os.environ.pop(SERVER, None)  # the library sets it, and our own store would pass for a server from then on
    return mlflow.MlflowClient(uri, uri)


def sqlite_uri(database: Path) -> str:
    """MLflow's address of a local store."""
    return f"sqlite:///{database.resolve().as_posix()}"


def make_store(database: Path) -> None:
    """An empty local store, whole or absent: MLflow's own set-up takes seconds, and one cut short never opens again."""
    import mlflow

    with tempfile.TemporaryDirectory(prefix="soundstage-store-") as folder:
        draft = Path(folder) / DATABASE
        mlflow.MlflowClient(sqlite_uri(draft), sqlite_uri(draft)).search_experiments(max_results=1)
        with whole(database) as new, closing(sqlite3.connect(draft)) as source, closing(sqlite3.connect(new)) as target:
            source.backup(target)


def ensure_experiment(client: MlflowClient, folder: Path) -> str:
    """Id of our experiment, made and tagged where it is missing; its files go below `folder` unless a server rules."""
    found = client.get_experiment_by_name(EXPERIMENT)
    if found is not None:
        return found.experiment_id
    location = None if SERVER in os.environ else (folder / "artifacts").resolve().as_uri()
    # the kind makes the web page open on training runs instead of its prompt tools
    return client.create_experiment(EXPERIMENT, location, {"mlflow.experimentKind": "custom_model_development"})


def ensure_run(folder: Path, evidence: Evidence) -> str:
    """Id of the run that shows this report; a half-made one, left by a kill, is replaced."""
    client = connect(folder)
    experiment = ensure_experiment(client, folder)
    key = sha256(evidence.report)
    for run in client.search_runs([experiment], f"tags.`soundstage.report_sha256` = '{key}'"):
        if run.data.tags.get("soundstage.complete") == "true":
            return run.info.run_id
        client.delete_run(run.info.run_id)
    report = Report.model_validate_json(evidence.report.read_text(encoding="utf-8"))
    run = client.create_run(experiment, run_name=f"{report.model} seed {report.seed} {report.checkpoint_sha256[:8]}")
    run_id = run.info.run_id
    client.set_tag(run_id, "soundstage.report_sha256", key)
    for name, value in provenance(report).items():
        client.set_tag(run_id, name, value)
    log_params(client, run_id, evidence.params)
    log_metrics(client, run_id, report)
    log_losses(client, run_id, evidence.checkpoints)
    log_splits(client, run_id, evidence)
    client.log_artifacts(run_id, str(evidence.report.parent), "report")
    client.set_tag(run_id, "soundstage.complete", "true")
    client.set_terminated(run_id)
    return run_id


def note_verdict(folder: Path, run_id: str, verdict: Verdict, path: Path) -> None:
    """Show beside the run how it was judged."""
    client = connect(folder)
    client.set_tag(run_id, "soundstage.verdict", "passed" if verdict.passed else "failed")
    client.log_artifact(run_id, str(path))  # pyright: ignore[reportUnknownMemberType]


def provenance(report: Report) -> dict[str, str]:
    """What made the model: weights, code and who."""
    return {
        "soundstage.checkpoint_sha256": report.checkpoint_sha256,
        "soundstage.base_sha256": report.base_sha256,
        **code_version(),
        "mlflow.user": getpass.getuser(),
    }


def code_version() -> dict[str, str]:
    """Commit of the code, and whether files differ from it; "none" outside a Git checkout."""
    root = Path(__file__).parents[1]
    commit = git(root, "rev-parse", "HEAD")
    dirty = git(root, "status", "--porcelain", "--untracked-files=no")
    return {
        "git_commit": commit or "none",
        "git_dirty": "true" if dirty else "false",
        "mlflow.source.git.commit": commit,
    }


def git(root: Path, *words: str) -> str:
    """What Git answers, or nothing where there is no Git or no repository."""
    try:
        answer = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def flatten(tree: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as dotted names and JSON values."""
    if isinstance(tree, Mapping):
        for key, value in cast(Mapping[str, object], tree).items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree if isinstance(tree, str) else json.dumps(tree)


def log_params(client: MlflowClient, run_id: str, path: Path) -> None:
    """Every setting, by its dotted name."""
    from mlflow.entities import Param

    if not path.is_file():
        return
    items = flatten(yaml.safe_load(path.read_text(encoding="utf-8")))
    params = [Param(name, value[:MAX_PARAM_CHARACTERS]) for name, value in items if value]
    for batch in batches(params, PARAMS_A_CALL):
        client.log_batch(run_id, params=batch)


def log_metrics(client: MlflowClient, run_id: str, report: Report) -> None:
    """Every number of the report and every paired difference, with the ends of its interval."""
    numbers: dict[str, float | None] = {}
    for metric in report.metrics:
        name = f"{metric.name}/{metric.subset}/{metric.group}"
        numbers |= {name: metric.value, f"{name}/low": metric.low, f"{name}/high": metric.high}
    for pair in report.comparisons:
        name = f"difference/{pair.name}/{pair.left} - {pair.right}/{pair.group}"
        numbers |= {name: pair.difference, f"{name}/low": pair.low, f"{name}/high": pair.high}
    log_numbers(client, run_id, [(name, value, 0) for name, value in numbers.items() if value is not None])


def log_losses(client: MlflowClient, run_id: str, checkpoints: Path) -> None:
    """The loss curves of every curriculum stage, step by step."""
    numbers: list[tuple[str, float, int]] = []
    for log in sorted(checkpoints.glob("*/log.jsonl")):
        for line in log.read_text(encoding="utf-8").splitlines():
            row = cast(dict[str, Any], json.loads(line))
            stage = log.parent.name
            numbers += [
                (f"train/{stage}/{name}", row[name], row["step"]) for name in LOSSES if row.get(name) is not None
            ]
    log_numbers(client, run_id, numbers)


def log_numbers(client: MlflowClient, run_id: str, numbers: Sequence[tuple[str, float, int]]) -> None:
    """Send (name, value, step) in as few calls as the server takes; a call each costs 30–90 ms."""
    from mlflow.entities import Metric
    from mlflow.utils.time import get_current_time_millis

    now = get_current_time_millis()
    metrics = [Metric(name, value, now, step) for name, value, step in numbers]
    for batch in batches(metrics, METRICS_A_CALL):
        client.log_batch(run_id, metrics=batch)


def log_splits(client: MlflowClient, run_id: str, evidence: Evidence) -> None:
    """Each split as a data set that the web page shows, with DVC's hash of it."""
    import pandas as pd
    from mlflow.data.pandas_dataset import from_pandas  # pyright: ignore[reportUnknownVariableType]
    from mlflow.entities import Dataset, DatasetInput, InputTag

    hashes = dvc_hashes(evidence.lock)
    inputs: list[DatasetInput] = []
    for path in sorted(evidence.splits.glob("*.parquet")):
        table = pd.read_parquet(path)  # pyright: ignore[reportUnknownMemberType]
        # the digest holds at most 36 characters, so DVC's own hash goes into a tag
        with quiet():
            split = from_pandas(table, path.as_posix(), name=path.stem, digest=sha256(path)[:MAX_DIGEST_CHARACTERS])
        entity = cast("Dataset", Dataset.from_dictionary(split.to_dict()))
        tags = {"mlflow.data.context": path.stem, "dvc.md5": hashes.get(path.as_posix(), "none")}
        inputs.append(DatasetInput(entity, [InputTag(*item) for item in tags.items()]))
    client.log_inputs(run_id, inputs)


@contextmanager
def quiet() -> Generator[None]:
    """No advice from MLflow on what we do on purpose: a path as a source, a model without an example input."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def dvc_hashes(lock: Path) -> dict[str, str]:
    """Hash of every output that DVC has made, by path; empty where DVC has not run."""
    if not lock.is_file():
        return {}
    stages = cast(dict[str, Any], yaml.safe_load(lock.read_text(encoding="utf-8"))).get("stages", {})
    return {output["path"]: output["md5"] for stage in stages.values() for output in stage.get("outs", [])}


def batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Consecutive pieces of at most `size` items."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
