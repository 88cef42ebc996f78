"""A stage of the curriculum, as `params.yaml` states it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, FiniteFloat, field_validator, model_validator

from data.conditions import Mode
from data.plateau import Plateau
from data.records import Frozen


class NoiseLevels(Frozen):
    """At which noise levels a stage trains."""

    distribution: Literal["family", "uniform", "logit_normal"] = "family"
    """`family` is the model's own, as published; the others are as they say, then shifted."""
    draws: Literal["family", "shared", "separate"] = "family"
    """One draw for picture and sound, or one each; `family` is as published."""
    logit_mean: FiniteFloat = 0.0
    """Of `logit_normal`: mean of the level's logit."""
    logit_std: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Of `logit_normal`: standard deviation of the level's logit."""
    shift_video: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Of `uniform` and `logit_normal`: above 1 the picture is trained nearer to pure noise."""
    shift_audio: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Of `uniform` and `logit_normal`: above 1 the sound is trained nearer to pure noise."""
    per_update: int = Field(default=1, gt=0)
    """Noise levels in one update; its clips are dealt out to them, with a forward pass each at least."""
    min_snr_gamma: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Weight levels as min-SNR does (Hang et al. 2023, arXiv 2303.09556); 5 is usual. None weighs all alike."""

    @model_validator(mode="after")
    def _is_no_contradiction(self) -> NoiseLevels:
        if self.distribution == "family" and (self.shift_video, self.shift_audio) != (1.0, 1.0):
            raise ValueError("noise.shift_video and shift_audio shift uniform and logit_normal; family has its own")
        return self


class Guidance(Frozen):
    """How a stage keeps what guidance distillation put into the released weights; plain tuning wears it off."""

    form: Literal["family", "none", "contrast", "drift", "assistant"] = "family"
    """`contrast` trains what guidance is made of: (v + (s - 1) v0) / s, with v0 the model's own prediction without
    caption; `drift` holds predictions near the first weights'; `assistant` trains beside an adapter that undoes the
    distillation and is taken off again; `family` is `contrast` for distilled models and `none` for others."""
    scale: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    """Of `contrast`: the guidance s; None is what the weights were distilled with."""
    weight: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Of `drift`: weight of the squared distance to the first weights' velocities."""
    adapter: Path | None = None
    """Of `assistant`: its LoRA file."""

    @model_validator(mode="after")
    def _is_whole(self) -> Guidance:
        if (self.form == "assistant") != (self.adapter is not None):
            raise ValueError("guidance.form assistant and guidance.adapter go together")
        return self


