"""The registered model in use, with the report that earned it its place."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from data.records import Report
from tasks import tracking

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHAMPION, CANDIDATE = "champion", "candidate"


class Champion(NamedTuple):
    """A version of the registered model and its report."""

    label: str
    """`soundstage-tiny-h3 version 3`."""
    report: Report


def find_opponent(folder: Path, model_name: str, checkpoint_sha256: str) -> Champion | None:
    """The model a candidate must not lose against, or None.

    A candidate that is the champion already is judged against the version it replaced, so that judging it again
    gives the same verdict.

    Raises:
        RuntimeError: the champion's report is gone, so nothing can be said about it.
    """
    if not tracking.has_store(folder):
        return None
    client = tracking.connect(folder)
    version = alias_version(client, model_name, CHAMPION)
    if version is not None and tags_of(version).get("checkpoint_sha256") == checkpoint_sha256:
        previous = tags_of(version).get("previous_champion", "none")
        version = None if previous == "none" else client.get_model_version(model_name, previous)
    if version is None:
        return None
    label = f"{model_name} version {version.version}"
    return Champion(label, fetch_report(client, version, label))


def alias_version(client: MlflowClient, model_name: str, alias: str) -> ModelVersion | None:
    """The version an alias points at; asked through a search, as a missing one raises differently on every store."""
    models = client.search_registered_models(f"name = '{model_name}'")
    aliases = cast("dict[str, str]", models[0].aliases) if models else {}  # pyright: ignore[reportUnknownMemberType]
    number = aliases.get(alias)
    return None if number is None else client.get_model_version(model_name, str(number))


def tags_of(version: ModelVersion) -> dict[str, str]:
    """Lineage tags of a version."""
    return version.tags


def fetch_report(client: MlflowClient, version: ModelVersion, label: str) -> Report:
    """The report logged with the run that made a version."""
    from mlflow.exceptions import MlflowException

    with tempfile.TemporaryDirectory(prefix="soundstage-champion-") as folder:
        try:
            path = client.download_artifacts(str(version.run_id), "report/report.json", folder)
        except (MlflowException, OSError) as error:
            raise RuntimeError(
                f"{label} has no report to compare with ({error}); restore its run's artifacts or remove the alias"
                f" `{CHAMPION}`"
            ) from error
        return Report.model_validate_json(Path(path).read_text(encoding="utf-8"))
