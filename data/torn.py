"""Whether an MP4 or QuickTime file that does not open was cut short: its boxes tell, which are read without decoding."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, NamedTuple

FIRST = (b"ftyp", b"wide", b"free", b"skip", b"mdat", b"pnot")
"""What such a file may begin with before its index."""
MAX_BOXES = 10_000
"""Boxes that are looked at: a film has a dozen, one written in fragments two a second."""


class Box(NamedTuple):
    """One box of the file itself, not one inside another."""

    kind: bytes
    end: int
    """Where it says that it ends, bytes; it may be beyond the file."""


def torn(path: Path) -> str | None:
    """What is missing, as the end of a sentence about the file; None where it is whole, or of another kind."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        found = boxes(stream, size)
    if not found or found[0].kind not in FIRST or any(box.kind == b"moov" and box.end <= size for box in found):
        return None
    if found[-1].end > size:
        return f"is cut short: {size} of at least {found[-1].end} bytes are there, and its index (moov) is not"
    return "has no index (moov): it is cut short, or its recording was never finished"


def boxes(stream: BinaryIO, size: int) -> list[Box]:
    """The boxes in their order, to the first that ends behind `size` or is none."""
    found: list[Box] = []
    at = 0
    while at + 8 <= size and len(found) < MAX_BOXES:
        stream.seek(at)
        head = stream.read(16)
        length, kind = int.from_bytes(head[:4]), head[4:8]
        if length == 1:
            length = int.from_bytes(head[8:16])
        elif length == 0:
            length = size - at
        if length < 8:
            break
        at += length
        found.append(Box(kind, at))
    return found
