from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from data.engines import WINDOW, Engine, RayCluster, in_order, map_ordered
from data.isolation import Lost


def late_when_even(number: int) -> int:
    time.sleep(0.02 if number % 2 == 0 else 0)
    return number * number


def crash_on_three(number: int) -> int:
    if number == 3:
        os._exit(7)
    return number


def test_results_come_in_the_order_of_the_items() -> None:
    assert list(map_ordered(late_when_even, iter(range(40)), Engine(num_workers=3))) == [n * n for n in range(40)]


def test_lost_item_keeps_its_place() -> None:
    found = list(map_ordered(crash_on_three, range(6), Engine()))
    assert found == [0, 1, 2, Lost("crashes the decoder (exit status 7)"), 4, 5]


def wait_when_zero(number: int) -> int:
    time.sleep(3 if number == 0 else 0)
    return number


def test_only_a_window_of_items_is_taken_ahead_of_the_oldest_answer() -> None:
    taken: list[int] = []

    def endless() -> Iterator[int]:
        for number in itertools.count():
            taken.append(number)
            yield number

    results = map_ordered(wait_when_zero, endless(), Engine(num_workers=2))
    assert next(results) == 0
    assert len(taken) <= WINDOW * 2
    results.close()  # pyright: ignore[reportAttributeAccessIssue]  # it is a generator


def test_items_are_taken_only_as_they_are_needed() -> None:
    taken: list[int] = []
    items = (taken.append(number) or number for number in range(10_000))
    results = map_ordered(crash_on_three, items, Engine(num_workers=1))
    assert next(results) == 0
    assert len(taken) <= 2
    results.close()  # pyright: ignore[reportAttributeAccessIssue]


def test_no_items_give_no_results() -> None:
    assert list(map_ordered(late_when_even, iter(()), Engine())) == []


@given(st.permutations(range(12)))
def test_any_order_of_answers_becomes_the_order_of_indices(order: list[int]) -> None:
    assert list(in_order((index, f"answer {index}") for index in order)) == [f"answer {index}" for index in range(12)]


def test_limits_carry_their_units() -> None:
    limits = Engine(max_item_s=5, max_item_gb=1.5, max_file_gb=0.25).limits
    assert limits.seconds == 5
    assert limits.resident_bytes == 1_500_000_000
    assert limits.file_bytes == 250_000_000


def test_crossed_autoscaling_bounds_are_refused() -> None:
    with pytest.raises(ValidationError, match="min_workers = 9 is more than max_workers = 4"):
        RayCluster(min_workers=9, max_workers=4)


def test_ray_that_is_not_installed_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(RuntimeError, match=r"pip install -e '\.\[ray\]'"):
        next(map_ordered(late_when_even, [1], Engine(name="ray")))
