"""Ascend NPUs under Lightning, which has no accelerator for them; importing this registers one as `npu`.

Source of what Lightning needs: its `CUDAAccelerator`. Everything goes through `torch.npu`, which torch_npu provides.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from lightning.fabric.utilities.distributed import (
    _init_dist_connection,  # pyright: ignore[reportPrivateUsage] # its strategies have no switch for it
)
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from typing_extensions import override

from models.accelerators import count, missing
from models.sharding import Sharded

BACKEND = "hccl"
"""Ascend's library of collective operations."""


def npu() -> Any:
    """`torch.npu`."""
    return cast(Any, torch).npu


class NPUAccelerator(Accelerator):
    """The NPUs of this machine."""

    @override
    def setup_device(self, device: torch.device) -> None:
        """Make a device this process's own.

        Raises:
            RuntimeError: it is none of this kind.
        """
        if device.type != "npu":
            raise RuntimeError(f"accelerator npu got device {device}; give it NPUs alone")
        npu().set_device(device)

    @override
    def teardown(self) -> None:
        """Give memory back that no tensor uses."""
        npu().empty_cache()

    @override
    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        """Figures of the allocator, bytes."""
        return dict(npu().memory_stats(device))

    @staticmethod
    @override
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """Numbers of devices from what `Trainer(devices=…)` takes.

        Raises:
            ValueError: there are not so many.
        """
        if isinstance(devices, list):
            wanted = devices
        elif devices in ("auto", -1, "-1"):
            wanted = list(range(count("npu")))
        elif isinstance(devices, str) and "," in devices:
            wanted = [int(part) for part in devices.split(",") if part.strip()]
        else:
            wanted = list(range(int(devices)))
        if not wanted or max(wanted) >= count("npu") or min(wanted) < 0:
            raise ValueError(
                f"{devices} of {count('npu')} NPUs; set launch.processes_per_node to the devices that are here"
            )
        return wanted

    @staticmethod
    @override
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """Devices by their numbers."""
        return [torch.device("npu", number) for number in devices]

    @staticmethod
    @override
    def auto_device_count() -> int:
        """How many there are."""
        return count("npu")

    @staticmethod
    @override
    def is_available() -> bool:
        """Whether there is one."""
        return missing("npu") is None

    @staticmethod
    @override
    def name() -> str:
        """Of the setting."""
        return "npu"


class Unbound(ParallelStrategy):
    """Begins the process group without binding it to a device, as Lightning does to whatever is not a CPU.

    Of a bound group torch expects that it can be split, which HCCL need not do, and that every other group, ours of
    gloo too, serves the device.
    """

    @override
    def setup_environment(self) -> None:
        """See `Strategy`; Lightning takes a process group that is there as it is."""
        assert self.cluster_environment is not None
        npu().set_device(self.root_device)
        kept = vars(self)  # where both strategies have them
        backend = kept["_process_group_backend"] or BACKEND
        _init_dist_connection(self.cluster_environment, backend, timeout=kept["_timeout"])
        super().setup_environment()


class NPUModelParallelStrategy(Unbound, Sharded):
    """FSDP2."""


class NPUDDPStrategy(Unbound, DDPStrategy):
    """DDP without Lightning's assumption that whatever is not a CPU has CUDA's streams."""

    @override
    def determine_ddp_device_ids(self) -> None:
        """None: the module is on its device already, so DDP need not move its inputs."""
        return


AcceleratorRegistry.register("npu", NPUAccelerator, description="Ascend NPUs", override=True)
