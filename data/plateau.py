"""When a stage has learned what it can: a smoothed quantity that has stopped improving, told from its curve alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from pydantic import Field

from data.records import Frozen


class Plateau(Frozen):
    """When a stage ends before its last step."""

    quantity: str = "loss"
    """Column of the curve: `loss` (picture and sound together), `loss_video`, `loss_audio`, `psnr_db` of the samples…"""
    better: Literal["lower", "higher"] = "lower"
    """Which way the quantity improves: `higher` for PSNR."""
    window: int = Field(default=100, gt=0)
    """Values that are averaged: enough to see every noise level several times; 1 takes each value as it is."""
    min_delta: float = Field(default=0.0, ge=0)
    """Improvement below this does not count, in the quantity's unit."""
    patience: int = Field(default=500, gt=0)
    """Steps without such an improvement after which the stage ends."""
    min_steps: int = Field(default=0, ge=0)
    """Steps before which it never ends."""


class Ended(NamedTuple):
    """Where a quantity had stopped improving."""

    step: int
    best: float
    """Smoothed."""
    best_step: int

    def words(self, plateau: Plateau) -> str:
        """Why a stage ended, for its checkpoint."""
        return (
            f"plateau at step {self.step}: {plateau.quantity} no better than {self.best:.4g} of step {self.best_step}"
            f" by {plateau.min_delta:g} in {plateau.patience} steps"
        )


def ended(rows: Iterable[Mapping[str, Any]], plateau: Plateau) -> Ended | None:
    """The first step at which a curve had been on a plateau; None where it has not been.

    A pure function of the rows, so a run that continues decides as one that never stopped, and every process alike.
    Rows without the quantity, or in which it carries no value, are passed over.

    Args:
        rows: Of the curve, by step, from the first; each with `step`.
        plateau: What counts as one.
    """
    recent: deque[float] = deque(maxlen=plateau.window)
    sign = 1.0 if plateau.better == "lower" else -1.0
    best, best_step = 0.0, -1
    for row in rows:
        value = value_of(row, plateau.quantity)
        if value is None:
            continue
        recent.append(sign * value)
        if len(recent) < plateau.window:
            continue
        step, mean = int(row["step"]), sum(recent) / len(recent)
        if best_step < 0 or mean < best - plateau.min_delta:
            best, best_step = mean, step
        elif step - best_step >= plateau.patience and step + 1 >= plateau.min_steps:
            return Ended(step, sign * best, best_step)
    return None


def value_of(row: Mapping[str, Any], quantity: str) -> float | None:
    """A row's value; a modality's loss of 0 is that of a step without it."""
    if quantity == "loss":
        parts = [value_of(row, f"loss_{modality}") for modality in ("video", "audio")]
        return sum(part for part in parts if part is not None) if None not in parts else None
    value = row.get(quantity)
    return float(value) if value or (value is not None and not quantity.startswith("loss")) else None
