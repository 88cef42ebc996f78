"""What one stage costs on some devices: the largest clip it draws, put through the model's sketch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from data.conditions import Mode, Variant
from data.records import ClipShape, Frozen

if TYPE_CHECKING:
    from data.stage import Stage
    from models.budget import Activity, Parameters, Setup
    from models.families.sketches import Sketch

GB = 1e9
"""Bytes; no device has less memory than its name says."""


class Clip(NamedTuple):
    """The clip that a stage is planned for."""

    shape: ClipShape
    mode: Mode
    sizes: Mapping[str, tuple[int, ...]]
    """Of its condition arrays."""
    layout: str
    num_rows: int
    """Of the packed sequence."""
    origin: str
    """Why this one."""


class Machine(Frozen):
    """What the devices can do, and how the work is shared out."""

    memory_gb: float
    reserve_gb: float
    peak_tflops: float
    utilisation: float
    interconnect_gb_s: float
    batch_size: int
    """Clips an update should have at least."""
    num_steps: int


class Cost(Frozen):
    """A plan for a number of devices."""

    devices: int
    memory_bytes: dict[str, int]
    """Of one device at the worst moment, by part."""
    total_bytes: int
    host_bytes: int
    """Of host memory, a device."""
    fits: bool
    remedy: str | None
    """Settings that would make it fit; None where it does, or nothing does."""
    num_micro_batches: int
    """A device goes through in a step."""
    clips_per_step: int
    flops_per_step: int
    """Of one device."""
    compute_s: float
    communication_bytes: dict[str, int]
    """A device sends in a step."""
    communication_s: float
    step_s: float
    """The longer of computing and communication, which overlap."""
    clips_per_s: float
    hours: float
    device_hours: float


def clip_of_size(sketch: Sketch, size: tuple[float, int, int], modes: Sequence[Mode], num_text: int) -> Clip:
    """A clip of a duration, height and width on the family's grid, in the mode with most rows."""
    shape = sketch.shape(*size)
    found: list[Clip] = []
    for mode in modes:
        sizes = sketch.sizes(shape, mode, num_text)
        found.append(Clip(shape, mode, sizes, *sketch.layout(shape, mode, sizes), "of the size that was asked for"))
    return max(found, key=lambda clip: clip.num_rows)


def largest_clip(sketch: Sketch, latents: Path, stage: Stage) -> Clip:
    """The clip with most rows that a stage may draw from a latent store, whatever its difficulty and group.

    Raises:
        ValueError: the store is of another family, or has nothing for the stage.
    """
    import numpy as np

    from data.candidates import candidates_of, eligible
    from data.latents import LatentStore

    store = LatentStore(latents)
    family = store.record.get("family", sketch.name)
    if family != sketch.name:
        raise ValueError(f"latents = {latents} are of {family}, base is {sketch.name}; set height, width, duration_s")
    candidates = candidates_of(store.index)
    free = stage.model_copy(update={"difficulty": (0.0, 1.0), "mixture": {}, "replay_share": 0.0})
    modes = {mode for mode, share in stage.conditions.items() if share > 0}
    wanted = np.array([Variant.parse(name).mode in modes for name in candidates.variant_names], np.bool_)
    usable = eligible(candidates, free)[0][candidates.rows] & wanted[candidates.variants]
    if not usable.any():
        raise ValueError(f"{latents} has no clip that this stage may draw; set height, width and duration_s")
    item = int(np.argmax(np.where(usable, candidates.num_tokens, -1)))
    entry = str(candidates.entries[int(candidates.rows[item])].as_py())
    row, variant = store.index.row(store.index.place(entry)), candidates.variant_names[int(candidates.variants[item])]
    mode = Variant.parse(variant).mode
    sizes = {name: tuple(array.shape) for name, array in store.conditions(row, variant).items()}
    return Clip(row.shape, mode, sizes, *sketch.layout(row.shape, mode, sizes), f"the longest in {latents}, {entry}")


class Planner:
    """Costs of training on a clip; what was measured on the meta device is remembered."""

    def __init__(self, sketch: Sketch, clip: Clip, machine: Machine) -> None:
        from models.dry_run import Activities

        self._sketch, self._clip, self._machine = sketch, clip, machine
        self._parameters: dict[object, Parameters] = {}
        self._measured = Activities(sketch)

    @property
    def limit_bytes(self) -> float:
        """Of a device's memory."""
        return self._machine.memory_gb * GB

    def parameters(self, setup: Setup) -> Parameters:
        """Of the model as it would be trained."""
        from models.dry_run import parameters_of

        rank = setup.lora_rank if setup.method == "lora" else None
        key = (rank, setup.freeze_text_side)
        if key not in self._parameters:
            self._parameters[key] = parameters_of(self._sketch, rank, freeze_text_side=setup.freeze_text_side)
        return self._parameters[key]

    def activity(self, setup: Setup) -> Activity:
        """Of one micro-batch."""
        clip = self._clip
        return self._measured.of(setup, clip.layout, clip.shape, clip.mode, clip.sizes)

    def memory(self, setup: Setup, devices: int) -> dict[str, int]:
        """Bytes of a device by part, with what is set aside."""
        from models.budget import memory

        parts = memory(self.parameters(setup), self.activity(setup), setup, devices)
        return {**parts, "reserve": round(self._machine.reserve_gb * GB)}

    def fits(self, setup: Setup, devices: int) -> bool:
        """Whether a step fits a device."""
        return sum(self.memory(setup, devices).values()) <= self.limit_bytes

    def cost(self, setup: Setup, devices: int) -> Cost:
        """Everything about one number of devices."""
        from models import budget

        machine, parameters = self._machine, self.parameters(setup)
        parts = self.memory(setup, devices)
        total = sum(parts.values())
        accumulate = math.ceil(machine.batch_size / (setup.micro_batch * devices))
        flops = accumulate * budget.flops(self.activity(setup), setup)
        sent = budget.communication(parameters, setup, devices, accumulate)
        compute_s = flops / (machine.peak_tflops * 1e12 * machine.utilisation)
        communication_s = sum(sent.values()) / (machine.interconnect_gb_s * GB)
        step_s, clips = max(compute_s, communication_s), accumulate * setup.micro_batch * devices
        hours = step_s * machine.num_steps / 3600
        return Cost(
            devices=devices,
            memory_bytes=parts,
            total_bytes=total,
            host_bytes=budget.on_host(parameters, setup, devices),
            fits=total <= self.limit_bytes,
            remedy=None if total <= self.limit_bytes else budget.remedy(setup, devices, self.fits),
            num_micro_batches=accumulate,
            clips_per_step=clips,
            flops_per_step=flops,
            compute_s=compute_s,
            communication_bytes=sent,
            communication_s=communication_s,
            step_s=step_s,
            clips_per_s=clips / step_s,
            hours=hours,
            device_hours=hours * devices,
        )
