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


def content(path: str, work: Path) -> Content:
    """Content of a file, remembered under its place, size and times (of an object: its ETag).

    Args:
        work: Folder of scratch files; entries go to `hashed/` in it.

    Raises:
        OSError, Unreadable, RuntimeError: as `remote.local`.
    """
    entry = _entry(path, work)
    if (known := _known(entry)) is not None:
        return known
    file = remote.local(path)
    found = Content(sha256(file), file.stat().st_size)
    settled = remote.is_remote(path) or time.time() - max(file.stat().st_mtime, file.stat().st_ctime) > SETTLED_S
    if settled and entry == _entry(path, work):  # nothing has changed meanwhile
        write_text(entry, f"{found.sha256} {found.size_bytes}\n")
    return found


def _known(entry: Path) -> Content | None:
    try:
        words = entry.read_text(encoding="ascii").split()
        return Content(words[0], int(words[1])) if len(words) == 2 and len(words[0]) == 64 else None
    except (FileNotFoundError, ValueError):
        return None


def _entry(path: str, work: Path) -> Path:
    place = path if remote.is_remote(path) else str(Path(remote.plain(path)).absolute())
    name = hashlib.sha256(f"{place}\n{remote.stamp(path)}".encode("utf-8", "surrogateescape")).hexdigest()
    return work / "hashed" / name[:2] / name
