"""Words beside a file: `cat.txt`, `cat.mp4.txt` or `cat.json` for `cat.mp4`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import cast

from data import remote
from data.paths import as_text, beside, inside, shown
from data.tables import Words, one_line, words_in

SIDECARS = (".txt", ".json", ".jsonl", ".csv", ".tsv", ".parquet", ".md", ".srt", ".vtt", ".ass", ".yaml", ".yml")
"""Files beside media that say something about them; no rows of their own."""
MAX_SIDECAR_BYTES = 10**6
"""A caption is a few hundred bytes; what is larger is something else."""
CAPTIONS = (".txt", ".json")
"""How the names of captions end."""
MAX_ALONE = 3
"""Captions without a video that are named; all are counted."""


@dataclass
class Alone:
    """Captions without a video."""

    num: int = 0
    first: list[str] = field(default_factory=list[str])

    def add(self, folder: str, names: set[str]) -> None:
        """Take in those of one folder."""
        media = {name for name in names if not name.lower().endswith(SIDECARS)}
        read = {wanted for name in media for wanted in _names_beside(name)}
        alone = [name for name in names if name.lower().endswith(CAPTIONS) and name not in read]
        self.num += len(alone)
        for name in sorted(alone)[: MAX_ALONE - len(self.first)]:
            path = f"{folder.rstrip('/')}/{name}"
            self.first.append(as_text(path if remote.is_remote(path) else shown(path)))


def _names_beside(name: str) -> tuple[str, str, str]:
    """Names that the words about a file may have."""
    stem = PurePosixPath(name).stem
    return f"{stem}.txt", f"{name}.txt", f"{stem}.json"


def words_beside(file: str, root: str, names: set[str] | None = None) -> Words:
    """What `name.txt`, `name.mp4.txt` or `name.json` beside a file says.

    Args:
        names: What lies in the folder, where that is known.

    Raises:
        ValueError: a sidecar is not UTF-8, not JSON, too large, or a link that leads out of `root`.
    """
    name = file.rpartition("/")[2]
    words = Words()
    for sidecar in _names_beside(name):
        path = beside(file, sidecar)
        if not (sidecar in names if names is not None else os.path.isfile(path)):  # noqa: PTH113  # too long is absent
            continue
        words = words.or_else(_words_in_file(path, sidecar, root))
    return words


def _words_in_file(path: str, name: str, root: str) -> Words:
    if remote.is_remote(path):
        content = remote.read(path)
    elif not inside(path, root):
        raise ValueError(f"its caption {name} is a link that leads out of the source folder")
    elif not os.path.isfile(path):  # noqa: PTH113  # a pipe would hang whoever reads it
        return Words()
    else:
        with open(path, "rb") as stream:  # noqa: PTH123
            content = stream.read(MAX_SIDECAR_BYTES + 1)
    if len(content) > MAX_SIDECAR_BYTES:
        raise ValueError(f"its caption {name} is larger than {MAX_SIDECAR_BYTES} bytes")
    try:
        text = content.decode("utf-8-sig")
        if not name.endswith(".json"):
            return Words(line, "sidecar") if (line := one_line(text)) else Words()
        fields = cast(object, json.loads(text))
    except UnicodeDecodeError as error:
        raise ValueError(f"its caption {name} is not UTF-8; save it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"its caption {name} is not JSON at line {error.lineno}") from error
    except RecursionError as error:
        raise ValueError(f"its caption {name} is not JSON that can be read") from error
    return words_in(cast(dict[str, object], fields), "sidecar") if isinstance(fields, dict) else Words()
