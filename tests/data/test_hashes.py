from __future__ import annotations

import os
from pathlib import Path

import pytest

from data import hashes
from data.files import sha256
from data.hashes import Content, content


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that has been left alone for a while."""
    path = tmp_path / "a.mp4"
    path.write_bytes(b"one")
    return path


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a moment ago count as old."""
    monkeypatch.setattr(hashes, "SETTLED_S", -1.0)


def refuse(_: Path) -> str:
    raise AssertionError("hashed again")


def test_a_file_is_hashed_once(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = content(str(file), tmp_path / "work")
    assert first == Content(sha256(file), 3)
    monkeypatch.setattr(hashes, "sha256", refuse)
    assert content(str(file), tmp_path / "work") == first
    with pytest.raises(AssertionError, match="hashed again"):
        content(str(file), tmp_path / "other work")


@pytest.mark.parametrize("how", ["rewritten", "replaced", "touched", "same size and time"])
def test_whatever_changes_a_file_has_it_hashed_again(file: Path, tmp_path: Path, how: str) -> None:
    before = file.stat()
    content(str(file), tmp_path / "work")
    if how == "rewritten":
        file.write_bytes(b"other")
    elif how == "touched":
        os.utime(file, (1, 1))
    else:
        (tmp_path / "new").write_bytes(b"two")
        (tmp_path / "new").replace(file)
    if how == "same size and time":
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert content(str(file), tmp_path / "work") == Content(sha256(file), file.stat().st_size)


def test_a_file_of_this_very_moment_is_not_remembered(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "SETTLED_S", 1e6)
    content(str(file), tmp_path / "work")
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("damage", [b"", b"abc 3\n", b"\xff\xfe", b"0" * 64 + b" many\n", b"0" * 64])
def test_a_damaged_memory_is_no_memory(file: Path, tmp_path: Path, damage: bytes) -> None:
    first = content(str(file), tmp_path / "work")
    (entry,) = [path for path in (tmp_path / "work").rglob("*") if path.is_file()]
    entry.write_bytes(damage)
    assert content(str(file), tmp_path / "work") == first
