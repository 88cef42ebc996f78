"""Short training runs on the tiny H3, for tests that ask what training did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from data.candidates import candidates_of
from data.conditions import Variant
from data.latents import LatentStore
from data.sampler import Sampler, StepBatch
from data.stage import Stage
from models import adapters
from models.families import Batch, Family, load_family
from models.loading import read_batch
from models.running import Running
from models.sft import PLAIN, SupervisedFineTuning
from tasks import training

Tensors = dict[str, torch.Tensor]


def stage(**changes: Any) -> Stage:
    """A few steps, without guidance preservation unless it is asked for."""
    settings = {"conditions": {"t2va": 0.5, "fl2va": 0.5}, "num_steps": 6, "batch_size": 2, "learning_rate": 3e-3}
    return Stage.model_validate({**settings, "warmup_steps": 1, "guidance": {"form": "none"}, **changes})


class Fixed:
    """A sampler that draws what it is told."""

    def __init__(self, drawn: Sequence[StepBatch]) -> None:
        self._drawn = drawn

    def batch(self, step: int) -> StepBatch:
        return self._drawn[step]._replace(step=step)


def trained(
    base: Path,
    store_folder: Path,
    work: Path,
    plan: Stage,
    run: Running = PLAIN,
    *,
    drawn: Sequence[StepBatch] = (),
    stop_after: int | None = None,
    change: Callable[[Family], Any] | None = None,
    tamper: Callable[[SupervisedFineTuning], Any] | None = None,
    compiled: bool = False,
    told: Callable[[], bool] | None = None,
) -> tuple[Family, Any]:
    """Train a stage, with the batches in `drawn` if there are any, and give family and module.

    `stop_after` raises KeyError in that step, as a crash would; `change` is done to the family before anything else,
    `tamper` to the module before it trains.
    """
    family, store = load_family(base), LatentStore(store_folder)
    if change is not None:
        change(family)
    if plan.method == "lora":
        options: dict[str, Any] = {"targets": plan.lora_targets, "modulation": plan.lora_modulation}
        adapters.add(family, plan.lora_rank, 0, alpha=plan.lora_alpha, **options)
    if plan.guidance.adapter is not None:
        adapters.assist(family, plan.guidance.adapter)
    module = SupervisedFineTuning(family, plan, 0, run, compiled=compiled)
    if stop_after is not None:
        crash_in(module, stop_after)
    if tamper is not None:
        tamper(module)
    sampler: Any = Fixed(drawn) if drawn else Sampler(candidates_of(store.index), plan, 0)
    training.fit(module, sampler, store, work, {"plan": plan.model_dump(mode="json")}, save_every=2, told=told)
    return family, module


def crash_in(module: Any, step: int) -> None:
    """Raise KeyError in a step, when it has computed gradients."""
    compute = module._pass

    def crashing(item: Any, forward: Any) -> Any:
        part = compute(item, forward)
        if item.drawn.step == step:
            raise KeyError("crash")
        return part

    module._pass = crashing


def gradients_of(*arguments: Any, **options: Any) -> tuple[list[Tensors], Tensors]:
    """Of every step of a run as `trained` takes it, before they are clipped; and the weights at its end."""
    found: list[Tensors] = []

    def listen(module: Any) -> None:
        clipped = module._clipped

        def noting(optimiser: Any, step: int) -> Any:
            found.append({name: item.grad.clone() for name, item in module.trained()})
            return clipped(optimiser, step)

        module._clipped = noting

    family, _ = trained(*arguments, tamper=listen, **options)
    return found, weights_of(family)


def drawn_of(variant: str, *numbers: int) -> StepBatch:
    """A step that draws clips of the shared store by their numbers."""
    entries = tuple(f"clip-{number}@small" for number in numbers)
    return StepBatch(0, Variant.parse(variant).mode, entries, (variant,) * len(numbers))


def batch_of(store_folder: Path, variant: str, *numbers: int, bare: bool = False) -> Batch:
    return read_batch(LatentStore(store_folder), drawn_of(variant, *numbers), bare=bare)


def weights_of(family: Family) -> Tensors:
    """A copy of the transformer's."""
    return {name: tensor.clone() for name, tensor in family.transformer.state_dict().items()}


def same(left: Tensors, right: Tensors) -> bool:
    """Whether two sets of weights agree in every bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def distance(left: Tensors, right: Tensors) -> float:
    """Largest difference in any tensor, relative to the largest value of that tensor."""
    assert left.keys() == right.keys()
    found = [float((left[name] - right[name]).abs().max() / right[name].abs().max().clamp_min(1e-30)) for name in right]
    return max(found)
