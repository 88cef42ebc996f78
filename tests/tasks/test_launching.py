"""Real torchrun, real processes: who failed is said, who is asked to stop stops with the others, nobody is left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from models.preemption import EXIT_PREEMPTED
from tasks.agent import first
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


Start = Callable[..., subprocess.Popen[str]]


def command(folder: Path, body: str) -> list[str]:
    """What each process runs: `body` indented as that of a function, between joining and leaving the group."""
    script = folder / "worker.py"
    script.write_text(textwrap.dedent(STEPS + body + END))
    return [sys.executable, str(script), str(folder)]


def launch(folder: Path, body: str, **settings: object) -> None:
    """Run it here, as two processes."""
    LocalLauncher().run(command(folder, body), Launch.model_validate({"processes_per_node": 2} | settings), os.environ)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a launcher of two processes as a process; those that are left at the end are killed, and fail no test."""
    mine: list[subprocess.Popen[str]] = []

    def begin(body: str, **settings: object) -> subprocess.Popen[str]:
        script = (
            "import os, sys\nfrom tasks.__main__ import say\nfrom tasks.launching import Launch, LocalLauncher\n"
            f"given = Launch.model_validate({ {'processes_per_node': 2} | settings!r})\n"
            f"try: LocalLauncher().run({command(tmp_path, body)!r}, given, os.environ)\n"
            "except Exception as error: sys.exit(say('train', error))\n"
        )
        (tmp_path / "scratch").mkdir(exist_ok=True)
        around = os.environ | {"TMPDIR": str(tmp_path / "scratch")}
        mine.append(subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, env=around))
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
    assert not list((folder / "scratch").glob("soundstage-*"))
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_command_of_ours_says_its_error_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "worker.py"
    script.write_text("from tasks.__main__ import main; import sys; sys.exit(main(['browse', 'all', '--json']))")
    with pytest.raises(ValueError, match=r"^rank 0 of 1: --json: `browse` prints no records"):
        LocalLauncher().run([sys.executable, str(script)], Launch(), os.environ)
    assert "soundstage browse:" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGUSR1))],
)
def test_asked_to_stop_all_stop_at_one_step(tmp_path: Path, start: Start, number: int) -> None:
    process = start(FOREVER, max_restarts=3)
    wait_until_at_work(tmp_path)
    process.send_signal(number)
    status, said = ended(process, tmp_path)
    assert status == EXIT_PREEMPTED
    step = re.fullmatch(r"saved at step (\d+)", saved(tmp_path))
    assert step
    assert said == f"soundstage train: stopped at step {step[1]}; its state is saved"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, 0), (signal.SIGUSR1, 1)])
def test_one_process_asked_to_stop_stops_all_and_none_is_started_again(
    tmp_path: Path, start: Start, number: int, rank: int
) -> None:
    process = start(FOREVER, max_restarts=3)
    wait_until_at_work(tmp_path)
    os.kill(next(pid for pid, of in pids(tmp_path).items() if of == rank), number)
    status, said = ended(process, tmp_path)
    assert status == EXIT_PREEMPTED
    assert saved(tmp_path).removeprefix("saved") in said
    assert len(list(tmp_path.glob("ready-*"))) == 2


DEAF = """
        with Preemption():
            (folder / f"ready-{rank}").touch()
            while True:
                time.sleep(0.1)
"""


@pytest.mark.slow
def test_what_does_not_stop_is_killed_after_the_grace(tmp_path: Path, start: Start) -> None:
    process = start(DEAF, grace_s=1, max_restarts=3)
    wait_until_at_work(tmp_path)
    process.terminate()
    status, said = ended(process, tmp_path)
    assert status == EXIT_PREEMPTED
    assert "asked to stop by SIGTERM: 2 of 2 processes had not saved" in said
    assert "launch.grace_s = 1 s" in said


@pytest.mark.slow
def test_torchrun_that_hears_nothing_is_killed_with_its_processes(tmp_path: Path, start: Start) -> None:
    process = start(DEAF, grace_s=1)
    wait_until_at_work(tmp_path)
    psutil.Process(process.pid).children()[0].suspend()
    process.terminate()
    status, said = ended(process, tmp_path)
    assert status == EXIT_PREEMPTED
    assert "2 of 2 processes had not saved" in said


@pytest.mark.slow
def test_processes_of_a_killed_launcher_save_and_leave(tmp_path: Path, start: Start) -> None:
    process = start(FOREVER)
    wait_until_at_work(tmp_path)
    process.kill()
    wait_for(lambda: not pids(tmp_path), "the processes to leave")
    wait_for(lambda: not list((tmp_path / "scratch").glob("soundstage-*")), "torchrun to clear up")
    assert saved(tmp_path)


