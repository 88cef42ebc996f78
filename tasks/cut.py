"""Cut accepted sources into clips: camera shots, then spans of exactly one training length, measured and filtered.

Example: soundstage cut min_motion=0.002 max_clips_per_source=20
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from pydantic import Field

from data import files, rules, workers
from data.records import Clip, ClipShape, DataRefused, Frozen, Reject, Source


class Config(Frozen):
    """How sources become clips."""

    accepted: Path
    """Parquet of accepted sources."""
    clips: Path
    """Parquet of clips to write."""
    rejects: Path
    """Parquet of clips and sources left out."""
    shape: ClipShape
    """What a clip is; spans are exactly `num_frames / frame_rate` long."""
    margin_s: float = Field(default=0.05, ge=0)
    """Distance of a clip from every cut, s; one frame at 24 fps, so that rounding never shows the other shot."""
    min_shot_s: float = Field(default=0.25, ge=0)
    """Spans between cuts shorter than this are no shots, s."""
    analysis_px: int = Field(default=96, ge=16)
    """Short side of the pictures that cuts and features are measured on, px; sharpness depends on it."""
    min_motion: float = Field(default=0.00002, ge=0)
    """Least mean luma change between frames, 0–1; below it the picture is frozen. An encoded still has 0.000006."""
    min_luma: float = Field(default=0.02, ge=0, le=1)
    """Least mean luma, 0–1; below it the picture is black."""
    min_sound_share: float = Field(default=0.5, ge=0, le=1)
    """Share of a clip that sound must cover to be learnt from; below it the clip counts as without sound."""
    max_clips_per_source: int = Field(default=200, gt=0)
    """Most clips of one source, spread evenly over it, so that one film does not outweigh a folder of clips."""
    num_workers: int = Field(default=2, gt=0)
    """Sources cut at once, each in a process of its own; the result does not depend on it."""
    max_file_s: float = Field(default=1800.0, gt=0)
    """Longest time one source may take, s; after that it is given up and becomes a reject."""


class Cut(Frozen):
    """What one source gave."""

    clips: tuple[Clip, ...]
    rejects: tuple[Reject, ...]


class Result(Frozen):
    """How much was cut."""

    num_sources: int
    num_clips: int
    num_rejected_clips: int
    num_rejected_sources: int


def run(config: Config) -> Result:
    """Write clips and rejects, sorted; every source has a clip or a reject.

    Raises:
        DataRefused: no source gives a clip.
    """
    sources = files.read_records(config.accepted, Source)
    cuts = cut_all(sources, config)
    clips = sorted((clip for cut in cuts for clip in cut.clips), key=lambda clip: clip.clip_id)
    rejects = sorted((reject for cut in cuts for reject in cut.rejects), key=lambda reject: (reject.path, reject.item))
    files.write_records(config.rejects, rejects, Reject)
    if not clips:
        files.remove(config.clips)
        counts = ", ".join(f"{count} by {rule}" for rule, count in Counter(item.rule for item in rejects).most_common())
        raise DataRefused(
            f"none of {len(sources)} sources gives a clip of {float(config.shape.duration_s):.3f} s: {counts}"
        )
    files.write_records(config.clips, clips, Clip)
    num_rejected_sources = sum(not cut.clips for cut in cuts)
    return Result(
        num_sources=len(sources),
        num_clips=len(clips),
        num_rejected_clips=len(rejects) - num_rejected_sources,
        num_rejected_sources=num_rejected_sources,
    )


def cut_all(sources: Sequence[Source], config: Config) -> list[Cut]:
    """What every source gives; one whose decoder crashes or hangs gives a reject."""
    from tqdm import tqdm

    work = functools.partial(cut_source, config=config)
    answers = workers.map_isolated(work, sources, config.num_workers, config.max_file_s)
    cuts: dict[int, Cut] = {}
    for index, answer in tqdm(answers, total=len(sources), desc="cut", unit="source", disable=None):
        lost = isinstance(answer, workers.Lost)
        cuts[index] = unreadable(sources[index], answer.reason) if lost else answer
    return [cuts[index] for index in range(len(sources))]


def unreadable(source: Source, reason: str) -> Cut:
    """What a source gives that does not decode."""
    return Cut(clips=(), rejects=(rejected(source, "readable", reason, "a file that decodes"),))


def cut_source(source: Source, config: Config) -> Cut:
    """All clips of one source, from one pass over its pictures and one over its sound; errors become a reject."""
    from data import features_before as features
    from data import media, shots

    height, width = analysis_size(source, config)
    path = Path(source.path)
    try:
        track = features.measure(media.iter_frames(path, height, width))
        sound = features.Sound(*media.read_sound(path))
    except (media.Unreadable, ValueError, OSError) as error:
        return unreadable(source, str(error))
    cuts = shots.find_cuts(track.changes, track.times_s, track.thumbs_FHW)
    found = shots.shots(cuts, track.times_s, source.video_duration_s, config.min_shot_s)
    spans = [span for shot in found for span in shots.windows(shot, config.shape.duration_s, config.margin_s)]
    if not spans:
        longest = max((shot.end_s - shot.start_s for shot in found), default=0.0)
        measured = f"longest of {len(found)} shots is {longest:.3f} s"
        limit = f"one clip of {float(config.shape.duration_s):.3f} s, margin_s = {config.margin_s:g} from cuts"
        return Cut(clips=(), rejects=(rejected(source, "shape", measured, limit),))
    clips: list[Clip] = []
    for span in spans:
        look = features.look(track, span.start_s, config.shape.num_frames, config.shape.frame_rate)
        heard = hears(source, span.start_s, span.end_s, config.min_sound_share)
        clip = Clip(
            clip_id=f"{source.source_id}-{round(span.start_s * 1000):06d}",
            source_id=source.source_id,
            path=source.path,
            group=source.group,
            caption=source.caption or "",
            start_s=span.start_s,
            end_s=span.end_s,
            boundary_reason=span.reason,
            has_audio=heard,
            motion_p50=look.motion,
            motion_p90=look.motion,
            luma=look.luma,
            sharpness_p90=look.sharpness,
            loudness_lufs=features.loudness_db(sound, span.start_s, span.end_s),
        )
        clips.append(clip)
    return chosen(source, clips, config)


def chosen(source: Source, clips: Sequence[Clip], config: Config) -> Cut:
    """The clips that pass the filters, and the rejects; a source that keeps none is a reject as well."""
    faults = [(clip, fault(clip, config)) for clip in clips]
    rejects = [found for _, found in faults if found is not None]
    good = [clip for clip, found in faults if found is None]
    limit = config.max_clips_per_source
    kept = good if len(good) <= limit else [good[number * len(good) // limit] for number in range(limit)]
    surplus = [clip for clip in good if clip not in kept]
    measured = f"{len(good)} clips"
    rejects += [rejected(clip, "max_clips_per_source", measured, f"{limit} clips, spread evenly") for clip in surplus]
    if not kept:
        ((rule, _),) = Counter(reject.rule.removeprefix("cut.") for reject in rejects).most_common(1)
        rejects.append(rejected(source, rule, f"none of {len(clips)} clips passes", "at least 1 clip"))
    return Cut(clips=tuple(kept), rejects=tuple(rejects))


def fault(clip: Clip, config: Config) -> Reject | None:
    """Why a clip is not worth training on; blur is no reason, since fast motion blurs."""
    if clip.luma < config.min_luma:
        return rejected(clip, "min_luma", f"mean luma {clip.luma:.4f}", f"{config.min_luma:g}")
    if clip.motion_p50 < config.min_motion:
        return rejected(clip, "min_motion", f"mean luma change {clip.motion_p50:.5f}", f"{config.min_motion:g}")
    return None


def rejected(item: Source | Clip, rule: str, measured: str, limit: str) -> Reject:
    """The reject of a source or clip by one option of `cut`."""
    name = item.clip_id if isinstance(item, Clip) else item.source_id
    return Reject(item=name, path=item.path, verb="cut", rule=f"cut.{rule}", measured=measured, limit=limit)


def hears(source: Source, start_s: float, end_s: float, min_share: float) -> bool:
    """Whether the source's sound covers enough of a span."""
    start, end = rules.sound_span(source)
    covered = min(end, end_s) - max(start, start_s)
    return covered > 0 and covered >= min_share * (end_s - start_s)


def analysis_size(source: Source, config: Config) -> tuple[int, int]:
    """Height and width of the analysed picture: the model's aspect, so that only what it sees is judged."""
    side = min(config.analysis_px, source.width, source.height)
    scale = Fraction(side, min(config.shape.height, config.shape.width))
    return round(config.shape.height * scale), round(config.shape.width * scale)
