"""The same function over many items in several processes, of which any may die."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import TypeVar

Item = TypeVar("Item")
Output = TypeVar("Output")


def each(
    function: Callable[[Item], Output], items: Sequence[Item], num_workers: int, name: str
) -> Iterator[tuple[Item, Output | None]]:
    """Every item with the function's output, in the given order; None where its process died, alone, twice."""
    from tqdm import tqdm

    with tqdm(total=len(items), desc=name, unit="source", disable=None) as bar:
        if num_workers == 1 or len(items) < 2:
            for item in items:
                yield item, function(item)
                bar.update()
            return
        outputs: dict[int, Output] = {}
        for index, output in gather(function, dict(enumerate(items)), num_workers):
            outputs[index] = output
            bar.update()
        for index, item in enumerate(items):  # one crash takes the whole pool down: whom did it belong to?
            if index not in outputs:
                outputs.update(gather(function, {index: item}, 1))
                bar.update()
            yield item, outputs.get(index)


def gather(
    function: Callable[[Item], Output], items: dict[int, Item], num_workers: int
) -> Iterator[tuple[int, Output]]:
    """Outputs by key as they come; those of a pool that broke are missing."""
    with ProcessPoolExecutor(num_workers, get_context("spawn"), initializer=begin) as pool:
        keys: dict[Future[Output], int] = {pool.submit(function, item): key for key, item in items.items()}
        for future in as_completed(keys):
            try:
                yield keys[future], future.result()
            except BrokenProcessPool:
                continue


def begin() -> None:
    """Prepare a worker: one thread each, and no life after its parent's, even if that was killed."""
    os.environ.update(OMP_NUM_THREADS="1", OPENCV_FOR_THREADS_NUM="1")  # read when the libraries are first imported
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """Wait for the parent's end, then end."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
