from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from data import workers
from data.isolation import Limits, Lost
from data.workers import Pool, map_isolated

ROOT = Path(__file__).parents[2]


def square(number: int) -> int:
    return number * number


def misbehave(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGSEGV)
    if number == 5:
        time.sleep(60)
    return number * number


def crash_once(marker: str) -> str:
    if not Path(marker).exists():
        Path(marker).touch()
        os._exit(9)
    return "done"


def complain(number: int) -> int:
    raise KeyError(f"no {number}")


@pytest.mark.parametrize("num_workers", [1, 3])
def test_every_item_gets_its_own_answer(num_workers: int) -> None:
    assert dict(map_isolated(square, range(10), num_workers, 30)) == {number: number**2 for number in range(10)}


def test_a_crash_and_a_hang_cost_one_item_each() -> None:
    answers = dict(map_isolated(misbehave, range(8), 2, 3))
    assert answers[3] == Lost("crashes the decoder (signal 11)")
    assert answers[5] == Lost("takes longer than 3 s")
    assert {key: value for key, value in answers.items() if key not in {3, 5}} == {n: n * n for n in (0, 1, 2, 4, 6, 7)}


def test_an_item_whose_worker_was_killed_once_is_tried_again(tmp_path: Path) -> None:
    assert list(map_isolated(crash_once, [str(tmp_path / "seen")], 1, 30)) == [(0, "done")]


def test_an_error_of_the_function_is_raised() -> None:
    with pytest.raises(KeyError, match="no 0"):
        list(map_isolated(complain, range(4), 1, 30))


def test_nothing_to_do_needs_no_worker() -> None:
    assert list(map_isolated(square, [], 2, 30)) == []


def say_and_sleep(marker: str) -> None:
    part = Path(f"{marker}.part")
    part.write_text(str(os.getpid()))
    part.rename(marker)
    time.sleep(60)


def hire(marker: str) -> None:
    list(map_isolated(say_and_sleep, [marker], 1, 120))


