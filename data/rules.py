"""What is wrong with one source, and what is done about the rest: pure functions of a manifest row."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from pydantic import Field

from data.records import ClipShape, Frozen, Reject, Source, Treatment, TreatmentName

HDR_TRANSFERS = ("smpte2084", "aribstdb67", "pq", "hlg")
"""PQ and HLG as FFmpeg and as people spell them, lower case, without separators."""
NOTICEABLE_SKEW_S = 0.025
"""Smallest start difference worth a word, s; about where viewers begin to notice (ITU-R BT.1359: +45 / -125 ms)."""
NOTICEABLE_GAP_S = 0.05
"""Smallest missing end of the sound worth a word, s: two codec frames of AAC at 48 kHz, rounded up."""
CONSTANT_RATE_JITTER = 0.1
"""Frame intervals that stay within this share of the median are constant rate with rounded timestamps (WebM: 1 ms)."""


class Limits(Frozen):
    """What a source must be to be used, and the shape it is brought to."""

    shape: ClipShape = ClipShape()
    """What a training clip is; treatments are stated relative to it."""
    min_duration_s: float = Field(default=0.9, ge=0)
    """Shortest picture, s; less than one training clip yields nothing."""
    min_side_px: int = Field(default=16, gt=0)
    """Shortest side as displayed, px."""
    min_frame_rate: float = Field(default=8, gt=0)
    """Lowest average frame rate, frames a second; below it retiming repeats every picture three times."""
    max_frame_rate: float = Field(default=240, gt=0)
    """Highest average frame rate, frames a second; above it the timestamps are usually wrong."""
    max_aspect: float = Field(default=4, ge=1)
    """Longest side over shortest side; the family's canvases go from 1:4 to 4:1."""
    reject_hdr: bool = True
    """Leave out PQ and HLG pictures; otherwise they are decoded as if they were SDR and look grey."""
    default_caption: str = Field(default="a video with sound", min_length=1)
    """Caption of a source that has none."""


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


def unusable(source: Source, _limits: Limits) -> Reject | None:
    """Reject what `ingest` could not decode, or found twice."""
    return rejected(source, "usable", source.error, "a file that can be used") if source.error is not None else None


def no_picture(source: Source, _limits: Limits) -> Reject | None:
    """Reject sound files, cover art and stills."""
    if source.num_frames >= 2 and source.width > 0 and source.height > 0:
        return None
    return rejected(source, "picture", f"{source.num_frames} frames", "at least 2 frames")


def too_short(source: Source, limits: Limits) -> Reject | None:
    """Reject a picture shorter than `min_duration_s`; a microsecond is forgiven as timestamps are rounded."""
    if source.video_duration_s >= limits.min_duration_s - 1e-6:
        return None
    return rejected(source, "min_duration_s", f"{source.video_duration_s:.3f} s", f"{limits.min_duration_s:g} s")


def too_small(source: Source, limits: Limits) -> Reject | None:
    """Reject a picture with a side under `min_side_px`."""
    if min(source.width, source.height) >= limits.min_side_px:
        return None
    return rejected(source, "min_side_px", f"{source.width}x{source.height} px", f"{limits.min_side_px} px")


def too_slow(source: Source, limits: Limits) -> Reject | None:
    """Reject slide shows."""
    rate = Fraction(source.frame_rate)
    if rate >= limits.min_frame_rate:
        return None
    return rejected(source, "min_frame_rate", f"{float(rate):.2f} fps", f"{limits.min_frame_rate:g} fps")


def too_fast(source: Source, limits: Limits) -> Reject | None:
    """Reject impossible rates, a sign of broken timestamps."""
    rate = Fraction(source.frame_rate)
    if rate <= limits.max_frame_rate:
        return None
    return rejected(source, "max_frame_rate", f"{float(rate):.2f} fps", f"{limits.max_frame_rate:g} fps")


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


def hdr(source: Source, limits: Limits) -> Reject | None:
    """Reject PQ and HLG, which have no tone mapping here, if `reject_hdr`."""
    if not (limits.reject_hdr and is_hdr(source)):
        return None
    return rejected(source, "reject_hdr", f"transfer {source.color_transfer}", "an SDR transfer, or reject_hdr: false")


RULES: tuple[Rule, ...] = (
    unusable,
    no_picture,
    too_short,
    too_small,
    too_slow,
    too_fast,
    odd_aspect,
    slanted,
    hdr,
)
"""In the order they are asked; the first that objects gives the reason."""


def judge(sources: Sequence[Source], limits: Limits) -> tuple[list[Source], list[Reject]]:
    """Accepted sources and rejects, each sorted by path; every source is in exactly one of them.

    A file whose content was already accepted under an earlier path is rejected as its copy.
    """
    accepted: dict[str, Source] = {}
    rejects: list[Reject] = []
    for source in sorted(sources, key=lambda item: item.path):
        reject = next((found for rule in RULES if (found := rule(source, limits)) is not None), None)
        if reject is None and source.source_id in accepted:
            reject = rejected(source, "unique", f"same content as {accepted[source.source_id].path}", "one copy")
        if reject is None:
            accepted[source.source_id] = source
        else:
            rejects.append(reject)
    return list(accepted.values()), rejects


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
    audible = source.audio_codec is not None and source.num_channels > 0 and source.peak > 0
    return (start, end) if audible and start < source.video_duration_s and end > max(start, 0.0) else (0.0, 0.0)


def has_sound(source: Source) -> bool:
    """Whether any sound of the source can be learnt from."""
    start, end = sound_span(source)
    return end > start


def treatments(source: Source, limits: Limits) -> list[Treatment]:
    """What is done to an accepted source, in words with numbers."""
    parts = [*sound_treatments(source), *picture_treatments(source, limits)]
    if not is_captioned(source):
        parts.append(("caption_by_default", f'no caption; "{limits.default_caption}" is used'))
    return [Treatment(item=source.source_id, path=source.path, treatment=name, detail=text) for name, text in parts]


def sound_treatments(source: Source) -> list[tuple[TreatmentName, str]]:
    """What is done to the sound."""
    if not has_sound(source):
        return [("silence", f"{why_silent(source)}; silence is used and the sound carries no loss")]
    parts: list[tuple[TreatmentName, str]] = []
    if source.num_channels == 1:
        parts.append(("mono_to_stereo", "1 channel is put on both sides"))
    if source.num_channels > 2:
        layout = f" ({source.channel_layout})" if source.channel_layout else ""
        parts.append(("downmix", f"{source.num_channels} channels{layout} are mixed down to 2"))
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
    if deep or is_hdr(source):
        note = f"; the {source.color_transfer} transfer is not tone-mapped" if is_hdr(source) else ""
        parts.append(("ten_bit", f"{source.pixel_format} to 8 bits{note}"))
    return parts


def resize_detail(source: Source, shape: ClipShape) -> str | None:
    """Words for a resize worth mentioning: an odd side, or an aspect that costs part of the picture."""
    given, wanted = source.width / source.height, shape.width / shape.height
    lost = 1 - min(given, wanted) / max(given, wanted)
    odd = source.width % 2 == 1 or source.height % 2 == 1
    if lost <= 0.01 and not odd:
        return None
    crop = f", the outer {lost:.0%} of its {'width' if given > wanted else 'height'} cropped" if lost > 0.01 else ""
    return f"{source.width}x{source.height} to {shape.width}x{shape.height} px{', odd size' if odd else ''}{crop}"
