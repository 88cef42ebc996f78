"""A function over many items in processes that may crash, hang or swell: each accident costs one item."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

import psutil

from data.isolation import Birth, Limits, Lost, serve, sweep_scratch

Item = TypeVar("Item")
Result = TypeVar("Result")
LEAVE_S = 5.0
"""An idle child that has not left this long after its pipe was closed, s, is killed."""
START_S = 300.0
"""A child that has not started after this long, s, never will; importing takes one on an idle machine."""
LOOK_S = 0.1
"""How often the memory of busy children is looked at, s: a page fault costs 0.25 µs, so one gains 1.6 GB at most."""
MAX_ITEMS = 1000
"""Items after which a child is replaced, so that what libraries leak and leave in temporary files ends with it."""
GROWTH_SHARE = 0.25
"""Share of its memory limit that a child may gain after its first item; then it is replaced: the next needs the room."""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""What numeric libraries read once, when they are imported; what the user has set stays."""


@contextlib.contextmanager
def one_thread_each() -> Generator[None]:
    """Children that start meanwhile compute on one thread: there is one for each core, and threads that wait spin."""
    missing = [name for name in THREADS if name not in os.environ]
    os.environ.update(dict.fromkeys(missing, "1"))
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


class _Worker(Generic[Item, Result]):
    """One child process and the item it is busy with."""

    def __init__(self, function: Callable[[Item], Result], limits: Limits, folder: Path, scratch: Path) -> None:
        self.function, self.limits, self.folder, self.scratch = function, limits, folder, scratch
        self.process: Any = None
        self.task: tuple[int, Item] | None = None
        self.pipe: Connection[Any, Any]
        self.deadline, self.awake, self.served, self.at_first = 0.0, False, 0, 0

    def start(self) -> None:
        """Spawn the child: it inherits no thread, lock or open file of ours."""
        context = multiprocessing.get_context("spawn")
        self.scratch.mkdir(parents=True, exist_ok=True)
        bound = threading.current_thread() is threading.main_thread()
        birth = Birth(self.function, self.limits, str(self.folder), str(self.scratch), bound)
        self.pipe, far_end = cast("tuple[Connection[Any, Any], Connection[Any, Any]]", context.Pipe())
        self.process = context.Process(target=serve, args=(far_end, birth), daemon=True)
        with one_thread_each():
            self.process.start()
        self.awake, self.served = False, 0
        far_end.close()

    def give(self, index: int, item: Item) -> None:
        """Start on an item."""
        if self.process is None:
            self.start()
        self.task = index, item
        self.served += 1
        self.deadline = time.monotonic() + self.limits.seconds + (0 if self.awake else START_S)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died while idle: its answer tells
            self.pipe.send(item)

    def _greet(self) -> None:
        """Take the new child's first word; its time for the item runs from here, whatever its start took."""
        with contextlib.suppress(EOFError, ConnectionResetError):  # it died: reading its answer tells
            self.pipe.recv()
        self.awake, self.deadline = True, time.monotonic() + self.limits.seconds

    def answer(self) -> Result | Lost | None:
        """What became of the item, None while it is at work; a child that failed is ended.

        Raises:
            Exception: whatever the function raised.
        """
        if self.pipe.poll():
            return self._receive() if self.awake else self._greet()
        if self.process.exitcode is not None:  # a copy that it left behind may hold the pipe open
            return self._crashed()
        if self.limits.resident_bytes is not None and self.resident() > self.limits.resident_bytes:
            self.stop(kill=True)
            return self.limits.too_big()
        if self.deadline <= time.monotonic():
            self.stop(kill=True)
            return self.limits.too_slow()
        return None

    def _receive(self) -> Result | Lost:
        try:
            result, error = cast(tuple[Result, Exception | None], pickle.loads(self.pipe.recv_bytes()))  # noqa: S301 # our child's
        except (EOFError, OSError):  # also in the middle of its answer
            return self._crashed()
        self.task = None
        if error is not None:
            raise error
        if isinstance(result, Lost) or self.served >= MAX_ITEMS or self._has_grown():
            self.stop()
        return result

    def _has_grown(self) -> bool:
        if self.limits.resident_bytes is None:
            return False
        if self.served == 1:
            self.at_first = self.resident()
        return self.resident() - self.at_first > GROWTH_SHARE * self.limits.resident_bytes

    def _crashed(self) -> Lost:
        return Lost(f"crashes the decoder ({self.stop()})", again=True)

    def resident(self) -> int:
        """Memory the child uses, bytes; 0 where it is gone."""
        try:
            return psutil.Process(self.process.pid).memory_info().rss
        except psutil.Error:
            return 0

    def dismiss(self) -> None:
        """Tell the child to go: an idle one by closing its pipe, so that it puts away what it holds; a busy one dies."""
        if self.process is not None and self.task is not None:
            self._kill()
        elif self.process is not None:
            self.pipe.close()

    def stop(self, *, kill: bool = False) -> str:
        """See the child end, and all it started; says how it ended."""
        if self.process is None:
            return ""
        if kill:
            self._kill()
        elif self.task is None:
            self.pipe.close()
        self.process.join(timeout=LEAVE_S)
        code = self.process.exitcode
        self._kill()
        self.process.join()
        self.pipe.close()
        self.process, self.task = None, None
        shutil.rmtree(self.scratch, ignore_errors=True)
        return f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"

    def _kill(self) -> None:
        """End the child and its process group, which bears its number once it has settled in."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()


class Queue(Generic[Item]):
    """Items not answered yet: those to come, those at work, those to be tried again."""

    def __init__(self, items: Iterable[Item], window: int | None) -> None:
        self._items, self._window = enumerate(items), window
        self._again: deque[tuple[int, Item]] = deque()
        self._open: set[int] = set()
        self._tried: set[int] = set()
        self._next = 0

    def take(self) -> tuple[int, Item] | None:
        """The next item and its index; None where there is none, or none yet."""
        if self._again:
            return self._again.popleft()
        if self._window is not None and self._open and self._next >= min(self._open) + self._window:
            return None
        task = next(self._items, None)
        if task is not None:
            self._open.add(task[0])
            self._next = task[0] + 1
        return task

    def wants_again(self, index: int, item: Item, answer: object) -> bool:
        """Whether an answered item gets a second try, its last; else it is done with."""
        if isinstance(answer, Lost) and answer.again and index not in self._tried:
            self._tried.add(index)
            self._again.append((index, item))
            return True
        self._tried.discard(index)
        self._open.discard(index)
        return False


class Pool(Generic[Item, Result]):
    """Children that answer for items; they stay between calls, until `close`. They work in `folder`, else in ours."""

    def __init__(
        self, function: Callable[[Item], Result], num_workers: int, limits: Limits, folder: Path | None = None
    ) -> None:
        prefix = f"soundstage-{socket.gethostname()}-"
        sweep_scratch(prefix)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-"))
        place = folder or Path.cwd()
        self._workers = [_Worker(function, limits, place, self._folder / str(n)) for n in range(num_workers)]

    def __enter__(self) -> Pool[Item, Result]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def answers(self, items: Iterable[Item], window: int | None = None) -> Iterator[tuple[int, Result | Lost]]:
        """Results with their items' indices, in the order they come.

        Takes an item from `items` when a child is free for it and no unanswered one lies `window` or more before it.

        Raises:
            Exception: whatever the function raised.
        """
        queue = Queue(items, window)
        try:
            while True:
                for worker in [worker for worker in self._workers if worker.task is None]:
                    if (task := queue.take()) is not None:
                        worker.give(*task)
                if not (busy := self._busy()):
                    return
                _wait(busy)
                for worker in busy:
                    index, item = cast("tuple[int, Item]", worker.task)
                    answer = worker.answer()
                    if worker.task is None and not queue.wants_again(index, item, answer):
                        yield index, cast("Result | Lost", answer)
        finally:
            for worker in self._busy():
                worker.stop(kill=True)

    def _busy(self) -> list[_Worker[Item, Result]]:
        return [worker for worker in self._workers if worker.task is not None]

    def close(self) -> None:
        """End the children and delete their temporary files."""
        for worker in self._workers:
            worker.dismiss()
        for worker in self._workers:
            worker.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def _wait(busy: Sequence[_Worker[Item, Result]]) -> None:
    """Wait until a child says something, or it is time to look at them."""
    patience = max(0.0, min(LOOK_S, *(worker.deadline - time.monotonic() for worker in busy)))
    multiprocessing.connection.wait([worker.pipe for worker in busy], timeout=patience)


def map_isolated(
    function: Callable[[Item], Result], items: Sequence[Item], num_workers: int, limit_s: float
) -> Iterator[tuple[int, Result | Lost]]:
    """Results with their items' indices, in the order they come; `Lost` after two crashes or past `limit_s`.

    `function` and everything it takes and returns must be importable by a fresh process.

    Raises:
        Exception: whatever `function` raised.
    """
    if items:
        with Pool(function, num_workers, Limits(limit_s)) as pool:
            yield from pool.answers(items)