class Stage(Frozen):
    """One stage of the curriculum: which clips, which conditions, what is trained, how long."""

    start_from: str | None = None
    """Name of the stage whose checkpoint this one continues; None starts from the base model."""
    after: str = ""
    """Folder that must exist first: the base model, or the checkpoint of `start_from`. Read by dvc.yaml alone."""
    difficulty: tuple[float, float] = (0.0, 1.0)
    """Window of difficulty whose clips take part, from easiest (0) to hardest (1), both ends included."""
    pacing: Literal["window", "competence"] = "window"
    """`window` draws from all of the window at once; `competence` opens it from its easy end as the stage goes on
    (Platanios et al. 2019, arXiv 1903.09848, equation 7)."""
    competence_start: float = Field(default=0.2, gt=0, le=1)
    """Share of the window that is open at the first step of `competence` pacing."""
    canvases: tuple[str, ...] = ()
    """Names of the canvases to draw from; empty is all."""
    max_duration_s: FiniteFloat | None = Field(default=None, gt=0)
    """Clips up to this long take part, s; None is all."""
    mixture: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Weight of each group of clips; groups that are not named are left out. Empty draws every clip alike."""
    replay_share: float = Field(default=0.0, ge=0, lt=1)
    """Floor of replay: share of the drawn clips that come from `replay_groups`, so that old skills do not vanish."""
    replay_groups: tuple[str, ...] = ()
    """Groups to replay; empty replays what is easier than the window."""
    conditions: dict[Mode, FiniteFloat]
    """Share of the drawn clips that each conditioning mode gets."""
    caption_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of draws whose caption is left out; needs `encode.uncaptioned`."""
    method: Literal["full", "lora"] = "full"
    """`lora` trains adapters only; `full` the transformer."""
    freeze_text_side: bool = False
    """Leave what takes the text in as it is: a first stage of two, before a light end-to-end one."""
    num_steps: int = Field(gt=0)
    """Optimiser updates."""
    batch_size: int = Field(default=4, gt=0)
    """Clips an optimiser update sees, at most."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Rows of packed sequence an update sees, at most: long clips come in smaller batches. None sets no limit."""
    noise: NoiseLevels = NoiseLevels()
    """Noise levels to train at."""
    video_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Of the picture's loss."""
    audio_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Of the sound's loss, a mean over the clips that have sound."""
    guidance: Guidance = Guidance()
    """How guidance is preserved."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """`adamw8bit` keeps AdamW's states in 8 bits; needs bitsandbytes and a CUDA device."""
    learning_rate: FiniteFloat = Field(gt=0)
    """At its highest. It is for the whole batch: micro-batches, devices and nodes do not change it."""
    weight_decay: FiniteFloat = Field(default=0.0, ge=0)
    """AdamW's, decoupled."""
    gradient_clip: float = Field(default=1.0, gt=0)
    """Most norm that the gradient of an update may have."""
    plateau: Plateau | None = None
    """Ends the stage early where a quantity has stopped improving; None runs all steps."""
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Keep a moving average of what is trained and write that as the checkpoint; 0.999 is usual, None keeps none."""
    lora_rank: int = Field(default=16, gt=0)
    """Of the adapters."""
    lora_alpha: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Adapters count alpha / rank; None is the rank."""
    lora_targets: str | None = None
    """Regular expression of the modules that get adapters; None is the family's: attention and feed-forward."""
    lora_modulation: bool = False
    """Adapters too for what turns timesteps into scales and shifts (AdaLN)."""
    warmup_steps: int = Field(default=20, ge=0)
    """Updates in which the learning rate rises; then it falls as a cosine to a twentieth."""

    @field_validator("lora_targets")
    @classmethod
    def _is_an_expression(cls, targets: str | None) -> str | None:
        try:
            re.compile(targets or "")
        except re.error as error:
            raise ValueError(f"lora_targets {targets} is no regular expression: {error}") from error
        return targets

    @model_validator(mode="after")
    def _is_no_contradiction(self) -> Stage:
        total = sum(self.conditions.values())
        if abs(total - 1) > 1e-6 or min(self.conditions.values()) < 0:
            raise ValueError(f"conditions sum to {total:g}; they are shares and must sum to 1")
        low, high = self.difficulty
        if not 0 <= low <= high <= 1:
            raise ValueError(f"difficulty {low:g} to {high:g} is no window between 0 and 1")
        if self.replay_share > 0 and not self.replay_groups and low == 0:
            raise ValueError("replay_share > 0 needs replay_groups, or a difficulty window that leaves easy clips out")
        if self.mixture and (min(self.mixture.values()) < 0 or sum(self.mixture.values()) <= 0):
            raise ValueError("mixture: weights must not be below 0, and not all 0")
        if self.method == "lora" and self.freeze_text_side:
            raise ValueError("freeze_text_side means nothing for method lora, which trains adapters only")
        if self.method == "full" and (self.lora_alpha, self.lora_targets, self.lora_modulation) != (None, None, False):
            raise ValueError("lora_alpha, lora_targets and lora_modulation mean nothing for method full")
        if self.video_weight == self.audio_weight == 0:
            raise ValueError("video_weight and audio_weight are both 0: nothing would be learnt")
        return self
