"""Makes a version of the registered model out of a checkpoint that passed the gate, and points `champion` at it.

soundstage register model_name=my-model
"""

from __future__ import annotations

import getpass
import hashlib
import json
import shutil
import tempfile
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

from data.files import sha256, write_text
from data.records import ClipShape, Frozen, GateFailed, Report, Verdict
from tasks import tracking
from tasks.champion import CANDIDATE, CHAMPION, alias_version

if TYPE_CHECKING:
    from mlflow import MlflowClient

ROOT = Path(__file__).parents[1]
POLICY = ROOT / "mlflow"
ROOMS = ("data", "models")
"""What a served model runs; tasks and metrics stay at home."""


class Config(Frozen):
    """A model, its judgement, and the registry it goes into."""

    checkpoint: Path
    """Folder of the fine-tuned weights."""
    base: Path
    """Folder of the base model; stored with the version, so that it loads anywhere."""
    report: Path
    """Folder that `evaluate` wrote."""
    verdict: Path
    """Judgement of that report; without a passed one nothing is registered."""
    registered: Path
    """Where name, version and weights hash go, JSON."""
    shape: ClipShape = ClipShape()
    """What the model generates."""
    checkpoints: Path = Path("data/store/checkpoints")
    """Curriculum stages whose loss curves the run shows."""
    splits: Path = Path("data/store/splits")
    """Splits the run shows, with their DVC hashes."""
    params: Path = Path("params.yaml")
    """Settings the run shows."""
    lock: Path = Path("dvc.lock")
    """Where DVC wrote the hashes of its outputs."""
    mlflow: Path = Path("data/store/mlflow")
    """Folder of the local tracking store and registry, used unless MLFLOW_TRACKING_URI names a server."""
    model_name: str = "soundstage-tiny-h3"
    """Name in the registry."""


class Registered(Frozen):
    """Which version a model became; the same model gets the same answer."""

    name: str
    version: str
    alias: str
    checkpoint_sha256: str


def run(config: Config) -> Registered:
    """Register the model once, and make it the champion.

    Raises:
        GateFailed: no passed verdict on this very report and checkpoint.
    """
    report, verdict = judged(config)
    client = tracking.connect(config.mlflow)
    key = key_of(report, config)
    number = find_version(client, config.model_name, key)
    if number is None:
        evidence = tracking.Evidence(
            report=config.report / "report.json", checkpoints=config.checkpoints, splits=config.splits,
            params=config.params, lock=config.lock,
        )  # fmt: skip
        run_id = tracking.ensure_run(config.mlflow, evidence)
        number = make_version(client, config, run_id, report, key)
    client.update_model_version(config.model_name, number, model_card(config, report, verdict))  # also after a kill
    for alias in (CANDIDATE, CHAMPION):
        client.set_registered_model_alias(config.model_name, alias, number)
    result = Registered(
        name=config.model_name, version=number, alias=CHAMPION, checkpoint_sha256=report.checkpoint_sha256
    )
    write_text(config.registered, result.model_dump_json(indent=1) + "\n")
    return result


def judged(config: Config) -> tuple[Report, Verdict]:
    """Report and verdict, once it is sure that they and the checkpoint belong together."""
    if not config.verdict.is_file():
        raise GateFailed(f"{config.verdict} does not exist; run `soundstage gate` first")
    verdict = Verdict.model_validate_json(config.verdict.read_text(encoding="utf-8"))
    path = config.report / "report.json"
    report = Report.model_validate_json(path.read_text(encoding="utf-8"))
    if not verdict.passed:
        failed = ", ".join(check.name for check in verdict.checks if not check.passed)
        raise GateFailed(f"{report.model} did not pass the gate ({failed}); see {config.verdict}")
    if verdict.report_sha256 != sha256(path):
        raise GateFailed(f"{config.verdict} judges another report than {path}; run `soundstage gate` again")
    weights = checkpoint_sha256(config.checkpoint)
    if weights != report.checkpoint_sha256:
        raise GateFailed(
            f"{config.checkpoint} has weights {weights[:12]}, the report is on {report.checkpoint_sha256[:12]};"
            " run `soundstage evaluate` again"
        )
    return report, verdict


def checkpoint_sha256(checkpoint: Path) -> str:
    """Hash of a checkpoint's weights, as it says of itself."""
    facts = cast(dict[str, Any], json.loads((checkpoint / "checkpoint.json").read_text(encoding="utf-8")))
    return str(facts["weights_sha256"])


def key_of(report: Report, config: Config) -> str:
    """What makes a version the same one: weights, base and report."""
    parts = (report.checkpoint_sha256, report.base_sha256, sha256(config.report / "report.json"))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]


