"""Files broken in every way: none crashes or hangs the run, none vanishes, and what is accepted really reads."""

from __future__ import annotations

import functools
import struct
from collections import Counter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import psutil
import pytest

from data import rules
from data.engines import Engine, map_ordered
from data.isolation import Lost
from data.limits import Limits
from data.media import Unreadable, read_clip, write_media
from data.records import ClipShape, Source
from data.sensing import Sensing

SHAPE = ClipShape(num_frames=22, frame_rate=24, height=32, width=32, sample_rate_hz=8000)
LIMITS = Limits(shape=SHAPE, min_duration_s=0.5)
ENGINE = Engine(num_workers=2, max_item_s=20, max_item_gb=1)
MAX_GB = 0.8
"""Most that a worker may grow to; it starts at 0.2 with the decoders loaded."""
KINDS = ("flip", "cut", "zero", "splice", "insert", "header", "size", "repeat")
ABSURD = (0, 1, 2**15 - 1, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1)
FIELDS = (b"mvhd", b"tkhd", b"mdhd", b"stts", b"stsz", b"stco", b"stsc", b"ctts", b"elst", b"avcC", b"mp4a", b"avc1")
"""Boxes whose numbers are worth lying about."""
ELEMENTS = (
    b"\x1a\x45\xdf\xa3",
    b"\x18\x53\x80\x67",
    b"\x15\x49\xa9\x66",
    b"\x1f\x43\xb6\x75",
    b"\xae",
    b"\xe0",
    b"\xa3",
)
"""EBML: header, segment, info, cluster, track, video, block."""


class Case(NamedTuple):
    """One broken file."""

    path: str
    kind: str


class Outcome(NamedTuple):
    """What became of it."""

    verdict: Literal["error", "rejected", "read", "unreadable"]
    resident_bytes: int


@pytest.fixture(scope="session")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Small films of every container and codec that we write, and what is no film."""
    folder = tmp_path_factory.mktemp("seeds")
    random = np.random.default_rng(0)
    frames = np.kron(random.integers(0, 255, (24, 4, 4, 3)), np.ones((1, 8, 8, 1))).astype(np.uint8)
    sound = (0.2 * random.standard_normal((2, 48000))).clip(-1, 1).astype(np.float32)
    forms: list[dict[str, Any]] = [
        {},
        {"container": "mov"},
        {"container": "matroska"},
        {"container": "matroska", "audio_codec": "libopus"},
        {"container": "webm", "video_codec": "libvpx-vp9", "audio_codec": "libopus"},
        {"rotation_deg": 90},
        {"sound_start_s": 0.3},
        {"pixel_format": "yuv420p10le"},
    ]
    made: list[bytes] = []
    for number, form in enumerate(forms):
        path = folder / f"{number}.bin"
        write_media(path, frames, sound, frame_rate=24, sample_rate_hz=48000, crf=35, audio_bits_per_s=32000, **form)
        made.append(path.read_bytes())
    silent = folder / "silent.bin"
    write_media(silent, frames, None, frame_rate=24, sample_rate_hz=48000, crf=35)
    return [*made, silent.read_bytes(), b"GIF89a" + random.bytes(2000), b"<html>" * 300]


def broken(content: bytes, kind: str, random: np.random.Generator, other: bytes) -> bytes:
    """The content, damaged."""
    data, size = bytearray(content), len(content)
    at = int(random.integers(size))
    if kind == "flip":
        for place in random.integers(0, size, int(random.integers(1, 40))):
            data[place] ^= 1 << int(random.integers(8))
    elif kind == "cut":
        del data[at:]
    elif kind == "zero":
        data[at : at + int(random.integers(1, 2000))] = bytes(len(data[at : at + int(random.integers(1, 2000))]))
    elif kind == "splice":
        data = data[:at] + other[int(random.integers(len(other))) :]
    elif kind == "insert":
        data[at:at] = random.bytes(int(random.integers(1, 300)))
    elif kind == "repeat":
        data[at:at] = data[max(0, at - 500) : at] * int(random.integers(1, 20))
    else:
        lie(data, kind, random)
    return bytes(data)


def lie(data: bytearray, kind: str, random: np.random.Generator) -> None:
    """Put an absurd number into a header, or in place of a box's or element's size."""
    names = [name for name in (*FIELDS, *ELEMENTS) if name in data]
    if not names:
        return
    name = names[int(random.integers(len(names)))]
    start = data.find(name)
    value = struct.pack(">I", ABSURD[int(random.integers(len(ABSURD)))])
    if kind == "size" and name in FIELDS:
        place = start - 4
    elif kind == "size":
        place = start + len(name)
        value = bytes([1, 255, 255, 255, 255, 255, 255, 254])[: int(random.integers(1, 9))]
    else:
        place = start + len(name) + 4 * int(random.integers(0, 12))
    place = max(0, min(place, len(data) - len(value)))
    data[place : place + len(value)] = value


def examine(case: Case, speech: bool) -> Outcome:
    """Measure, judge and read one file, as the verbs would."""
    from data.measure import measure

    facts = measure(Path(case.path), Sensing(speech=speech)).facts
    digest = "0" * 64
    row = {"source_id": digest[:16], "sha256": digest, "path": case.path, "group": "", "size_bytes": 1, "caption": "x"}
    source = Source.model_validate({**row, **facts})
    resident = psutil.Process().memory_info().rss
    if source.error is not None:
        return Outcome("error", resident)
    if rules.judge_one(source, LIMITS):
        return Outcome("rejected", resident)
    assert rules.treatments(source, LIMITS) is not None
    try:
        frames, sound = read_clip(Path(case.path), 0.0, None, SHAPE)
    except Unreadable:
        return Outcome("unreadable", resident)
    assert frames.shape == (22, 32, 32, 3)
    assert sound.shape == (2, SHAPE.num_samples)
    assert np.isfinite(sound).all()
    return Outcome("read", psutil.Process().memory_info().rss)


def fuzz(folder: Path, seeds: list[bytes], count: int, *, speech: bool = False) -> Counter[str]:
    """Break `count` files, examine them all; every one has an outcome."""
    random = np.random.default_rng(count)
    cases: list[Case] = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        content, other = (seeds[int(random.integers(len(seeds)))] for _ in range(2))
        path = folder / f"{number:05d}-{kind}.mp4"
        path.write_bytes(broken(content, kind, random, other))
        cases.append(Case(str(path), kind))
    found: Counter[str] = Counter()
    lost: list[str] = []
    for case, answer in zip(cases, map_ordered(functools.partial(examine, speech=speech), cases, ENGINE), strict=True):
        if isinstance(answer, Lost):
            lost.append(f"{case.path}: {answer.reason}")
        else:
            found[answer.verdict] += 1
            assert answer.resident_bytes < MAX_GB * 1e9, case.path
    assert sum(found.values()) + len(lost) == count
    assert not lost
    return found


def test_broken_files_cost_only_themselves(tmp_path: Path, seeds: list[bytes]) -> None:
    found = fuzz(tmp_path, seeds, 160)
    assert found["error"] > 20
    assert found["read"] > 5  # a flip in a picture's data may harm nothing that shows


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_broken_files_cost_only_themselves(tmp_path: Path, seeds: list[bytes]) -> None:
    found = fuzz(tmp_path, seeds, 2400)
    print(dict(found))  # noqa: T201
    assert found["error"] > 300
    assert found["read"] > 100
