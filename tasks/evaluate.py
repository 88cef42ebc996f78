"""Measures a fine-tuned model by what it generates from held-out conditions, and shows it on one page.

soundstage evaluate max_clips=8 num_inference_steps=10
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

from pydantic import Field

from data.files import Holds, read_records, remove, sha256, whole
from data.records import Clip, ClipShape, DataRefused, Frozen, Reject, Report, Treatment
from data.workers import Lost, map_isolated
from tasks.generations import (
    BASE,
    CROSSFADE,
    REFERENCE,
    SUBSETS,
    TUNED,
    TUNED_TEXT,
    WITH_PICTURE,
    WITH_SOUND,
    Cache,
    Job,
    Media,
    Sampler,
    base_jobs,
    choose_clips,
    crossfade,
    partner_of,
    tuned_jobs,
)
from tasks.lips import Lips, watchers

if TYPE_CHECKING:
    from metrics.sound import Waveform
    from tasks.report import Page
    from tasks.scoring import Row

SHOWN_SIDE_PX = 128
"""Videos on the page are at least this wide, pixels repeated."""
SHOWN = ((REFERENCE, "reference"), (BASE, "before"), (TUNED, "after"), (TUNED_TEXT, "text"))
"""Subsets with a video on the page, and their file names."""


class Config(Frozen):
    """What is measured, on what, and where the answer goes."""

    splits: Path
    """Folder of the splits; only `test.parquet` is used."""
    base: Path
    """Base model, the one before fine-tuning."""
    checkpoint: Path
    """Folder of the fine-tuned weights."""
    checkpoints: Path
    """Folder with one checkpoint a curriculum stage, for the loss curves."""
    rejects: tuple[Path, ...] = ()
    """Tables of what was left out, shown with reasons."""
    treatments: Path | None = None
    """Table of what was done to sources to make them usable."""
    curriculum_picture: Path | None = None
    """Picture of the curriculum that `plan` drew."""
    report: Annotated[Path, Holds(("report.json",))]
    """Folder that gets report.json, report.html and media/."""
    work: Path = Path("data/store/work/evaluate")
    """Generations of an unfinished run are kept here, so that the next one goes on."""
    shape: ClipShape = ClipShape()
    """What is generated."""
    seed: int = 0
    """Seed of noise, choice of clips and bootstrap."""
    num_inference_steps: int = Field(default=20, gt=0)
    """Denoising steps of a generation."""
    max_clips: int = Field(default=32, gt=0)
    """Test clips at most; each costs six generations and a reconstruction."""
    group_shares: dict[str, float] = {"new": 0.6, "base": 0.3, "footage": 0.1}
    """Shares of the clips by group, as far as a group has them; a group not named gets the smallest share."""
    learned_group: str = "new"
    """Group that fine-tuning was for: the page opens with it."""
    kept_group: str = "base"
    """Group the base model knew already: the page shows what of it was forgotten."""
    num_shown: int = Field(default=8, ge=0)
    """Clips with videos on the page; each has four inside it, up to 90 kB a video at the tiny size."""
    worst_by: str = "psnr_db"
    """Metric that finds the worst clips: half of those shown, and first on the page."""
    champion: Path | None = None
    """Folder of the champion's report, whose videos of the same clips are shown beside."""
    num_workers: int = Field(default=2, ge=1, le=2)
    """1 generates in this process; 2 with one process a model. The result does not depend on it."""
    max_generation_s: float = Field(default=36000, gt=0)
    """Longest time for all generations of one model, s."""
    lips: Lips = Lips()
    """How lip sync is measured."""
    accelerator: str = "cpu"
    """`auto` (the first there is of CUDA, NPU, CPU), `cpu`, `cuda`, `npu`, or one of several: `cuda:1`."""


def run(config: Config) -> Report:
    """Generate, measure and show; a killed run goes on where it was.

    Raises:
        DataRefused: no test clip can be read.
        RuntimeError: a model is missing, or the accelerator.
    """
    from models.accelerators import device_of

    watchers(config.lips.syncnet, config.lips.s3fd)  # so that wrong weights are said before any work
    config = config.model_copy(update={"accelerator": str(device_of(config.accelerator, "evaluate.accelerator"))})
    test = read_test(config)
    clips = choose_clips(test, config.group_shares, config.max_clips, config.seed)
    partners = {clip.clip_id: other for clip in clips if (other := partner_of(clip, test))}
    facts = model_facts(config)
    cache = Cache(config.work / fingerprint(config, clips, facts))
    forget_others(cache.folder)
    known = {clip.clip_id: clip for clip in (*clips, *partners.values())}
    keep_references(config, list(known.values()), cache)
    generate_all(config, clips, partners, cache)
    report = measure(config, clips, cache, facts)
    from tasks.report import write_page

    shown = shown_clips(clips, config, report)
    with whole(config.report) as temporary:
        (temporary / "media").mkdir(parents=True)
        (temporary / "report.json").write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
        write_media_files(config, shown, cache, temporary / "media")
        write_page(temporary, report, page_of(config, shown))
    remove(cache.folder)
    return report


