"""Which device a setting named `accelerator` means: `auto`, `cpu`, `cuda` or `npu`, one of several as `cuda:1`.

Nothing falls back in silence: what is named and not there is an error, and only `auto` chooses.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import cast

import torch

from models.running import Running

ORDER = ("cuda", "npu", "cpu")
"""What `auto` takes: the first that is there."""


def device_of(accelerator: str, setting: str = "accelerator") -> torch.device:
    """The device that a setting names; with a number where the setting has one.

    Args:
        accelerator: `auto`, `cpu`, `cuda`, `npu`, `cuda:1`…
        setting: Its name, for errors.

    Raises:
        ValueError: it is no such name.
        RuntimeError: there is no such device here, or no package for it.
    """
    if accelerator == "auto":
        return torch.device(next(kind for kind in ORDER if missing(kind) is None))
    kind, colon, number = accelerator.partition(":")
    if kind not in ORDER or (colon and not number.isdecimal()) or (colon and kind == "cpu"):
        raise ValueError(
            f"{setting} = {accelerator}: no accelerator is called so; set auto, cpu, cuda, npu or e.g. cuda:1"
        )
    reason = missing(kind)
    if reason is None and colon and int(number) >= count(kind):
        reason = f"there are {count(kind)}, counted from 0"
    if reason is not None:
        raise RuntimeError(f"{setting} = {accelerator}: {reason}; set {setting} to cpu, or auto")
    return torch.device(accelerator)


def missing(kind: str) -> str | None:
    """Why there is no such device; None where there is one. Asking for `npu` imports torch_npu where it is installed.

    Never `torch_npu.contrib.transfer_to_npu`, which rewrites torch.cuda for the whole process.
    """
    if kind == "npu":
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu, which drives Ascend NPUs, is not installed"
        os.environ.setdefault("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")  # read at the import
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError, RuntimeError) as error:  # CANN's libraries are not there, or of another version
            return (
                f"torch_npu cannot be imported ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
            )
    if kind != "cpu" and count(kind) == 0:
        return "no such device is visible to this process"
    return None


def count(kind: str) -> int:
    """Devices of a kind; of the CPU one. The kind's package must be imported."""
    return 1 if kind == "cpu" else torch.get_device_module(kind).device_count()


def number_of(device: torch.device) -> int | None:
    """The number that a setting names a device by; None where it names the kind."""
    return cast("int | None", device.index)


def able(accelerator: str, running: Running) -> torch.device:
    """The device that trains, as `device_of`, once it is seen that it can.

    Raises:
        RuntimeError: 8-bit products on an NPU: torchao has no kernels for it.
    """
    device = device_of(accelerator, "train.accelerator")
    if running.precision == "fp8" and device.type == "npu":
        raise RuntimeError("train.precision fp8 has no kernels on npu; set it to bf16")
    return device
