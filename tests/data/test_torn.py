"""What the boxes of a file that does not open tell about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.torn import torn

FTYP = (16).to_bytes(4) + b"ftypisom" + bytes(4)
MOOV = (8).to_bytes(4) + b"moov"


def box(kind: bytes, length: int, content: bytes = b"") -> bytes:
    return length.to_bytes(4) + kind + content


def wide(kind: bytes, length: int, content: bytes) -> bytes:
    return (1).to_bytes(4) + kind + length.to_bytes(8) + content


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (FTYP + box(b"mdat", 1000, bytes(92)), "is cut short: 116 of at least 1016 bytes are there"),
        (FTYP + wide(b"mdat", 2**33, bytes(92)), f"is cut short: 124 of at least {16 + 2**33} bytes are there"),
        (FTYP + box(b"mdat", 20, bytes(12)) + box(b"moov", 500, bytes(9)), "is cut short: 53 of at least 536 bytes"),
        (FTYP + box(b"mdat", 20, bytes(12)), "has no index (moov)"),
        (FTYP + box(b"mdat", 0, bytes(12)), "has no index (moov)"),  # 0: to the end of the file
        (FTYP + MOOV, None),
        (FTYP + box(b"free", 4) + MOOV, "has no index (moov)"),  # no box is so short: what follows is none
        (b"RIFF" + bytes(40), None),
        (b"\0\0", None),
        (b"", None),
    ],
)
def test_boxes_tell_whether_a_file_was_cut_short(tmp_path: Path, content: bytes, said: str | None):
    path = tmp_path / "film.mp4"
    path.write_bytes(content)
    found = torn(path)
    assert found == said if said is None or found is None else said in found
