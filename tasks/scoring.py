"""From generations to the report's numbers: a row a clip, a mean with its interval, a paired difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from data.records import Clip, ClipShape, Comparison, MetricValue
from metrics import picture, sound
from metrics.score import Score
from metrics.statistics import bootstrap_mean, is_better, paired_difference
from tasks.generations import (
    BASE,
    BASE_TEXT,
    CROSSFADE,
    SUBSETS,
    SWAPPED,
    TUNED,
    TUNED_TEXT,
    WITH_PICTURE,
    WITH_SOUND,
    Media,
)
from tasks.lips import LIP_MEASURES, Lips, lip_scores, no_lips

WITH_LIPS = (BASE, TUNED)
"""Subsets whose lips are looked at."""
PLACED = ("balance_db", "placement_error", "channel_r_error", "swap_margin_db")
"""What says where on the stage a sound is."""
ONE_SIDED = "one side of the source is silent throughout"
"""What `validate` marks as dead_side: a fault of the recording says nothing about where on the stage a sound is."""
NO_PARTNER = "no other source of the group to take keyframes from"
"""The one way a generation can be absent; every other failure stops the verb."""
DIGITS = 6
"""Decimals kept, far below any interval: the last bits of a sum are no finding."""


class Metric(NamedTuple):
    """A yardstick of the report."""

    unit: str
    higher_is_better: bool
    convention: str
    subsets: tuple[str, ...]


INNER = "; first and last frame, which are given, are left out"
METRICS = {
    "psnr_db": Metric("dB", True, picture.PSNR_CONVENTION + INNER, WITH_PICTURE),
    "psnr_pooled_db": Metric("dB", True, "8-bit RGB, squared error pooled over frames" + INNER, WITH_PICTURE),
    "psnr_middle_db": Metric("dB", True, "as psnr_pooled_db, over the middle half of the frames", WITH_PICTURE),
    "ssim": Metric("", True, picture.SSIM_CONVENTION + INNER, WITH_PICTURE),
    **{
        name: Metric(kind.unit, kind.higher_is_better, kind.convention, WITH_SOUND)
        for name, kind in sound.SOUND_METRICS.items()
        if kind.higher_is_better is not None
    },
    **{
        name: Metric(kind.unit, kind.higher_is_better, kind.convention, WITH_LIPS)
        for name, kind in LIP_MEASURES.items()
        if kind.higher_is_better is not None
    },
}
COMPARED = (
    ("psnr_db", TUNED, BASE), ("ssim", TUNED, BASE), ("lsd_db", TUNED, BASE), ("envelope_r", TUNED, BASE),
    ("balance_db", TUNED, BASE), ("psnr_db", TUNED, SWAPPED), ("lsd_db", TUNED, SWAPPED), ("psnr_pooled_db", TUNED, CROSSFADE), ("psnr_middle_db", TUNED, CROSSFADE),
    ("lsd_db", TUNED_TEXT, BASE_TEXT),
)  # fmt: skip
"""Metric, left and right of every paired difference."""


class Row(NamedTuple):
    """The scores of one generation."""

    clip: Clip
    subset: str
    scores: dict[str, Score]


def score_picture(reference: Media, made: Media | None) -> dict[str, Score]:
    """Picture scores of one generation."""
    if made is None:
        return dict.fromkeys(("psnr_db", "psnr_pooled_db", "psnr_middle_db", "ssim"), Score.missing(NO_PARTNER))
    # A cross-fade repeats both keyframes exactly: what was given would be scored as if it were made.
    real, shown = reference.frames_FHWC[1:-1], made.frames_FHWC[1:-1]
    psnr = picture.psnr_db(real, shown)
    similarity = picture.ssim(real, shown)
    quarter = len(real) // 4
    middle = picture.psnr_db(real[quarter : len(real) - quarter], shown[quarter : len(real) - quarter])
    return {"psnr_db": psnr.mean, "psnr_pooled_db": psnr.pooled, "psnr_middle_db": middle.pooled, "ssim": similarity}


def score_sound(
    clip: Clip, reference: Media, made: Media | None, shape: ClipShape, *, one_sided: bool = False
) -> dict[str, Score]:
    """Sound scores of one generation; no placement where the source is `one_sided`. PESQ is added for many clips at once, see `add_pesq`."""
    names = [name for name, metric in METRICS.items() if metric.subsets == WITH_SOUND]
    if not clip.has_audio:
        return dict.fromkeys(names, Score.missing("the source has no sound to compare with"))
    if made is None or made.waveform_CT is None or reference.waveform_CT is None:
        return dict.fromkeys(names, Score.missing(NO_PARTNER))
    pair, rate_hz = (reference.waveform_CT, made.waveform_CT), shape.sample_rate_hz
    found = sound.measure(*pair, rate_hz)
    if one_sided:
        found |= dict.fromkeys(PLACED, Score.missing(ONE_SIDED))
    return {name: found[name] for name in names if name in found}


def score_lips(clip: Clip, made: Media | None, shape: ClipShape, lips: Lips) -> tuple[dict[str, Score], str]:
    """Lip sync of one generation, and the convention it was measured by."""
    from metrics.lipsync.crops import at_25_fps

    if not clip.has_audio:
        return no_lips("the source has no sound"), ""
    if made is None or made.waveform_CT is None:
        return no_lips(NO_PARTNER), ""
    timed = [(index / shape.frame_rate, frame) for index, frame in enumerate(made.frames_FHWC)]
    return lip_scores(lambda: at_25_fps(timed), (made.waveform_CT, shape.sample_rate_hz), lips)


def add_pesq(
    rows: Sequence[Row], pairs: Mapping[tuple[str, str], tuple[sound.Waveform, sound.Waveform]], rate_hz: int
) -> None:
    """Put PESQ into the rows of the given (subset, clip) pairs of reference and generated sound."""
    wanted = [row for row in rows if (row.subset, row.clip.clip_id) in pairs]
    chosen = [pairs[row.subset, row.clip.clip_id] for row in wanted]
    narrow, wide = (sound.pesq_many(chosen, rate_hz, mode) for mode in ("nb", "wb"))
    for row, nb, wb in zip(wanted, narrow, wide, strict=True):
        row.scores.update(pesq_nb=nb.mean, pesq_nb_worst=nb.worst, pesq_wb=wb.mean, pesq_wb_worst=wb.worst)


def metric_values(rows: Sequence[Row], seed: int, lips: Sequence[str] = ()) -> Iterator[MetricValue]:
    """Every metric for every subset it applies to, over all clips and over each group; `lips` are their conventions."""
    groups = ("all", *sorted({row.clip.group for row in rows}))
    for name, kind in METRICS.items():
        metric = kind._replace(convention="; ".join([kind.convention, *(lips if name in LIP_MEASURES else ())]))
        for subset in metric.subsets:
            for group in groups:
                chosen = [row for row in rows if row.subset == subset and group in ("all", row.clip.group)]
                if chosen:
                    yield metric_value(name, metric, subset, group, chosen, seed)


def metric_value(name: str, metric: Metric, subset: str, group: str, rows: Sequence[Row], seed: int) -> MetricValue:
    """One mean with interval, coverage and the reasons of what is missing."""
    scored = [(value, row.clip.source_id) for row in rows if (value := row.scores[name].value) is not None]
    interval = bootstrap_mean([value for value, _ in scored], [source for _, source in scored], seed=seed)
    return MetricValue(
        name=name, subset=subset, group=group, unit=metric.unit,
        value=None if interval is None else round(interval.mean, DIGITS),
        low=None if interval is None or interval.low is None else round(interval.low, DIGITS),
        high=None if interval is None or interval.high is None else round(interval.high, DIGITS),
        num_items=len(scored), num_attempted=len(rows), higher_is_better=metric.higher_is_better,
        convention=metric.convention, reason=reasons(row.scores[name] for row in rows),
    )  # fmt: skip


def reasons(scores: Iterable[Score]) -> str:
    """Why scores are missing, most frequent first, with counts."""
    counts = Counter(score.reason for score in scores if score.value is None)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return "; ".join(f"{reason} ({count})" for reason, count in ordered)


def comparisons(rows: Sequence[Row], seed: int) -> Iterator[Comparison]:
    """Every paired difference over all clips and each group; left out where under two sources can be compared."""
    source_of = {row.clip.clip_id: row.clip.source_id for row in rows}
    for group in ("all", *sorted({row.clip.group for row in rows})):
        for name, left, right in COMPARED:
            ours, theirs = (values_of(rows, name, subset, group) for subset in (left, right))
            interval = paired_difference(ours, theirs, source_of, seed=seed)
            if interval is None or interval.low is None or interval.high is None:
                continue
            metric = METRICS[name]
            yield Comparison(
                name=name, left=left, right=right, group=group, unit=metric.unit,
                difference=round(interval.mean, DIGITS), low=round(interval.low, DIGITS),
                high=round(interval.high, DIGITS), num_items=interval.num_items, num_sources=interval.num_sources,
                better=is_better(interval, higher_is_better=metric.higher_is_better),
            )  # fmt: skip


def values_of(rows: Sequence[Row], name: str, subset: str, group: str) -> dict[str, float]:
    """The scores there are, by clip."""
    chosen = (row for row in rows if row.subset == subset and group in ("all", row.clip.group))
    return {row.clip.clip_id: score.value for row in chosen if (score := row.scores[name]).value is not None}


def per_clip(rows: Sequence[Row]) -> tuple[dict[str, str | float | None], ...]:
    """The rows as the report keeps them, in the order of clips and subsets."""
    ordered = sorted(rows, key=lambda row: (row.clip.clip_id, SUBSETS.index(row.subset)))
    table: list[dict[str, str | float | None]] = []
    for row in ordered:
        clip = row.clip
        facts: dict[str, str | float | None] = {
            "clip_id": clip.clip_id, "source_id": clip.source_id, "group": clip.group, "subset": row.subset
        }  # fmt: skip
        values = {
            name: None if score.value is None else round(score.value, DIGITS) for name, score in row.scores.items()
        }
        table.append(facts | values)
    return tuple(table)