@pytest.mark.slow
def test_processes_of_a_killed_torchrun_save_and_leave(tmp_path: Path, start: Start) -> None:
    process = start(FOREVER)
    wait_until_at_work(tmp_path)
    psutil.Process(process.pid).children()[0].kill()
    status, said = ended(process, tmp_path)
    assert status == EXIT_PREEMPTED
    assert saved(tmp_path).removeprefix("saved") in said


LONG_UNTIL_LOST = """
        for step in steps(100_000 if attempt == 0 else 3):
            pass
"""


@pytest.mark.slow
def test_an_elastic_run_goes_on_without_a_lost_machine(tmp_path: Path, start: Start) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    elastic = {
        "nodes": 1,
        "max_nodes": 2,
        "processes_per_node": 1,
        "max_restarts": 2,
        "endpoint": f"127.0.0.1:{port}",
        "local_address": "127.0.0.1",
        "late_timeout_s": 15,
    }
    stays, lost = (start(LONG_UNTIL_LOST, is_host=is_host, **elastic) for is_host in (True, False))
    wait_until_at_work(tmp_path)
    parts = psutil.Process(lost.pid).children(recursive=True)
    lost.kill()
    for part in parts:
        part.kill()
    assert ended(stays, tmp_path) == (0, "")
    assert [path.name for path in tmp_path.glob("finished-*")] == ["finished-0-1-1"]


def failure(status: int, message: str, file: Path | None = None, second: int = 0) -> ProcessFailure:
    """As torchrun reports it; with `file` it was recorded by the process itself, at that second."""
    if file is not None:
        said = {"message": message, "extraInfo": {"timestamp": str(second)}}
        file.write_text(json.dumps({"message": said}))
        os.utime(file, (second, second))
    result = ProcessFailure(local_rank=0, pid=1, exitcode=status, error_file=str(file))
    result.timestamp = second
    return result


@pytest.mark.slow
def test_who_lost_its_peers_is_not_who_failed(tmp_path: Path) -> None:
    lost = "RuntimeError: [../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:3"
    by_peers = failure(3, lost, tmp_path / "0", 10)
    ended_by_torchrun = failure(-signal.SIGTERM, "", second=9)
    watchdog = failure(-signal.SIGABRT, "", second=8)
    nan = failure(2, "ValueError: loss is nan", tmp_path / "3", 12)
    assert first({0: by_peers, 1: ended_by_torchrun, 2: watchdog, 3: nan}).rank == 3
    assert first({0: by_peers, 1: ended_by_torchrun, 2: failure(-signal.SIGKILL, "", second=11)}).rank == 2
    assert first({0: by_peers, 1: ended_by_torchrun}).rank == 0
    assert first({1: ended_by_torchrun}).rank == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"nodes": 0}, "greater than or equal to 1"),
        ({"nodes": 2}, "several nodes need an endpoint"),
        ({"nodes": 2, "max_nodes": 1, "endpoint": "a:1"}, "max_nodes = 1 is below nodes = 2"),
        ({"endpoint": "a"}, "endpoint"),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Launch.model_validate(settings)


def test_torchrun_is_told_what_was_set(tmp_path: Path) -> None:
    launch = Launch(
        nodes=1, max_nodes=4, processes_per_node=8, endpoint="host:29400", is_host=False, local_address="me"
    )
    words = torchrun_words(["train", "all"], launch, tmp_path)
    assert words[-3:] == ["--no-python", "train", "all"]
    assert {"--nnodes=1:4", "--nproc-per-node=8", "--rdzv-endpoint=host:29400", "--local-addr=me"} <= set(words)
    assert "--rdzv-conf=join_timeout=600,last_call_timeout=30,is_host=0" in words
    alone = torchrun_words(["train"], Launch(processes_per_node=2), tmp_path)
    assert {"--nnodes=1:1", "--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1"} <= set(alone)


def test_only_several_processes_or_restarts_need_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Launch(processes_per_node=1)
    assert not needs_launcher(alone)
    assert needs_launcher(Launch(processes_per_node=2))
    assert needs_launcher(Launch(processes_per_node=1, max_restarts=1))
    assert needs_launcher(Launch(processes_per_node=1, nodes=2, endpoint="a:1"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not needs_launcher(Launch(processes_per_node=2))


def test_a_process_knows_whether_a_launcher_started_it() -> None:
    assert not inside({})
    assert inside({"RANK": "0", "WORLD_SIZE": "1"})
    assert inside({"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"})
    assert not inside({"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"})
    assert not inside({"PET_NNODES": "2", "PET_NODE_RANK": "1"})
