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
    """As given, relative to the working directory where it lies below it; POSIX, UTF-8."""
    group: str
    """First folder below the source root ("" at the root): lets reports compare parts of a corpus."""
    size_bytes: int
    error: str | None = None
    """Why the file cannot be used at all (not media, no picture, does not decode), else None."""
    caption: str | None = None
    container: str | None = None
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
    num_frames: int = 0
    """Frames that really decoded, not the header's count."""
    frame_jitter: float = 0.0
    """Largest deviation of a frame interval from the median interval, as a share of it; 0 is constant rate."""
    video_start_s: float = 0.0
    video_duration_s: float = 0.0
    """From the first frame's presentation to the end of the last, s, by decode."""
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
    "silence",
    "mono_to_stereo",
    "downmix",
    "retime",
    "rotate",
    "delay_sound",
    "pad_sound",
    "resize",
    "ten_bit",
    "caption_by_default",
]


class Treatment(Frozen):
    """What is done to an accepted source so that the model can use it."""

    item: str
    path: str
    treatment: TreatmentName
    detail: str


class Clip(Frozen):
    """A half-open span `[start_s, end_s)` of one source, on the picture's timeline (0 = first frame shown)."""

    clip_id: str
    """Source id, dash, start in milliseconds: `3f2a…-000917`."""
    source_id: str
    path: str
    group: str
    caption: str
    start_s: float
    end_s: float
    boundary_reason: str
    """Why the clip starts where it does: `start`, `shot` (a camera cut) or `stride` (fixed length)."""
    has_audio: bool
    motion: float
    """Mean absolute luma change between neighbouring frames, 0–1."""
    luma: float
    """Mean luma, 0–1."""
    sharpness: float
    """90th percentile over frames of the variance of the Laplacian of 8-bit luma."""
    loudness_db: float
    """Root mean square of the sound, dB full scale; -120 for silence."""


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
    """One limit of the gate."""

    name: str
    measured: str
    limit: str
    passed: bool


class Verdict(Frozen):
    """Whether a model may be released."""

    report_sha256: str
    """Content hash of the report judged: `register` refuses a verdict on another one."""
    checkpoint_sha256: str
    passed: bool
    checks: tuple[Check, ...]
    champion: str | None
    """`soundstage-tiny-h3 version 3` where there was one to beat."""


class Stage(Frozen):
    """One stage of the curriculum: which clips, which conditions, how long."""

    start_from: str | None = None
    """Name of the stage whose checkpoint this one continues; None starts from the base model."""
    after: str = ""
    """Folder that must exist first: the base model, or the checkpoint of `start_from`. Read by dvc.yaml alone."""
    max_difficulty: float = Field(default=1.0, gt=0, le=1)
    """Clips up to this difficulty quantile take part."""
    replay_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of draws from `replay_groups`, so that old skills do not vanish."""
    replay_groups: tuple[str, ...] = ()
    conditions: dict[Literal["t2va", "fl2va_first", "fl2va"], float]
    """Share of each conditioning mode: text only, first keyframe, both keyframes."""
    method: Literal["full", "lora"] = "full"
    num_steps: int = Field(gt=0)
    batch_size: int = Field(default=4, gt=0)
    """Clips an optimiser update sees."""
    learning_rate: float = Field(gt=0)
    lora_rank: int = Field(default=16, gt=0)
    warmup_steps: int = Field(default=20, ge=0)

    @model_validator(mode="after")
    def _shares_sum_to_one(self) -> Stage:
        total = sum(self.conditions.values())
        if abs(total - 1) > 1e-6:
            raise ValueError(f"conditions sum to {total:g}; they are shares and must sum to 1")
        if self.replay_share > 0 and not self.replay_groups:
            raise ValueError("replay_share > 0 needs replay_groups")
        return self
