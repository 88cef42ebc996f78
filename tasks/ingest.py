"""List every file the user gave, as measured: one row of the manifest each, readable or not.

Example: soundstage ingest source=/data/my_videos manifest=data/store/manifest.parquet
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from data import files
from data.engines import Engine
from data.listing import Listed, Listing
from data.records import DataRefused, Frozen, Source
from data.sensing import Sensing
from data.sources import Reading, given_by

MACHINE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What says something about this machine and nothing about the file: the run stops, and goes on when it is mended."""


class Config(Frozen):
    """Where the videos are and where their list goes."""

    source: Annotated[
        str,
        Field(min_length=1),
        BeforeValidator(lambda given: os.fspath(given) if isinstance(given, Path) else given),
    ]
    """A folder of videos with same-name .txt captions (or .json with a caption), or a .csv, .tsv, .json, .jsonl or
    .parquet table; here or at `s3://…`, `oss://…`."""
    manifest: Path
    """The list that is written, Parquet: a folder's files by path, a table's in its order, then their references."""
    work: Path = Path("data/store/work")
    """Folder of remembered measurements: a run that was killed, and the verbs after this one, go on from there."""
    root: str | None = None
    """Folder that a table's paths are relative to and may not leave; null: the table's own."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Own names of a table's columns, to the usual ones, for example `{gpt_caption: caption}`."""
    protocols: tuple[str, ...] = ("s3", "oss")
    """Remote protocols that source and table may name; any other that fsspec speaks can be added."""
    sensing: Sensing = Sensing()
    """What is measured of every file, and how."""
    engine: Engine = Engine()
    """How many files are measured at once, where, and what one may use; the manifest does not depend on it."""


def run(config: Config) -> int:
    """Measure every file of the source and write the manifest; returns how many rows it has.

    Holds a bounded number of rows, however many there are.

    Raises:
        ValueError: the source does not exist or its table has no column of paths.
        RuntimeError: a remote source cannot be reached.
        DataRefused: there is no file to measure.
    """
    from tqdm import tqdm

    from data import hardware

    if config.engine.name == "local":
        hardware.hwaccel(config.sensing.decoder)  # says once, here, whether the card decodes; children are silent
    reading = Reading(config.root, config.columns, config.protocols)
    listing = Listing()
    listing.add(tqdm(given_by(config.source, reading), desc="ingest: list", unit="file", disable=None))
    if not len(listing):
        files.remove(config.manifest)  # an earlier one is about other files
        raise DataRefused(f"ingest.source = {config.source} holds no media; put videos there or point it elsewhere")
    sys.stderr.write(overlooked(reading, config.source))
    counts: Counter[str] = Counter()
    num_rows = files.write_records(config.manifest, measured(listing, config, counts), Source)
    beside = f", {counts['reference']} references beside them" if counts["reference"] else ""
    given = f"{counts['given']} files: {counts['given'] - counts['unusable']} can be used, {counts['unusable']} cannot"
    sys.stderr.write(f"ingest: {given}{beside}; written to {config.manifest}\n")
    return num_rows


def overlooked(reading: Reading, source: str) -> str:
    """Lines about what the user gave that no row tells of."""
    said = ""
    if reading.unread:
        said += f"ingest: nothing reads the columns {', '.join(map(printed, sorted(reading.unread)))} of {source}\n"
    if (alone := reading.alone).num:
        which = "1 caption belongs" if alone.num == 1 else f"{alone.num} captions belong"
        more = f" and {alone.num - len(alone.first)} more" if alone.num > len(alone.first) else ""
        said += f"ingest: {which} to no video (name.txt or name.json beside name.mp4): {', '.join(map(printed, alone.first))}{more}\n"
    return said


def printed(name: str) -> str:
    """A name on one line, whatever it holds."""
    return name if name.isprintable() else ascii(name)


