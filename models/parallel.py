"""A transformer made ready for its devices: precision, recomputation, compilation, sharding.

Always in this order, so that recomputed and compiled blocks are what is sharded.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from models.accelerators import number_of
from models.running import Running

if TYPE_CHECKING:
    from models.sft import SupervisedFineTuning

COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Types that are computed in; fp32 is not among them, it needs nothing."""
FP8_CAPABILITY = (8, 9)
"""Of the first NVIDIA devices that multiply in 8 bits (Ada)."""
FP8_MULTIPLE = 16
"""Sides of a matrix that the 8-bit kernels take are multiples of it."""


def prepare(transformer: nn.Module, blocks: str, running: Running, *, mesh: DeviceMesh | None, compiled: bool) -> None:
    """Change a transformer in place to what `running` asks for.

    Args:
        transformer: On the CPU or its device; weights that still lie in their files are taken up unit by unit.
        blocks: Regular expression of its repeated modules.
        running: How it is run.
        mesh: One dimension of devices to shard over; None where there are no others, or DDP copies to them.
        compiled: Compile the blocks.

    Raises:
        RuntimeError: the device cannot compute in the precision.
    """
    named: dict[str, nn.Module] = dict(cast(Any, transformer).named_modules())
    parts = [name for name in named if re.fullmatch(blocks, name)]
    if running.precision == "fp8":
        use_fp8(transformer, blocks)
    if running.precision != "fp32":
        for module in full_precision_modules(transformer):
            keep_full(module)
    if running.recompute != "none":
        from models.dry_run import set_recompute

        set_recompute(transformer, running.recompute, nullcontext)
    if compiled:
        for name in parts:
            named[name].compile()
    if mesh is not None:
        shard(transformer, parts, running, mesh)
    else:
        settle(transformer, "", running)


def shard(transformer: nn.Module, blocks: list[str], running: Running, mesh: DeviceMesh) -> None:
    """FSDP2 over a mesh: each block a unit, what stays in full precision one each, the rest the root.

    A process holds its shards and one whole unit at a time.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": mesh}
    if running.offload:
        options["offload_policy"] = CPUOffloadPolicy()
    full = MixedPrecisionPolicy()
    compute, spared = full, list[str]()
    if running.precision in COMPUTE:
        # Inputs are left to autocast: timesteps and coordinates must not be rounded.
        kinds = {"param_dtype": COMPUTE[running.precision], "reduce_dtype": torch.float32}
        compute = MixedPrecisionPolicy(**kinds, cast_forward_inputs=False)
        spared = [
            name
            for name, module in transformer.named_children()
            if name in kept_full(transformer) and any(True for _ in module.parameters())
        ]
    for name in (*spared, *blocks, ""):
        settle(transformer, name, running)
        unit = on_device(transformer.get_submodule(name), mesh)
        fully_shard(unit, mp_policy=full if name in spared else compute, **options)


def on_device(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The module, moved where FSDP2 could not: a tensor of the CPU cannot become one of an NPU in place.

    What is sharded already stays where it is: it may be offloaded.
    """
    for part in module.modules() if mesh.device_type == "npu" else ():
        for name, weight in list(part.named_parameters(recurse=False)):
            if not isinstance(weight, DTensor):
                setattr(part, name, nn.Parameter(weight.to(mesh.device_type), requires_grad=weight.requires_grad))
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, buffer.to(mesh.device_type))
    return module


def full_precision_modules(transformer: nn.Module) -> list[nn.Module]:
    """What the model's authors keep in full precision: inputs, timesteps, output heads."""
    return [module for name, module in transformer.named_children() if name in kept_full(transformer)]


def kept_full(transformer: nn.Module) -> Sequence[str]:
    """Names of `full_precision_modules`."""
    return getattr(transformer, "_keep_in_fp32_modules", None) or ()


