"""One verb as one DVC stage in a child process: did it run, for how long, which outputs came of it. Knows no Prefect."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import psutil
import yaml

from tasks.processes import end
from tasks.summary import Outcome

LOCK_MESSAGES = ("Unable to acquire lock", "is busy")
"""The only two failures worth trying again: another DVC command holds the workspace for a moment."""
SKIPPED_MESSAGES = ("didn't change, skipping", "is cached - skipping run")

PROGRESS = re.compile(r"(\d+)%\|[^|]*\|\s*(\S+)/(\S+)")
"""What tqdm draws: percentage, bar, done/total."""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ERROR_LINE = re.compile(r"^soundstage \w+: (.+)$", re.MULTILINE)
EXITED = re.compile(r"exited with (-?\d+)")


def reproduce(
    stage: str,
    log: Path,
    *,
    force: bool = False,
    on_line: Callable[[str], None] = lambda _: None,
    on_progress: Callable[[float, str], None] = lambda _share, _text: None,
    lock_wait_s: float = 120,
) -> Outcome:
    """Bring one DVC stage up to date; a failure is an outcome, not an exception.

    `on_progress` gets the share done, 0 to 1, and the bar's text; `on_line` every whole line.
    """
    command = ["dvc", "repro", "--single-item", *(["--force"] if force else []), stage]
    begin = time.monotonic()
    while True:
        status, text = converse(command, log, on_line, on_progress)
        locked = status != 0 and any(message in text for message in LOCK_MESSAGES)
        if not locked or time.monotonic() - begin > lock_wait_s:
            break
        time.sleep(1)
    seconds = time.monotonic() - begin
    if status == 0:
        ran = not any(message in text for message in SKIPPED_MESSAGES)
        return Outcome(stage=stage, ran=ran, seconds=seconds, outputs=locked_outputs(stage))
    exited = EXITED.findall(text)
    return Outcome(
        stage=stage, ran=True, seconds=seconds, status=int(exited[-1]) if exited else status, error=last_error(text)
    )


def converse(
    command: list[str], log: Path, on_line: Callable[[str], None], on_progress: Callable[[float, str], None]
) -> tuple[int, str]:
    """Exit status and output of a command whose output also goes to `log`, line by line as it appears."""
    log.parent.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    with log.open("w", encoding="utf-8") as stream, started(command) as (process, terminal):
        for piece, complete in pieces(terminal):
            if complete and piece.strip():
                lines.append(piece)
                stream.write(piece + "\n")
                stream.flush()
                on_line(piece)
            elif match := PROGRESS.search(piece):
                on_progress(int(match[1]) / 100, piece.strip())
        return process.wait(), "\n".join(lines)


@contextmanager
def started(command: list[str]) -> Generator[tuple[subprocess.Popen[bytes], int]]:
    """A command in a process group of its own, on a pseudo-terminal so that its progress bars are drawn.

    However the block ends, by cancellation too, no process of the group outlives it.
    """
    terminal, child = os.openpty()
    termios.tcsetwinsize(child, (24, 100))
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",  # finds `soundstage` and `dvc`
        "DVC_NO_ANALYTICS": "1",
        "TERM": "dumb",
    }
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=child, stderr=child, process_group=0, env=environment
        )
    except BaseException:
        os.close(terminal)
        raise
    finally:
        os.close(child)
    try:
        yield process, terminal
    except BaseException:
        end(lambda: group(process))
        raise
    finally:
        os.close(terminal)


def group(process: subprocess.Popen[bytes]) -> list[int]:
    """Living processes of the group that `process` leads; DVC ended alone would leave the verb running."""
    process.poll()  # a dead leader that nobody waited for would still count
    found: list[int] = []
    for number in psutil.pids():
        with suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getpgid(number) == process.pid and psutil.Process(number).status() != psutil.STATUS_ZOMBIE:
                found.append(number)
    return found


def pieces(terminal: int, read: Callable[[int, int], bytes] = os.read) -> Iterator[tuple[str, bool]]:
    """Text as a terminal shows it: whole lines (True) and pieces that a carriage return will overwrite (False)."""
    rest = b""
    while True:
        try:
            chunk = read(terminal, 65536)
        except OSError:  # Linux reports the end of a pseudo-terminal as an input error
            chunk = b""
        if not chunk:
            break
        rest = (rest + chunk).replace(b"\r\n", b"\n")
        held = rest.endswith(b"\r")  # may be half of a line end: wait for what follows
        parts = re.split(rb"([\r\n])", rest[:-1] if held else rest)
        rest = parts.pop() + (b"\r" if held else b"")
        for text, mark in zip(parts[::2], parts[1::2], strict=True):
            yield plain(text), mark == b"\n"
    if rest.strip():
        yield plain(rest), True


def plain(text: bytes) -> str:
    """Text without colours and cursor movements."""
    return ESCAPES.sub("", text.decode("utf-8", errors="replace"))


def last_error(text: str) -> str:
    """The verb's own error line, else the last that was said."""
    own = ERROR_LINE.findall(text)
    if own:
        return own[-1]
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("ERROR: ") if lines else "ended without a word"


def locked_outputs(stage: str, lock: Path = Path("dvc.lock")) -> dict[str, str]:
    """MD5 by output path of a stage, as dvc.lock has it."""
    if not lock.is_file():
        return {}
    stages = cast(dict[str, Any], yaml.safe_load(lock.read_text(encoding="utf-8"))).get("stages", {})
    outputs = cast(list[dict[str, str]], stages.get(stage, {}).get("outs", []))
    return {output["path"]: output["md5"] for output in outputs if "md5" in output}
