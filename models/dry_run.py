"""One training step without a machine: what a transformer holds for backward, and computes, measured on the meta device.

Tensors of the meta device have sizes and no memory, so a step of a 33 B model takes seconds on one core. Attention is
counted as the fused kernels do it, which keep no matrix of rows by rows. One block costs like the next, so models of
one and two blocks tell of any depth.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from data.conditions import Mode
from data.records import ClipShape
from models.budget import Activity, Parameters, Setup, Weight
from models.families.sketches import Sizes, Sketch
from models.fused_kernels import ATTENTION, Fused

Recompute = Literal["none", "blocks", "selective"]
Kernels = Literal["accelerator", "cpu"]


class Step(NamedTuple):
    """What one forward and backward pass took."""

    saved_bytes: int
    """Of what autograd saved for backward, each storage once, without parameters and inputs."""
    held_bytes: int
    """Alive when backward began: what was saved, by whomever, and the outputs."""
    peak_bytes: int
    """Most that was alive at once, gradients of parameters apart."""
    forward_flops: int
    backward_flops: int
    """With what is computed again."""


class Live(TorchDispatchMode):
    """Bytes of the storages that are alive; those of `known` tensors do not count."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = [tensor.untyped_storage() for tensor in known]
        self._seen = {_key(storage) for storage in self._known}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what an operator made."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not is_traceable_wrapper_subclass(tensor):  # parts count by themselves
                storage = tensor.untyped_storage()
                if _key(storage) not in self._seen:
                    self._seen.add(_key(storage))
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._drop, _key(storage), storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _drop(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.now -= num_bytes


class Saved:
    """Bytes that autograd saves for backward, each storage once."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = [tensor.untyped_storage() for tensor in known]
        self._sizes = dict.fromkeys((_key(storage) for storage in self._known), 0)

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor. What is kept is detached: an output that its own node kept would never be freed."""
        storage = tensor.untyped_storage()
        self._sizes.setdefault(_key(storage), storage.nbytes())
        return tensor.detach()

    @property
    def num_bytes(self) -> int:
        """So far."""
        return sum(self._sizes.values())


def _key(storage: torch.UntypedStorage) -> int:
    """A number of its own while it lives; on the meta device there is no address."""
    return cast(int, cast(Any, storage)._cdata)  # noqa: SLF001


def step(
    model: torch.nn.Module, inputs: Mapping[str, Any], recompute: Recompute = "none", kernels: Kernels = "accelerator"
) -> Step:
    """Run forward and backward once, on whatever device model and inputs are, and say what that took.

    Args:
        model: On the meta device, or a real one.
        inputs: By the names of its arguments, on the same device.
        recompute: What is computed again in backward.
        kernels: On the meta device, those of an accelerator, or a CPU's; a real device has its own.
    """
    known = [*model.parameters(), *model.buffers(), *(value for value in inputs.values() if isinstance(value, Tensor))]
    modes = partial(Fused, norms=kernels == "accelerator") if known[0].is_meta else nullcontext
    set_recompute(model, recompute, modes)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_forget)
    live, saved, counter = Live(known), Saved(known), FlopCounterMode(display=False)
    with modes(), live:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: cast(Tensor, tensor)):
            loss = _loss(model, inputs)
        held = live.now
        loss.backward()
    with modes(), counter:  # a pass of its own: the counter's module hooks keep graphs alive
        loss = _loss(model, inputs)
        forward = counter.get_total_flops()
        loss.backward()
    return Step(saved.num_bytes, held, live.peak, forward, counter.get_total_flops() - forward)


