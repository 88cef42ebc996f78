"""The processes of one run, as seen by what they have to agree on; one process where there are no others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """Agreement over a gloo group of its own, so that it never races what training sends.

    All processes construct it and call its methods in the same order.
    """

    def __init__(self, timeout_s: float = 1800) -> None:
        """`timeout_s`: how long one waits for the others, s."""
        self.group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        else:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is meant to be

    def gather(self, value: T) -> list[T]:
        """What every process gave, by rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def any(self, value: bool) -> bool:
        """Whether it is true in any process."""
        if self.group is None:
            return value
        found = torch.tensor(int(value))
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return bool(found)

    def first(self, work: Callable[[], T]) -> T:
        """What rank 0 finds, in all processes.

        Raises:
            RuntimeError: it failed, in all processes.
        """
        found: list[Any] = [None, ""]
        cause: Exception | None = None
        if self.rank == 0:
            try:
                found[0] = work()
            except (OSError, RuntimeError) as error:
                found[1], cause = str(error), error
        if self.group is not None:
            dist.broadcast_object_list(found, src=0, group=self.group)
        if found[1]:
            raise RuntimeError(found[1]) from cause
        return cast(T, found[0])
