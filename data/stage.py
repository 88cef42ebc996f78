"""A stage of the curriculum, as `params.yaml` states it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, FiniteFloat, model_validator

from data.conditions import Mode
from data.records import Frozen


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
    """Optimiser updates of the stage."""
    batch_size: int = Field(default=4, gt=0)
    """Clips an optimiser update sees, at most."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Rows of packed sequence an update sees, at most: long clips come in smaller batches. None sets no limit."""
    optimizer: Literal["adamw"] = "adamw"
    """The only one there is: AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101)."""
    learning_rate: FiniteFloat = Field(gt=0)
    """Its highest, reached after `warmup_steps`, from where it falls by a cosine to a twentieth."""
    weight_decay: FiniteFloat = Field(default=0.0, ge=0)
    """Share of the weights that an update at learning rate 1 would take off; 0, as the field tunes H3."""
    lora_rank: int = Field(default=16, gt=0)
    """Width of the adapters of method `lora`, whose alpha equals it; `full` does not read it."""
    warmup_steps: int = Field(default=20, ge=0)
    """Updates over which the learning rate rises linearly from near 0."""

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
        return self
