"""What is wrong with one source, and what is done about the rest: pure functions of a manifest row."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from data import captions
from data.limits import Limits
from data.records import ClipShape, Reject, Source, Treatment, TreatmentName

HDR_TRANSFERS = ("smpte2084", "aribstdb67", "pq", "hlg")
"""PQ and HLG as FFmpeg and as people spell them, lower case, without separators."""
WITH_ALPHA = r"yuva|gbrap|rgba|bgra|argb|abgr|ya\d|ayuv|vuya|pal8"
"""How FFmpeg's names of pixel formats begin that can be transparent."""
NOTICEABLE_SKEW_S = 0.025
"""Smallest start difference worth a word, s; about where viewers begin to notice (ITU-R BT.1359: +45 / -125 ms)."""
NOTICEABLE_GAP_S = 0.05
"""Smallest missing end of the sound worth a word, s: two codec frames of AAC at 48 kHz, rounded up."""
NOTICEABLE_TAIL_S = 0.25
"""Smallest tail of the sound worth a word, s; codecs and mixers add up to 0.2 s of it to almost every file."""
CONSTANT_RATE_JITTER = 0.1
"""Frame intervals that stay within this share of the median are constant rate with rounded timestamps (WebM: 1 ms)."""


class Measure(NamedTuple):
    """One fact with a limit: which option, what was found, and how it is written."""

    option: str
    value: float | None
    text: str = "{:.4g}"


Rule = Callable[[Source, Limits], Reject | None]


def rejected(source: Source, rule: str, measured: str, limit: str) -> Reject:
    """The reject of one source by one option of `validate`."""
    return Reject(
        item=source.source_id,
        path=source.path,
        verb="validate",
        rule=f"validate.{rule}",
        measured=measured,
        limit=limit,
    )


def wrong_kind(source: Source, _limits: Limits) -> Reject | None:
    """Reject stills and sound files that were given as clips; an animation is a video without sound."""
    kind = source.media_type or ""
    still = kind.startswith("image/") and source.num_frames == 1
    if not still and not kind.startswith("audio/"):
        return None
    return rejected(source, "kind", f"is {kind}", "a video; stills and sound files serve as references")


def unusable(source: Source, _limits: Limits) -> Reject | None:
    """Reject what `ingest` could not decode, or found twice."""
    if source.error is None:
        return None
    wanted = "a picture, sound or video" if source.use == "reference" else "a video"
    return rejected(source, "usable", source.error, f"{wanted} that is there, whole, and given once")


def no_picture(source: Source, _limits: Limits) -> Reject | None:
    """Reject sound files, cover art and stills."""
    if source.num_frames >= 2 and source.width > 0 and source.height > 0:
        return None
    return rejected(source, "picture", f"{source.num_frames} frames", "at least 2 frames")


def odd_aspect(source: Source, limits: Limits) -> Reject | None:
    """Reject pictures so long or tall that a crop would lose most of them."""
    aspect = max(source.width, source.height) / min(source.width, source.height)
    if aspect <= limits.max_aspect:
        return None
    measured = f"{source.width}x{source.height} px, {aspect:.2f}:1"
    return rejected(source, "max_aspect", measured, f"{limits.max_aspect:g}:1 either way")


def slanted(source: Source, _limits: Limits) -> Reject | None:
    """Reject a rotation that is no quarter turn."""
    if source.rotation_deg % 90 == 0:
        return None
    return rejected(source, "rotation", f"{source.rotation_deg} degrees", "a multiple of 90 degrees")


def high_range(source: Source, limits: Limits) -> Reject | None:
    """Reject PQ and HLG where they are not to be tone-mapped."""
    if limits.hdr == "tone_map" or not is_hdr(source):
        return None
    return rejected(source, "hdr", f"transfer {source.color_transfer}", "an SDR transfer, or hdr: tone_map")


def one_sided(source: Source, limits: Limits) -> Reject | None:
    """Reject stereo with a silent side where that is not merely marked."""
    if limits.dead_side == "warn" or source.dead_side is None:
        return None
    return rejected(source, "dead_side", f"the {source.dead_side} side is silent", "sound on both, or dead_side: warn")


