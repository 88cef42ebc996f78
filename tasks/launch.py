"""Take the corpus through the whole pipeline under the Prefect flow `finetune`, then say where everything is.

Example: soundstage run
         soundstage run first=train last=gate
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import model_validator

from data.files import remove
from data.records import Frozen
from tasks import PIPELINE
from tasks.processes import KINDS, end_abandoned, run_alone
from tasks.summary import JOURNAL, LOGS, Journal, Params, load_params, places, timing_table

Verb = Literal[
    "sample",
    "ingest",
    "validate",
    "cut",
    "split",
    "browse",
    "encode",
    "plan",
    "train",
    "evaluate",
    "gate",
    "register",
    "generate",
]
ORDER = ("sample", *PIPELINE)
"""The sample corpus comes first where it is what `ingest` reads."""
LEASE = LOGS / "run.pid"
EXIT_GATE, EXIT_DATA = 4, 5


class Config(Frozen):
    """Which part of the pipeline to bring up to date; also the form of the flow in Prefect's pages."""

    first: Verb = "sample"
    """First verb; those before it are taken as they are."""
    last: Verb = "generate"
    """Last verb."""
    force: bool = False
    """Run the verbs even where nothing changed."""

    @model_validator(mode="after")
    def _in_order(self) -> Config:
        if ORDER.index(self.first) > ORDER.index(self.last):
            raise ValueError(f"first = {self.first} comes after last = {self.last}")
        return self


def run(config: Config) -> None:
    """Run the flow where something changed; otherwise say so without starting Prefect.

    Raises:
        GateFailed: the model may not be released; DataRefused: the dataset may not be trained on.
        RuntimeError: a verb failed otherwise; the message is its own line.
    """
    begin = time.monotonic()
    params = load_params()
    environment = child_environment(os.environ, Path.cwd())
    stages = steps(params, config)
    end_abandoned(LEASE)
    if not config.force and not changed_stages(stages, environment):
        sys.stdout.write(f"Nothing to do: every output is up to date.\n\n{places(params)}\n")
        return
    check_server(environment.get("PREFECT_API_URL"))
    Path(environment["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)  # Prefect makes no parents and then hangs
    remove(JOURNAL)
    status = run_alone(
        [sys.executable, "-m", "flows.finetune", config.model_dump_json()], environment, LOGS / "run.pid"
    )
    journal = Journal.model_validate_json(JOURNAL.read_bytes()) if JOURNAL.is_file() else Journal()
    peak = peak_bytes(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
    sys.stdout.write(
        f"\n{timing_table(journal.outcomes)}\n\n{places(params)}\n\n"
        f"{time.monotonic() - begin:.0f} s in all, largest process {peak / 1e9:.1f} GB\n"
    )
    if status:
        raise failure(status, journal)


def steps(params: Params, config: Config) -> tuple[str, ...]:
    """DVC's names of the stages that a run brings up to date, in order."""
    chosen = ORDER[ORDER.index(config.first) : ORDER.index(config.last) + 1]
    names: list[str] = []
    for verb in chosen:
        if verb == "train":
            names += [f"train@{name}" for name in params["train"]["stages"]]
        elif verb != "sample" or params["ingest"]["source"] == params["sample"]["corpus"]:
            names.append(verb)
    return tuple(names)


def changed_stages(stages: Sequence[str], environment: Mapping[str, str] | None = None) -> set[str]:
    """Which stages have inputs, settings or outputs other than dvc.lock says; stages after those may follow.

    Raises:
        RuntimeError: DVC cannot say, for example outside a Git checkout.
    """
    command = ["dvc", "status", "--json", *stages]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"dvc status: {result.stderr.strip() or result.stdout.strip()}")
    return set(json.loads(result.stdout))


def check_server(url: str | None) -> None:
    """See that a server that the environment names answers, before anything waits for it.

    Raises:
        RuntimeError: it does not.
    """
    if not url:
        return
    import httpx

    try:
        httpx.get(f"{url.rstrip('/')}/health", timeout=10).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RuntimeError(
            f"no Prefect server answers at PREFECT_API_URL = {url} ({error}); start it or unset the variable"
        ) from error


def child_environment(environment: Mapping[str, str], root: Path) -> dict[str, str]:
    """What the flow and its children see: embedded defaults, no telemetry; what the user has set goes before them."""
    defaults = {
        "DO_NOT_TRACK": "1",
        "DVC_NO_ANALYTICS": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PREFECT_HOME": str(root / "data/store/prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
        "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
        # On the terminal the flow speaks for itself; the engine's own lines stay in Prefect's pages when served there.
        "PREFECT_LOGGING_LOGGERS_PREFECT_LEVEL": "WARNING",
        "PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_FORMATTERS_STANDARD_FORMAT": "%(asctime)s  %(message)s",
    }
    programs = str(Path(sys.executable).parent)
    return defaults | dict(environment) | {"PATH": f"{programs}{os.pathsep}{environment.get('PATH', '')}"}


def peak_bytes(max_rss: int) -> int:
    """Resident bytes from getrusage's figure, which is in KiB except on macOS."""
    return max_rss if sys.platform == "darwin" else max_rss * 1024


def failure(status: int, journal: Journal) -> Exception:
    """The error that a failed run ends with, so that the command's exit status is the verb's."""
    failed = [outcome for outcome in journal.outcomes if outcome.status]
    if not failed and status < 0:
        return RuntimeError(f"the flow was ended by signal {-status}; run it again and it goes on from there")
    if not failed:
        return RuntimeError(f"the flow ended with status {status} before a verb failed; its last lines stand above")
    message = f"{failed[-1].stage}: {failed[-1].error}"
    return KINDS.get(status, RuntimeError)(message)
