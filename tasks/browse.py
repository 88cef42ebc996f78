"""Make the pages a person reads about the data: what came in, what became of it and why, and every clip to look at.

Example: soundstage browse max_clips=2000
"""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, cast

import pyarrow.parquet as pq
from pydantic import BaseModel, Field

from data import cards, files, splits
from data.captions import CaptionFault
from data.engines import Engine, Lost, map_ordered
from data.records import Clip, Frozen, Reject, Source, Treatment
from data.sensing import Sensing
from tasks import browse_page
from tasks.browse_page import DONE, address, is_span, rounded, start_of
from tasks.explain import inspect_command

SAFE = re.compile(r"[0-9a-f]{16}(-\d{1,12})?")
"""Ids of sources and clips, which name thumbnail files."""
FACTS = (
    "boundary_reason", "boundary_score", "residual_cuts", "motion_p50", "motion_p90", "luma", "sharpness_p90",
    "motion_blur_index", "black_share", "freeze_share", "letterbox_share", "loudness_lufs", "silent_share",
    "speech_share", "dnsmos", "text_share", "num_faces", "caption_language", "licence", "cluster",
)  # fmt: skip
"""Columns of a clip that its page shows."""
SOURCE_FACTS = (
    "width",
    "height",
    "frame_rate",
    "video_codec",
    "audio_codec",
    "num_channels",
    "sample_rate_hz",
    "caption_from",
)
"""Facts of its source beside them."""
Record = TypeVar("Record", bound=BaseModel)


class Config(Frozen):
    """What is shown, and where the pages go."""

    manifest: Path
    """Parquet of everything given."""
    accepted: Path
    """Parquet of the accepted sources."""
    treatments: Path
    """Parquet of what was done to them."""
    clips: Path
    """Parquet of all clips."""
    splits: Path
    """Folder of the splits."""
    cards: Path
    """Folder of their data cards."""
    rejects: tuple[Path, ...]
    """Parquets of what `validate`, `cut` and `split` left out."""
    expectations: tuple[Path, ...] = ()
    """JSON of what the expectations found."""
    caption_faults: Path | None = None
    """Parquet of every caption at fault; None shows none."""
    settings_file: Path | None = None
    """Settings file that the commands on the page name: by itself the one of `--params`; None is params.yaml."""
    pages: Annotated[Path, files.Holds(("index.html", "thumbs"))]
    """Folder to write; start at index.html."""
    docs: Path = Path("data/store/docs")
    """Folder of the expectations' pages, to link to."""
    report: Path = Path("data/store/report/report.html")
    """The model's report, to link to."""
    work: Path = Path("data/store/work")
    """Scratch folder with remembered measurements, whose thumbnails are shown. Changes no result."""
    sensing: Sensing = Sensing()
    """As in `cut`: then nothing is decoded again."""
    engine: Engine = Engine()
    """How many sources are looked up at once; the pages do not depend on it."""
    max_clips: int = Field(default=10_000, gt=0)
    """Most clips in the browser, spread evenly over all; a thumbnail is 4 KB, a row of facts 0.6."""
    max_rejects: int = Field(default=2_000, gt=0)
    """Most rejects that are listed one by one."""
    num_examples: int = Field(default=6, ge=0)
    """Thumbnails beside each rule."""


class Left(NamedTuple):
    """What was left out: counts of everything, and the first rows."""

    by_rule: Counter[tuple[str, bool]]
    """Keys are the rule and whether a span was left out, not a whole file."""
    by_verb: Counter[tuple[str, bool]]
    """Likewise with the verb."""
    rows: list[Reject]
    paths: set[str]
    """Of files that `validate` left out."""


class Faults(NamedTuple):
    """Captions at fault: counts of everything, the first rows, and those of sources that are shown."""

    by_kind: Counter[str]
    rows: list[CaptionFault]
    of: defaultdict[tuple[str, str], list[CaptionFault]]
    """By source id and path."""


class About(NamedTuple):
    """What is known about the files of the items that are shown."""

    sources: dict[str, Source]
    treated: dict[str, list[Treatment]]
    faults: dict[tuple[str, str], list[CaptionFault]]
    pictured: set[str]


class Job(NamedTuple):
    """The thumbnails wanted of one source."""

    source: Source
    wanted: tuple[tuple[str, float], ...]
    """Name and time of each, s."""


class Result(Frozen):
    """What the pages hold."""

    num_clips: int
    num_shown: int
    num_thumbnails: int


