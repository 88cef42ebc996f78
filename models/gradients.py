"""Gradient norms by group of modules, of plain and of sharded parameters, and of the whole model.

Source of the sum over shards: a norm's square is the sum of its parts' squares, so every process adds its own parts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

ALL, OTHER = "all", "other"
"""Names of the whole model's norm, and of that of what no pattern matches."""
WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
"""What DDP, compilation, recomputation and sharding put into names."""


def groups_of(
    groups: Mapping[str, str], blocks: str, num_blocks: int, num_ranges: int = 4, split: str = "attention|feed-forward"
) -> dict[str, str]:
    r"""Patterns of parameter names by group, with those of the blocks by depth: `attention 0-7`, `attention 8-15`…

    Args:
        groups: As `models.families.sketches.Sketch.groups`; the first that matches counts.
        blocks: Regular expression of a block, its number as `\d+`, as `Sketch.units`.
        num_blocks: Of the transformer.
        num_ranges: As many ranges of blocks, or fewer where there are fewer blocks.
        split: Regular expression of the groups that are told apart by depth.
    """
    result: dict[str, str] = {}
    size = math.ceil(num_blocks / min(num_ranges, num_blocks))
    first = blocks.partition("|")[0]
    for name, pattern in groups.items():
        if not re.fullmatch(split, name) or first not in pattern:
            result[name] = pattern
            continue
        for low in range(0, num_blocks, size):
            high = min(low + size, num_blocks)
            numbers = "|".join(map(str, range(low, high)))
            only = first.replace(r"\d+", f"(?:{numbers})")
            shown = f"{name} {low}-{high - 1}" if high - low > 1 else f"{name} {low}"
            result[shown] = pattern.replace(first, only)
    return result


def norms(named: Iterable[tuple[str, Parameter]], groups: Mapping[str, str]) -> dict[str, float]:
    """Euclidean norm of the gradients of every group that has any, and of all of them, under `all`.

    All processes call it together: sharded gradients are summed over the processes that share them. Gradients are read
    and never changed.

    Args:
        named: Parameters with their names, as `Module.named_parameters`.
        groups: Regular expression by group; the first that matches a name's beginning counts, else it is `other`.

    Raises:
        ValueError: a gradient waits for a sum over processes, so it has no norm yet.
    """
    names = [*groups, OTHER]
    squares: dict[Any, Tensor] = {}
    present: set[int] = set()
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        plain = WRAPPERS.sub("", name)
        place = next((at for at, pattern in enumerate(groups.values()) if re.match(pattern, plain)), len(groups))
        present.add(place)
        shards = _shards(parameter, name)  # by the parameter, which all processes have, with a gradient or without
        if shards not in squares:
            squares[shards] = torch.zeros(len(names), dtype=torch.float64, device=_local(parameter).device)
        if parameter.grad is not None:
            _shards(parameter.grad, name)
            squares[shards][place] += _local(parameter.grad).detach().double().square().sum()
    totals = [0.0] * len(names)
    for (mesh, dimensions), sums in squares.items():
        for dimension in dimensions:
            dist.all_reduce(sums, group=mesh.get_group(dimension))
        totals = [total + value for total, value in zip(totals, cast("list[float]", sums.tolist()), strict=True)]
    found = {names[place]: math.sqrt(totals[place]) for place in sorted(present)}
    return {**found, ALL: math.sqrt(sum(totals))}


def _local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shards(tensor: Tensor, name: str) -> tuple[Any, tuple[int, ...]]:
    """Mesh of a tensor, and its dimensions over which the tensor is cut; None and none where it is whole.

    Raises:
        ValueError: it is a sum that is still to be made.
    """
    if not isinstance(tensor, DTensor):
        return None, ()
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"gradient of {name} is still partial; take norms after the last backward pass of a step")
    cut = tuple(at for at, placement in enumerate(tensor.placements) if placement.is_shard())
    return tensor.device_mesh, cut