def read_test(config: Config) -> list[Clip]:
    """The clips no model has seen."""
    path = config.splits / "test.parquet"
    if not path.is_file():
        raise RuntimeError(f"{path} does not exist; run `soundstage split` first")
    clips = read_records(path, Clip)
    if not clips:
        raise DataRefused(f"{path} holds no clip; raise split.test_share")
    return clips


def model_facts(config: Config) -> dict[str, str]:
    """Hashes of the two models."""
    path = config.checkpoint / "checkpoint.json"
    if not path.is_file():
        raise RuntimeError(f"{path} does not exist; run `soundstage train {config.checkpoint.name}` first")
    checkpoint = cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8")))
    return {"checkpoint_sha256": str(checkpoint["weights_sha256"]), "base_sha256": sha256(config.base)}


def fingerprint(config: Config, clips: Sequence[Clip], facts: dict[str, str]) -> str:
    """What kept generations depend on."""
    identity = {
        **facts,
        "seed": config.seed,
        "steps": config.num_inference_steps,
        "shape": config.shape.model_dump(),
        "clips": [clip.model_dump() for clip in clips],
        "device": config.accelerator,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def forget_others(folder: Path) -> None:
    """Delete what unfinished runs with other settings left."""
    for other in folder.parent.glob("*"):
        if other != folder:
            remove(other)


def keep_references(config: Config, clips: Sequence[Clip], cache: Cache) -> None:
    """Read every clip once; all were readable at `cut`.

    Raises:
        DataRefused: a clip cannot be read any more; the message names it.
    """
    from data.clips import read
    from data.media import Unreadable

    for clip in progress(clips, "reading test clips"):
        if cache.has(REFERENCE, clip.clip_id):
            continue
        try:
            cache.write(REFERENCE, clip.clip_id, Media(*read(clip, config.shape)))
        except Unreadable as error:
            raise DataRefused(
                f"clip {clip.clip_id} of {clip.path} can no longer be read: {error}; run `soundstage ingest`"
            ) from error


def generate_all(config: Config, clips: Sequence[Clip], partners: dict[str, Clip], cache: Cache) -> None:
    """Make every generation that is not there yet, each model in a process of its own."""
    parts = [
        Part(config, checkpoint, [job for job in jobs if not cache.has(job.subset, job.clip.clip_id)], cache)
        for checkpoint, jobs in ((None, base_jobs(clips)), (config.checkpoint, tuned_jobs(clips, partners)))
    ]
    left = [part for part in parts if part.jobs]
    if config.num_workers == 1:
        for part in left:
            generate_part(part)
    else:
        for index, answer in map_isolated(generate_part, left, config.num_workers, config.max_generation_s):
            if isinstance(answer, Lost):
                model = left[index].checkpoint or config.base
                raise RuntimeError(f"generating with {model}: {answer.reason}")  # noqa: TRY004 # an accident, not a type
    for clip in clips:
        reference = cache.read(REFERENCE, clip.clip_id)
        if reference is not None and not cache.has(CROSSFADE, clip.clip_id):
            frames = reference.frames_FHWC
            cache.write(CROSSFADE, clip.clip_id, Media(crossfade(frames[0], frames[-1], len(frames)), None))


class Part(NamedTuple):
    """The generations of one model."""

    config: Config
    checkpoint: Path | None
    jobs: list[Job]
    cache: Cache


def generate_part(part: Part) -> None:
    """Make the generations of one model; every one is kept as soon as it is made."""
    from models.accelerators import device_of
    from models.generation import Generator
    from models.threads import use_one_thread

    use_one_thread()
    config = part.config
    sampler = Sampler(config.num_inference_steps, config.seed)
    generator = Generator.load(config.base, part.checkpoint, config.shape, device=str(device_of(config.accelerator)))
    for job in progress(part.jobs, f"generating with the {'tuned' if part.checkpoint else 'base'} model"):
        made = sampler.make(generator, job, part.cache)
        if made is not None:
            part.cache.write(job.subset, job.clip.clip_id, made)


def measure(config: Config, clips: Sequence[Clip], cache: Cache, facts: dict[str, str]) -> Report:
    """Score every generation against its clip."""
    from tasks import scoring

    rows: list[Row] = []
    pairs: dict[tuple[str, str], tuple[Waveform, Waveform]] = {}
    lip_conventions = set[str]()
    one_sided = {item.item for item in treatments_of(config) if item.treatment == "dead_side"}
    for clip in progress(clips, "measuring"):
        reference = cache.read(REFERENCE, clip.clip_id)
        assert reference is not None
        for subset in SUBSETS:
            made = cache.read(subset, clip.clip_id)
            row = scoring.Row(clip, subset, {})
            if subset in WITH_PICTURE:
                row.scores.update(scoring.score_picture(reference, made))
            if subset in scoring.WITH_LIPS:
                found, convention = scoring.score_lips(clip, made, config.shape, config.lips)
                row.scores.update(found)
                lip_conventions |= {convention} - {""}
            if subset in WITH_SOUND:
                row.scores.update(
                    scoring.score_sound(clip, reference, made, config.shape, one_sided=clip.source_id in one_sided)
                )
                heard_CT = None if made is None else made.waveform_CT
                if clip.has_audio and heard_CT is not None and reference.waveform_CT is not None:
                    pairs[subset, clip.clip_id] = (reference.waveform_CT, heard_CT)
            rows.append(row)
    scoring.add_pesq(rows, pairs, config.shape.sample_rate_hz)
    return Report(
        model=f"{config.base.name} + {config.checkpoint.name}",
        seed=config.seed,
        metrics=tuple(scoring.metric_values(rows, config.seed, sorted(lip_conventions))),
        comparisons=tuple(scoring.comparisons(rows, config.seed)),
        per_clip=scoring.per_clip(rows),
        checkpoint_sha256=facts["checkpoint_sha256"],
        base_sha256=facts["base_sha256"],
    )


def shown_clips(clips: Sequence[Clip], config: Config, report: Report) -> list[Clip]:
    """The clips on the page: half of them the worst, the rest from different sources and most of the learned group."""
    from tasks.report import worst_first

    worst = worst_first(report, config.worst_by)[: config.num_shown // 2]
    others = [clip for clip in clips if clip.clip_id not in worst]
    chosen = choose_clips(others, config.group_shares, config.num_shown - len(worst), config.seed)
    return [*(clip for clip in clips if clip.clip_id in worst), *chosen]


def write_media_files(config: Config, shown: Sequence[Clip], cache: Cache, folder: Path) -> None:
    """Videos of the shown clips, each with its own sound, and one of reference, before and after side by side."""
    import numpy as np

    from data.media import write_mp4

    rates = (config.shape.frame_rate, config.shape.sample_rate_hz)
    for clip in progress(shown, "writing videos"):
        media = {name: cache.read(subset, clip.clip_id) for subset, name in SHOWN}
        for name, made in media.items():
            if made is not None:
                write_mp4(folder / clip.clip_id / f"{name}.mp4", enlarge(made.frames_FHWC), made.waveform_CT, *rates)
        trio = [media["reference"], media["before"], media["after"]]
        frames = [enlarge(each.frames_FHWC) for each in trio if each is not None]
        if len(frames) == len(trio) and trio[2] is not None:
            write_mp4(
                folder / clip.clip_id / "side_by_side.mp4", np.concatenate(frames, axis=2), trio[2].waveform_CT, *rates
            )


def enlarge(frames_FHWC: Any) -> Any:
    """Frames at a size one can see: every pixel repeated as often as needed."""
    times = max(1, -(-SHOWN_SIDE_PX // frames_FHWC.shape[2]))
    return frames_FHWC.repeat(times, axis=1).repeat(times, axis=2)


def page_of(config: Config, shown: Sequence[Clip]) -> Page:
    """What the page shows beside the numbers."""
    from tasks.report import Page

    return Page(
        shape=config.shape,
        num_inference_steps=config.num_inference_steps,
        learned_group=config.learned_group,
        kept_group=config.kept_group,
        shown=tuple(shown),
        worst_by=config.worst_by,
        champion=config.champion,
        checkpoints=config.checkpoints,
        splits=config.splits,
        rejects=tuple(row for path in config.rejects if path.is_file() for row in read_records(path, Reject)),
        treatments=treatments_of(config),
        curriculum_picture=config.curriculum_picture,
    )


def treatments_of(config: Config) -> tuple[Treatment, ...]:
    """What was done to sources; nothing where there is no such table."""
    path = config.treatments
    return tuple(read_records(path, Treatment)) if path is not None and path.is_file() else ()


def progress(items: Sequence[Any], title: str) -> Any:
    """The items, with a bar on the terminal."""
    from tqdm import tqdm

    return tqdm(items, desc=title, unit="clip", disable=None)
