"""Where many files are worked on: processes of this machine, or a Ray cluster. The results are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeVar

from pydantic import Field, model_validator

from data.isolation import GB, Limits, Lost
from data.records import Frozen

Item = TypeVar("Item")
Result = TypeVar("Result")
WINDOW = 64
"""Items a worker may be ahead of the oldest unanswered one: how many results wait for their turn at most."""
MOST_GB = 1e6
"""No machine has a petabyte, and the system's own limits end at 2⁶³ bytes."""


class RayCluster(Frozen):
    """The cluster that `engine.name = ray` works on; its nodes see the same files at the same paths."""

    address: str = "local"
    """`local` starts one on this machine and stops it at the end; `auto` finds the running one; or `host:port`."""
    min_workers: int = Field(default=1, gt=0)
    """Files for which an autoscaling cluster keeps room all the time."""
    max_workers: int = Field(default=8, gt=0)
    """Most files at work at once in the whole cluster; it never grows beyond that."""
    cpus_per_item: float = Field(default=1.0, gt=0)
    """Processor cores that one file occupies."""
    max_retries: int = Field(default=3, ge=0)
    """How often a file is taken up again after its worker was killed or its node lost."""
    object_store_mb: int = Field(default=128, ge=80)
    """Shared memory of a `local` cluster, MB; rows are small, and Ray needs 80."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> RayCluster:
        if self.min_workers > self.max_workers:
            raise ValueError(f"min_workers = {self.min_workers} is more than max_workers = {self.max_workers}")
        return self


class Engine(Frozen):
    """How many files are worked on at once, where, and what one of them may use; no result depends on it."""

    name: Literal["local", "ray"] = "local"
    """`local`: processes of this machine. `ray`: those of a cluster (`pip install -e '.[ray]'`)."""
    num_workers: int = Field(default=2, gt=0)
    """Files at work at once with `local`, each in a process of its own."""
    max_item_s: float = Field(default=1800.0, gt=0)
    """Longest time one file may take, s; after that it is given up and its row says so."""
    max_item_gb: float = Field(default=4.0, gt=0, le=MOST_GB)
    """Most memory one file may take, GB (10⁹ bytes); an 8K frame takes 0.2, a decoder with its references 2."""
    max_file_gb: float = Field(default=64.0, gt=0, le=MOST_GB)
    """Largest file that working on one may write, GB: a local copy of a remote video, a measurement."""
    ray: RayCluster = RayCluster()
    """Settings of `ray`."""

    @property
    def limits(self) -> Limits:
        """What one item may use."""
        return Limits(self.max_item_s, round(self.max_item_gb * GB), round(self.max_file_gb * GB), "engine")


def map_ordered(function: Callable[[Item], Result], items: Iterable[Item], engine: Engine) -> Iterator[Result | Lost]:
    """Results in the order of the items; `Lost` where one crashed twice, hung, or was too big.

    Items are taken as they are needed, so there may be millions. Each is worked on in a child process with time and
    memory limits, in the present working directory. `function` and everything it takes and returns must be importable
    by a fresh process.

    Raises:
        RuntimeError: the engine cannot be started.
        Exception: whatever `function` raised.
    """
    if engine.name == "ray":
        from data.ray_engine import answers

        yield from in_order(answers(function, items, engine.limits, engine.ray, WINDOW))
        return
    from data.workers import Pool

    with Pool(function, engine.num_workers, engine.limits) as pool:
        yield from in_order(pool.answers(items, window=WINDOW * engine.num_workers))


def in_order(answers: Iterable[tuple[int, Result]]) -> Iterator[Result]:
    """What belongs to index 0, 1, 2…, each as soon as all before it are there."""
    waiting: dict[int, Result] = {}
    first = 0
    for index, answer in answers:
        waiting[index] = answer
        while first in waiting:
            yield waiting.pop(first)
            first += 1