def find_version(client: MlflowClient, model_name: str, key: str) -> str | None:
    """The version that was made of this very model, if there is one."""
    found = client.search_model_versions(f"name = '{model_name}'")
    return next((str(each.version) for each in found if each.tags.get("registered_key") == key), None)


def make_version(client: MlflowClient, config: Config, run_id: str, report: Report, key: str) -> str:
    """Log the model with its files and register it, tags and all in one call: a kill leaves no nameless version."""
    import mlflow

    tags = lineage(client, config, report, key)
    missing = [name for name in policy()["required_tags"] if not tags.get(name)]
    if missing:
        raise RuntimeError(f"version of {config.model_name} lacks {', '.join(missing)}; see {POLICY / 'registry.yaml'}")
    uri = log_model(config, run_id)
    made = mlflow.register_model(uri, config.model_name, tags=tags)  # pyright: ignore[reportUnknownMemberType]
    return str(made.version)


def policy() -> dict[str, Any]:
    """The registry's rules."""
    return cast(dict[str, Any], yaml.safe_load((POLICY / "registry.yaml").read_text(encoding="utf-8")))


def lineage(client: MlflowClient, config: Config, report: Report, key: str) -> dict[str, str]:
    """Everything that made the model, as tags."""
    champion = alias_version(client, config.model_name, CHAMPION)
    code = tracking.code_version()
    hashes = tracking.dvc_hashes(config.lock)
    wanted = (config.splits.as_posix(), config.checkpoint.as_posix())
    return {
        "registered_key": key,
        "checkpoint_sha256": report.checkpoint_sha256,
        "base_sha256": report.base_sha256,
        "report_sha256": sha256(config.report / "report.json"),
        "verdict_sha256": sha256(config.verdict),
        "git_commit": code["git_commit"],
        "git_dirty": code["git_dirty"],
        "previous_champion": str(champion.version) if champion else "none",
        "promoted_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "promoted_by": getpass.getuser(),
        **{f"dvc {path}": md5 for path, md5 in sorted(hashes.items()) if path.startswith(wanted)},
    }


def log_model(config: Config, run_id: str) -> str:
    """Store code, weights and signature with the run; the answer is the logged model's address."""
    import mlflow

    mlflow.start_run(run_id=run_id)
    try:
        with tempfile.TemporaryDirectory(prefix="soundstage-rooms-") as folder, tracking.quiet():
            return mlflow.pyfunc.log_model(  # pyright: ignore[reportUnknownMemberType]
                name="model",
                python_model=str(POLICY / "pyfunc_model.py"),
                artifacts={"base": str(config.base), "checkpoint": str(config.checkpoint)},
                code_paths=copy_rooms(Path(folder)),
                model_config={"shape": config.shape.model_dump()},
                signature=signature(),
                pip_requirements=requirements(),
            ).model_uri
    finally:
        mlflow.end_run()


def copy_rooms(folder: Path) -> list[str]:
    """The rooms' code alone: `data/` also holds the store, `models/` the base weights."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if "store" not in path.relative_to(ROOT).parts:
                target = folder / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    return [str(folder / room) for room in ROOMS]


def signature() -> Any:
    """What goes in and out: MLflow refuses a call without a prompt before the model sees it."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema, TensorSpec

    inputs: list[ColSpec | TensorSpec] = [
        ColSpec(DataType.string, "prompt"),
        ColSpec(DataType.binary, "first_frame", required=False),
        ColSpec(DataType.binary, "last_frame", required=False),
    ]
    params = [ParamSpec("seed", DataType.long, 0), ParamSpec("num_inference_steps", DataType.long, 20)]
    return ModelSignature(Schema(inputs), Schema([ColSpec(DataType.binary, "video")]), ParamSchema(params))


def requirements() -> list[str]:
    """The policy's distributions, pinned to what is installed here."""
    pins: list[str] = []
    for name in cast(list[str], policy()["requirements"]):
        try:
            pins.append(f"{name}=={version(name).partition('+')[0]}")
        except PackageNotFoundError:
            continue
    return pins


def model_card(config: Config, report: Report, verdict: Verdict) -> str:
    """The version's description, in words a person reads."""
    import jinja2

    wanted = ("base/fl2va", "tuned/fl2va_swapped", "crossfade")
    template = jinja2.Environment(autoescape=False).from_string(  # noqa: S701  # Markdown, from our own numbers
        (POLICY / "model_card.md.j2").read_text(encoding="utf-8")
    )
    return template.render(
        name=config.model_name,
        report=report,
        verdict=verdict,
        shape=config.shape,
        duration_s=float(config.shape.duration_s),
        comparisons=[pair for pair in report.comparisons if pair.right in wanted],
    )