def test_a_busy_worker_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    marker = tmp_path / "busy"
    parent = multiprocessing.get_context("spawn").Process(target=hire, args=(str(marker),))
    parent.start()
    while not marker.is_file():
        assert parent.is_alive()
        time.sleep(0.05)
    worker = psutil.Process(int(marker.read_text()))
    parent.kill()
    parent.join()
    deadline = time.monotonic() + 10
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_dismissed_workers_leave_nothing_for_others_to_put_away(tmp_path: Path) -> None:
    script = tmp_path / "draws_bars.py"
    script.write_text(
        "from tqdm import tqdm\nfrom data.workers import map_isolated\n"
        "def work(number):\n    return sum(tqdm(range(number), disable=None))\n"
        "if __name__ == '__main__':\n    print(sorted(dict(map_isolated(work, [3, 4], 2, 60)).values()))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[3, 6]\n"
    assert "leaked" not in done.stderr


LIMITS = Limits(seconds=4, resident_bytes=300_000_000, file_bytes=5_000_000, options="engine")


def segfault() -> None:
    ctypes.string_at(0)


def hang_in_c() -> None:
    """Hold the interpreter in a C call, so that no thread and no signal handler of the child ever runs."""
    ctypes.PyDLL(None).sleep(60)


def swell() -> None:
    """Take memory bit by bit, as a decoder does that is told to keep ever more frames."""
    kept: list[bytearray] = []
    while True:
        kept.append(bytearray(b"x" * 1_000_000))


def demand_at_once() -> None:
    """Ask for what a lying header promises, and never touch it."""
    np.empty(100_000_000_000, dtype=np.uint8)


def fork_and_return() -> None:
    os.fork()


def fork_and_stay() -> None:
    """Leave a copy behind that holds every pipe, and die."""
    if os.fork() == 0:
        time.sleep(60)
    os._exit(3)


def fill_stdout() -> None:
    for descriptor in (1, 2):
        os.write(descriptor, b"noise " * 1_000_000)


def write_without_end() -> None:
    with tempfile.TemporaryFile() as file:
        while True:
            file.write(bytes(1_000_000))


def return_what_nobody_can_read() -> object:
    return lambda: None


HOSTILE: dict[Callable[[], object], str] = {
    segfault: "crashes the decoder (signal 11)",
    hang_in_c: "takes longer than 4 s; limit engine.max_item_s",
    swell: "needs more than 0.3 GB of memory; limit engine.max_item_gb",
    demand_at_once: "needs more than 0.3 GB of memory; limit engine.max_item_gb",
    fork_and_stay: "crashes the decoder (exit status 3)",
    write_without_end: "writes a file of more than 0.005 GB; limit engine.max_file_gb",
}


def act(action: Callable[[], object] | int) -> object:
    return action() if callable(action) else action


@pytest.mark.parametrize("action", HOSTILE, ids=lambda action: action.__name__)
def test_hostile_item_costs_itself_alone(action: Callable[[], object]) -> None:
    before = psutil.virtual_memory().available
    with Pool(act, 1, LIMITS) as pool:
        answers = dict(pool.answers([1, action, 2]))
    assert answers == {0: 1, 1: Lost(HOSTILE[action]), 2: 2}
    assert psutil.virtual_memory().available > before - 2_000_000_000


def test_copy_that_a_function_leaves_answers_for_nobody() -> None:
    with Pool(act, 1, LIMITS) as pool:
        assert dict(pool.answers([fork_and_return, 1, 2])) == {0: None, 1: 1, 2: 2}


def test_answer_that_cannot_be_sent_is_an_error_that_names_it() -> None:
    with Pool(act, 1, LIMITS) as pool, pytest.raises((AttributeError, RuntimeError), match="lambda"):
        list(pool.answers([return_what_nobody_can_read]))


def test_nothing_a_child_says_reaches_us(capfd: pytest.CaptureFixture[str]) -> None:
    with Pool(act, 1, LIMITS) as pool:
        assert dict(pool.answers([fill_stdout, 1])) == {0: None, 1: 1}
    assert capfd.readouterr() == ("", "")


def leave_behind(name: str) -> str:
    """A temporary file that nobody deletes, and a process that nobody waits for."""
    Path(tempfile.gettempdir(), name).write_text("left")
    return f"{tempfile.gettempdir()} {subprocess.Popen(['sleep', '60']).pid}"


def running(number: int) -> bool:
    try:
        return psutil.Process(number).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def test_files_and_processes_left_behind_go_with_the_child() -> None:
    with Pool(leave_behind, 1, LIMITS) as pool:
        ((_, said),) = pool.answers(["film"])
        folder, number = str(said).split()
        assert (Path(folder) / "film").is_file()
    assert not Path(folder).parent.exists()
    end = time.monotonic() + 10  # whoever is killed may still be listed for a moment
    while time.monotonic() < end and running(int(number)):
        time.sleep(0.01)
    assert not running(int(number))


def test_temporary_files_of_a_killed_process_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = tmp_path / f"soundstage-{socket.gethostname()}-{dead.pid}-abc" / "0"
    left.mkdir(parents=True)
    ours = tmp_path / f"soundstage-{socket.gethostname()}-{os.getpid()}-abc"
    ours.mkdir()
    with Pool(square, 1, LIMITS):
        assert not left.parent.exists()
        assert ours.exists()


def where_and_limits(_: int) -> tuple[str, int]:
    return str(Path.cwd()), resource.getrlimit(resource.RLIMIT_CORE)[0]


def test_child_works_where_we_do_and_dumps_no_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert list(map_isolated(where_and_limits, [0], 1, 30)) == [(0, (str(tmp_path), 0))]


def threads(_: int) -> list[str | None]:
    return [os.environ.get(name) for name in workers.THREADS]


def test_child_computes_on_one_thread_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in workers.THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert list(map_isolated(threads, [0], 1, 30)) == [(0, ["3", "1", "1"])]
    assert threads(0) == ["3", None, None]


def keep(number: int, _kept: list[bytes] = []) -> int:  # noqa: B006  # the leak is the point
    """Leak 40 MB an item."""
    _kept.append(os.urandom(40_000_000))
    return os.getpid()


def test_child_that_has_grown_is_replaced_before_it_hurts_its_next_item() -> None:
    with Pool(keep, 1, LIMITS) as pool:
        processes = dict(pool.answers(range(16)))
    assert not [answer for answer in processes.values() if isinstance(answer, Lost)]
    assert len(set(processes.values())) > 1


def test_child_gets_its_time_anew_with_every_item() -> None:
    with Pool(nap, 1, Limits(1.5)) as pool:
        assert dict(pool.answers([1.0, 1.0, 1.0])) == {0: 1.0, 1: 1.0, 2: 1.0}


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds
