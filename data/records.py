"""The nouns: every record that crosses a file, with its units. No torch, no tools."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Frozen(BaseModel):
    """A record that rejects unknown keys and is never edited after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class GateFailed(Exception):
    """A model that may not be released; the message names every failed limit."""


class DataRefused(Exception):
    """A dataset that may not be trained on; the message names every failed expectation."""


class ClipShape(Frozen):
    """What one training clip is, from which every length is derived.

    Source of the grids: the H3 model card (24 frames a second, 17n+5 frames, 40 sound latents a second).
    """

    num_frames: int = Field(default=22, gt=0)
    """Pixel frames of a clip, on the family's grid (17n+5 for H3)."""
    frame_rate: int = Field(default=24, gt=0)
    """Frames a second of the model's timeline; every source is retimed to it."""
    height: int = Field(default=32, gt=0)
    """Picture height, px, a multiple of the family's canvas multiple."""
    width: int = Field(default=32, gt=0)
    """Picture width, px, likewise."""
    sample_rate_hz: int = Field(default=8000, gt=0)
    """Sound samples a second, the family's sound autoencoder's."""

    @property
    def duration_s(self) -> Fraction:
        """Exact length of the clip, s."""
        return Fraction(self.num_frames, self.frame_rate)

    @property
    def num_samples(self) -> int:
        """Sound samples a channel that cover the picture."""
        return round(self.duration_s * self.sample_rate_hz)


class Source(Frozen):
    """One row of the manifest: a file the user gave, as measured, readable or not."""

    source_id: str
    """First 16 hex digits of the content's SHA-256; a moved or renamed file keeps it."""
    sha256: str
    path: str
    """As given: relative to the working directory where it lies below it, POSIX, UTF-8; or `s3://…`, `oss://…`."""
    group: str
    """First folder below the source root ("" at the root): lets reports compare parts of a corpus."""
    size_bytes: int
    use: Literal["clip", "reference"] = "clip"
    """`reference` is a picture, sound or video that a clip is conditioned on; it is measured, never cut."""
    references: tuple[str, ...] = ()
    """Paths of this row's references in order; each has a row of its own."""
    sound_path: str | None = None
    """File that the sound comes from where it is not the video itself; it starts with the first frame shown."""
    error: str | None = None
    """Why the file cannot be used at all (not media, no picture, does not decode), else None."""
    caption: str | None = None
    caption_from: str | None = None
    """`sidecar`, `table`, or `model NAME prompt HASH` where a captioner wrote it."""
    caption_language: str | None = None
    """As the user stated it, else as guessed from the script and common words; ISO 639-1."""
    licence: str | None = None
    media_type: str | None = None
    """By content, never by name: `video/mp4`, `image/png`, `text/html`…"""
    container: str | None = None
    num_video_streams: int = 0
    """Without cover art and thumbnails."""
    num_audio_streams: int = 0
    video_stream: int | None = None
    """Index in the file of the picture that is used: the largest, then the default, a moving one, the first."""
    audio_stream: int | None = None
    """Likewise of the sound: the default one, then the first."""
    video_codec: str | None = None
    pixel_format: str | None = None
    color_transfer: str | None = None
    width: int = 0
    """As displayed, after rotation, px."""
    height: int = 0
    rotation_deg: int = 0
    """Clockwise turn that shows the picture upright, as the file asks for."""
    frame_rate: str = "0"
    """Exact average rate, a fraction such as "24000/1001"."""
    time_base: str | None = None
    """Exact tick of the picture's timestamps, s, a fraction."""
    num_frames: int = 0
    """Frames that really decoded, not the header's count."""
    header_num_frames: int | None = None
    """What the header promises, where it does."""
    header_duration_s: float | None = None
    """Of the whole file, by its header, s."""
    decoded: Literal["all", "keyframes"] = "all"
    """What the numbers rest on: every frame and sample, or key frames and timestamps of packets alone."""
    frame_jitter: float = 0.0
    """Largest deviation of a frame interval from the median interval, as a share of it; 0 is constant rate."""
    video_start_s: float = 0.0
    video_duration_s: float = 0.0
    """From the first frame's presentation to the end of the last, s, by decode."""
    black_share: float = 0.0
    """Share of frames that are black."""
    freeze_share: float = 0.0
    """Share of frames that repeat the one before."""
    letterbox_share: float = 0.0
    """Share of the picture that is black bars throughout."""
    interlaced_share: float = 0.0
    """Share of frames that are stored as two fields, each of its own instant."""
    audio_codec: str | None = None
    """None where the file has no sound."""
    num_channels: int = 0
    channel_layout: str | None = None
    sample_rate_hz: int = 0
    audio_start_s: float = 0.0
    audio_duration_s: float = 0.0
    """By decode, s."""
    peak: float = 0.0
    """Largest absolute sample, full scale = 1."""
    true_peak_db: float | None = None
    """Largest value between samples, dB true peak (ITU-R BS.1770-5, annex 2); None without sound."""
    loudness_lufs: float | None = None
    """Integrated (ITU-R BS.1770-5); None without sound, or where it is below the gate of -70."""
    silent_share: float = 0.0
    """Share of the sound below -60 dB full scale, in blocks of 0.1 s."""
    clipped_share: float = 0.0
    """Share of samples that stand at full scale beside another one."""
    speech_share: float | None = None
    """Share of the sound that is speech; None where it was not measured."""
    dead_side: Literal["left", "right"] | None = None
    """Side of stereo sound that is silent while the other is not."""


