"""FSDP2 under Lightning, for weights that may stay in host memory."""

from __future__ import annotations

from typing import Any, cast

from lightning.pytorch.strategies import ModelParallelStrategy
from typing_extensions import override


class Sharded(ModelParallelStrategy):
    """Lightning's FSDP2, which leaves weights where they are."""

    @override
    def model_to_device(self) -> None:
        """Note the device and move nothing: `fully_shard` has, and offloaded weights must not follow it there."""
        cast(Any, self.lightning_module)._device = self.root_device  # noqa: SLF001 # what the module's own `to` does