def run(config: Config) -> Result:
    """Write the pages, and say where they are."""
    shown = {name: sample(config.splits / f"{name}.parquet", config, Clip) for name in splits.SPLITS}
    left = left_out(config)
    clips = [clip for members in shown.values() for clip in members]
    wanted = {clip.source_id for clip in clips} | {reject.item.partition("-")[0] for reject in left.rows}
    sources: dict[str, Source] = {}
    for source in those(config.manifest, Source, "source_id", wanted):
        if source.error is None or source.source_id not in sources:  # a copy that is left out bears the same id
            sources[source.source_id] = source
    treated: defaultdict[str, list[Treatment]] = defaultdict(list)
    for item in those(config.treatments, Treatment, "item", wanted):
        treated[item.item].append(item)
    faults = caption_faults(config, wanted)
    with files.whole(config.pages) as folder:
        (folder / "thumbs").mkdir(parents=True)
        pictured = write_thumbs(folder / "thumbs", jobs(clips, left.rows, sources), config)
        about = About(sources, treated, faults.of, pictured)
        items = [clip_item(clip, name, about, config) for name in shown for clip in shown[name]]
        spans = [reject for reject in left.rows if is_span(reject) and reject.verb == "cut"]
        items += [reject_item(reject, about, config) for reject in spans]
        page = browse_page.Page(
            config=config,
            counts=counts(config, left),
            items=sorted(items, key=lambda item: (item["path"], item["start"], item["id"])),
            rejects=[reject_row(reject, config) for reject in left.rows],
            rules=browse_page.rules_of(left, pictured, config.num_examples),
            num_left={span: sum(n for (_, own), n in left.by_rule.items() if own == span) for span in (False, True)},
            faults=faults.by_kind,
            fault_rows=[item.model_dump() for item in faults.rows],
            treatments=cards.tally(cards.column(config.treatments, "treatment")),
        )
        (folder / "index.html").write_text(browse_page.render(page), encoding="utf-8")
    total = files.num_records(config.clips)
    sys.stderr.write(f"browse: {len(items)} clips and spans are shown; open {config.pages / 'index.html'}\n")
    return Result(num_clips=total, num_shown=len(items), num_thumbnails=len(pictured))


