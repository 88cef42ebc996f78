"""The child's side of a process that may crash, hang or fill the machine: what it may use, say and leave behind."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

GB = 10**9
HEADROOM_BYTES = GB
"""Memory a child may reserve beyond what it may use, bytes: allocators and thread stacks ask for more than they touch."""
PR_SET_PDEATHSIG = 1
"""Linux, prctl(2): the signal that a process gets when its parent dies."""


@dataclass(frozen=True)
class Lost:
    """An item whose worker did not answer."""

    reason: str
    again: bool = field(default=False, compare=False, repr=False)
    """Whether a second try may succeed: the worker may have died of its neighbours or of what it did before."""


class Limits(NamedTuple):
    """What one item may use."""

    seconds: float
    resident_bytes: int | None = None
    """Memory really used, bytes; None: as much as there is."""
    file_bytes: int | None = None
    """Largest file it may write, bytes; None: as large as the disk takes."""

    options: str = ""
    """Section whose settings these are, for messages: `engine` has `max_item_s`, `max_item_gb`, `max_file_gb`."""

    def too_slow(self) -> Lost:
        """The verdict on an item that hangs."""
        return Lost(f"takes longer than {self.seconds:g} s{self._limit('max_item_s')}")

    def too_big(self) -> Lost:
        """The verdict on an item that needs too much memory."""
        return Lost(f"needs more than {_in_gb(self.resident_bytes)} of memory{self._limit('max_item_gb')}", again=True)

    def too_long(self) -> Lost:
        """The verdict on an item that writes too large a file."""
        return Lost(f"writes a file of more than {_in_gb(self.file_bytes)}{self._limit('max_file_gb')}")

    def _limit(self, option: str) -> str:
        return f"; limit {self.options}.{option}" if self.options else ""


def _in_gb(size_bytes: int | None) -> str:
    return "what there is" if size_bytes is None else f"{size_bytes / GB:g} GB"


class Birth(NamedTuple):
    """What a child is told when it starts."""

    function: Callable[[Any], Any]
    limits: Limits
    folder: str
    """Working directory, against which relative paths are resolved."""
    scratch: str
    """Folder of its temporary files; whoever started it sweeps it."""
    bound: bool
    """Whether the system may end it with the thread that started it."""


def serve(pipe: Connection[Any, Any], birth: Birth) -> None:
    """The child's life: settle in, greet, then answer until the parent hangs up."""
    _follow_parent(birth.bound)
    _settle(birth)
    own = os.getpid()
    with contextlib.suppress(EOFError, OSError):
        pipe.send(None)
        while True:
            answer = _outcome(birth, pipe.recv())
            if os.getpid() != own:
                os._exit(0)  # the function forked, and this is the copy
            pipe.send_bytes(answer)


def _settle(birth: Birth) -> None:
    """A process group, temporary folder and limits of its own; what C libraries say goes nowhere."""
    os.setpgid(0, 0)  # whatever it starts can be ended with it
    os.chdir(birth.folder)
    os.environ["TMPDIR"] = tempfile.tempdir = birth.scratch
    sys.stderr = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    _cap(resource.RLIMIT_CORE, 0)
    if birth.limits.file_bytes is not None:
        _cap(resource.RLIMIT_FSIZE, birth.limits.file_bytes)
    if birth.limits.resident_bytes is not None:  # an address space limit would stop CUDA and onnxruntime
        _cap(resource.RLIMIT_DATA, birth.limits.resident_bytes + HEADROOM_BYTES)


def _cap(kind: int, limit: int) -> None:
    """Lower a limit of this process for good, never raise it."""
    hard = resource.getrlimit(kind)[1]
    capped = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (capped, capped))


def _follow_parent(bound: bool) -> None:
    """End at once when the parent is killed: a child busy with a long item would go on for nobody."""
    if bound and sys.platform == "linux":  # works also while a C library holds the interpreter
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=_outlive, daemon=True).start()


def _outlive() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _outcome(birth: Birth, item: Any) -> bytes:
    """What the function returns or raises, as bytes that the parent can read back."""
    try:
        return pickle.dumps((birth.function(item), None))
    except MemoryError:
        return pickle.dumps((birth.limits.too_big(), None))
    except Exception as error:  # noqa: BLE001  # it is raised again in the parent
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            return pickle.dumps((birth.limits.too_long(), None))
        return pickle.dumps((None, _portable(error)))


def _portable(error: Exception) -> Exception:
    """The error, or one that says the same where it does not survive the way to the parent."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  # our own bytes
    except Exception:  # noqa: BLE001  # an exception's own pickling may raise anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def sweep_scratch(prefix: str) -> None:
    """Delete temporary folders of this machine whose owners are dead; `prefix` is followed by the owner's number."""
    import shutil

    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        owner = left.name.removeprefix(prefix).partition("-")[0]
        try:
            os.kill(int(owner), 0)
        except (ProcessLookupError, ValueError):
            shutil.rmtree(left, ignore_errors=True)
        except PermissionError:  # alive, somebody else's
            continue
