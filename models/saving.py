"""When a run's state is saved, and where it goes on: every few steps, at the end, and from the newest whole one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import lightning

from data.files import sync
from models.preemption import Preemption
from models.ranks import Ranks
from models.sft import Row, SupervisedFineTuning
from models.state_tensors import restore, tensors_of
from models.states import State, States

CURVE = "curve.jsonl"
CLOSE_S = 15.0
"""How long a run that was told to end waits for its last state: less than the 30 s that clusters give, s."""


class Curve:
    """The loss curve on disk, a line a row; states need not hold it, it is cut to their step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = 0

    def cut(self, step: int, num_rows: int) -> list[Row]:
        """Keep the `num_rows` rows of the steps before `step`, and give them.

        Raises:
            RuntimeError: some are missing.
        """
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True) if self._path.is_file() else []
        rows: list[Row] = []
        size = 0
        for line in lines:
            try:
                row = cast(Row, json.loads(line)) if line.endswith("\n") else None
            except ValueError:
                row = None
            if row is None or int(row["step"]) >= step:
                break
            rows.append(row)
            size += len(line.encode())
        if len(rows) != num_rows:
            raise RuntimeError(f"{self._path} lacks steps before {step}; remove {self._path.parent} to begin anew")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.truncate(size)
        self._written = len(rows)
        return rows

    def write(self, rows: list[Row], *, flush: bool) -> None:
        """Add the rows that are not there yet; `flush` brings them to the disk."""
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, sort_keys=True) + "\n" for row in rows[self._written :])
            file.flush()
            if flush:
                os.fsync(file.fileno())
        self._written = len(rows)
        if flush:
            sync(self._path.parent, shallow=True)


class Saving(lightning.Callback):
    """Restores the newest whole state of this run, then saves one every few steps and when the run ends or is told to.

    Args:
        folder: Where states lie, seen by all processes.
        identity: Settings that a state must share.
        every: Steps between states.
        keep: Whole states that stay.
        told: Whether the run is told to end, the same in all processes; asked once a step. None listens to signals.
        timeout_s: How long processes wait for each other, s.
    """

    def __init__(
        self,
        folder: Path,
        identity: dict[str, Any],
        every: int,
        keep: int,
        told: Callable[[], bool] | None = None,
        timeout_s: float = 1800,
    ) -> None:
        self._folder, self._identity, self._every, self._keep = folder, identity, every, keep
        self._told, self._timeout_s = told, timeout_s
        self._ranks: Ranks | None = None
        self._preemption: Preemption | None = None
        self._states: States | None = None
        self._curve = Curve(folder / CURVE)
        self._ends = False
        self.preempted_at: int | None = None
        """Updates behind the run when it was told to end."""
        self.whole = True
        """Whether the state that it then saved is whole."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Go on from the newest whole state; the process group and the optimiser are there by now."""
        module = cast(SupervisedFineTuning, pl_module)
        self._ranks = Ranks(self._timeout_s)
        self._states = States(self._folder, self._identity, self._keep, self._timeout_s)
        state = self._states.latest()
        if state is not None:
            self._restore(trainer, module, state)
        first = state.step if state is not None else 0
        if trainer.is_global_zero:
            module.curve = self._curve.cut(first, state.facts["num_rows"] if state is not None else 0)
        trainer.datamodule.first_step = first
        if module.ended:
            trainer.datamodule.num_steps = first

    def _restore(self, trainer: Any, module: SupervisedFineTuning, state: State) -> None:
        assert self._states is not None
        restore(self._states, state, module.transformer, trainer.optimizers[0], module.average)
        module.ended = state.facts["ended"]
        if module.scaler:
            module.scaler.load_state_dict(state.facts["scaler"])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 # Lightning's signature
        """Hear signals from here on: Lightning has installed its own handlers before."""
        if self._told is None:
            self._preemption = Preemption()

    def _is_told(self) -> bool:
        """Whether this run, or any of its processes, is told to end."""
        if self._preemption is not None and self._ranks is not None:
            return self._preemption.asked(self._ranks)
        return self._told is not None and self._told()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 # Lightning's signature
        """Save when due, and after the last step: samples and the checkpoint, which follow, take long."""
        module, step = cast(SupervisedFineTuning, pl_module), int(outputs["step"]) + 1
        self._ends = step >= module.stage.num_steps or trainer.should_stop
        told = self._is_told() and not self._ends
        if self._ends:
            self._if_possible(lambda: self._save(trainer, module, step))
        elif told or step % self._every == 0:
            self._save(trainer, module, step)
        if told:
            assert self._states is not None
            self.preempted_at, self.whole = step, self._states.close(CLOSE_S)
            trainer.should_stop = True

    def _save(self, trainer: Any, module: SupervisedFineTuning, step: int) -> None:
        assert self._states is not None
        if trainer.is_global_zero:
            self._curve.write(module.curve, flush=True)
        scaler = module.scaler.state_dict() if module.scaler else None
        facts = {"scaler": scaler, "num_rows": len(module.curve), "ended": module.ended}
        tensors = tensors_of(module.transformer, trainer.optimizers[0], module.average)
        self._states.save(step, tensors, facts)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 # Lightning's signature
        """Wait for what is being written."""
        self._hear_no_more()
        if self._states is not None and self.preempted_at is None:
            self._if_possible(self._states.finish)

    def _if_possible(self, save: Callable[[], None]) -> None:
        """Save, and see a failure as no reason to lose the checkpoint, where it follows."""
        try:
            save()
        except RuntimeError as error:
            if not self._ends:
                raise
            sys.stderr.write(f"train: {error}; the checkpoint is written without it\n")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002 # Lightning's signature
        """Wait a little for what is being written: who goes on in this process must not find it half there."""
        self._hear_no_more()
        if self._states is not None and self.preempted_at is None:
            self._states.close(CLOSE_S)

    def _hear_no_more(self) -> None:
        if self._preemption is not None:
            self._preemption.close()
            self._preemption = None