def keep_full(module: nn.Module) -> None:
    """Have a module compute in full precision inside autocast."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(widened(value) for value in args), {name: widened(value) for name, value in kwargs.items()}

    forward = module.forward

    def without_autocast(*args: Any, **kwargs: Any) -> Any:
        device = next((value.device.type for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), "cpu")
        with torch.autocast(device, enabled=False):
            return forward(*args, **kwargs)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.forward = without_autocast


def widened(value: Any) -> Any:
    """A tensor of a narrower floating type in full precision; anything else as it is."""
    narrow = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return cast(Tensor, value).float() if narrow else value


def settle(transformer: nn.Module, unit: str, running: Running) -> None:
    """Give the parameters of a submodule the type that they are kept in: that of computing, or full precision."""
    shrinks = running.precision != "fp32" and running.frozen_weights == "compute"
    for name, parameter in transformer.get_submodule(unit).named_parameters(prefix=unit):
        if isinstance(parameter, DTensor):  # of a unit that is sharded already
            continue
        narrow = shrinks and not parameter.requires_grad and name.partition(".")[0] not in kept_full(transformer)
        if narrow and parameter.itemsize <= torch.float32.itemsize:
            parameter.data = parameter.data.to(COMPUTE[running.precision])
        else:
            parameter.data = widened(parameter.data)


def use_fp8(transformer: nn.Module, blocks: str) -> None:
    """Multiply in 8 bits in the blocks' linear layers; attention and everything else stays in bf16.

    Raises:
        RuntimeError: torchao is not installed, or the device has no 8-bit products.
    """
    try:
        torchao = cast(Any, importlib.import_module("torchao.float8"))
    except ImportError as error:
        raise RuntimeError("precision fp8 needs torchao, which is not installed; install it or set bf16") from error
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < FP8_CAPABILITY:
        raise RuntimeError("precision fp8 needs an NVIDIA device of compute capability 8.9 or above; set bf16")
    inside = re.compile(rf"{blocks}\..+")

    def taken(module: nn.Module, name: str) -> bool:
        sides = (getattr(module, "in_features", 1), getattr(module, "out_features", 1))
        return inside.fullmatch(name) is not None and all(side % FP8_MULTIPLE == 0 for side in sides)

    torchao.convert_to_float8_training(transformer, module_filter_fn=taken)


def computing(running: Running, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which forward passes run."""
    if running.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, COMPUTE[running.precision])


def scaler_for(running: Running, device: torch.device) -> torch.amp.GradScaler | None:
    """Keeps small gradients of fp16 above zero; the other precisions need none."""
    return torch.amp.GradScaler(device.type) if running.precision == "fp16" else None


def strategy_for(running: Running, world_size: int, timeout_s: float, device: torch.device) -> Any:
    """Lightning's strategy on devices of this one's kind; one process shares with nobody.

    Raises:
        ValueError: several processes on a device with a number.
    """
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

    from models.sharding import Sharded

    ddp, sharded = DDPStrategy, Sharded
    if device.type == "npu":
        from models.npu import NPUDDPStrategy, NPUModelParallelStrategy

        ddp, sharded = NPUDDPStrategy, NPUModelParallelStrategy
    if world_size == 1:  # by Lightning's `auto` what it does not know is a CPU
        return SingleDeviceStrategy(
            device if device.type == "cpu" else torch.device(device.type, number_of(device) or 0)
        )
    if number_of(device) is not None:
        raise ValueError(f"accelerator {device} is one device for {world_size} processes; set it to {device.type}")
    timeout = timedelta(seconds=timeout_s)
    if running.strategy == "ddp":
        return ddp(timeout=timeout, gradient_as_bucket_view=True)
    backend = None
    if running.offload:  # norms and whole weights are then put together from parts in host memory
        backend = f"cpu:gloo,{device.type}:{'hccl' if device.type == 'npu' else 'nccl'}"
    return sharded(
        data_parallel_size=world_size, tensor_parallel_size=1, timeout=timeout, process_group_backend=backend
    )


def gathered(module: SupervisedFineTuning) -> dict[str, Tensor]:
    """What was trained, or its moving average, whole and on the CPU; all processes must call it, the first gets it."""
    from models.state_tensors import plain

    whole: dict[str, Tensor] = {}
    for name, parameter in module.trained():
        tensor = module.average.get(name, parameter).detach()
        full = cast(Tensor, cast(Any, tensor).full_tensor()) if isinstance(tensor, DTensor) else tensor
        if module.trainer.is_global_zero:
            whole[plain(name)] = full.cpu()
    return whole
