"""The sentence `finetune`: from a folder of videos to a fine-tuned, measured, registered model.

Example: python -m flows.finetune '{"last": "plan"}'
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import httpx
from prefect import flow, get_run_logger, task
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from data.files import read_records, write_text
from data.records import Reject, Report
from flows._dvc import locked_outputs, reproduce
from tasks.launch import EXIT_DATA, EXIT_GATE, Config, changed_stages, steps
from tasks.summary import JOURNAL, LOGS, Journal, Outcome, Params, load_params, metrics_markdown

EVERYTHING = Config()
INTERVAL_S = 10.0
"""Least time between two progress updates: Prefect's tables of logs and artifacts only grow."""


def speaker() -> logging.Logger:
    """The run's logger under a name of its own, so that the terminal can show our lines without the engine's."""
    logger = cast(logging.Logger, cast(Any, get_run_logger()).getChild("soundstage"))
    cast(Any, logger).logger.setLevel(logging.INFO)
    return logger


class Progress:
    """One progress artifact for the whole run, moved forward inside a verb too; at most every `INTERVAL_S`."""

    def __init__(self, stages: tuple[str, ...]) -> None:
        self.stages = stages
        self.artifact = cast(UUID, create_progress_artifact(progress=0.0, key="finetune", description="starting"))
        self.told_s = 0.0

    def tell(self, stage: str, share: float, text: str, *, at_once: bool = False) -> bool:
        """Move the bar to `share` of `stage`; returns whether it was time to."""
        now = time.monotonic()
        if not at_once and now - self.told_s < INTERVAL_S:
            return False
        self.told_s = now
        percent = 100 * (self.stages.index(stage) + share) / len(self.stages)
        with suppress(httpx.HTTPError):  # a server that is away for a moment must not end a training
            update_progress_artifact(self.artifact, progress=round(percent, 1), description=f"{stage} {text}".strip())
        return True


@task(cache_policy=NO_CACHE)  # DVC decides what is run again
def verb(stage: str, force: bool, progress: Progress) -> State[Outcome]:
    """Bring one DVC stage up to date in a child process; a failed one fails with its own line."""
    logger, log = speaker(), LOGS / f"{stage}.log"

    def on_progress(share: float, text: str) -> None:
        if progress.tell(stage, share, text):
            logger.info("        %s", text)

    outcome = reproduce(stage, log, force=force, on_progress=on_progress)
    if not outcome.status:
        return Completed(message=f"{outcome.seconds:.1f} s" if outcome.ran else "unchanged", data=outcome)
    if outcome.status not in (EXIT_GATE, EXIT_DATA):  # a verdict explains itself; a fault needs its context
        last = log.read_text(encoding="utf-8").splitlines()[-20:]
        logger.error("last lines of %s:\n%s", log, "\n".join(f"  {line}" for line in last))
    return Failed(message=outcome.error, data=outcome)


@task(cache_policy=NO_CACHE)
def unchanged(stage: str) -> State[Outcome]:
    """Stand for a stage that DVC has found up to date, without asking it again."""
    return Completed(
        message="unchanged", data=Outcome(stage=stage, ran=False, seconds=0.0, outputs=locked_outputs(stage))
    )


@flow(name="finetune")
def finetune(request: Config = EVERYTHING) -> State[Any]:
    """From a folder of videos to a fine-tuned, measured, registered model; DVC decides which verbs have work to do."""
    logger, params = speaker(), load_params()
    stages = steps(params, request)
    changed = set(stages) if request.force else changed_stages(stages)
    progress = Progress(stages)
    outcomes: list[Outcome] = []
    write_journal(outcomes)
    for number, stage in enumerate(stages, 1):
        follows = bool(changed & set(stages[:number]))
        progress.tell(stage, 0.0, "", at_once=True)
        if follows:
            logger.info("[%d/%d] %s", number, len(stages), stage)
        state = bring_up_to_date(stage, request.force, progress, follows=follows)
        if state.data is None:  # crashed or cancelled: Prefect has the reason
            return state
        outcomes.append(cast(Outcome, state.result(raise_on_failure=False)))
        write_journal(outcomes)
        if outcomes[-1].status:
            return Failed(message=f"{stage}: {outcomes[-1].error}")
        logger.info("[%d/%d] %s: %s", number, len(stages), stage, state.message)
        publish(stage, params)
    progress.tell(stages[-1], 1.0, "done", at_once=True)
    return Completed(message=f"{sum(outcome.ran for outcome in outcomes)} of {len(stages)} stages had work to do")


def bring_up_to_date(stage: str, force: bool, progress: Progress, *, follows: bool) -> State[Outcome]:
    """Run one stage as a task named after it; `follows` says that it, or one before it, has changed."""
    if follows:
        named = verb.with_options(name=stage, task_run_name=stage)
        return cast("State[Outcome]", named(stage, force, progress, return_state=True))
    still = unchanged.with_options(name=stage, task_run_name=stage)
    return cast("State[Outcome]", still(stage, return_state=True))


def write_journal(outcomes: list[Outcome]) -> None:
    """Keep what has happened so far, for whoever started the flow."""
    write_text(JOURNAL, Journal(outcomes=tuple(outcomes)).model_dump_json(indent=1) + "\n")


def publish(stage: str, params: Params) -> None:
    """Show on the run's page what a verb has just found."""
    if stage == "cut":
        paths = [Path(params[name]["rejects"]) for name in ("validate", "cut")]
        rows = [reject.model_dump() for path in paths for reject in read_records(path, Reject)]
        create_table_artifact(rows, key="rejects", description="sources and clips left out, and why")
    if stage == "evaluate":
        folder = Path(params["evaluate"]["report"])
        report = Report.model_validate_json((folder / "report.json").read_bytes())
        markdown = metrics_markdown(report, folder / "report.html")
        create_markdown_artifact(markdown, key="metrics", description="what the fine-tuned model can do")


def main() -> int:
    """Run the flow as the command line asks; the exit status is that of the verb that failed."""
    request = Config.model_validate_json(sys.argv[1] if len(sys.argv) > 1 else "{}")
    state = cast(State[Any], finetune(request, return_state=True))
    if state.is_completed():
        return 0
    journal = Journal.model_validate_json(JOURNAL.read_bytes())
    status = next((outcome.status for outcome in journal.outcomes if outcome.status), 0)
    sys.stderr.write("" if status else f"flow {state.name}: {state.message}\n")
    return status or 1


if __name__ == "__main__":
    sys.exit(main())