def sample(path: Path, config: Config, kind: type[Record]) -> list[Record]:
    """Clips of a file, evenly over it, so that all files together give `max_clips`."""
    total = sum(files.num_records(config.splits / f"{name}.parquet") for name in splits.SPLITS)
    step, begin = -(-total // config.max_clips), 0
    found: list[Record] = []
    with cast(Any, pq.ParquetFile(path)) as file:
        for batch in file.iter_batches(files.ROW_GROUP):
            rows = [row for row in range(len(batch)) if (begin + row) % step == 0]
            found += [kind.model_validate(row) for row in batch.take(cards.arrow.array(rows, "int64")).to_pylist()]
            begin += len(batch)
    return found


def those(path: Path, kind: type[Record], column: str, wanted: set[str]) -> Iterator[Record]:
    """The records whose `column` is wanted, streamed."""
    chosen = cards.arrow.array(sorted(wanted), cards.arrow.string())
    with cast(Any, pq.ParquetFile(path)) as file:
        for batch in file.iter_batches(files.ROW_GROUP):
            hits = batch.filter(cards.compute.is_in(batch.column(column), value_set=chosen))
            yield from (kind.model_validate(row) for row in hits.to_pylist())


def left_out(config: Config) -> Left:
    """All rejects counted, the first of each rule kept."""
    left = Left(Counter(), Counter(), [], set())
    for path in config.rejects:
        for reject in files.iter_records(path, Reject):
            left.by_rule[reject.rule, is_span(reject)] += 1
            left.by_verb[reject.verb, is_span(reject)] += 1
            if reject.verb == "validate":
                left.paths.add(reject.path)
            if left.by_rule[reject.rule, is_span(reject)] <= config.num_examples or len(left.rows) < config.max_rejects:
                left.rows.append(reject)
    return left


def caption_faults(config: Config, wanted: set[str]) -> Faults:
    """All captions at fault, counted; the first, and those of the sources wanted."""
    found = Faults(Counter(), [], defaultdict(list))
    for item in files.iter_records(config.caption_faults, CaptionFault) if config.caption_faults else ():
        found.by_kind[item.fault] += 1
        if len(found.rows) < config.max_rejects:
            found.rows.append(item)
        if item.item in wanted:
            found.of[item.item, item.path].append(item)
    return found


def counts(config: Config, left: Left) -> dict[str, int]:
    """How many files and clips met which fate."""
    path, use = cards.column(config.manifest, "path"), cards.column(config.manifest, "use")
    references = set(path.filter(cards.compute.equal(use, "reference")).to_pylist())
    broken = len(references & left.paths)
    kept = cards.compute.unique(cards.column(config.clips, "source_id"))
    treated = cards.compute.unique(cards.column(config.treatments, "item"))
    treated = treated.filter(cards.compute.is_in(treated, value_set=kept))
    parts = {name: files.num_records(config.splits / f"{name}.parquet") for name in splits.SPLITS}
    total = files.num_records(config.clips)
    return {
        "given": len(path) - len(references),
        "references": len(references) - broken,
        "accepted": files.num_records(config.accepted),
        "rejected": left.by_verb["validate", False] - broken,
        "treated": len(treated),
        "with_clips": len(kept),
        "without_clips": files.num_records(config.accepted) - len(kept),
        "spans": total + left.by_verb["cut", True],
        "clips": total,
        "filtered": left.by_verb["cut", True],
        **parts,
        "left_out": total - sum(parts.values()),
    }


def jobs(clips: Iterable[Clip], rejects: Iterable[Reject], sources: dict[str, Source]) -> list[Job]:
    """Which thumbnails are wanted of which source, by source id."""
    wanted: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for clip in clips:
        wanted[clip.source_id][clip.clip_id] = (clip.start_s + clip.end_s) / 2
    for reject in rejects:
        wanted[reject.item.partition("-")[0]][reject.item] = start_of(reject.item)
    return [
        Job(sources[key], tuple(sorted((name, at) for name, at in wanted[key].items() if SAFE.fullmatch(name))))
        for key in sorted(wanted)
        if key in sources and sources[key].error is None and sources[key].use == "clip"
    ]


def write_thumbs(folder: Path, wanted: Sequence[Job], config: Config) -> set[str]:
    """Write the thumbnails as they are found; the names of those that were."""
    from tqdm import tqdm

    done: set[str] = set()
    look = functools.partial(pictures, sensing=config.sensing, work=config.work)
    for found in tqdm(map_ordered(look, wanted, config.engine), total=len(wanted), desc="browse", disable=None):
        if isinstance(found, Lost):
            continue
        for name, content in found.items():
            (folder / f"{name}.jpg").write_bytes(content)
            done.add(name)
    return done


def pictures(job: Job, sensing: Sensing, work: Path) -> dict[str, bytes]:
    """The JPEG files of one source's thumbnails; none where its file is gone."""
    from data import measure
    from data.media_open import Unreadable
    from data.remote import local

    source, whole = job.source, sensing.model_copy(update={"decode": "all"})
    try:
        sound = None if source.sound_path is None else local(source.sound_path)
        found = measure.remembered(local(source.path), source.sha256, whole, work, sound)
    except (Unreadable, OSError):
        return {}
    track = found.picture
    if track is None or not len(track.thumb_frames):
        return {}
    return {name: track.thumbnail(seconds) for name, seconds in job.wanted}


def clip_item(clip: Clip, split: str, about: About, config: Config) -> dict[str, Any]:
    """A clip as the browser's script takes it."""
    facts = {name: rounded(getattr(clip, name)) for name in FACTS if getattr(clip, name) is not None}
    ends = {"split": split, "end": rounded(clip.end_s), "caption": clip.caption, "facts": facts}
    return item_of(clip.clip_id, clip.path, about, config) | ends | {"start": rounded(clip.start_s)}


def reject_item(reject: Reject, about: About, config: Config) -> dict[str, Any]:
    """A span that was left out, likewise."""
    why = {"rule": reject.rule, "why": f"{reject.measured}; limit {reject.limit}", "split": "left out"}
    return item_of(reject.item, reject.path, about, config) | why


def item_of(name: str, path: str, about: About, config: Config) -> dict[str, Any]:
    """What clips and spans left out have in common."""
    source_id = name.partition("-")[0]
    source = about.sources.get(source_id)
    known = {} if source is None else {key: rounded(getattr(source, key)) for key in SOURCE_FACTS}
    return {
        "id": name,
        "path": path,
        "url": address(path, config.pages),
        "command": inspect_command(path, config.settings_file),
        "group": "" if source is None else source.group,
        "caption": "" if source is None else source.caption or "",
        "start": start_of(name),
        "thumb": name in about.pictured,
        "treatments": [[item.treatment, item.detail] for item in about.treated.get(source_id, [])],
        "faults": [[item.fault, item.measured, DONE[item.action]] for item in about.faults.get((source_id, path), [])],
        "source": {key: value for key, value in known.items() if value is not None},
    }


def reject_row(reject: Reject, config: Config) -> dict[str, Any]:
    """A line of the table of what was left out; a path that was refused is in no command."""
    span = f" at {start_of(reject.item):.3f} s" if is_span(reject) else ""
    refused = reject.rule == "validate.usable" and reject.measured.startswith("lies outside")
    command = "" if refused else inspect_command(reject.path, config.settings_file)
    return reject.model_dump() | {"span": span, "command": command}
