"""What whole tables must look like. Rules judge one source, expectations judge them all (`tasks/judging.py` asks).

A suite is a table, one expectation a line: `must` stops the run where it fails, `should` is only written down. `kind` is
the class in `great_expectations.expectations` without its `Expect`, the rest are that class's fields. Whatever takes
arithmetic is a column of the frame beside the suite: rows on disk, streamed, as there may be millions of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import JsonValue

from data import captions
from data.asking import (
    BETWEEN,
    COMPOUND,
    DISTINCT,
    GREATER,
    IN_SET,
    KL,
    LENGTH,
    MATCH,
    MEAN,
    NAME,
    NOT_NULL,
    ROWS,
    SHARE,
    TRUE,
    UNIQUE,
    Expectation,
    Suite,
    Table,
    must,
    should,
)
from data.limits import Limits
from data.records import Clip, ClipShape, Source
from data.rules import has_sound, is_hdr, sound_span

if TYPE_CHECKING:
    from data.latent_index import LatentRow

VERSION = 3
"""Of the suites below; raise it when an expectation is added, removed or made stricter."""
SOUND_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 88200, 96000, 176400, 192000)
"""Rates that recorders and codecs use, Hz; 0 is no sound."""
SPLITS = ("train", "val", "test")
MAX_KL = 0.1
"""Nats between a split and the whole that are no drift: a part of 10 % that became 26 % of a split."""


def suite(limits: Limits, min_sources: int, *, previous: int | None = None, max_lost: float = 0) -> Suite:
    """On the accepted sources; `previous` is how many there were before, `max_lost` the share that may be gone."""
    shortest, side, rates = limits.min_duration_s - 1e-6, limits.min_side_px, limits.max_frame_rate
    kept = [] if previous is None else [_kept(previous, max_lost)]
    tokens = limits.max_caption_tokens
    return (
        *kept,
        must("schema", "TableColumnsToMatchSet", "tables of another version mean other things", column_set=[*MANIFEST]),
        must("enough_sources", ROWS, "validate.min_sources: three splits need sources", min_value=min_sources),
        must("one_row_a_content", UNIQUE, "a source in two rows leaks between splits", column="source_id"),
        must("one_row_a_file", UNIQUE, "every file is judged once", column="path"),
        must("content_hash", MATCH, "lineage rests on it", column="sha256", regex="^[0-9a-f]{64}$"),
        must("id_of_content", MATCH, "ids join the tables", column="source_id", regex="^[0-9a-f]{16}$"),
        must("path_known", NOT_NULL, "a clip must be found again", column="path"),
        must("caption_known", NOT_NULL, "text is a condition of every mode", column="caption"),
        must("not_empty", BETWEEN, "an empty file shows nothing", column="size_bytes", min_value=1),
        must("moves", BETWEEN, "one frame is a still", column="num_frames", min_value=2),
        must("long_enough", BETWEEN, "shorter sources hold no clip", column="video_duration_s", min_value=shortest),
        must("not_slow", BETWEEN, "slide shows", column="rate_fps", min_value=limits.min_frame_rate),
        must("not_fast", BETWEEN, "other rates mean broken timestamps", column="rate_fps", max_value=rates),
        must("tall_enough", BETWEEN, "no upscaled thumbnails", column="height", min_value=side),
        must("wide_enough", BETWEEN, "no upscaled thumbnails", column="width", min_value=side),
        must("fits_memory", BETWEEN, "frames fill memory", column="long_side", max_value=limits.max_side_px),
        must("quarter_turns", IN_SET, "pictures turn by quarters", column="rotation_deg", value_set=[0, 90, 180, 270]),
        must(
            "known_layouts", BETWEEN, "up to 7.1 have a downmix", column="num_channels", **_up_to(limits.max_channels)
        ),
        must("full_scale", BETWEEN, "sound is scaled to 1", column="peak", **_up_to(limits.max_peak)),
        must("hdr_is_settled", IN_SET, "PQ and HLG look grey unless mapped", column="hdr_settled", **TRUE),
        should(
            "starts_together", BETWEEN, "what is missing is padded", column="sound_offset_s", min_value=-1, max_value=1
        ),
        should("ends_together", BETWEEN, "what is missing is padded", column="sound_gap_s", max_value=1, mostly=0.95),
        should("mostly_sound", MEAN, "a joint model needs both", column="has_sound", min_value=0.5),
        should("header_tells", IN_SET, "lying headers: torn files?", column="frames_as_told", mostly=0.95, **TRUE),
        should("even_rate", BETWEEN, "retimed", column="frame_jitter", max_value=0.5, mostly=0.9),
        should("rate_known", IN_SET, "odd sound rates: damage?", column="sample_rate_hz", value_set=[0, *SOUND_RATES]),
        should("loudness", BETWEEN, "levels", column="loudness_lufs", min_value=-45, max_value=-5, mostly=0.9),
        should("headroom", BETWEEN, "clips when resampled", column="true_peak_db", max_value=3, mostly=0.95),
        should("unclipped", BETWEEN, "distortion is learnt", column="clipped_share", max_value=0.001, mostly=0.95),
        should("not_silent", BETWEEN, "silence is learnt", column="silent_share", max_value=0.95, mostly=0.9),
        should("both_sides", IN_SET, "stereo needs both", column="two_sided", mostly=0.9, **TRUE),
        should("not_black", BETWEEN, "black teaches black", column="black_share", max_value=0.5, mostly=0.95),
        should("not_frozen", BETWEEN, "stills teach stills", column="freeze_share", max_value=0.9, mostly=0.95),
        should("no_bars", BETWEEN, "bars are learnt", column="letterbox_share", max_value=0.3, mostly=0.95),
        should("caption_length", LENGTH, "encoders cut long texts", column="caption", min_value=3, max_value=2000),
        should(
            "caption_tokens", BETWEEN, "encoders cut long texts", column="caption_tokens", max_value=tokens or 10**6
        ),
        should("captions_differ", DISTINCT, "one caption for all teaches nothing", column="caption", min_value=0.1),
        should("captions_describe", IN_SET, "refusals and links are no captions", column="describes", **TRUE),
    )


def _kept(previous: int, max_lost: float) -> Expectation:
    least = math.ceil(previous * (1 - max_lost))
    why = f"there were {previous} before; more lost than {max_lost:.0%} is an accident"
    return must("few_are_lost", ROWS, why, min_value=least)


def _up_to(most: float) -> dict[str, JsonValue]:
    return {"min_value": 0, "max_value": most}


MANIFEST = (
    "source_id", "sha256", "path", "caption", "size_bytes", "num_frames", "video_duration_s", "rate_fps", "frame_jitter",
    "width", "height", "long_side", "rotation_deg", "num_channels", "sample_rate_hz", "peak", "true_peak_db",
    "loudness_lufs", "clipped_share", "silent_share", "black_share", "freeze_share", "letterbox_share", "hdr_settled",
    "has_sound", "sound_offset_s", "sound_gap_s", "two_sided", "frames_as_told", "caption_tokens", "describes",
)  # fmt: skip
"""Columns of `frame`: what the suite asks about, and no more."""


def frame(sources: Iterable[Source], place: Path, limits: Limits | None = None) -> Table:
    """The sources as a table at `place` with derived columns; no value where there is no sound to speak of."""
    asked = limits or Limits()

    def row(source: Source) -> dict[str, Any]:
        start, end = sound_span(source)
        heard = has_sound(source)
        told, caption = source.header_num_frames, source.caption
        return {name: getattr(source, name) for name in MANIFEST if name in Source.model_fields} | {
            "rate_fps": float(Fraction(source.frame_rate)),
            "long_side": max(source.width, source.height),
            "peak": source.peak if heard else None,
            "silent_share": source.silent_share if heard else None,
            "clipped_share": source.clipped_share if heard else None,
            "hdr_settled": asked.hdr == "tone_map" or not is_hdr(source),
            "has_sound": float(heard),
            "sound_offset_s": start if heard else None,
            "sound_gap_s": source.video_duration_s - end if heard else None,
            "two_sided": source.dead_side is None,
            "frames_as_told": told is None or source.decoded != "all" or abs(told - source.num_frames) <= 1,
            "caption_tokens": captions.num_tokens(caption or "", asked.caption_tokenizer),
            "describes": not any(item.fault in ("refusal", "file_name") for item in captions.said(caption or "")),
        }

    return Table(place, MANIFEST, map(row, sources))


def clips_suite(shape: ClipShape) -> Suite:
    """On all clips, as `cut` found them."""
    longest = float(shape.duration_s)
    return (
        must("any_clip", ROWS, "nothing to train on", min_value=1),
        must("one_row_a_clip", UNIQUE, "ids join the tables", column="clip_id"),
        must("id_of_place", MATCH, "an id says source and start", column="clip_id", regex="^[0-9a-f]{16}-[0-9]{6,}$"),
        must("id_of_source", IN_SET, "an id begins with its source's", column="id_agrees", **TRUE),
        must("one_row_a_span", COMPOUND, "the same span twice", column_list=["source_id", "start_s", "end_s"]),
        must("ends_after_start", GREATER, "spans are half-open", column_A="end_s", column_B="start_s"),
        must("starts_in_picture", BETWEEN, "0 is the first frame", column="start_s", min_value=0),
        must("length_of_shape", IN_SET, f"the model takes {longest:.4f} s", column="length_agrees", **TRUE),
        must("clip_path_known", NOT_NULL, "a clip must be found again", column="path"),
        must("clip_caption_known", LENGTH, "text is a condition of every mode", column="caption", min_value=1),
        must("reason_known", IN_SET, "why it starts there", column="boundary_reason", value_set=["start", "cut", "drop", "stride"]),
        must("boundary_score_share", BETWEEN, "a share", column="boundary_score", **SHARE),
        must("luma_share", BETWEEN, "a share", column="luma", **SHARE),
        must("flow_rises", IN_SET, "p90 is no less than p50", column="flow_rises", **TRUE),
        must("sharpness_positive", BETWEEN, "a variance", column="sharpness_p90", min_value=0),
        must("blur_share", BETWEEN, "a share", column="motion_blur_index", **SHARE),
        must("black_is_share", BETWEEN, "a share", column="black_share", **SHARE),
        must("freeze_is_share", BETWEEN, "a share", column="freeze_share", **SHARE),
        must("bars_are_share", BETWEEN, "a share", column="letterbox_share", **SHARE),
        must("silence_is_share", BETWEEN, "a share", column="silent_share", **SHARE),
        must("speech_is_share", BETWEEN, "a share", column="speech_share", **SHARE),
        must("text_is_share", BETWEEN, "a share", column="text_share", **SHARE),
        must("dnsmos_scale", BETWEEN, "opinions go from 1 to 5", column="dnsmos", min_value=1, max_value=5),
        should("no_cut_inside", "ColumnMaxToBeBetween", "a cut inside is learnt", column="residual_cuts", max_value=0),
        should("clip_loudness", BETWEEN, "levels", column="loudness_lufs", min_value=-60, max_value=-5, mostly=0.9),
        should("clips_heard", MEAN, "a joint model needs both", column="heard", min_value=0.5),
        should("clips_move", BETWEEN, "stills teach stills", column="motion_p90", min_value=1e-5, mostly=0.9),
        should("clip_captions_differ", DISTINCT, "one caption for all", column="caption", min_value=0.01),
    )  # fmt: skip


CLIPS = (
    "clip_id", "source_id", "path", "caption", "start_s", "end_s", "boundary_reason", "boundary_score", "residual_cuts",
    "motion_p90", "luma", "sharpness_p90", "motion_blur_index", "black_share", "freeze_share", "letterbox_share",
    "loudness_lufs", "silent_share", "speech_share", "dnsmos", "text_share", "id_agrees", "length_agrees", "flow_rises",
    "heard",
)  # fmt: skip


def clips_frame(clips: Iterable[Clip], place: Path, shape: ClipShape | None = None) -> Table:
    """The clips as a table at `place`; without a shape any length agrees."""

    def row(clip: Clip) -> dict[str, Any]:
        length, wanted = clip.end_s - clip.start_s, None if shape is None else float(shape.duration_s)
        return {name: getattr(clip, name) for name in CLIPS if name in Clip.model_fields} | {
            "silent_share": clip.silent_share if clip.has_audio else None,
            "id_agrees": clip.clip_id.startswith(clip.source_id),
            "length_agrees": wanted is None or abs(length - wanted) <= 1e-3,
            "flow_rises": 0 <= clip.motion_p50 <= clip.motion_p90 + 1e-9,
            "heard": float(clip.has_audio),
        }

    return Table(place, CLIPS, map(row, clips))


def splits_suite(table: Table, splits: Sequence[str] = SPLITS) -> Suite:
    """On the clips of all splits together; the mix of the whole, from `table`, is what each split is held against."""
    mixes = [item for part in ("group", "sound") for item in _mixes(table, part, splits)]
    alone: dict[str, JsonValue] = {"value_set": [1]}
    return (
        must("splits_there", "ColumnDistinctValuesToEqualSet", "all are used", column="split", value_set=[*splits]),
        must("clip_in_one_split", UNIQUE, "trained on and tested on", column="clip_id"),
        must("source_in_one_split", IN_SET, "leakage", column="splits_of_source", **alone),
        must("lookalikes_in_one_split", IN_SET, "leakage by near-duplicates", column="splits_of_cluster", **alone),
        must("file_in_one_split", IN_SET, "leakage by path", column="splits_of_path", **alone),
        must("split_clip_captioned", LENGTH, "text is a condition", column="caption", min_value=1),
        should("mostly_train", MEAN, "the rest is for judging", column="is_train", min_value=0.5),
        should("licences_known", NOT_NULL, "what may be trained on", column="licence", mostly=0.9),
        *mixes,
    )


def _mixes(table: Table, part: str, splits: Sequence[str]) -> Iterator[Expectation]:
    counts = table.counts(part)
    if len(counts) < 2:
        return
    total = sum(counts.values())
    mix: JsonValue = {"values": [*counts], "weights": [count / total for count in counts.values()]}
    for split in splits:
        column = f"{part}_{split}"
        yield should(f"{column}_as_whole", KL, "stratified", column=column, partition_object=mix, threshold=MAX_KL)


def splits_frame(divided: Mapping[str, Iterable[Clip]], place: Path) -> Table:
    """The clips of all splits as a table at `place`, with how many splits each one's source, cluster and file are in."""
    names = ("clip_id", "source_id", "path", "caption", "licence")
    parts = [(part, split) for part in ("group", "sound") for split in divided]

    def row(split: str, clip: Clip) -> dict[str, Any]:
        own = {"cluster": clip.cluster or clip.source_id, "group": clip.group or "(root)"}
        own |= {"split": split, "sound": "sound" if clip.has_audio else "no sound", "is_train": float(split == "train")}
        mixes = {f"{part}_{one}": own[part] if one == split else None for part, one in parts}
        return {name: getattr(clip, name) for name in names} | own | mixes | dict.fromkeys(SHARED, 1)

    columns = (*names, "split", "cluster", "group", "sound", *SHARED, "is_train", *(f"{a}_{b}" for a, b in parts))
    table = Table(place, columns, (row(split, clip) for split, clips in divided.items() for clip in clips))
    for name, key in SHARED.items():
        several = f"SELECT {key} AS its, COUNT(DISTINCT split) AS num FROM {NAME} GROUP BY 1 HAVING num > 1"  # noqa: S608
        table.ask(f"UPDATE {NAME} SET {name} = num FROM ({several}) WHERE {key} = its")  # noqa: S608
    return table


