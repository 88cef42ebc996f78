"""A stage runs once, is skipped after, tells how far it is, fails in its own words, and leaves no process behind."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows._dvc import last_error, pieces, reproduce

Project = Callable[..., Path]


def test_stage_runs_once_and_is_then_skipped_with_the_same_hashes(project: Project) -> None:
    root = project({"cut": "printf clips > cut"})
    first, second = (reproduce("cut", root / "cut.log") for _ in range(2))
    assert (first.ran, second.ran) == (True, False)
    assert first.outputs == second.outputs == {"cut": hashlib.md5(b"clips").hexdigest()}


def test_force_runs_what_has_not_changed(project: Project) -> None:
    root = project({"cut": "echo x >> count; printf clips > cut"})
    for force in (False, False, True):
        assert reproduce("cut", root / "cut.log", force=force).status == 0
    assert (root / "count").read_text() == "x\nx\n"


def test_failed_verb_gives_its_exit_status_and_its_own_line(project: Project) -> None:
    root = project({"gate": "echo 'soundstage gate: psnr_db 3 dB; limit gate.min = 4' >&2; exit 4"})
    outcome = reproduce("gate", root / "gate.log")
    assert (outcome.status, outcome.error) == (4, "psnr_db 3 dB; limit gate.min = 4")
    assert outcome.error in (root / "gate.log").read_text()


def test_unknown_stage_fails_with_what_dvc_says(project: Project) -> None:
    root = project({"cut": "true"})
    outcome = reproduce("no_such", root / "x.log")
    assert outcome.status != 0
    assert "no_such" in outcome.error


def test_progress_bar_is_drawn_and_told_as_a_share(project: Project) -> None:
    bar = 'python -c "import time, tqdm; [time.sleep(0.2) for _ in tqdm.tqdm(range(4), disable=None)]"'
    root = project({"cut": f"{bar}; printf x > cut"})
    shares: list[float] = []
    reproduce("cut", root / "cut.log", on_progress=lambda share, text: shares.append(share) if "/4" in text else None)
    assert {0.25, 0.5, 0.75} <= set(shares)
    assert shares == sorted(shares)


def test_two_callers_of_one_stage_wait_for_each_other(project: Project) -> None:
    root = project({"cut": "sleep 3; printf x > cut"})
    with ThreadPoolExecutor() as pool:
        outcomes = list(pool.map(lambda number: reproduce("cut", root / f"{number}.log"), range(2)))
    assert [outcome.status for outcome in outcomes] == [0, 0]
    assert sum(outcome.ran for outcome in outcomes) == 1


def test_interrupt_ends_the_verb_too_not_only_dvc(project: Project) -> None:
    root = project({"train": "echo $$ > pid; echo begun; sleep 60; printf x > train"})

    def interrupt(line: str) -> None:
        if line == "begun":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reproduce("train", root / "train.log", on_line=interrupt)
    number = int((root / "pid").read_text())
    assert not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE
    assert reproduce_again_is_possible(root)


def reproduce_again_is_possible(root: Path) -> bool:
    (root / "dvc.yaml").write_text("stages: {train: {cmd: printf x > train, outs: [train]}}")
    return reproduce("train", root / "train.log").status == 0


def test_lock_held_too_long_ends_in_an_outcome_that_names_it(project: Project) -> None:
    root = project({"cut": "sleep 8; printf x > cut"})
    with ThreadPoolExecutor() as pool:
        first = pool.submit(reproduce, "cut", root / "1.log")
        while not (root / "1.log").is_file() or "Running" not in (root / "1.log").read_text():
            time.sleep(0.1)
        second = reproduce("cut", root / "2.log", lock_wait_s=0)
    assert first.result().status == 0
    assert second.status != 0


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n\x1b"), min_size=1), max_size=8),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_lines_do_not_depend_on_how_the_terminal_delivers_them(lines: list[str], sizes: list[int]) -> None:
    data = "".join(f"{line}\r\n" for line in lines).encode()
    assert [text for text, complete in read_in(data, sizes) if complete] == lines


def read_in(data: bytes, sizes: list[int]) -> list[tuple[str, bool]]:
    """What `pieces` makes of `data` that arrives in chunks of these sizes, over and over."""
    chunks: list[bytes] = []
    while data:
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(data[:size])
        data = data[size:]
    return list(pieces(0, read=lambda _terminal, _size: chunks.pop(0) if chunks else b""))


def test_colours_are_left_out_and_overwritten_pieces_are_marked() -> None:
    assert read_in(b"\x1b[31mred\x1b[0m\r\n 50%|# | 1/2\r100%|##| 2/2\n", [4]) == [
        ("red", True),
        (" 50%|# | 1/2", False),
        ("100%|##| 2/2", True),
    ]


def test_error_is_the_verbs_last_own_line_else_the_last_line() -> None:
    assert last_error("noise\nsoundstage cut: bad\nERROR: failed to reproduce") == "bad"
    assert last_error("noise\nERROR: no stage\n\n") == "no stage"
    assert last_error("") == "ended without a word"
