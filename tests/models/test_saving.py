"""Saved states: a run that is ended anywhere goes on as if it had not been."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.preemption import Preempted
from models.saving import CURVE, Curve, Saving
from models.sft import PLAIN
from models.states import States
from tests.models.trials import drawn_of, same, stage, trained, weights_of

MIXED = {"t2va": 0.2, "fl2va_last": 0.2, "ref2va": 0.2, "a2v": 0.2, "v2a": 0.2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "every mode": ({"conditions": MIXED}, {}),
    "average, levels, micro-batches": (
        {"ema_decay": 0.7, "batch_size": 4, "noise": {"per_update": 2, "min_snr_gamma": 5.0}},
        {"micro_batch": 1},
    ),
    "adapters held near": ({"method": "lora", "lora_rank": 2, "guidance": {"form": "drift"}, "ema_decay": 0.7}, {}),
    "held near": ({"guidance": {"form": "drift"}}, {}),
    "scaled": ({"method": "lora", "lora_rank": 2, "batch_size": 1}, {"precision": "fp16"}),
}


@pytest.mark.parametrize("case", CASES)
def test_resuming_after_a_crash_equals_never_having_stopped(
    base: Path, store_folder: Path, tmp_path: Path, case: str
) -> None:
    settings, run = CASES[case]
    plan, options = stage(**settings), PLAIN.model_copy(update=run)
    whole, undisturbed = trained(base, store_folder, tmp_path / "a", plan, options)
    with pytest.raises(KeyError):
        trained(base, store_folder, tmp_path / "b", plan, options, stop_after=5)
    assert (tmp_path / "b" / "latest").read_text() == "step-00000004\n"
    continued, resumed = trained(base, store_folder, tmp_path / "b", plan, options)
    assert undisturbed.curve == resumed.curve
    assert [row["step"] for row in resumed.curve] == [step for step in range(6) for _ in range(plan.noise.per_update)]
    if case == "every mode":
        assert len({row["condition"] for row in resumed.curve}) > 3
    assert same(weights_of(whole), weights_of(continued))
    assert (plan.ema_decay is None) == (not resumed.average)
    assert same(undisturbed.average, resumed.average)
    if case == "held near":
        assert same(dict(undisturbed.first.state_dict()), dict(resumed.first.state_dict()))
    if case == "scaled":
        assert undisturbed.scaler.state_dict() == resumed.scaler.state_dict()


def test_the_scaler_goes_on_where_it_was(base: Path, store_folder: Path, tmp_path: Path) -> None:
    options, drawn = PLAIN.model_copy(update={"precision": "fp16"}), [drawn_of("t2va", 1)] * 6
    scales: list[float] = []

    def overflow(module: Any) -> None:
        """Of the first gradient of every attempt that begins anew."""
        update = module._step
        first = next(module.transformer.parameters())
        first.register_hook(lambda gradient: gradient * (float("inf") if not module.curve else 1.0))

        def noting(optimiser: Any) -> None:
            update(optimiser)
            scales.append(module.scaler.get_scale())

        module._step = noting

    plan = stage()
    with pytest.raises(KeyError):
        trained(base, store_folder, tmp_path, plan, options, drawn=drawn, tamper=overflow, stop_after=5)
    trained(base, store_folder, tmp_path, plan, options, drawn=drawn, tamper=overflow)
    assert scales == [2.0**15] * (5 + 2)


def test_another_micro_batch_and_recomputation_go_on_with_the_same_run(
    base: Path, store_folder: Path, tmp_path: Path
) -> None:
    drawn, plan = [drawn_of("t2va", 0, 1, 2)] * 6, stage()
    double: dict[str, Any] = {"drawn": drawn, "change": lambda family: family.transformer.double()}
    whole, _ = trained(base, store_folder, tmp_path / "a", plan, **double)
    with pytest.raises(KeyError):
        trained(base, store_folder, tmp_path / "b", plan, **double, stop_after=5)
    other = PLAIN.model_copy(update={"micro_batch": 2, "recompute": "blocks"})
    continued, resumed = trained(base, store_folder, tmp_path / "b", plan, other, **double)
    assert len(resumed.curve) == 6
    left, right = weights_of(whole), weights_of(continued)
    assert all(torch.allclose(left[name], right[name], rtol=0, atol=1e-9) for name in left)


def test_states_of_other_settings_or_altered_bytes_are_not_taken(
    base: Path, store_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyError):
        trained(base, store_folder, tmp_path, stage(), stop_after=5)
    identity = {"plan": stage().model_dump(mode="json")}
    found = States(tmp_path, identity).latest()
    assert found is not None
    assert found.step == 4
    with next((tmp_path / "step-00000004").glob("*.safetensors")).open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"\x7f")
    found = States(tmp_path, identity).latest()
    assert found is not None
    assert found.step == 2
    assert "state refused" in capfd.readouterr().err
    _, module = trained(base, store_folder, tmp_path, stage(learning_rate=1e-3))
    assert "learning_rate is 0.001 here and 0.003 there" in capfd.readouterr().err
    assert [row["step"] for row in module.curve] == list(range(6))
    assert max(row["learning_rate"] for row in module.curve) <= 1e-3


@pytest.fixture
def crashed(base: Path, store_folder: Path, tmp_path: Path) -> Callable[[], Any]:
    """A run of two noise levels that has crashed in its sixth step; the answer goes on with it."""
    plan = stage(batch_size=4, noise={"per_update": 2})
    drawn = [drawn_of("t2va", 0, 1, 2, 3)] * 6
    with pytest.raises(KeyError):
        trained(base, store_folder, tmp_path, plan, drawn=drawn, stop_after=5)
    return lambda: trained(base, store_folder, tmp_path, plan, drawn=drawn)


@pytest.mark.parametrize("lost", ["file", "last row", "row in the middle", "half a row"])
def test_a_run_whose_curve_is_not_whole_says_so(crashed: Callable[[], Any], tmp_path: Path, lost: str) -> None:
    path = tmp_path / CURVE
    lines = path.read_text().splitlines(keepends=True)
    assert [json.loads(line)["step"] for line in lines] == [0, 0, 1, 1, 2, 2, 3, 3]
    kept = {
        "last row": lines[:-1],
        "row in the middle": lines[:3] + lines[4:],
        "half a row": [*lines[:-1], lines[-1][:9]],
    }
    if lost == "file":
        path.unlink()
    else:
        path.write_text("".join(kept[lost]))
    with pytest.raises(RuntimeError, match=rf"{CURVE} lacks steps before 4; remove {tmp_path}"):
        crashed()


def test_rows_behind_the_state_are_cut_off(crashed: Callable[[], Any], tmp_path: Path) -> None:
    with (tmp_path / CURVE).open("a") as stream:
        stream.write('{"step": 4, "loss_video": 99.0}\n{"step": 4, "lo')
    _, module = crashed()
    assert [row["step"] for row in module.curve] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert max(row["loss_video"] for row in module.curve) < 99


def test_a_curve_is_written_once_row_by_row(tmp_path: Path) -> None:
    rows: list[Any] = [{"step": step, "loss_video": step / 7} for step in range(5)]
    curve = Curve(tmp_path / "run" / CURVE)
    assert curve.cut(0, 0) == []
    for count in (2, 2, 5):
        curve.write(rows[:count], flush=True)
    again = Curve(tmp_path / "run" / CURVE)
    assert again.cut(3, 3) == rows[:3]
    again.write(rows, flush=False)
    assert Curve(tmp_path / "run" / CURVE).cut(5, 5) == rows


def test_a_run_that_is_told_to_end_saves_there_and_goes_on_as_if_it_had_not(
    base: Path, store_folder: Path, tmp_path: Path
) -> None:
    plan, asked = stage(ema_decay=0.7), iter(range(100))
    whole, undisturbed = trained(base, store_folder, tmp_path / "a", plan)
    with pytest.raises(Preempted, match=r"train: asked to stop after step 3; its state is saved"):
        trained(base, store_folder, tmp_path / "b", plan, told=lambda: next(asked) == 2)
    assert (tmp_path / "b" / "latest").read_text() == "step-00000003\n"
    continued, resumed = trained(base, store_folder, tmp_path / "b", plan)
    assert resumed.curve == undisturbed.curve
    assert same(weights_of(whole), weights_of(continued))
    assert same(undisturbed.average, resumed.average)


def test_a_run_that_is_told_to_end_in_its_last_step_just_ends(base: Path, store_folder: Path, tmp_path: Path) -> None:
    asked = iter(range(100))
    _, module = trained(base, store_folder, tmp_path, stage(num_steps=3), told=lambda: next(asked) == 2)
    found = next(item for item in module.trainer.callbacks if isinstance(item, Saving))
    assert found.preempted_at is None
    assert len(module.curve) == 3
