"""How a run uses its devices: settings that change what it costs and not what it learns."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from data.records import Frozen


class Running(Frozen):
    """How any stage is run."""

    strategy: Literal["ddp", "fsdp2"] = "fsdp2"
    """`ddp` has everything on every device; `fsdp2` shards weights, gradients and optimiser states."""
    precision: Literal["bf16", "fp16", "fp32", "fp8"] = "bf16"
    """`bf16` and `fp16` compute in it with master weights, gradients and optimiser in fp32; `fp32` does all in it;
    `fp8` is bf16 with the blocks' large matrix products in 8 bits (torchao; compute capability 8.9 or above)."""
    recompute: Literal["none", "blocks", "selective"] = "blocks"
    """Activations computed again in backward: `none`, all of the `blocks`, or what is not attention (`selective`)."""
    offload: bool = False
    """Keep weights, gradients and optimiser in host memory; needs fsdp2, and time for copies that is not planned."""
    micro_batch: int = Field(default=1, gt=0)
    """Clips a device takes at once. Gradients add up to those of the whole batch; out of memory, it is halved."""
    frozen_weights: Literal["fp32", "compute"] = "fp32"
    """Precision in which weights that are not trained are kept: `fp32` as they are loaded, or that of computing."""

    @model_validator(mode="after")
    def _can_offload(self) -> Running:
        if self.offload and self.strategy != "fsdp2":
            raise ValueError("offload needs strategy fsdp2; DDP keeps its parameters on the device")
        return self
