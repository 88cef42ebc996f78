"""The flow against a real, temporary Prefect server: verbs as named tasks, artifacts, skipping, and a failed gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from data.files import write_records
from data.records import Reject
from tasks import PIPELINE
from tasks.launch import ORDER, Config
from tasks.summary import JOURNAL, Journal

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

PARAMS = {
    "sample": {"corpus": "corpus"},
    "ingest": {"source": "corpus"},
    "validate": {"rejects": "rejects.parquet"},
    "cut": {"rejects": "cut_rejects.parquet"},
    "train": {"stages": {"easy": {}}},
    "evaluate": {"report": "report"},
}
REPORT = (
    '{"model": "tiny", "checkpoint_sha256": "a", "base_sha256": "b", "seed": 0,'
    ' "metrics": [], "comparisons": [], "per_clip": []}'
)


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=240):
        yield


@pytest.fixture
def pipeline(project: Callable[..., Path]) -> Path:
    """Every verb writes its own name; `gate` fails where a file `bad` lies."""
    commands = {verb: f"echo {verb} > {verb}" for verb in ORDER if verb != "train"}
    commands["gate"] = "if [ -e bad ]; then echo 'soundstage gate: 3 dB; limit 4' >&2; exit 4; fi; echo gate > gate"
    root = project(commands | {"train@easy": "echo easy > train_easy"}, PARAMS)
    body = (root / "dvc.yaml").read_text()
    (root / "dvc.yaml").write_text(with_foreach(body))
    (root / "report").mkdir()
    (root / "report" / "report.json").write_text(REPORT)
    reject = Reject(
        item="a", path="a.mp4", verb="validate", rule="validate.min_duration_s", measured="0.1 s", limit="1 s"
    )
    write_records(root / "rejects.parquet", [reject], Reject)
    write_records(root / "cut_rejects.parquet", [], Reject)
    return root


def with_foreach(body: str) -> str:
    stages = yaml.safe_load(body)["stages"]
    single = stages.pop("train@easy")
    stages["train"] = {"foreach": "${train.stages}", "do": single}
    return yaml.safe_dump({"stages": stages})


def run(**fields: Any) -> Any:
    from flows.finetune import finetune

    return finetune(Config(**fields), return_state=True)


def artifacts() -> dict[str, Any]:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        response = client._client.post("/artifacts/latest/filter", json={})
    return {item["key"]: item["data"] for item in response.json()}


def journal() -> Journal:
    return Journal.model_validate_json(JOURNAL.read_bytes())


def test_every_verb_runs_once_then_none_then_what_a_failed_gate_lets(server: None, pipeline: Path) -> None:
    stages = ("sample", *(("train@easy" if verb == "train" else verb) for verb in PIPELINE))
    first = run()
    assert first.is_completed(), first.message
    assert [(outcome.stage, outcome.ran) for outcome in journal().outcomes] == [(stage, True) for stage in stages]
    assert journal().outcomes[1].outputs["ingest"]
    shown = artifacts()
    assert "validate.min_duration_s" in str(shown["rejects"])
    assert "# tiny" in shown["metrics"]
    assert float(shown["finetune"]) == 100

    assert run().message == "0 of 13 stages had work to do"

    (pipeline / "bad").touch()
    failed = run(first="evaluate", force=True)
    assert failed.is_failed()
    assert failed.message == "gate: 3 dB; limit 4"
    assert [(outcome.stage, outcome.status) for outcome in journal().outcomes] == [("evaluate", 0), ("gate", 4)]