SHARED = {"splits_of_source": "source_id", "splits_of_cluster": "cluster", "splits_of_path": "path"}
"""Columns that count splits, and what they count them of."""


class LatentFacts(NamedTuple):
    """What `encode` measures of the arrays of one entry."""

    finite: bool
    """No NaN and no infinity in any array."""
    as_planned: bool
    """Every array has the shape that the family's formula gives for the clip."""
    dtype: str
    has_audio: bool
    """Whether the latents hold sound that was heard."""
    referenced: bool = True
    """False where the clip has references of its own that were wanted, and cannot be used."""


def latents_suite(dtypes: Sequence[str] = ("float32", "bfloat16", "float16")) -> Suite:
    """On the index of a latent store, joined with the clips it should hold."""
    return (
        must("any_latent", ROWS, "nothing to train on", min_value=1),
        must("one_row_an_entry", UNIQUE, "entries join the tables", column="entry"),
        must("all_encoded", IN_SET, "a clip without latents is lost", column="encoded", **TRUE),
        must("no_strangers", IN_SET, "latents of clips that are gone", column="known", **TRUE),
        must("latent_finite", IN_SET, "NaN spreads through training", column="finite", **TRUE),
        must("latent_shape", IN_SET, "of the family's formula", column="as_planned", **TRUE),
        must("latent_dtype", IN_SET, "as it was fingerprinted", column="dtype", value_set=[*dtypes]),
        must("sound_agrees", IN_SET, "the loss is masked by it", column="sound_agrees", **TRUE),
        must("source_agrees", IN_SET, "lineage rests on it", column="source_agrees", **TRUE),
        must("split_known", IN_SET, "leakage", column="split", value_set=[*SPLITS]),
        must("shard_numbered", MATCH, "it is read by its number", column="shard", regex=r"^\d{5,}$"),
        must("variants_encoded", LENGTH, "conditions are drawn from them", column="variants", min_value=1),
        should("own_references", IN_SET, "one was not accepted, so no ref2va", column="referenced", **TRUE),
        must("tokens_counted", BETWEEN, "batches are planned by them", column="num_tokens", min_value=1),
    )


