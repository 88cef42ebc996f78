"""Child processes that do not outlive their purpose, however a run ended: one session each, found again by its number."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from data.files import remove, write_text
from data.records import DataRefused, Frozen, GateFailed
from models.preemption import EXIT_PREEMPTED, Preempted

GRACE_S = 25.0
"""Between SIGTERM and SIGKILL, s; less than the 30 s that Prefect's runner grants before it kills."""


KINDS: Mapping[int, type[Exception]] = {2: ValueError, 4: GateFailed, 5: DataRefused, EXIT_PREEMPTED: Preempted}
"""Which error a command's exit status stands for, where it is not a RuntimeError."""


class Lease(Frozen):
    """Which run is at work in a checkout."""

    launcher: int
    """Process that waits for the run."""
    launcher_began_s: float
    """When it began, Unix time: a process number alone may be used again."""
    session: int
    """Session that the run's processes share."""


def run_alone(command: Sequence[str], environment: Mapping[str, str], lease: Path) -> int:
    """Exit status of a command that is the only one of its kind here; ends what it, or a killed one before, left.

    An interrupt or SIGTERM is handed on, and the command is waited for in any case.

    Raises:
        RuntimeError: such a command is running; the message names its process.
    """
    end_abandoned(lease)
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    me = psutil.Process()
    holder = Lease(launcher=me.pid, launcher_began_s=me.create_time(), session=process.pid)
    write_text(lease, holder.model_dump_json() + "\n")

    def hand_on(_number: int, _frame: object) -> None:
        process.terminate()  # not SIGINT, which a shell's background jobs ignore

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return process.wait()
    finally:
        end(lambda: members(holder.session))
        for number, handler in before.items():
            signal.signal(number, handler)
        remove(lease)


def end_abandoned(lease: Path) -> None:
    """End the processes of a run whose launcher was killed.

    Raises:
        RuntimeError: the launcher is alive.
    """
    if not lease.is_file():
        return
    holder = Lease.model_validate_json(lease.read_bytes())
    with suppress(psutil.NoSuchProcess):
        if psutil.Process(holder.launcher).create_time() == holder.launcher_began_s:
            raise RuntimeError(f"another run (process {holder.launcher}) is at work in this checkout; wait or stop it")
    end(lambda: members(holder.session))
    remove(lease)


def members(session: int) -> list[int]:
    """Processes of a session that work in this folder; the folder tells them from a later session of that number."""
    found: list[int] = []
    for number in psutil.pids():
        with suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getsid(number) == session and psutil.Process(number).cwd() == str(Path.cwd()):
                found.append(number)
    return found


def marked(name: str, value: str) -> list[int]:
    """Processes started, however indirectly, with this environment variable; it tells them when their parents are gone."""
    found: list[int] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(name) == value:
                found.append(process.pid)
    return found


def end(alive: Callable[[], Sequence[int]], grace_s: float = GRACE_S) -> None:
    """Ask the processes to end, wait, and kill those that remain; asks again whatever appears meanwhile."""
    deadline = time.monotonic() + grace_s
    asked: set[int] = set()
    while remaining := alive():
        late = time.monotonic() > deadline
        for number in remaining:
            if late or number not in asked:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL if late else signal.SIGTERM)
        asked.update(remaining)
        time.sleep(0.05)
