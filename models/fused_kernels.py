"""Kernels of an accelerator on the meta device: they keep less for backward than the same functions written out.

Attention keeps no matrix of rows by rows, RMSNorm its input and one number a row instead of copies in fp32. Without an
accelerator PyTorch writes both out on the meta device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001 # the name is the operator's
    torch.ops.aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001
)


class Fused(TorchFunctionMode):
    """Replace attention, and with `norms` RMSNorm too. `backward` leaves it: enter it again where blocks are recomputed."""

    def __init__(self, *, norms: bool = True) -> None:
        super().__init__()
        self._norms = norms

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's signature
        """Call what stands for a function."""
        given: dict[str, Any] = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return attention(*args, **given)
        if self._norms and func is torch.nn.functional.rms_norm:
            weight: Tensor | None = given.get("weight", args[2] if len(args) > 2 else None)
            if weight is None or weight.dtype == args[0].dtype:  # of two types it is written out there too
                return RMSNorm.apply(args[0], weight)
        return func(*args, **given)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # torch's signature
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: ARG001
) -> Tensor:
    """What a fused kernel returns: flash attention, or the memory-efficient one where there is a mask."""
    flash, efficient = ATTENTION
    if attn_mask is None:
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # positional
    bias = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    return efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]


class RMSNorm(torch.autograd.Function):
    """The sizes of CUDA's fused kernel: it saves input, weight and the root mean square of every row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor | None) -> Tensor:
        """A result of the input's size."""
        ctx.save_for_backward(rows, weight, rows.new_empty(*rows.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Gradients of the inputs' sizes."""
        rows, weight, _roots = ctx.saved_tensors
        return torch.empty_like(rows), None if weight is None else torch.empty_like(weight)
