"""Which of a model's transformers serves which conditioning modes.

MiniMax-H3 is released with two of the same shape and other weights: `transformer` for text and keyframes, and
`transformer_ref` for references. Adapters and checkpoints belong to the one that they were trained on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from data import conditions
from data.conditions import Mode
from models.families import family_of

ORDINARY, WITH_REFERENCES = "transformer", "transformer_ref"
REFERENCE_MODES: tuple[Mode, ...] = ("ref2va",)


def partitions_of(base: Path) -> dict[str, tuple[Mode, ...]]:
    """The transformers of the model in `base`, by folder, and the modes that each serves; raises as `family_of`."""
    from models.families import h3_layout  # not before: it loads diffusers

    known = {ORDINARY: conditions.MODES}
    if family_of(base) == "h3":
        known = {ORDINARY: h3_layout.MODES}
        if (base / WITH_REFERENCES).is_dir():
            others: tuple[Mode, ...] = tuple(mode for mode in h3_layout.MODES if mode not in REFERENCE_MODES)
            known = {ORDINARY: others, WITH_REFERENCES: REFERENCE_MODES}
    return {name: modes for name, modes in known.items() if (base / name).is_dir()}


def partition_for(base: Path, modes: Iterable[Mode]) -> str:
    """The one transformer of `base` that serves all of `modes`.

    Raises:
        RuntimeError: there is no model in `base`, or the transformer is not there.
        ValueError: the modes are served by two, or the family has no such mode.
    """
    from models.families import h3_layout  # not before: it loads diffusers

    known, found = partitions_of(base), dict[str, list[Mode]]()
    for mode in modes:
        if family_of(base) == "h3":
            h3_layout.check_mode(mode)
        name = next((name for name, served in known.items() if mode in served), None)
        if name is None:
            has = ", ".join(f"{name} for {' '.join(served)}" for name, served in known.items()) or "none"
            raise RuntimeError(f"{base} has no transformer for {mode} (it has {has}); add its folder, or change `base`")
        found.setdefault(name, []).append(mode)
    if len(found) > 1:
        said = " and ".join(f"{', '.join(served)} by {name}" for name, served in found.items())
        raise ValueError(
            f"conditions of two transformers in one: {base} serves {said}; make a stage, or a generation, of each"
        )
    return next(iter(found))


def partition_of(checkpoint: Path) -> str:
    """The transformer that a checkpoint folder was trained from; those that do not say are of the ordinary one.

    Raises:
        ValueError: its record does not read.
    """
    path = checkpoint / "checkpoint.json"
    if not path.is_file():
        return ORDINARY
    try:
        return str(cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8"))).get("partition", ORDINARY))
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not the record that `train` wrote ({error}); train the stage again") from error


def refuse_other(checkpoint: Path, partition: str) -> None:
    """Keep weights of one transformer out of the other, which they fit and spoil.

    Raises:
        ValueError: the checkpoint is of another partition.
    """
    if (found := partition_of(checkpoint)) != partition:
        raise ValueError(
            f"checkpoint {checkpoint} was trained from {found}, and {partition} is what this needs; name a checkpoint"
            f" of {partition}, or none"
        )