class Reject(Frozen):
    """A source or clip left out, and why."""

    item: str
    """source_id or clip_id."""
    path: str
    verb: str
    rule: str
    """The option that rejects it, e.g. `validate.min_duration_s`."""
    measured: str
    limit: str


TreatmentName = Literal[
    "silence", "mono_to_stereo", "downmix", "dead_side", "other_sound", "delay_sound", "pad_sound", "trim_sound",
    "choose_stream", "retime", "deinterlace", "rotate", "resize", "ten_bit", "tone_map", "on_black",
    "caption_by_default", "caption_cleaned",
]  # fmt: skip


class Treatment(Frozen):
    """What is done to an accepted source so that the model can use it."""

    item: str
    path: str
    treatment: TreatmentName
    detail: str


BoundaryReason = Literal["start", "cut", "drop", "stride"]
"""`start` of the source; `cut`, a camera cut; `drop`, the content changed without one; `stride`, fixed length."""


class Clip(Frozen):
    """A half-open span `[start_s, end_s)` of one source, on the picture's timeline (0 = first frame shown)."""

    clip_id: str
    """Source id, dash, start in milliseconds: `3f2a…-000917`."""
    source_id: str
    path: str
    sound_path: str | None = None
    """As `Source.sound_path` says."""
    references: tuple[str, ...] = ()
    group: str
    caption: str
    caption_language: str | None = None
    licence: str | None = None
    start_s: float
    end_s: float
    boundary_reason: BoundaryReason
    """Why the clip starts where it does."""
    boundary_score: float = 0.0
    """How sure the boundary is, 0–1: similarity lost across it; 0 for `start` and `stride`."""
    residual_cuts: int = 0
    """Boundaries that a stricter look still sees inside the clip."""
    width: int = 0
    """Picture as displayed, after rotation and in square pixels, px."""
    height: int = 0
    has_audio: bool
    motion_p50: float
    """Median over frames of the picture's mean optical flow, picture diagonals a second (DIS flow at 256 px)."""
    motion_p90: float
    """90th percentile over frames of the same."""
    luma: float
    """Mean luma, 0–1."""
    sharpness_p90: float
    """90th percentile over frames of the variance of the Laplacian of 8-bit luma at 256 px wide."""
    motion_blur_index: float = 0.0
    """How much of the missing sharpness goes with motion, 0–1; to sample by, never a reason to reject."""
    black_share: float = 0.0
    freeze_share: float = 0.0
    letterbox_share: float = 0.0
    """As in `Source`, over the clip."""
    loudness_lufs: float | None = None
    """Ungated (ITU-R BS.1770-5 momentary power, averaged over the clip); None without sound."""
    silent_share: float = 0.0
    speech_share: float | None = None
    dnsmos: float | None = None
    """Overall speech quality, 1–5 (DNSMOS P.835); None where there is no speech or no weights."""
    text_share: float | None = None
    """Share of the picture covered by text; None without a detector."""
    num_faces: int | None = None
    """Most faces in one sampled frame; None without a detector."""
    cluster: str = ""
    """Smallest source id among the sources that look or sound like this one; its own where none does."""


