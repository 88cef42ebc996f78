"""Several processes compute what one does, and go on as if nothing had happened when one is killed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from data.stage import Stage
from tests.models.training_runs import result_of, run, stage_of, together

LEVELS = {"noise": {"per_update": 2}}


def trained(
    base: Path, store: Path, work: Path, stage: Stage, size: int, **running: Any
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    work.mkdir()
    together(size, run, base, store, work, stage, running)
    return result_of(work)


def assert_equal_to(one: Any, other: Any, tolerance: float = 1e-5) -> None:
    (weights, curve), (expected, curve_expected) = one, other
    assert weights.keys() == expected.keys()
    for name in weights:
        scale = expected[name].abs().max()
        assert (weights[name] - expected[name]).abs().max() <= tolerance * scale, name
    assert [row["step"] for row in curve] == [row["step"] for row in curve_expected]
    for row, row_expected in zip(curve, curve_expected, strict=True):
        assert row.keys() == row_expected.keys()
        for key, value in row_expected.items():
            measured = key.startswith("loss") or key == "gradient_norm"
            assert row[key] == (pytest.approx(value, rel=tolerance, abs=1e-6) if measured else value), key


@pytest.fixture(scope="module")
def alone(base: Path, store_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trained(base, store_folder, tmp_path_factory.mktemp("alone") / "run", stage_of(**LEVELS), 1)


@pytest.mark.parametrize(
    "running",
    [
        {"strategy": "ddp", "micro_batch": 1},
        {"strategy": "fsdp2", "recompute": "blocks"},
        pytest.param({"strategy": "fsdp2", "micro_batch": 1}, marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_what_one_does(
    base: Path, store_folder: Path, tmp_path: Path, alone: Any, running: dict[str, Any]
) -> None:
    assert_equal_to(trained(base, store_folder, tmp_path / "two", stage_of(**LEVELS), 2, **running), alone)


def killed_and_continued(
    base: Path, store: Path, work: Path, stage: Stage, sizes: list[int], kills: list[int], *, double: bool = False
) -> Any:
    """Run with kill -9 in each of some steps, the n-th attempt with the n-th number of processes, until it is done."""
    work.mkdir()
    for attempt in range(len(kills) + 1):
        kill_at = kills[attempt] if attempt < len(kills) else None
        try:
            together(sizes[attempt % len(sizes)], run, base, store, work, stage, {"double": double}, 2, kill_at)
        except (ProcessExitedException, ProcessRaisedException):
            assert kill_at is not None
    starts = [int(line) for line in (work / "starts").read_text().split()]
    assert len(starts) == len(kills) + 1
    for start, kill in zip(starts[1:], kills, strict=True):  # a state every second step; the last may not be whole
        assert kill - kill % 2 - 2 <= start <= kill
    return result_of(work)


def assert_same(one: Any, other: Any) -> None:
    assert one[1] == other[1]
    assert all(torch.equal(one[0][name], tensor) for name, tensor in other[0].items())


@pytest.mark.parametrize("size", [1, 2])
def test_killed_runs_end_as_undisturbed_ones(base: Path, store_folder: Path, tmp_path: Path, size: int) -> None:
    stage = stage_of(num_steps=12, ema_decay=0.9)
    undisturbed = killed_and_continued(base, store_folder, tmp_path / "whole", stage, [size], [])
    kills = sorted(random.Random(size).sample(range(12), 2))
    assert_same(killed_and_continued(base, store_folder, tmp_path / "killed", stage, [size], kills), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_runs_killed_at_twenty_random_steps_end_as_undisturbed_ones(
    base: Path, store_folder: Path, tmp_path: Path, size: int
) -> None:
    stage = stage_of(num_steps=60, ema_decay=0.9)
    undisturbed = killed_and_continued(base, store_folder, tmp_path / "whole", stage, [size], [])
    kills = sorted(random.Random(size).sample(range(60), 20))
    assert_same(killed_and_continued(base, store_folder, tmp_path / "killed", stage, [size], kills), undisturbed)


def test_another_number_of_processes_continues_the_same_batches(base: Path, store_folder: Path, tmp_path: Path) -> None:
    stage = stage_of(num_steps=12)
    undisturbed = trained(base, store_folder, tmp_path / "whole", stage, 1)
    changed = killed_and_continued(base, store_folder, tmp_path / "changed", stage, [2, 1, 2], [5, 9], double=True)
    assert_equal_to(changed, undisturbed)
