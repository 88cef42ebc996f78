"""Damaged and lying files cost themselves at most: every one ends as an error, a reject, or clips of exact shape.

Each recipe is a number: it chooses a small film, a kind of damage, and where. Children with limits do the work.
"""

from __future__ import annotations

import collections
import functools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from data import rules
from data.engines import Engine, map_ordered
from data.isolation import Lost
from data.limits import Limits
from data.listing import Listed
from data.media import Unreadable, read_clip
from data.records import ClipShape
from data.sensing import Sensing
from data.tables import Words
from tasks.ingest import measure
from tests.data.damage import BOASTS, SEEDS, SIDE, mutated, write

SHAPE = ClipShape(num_frames=5, frame_rate=24, height=SIDE, width=SIDE, sample_rate_hz=8000)
ENGINE = Engine(num_workers=1, max_item_s=60, max_item_gb=2.0, max_file_gb=0.1)
MAX_S, MAX_MB = 20, 1000
"""Most that a file of 25 kB may take: seconds on a busy machine, where 0.1 is usual, and memory, where 200 MB is."""


class Outcome(NamedTuple):
    number: int
    what: str
    """Seed, damage, and how it was decoded."""
    ending: str
    """`error: …`, the rule that rejects it, `clip` or `clip unreadable: …`."""
    seconds: float
    peak_mb: int


def judged(number: int, folder: Path) -> Outcome:
    """All that the data verbs ask of one file, in a child process."""
    name, damage, content = mutated(number, folder)
    decode = "keyframes" if number % 7 == 0 else "all"
    return outcome(number, f"{name} {damage} {decode}", content, decode)


def outcome(number: int, what: str, content: bytes, decode: Any) -> Outcome:
    place = Path(tempfile.gettempdir())
    path = place / "mutated"
    path.write_bytes(content)
    forget_peak()
    begun = time.monotonic()
    ending = fate(path, place / "work", decode)
    return Outcome(number, what, ending, time.monotonic() - begun, peak_mb())


def fate(path: Path, work: Path, decode: Any) -> str:
    """How one file ends; anything but the ways named here is an exception."""
    row = Listed(str(path), "mutated", "", "clip", Words(), None, None, (), None)
    source = measure(row, Sensing(speech=False, decode=decode), work)
    rejects = rules.judge_one(source, Limits(min_duration_s=0.1, max_aspect=10, max_sound_gap_s=None))
    if rejects:
        return rejects[0].rule if source.error is None else f"error: {source.error}"
    assert rules.treatments(source, Limits())  # at least the missing caption
    for start_s in (0.0, 0.6 * source.video_duration_s):
        try:
            frames, sound = read_clip(path, start_s, source.video_duration_s, SHAPE)
        except Unreadable as error:
            return f"clip unreadable: {error}"
        assert frames.shape == (SHAPE.num_frames, SIDE, SIDE, 3)
        assert sound.shape == (2, SHAPE.num_samples)
        assert np.isfinite(sound).all()
    return "clip"


def forget_peak() -> None:
    """Let the kernel count this process's peak memory from now on."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_mb() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii").split()
    return int(status[status.index("VmHWM:") + 1]) // 1024


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeds")
    for name, seed in SEEDS.items():
        write(folder / name, seed)
    return folder


def check(found: Sequence[Outcome | Lost], count: int) -> None:
    """Every file is accounted for, in time and in memory; no child dies, and what is accepted whole is readable."""
    answers = [item for item in found if isinstance(item, Outcome)]
    slowest, largest = max(answers, key=lambda item: item.seconds), max(answers, key=lambda item: item.peak_mb)
    for ending, times in collections.Counter(kind_of(item.ending) for item in answers).most_common():
        print(f"{times:5d} {ending}")  # noqa: T201  # what a person runs the long test for
    print(f"slowest {slowest}\nlargest {largest}")  # noqa: T201
    assert [item for item in found if isinstance(item, Lost)] == []
    assert len(answers) == count
    assert [item for item in answers if "unreadable" in item.ending and item.what.endswith("all")] == []
    assert slowest.seconds < MAX_S
    assert largest.peak_mb < MAX_MB


def kind_of(ending: str) -> str:
    """An ending without its numbers."""
    return "".join(letter for letter in ending if not letter.isdigit())[:48]


def test_seeds_are_small_and_whole(seeds: Path, tmp_path: Path) -> None:
    for name, seed in SEEDS.items():
        assert (seeds / name).stat().st_size < 25_000
        ending = fate(seeds / name, tmp_path, "all")
        assert ending == ("clip" if seed.video else "error: holds no picture, only sound"), name


def test_damaged_files_are_all_accounted_for(seeds: Path) -> None:
    found = list(map_ordered(functools.partial(judged, folder=seeds), range(150), ENGINE))
    check(found, 150)
    endings = collections.Counter(item.ending.partition(":")[0] for item in found if isinstance(item, Outcome))
    assert endings["error"] > 30
    assert endings["clip"] > 30  # a flip within a picture may harm nothing that anybody checks


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_damaged_files_are_all_accounted_for(seeds: Path) -> None:
    check(list(map_ordered(functools.partial(judged, folder=seeds), range(2500), ENGINE)), 2500)


LESSONS = {
    731: "after a seek NUT demands the frame it points to, and reads well from the start",
    1811: "the same",
    2040: "a sample table that cannot be sought in: read from the start",
}
"""Recipes that once went wrong."""


@pytest.mark.parametrize("number", LESSONS)
def test_lessons_are_remembered(number: int, seeds: Path) -> None:
    assert judged(number, seeds).ending == "clip"


def test_claimed_sizes_cost_no_more_than_their_pixels_allow(seeds: Path) -> None:
    """A GIF of 13 kB may claim 4096x4096 px, and gets them; nothing else costs more than it is."""
    found = list(map_ordered(functools.partial(boasted, folder=seeds), range(len(BOASTS)), ENGINE))
    answers = [item for item in found if isinstance(item, Outcome)]
    assert len(answers) == len(BOASTS), found
    assert all(item.peak_mb < MAX_MB for item in answers), answers


def boasted(number: int, folder: Path) -> Outcome:
    return outcome(number, f"boast {number}", BOASTS[number](folder), "all")
