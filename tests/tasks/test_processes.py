"""No process outlives a run: not a stubborn one, not one whose launcher was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tasks.processes import Lease, end, end_abandoned, members, run_alone

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def sleeper(code: str = "print('ready', flush=True); import time; time.sleep(60)") -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_stubborn_process_is_killed_after_the_grace() -> None:
    process = sleeper(STUBBORN)
    end(lambda: members(process.pid), grace_s=0.3)
    assert process.wait(timeout=5) == -signal.SIGKILL


def test_members_are_those_of_the_session_in_this_folder_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = sleeper()
    assert members(process.pid) == [process.pid]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert members(process.pid) == []
    process.kill()
    process.wait()


def test_run_alone_returns_the_status_and_ends_what_the_command_left(tmp_path: Path) -> None:
    left = tmp_path / "left"
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        f"open({str(left)!r}, 'w').write(str(p.pid)); sys.exit(7)"
    )
    assert run_alone([sys.executable, "-c", code], os.environ, tmp_path / "run.pid") == 7
    assert not psutil.pid_exists(int(left.read_text())) or psutil.Process(int(left.read_text())).status() == "zombie"
    assert not (tmp_path / "run.pid").exists()


def test_sigterm_is_handed_on(tmp_path: Path) -> None:
    def later() -> None:
        while not (tmp_path / "run.pid").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=later).start()
    begin = time.monotonic()
    status = run_alone([sys.executable, "-c", "import time; time.sleep(60)"], os.environ, tmp_path / "run.pid")
    assert status == -signal.SIGTERM
    assert time.monotonic() - begin < 30


def test_processes_of_a_killed_launcher_are_ended_before_the_next_run(tmp_path: Path) -> None:
    process = sleeper()
    dead = Lease(launcher=process.pid, launcher_began_s=0.0, session=process.pid)  # the number now belongs to another
    (tmp_path / "run.pid").write_text(dead.model_dump_json())
    end_abandoned(tmp_path / "run.pid")
    assert process.wait(timeout=5) == -signal.SIGTERM
    assert not (tmp_path / "run.pid").exists()


def test_a_run_at_work_is_not_disturbed(tmp_path: Path) -> None:
    process, me = sleeper(), psutil.Process()
    lease = Lease(launcher=me.pid, launcher_began_s=me.create_time(), session=process.pid)
    (tmp_path / "run.pid").write_text(lease.model_dump_json())
    with pytest.raises(RuntimeError, match=f"process {me.pid}"):
        run_alone(["true"], os.environ, tmp_path / "run.pid")
    assert process.poll() is None
    process.kill()
    process.wait()
