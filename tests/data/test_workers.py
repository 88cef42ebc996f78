from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from data.workers import Lost, map_isolated


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
