"""The tensors that a run has to find again: which they are, a copy of them, and back into a fresh model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from models.states import State, States

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing put into names: a run may go on without them."""
FILE_BYTES = 2**30
"""A file is put together in memory once more before it is written, so larger shards become several."""


def tensors_of(
    model: nn.Module, optimiser: torch.optim.Optimizer, extra: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """What has to be saved: trainable parameters, persistent buffers, the optimiser's state, and `extra`.

    The tensors are the model's own; numbers in the optimiser's state become tensors. What stands in its parameter
    groups (learning rate and other settings) is not among them: it follows from the settings and the step.

    Raises:
        RuntimeError: the optimiser has a parameter that is not the model's, or keeps what is no tensor or number.
    """
    persistent = set(model.state_dict())  # FSDP shards again on this call: after a validation parameters are whole
    tensors = {f"model.{plain(name)}": item for name, item in model.named_parameters() if item.requires_grad}
    tensors |= {f"model.{plain(name)}": item for name, item in model.named_buffers() if name in persistent}
    for name, _, _, value in optimiser_values(model, optimiser):
        tensors[name] = value if isinstance(value, Tensor) else torch.tensor(value, dtype=number_type(value))
    return tensors | {f"extra.{name}": tensor for name, tensor in (extra or {}).items()}


def restore(
    states: States,
    state: State,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    extra: Mapping[str, Tensor] | None = None,
) -> None:
    """Read a state into a model and its optimiser, which need not have stepped, and into `extra`, in place.

    Raises:
        RuntimeError: they are not of the state's names, shapes and types.
    """
    materialise(optimiser)
    saved = states.names(state)
    for name, parameter in named(model):
        # A parameter that had no gradient so far has no state, and must not get one: its count of steps would differ.
        if not any(key.startswith(f"optimiser.{name}.") for key in saved):
            optimiser.state.pop(parameter, None)
    tensors = tensors_of(model, optimiser, extra)
    states.load(state, tensors)
    for name, parameter, key, value in list(optimiser_values(model, optimiser)):
        if not isinstance(value, Tensor):
            optimiser.state[parameter][key] = type(value)(tensors[name].item())


def materialise(optimiser: torch.optim.Optimizer) -> None:
    """Give a fresh optimiser the state it has after a step, of zero gradient and zero learning rate.

    Settings and gradients stay; AdamW's parameters keep their bits. Do it before hooks are added to the optimiser.
    """
    if optimiser.state:
        return
    parameters = [item for group in optimiser.param_groups for item in group["params"] if item.requires_grad]
    settings = [dict(group) for group in optimiser.param_groups]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimiser.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    optimiser.step()
    for group, setting in zip(optimiser.param_groups, settings, strict=True):
        group.update(setting)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def optimiser_values(
    model: nn.Module, optimiser: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor, str, Tensor | int | float]]:
    """The optimiser's state: name, parameter, key and value."""
    names = {parameter: name for name, parameter in named(model)}
    for group in optimiser.param_groups:
        for parameter in cast(list[Tensor], group["params"]):
            for key, value in cast(dict[str, Any], optimiser.state.get(parameter, {})).items():
                if parameter not in names:
                    raise RuntimeError(f"the optimiser has a parameter of shape {list(parameter.shape)} of no module")
                name = f"optimiser.{names[parameter]}.{key}"
                if isinstance(value, Tensor | int | float):
                    yield name, parameter, key, value
                elif value is not None:
                    raise RuntimeError(f"{name} is a {type(value).__name__}, and tensors and numbers can be saved")


def named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters by name."""
    return ((plain(name), parameter) for name, parameter in model.named_parameters())


def plain(name: str) -> str:
    """A name without what wraps its module."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def number_type(value: float) -> torch.dtype:
    """The type that holds a Python number exactly."""
    return torch.float64 if isinstance(value, float) else torch.int64


def local(tensor: Tensor) -> Tensor:
    """This process's part."""
    held = tensor.detach()
    return cast(Tensor, cast(Any, held).to_local()) if isinstance(tensor, DTensor) else held


def size_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of all processes' parts together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def files_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """In which of a process's files each tensor goes, from 1."""
    numbers: dict[str, int] = {}
    before = 0
    for name, tensor in tensors.items():
        numbers[name] = 1 + before // FILE_BYTES
        before += size_bytes({name: local(tensor)})
    return numbers


def refuse_strange(tensors: Mapping[str, Tensor]) -> None:
    """Say by name what safetensors cannot hold.

    Raises:
        RuntimeError: a tensor is of a class of its own (some 8-bit optimisers' states are), sparse or without values.
    """
    for name, tensor in tensors.items():
        part = local(tensor)
        if type(part) not in (Tensor, nn.Parameter) or part.layout != torch.strided or part.is_meta:
            kind = f"{type(part).__name__}, {part.layout}, on {part.device}"
            raise RuntimeError(f"{name} cannot be saved ({kind}): plain tensors and DTensors of them can")


def mismatch(saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """The first way in which tensors are not those of a state; empty if they are.

    Args:
        saved: The state's tensors as torch.distributed.checkpoint describes them.
        tensors: What they are to be read into.
    """
    for name, tensor in tensors.items():
        if name not in saved:
            return f"it has no {name}"
        size, kind = tuple(saved[name].size), saved[name].properties.dtype
        if size != tuple(tensor.shape):
            return f"{name} has shape {list(size)} in it and {list(tensor.shape)} here"
        if kind != tensor.dtype:
            return f"{name} is {kind} in it and {tensor.dtype} here"
    left = sorted(saved.keys() - tensors.keys())
    return f"it has {left[0]}, and there is none here" if left else ""


class Staging:
    """Copies in the host's memory, which the next copy uses again: pinned memory is slow to get."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A copy of this process's parts that later steps do not change. DTensors stay DTensors."""
        buffers: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            part, known = local(tensor), self._buffers.get(name)
            if known is None or known.shape != part.shape or known.dtype != part.dtype:
                # Contiguous whatever the tensor is: safetensors takes nothing else.
                known = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.device.type != "cpu")
            buffers[name] = known.copy_(part, non_blocking=True)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._buffers = buffers
        return {name: as_sharded(buffer, tensors[name]) for name, buffer in buffers.items()}


def as_sharded(part: Tensor, model: Tensor) -> Tensor:
    """A process's part as a DTensor laid out as `model`, or itself where that is none."""
    if not isinstance(model, DTensor):
        return part
    # Not from_local: that moves the part to the mesh's device.
    detached = cast(Any, model.detach())
    names, spec = detached.__tensor_flatten__()
    inner = {name: getattr(detached, name) for name in names} | {"_local_tensor": part}
    return cast(Tensor, cast(Any, DTensor).__tensor_unflatten__(inner, spec, model.shape, model.stride()))