class MetricValue(Frozen):
    """One number of the report, with all that a reader needs to believe it."""

    name: str
    """For example `psnr_db`, `lsd_db`, `pesq_nb`, `stoi`, `lse_d`."""
    subset: str
    """Which generations: `base/fl2va`, `tuned/fl2va`, `tuned/fl2va_swapped`, `crossfade`, `reconstruction`…"""
    group: str
    """Which part of the corpus, or `all`."""
    unit: str
    value: float | None
    """None where it could not be computed; `reason` then says why."""
    low: float | None = None
    """Lower end of the 95 % bootstrap interval over sources."""
    high: float | None = None
    num_items: int
    """Items the value is a mean of."""
    num_attempted: int
    """Items tried; the rest failed and are counted, never dropped."""
    higher_is_better: bool
    convention: str
    """Colour space, resampler, window, implementation."""
    reason: str = ""


class Comparison(Frozen):
    """A paired difference between two subsets over the same clips."""

    name: str
    """Metric compared."""
    left: str
    right: str
    group: str
    unit: str
    difference: float
    """mean(left − right)."""
    low: float
    high: float
    """95 % paired bootstrap interval, resampled by source."""
    num_items: int
    num_sources: int
    better: bool
    """Whether the interval excludes zero on the good side."""


class Report(Frozen):
    """What `evaluate` found; holds no clock, host or absolute path, so that same inputs give same bytes."""

    schema_version: int = 1
    model: str
    """`tiny-h3 + all`: base and the last curriculum stage."""
    checkpoint_sha256: str
    base_sha256: str
    seed: int
    metrics: tuple[MetricValue, ...]
    comparisons: tuple[Comparison, ...]
    per_clip: tuple[dict[str, str | float | None], ...]
    """One row a clip and subset with every metric."""


class Check(Frozen):
    """One rule of the gate, with its number and how sure it is."""

    name: str
    measured: str
    limit: str
    passed: bool
    decided: bool = True
    """False where clips, sources, raters or a value are missing; such a rule is not passed."""
    value: float | None = None
    """What is held against the limit, in the metric's unit."""
    p_value: float | None = None
    """One-sided, corrected as `correction` says; None where nothing is tested."""
    num_items: int = 0
    num_sources: int = 0
    num_attempted: int = 0
    correction: str = ""


class Verdict(Frozen):
    """Whether a model may be released."""

    report_sha256: str
    """Content hash of the report judged: `register` refuses a verdict on another one."""
    checkpoint_sha256: str
    passed: bool
    checks: tuple[Check, ...]
    statement: str = ""
    """How often a model that should not pass does."""
    champion: str | None
    """`soundstage-tiny-h3 version 3` where there was one to beat."""


class Canvas(Frozen):
    """A size that clips are encoded at, each in the nearest of its aspects and the longest of its durations it fills.

    Rates and grids are the family's, so none can be wrong here.
    """

    area_px: int = Field(gt=0)
    """Picture area to stay near, px; both sides are rounded to the family's multiple."""
    aspects: tuple[str, ...] = ("1:1",)
    """Allowed shapes, width:height; a clip takes the nearest and is cropped to it around the centre."""
    durations_s: tuple[float, ...]
    """Allowed lengths, s; each is rounded down to the family's grid of frames."""
    max_upscale: float | None = Field(default=None, gt=0)
    """Clips whose sides would have to grow more than so many times are not encoded here; None takes all."""

    @model_validator(mode="after")
    def _can_be_filled(self) -> Canvas:
        for aspect in self.aspects:
            width, colon, height = aspect.partition(":")
            if not (colon and width.isdecimal() and height.isdecimal() and int(width) and int(height)):
                raise ValueError(f"aspect {aspect!r} is not width:height, e.g. 16:9")
        if not self.aspects or not self.durations_s or min(self.durations_s) <= 0:
            raise ValueError("a canvas needs at least one aspect and one duration above 0 s")
        return self
