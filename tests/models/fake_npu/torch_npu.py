"""What torch_npu is to its callers, over the device of `device.cpp`, whose library FAKE_NPU names."""

from __future__ import annotations

import importlib.util
import os
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

if os.environ.get("PYTORCH_NPU_ALLOC_CONF") != "expandable_segments:True":
    raise RuntimeError("the allocator's settings must be there before this import")
spec = importlib.util.spec_from_file_location("soundstage_fake_npu", os.environ["FAKE_NPU"])
assert spec is not None
assert spec.loader is not None
device: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(device)


class Event:
    """Of a device that is always done."""

    def record(self, stream: object = None) -> Event:
        return self

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...


class Stream:
    """As if there were one."""

    def __init__(self, priority: int = 0) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self) -> Event:
        return Event()


npu: Any = ModuleType("torch.npu")
npu.Event, npu.Stream = Event, Stream
npu.device_count = lambda: int(os.environ.get("FAKE_NPU_COUNT", device.COUNT))
npu.is_available = lambda: npu.device_count() > 0
npu.is_initialized = lambda: True
npu.current_device = device.current
npu.set_device = lambda chosen: device.set_current(torch.device(chosen).index)
npu.current_stream = lambda chosen=None: Stream()
npu.stream = lambda chosen: nullcontext()
npu.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
npu.empty_cache = lambda: None
npu.memory_stats = lambda chosen=None: {"allocated_bytes.all.current": 3}
npu.memory_allocated = lambda chosen=None: 3
npu.max_memory_allocated = lambda chosen=None: 5
npu.memory_reserved = lambda chosen=None: 7
npu.max_memory_reserved = lambda chosen=None: 9
npu.mem_get_info = lambda chosen=None: (100, 109)
npu.manual_seed_all = lambda seed: None
npu.get_rng_state = lambda chosen=None: torch.zeros(1)
npu.set_rng_state = lambda state, chosen=None: None
npu._is_in_bad_fork = lambda: False

torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)
dist.Backend.register_backend(
    "hccl",
    lambda store, rank, size, timeout: device.collectives(dist.ProcessGroupGloo(store, rank, size, timeout)),
    devices=["npu"],
)
