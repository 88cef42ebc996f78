"""Make the pages a person reads about the data: what came in, what became of it and why, and every clip to look at.

Example: soundstage browse max_clips=2000
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, cast

import pyarrow.parquet as pq
from pydantic import BaseModel, Field

from data import cards, files, splits
from data.engines import Engine, Lost, map_ordered
from data.records import Clip, Frozen, Reject, Source, Treatment
from data.sensing import Sensing
from tasks import browse_page
from tasks.browse_page import address, rounded
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

    by_rule: Counter[str]
    by_verb: Counter[tuple[str, bool]]
    """Keys are the verb and whether a span was left out, not a whole file."""
    rows: list[Reject]
    paths: set[str]
    """Of files that `validate` left out."""


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
    """Write the pages."""
    shown = {name: sample(config.splits / f"{name}.parquet", config, Clip) for name in splits.SPLITS}
    left = left_out(config)
    clips = [clip for members in shown.values() for clip in members]
    wanted = {clip.source_id for clip in clips} | {reject.item.partition("-")[0] for reject in left.rows}
    sources = {source.source_id: source for source in those(config.manifest, Source, "source_id", wanted)}
    treated: defaultdict[str, list[Treatment]] = defaultdict(list)
    for item in those(config.treatments, Treatment, "item", wanted):
        treated[item.item].append(item)
    with files.whole(config.pages) as folder:
        (folder / "thumbs").mkdir(parents=True)
        pictured = write_thumbs(folder / "thumbs", jobs(clips, left.rows, sources), config)
        items = [clip_item(c, name, sources, treated, pictured, config) for name in shown for c in shown[name]]
        items += [
            reject_item(reject, sources, treated, pictured, config)
            for reject in left.rows
            if is_span(reject) and reject.verb == "cut"
        ]
        page = browse_page.Page(
            config=config,
            counts=counts(config, left),
            items=sorted(items, key=lambda item: item["id"]),
            rejects=[reject_row(reject, pictured) for reject in left.rows],
            rules=rules_of(left, pictured, config.num_examples),
            treatments=cards.tally(cards.column(config.treatments, "treatment")),
        )
        (folder / "index.html").write_text(browse_page.render(page), encoding="utf-8")
    total = files.num_records(config.clips)
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
            left.by_rule[reject.rule] += 1
            left.by_verb[reject.verb, is_span(reject)] += 1
            if reject.verb == "validate":
                left.paths.add(reject.path)
            if left.by_rule[reject.rule] <= config.num_examples or len(left.rows) < config.max_rejects:
                left.rows.append(reject)
    return left


def is_span(reject: Reject) -> bool:
    """Whether a span of a source was left out, not the whole."""
    return "-" in reject.item


def start_of(item: str) -> float:
    """Where a clip starts, by its id, s."""
    return int(item.partition("-")[2] or 0) / 1000


def counts(config: Config, left: Left) -> dict[str, int]:
    """How many files and clips met which fate."""
    path, use = cards.column(config.manifest, "path"), cards.column(config.manifest, "use")
    references = set(path.filter(cards.compute.equal(use, "reference")).to_pylist())
    broken = len(references & left.paths)
    treated = cards.compute.unique(cards.column(config.treatments, "item"))
    kept = cards.compute.unique(cards.column(config.clips, "source_id"))
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


def clip_item(
    clip: Clip,
    split: str,
    sources: dict[str, Source],
    treated: dict[str, list[Treatment]],
    pictured: set[str],
    config: Config,
) -> dict[str, Any]:
    """A clip as the browser's script takes it."""
    facts = {name: rounded(getattr(clip, name)) for name in FACTS if getattr(clip, name) is not None}
    ends = {"split": split, "end": rounded(clip.end_s), "caption": clip.caption, "facts": facts}
    return (
        item_of(clip.clip_id, clip.path, sources, treated, pictured, config) | ends | {"start": rounded(clip.start_s)}
    )


def reject_item(
    reject: Reject,
    sources: dict[str, Source],
    treated: dict[str, list[Treatment]],
    pictured: set[str],
    config: Config,
) -> dict[str, Any]:
    """A span that was left out, likewise."""
    why = {"rule": reject.rule, "why": f"{reject.measured}; limit {reject.limit}", "split": "left out"}
    return item_of(reject.item, reject.path, sources, treated, pictured, config) | why


def item_of(
    name: str,
    path: str,
    sources: dict[str, Source],
    treated: dict[str, list[Treatment]],
    pictured: set[str],
    config: Config,
) -> dict[str, Any]:
    """What clips and spans left out have in common."""
    source = sources.get(name.partition("-")[0])
    known = {} if source is None else {key: rounded(getattr(source, key)) for key in SOURCE_FACTS}
    return {
        "id": name,
        "path": path,
        "url": address(path, config.pages),
        "command": inspect_command(path),
        "group": "" if source is None else source.group,
        "caption": "" if source is None else source.caption or "",
        "start": start_of(name),
        "thumb": name in pictured,
        "treatments": [[item.treatment, item.detail] for item in treated.get(name.partition("-")[0], [])],
        "source": {key: value for key, value in known.items() if value is not None},
    }


def reject_row(reject: Reject, pictured: set[str]) -> dict[str, Any]:
    """A line of the table of what was left out."""
    span = f" at {start_of(reject.item):.3f} s" if is_span(reject) else ""
    own = {"span": span, "command": inspect_command(reject.path), "thumb": reject.item in pictured}
    return reject.model_dump() | own


def rules_of(left: Left, pictured: set[str], num_examples: int) -> list[dict[str, Any]]:
    """Every rule that left something out: how often, the first measured value and limit, thumbnails."""
    rows: list[dict[str, Any]] = []
    for rule, count in sorted(left.by_rule.items(), key=lambda pair: (-pair[1], pair[0])):
        own = [reject for reject in left.rows if reject.rule == rule]
        pictures = [reject.item for reject in own if reject.item in pictured][:num_examples]
        example = {"measured": own[0].measured, "limit": own[0].limit}
        rows.append({"rule": rule, "count": count, "pictures": pictures, "spans": any(map(is_span, own)), **example})
    return rows
