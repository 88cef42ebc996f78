"""Who is asked to stop finishes the step, with all the others; children and readers keep out of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from models.preemption import Preemption
from models.ranks import Ranks


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_heard_and_given_back(number: signal.Signals) -> None:
    seen: list[int] = []
    before = signal.signal(number, lambda number, _: seen.append(number))
    try:
        with Preemption() as guard:
            assert not guard.asked(Ranks())
            signal.raise_signal(number)
            assert guard.asked(Ranks())
            assert guard.asked(Ranks())
        assert seen == []
        signal.raise_signal(number)
        assert seen == [number]
    finally:
        signal.signal(number, before)


def test_a_guard_opened_again_has_heard_nothing() -> None:
    with Preemption():
        signal.raise_signal(signal.SIGUSR1)
    with Preemption() as guard:
        assert not guard.asked(Ranks())


def steps(rank: int, store: str, folder: str) -> None:
    """Rank 1 is asked in its step 3, rank 0 never."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    ranks = Ranks()
    with Preemption() as guard:
        for step in range(10):
            if (rank, step) == (1, 3):
                os.kill(os.getpid(), signal.SIGTERM)
            if guard.asked(ranks):
                Path(folder, f"saved-{rank}").write_text(str(step))
                break
    dist.destroy_process_group()


def test_all_processes_hear_it_at_the_same_step(tmp_path: Path) -> None:
    mp.start_processes(steps, (str(tmp_path / "store"), str(tmp_path)), nprocs=2, start_method="fork")
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == ["3", "3"]


def status_of_child(number: int) -> int:
    """Exit status of a forked child that sends itself the signal."""
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), number)
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_can_be_terminated_and_minds_no_scheduler() -> None:
    with Preemption() as guard:
        assert status_of_child(signal.SIGTERM) == -signal.SIGTERM
        assert status_of_child(signal.SIGUSR1) == 7
        assert not guard.asked(Ranks())


LOADS = """
    import os, signal, sys
    from torch.utils.data import DataLoader, Dataset
    from models.preemption import Preemption, outlive_one_signal
    from models.ranks import Ranks

    class Items(Dataset):
        def __getitem__(self, index):
            return index

        def __len__(self):
            return 1000

    with Preemption() as guard:
        loader = DataLoader(Items(), batch_size=None, num_workers=2, worker_init_fn=outlive_one_signal)
        heard = None
        for step, item in enumerate(loader):
            assert item == step
            if step == 5:
                os.killpg(0, signal.{signal})
            if heard is None and guard.asked(Ranks()):
                heard = step
            if heard is not None and step == heard + 50:  # long after the readers' read-ahead
                break
    del loader
    print("heard at", heard)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_readers_outlive_a_signal_to_the_whole_group_and_leave_with_the_run(name: str) -> None:
    script = textwrap.dedent(LOADS).replace("{signal}", name)
    done = subprocess.run(
        [sys.executable, "-c", script], start_new_session=True, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "heard at 5"), done.stderr
