"""Resumable training states: atomic, checksummed, tied to the settings they belong to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning

from data.files import remove, sha256, whole, write_text


class States(lightning.Callback):
    """Saves the trainer's state every few steps and finds the newest one that is whole and belongs to this run.

    A state is `step-000100.ckpt` beside `step-000100.json` (its checksum and the run's identity, written last). A
    state without its record was interrupted; one with another identity belongs to other settings. Both are deleted.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], every: int, keep: int = 2) -> None:
        self._folder = folder
        self._identity = json.loads(json.dumps(identity))
        self._every = every
        self._keep = keep

    def latest(self) -> Path | None:
        """The newest valid state; invalid ones are removed on the way."""
        for state in sorted(self._folder.glob("step-*.ckpt"), reverse=True):
            if self._valid(state):
                return state
            self._forget(state)
        return None

    def step_of(self, state: Path) -> int:
        """How many steps a state has behind it."""
        return int(state.stem.removeprefix("step-"))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 # Lightning's signature
        """Save when due. The last step needs none: the checkpoint follows at once."""
        if trainer.global_step % self._every == 0 and trainer.global_step < trainer.max_steps:
            self._save(trainer)

    def _save(self, trainer: Any) -> None:
        state = self._folder / f"step-{trainer.global_step:06d}.ckpt"
        with whole(state) as temporary:
            trainer.save_checkpoint(temporary, weights_only=False)
        record = {"sha256": sha256(state), "identity": self._identity}
        write_text(state.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
        for old in sorted(self._folder.glob("step-*.ckpt"))[: -self._keep]:
            self._forget(old)

    def _valid(self, state: Path) -> bool:
        record = state.with_suffix(".json")
        if not record.is_file():
            return False
        known = json.loads(record.read_text(encoding="utf-8"))
        return known["identity"] == self._identity and known["sha256"] == sha256(state)

    def _forget(self, state: Path) -> None:
        remove(state.with_suffix(".json"))
        remove(state)
