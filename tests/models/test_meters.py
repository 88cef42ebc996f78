"""Meters against a clock that the test holds: rates, waiting, utilisation, memory, slow processes; and under Lightning."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from models.meters import Memory, Meters, memory_of, slow_ranks, small_work
from models.ranks import Ranks

GIB = 2**30
CPU = torch.device("cpu")


class Clock:
    """Stands still until it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Machine:
    """Memory as the test says."""

    def __init__(self, *, taken: int = 2 * GIB) -> None:
        self.taken = taken

    def __call__(self, device: torch.device) -> Memory:
        return Memory(GIB, self.taken - GIB // 2, GIB // 2, self.taken, 10 * GIB)


def done(step: int, **row: Any) -> dict[str, Any]:
    return {
        "step": step,
        "row": {"step": step, "loss_video": 0.5, "condition": "t2va", **row},
        "num_clips": 4,
        "num_rows": 1000,
        "media_s": 8.0,
        "forwards": 2,
    }


def drive(
    meters: Meters, clock: Clock, steps: range, *, wait: float, compute: float, rest: float, other: float
) -> None:
    """Steps of known lengths."""
    nothing: Any = None
    for step in steps:
        clock.now += wait
        meters.on_train_batch_start(nothing, nothing, None, step)
        clock.now += compute
        meters.on_before_backward(nothing, nothing, None)
        clock.now += rest
        meters.on_train_batch_end(nothing, nothing, done(step), None, step)
        clock.now += other
        meters.last.on_train_batch_end(nothing, nothing, done(step), None, step)


def made(clock: Clock, **changes: Any) -> Meters:
    settings: dict[str, Any] = {"log_every": 5, "clock": clock, "memory": Machine()}
    return Meters(20, Ranks(), CPU, **{**settings, **changes})


def test_rates_shares_and_time_left_are_those_of_the_steps() -> None:
    clock, told = Clock(), list[tuple[int, Mapping[str, float]]]()
    meters = made(clock, sinks=[lambda step, numbers: told.append((step, numbers))])
    drive(meters, clock, range(10), wait=1.0, compute=2.0, rest=1.0, other=4.0)
    assert [step for step, _ in told] == [4, 9]
    numbers = told[1][1]
    assert numbers["step_s"] == pytest.approx(4.0)
    assert numbers["clips_per_s"] == pytest.approx(1.0)
    assert numbers["rows_per_s"] == pytest.approx(250.0)
    assert numbers["media_s_per_s"] == pytest.approx(2.0)
    assert numbers["loader_share"] == pytest.approx(0.25)
    assert numbers["compute_s/0"] == pytest.approx(2.0)
    # the fifth step's other work falls behind its reading, so the second interval has five and the first four
    assert numbers["other_share"] == pytest.approx(20 / 40)
    assert numbers["eta_s"] == pytest.approx(8.0 * 10)
    assert numbers["loss_video"] == 0.5
    assert "condition" not in numbers
    assert meters.words() == {"clips/s": "1.00", "wait": "25%", "left": "0:01:20"}


def test_a_run_that_continues_logs_at_the_same_steps_and_always_at_the_last() -> None:
    clock = Clock()
    meters = made(clock, log_every=7)
    drive(meters, clock, range(10, 20), wait=0, compute=1, rest=0, other=0)
    assert [reading.step for reading in meters.readings] == [13, 19]
    assert meters.readings[1].numbers["eta_s"] == 0


def test_utilisation_is_operations_over_time_and_peak_or_missing_with_the_reason() -> None:
    clock = Clock()
    meters = made(clock, flops=2e12, peak_tflops=16.0)
    drive(meters, clock, range(5), wait=0.5, compute=0.5, rest=1.0, other=9.0)
    assert meters.readings[0].numbers["mfu"] == pytest.approx(4 * 2e12 / (2.0 * 16e12))
    assert meters.words()["MFU"] == "25%"
    by_rows = made(clock, flops=lambda outputs: outputs["num_rows"] * 1e9, peak_tflops=1.0)
    drive(by_rows, clock, range(5), wait=0, compute=4.0, rest=0, other=0)
    assert by_rows.readings[0].numbers["mfu"] == pytest.approx(1000 * 1e9 / 4e12)
    for changes, words in (({"flops": 1.0}, "set peak_tflops"), ({"peak_tflops": 1.0}, "operations of a step")):
        blind = made(clock, **changes)
        drive(blind, clock, range(5), wait=0, compute=1, rest=0, other=0)
        assert "mfu" not in blind.readings[0].numbers
        assert words in blind.readings[0].missing["mfu"]


def test_memory_is_reported_and_its_alert_comes_once_and_names_the_setting() -> None:
    clock, machine = Clock(), Machine()
    meters = made(clock, memory=machine, memory_alert_share=0.8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drive(meters, clock, range(5), wait=0, compute=1, rest=0, other=0)
    numbers = meters.readings[0].numbers
    assert numbers["memory_used_bytes/0"] == GIB
    assert numbers["memory_peak_bytes/0"] == 1.5 * GIB
    assert numbers["memory_unused_bytes/0"] == GIB / 2
    assert numbers["memory_share/0"] == pytest.approx(0.2)
    machine.taken = 9 * GIB
    with pytest.warns(UserWarning, match=r"9\.0 of 10\.0 GiB \(90%\); limit memory_alert_share = 0\.8") as caught:
        drive(meters, clock, range(5, 20), wait=0, compute=1, rest=0, other=0)
    assert len(caught) == 1


def test_a_processs_memory_is_what_the_system_says() -> None:
    ballast = torch.ones(64 * 2**20)  # 256 MiB
    found = memory_of(CPU)
    assert found.used_bytes > ballast.nbytes
    assert found.used_bytes <= found.peak_bytes == found.taken_bytes < found.total_bytes
    assert found.total_bytes == psutil.virtual_memory().total
    assert found.unused_bytes == 0


def test_without_a_word_from_training_the_compute_time_is_missing_and_not_zero() -> None:
    clock = Clock()
    meters = made(clock, log_every=1)
    nothing: Any = None
    meters.on_train_batch_start(nothing, nothing, None, 0)
    clock.now += 1
    meters.on_train_batch_end(nothing, nothing, done(0), None, 0)
    assert "compute_s/0" not in meters.readings[0].numbers
    assert "no backward pass" in meters.readings[0].missing["compute_s/0"]


def test_only_the_last_backward_pass_of_a_step_ends_own_computing() -> None:
    clock = Clock()
    meters = made(clock, log_every=1)
    nothing: Any = None
    meters.on_train_batch_start(nothing, nothing, None, 0)
    for _ in range(3):  # micro-batches
        clock.now += 2
        meters.on_before_backward(nothing, nothing, None)
        clock.now += 1
    meters.on_train_batch_end(nothing, nothing, done(0), None, 0)
    assert meters.readings[0].numbers["compute_s/0"] == pytest.approx(8.0)
    assert meters.readings[0].numbers["step_s"] == pytest.approx(9.0)


def test_where_weights_are_gathered_each_does_a_small_work_alone_which_is_no_part_of_the_step() -> None:
    clock = Clock()

    def work(device: torch.device) -> None:
        clock.now += 7.0

    meters = made(clock, log_every=2, sharded=True, probe=work)
    drive(meters, clock, range(4), wait=0, compute=2.0, rest=1.0, other=0)
    numbers = meters.readings[1].numbers
    assert numbers["compute_s/0"] == pytest.approx(7.0)
    assert numbers["step_s"] == pytest.approx(3.0)
    assert numbers["loader_share"] == 0.0
    assert float(small_work(CPU)[0, 0]) == pytest.approx(1 / 256)  # powers of the mean are the mean


def test_slow_ranks_are_those_beyond_the_factor() -> None:
    numbers = {"compute_s/0": 1.0, "compute_s/1": 1.1, "compute_s/2": 1.6, "step_s": 9.0}
    assert slow_ranks(numbers, 1.3) == {2: pytest.approx(1.6 / 1.1)}
    assert slow_ranks(numbers, 1.5) == {}
    assert slow_ranks({"step_s": 1.0}, 1.3) == {}


def _one_of_two(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    clock, told = Clock(), list[Any]()
    meters = Meters(
        5, Ranks(), CPU, log_every=5, clock=clock, memory=Machine(taken=(2 + rank) * GIB), flops=1e12, peak_tflops=1.0,
        sinks=[lambda step, numbers: told.append((step, dict(numbers)))],
    )  # fmt: skip
    # a collective makes both steps take 4 s, whoever is slow
    drive(meters, clock, range(5), wait=0.0, compute=1.0 + 2.0 * rank, rest=3.0 - 2.0 * rank, other=0.0)
    Path(folder, f"{rank}.json").write_text(json.dumps([meters.readings[0].numbers, len(told)]))
    dist.destroy_process_group()


def test_two_processes_find_the_slow_one_that_step_time_hides(tmp_path: Path) -> None:
    mp.spawn(_one_of_two, (str(tmp_path),), nprocs=2)
    (first, told_first), (second, told_second) = (
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)
    )
    assert first == second
    assert (told_first, told_second) == (1, 0)
    assert first["step_s"] == pytest.approx(4.0)
    assert (first["compute_s/0"], first["compute_s/1"]) == (pytest.approx(1.0), pytest.approx(3.0))
    assert slow_ranks(first, 1.3) == {1: pytest.approx(1.5)}
    assert first["memory_share/1"] == pytest.approx(0.3)
    assert first["mfu"] == pytest.approx(4 * 1e12 / (4.0 * 1e12 * 2))


class Manual(lightning.LightningModule):
    """One batch is one step, as in training here."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimiser: Any = self.optimizers()
        loss = self.layer(batch).square().mean()
        optimiser.zero_grad()
        self.manual_backward(loss)
        optimiser.step()
        return done(batch_idx, loss_video=float(loss.detach()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layer.parameters(), 0.1)


def test_lightning_hands_over_what_the_step_returned_and_calls_the_last_behind_the_others() -> None:
    clock, told = Clock(), list[Any]()
    meters = Meters(
        6, Ranks(), CPU, log_every=3, clock=clock, memory=Machine(), sinks=[lambda *item: told.append(item)]
    )

    class Slow(lightning.Callback):
        def on_train_batch_end(self, *arguments: Any) -> None:
            clock.now += 5

    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=6, logger=False, enable_checkpointing=False,
        enable_model_summary=False, enable_progress_bar=False, callbacks=[meters, Slow(), meters.last],
    )  # fmt: skip
    trainer.fit(Manual(), torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=None))
    assert [step for step, _ in told] == [2, 5]
    assert told[0][1]["loss_video"] > told[1][1]["loss_video"] > 0
    assert meters.readings[1].numbers["loader_share"] == 0.0
    assert meters.readings[1].numbers["compute_s/0"] == 0.0  # the hook was called; the clock stood still
    assert meters.readings[1].numbers["other_share"] == pytest.approx(1.0)