def torn_sound(source: Source, limits: Limits) -> Reject | None:
    """Reject sound that misses, or outlasts, too much of its picture to be padded or trimmed, or lies beside it."""
    if limits.max_sound_gap_s is None or not is_audible(source):
        return None
    if not has_sound(source):
        limit = "sound while there is a picture; with max_sound_gap_s: null silence is used"
        return rejected(source, "max_sound_gap_s", why_silent(source), limit)
    start, end = sound_span(source)
    gaps = {
        f"starts {start:.3f} s after": start,
        f"starts {-start:.3f} s before": -start,
        f"ends {source.video_duration_s - end:.3f} s before": source.video_duration_s - end,
    }
    if source.sound_path is None:
        gaps[f"ends {end - source.video_duration_s:.3f} s after"] = end - source.video_duration_s
    words, worst = max(gaps.items(), key=lambda item: item[1])
    if worst <= limits.max_sound_gap_s + 1e-6:
        return None
    return rejected(source, "max_sound_gap_s", f"sound {words} the picture", f"{limits.max_sound_gap_s:g} s")


def measures(source: Source) -> tuple[Measure, ...]:
    """Every fact that a plain limit of the same name is set on; None where the source has no such fact."""
    heard = has_sound(source)
    rate, sides = float(Fraction(source.frame_rate)), f"{source.width}x{source.height} px"
    return (
        Measure("min_duration_s", source.video_duration_s + 1e-6, f"{source.video_duration_s:.3f} s"),  # rounded stamps
        Measure("min_side_px", min(source.width, source.height), sides),
        Measure("max_side_px", max(source.width, source.height), sides),
        Measure("min_frame_rate", rate, "{:.2f} fps"),
        Measure("max_frame_rate", rate, "{:.2f} fps"),
        Measure("max_frame_jitter", source.frame_jitter, "intervals vary by {:.1%}"),
        Measure("max_interlaced_share", source.interlaced_share, "{:.1%} of the frames are interlaced"),
        Measure("max_black_share", source.black_share, "{:.1%} of the frames are black"),
        Measure("max_freeze_share", source.freeze_share, "{:.1%} of the frames repeat"),
        Measure("max_letterbox_share", source.letterbox_share, "{:.1%} of the picture is bars"),
        Measure("max_channels", source.num_channels, "{:g} channels"),
        Measure("max_peak", source.peak, "{:.4g} of full scale"),
        Measure("max_true_peak_db", source.true_peak_db if heard else None, "{:.1f} dB true peak"),
        Measure("min_loudness_lufs", loudness(source), "{:.1f} LUFS"),
        Measure("max_loudness_lufs", loudness(source), "{:.1f} LUFS"),
        Measure("max_clipped_share", source.clipped_share if heard else None, "{:.2%} of the samples clip"),
        Measure("max_silent_share", source.silent_share if heard else None, "{:.1%} of the sound is silent"),
        Measure("min_speech_share", source.speech_share if heard else None, "{:.1%} of the sound is speech"),
        Measure("max_speech_share", source.speech_share if heard else None, "{:.1%} of the sound is speech"),
    )


UNITS = {"_s": " s", "_px": " px", "_rate": " fps", "_db": " dB", "_lufs": " LUFS", "_channels": " channels"}
"""Unit of a limit by the end of its name; shares and ratios have none."""


def beyond(source: Source, limits: Limits) -> list[Reject]:
    """Rejects by the plain limits: a smallest or largest value of one measured fact."""
    found: list[Reject] = []
    for option, value, text in measures(source):
        limit = limit_of(limits, option)
        if limit is None or value is None or (value >= limit if option.startswith("min_") else value <= limit):
            continue
        unit = next((unit for end, unit in UNITS.items() if option.endswith(end)), "")
        found.append(rejected(source, option, text.format(value), f"{limit:g}{unit}"))
    return found


def limit_of(limits: Limits, option: str) -> float | None:
    """The value of an option that is a number."""
    value: object = getattr(limits, option)
    return float(value) if isinstance(value, (int, float)) else None


FIRST: tuple[Rule, ...] = (wrong_kind, unusable, no_picture)
"""Where one of these objects, nothing else was measured."""
RULES: tuple[Rule, ...] = (odd_aspect, slanted, high_range, one_sided, torn_sound)
"""Rules that are more than one limit on one fact."""


