from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from data.workers import Lost, map_isolated

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