def measured(listing: Listing, config: Config, counts: Counter[str]) -> Iterator[Source]:
    """The rows of the manifest, in the order of the list; `counts` receives what they are."""
    from tqdm import tqdm

    from data.engines import map_ordered
    from data.isolation import Lost

    function = functools.partial(measure, sensing=config.sensing, work=config.work)
    answers = map_ordered(function, listing, config.engine)
    bar = tqdm(total=len(listing), desc="ingest", unit="file", disable=None)
    with bar:
        for row, answer in zip(listing, answers, strict=True):
            source = unmeasured(row, answer.reason) if isinstance(answer, Lost) else answer
            source = source if source.use == "reference" or source.error else without_twin(source, listing)
            counts["reference" if source.use == "reference" else "given"] += 1
            counts["unusable"] += source.use == "clip" and source.error is not None
            yield source
            bar.update()


def measure(row: Listed, sensing: Sensing, work: Path) -> Source:
    """Hash and measure one file, or remember what was measured of the same content."""
    from data import remote
    from data.media_open import Unreadable

    if row.error is not None:
        return unmeasured(row, row.error)
    try:
        if not remote.is_remote(row.file) and not Path(row.file).is_file():
            return unmeasured(row, not_a_file(Path(row.file)))
        return measured_file(row, sensing, work)
    except Unreadable as error:
        return unmeasured(row, str(error))
    except OSError as error:
        if error.errno in MACHINE_ERRORS or str(error.filename or "").startswith(str(work)):
            raise
        return unmeasured(row, f"cannot be read: {error.strerror or error}")


def measured_file(row: Listed, sensing: Sensing, work: Path) -> Source:
    """The row of a regular file or a remote object; one that is remembered is neither fetched nor read."""
    from data import remote
    from data.hashes import content
    from data.measure import recall, remembered
    from data.torn import torn

    sound = None if row.sound is None else remote.local(row.sound)
    found = content(row.file, work)
    if not found.size_bytes:
        return unmeasured(row, "is empty")
    measurement = recall(found.sha256, sensing, work, sound)
    if measurement is None:
        measurement = remembered(remote.local(row.file), found.sha256, sensing, work, sound)
    facts = {"error": unfit(row.use, measurement.facts), **measurement.facts}
    if str(facts["error"]).startswith("does not decode") and not remote.is_remote(row.file):
        facts["error"] = torn(Path(row.file)) or facts["error"]
    return Source.model_validate({**identity(row, found.sha256, found.size_bytes), **facts})


def not_a_file(path: Path) -> str:
    """Why there is nothing to read at a local path; a pipe or a device is never opened, since that may hang."""
    if path.is_dir():
        return "is a folder, not a file"
    if path.exists():
        return "is not a regular file"
    return "is a link to nothing" if path.is_symlink() else "there is no such file"


def unfit(use: str, facts: Mapping[str, object]) -> str | None:
    """Why a file that decodes cannot be a clip; as a reference it may be a still or a sound. Animations are videos."""
    kind = str(facts.get("media_type") or "")
    if use == "reference":
        return None
    if kind.startswith("image/") and int(str(facts.get("num_frames") or 0)) < 2:
        return f"is a still picture ({kind}), not a video"
    if facts.get("num_video_streams"):
        return None
    return "holds no picture, only sound" if facts.get("num_audio_streams") else "holds neither picture nor sound"


def unmeasured(row: Listed, error: str) -> Source:
    """The row of a file whose content is unknown: its path stands for it."""
    place = row.path if not row.again else f"{row.path}\n{row.again}"
    return Source.model_validate({**identity(row, hashlib.sha256(place.encode()).hexdigest(), 0), "error": error})


def identity(row: Listed, content: str, size_bytes: int) -> dict[str, object]:
    """Fields of a row that need no decoding."""
    return {
        "source_id": content[:16],
        "sha256": content,
        "path": row.path,
        "group": row.group,
        "size_bytes": size_bytes,
        "use": row.use,
        "references": row.references,
        "sound_path": row.sound_path,
        "caption": row.words.caption,
        "caption_from": row.words.caption_from,
        "caption_language": row.words.language,
        "licence": row.words.licence,
    }


def without_twin(source: Source, listing: Listing) -> Source:
    """The same row; of clips with the same content only the first in the list stays usable."""
    first = listing.first_with(source.sha256, source.path)
    return source if first == source.path else source.model_copy(update={"error": f"same content as {first}"})
