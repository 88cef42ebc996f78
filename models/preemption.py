"""Being asked to stop: by a scheduler that needs the machine, or by a person. All processes stop at one step."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from models.ranks import Ranks

EXIT_PREEMPTED = 75
"""Exit status of what stopped because it was asked to: `EX_TEMPFAIL` of sysexits.h, "try again later".

Not 143: that is what a shell reports of any process that SIGTERM ended, wherever it was.
"""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What asks: the end of a time limit or of a machine, and a scheduler's early warning."""


class Preempted(RuntimeError):
    """A run that stopped because it was asked to; the message says where it can go on."""


class Preemption:
    """Hears SIGTERM and SIGUSR1 while it is open; nothing happens in the handler, so none cuts a step in two.

    Open it in the main thread, under Lightning not before `on_train_start`: the handler that the Trainer installs in
    `fit` broadcasts from within the signal, and processes of which one was asked then wait for each other.
    """

    _is_open = False

    def __init__(self) -> None:
        self._heard = False
        self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        Preemption._is_open = True

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        self._heard = True

    def asked(self, ranks: Ranks) -> bool:
        """Whether any process was asked to stop; all call it once an optimiser step and get the same answer."""
        return ranks.any(self._heard)

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        Preemption._is_open = False
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @classmethod
    def forget(cls) -> None:
        """In a forked child: end at SIGTERM, which is how its parent ends it; a scheduler's SIGUSR1 is not for it."""
        if cls._is_open:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)


os.register_at_fork(after_in_child=Preemption.forget)


def outlive_one_signal(_worker: int) -> None:
    """`worker_init_fn` of a DataLoader: launchers signal whole process groups, and the step at work needs its readers.

    The first SIGTERM does nothing, the second ends the reader: its parent sends one if closing the queue did not.
    """

    def once(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, once)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