def latents_frame(
    rows: Iterable[LatentRow], clips: Iterable[Clip], facts: Mapping[str, LatentFacts], place: Path
) -> Table:
    """The index with what was measured, at `place`; clips without latents and latents without clips have rows too.

    Args:
        rows: Of the index.
        clips: Those that should be there.
        facts: What was measured, by entry.
        place: File of the table.
    """
    wanted = {clip.clip_id: clip for clip in clips}
    index = {row.entry: row for row in rows}
    absent = sorted(wanted.keys() - {row.clip_id for row in index.values()})
    columns = ("entry", "clip_id", "path", "encoded", "known", "finite", "as_planned", "dtype", "sound_agrees")
    columns = (*columns, "source_agrees", "referenced", "split", "shard", "variants", "num_tokens")

    def joined(entry: str) -> dict[str, Any]:
        row, fact = index.get(entry), facts.get(entry)
        clip_id = row.clip_id if row else entry
        clip = wanted.get(clip_id)
        heard = [item.has_audio for item in (clip, row, fact) if item is not None]
        return {
            "entry": entry,
            "clip_id": clip_id,
            "path": clip.path if clip else "",
            "encoded": row is not None,
            "known": clip is not None,
            "finite": fact.finite if fact else None,
            "as_planned": fact.as_planned if fact else None,
            "dtype": fact.dtype if fact else None,
            "sound_agrees": len(set(heard)) == 1,
            "source_agrees": clip.source_id == row.source_id if clip and row else None,
            "referenced": fact.referenced if fact else None,
            "split": row.split if row else None,
            "shard": row.shard if row else None,
            "variants": ",".join(row.variants) if row else None,
            "num_tokens": min(row.num_tokens) if row else None,
        }

    return Table(place, columns, map(joined, [*sorted(index), *absent]))
