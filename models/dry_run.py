"""One training step without a machine: what a transformer holds for backward, and computes, measured on the meta device.

Tensors of the meta device have sizes and no memory, so a step of a 33 B model takes seconds on one core. Attention is
counted as the fused kernels do it, which keep no matrix of rows by rows. One block costs like the next, so models of
one and two blocks tell of any depth.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from models.budget import Activity, Parameters, Weight
from models.families.sketches import Sketch

Recompute = Literal["none", "blocks", "selective"]
FUSED = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001 # the name is the operator's
    torch.ops.aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001
)


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


class FusedAttention(TorchFunctionMode):
    """Attention by the kernels of an accelerator, whose outputs the meta device knows; its own way would be the naive one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002 # torch's signature
        """Replace the one function."""
        if func is torch.nn.functional.scaled_dot_product_attention:
            return fused(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 # torch's signature
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: ARG001, FBT001, FBT002
) -> Tensor:
    """What a fused kernel returns: flash attention, or the memory-efficient one where there is a mask."""
    flash, efficient = FUSED
    if attn_mask is None:
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # noqa: FBT003 # positional
    bias = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    return efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]  # noqa: FBT003


class Live(TorchDispatchMode):
    """Bytes of the storages that are alive; those of `known` tensors do not count."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = [tensor.untyped_storage() for tensor in known]
        self._seen = {storage._cdata for storage in self._known}  # noqa: SLF001 # a meta storage has no other identity
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        """Note what an operator made."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._seen:  # noqa: SLF001
                    self._seen.add(storage._cdata)  # noqa: SLF001
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())  # noqa: SLF001
        self.peak = max(self.peak, self.now)
        return result

    def _drop(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.now -= num_bytes


class Saved:
    """Bytes that autograd saves for backward, each storage once."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = [tensor.untyped_storage() for tensor in known]
        self._sizes = dict.fromkeys((storage._cdata for storage in self._known), 0)  # noqa: SLF001

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor. What is kept is detached: an output that its own node kept would never be freed."""
        storage = tensor.untyped_storage()
        self._sizes.setdefault(storage._cdata, storage.nbytes())  # noqa: SLF001 # alive, so no other takes its number
        return tensor.detach()

    @property
    def num_bytes(self) -> int:
        """So far."""
        return sum(self._sizes.values())


def step(model: torch.nn.Module, inputs: Mapping[str, Any], recompute: Recompute = "none") -> Step:
    """Run forward and backward once, on whatever device model and inputs are, and say what that took."""
    known = [*model.parameters(), *model.buffers(), *(value for value in inputs.values() if isinstance(value, Tensor))]
    set_recompute(model, recompute)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_forget)
    attention = FusedAttention if known[0].is_meta else TorchFunctionMode
    live, saved, counter = Live(known), Saved(known), FlopCounterMode(display=False)
    with attention(), live:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: cast(Tensor, tensor)):
            loss = _loss(model, inputs)
        held = live.now
        loss.backward()
    with attention(), counter:  # a pass of its own: the counter's module hooks keep graphs alive
        loss = _loss(model, inputs)
        forward = counter.get_total_flops()
        loss.backward()
    return Step(saved.num_bytes, held, live.peak, forward, counter.get_total_flops() - forward)


def _loss(model: torch.nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    return torch.stack([part.float().square().mean() for part in model(**inputs)]).sum()


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


def set_recompute(model: torch.nn.Module, recompute: Recompute) -> None:
    """Have blocks computed again in backward: whole, or all but attention, whose outputs are small and dear."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    options: dict[str, Any] = {"use_reentrant": False}
    if recompute == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, list(FUSED))
    attention = FusedAttention if next(model.parameters()).is_meta else TorchFunctionMode

    def again(block: torch.nn.Module, *given: Any) -> Any:
        def run(*values: Any) -> Any:
            with attention():  # `backward` leaves the modes it is called in
                return block(*values)

        return checkpoint(run, *given, **options)

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
    import peft

    model = sketch.build(num_blocks)
    if lora_rank is not None:
        model.requires_grad_(requires_grad=False)
        config = peft.LoraConfig(r=lora_rank, lora_alpha=lora_rank, target_modules=sketch.lora_targets)
        with torch.device("meta"):
            cast(Any, model).add_adapter(config)
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