def judge_one(source: Source, limits: Limits, template: tuple[int, int] = (0, 0)) -> list[Reject]:
    """Everything that is wrong with a source by itself; the first is the reason it is left out for.

    Args:
        template: how many captions of the dataset share the form of this one, of how many.
    """
    for rule in FIRST:
        if (found := rule(source, limits)) is not None:
            return [found]
    worded = [
        rejected(source, f"caption_actions.{item.fault}", item.measured, item.limit)
        for item in captions.faults(source.caption, limits, template)
        if limits.action(item.fault) == "reject"
    ]
    others = [found for rule in RULES if (found := rule(source, limits)) is not None]
    return [*beyond(source, limits), *others, *worded]


def loudness(source: Source) -> float | None:
    """Integrated loudness of the sound, LUFS; at the gate of -70 where all of it is below, None without sound."""
    if not has_sound(source):
        return None
    return -70.0 if source.loudness_lufs is None else source.loudness_lufs


def is_hdr(source: Source) -> bool:
    """Whether the picture uses a PQ or HLG transfer."""
    return re.sub(r"[^a-z0-9]", "", (source.color_transfer or "").lower()) in HDR_TRANSFERS


def is_captioned(source: Source) -> bool:
    """Whether there is a caption with something in it."""
    return bool((source.caption or "").strip())


def sound_span(source: Source) -> tuple[float, float]:
    """Start and end of the sound on the picture's timeline (0 = first frame shown), s; (0, 0) where it is unusable.

    Sound that is exactly zero throughout, or never overlaps the picture, counts as none: to learn from it would
    teach that such pictures are silent.
    """
    start = source.audio_start_s - source.video_start_s
    end = start + source.audio_duration_s
    meets = start < source.video_duration_s and end > max(start, 0.0)
    return (start, end) if is_audible(source) and meets else (0.0, 0.0)


def is_audible(source: Source) -> bool:
    """Whether there is anything to hear, wherever it lies."""
    return source.audio_codec is not None and source.num_channels > 0 and source.audio_duration_s > 0 < source.peak


def has_sound(source: Source) -> bool:
    """Whether any sound of the source can be learnt from."""
    start, end = sound_span(source)
    return end > start


def treatments(source: Source, limits: Limits, template: tuple[int, int] = (0, 0)) -> list[Treatment]:
    """What is done to an accepted source, in words with numbers; `template` as in `judge_one`."""
    parts = [*sound_treatments(source), *picture_treatments(source, limits)]
    parts += caption_treatments(source, limits, template)
    return [Treatment(item=source.source_id, path=source.path, treatment=name, detail=text) for name, text in parts]


def sound_treatments(source: Source) -> list[tuple[TreatmentName, str]]:
    """What is done to the sound."""
    if not has_sound(source):
        return [("silence", f"{why_silent(source)}; silence is used and the sound carries no loss")]
    parts: list[tuple[TreatmentName, str]] = []
    if source.num_channels == 1:
        parts.append(("mono_to_stereo", "1 channel is put on both sides"))
    if source.num_channels > 2:
        layout = f" ({source.channel_layout})" if source.channel_layout else " of unknown layout"
        parts.append(("downmix", f"{source.num_channels} channels{layout} are mixed down to 2"))
    if source.dead_side is not None:
        parts.append(("dead_side", f"the {source.dead_side} side is silent; kept, but not counted in stereo measures"))
    if source.sound_path is not None:
        parts.append(("other_sound", f"sound comes from {source.sound_path}, from the first frame on"))
    if source.num_audio_streams > 1:
        parts.append(("choose_stream", f"sound is stream {source.audio_stream} of {source.num_audio_streams}"))
    start, end = sound_span(source)
    if abs(start) >= NOTICEABLE_SKEW_S:
        order = "after" if start > 0 else "before"
        parts.append(
            ("delay_sound", f"sound starts {abs(start) * 1000:.0f} ms {order} the picture; placed by timestamps")
        )
    missing = source.video_duration_s - end
    if missing >= NOTICEABLE_GAP_S:
        parts.append(
            ("pad_sound", f"sound ends {missing * 1000:.0f} ms before the picture; the rest is padded with silence")
        )
    if missing <= -NOTICEABLE_TAIL_S:
        parts.append(("trim_sound", f"sound ends {-missing * 1000:.0f} ms after the picture; the rest is left out"))
    return parts


