"""Real torchrun, real processes: who failed is said, who is asked to stop stops with the others, nobody is left."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from models.preemption import EXIT_PREEMPTED
from tasks.launching import Launch, LocalLauncher, inside, needs_launcher, torchrun_words

ROOT = Path(__file__).parents[2]
STEPS = """
    import os, signal, sys, time
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from models.preemption import Preempted, Preemption
    from models.ranks import Ranks
    from tasks.__main__ import say

    folder = Path(sys.argv[1])
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.set_num_threads(1)

    def steps(until):
        # One collective a step, as training has; stops with the others when one is asked to.
        ranks = Ranks()
        with Preemption() as guard:
            for step in range(until):
                dist.all_reduce(torch.ones(1))
                yield step
                (folder / f"step-{rank}").write_text(str(step))
                if step == 2:
                    (folder / f"ready-{rank}-{os.getpid()}").touch()
                if guard.asked(ranks):
                    (folder / f"saved-{rank}").write_text(f"saved at step {step}")
                    raise Preempted(f"stopped at step {step}; its state is saved")
                time.sleep(0.02)

    def main():
        dist.init_process_group("gloo")
"""
END = """
        (folder / f"finished-{rank}-{attempt}-{dist.get_world_size()}").touch()
        dist.destroy_process_group()

    try:
        main()
    except Exception as error:
        sys.exit(say("train", error))
"""
FOREVER = """
        for step in steps(100_000):
            pass
"""


def command(folder: Path, body: str) -> list[str]:
    """What each process runs: `body` indented as that of a function, between joining and leaving the group."""
    script = folder / "worker.py"
    script.write_text(textwrap.dedent(STEPS + body + END))
    return [sys.executable, str(script), str(folder)]


def launch(folder: Path, body: str, **settings: object) -> None:
    """Run it here, as two processes."""
    LocalLauncher().run(command(folder, body), Launch.model_validate({"processes_per_node": 2} | settings), os.environ)


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start a launcher of two processes as a process; those that are left at the end are killed, and fail no test."""
    mine: list[subprocess.Popen[str]] = []

    def begin(body: str, **settings: object) -> subprocess.Popen[str]:
        script = (
            "import os, sys\nfrom tasks.__main__ import say\nfrom tasks.launching import Launch, LocalLauncher\n"
            f"given = Launch.model_validate({ {'processes_per_node': 2} | settings!r})\n"
            f"try: LocalLauncher().run({command(tmp_path, body)!r}, given, os.environ)\n"
            "except Exception as error: sys.exit(say('train', error))\n"
        )
        mine.append(subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True))
        return mine[-1]

    yield begin
    for process in mine:
        process.kill()
        process.wait()
    for pid in pids(tmp_path):
        psutil.Process(pid).kill()


def pids(folder: Path) -> dict[int, int]:
    """Number of each process that is at work here, with its rank."""
    found = {}
    for process in psutil.process_iter(["pid", "cmdline"]):
        line = process.info["cmdline"] or []
        if str(folder) in line and process.status() != psutil.STATUS_ZOMBIE:
            found[process.pid] = int(process.environ().get("RANK", -1))
    return found


def wait_for(found: Callable[[], bool], what: str) -> None:
    for _ in range(900):
        if found():
            return
        time.sleep(0.1)
    pytest.fail(f"waited in vain for {what}")


def wait_until_at_work(folder: Path, count: int = 2) -> None:
    wait_for(lambda: len(list(folder.glob("ready-*"))) >= count, "the processes to be at work")


def ended(process: subprocess.Popen[str], folder: Path) -> tuple[int, str]:
    """Exit status and the launcher's own line; nothing of it is left."""
    _, said = process.communicate(timeout=90)
    assert not pids(folder)
    lines = [line for line in said.splitlines() if line.startswith("soundstage train: ")]
    assert len(lines) == (process.returncode != 0), said
    assert "Traceback" not in said
    return process.returncode, "".join(lines)


def saved(folder: Path) -> str:
    """Where the processes stopped: all at the same step."""
    notes = {path.read_text() for path in folder.glob("saved-*")}
    assert len(list(folder.glob("saved-*"))) == 2
    assert len(notes) == 1
    return notes.pop()


def test_two_processes_work_together(tmp_path: Path) -> None:
    launch(tmp_path, "        assert [step for step in steps(3)] == [0, 1, 2]")
    assert {path.name for path in tmp_path.glob("finished-*")} == {"finished-0-0-2", "finished-1-0-2"}


KILLED_ONCE = """
        for step in steps(5):
            if step == 3 and rank == 1 and attempt == 0:
                os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_is_started_again_with_the_others(tmp_path: Path) -> None:
    launch(tmp_path, KILLED_ONCE, max_restarts=1)
    assert {path.name for path in tmp_path.glob("finished-*")} == {"finished-0-1-2", "finished-1-1-2"}


def test_a_killed_process_is_named_with_its_signal(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="rank 1 of 2 was killed by SIGKILL"):
        launch(tmp_path, KILLED_ONCE)


def test_the_message_of_who_failed_first_arrives_as_its_kind_of_error(tmp_path: Path) -> None:
    body = """
        for step in steps(5):
            if step == 3 and rank == 1:
                raise ValueError("step 3: loss is nan on clips a, b")
    """
    with pytest.raises(ValueError, match=r"^rank 1 of 2: step 3: loss is nan on clips a, b$"):
        launch(tmp_path, body)


def test_a_mistake_in_the_code_arrives_with_its_type(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text("from tasks.__main__ import main; import sys; sys.exit(main(['browse', 'all', '--json']))")
    with pytest.raises(ValueError, match=r"^rank 0 of 1: --json: `browse` prints no records"):
        LocalLauncher().run([sys.executable, str(script)], Launch(), os.environ)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_asked_to_stop_all_stop_at_one_step(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], number: int
) -> None:
    process = start(FOREVER, max_restarts=3)
    wait_until_at_work(tmp_path)
    process.send_signal(number)
    status, said = ended(process, tmp_path)
    assert status == EXIT_PREEMPTED
    step = re.fullmatch(r"saved at step (\d+)", saved(tmp_path))
    assert step
    assert said == f"soundstage train: stopped at step {step[1]}; its state is saved"


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, 0), (signal.SIGUSR1, 1)])
def test_one_process_asked_to_stop_stops_all_and_none_is_started_again(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], number: int, rank: int
) -> None:
    process = start(FOREVER, max_restarts=3)
    wait_until_at_work(tmp_path)
    os.kill(next(pid for pid, of in pids(tmp_path).items() if of == rank), number)
    status, said = ended(process, tmp_path)
    assert status == EXIT_PREEMPTED
    assert saved(tmp_path).removeprefix("saved") in said
    assert len(list(tmp_path.glob("ready-*"))) == 2
