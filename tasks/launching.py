"""A command as several processes: what is started, how it is asked to stop, and what of its failure is said."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, Protocol

from pydantic import Field, model_validator

from data.records import Frozen
from models.preemption import EXIT_PREEMPTED, Preempted
from tasks.processes import GRACE_S, KINDS, end, marked

MARK = "SOUNDSTAGE_LAUNCH"
"""Environment variable by which the processes of a launch are found."""
FAILURE = "failure.json"
"""A Failure, in the folder of a launch."""
MARGIN_S = 3
"""What torchrun may take beyond the grace before it is taken to hang, s; with GRACE_S below Prefect's 30 s."""
LOOK_S = 0.2
"""How often the launcher looks whether it was asked to stop, s."""


class Launch(Frozen):
    """How many processes train, on how many machines."""

    nodes: int = Field(default=1, ge=1)
    """Machines; with `max_nodes` the fewest to go on with. (Not `1:2`, as torchrun says: to YAML that is 62.)"""
    max_nodes: int | None = None
    """Most machines of an elastic run, which loses and gains them as it goes; None: `nodes`, no more and no fewer."""
    processes_per_node: int | Literal["auto"] = "auto"
    """Processes on each machine; `auto`: one for each device of its accelerator, 1 on a CPU."""
    max_restarts: int = Field(default=0, ge=0)
    """How often all processes start again after one failed or a machine was lost; each goes on from the newest state."""
    endpoint: str | None = Field(default=None, pattern=r"^.+:\d+$")
    """host:port where machines meet, on one of them; None: one machine, on loopback and a free port."""
    is_host: bool | None = None
    """Whether this machine is the host of `endpoint`; None: found by its name, which fails where hosts have several."""
    local_address: str | None = None
    """Address under which the other machines reach this one; None: that of its host name."""
    join_timeout_s: int = Field(default=600, ge=1)
    """How long machines wait for `nodes` of them, s."""
    late_timeout_s: int = Field(default=30, ge=1)
    """How long an elastic run then waits for more, s."""
    grace_s: int = Field(default=int(GRACE_S), ge=1)
    """What processes get between being asked to stop and being killed, s: one step and the writing of one state."""

    @model_validator(mode="after")
    def _machines_can_meet(self) -> Launch:
        if self.max_nodes is not None and self.max_nodes < self.nodes:
            raise ValueError(f"max_nodes = {self.max_nodes} is below nodes = {self.nodes}")
        if self.endpoint is None and max(self.nodes, self.max_nodes or 1) > 1:
            raise ValueError("several nodes need an endpoint, host:port on one of them")
        return self

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""
        if self.processes_per_node != "auto":
            return self.processes_per_node
        import torch

        return torch.accelerator.device_count() if torch.accelerator.is_available() else 1


class Failure(Frozen):
    """How the process ended that took the others with it."""

    rank: int | None
    """Its number among all; None: it was torchrun itself."""
    status: int
    """As `subprocess` has it: below 0 for a signal."""
    message: str
    """What it said; empty where it could not."""

    def error(self, size: str) -> Exception:
        """The error to raise; `size` says of how many processes it was one."""
        who = "torchrun" if self.rank is None else f"rank {self.rank}{size}"
        message = " ".join(self.message.split())
        if self.status < 0:
            said = f"{who} was killed by {signal.Signals(-self.status).name}"
            return RuntimeError(
                said + ("; did the machine run out of memory?" if self.status == -signal.SIGKILL else "")
            )
        if not message:
            return RuntimeError(f"{who} ended with status {self.status}; what it wrote stands above")
        known = re.sub(r"^(?:ValueError|RuntimeError|GateFailed|DataRefused): ", "", message)
        return KINDS.get(self.status, RuntimeError)(f"{who}: {known}")


class Launcher(Protocol):
    """Whatever can start the processes of a command."""

    def run(self, command: Sequence[str], launch: Launch, environment: Mapping[str, str]) -> None:
        """See the command through in all its processes, none of which is left.

        Raises:
            Preempted: it stopped because it was asked to; running it again goes on from its newest state.
            ValueError, RuntimeError, GateFailed, DataRefused: a process failed; the kind is that of its exit status,
                the message its own, with its rank.
        """
        ...


