"""Content hashes that are not computed twice: a run that goes on, or one over a grown folder, reads only what is new."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import NamedTuple

from data import remote
from data.files import sha256, write_text

SETTLED_S = 2.0
"""A file changed so recently, s, is hashed again next time: it may change once more within its clock's grain."""


class Content(NamedTuple):
    """What a file holds, as far as a hash can tell."""

    sha256: str
    size_bytes: int


def known_content(path: str, work: Path) -> Content | None:
    """Content of a file that has not changed since `content` saw it; None where it has, or is new.

    Raises:
        OSError, Unreadable, RuntimeError: as `remote.stamp`.
    """
    try:
        words = _entry(path, work).read_text(encoding="ascii").split()
        return Content(words[0], int(words[1])) if len(words) == 2 and len(words[0]) == 64 else None
    except (FileNotFoundError, ValueError):
        return None


def content(path: str, work: Path) -> Content:
    """Content of a file, remembered under its place, size and times (of an object: its ETag).

    Raises:
        OSError, Unreadable, RuntimeError: as `remote.local`.
    """
    if (known := known_content(path, work)) is not None:
        return known
    entry, file = _entry(path, work), remote.local(path)
    found = Content(sha256(file), file.stat().st_size)
    settled = remote.is_remote(path) or time.time() - max(file.stat().st_mtime, file.stat().st_ctime) > SETTLED_S
    if settled and entry == _entry(path, work):
        write_text(entry, f"{found.sha256} {found.size_bytes}\n")
    return found


def _entry(path: str, work: Path) -> Path:
    place = path if remote.is_remote(path) else str(Path(remote.plain(path)).absolute())
    name = hashlib.sha256(f"{place}\n{remote.stamp(path)}".encode("utf-8", "surrogateescape")).hexdigest()
    return work / "hashed" / name[:2] / name
