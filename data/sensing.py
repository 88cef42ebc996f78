"""What is measured of every file, and how: the settings that a measurement depends on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from data.records import Frozen


class Sensing(Frozen):
    """Settings of the one decoding pass; every one of them is part of a remembered measurement's name."""

    decode: Literal["all", "keyframes"] = "all"
    """`keyframes` reads every packet's timestamps but decodes key frames and spots of sound alone: a tenth of the cost,
    and damage between key frames goes unseen."""
    decoder: Literal["cpu", "auto", "cuda"] = "cpu"
    """Where pictures are decoded; `auto` takes CUDA where it proves itself, `cuda` insists on it."""
    speech: bool = True
    """Measure how much of the sound is speech (silero-vad's network, 12 MB of memory)."""
    semantics: Literal["histogram", "efficientnet_lite0", "clip"] = "histogram"
    """What tells one scene from another: a colour histogram without weights, or an image encoder."""
    semantics_weights: Path | None = None
    """Local folder of the encoder's weights; `clip` needs one."""
    proposer: Literal["content", "transnetv2"] = "content"
    """What proposes camera cuts: content change alone, or TransNetV2 beside it (nine times the cost of decoding)."""

    @model_validator(mode="after")
    def _has_its_weights(self) -> Sensing:
        if self.semantics == "clip" and self.semantics_weights is None:
            raise ValueError("semantics: clip needs semantics_weights, a local folder of a CLIP or SigLIP model")
        return self
