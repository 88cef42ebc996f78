"""What a training run takes: memory of a device by part, computing, communication and disk, as plain arithmetic.

Bytes a value: 4 in full precision, 2 in bf16 and fp16. AdamW keeps two values a weight (Loshchilov and Hutter 2019,
arXiv 1711.05101, algorithm 2). Sharding is FSDP2's: every parameter in equal pieces along its first axis, rounded up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from models.running import Running

FULL, HALF = 4, 2
"""Bytes a value."""
STEP_BYTES = 4
"""AdamW's step count, one a tensor."""
GATHERED_UNITS = 2
"""Units of FSDP2 whose parameters are whole at once: the one that computes and the one fetched ahead."""
MAX_DEVICES = 1024
"""Where looking for a number of devices that fits ends."""
ON_HOST = ("weights", "gradients", "optimiser", "EMA", "frozen copy")
"""Parts that offloading takes off the device."""


class Setup(Running):
    """How one stage is run, and what of its objective costs memory."""

    ema: bool = False
    """Keep a moving average of what is trained, in fp32."""
    guidance: Literal["none", "contrast", "drift"] = "none"
    """Guidance preservation: `contrast` runs the model once more without caption, `drift` the base model, of which
    full tuning needs a frozen copy."""
    method: Literal["full", "lora"] = "full"
    """`lora` trains adapters only."""
    lora_rank: int = Field(default=16, gt=0)
    """Rank of the adapters."""
    freeze_text_side: bool = False
    """Leave what takes the text in as it is."""

    @model_validator(mode="after")
    def _is_no_contradiction(self) -> Setup:
        if self.method == "lora" and self.freeze_text_side:
            raise ValueError("freeze_text_side means nothing for method lora, which trains adapters only")
        return self

    @property
    def value_bytes(self) -> int:
        """Bytes a value that is computed with."""
        return FULL if self.precision == "fp32" else HALF

    @property
    def frozen_bytes(self) -> int:
        """Bytes a weight that is not trained."""
        return FULL if self.frozen_weights == "fp32" else self.value_bytes


class Weight(NamedTuple):
    """One parameter."""

    group: str
    unit: str
    """What FSDP gathers it with; empty is the root."""
    rows: int
    """Length of the axis it is sharded along."""
    row_size: int
    trainable: bool

    def shard(self, devices: int) -> int:
        """Values of it on the first of some devices, which has most."""
        return math.ceil(self.rows / devices) * self.row_size


class Parameters(NamedTuple):
    """Every parameter of a transformer, adapters included."""

    weights: tuple[Weight, ...]

    def count(self, devices: int = 1, *, trainable: bool | None = None) -> int:
        """Values, of all or of those that are trained or not, on each of some devices that share them."""
        return sum(weight.shard(devices) for weight in self.weights if trainable in (None, weight.trainable))

    @property
    def num_trainable_tensors(self) -> int:
        """Tensors that have optimiser states."""
        return sum(weight.trainable for weight in self.weights)

    def by_group(self) -> dict[str, int]:
        """Values of each group of modules, largest first."""
        found: Counter[str] = Counter()
        for weight in self.weights:
            found[weight.group] += weight.shard(1)
        return dict(found.most_common())

    def units(self, *, trainable_only: bool = False) -> dict[str, int]:
        """Values of each unit of FSDP."""
        found: Counter[str] = Counter({"": 0})
        for weight in self.weights:
            if weight.trainable or not trainable_only:
                found[weight.unit] += weight.shard(1)
        return dict(found)


class Activity(NamedTuple):
    """What one micro-batch takes on a device, gathered over all blocks."""

    kept_bytes: int
    """For backward, from the first block's forward on."""
    live_bytes: int
    """Of the one block that is computed again."""
    working_bytes: int
    """Beside these at the worst moment: gradients of activations, temporary results."""
    forward_flops: int
    backward_flops: int
    """With what is computed again."""


def memory(parameters: Parameters, activity: Activity, setup: Setup, devices: int) -> dict[str, int]:
    """Bytes on the fullest device at the worst moment of a step, by part; what offloading moved away is not in it."""
    parts = resident(parameters, setup, devices)
    if setup.offload:
        parts |= dict.fromkeys(ON_HOST, 0)
    value, units = setup.value_bytes, parameters.units()
    trained = max(parameters.units(trainable_only=True).values())
    if setup.strategy == "fsdp2":
        root = units.pop("")
        gathered = GATHERED_UNITS * max(units.values(), default=0) + root
        parts["compute copies"] = value * gathered
        parts["gradients"] += (value + FULL) * trained  # as computed, and as they are reduced
    else:
        copied = 0 if setup.precision == "fp32" else parameters.count(trainable=True)
        copied += parameters.count(trainable=False) if setup.frozen_bytes > value else 0
        parts["compute copies"] = value * copied
        parts["gradients"] += FULL * parameters.count(trainable=True) if devices > 1 else 0  # DDP's buckets
    return {
        **parts,
        "activations": activity.kept_bytes + activity.live_bytes,
        "working memory": activity.working_bytes,
    }