def inside(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of those that a launcher started: torchrun, or `srun` with several tasks a node.

    `srun` with one task a node, like a pod with PET_* variables, is where a launcher of the node's processes runs.
    """
    tasks, nodes = (int(environment.get(f"SLURM_STEP_NUM_{what}", "1")) for what in ("TASKS", "NODES"))
    return {"RANK", "WORLD_SIZE"} <= environment.keys() or tasks > nodes


def needs_launcher(launch: Launch) -> bool:
    """Whether processes have to be started; otherwise this one does the work itself."""
    elastic = launch.max_nodes is not None or launch.nodes > 1 or launch.max_restarts > 0
    return not inside() and (elastic or launch.num_processes > 1)


def told(error: Exception) -> bool:
    """Whether torchrun was told what ended this process, and will say it; a pre-empted one then ends with 0.

    With another status it would count as failed, and torchrun would start it again. Under a torchrun that is not ours
    it has to end with EXIT_PREEMPTED all the same: nobody would read the note.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None or (isinstance(error, Preempted) and MARK not in os.environ):
        return False
    if isinstance(error, Preempted):
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()  # its threads, left to the interpreter's end, now and then abort the process
        Path(file).with_name("preempted").write_text(str(error), encoding="utf-8")
    else:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    return True


class LocalLauncher:
    """Starts this machine's processes by torchrun, in a process group of its own.

    Asked to stop by SIGTERM, SIGINT or SIGUSR1 it asks the processes by SIGTERM, once. What is still there after
    `grace_s` torchrun kills; MARGIN_S later torchrun is killed too, which may wait for another machine and hear
    nothing. If the launcher itself is killed, torchrun sees its end of a pipe close and does the same.
    """

    def run(self, command: Sequence[str], launch: Launch, environment: Mapping[str, str]) -> None:
        """See the command through; from the main thread, which hears the signals."""
        mark = uuid.uuid4().hex
        with (
            tempfile.TemporaryDirectory(prefix="soundstage-launch-", ignore_cleanup_errors=True) as name,
            asked() as by,
        ):
            folder = Path(name)
            agent = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tasks.agent",
                    name,
                    str(launch.grace_s),
                    *torchrun_words(command, launch, folder),
                ],
                env=child_environment(environment, mark),
                stdin=subprocess.PIPE,
                process_group=0,
            )
            left_s = float(launch.grace_s)
            try:
                left_s = watch(agent, by, launch.grace_s)
            finally:
                agent.kill()
                end(lambda: marked(MARK, mark), left_s)
                agent.communicate()
            raise_outcome(folder, launch, agent.returncode, by)


def child_environment(environment: Mapping[str, str], mark: str) -> dict[str, str]:
    """What torchrun and the processes see."""
    return {
        "OMP_NUM_THREADS": "1",  # else torchrun sets it and says so in a box of asterisks
        **environment,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else restarts find the addresses of the dead: pytorch#135712
        MARK: mark,
    }


def torchrun_words(command: Sequence[str], launch: Launch, folder: Path) -> list[str]:
    """The command line of torchrun."""
    rendezvous = {"join_timeout": launch.join_timeout_s, "last_call_timeout": launch.late_timeout_s}
    if launch.is_host is not None:
        rendezvous["is_host"] = int(launch.is_host)
    options = {
        "nnodes": f"{launch.nodes}:{launch.max_nodes or launch.nodes}",
        "nproc-per-node": launch.num_processes,
        "max-restarts": launch.max_restarts,
        "rdzv-backend": "c10d",
        "rdzv-id": "soundstage",
        "rdzv-endpoint": launch.endpoint or "localhost:0",
        "rdzv-conf": ",".join(f"{name}={value}" for name, value in rendezvous.items()),
        "shutdown-timeout": launch.grace_s,
        "signals-to-handle": "SIGQUIT",  # the others are heard by `tasks.agent`, once
        "log-dir": folder / "attempts",
    }
    address = launch.local_address or (None if launch.endpoint else "127.0.0.1")
    words = [f"--{name}={value}" for name, value in options.items()]
    return [*words, *([f"--local-addr={address}"] if address else []), "--no-python", *command]


@contextmanager
def asked() -> Generator[list[str]]:
    """Names of the signals that asked this process to stop, growing while it is open."""
    heard: list[str] = []
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {n: signal.signal(n, lambda n, _: heard.append(signal.Signals(n).name)) for n in numbers}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def watch(agent: subprocess.Popen[bytes], by: Sequence[str], grace_s: int) -> float:
    """Wait for torchrun, passing on that it should stop; returns what is left of the grace, s."""
    deadline = math.inf
    while time.monotonic() < deadline + MARGIN_S:
        with suppress(subprocess.TimeoutExpired):
            agent.wait(LOOK_S)
            break
        if by and deadline == math.inf:
            deadline = time.monotonic() + grace_s
            agent.terminate()
    return min(max(0.0, deadline - time.monotonic()), grace_s)


def raise_outcome(folder: Path, launch: Launch, status: int, by: Sequence[str]) -> None:
    """Say how it ended, if not well: from what the processes left in the launch's folder."""
    attempts = sorted(folder.glob("attempts/*/attempt_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    notes = [note.read_text(encoding="utf-8") for note in sorted(attempts[-1].glob("*/preempted"))] if attempts else []
    file = folder / FAILURE
    failure = Failure.model_validate_json(file.read_bytes()) if file.is_file() else None
    if failure and not (by and failure.status in (-signal.SIGTERM, -signal.SIGUSR1)):
        raise failure.error("" if launch.max_nodes else f" of {launch.nodes * launch.num_processes}")
    if notes and (status == 0 or len(notes) == launch.num_processes):
        raise Preempted(notes[0])
    if by or status == EXIT_PREEMPTED:
        late = launch.num_processes - len(notes)
        raise Preempted(
            f"asked to stop by {by[0] if by else 'a signal'}: {late} of {launch.num_processes} processes had not saved a "
            f"state before they ended, at the latest after launch.grace_s = {launch.grace_s} s; "
            "run it again and it goes on from its newest state"
        )
    if status:
        raise Failure(rank=None, status=status, message="").error("")
