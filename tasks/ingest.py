"""List every file the user gave, as measured: one row of the manifest each, readable or not.

Example: soundstage ingest source=/data/my_videos manifest=data/store/manifest.parquet
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import Field

from data.files import sha256, write_records
from data.records import DataRefused, Frozen, Source
from data.sources import Given, given_by


class Config(Frozen):
    """Where the videos are and where their list goes."""

    source: Path
    """A folder of videos with same-name .txt captions (or .json with a caption), or a .csv, .json or .jsonl table."""
    manifest: Path
    """The list that is written, Parquet, sorted by path."""
    num_workers: int = Field(default=2, gt=0)
    """Files measured at once, each in a process of its own; the manifest does not depend on it."""
    max_file_s: float = Field(default=1800.0, gt=0)
    """Longest time one file may take to decode, s; after that it is given up and its row says so."""


def run(config: Config) -> list[Source]:
    """Measure every file of the source and write the manifest.

    Raises:
        ValueError: the source does not exist or its table has no column of paths.
        DataRefused: there is no file to measure.
    """
    from tqdm import tqdm

    from data.workers import Lost, map_isolated

    given = given_by(config.source)
    if not given:
        raise DataRefused(f"ingest.source = {config.source} holds no media; put videos there or point it elsewhere")
    rows: dict[int, Source] = {}
    answers = map_isolated(measure, given, config.num_workers, config.max_file_s)
    for index, answer in tqdm(answers, total=len(given), desc="ingest", unit="file", disable=None):
        rows[index] = unmeasured(given[index], answer.reason) if isinstance(answer, Lost) else answer
    sources = without_twins(sorted(rows.values(), key=lambda row: row.path))
    write_records(config.manifest, sources, Source)
    return sources


def measure(given: Given) -> Source:
    """Hash and probe one file."""
    from data.media import probe

    path = Path(given.file)
    if given.error is not None:
        return unmeasured(given, given.error)
    if not path.is_file():
        return unmeasured(given, "is not a regular file" if path.exists() else "there is no such file")
    try:
        content, size_bytes = sha256(path), path.stat().st_size
    except OSError as error:
        return unmeasured(given, f"cannot be read: {error.strerror}")
    facts = probe(path) if size_bytes else {"error": "is empty"}
    return Source.model_validate({**identity(given, content, size_bytes), **facts})


def unmeasured(given: Given, error: str) -> Source:
    """The row of a file whose content is unknown: its path stands for it."""
    content = hashlib.sha256(given.path.encode()).hexdigest()
    return Source.model_validate({**identity(given, content, 0), "error": error})


def identity(given: Given, content: str, size_bytes: int) -> dict[str, str | int | None]:
    """Fields of a row that need no decoding."""
    return {
        "source_id": content[:16],
        "sha256": content,
        "path": given.path,
        "group": given.group,
        "size_bytes": size_bytes,
        "caption": given.caption,
    }


def without_twins(sources: list[Source]) -> list[Source]:
    """The same rows; of files with the same content only the first in the list stays usable."""
    first: dict[str, str] = {}
    result: list[Source] = []
    for source in sources:
        if source.sha256 in first:
            result.append(source.model_copy(update={"error": f"same content as {first[source.sha256]}"}))
        else:
            first[source.sha256] = source.path
            result.append(source)
    return result