def why_silent(source: Source) -> str:
    """The reason why no sound can be used."""
    if source.audio_codec is None:
        return "no sound"
    if source.audio_duration_s <= 0 or source.num_channels == 0:
        return f"the {source.audio_codec} stream holds no samples"
    if source.peak <= 0:
        return f"the {source.audio_codec} stream is all zeros"
    start = source.audio_start_s - source.video_start_s
    return f"sound from {start:.3f} s to {start + source.audio_duration_s:.3f} s never overlaps the picture"


def picture_treatments(source: Source, limits: Limits) -> list[tuple[TreatmentName, str]]:
    """What is done to the picture."""
    parts: list[tuple[TreatmentName, str]] = []
    shape, rate = limits.shape, Fraction(source.frame_rate)
    varies = source.frame_jitter > CONSTANT_RATE_JITTER
    if varies or abs(rate - shape.frame_rate) > Fraction(1, 1000):
        how = f"intervals vary by {source.frame_jitter:.0%}" if varies else "constant rate"
        parts.append(("retime", f"{float(rate):.3f} fps ({how}) to {shape.frame_rate} fps by timestamps"))
    if source.rotation_deg % 360:
        parts.append(("rotate", f"turned {source.rotation_deg % 360} degrees clockwise to stand upright"))
    if cropped := resize_detail(source, shape):
        parts.append(("resize", cropped))
    deep = re.search(r"(9|10|12|14|16)(le|be)$", source.pixel_format or "")
    if deep:
        parts.append(("ten_bit", f"{source.pixel_format} to 8 bits"))
    if is_hdr(source):
        parts.append(("tone_map", f"{source.color_transfer} to BT.709"))
    if source.interlaced_share > 0:
        share = f"{source.interlaced_share:.0%} of the frames are interlaced"
        parts.append(("deinterlace", f"{share}; their top field is used, half the lines"))
    if re.match(WITH_ALPHA, source.pixel_format or ""):
        parts.append(("on_black", f"{source.pixel_format}: what is transparent is shown on black"))
    if source.num_video_streams > 1:
        parts.append(("choose_stream", f"picture is stream {source.video_stream} of {source.num_video_streams}"))
    return parts


def caption_treatments(
    source: Source, limits: Limits, template: tuple[int, int] = (0, 0)
) -> list[tuple[TreatmentName, str]]:
    """What is done to the caption."""
    if not is_captioned(source):
        return [("caption_by_default", f'no caption; "{limits.default_caption}" is used')]
    found = captions.faults(source.caption, limits, template)
    replaced = [item for item in found if limits.action(item.fault) == "default"]
    if replaced:
        reason = "; ".join(f"{item.fault}: {item.measured}" for item in replaced)
        return [("caption_by_default", f'{reason}; "{limits.default_caption}" is used')]
    if any(item.fault == "control" for item in found) and limits.action("control") == "clean":
        return [("caption_cleaned", "control characters and direction marks are taken out")]
    return []


def final_caption(source: Source, limits: Limits, template: tuple[int, int] = (0, 0)) -> str:
    """The caption that is trained on: the source's, cleaned, or the default one."""
    done = {name for name, _ in caption_treatments(source, limits, template)}
    if "caption_by_default" in done:
        return limits.default_caption
    text = (source.caption or "").strip()
    return captions.cleaned(text) if "caption_cleaned" in done else text


def resize_detail(source: Source, shape: ClipShape) -> str | None:
    """Words for a resize worth mentioning: an odd side, or an aspect that costs part of the picture."""
    given, wanted = source.width / source.height, shape.width / shape.height
    lost = 1 - min(given, wanted) / max(given, wanted)
    odd = source.width % 2 == 1 or source.height % 2 == 1
    if lost <= 0.01 and not odd:
        return None
    crop = f", the outer {lost:.0%} of its {'width' if given > wanted else 'height'} cropped" if lost > 0.01 else ""
    return f"{source.width}x{source.height} to {shape.width}x{shape.height} px{', odd size' if odd else ''}{crop}"
