"""A function over many items in processes that may crash or hang: each accident costs one item."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar, cast

Item = TypeVar("Item")
Result = TypeVar("Result")
ATTEMPTS = 2
"""A worker may die of its neighbour's hunger for memory, so an item gets a second, fresh one."""
LEAVE_S = 5.0
"""An idle child that has not left this long after its pipe was closed, s, is killed."""
START_S = 300.0
"""A child that has not started after this long, s, never will; importing takes one on an idle machine."""


@dataclass(frozen=True)
class Lost:
    """An item whose worker did not answer."""

    reason: str


@dataclass
class _Worker(Generic[Item, Result]):
    """One child process and the item it is busy with."""

    function: Callable[[Item], Result]
    process: Any = None
    pipe: Connection[Any, Any] = field(init=False)
    index: int | None = None
    limit_s: float = 0.0
    deadline: float = 0.0
    awake: bool = False

    def start(self) -> None:
        """Spawn the child: it inherits no thread, lock or open file of ours."""
        context = multiprocessing.get_context("spawn")
        self.pipe, far_end = cast("tuple[Connection[Any, Any], Connection[Any, Any]]", context.Pipe())
        self.process = context.Process(target=_serve, args=(far_end, self.function), daemon=True)
        self.process.start()
        self.awake = False
        far_end.close()

    def give(self, index: int, item: Item, limit_s: float) -> None:
        """Start on an item."""
        if self.process is None:
            self.start()
        self.index, self.limit_s = index, limit_s
        self.deadline = time.monotonic() + limit_s + (0 if self.awake else START_S)
        with contextlib.suppress(BrokenPipeError):  # it died while idle: reading its answer tells
            self.pipe.send(item)

    def greet(self) -> None:
        """Take the new child's first word; its time for the item runs from here, whatever its start took."""
        with contextlib.suppress(EOFError, ConnectionResetError):  # it died: reading its answer tells
            self.pipe.recv()
        self.awake, self.deadline = True, time.monotonic() + self.limit_s

    def dismiss(self) -> None:
        """Tell the child to go: an idle one by closing its pipe, so that it puts away what it holds; a busy one dies."""
        if self.process is not None and self.index is not None:
            self.process.kill()
        elif self.process is not None:
            self.pipe.close()

    def stop(self) -> str:
        """See the child end; says how it ended."""
        if self.process is None:
            return ""
        self.process.join(timeout=LEAVE_S)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
            self.process.join()
        self.pipe.close()
        self.process, self.index = None, None
        return f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"


def map_isolated(
    function: Callable[[Item], Result], items: Sequence[Item], num_workers: int, limit_s: float
) -> Iterator[tuple[int, Result | Lost]]:
    """Results with their items' indices, in the order they come; `Lost` after two crashes or past `limit_s`.

    `function` and everything it takes and returns must be importable by a fresh process.

    Raises:
        Exception: whatever `function` raised.
    """
    waiting = deque(range(len(items)))
    attempts = [0] * len(items)
    workers = [_Worker(function) for _ in range(max(1, min(num_workers, len(items))))]
    try:
        while waiting or any(worker.index is not None for worker in workers):
            for worker in workers:
                if worker.index is None and waiting:
                    index = waiting.popleft()
                    attempts[index] += 1
                    worker.give(index, items[index], limit_s)
            for worker in _answering(workers):
                index, answer = cast(int, worker.index), _answer(worker, limit_s)
                if isinstance(answer, Lost) and answer.reason.startswith("crash") and attempts[index] < ATTEMPTS:
                    waiting.append(index)
                elif answer is not None:
                    yield index, answer
    finally:
        for worker in workers:
            worker.dismiss()
        for worker in workers:
            worker.stop()


def _answering(workers: Sequence[_Worker[Item, Result]]) -> list[_Worker[Item, Result]]:
    """Workers that have an answer, died or ran out of time; waits for the first."""
    busy = [worker for worker in workers if worker.index is not None]
    patience = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
    ready = multiprocessing.connection.wait([worker.pipe for worker in busy], timeout=patience)
    for worker in [worker for worker in busy if worker.pipe in ready and not worker.awake]:
        worker.greet()
    now = time.monotonic()
    return [worker for worker in busy if worker.pipe.poll() or worker.deadline <= now]


def _answer(worker: _Worker[Item, Result], limit_s: float) -> Result | Lost:
    """What became of the worker's item; a worker that failed is stopped and starts afresh with its next item."""
    if not worker.pipe.poll():
        worker.process.kill()
        worker.stop()
        return Lost(f"takes longer than {limit_s:g} s")
    try:
        result, error = cast(tuple[Result, Exception | None], worker.pipe.recv())
    except (EOFError, ConnectionResetError):
        return Lost(f"crashes the decoder ({worker.stop()})")
    worker.index = None
    if error is not None:
        raise error
    return result


def _serve(pipe: Connection[Any, Any], function: Callable[[Any], Any]) -> None:
    """The child's life: greet, then answer until the parent hangs up."""
    threading.Thread(target=_follow_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        pipe.send(None)
        while True:
            pipe.send(_outcome(function, pipe.recv()))


def _follow_parent() -> None:
    """End at once when the parent is killed: a child busy with a long item would go on for nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _outcome(function: Callable[[Item], Result], item: Item) -> tuple[Result | None, Exception | None]:
    """What the function returns or raises."""
    try:
        return function(item), None
    except Exception as error:  # noqa: BLE001  # it is raised again in the parent
        return None, error
