"""torchrun, one per machine: hears a signal once, stops when its launcher is gone, and says which process failed first.

python -m tasks.agent FOLDER GRACE_S TORCHRUN_ARGUMENTS
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, cast

from data.files import write_text
from models.preemption import EXIT_PREEMPTED
from tasks.launching import FAILURE, MARGIN_S, MARK, Failure
from tasks.processes import end, marked

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
OTHERS = re.compile(
    r"\bgloo\b|NCCL|HCCL|\bDist\w*Error|Connection (closed|reset|refused)|Broken pipe|[Tt]imed out waiting|SIGABRT"
)
"""Said by who lost the others; SIGABRT is how NCCL's watchdog ends its process."""


def main(folder: Path, grace_s: float, words: list[str]) -> int:
    """Run torchrun; the exit status is 0, 1 for a failure, which then stands in `folder`, or EXIT_PREEMPTED."""
    alone = threading.Event()
    threading.Thread(target=follow, args=(lifeline(), grace_s, alone), daemon=True).start()
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    def stop(_number: int, _frame: FrameType | None) -> None:
        for other in SIGNALS:  # a second one would break off torchrun's own clearing up
            signal.signal(other, signal.SIG_IGN)
        raise SignalException("asked to stop", signal.SIGTERM)

    for number in SIGNALS:
        signal.signal(number, stop)
    try:
        torchrun.run(torchrun.parse_args(words))
    except SignalException:
        if alone.is_set():
            shutil.rmtree(folder, ignore_errors=True)  # who made it is gone
        return EXIT_PREEMPTED
    except ChildFailedError as error:
        failure = first(error.failures)
    except Exception as error:  # noqa: BLE001  # whatever it is, the launcher says it
        failure = Failure(rank=None, status=1, message=f"{type(error).__name__}: {error}")
    else:
        return 0
    write_text(folder / FAILURE, failure.model_dump_json())
    return 1


def lifeline() -> int:
    """The standard input, a pipe from the launcher, out of reach of the processes."""
    pipe, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    return pipe


def follow(pipe: int, grace_s: float, alone: threading.Event) -> None:
    """Stop when the launcher is gone, at once if the main thread hangs in a call that hears no signal."""
    os.read(pipe, 1)
    alone.set()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(grace_s + MARGIN_S)
    end(lambda: [number for number in marked(MARK, os.environ[MARK]) if number != os.getpid()], 0)
    os.kill(os.getpid(), signal.SIGKILL)


def first(failures: Mapping[int, ProcessFailure]) -> Failure:
    """The failure that the others followed from."""

    def order(rank: int) -> tuple[int, float]:
        failure = failures[rank]
        file = Path(failure.error_file)
        said = signal.Signals(-failure.exitcode).name if failure.exitcode < 0 else message_of(failure)
        kind = 2 if said == "SIGTERM" else int(OTHERS.search(said) is not None)  # torchrun ends the rest by SIGTERM
        return kind, file.stat().st_mtime if file.is_file() else failure.timestamp + 1  # that one is in whole seconds

    rank = min(failures, key=order)
    return Failure(rank=rank, status=failures[rank].exitcode, message=message_of(failures[rank]))


def message_of(failure: ProcessFailure) -> str:
    """What the process itself said, empty where nothing."""
    said = cast(object, failure.error_file_data.get("message"))
    return str(cast(dict[str, object], said).get("message", "")) if isinstance(said, dict) else ""


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