def resident(parameters: Parameters, setup: Setup, devices: int) -> dict[str, int]:
    """Bytes a device keeps from step to step, wherever they lie."""
    shared = devices if setup.strategy == "fsdp2" else 1
    trained, frozen = (parameters.count(shared, trainable=trainable) for trainable in (True, False))
    copy = setup.guidance == "drift" and setup.method == "full"
    return {
        "weights": FULL * trained + setup.frozen_bytes * frozen,
        "gradients": FULL * trained,
        "optimiser": 2 * FULL * trained + STEP_BYTES * parameters.num_trainable_tensors,
        "EMA": FULL * trained if setup.ema else 0,
        "frozen copy": setup.value_bytes * (trained + frozen) if copy else 0,
    }


def on_host(parameters: Parameters, setup: Setup, devices: int) -> int:
    """Bytes of host memory that each device's share takes when it is offloaded."""
    return sum(resident(parameters, setup, devices).values()) if setup.offload else 0


def flops(activity: Activity, setup: Setup) -> int:
    """Of one micro-batch on one device, recomputation and the forward pass that preserves guidance included."""
    extra = activity.forward_flops if setup.guidance != "none" else 0
    return activity.forward_flops + activity.backward_flops + extra


def communication(parameters: Parameters, setup: Setup, devices: int, accumulate: int = 1) -> dict[str, int]:
    """Bytes that each device sends in a step, by collective, as rings send them.

    FSDP2 gathers every unit for forward and again for backward, the root once, in the precision of computing, and
    reduces gradients in fp32, in every micro-batch; DDP reduces once a step.
    """
    others = devices - 1
    trained = FULL * parameters.count(trainable=True) * others // devices
    if setup.strategy == "ddp":
        return {"all-reduce": 2 * trained}
    whole, root = parameters.count(), parameters.units()[""]
    times = 3 if setup.guidance != "none" else 2
    values = times * whole - (root if setup.guidance == "none" else 0)
    return {
        "all-gather": accumulate * setup.value_bytes * values * others // devices,
        "reduce-scatter": accumulate * trained,
    }


def disk(parameters: Parameters, setup: Setup) -> dict[str, int]:
    """Bytes of a checkpoint, which has adapters merged into the weights and beside them, and of a state to resume from,
    which has what is trained, its optimiser's states and its average.
    """
    parts = resident(parameters, setup, 1)
    state = FULL * parameters.count(trainable=True) + parts["optimiser"] + parts["EMA"]
    return {"checkpoint": FULL * parameters.count(), "state": state}


def changes(setup: Setup, devices: int) -> Iterator[tuple[str, Setup, int]]:
    """Ways to need less memory: each alone, more and more of them together, more devices, at last adapters."""
    known = setup.model_dump()
    tries = [
        ("recompute=blocks", {"recompute": "blocks"}),
        ("strategy=fsdp2", {"strategy": "fsdp2"}),
        ("frozen_weights=compute", {"frozen_weights": "compute"} if setup.precision != "fp32" else {}),
        ("micro_batch=1", {"micro_batch": 1}),
        ("offload=true", {"offload": True, "strategy": "fsdp2"}),
    ]
    tries = [(name, new) for name, new in tries if any(known[key] != value for key, value in new.items())]
    if devices == 1:
        tries = [(name, new) for name, new in tries if name != "strategy=fsdp2"]  # one device has nobody to share with
    for name, new in tries:
        yield name, Setup.model_validate(known | new), devices
    names: list[str] = []
    together = dict(known)
    for name, new in tries:
        names.append(name)
        together |= new
        if len(names) > 1:
            yield " ".join(names), Setup.model_validate(together), devices
    sharded = Setup.model_validate(known | {"strategy": "fsdp2", "recompute": "blocks"})
    more = devices
    while (more := more * 2) <= MAX_DEVICES:
        prefix = "" if sharded == setup else "strategy=fsdp2 recompute=blocks "
        yield f"{prefix}devices={more}", sharded, more
    if setup.method == "full":
        adapters = {"method": "lora", "freeze_text_side": False, "recompute": "blocks", "frozen_weights": "compute"}
        yield "method=lora frozen_weights=compute recompute=blocks", Setup.model_validate(known | adapters), devices


def remedy(setup: Setup, devices: int, fits: Callable[[Setup, int], bool]) -> str | None:
    """The first of `changes` that fits; None where none does."""
    return next((name for name, changed, count in changes(setup, devices) if fits(changed, count)), None)


def compare(planned: Mapping[str, float], used: Mapping[str, float]) -> dict[str, float]:
    """How much of each planned quantity a run really took, 1 being as planned; what either does not name is left out."""
    return {name: used[name] / value for name, value in planned.items() if name in used and value > 0}
