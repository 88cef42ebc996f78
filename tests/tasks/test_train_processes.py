"""`soundstage train` as several real processes under torchrun: a killed one, a signal, too little memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from data.files import sha256
from models.preemption import EXIT_PREEMPTED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # each run is four interpreters that import everything
ROOT = Path(__file__).parents[2]
NUM_STEPS = 60


@pytest.fixture(scope="module")
def settings(base: Path, store_folder: Path, curriculum: Path) -> dict[str, Any]:
    """One stage for two processes."""
    stage = {"conditions": {"t2va": 0.5, "fl2va": 0.5}, "num_steps": NUM_STEPS, "batch_size": 3, "learning_rate": 0.003}
    return {
        "seed": 0, "base": str(base), "latents": str(store_folder), "curriculum": str(curriculum),
        "accelerator": "cpu", "strategy": "ddp", "precision": "fp32", "recompute": "none", "micro_batch": 1,
        "save_every": 5, "launch": {"processes_per_node": 2, "max_restarts": 1},
        "stages": {"only": {**stage, "guidance": {"form": "none"}}},
    }  # fmt: skip


def started(settings: dict[str, Any], folder: Path) -> subprocess.Popen[str]:
    """The verb, at work in `folder`."""
    folder.mkdir(exist_ok=True)
    watch = {"folder": str(folder), "prometheus": str(folder), "log_every": 1}
    own = {"checkpoints": str(folder / "checkpoints"), "work": str(folder / "work"), "watch": watch}
    (folder / "params.yaml").write_text(json.dumps({"train": settings | own}))
    command = [sys.executable, "-m", "tasks", "train", "only", "--params", str(folder / "params.yaml")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def until(condition: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    """What the condition finds, as soon as it finds something."""
    while not (found := condition()):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    return found


def worker(process: subprocess.Popen[str], rank: int) -> psutil.Process | None:
    """The training process of a rank."""
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if child.environ().get("RANK") == f"{rank}":
                return child
        except psutil.Error:
            continue
    return None


def states(folder: Path) -> list[int]:
    """Steps of the whole states, in order."""
    return sorted(int(path.parent.name[5:]) for path in folder.glob("work/only/*/step-*/state.json"))


@pytest.fixture(scope="module")
def undisturbed(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    process = started(settings, folder)
    said = process.communicate()[1]
    assert process.returncode == 0, said
    return sha256(folder / "checkpoints" / "only")


def test_a_rank_killed_under_torchrun_is_started_again_and_the_run_ends_as_undisturbed(
    settings: dict[str, Any], undisturbed: str, tmp_path: Path
) -> None:
    process = started(settings, tmp_path / "run")
    until(lambda: len(states(tmp_path / "run")) > 1, process)
    victim = until(lambda: worker(process, 1), process)
    victim.kill()
    said = process.communicate()[1]
    assert process.returncode == 0, said
    assert sha256(tmp_path / "run" / "checkpoints" / "only") == undisturbed


def test_sigterm_leaves_a_whole_state_and_the_next_run_ends_as_undisturbed(
    settings: dict[str, Any], undisturbed: str, tmp_path: Path
) -> None:
    folder, rarely = tmp_path / "run", settings | {"save_every": 1000}
    process = started(rarely, folder)
    until(lambda: list(folder.glob("*.prom")), process)  # a step is done
    process.send_signal(signal.SIGTERM)
    said = process.communicate()[1]
    assert process.returncode == EXIT_PREEMPTED, said
    assert said.splitlines()[-1].startswith("soundstage train: only: asked to stop after step")
    (step,) = states(folder)
    assert 0 < step < NUM_STEPS
    process = started(rarely, folder)
    said = process.communicate()[1]
    assert process.returncode == 0, said
    assert sha256(folder / "checkpoints" / "only") == undisturbed