def _loss(model: torch.nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    return torch.stack([part.float().square().mean() for part in model(**inputs)]).sum()


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


def set_recompute(
    model: torch.nn.Module, recompute: Recompute, modes: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Have blocks computed again in backward: whole, or all but attention, whose outputs are small and dear."""
    import torch.utils.checkpoint as checkpoints

    torch_checkpoints = cast(Any, checkpoints)
    options: dict[str, Any] = {"use_reentrant": False}
    if recompute == "selective":
        options["respect_saved_tensors_hooks"] = False  # what it keeps by itself is seen alive
        options["context_fn"] = partial(torch_checkpoints.create_selective_checkpoint_contexts, list(ATTENTION))

    def again(block: torch.nn.Module, *given: Any) -> Any:
        def run(*values: Any) -> Any:
            with modes():  # `backward` leaves the modes it is called in
                return block(*values)

        return torch_checkpoints.checkpoint(run, *given, **options)

    if recompute != "none":
        cast(Any, model).enable_gradient_checkpointing(again)


def prepared(sketch: Sketch, num_blocks: int, lora_rank: int | None, *, freeze_text_side: bool) -> torch.nn.Module:
    """The transformer as a run would train it, on the meta device.

    Args:
        sketch: Of the model.
        num_blocks: As many as asked for.
        lora_rank: Of adapters; None trains the weights themselves.
        freeze_text_side: Leave what takes the text in as it is.
    """
    from models import adapters

    model = sketch.build(num_blocks)
    if lora_rank is not None:
        with torch.device("meta"):
            adapters.put(model, sketch.lora_targets, lora_rank)
    for name, parameter in model.named_parameters():
        if freeze_text_side and re.match(sketch.text_side, name):
            parameter.requires_grad = False
    return model.train()


def parameters_of(sketch: Sketch, lora_rank: int | None = None, *, freeze_text_side: bool = False) -> Parameters:
    """Every parameter of the model at full depth, by group and FSDP unit."""
    model = prepared(sketch, sketch.num_blocks, lora_rank, freeze_text_side=freeze_text_side)
    weights: list[Weight] = []
    for name, parameter in model.named_parameters():
        unit = re.match(sketch.units, name)
        group = next((group for group, pattern in sketch.groups.items() if re.match(pattern, name)), "other")
        rows = parameter.shape[0] if parameter.ndim else 1
        weights.append(
            Weight(group, unit[0] if unit else "", rows, parameter.numel() // max(rows, 1), parameter.requires_grad)
        )
    return Parameters(tuple(weights))


def activity_of(
    sketch: Sketch,
    inputs: Mapping[str, Any],
    dtype: torch.dtype,
    recompute: Recompute,
    lora_rank: int | None = None,
    *,
    freeze_text_side: bool = False,
) -> Activity:
    """What one micro-batch holds and computes at full depth, from models of one and of two blocks."""

    def steps(how: Recompute) -> list[Step]:
        models = (prepared(sketch, num, lora_rank, freeze_text_side=freeze_text_side).to(dtype) for num in (1, 2))
        return [step(model, inputs, how) for model in models]

    one, two = steps("none")
    block_bytes = two.saved_bytes - one.saved_bytes
    if recompute != "none":
        one, two = steps(recompute)
    above = two.peak_bytes - two.held_bytes
    live_bytes = min(block_bytes, above) if recompute != "none" else 0
    kept_bytes = one.held_bytes + (sketch.num_blocks - 1) * (two.held_bytes - one.held_bytes)
    rest = sketch.num_blocks - 1
    return Activity(
        kept_bytes=kept_bytes,
        live_bytes=live_bytes,
        working_bytes=above - live_bytes,
        forward_flops=one.forward_flops + rest * (two.forward_flops - one.forward_flops),
        backward_flops=one.backward_flops + rest * (two.backward_flops - one.backward_flops),
    )


class Activities:
    """What micro-batches hold and compute, each layout measured once for a way to run it."""

    def __init__(self, sketch: Sketch) -> None:
        self._sketch = sketch
        self._known: dict[tuple[object, ...], Activity] = {}

    def of(self, setup: Setup, layout: str, shape: ClipShape, mode: Mode, sizes: Sizes) -> Activity:
        """Of one micro-batch of clips of a layout; arguments as `Sketch.layout` takes and gives them."""
        rank, frozen = setup.lora_rank if setup.method == "lora" else None, setup.freeze_text_side
        key = (layout, rank, frozen, setup.recompute, setup.micro_batch, setup.precision)
        if key not in self._known:
            dtype = {"fp16": torch.float16, "fp32": torch.float32}.get(setup.precision, torch.bfloat16)
            inputs = self._sketch.inputs(shape, mode, sizes, setup.micro_batch, dtype)
            self._known[key] = activity_of(self._sketch, inputs, dtype, setup.recompute, rank, freeze_text_side=frozen)
        return self._known[key]
