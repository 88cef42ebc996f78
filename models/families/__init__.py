"""Model families behind one contract. The rest of the code never asks which family it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.records import ClipShape
from models.flow_matching import Draw
from models.threads import quiet_libraries

Frames = NDArray[np.uint8]
Waveform = NDArray[np.float32]


class Condition(NamedTuple):
    """What a generation is given, encoded: everything about it that does not change from step to step."""

    mode: str
    """`t2va`, `fl2va_first` or `fl2va`."""
    text_SD: Tensor
    """Projected text, with the conditioner's view of the keyframes."""
    tags_S: Tensor
    """Modality of every text row."""
    keyframes_KCHW: Tensor
    """Normalised latents of the keyframes, in packed order; K may be 0."""


class Batch(NamedTuple):
    """Clips that share one packed layout."""

    video_BCFHW: Tensor
    """Normalised picture latents."""
    audio_BSCT: Tensor
    """Normalised sound latents, two sides."""
    text_BSD: Tensor
    tags_S: Tensor
    keyframes_BKCHW: Tensor
    has_audio_B: Tensor
    """Clips without sound carry no sound loss."""
    mode: str


class Losses(NamedTuple):
    """Mean squared velocity error of one batch, per clip."""

    video_B: Tensor
    audio_B: Tensor
    """Zero for clips without sound."""
    sigma_video: float
    sigma_audio: float


class Family(Protocol):
    """One model family, loaded."""

    name: str
    transformer: torch.nn.Module
    lora_targets: str
    """Regular expression of the modules an adapter is put on."""

    def check(self, shape: ClipShape) -> None:
        """Raise ValueError where the shape is not on the family's grid."""
        ...

    def latent_shapes(self, shape: ClipShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of a clip's latents by formula: picture (C, F, H, W), sound (2, C, T)."""
        ...

    def encode_clip(self, frames_FHWC: Frames, waveform_CT: Waveform) -> tuple[Tensor, Tensor]:
        """Normalised latents of a clip: picture (C, F, H, W) and sound (2, C, T)."""
        ...

    def encode_condition(self, prompt: str, first: Frames | None, last: Frames | None) -> Condition:
        """Encode a prompt with its keyframes (H, W, 3), exactly as generation does."""
        ...

    def losses(self, batch: Batch, draw: Draw) -> Losses:
        """One forward pass of the training objective."""
        ...

    def generate(
        self, condition: Condition, shape: ClipShape, seed: int, num_inference_steps: int
    ) -> tuple[Tensor, Tensor]:
        """Latents of one generation: picture (C, F, H, W) and sound (2, C, T)."""
        ...

    def decode(self, video_CFHW: Tensor, audio_SCT: Tensor, shape: ClipShape) -> tuple[Frames, Waveform]:
        """Pixels and sound of latents, cut to the clip's exact length."""
        ...

    def load_transformer(self, folder: Path) -> None:
        """Take the transformer's weights from a checkpoint folder."""
        ...

    def save_transformer(self, folder: Path) -> None:
        """Write the transformer in the layout `load_transformer` reads; same weights, same bytes."""
        ...


MODES = ("t2va", "fl2va_first", "fl2va")
"""Conditioning modes every family here offers: text; text and first frame; text, first and last frame."""


def load_family(base: Path, *, device: str = "cpu") -> Family:
    """Load the model in `base` (a diffusers folder) with its family's code.

    Raises:
        RuntimeError: there is no model in `base`.
        ValueError: the model belongs to no known family.
    """
    quiet_libraries()
    index = base / "modular_model_index.json"
    if not index.is_file():
        raise RuntimeError(f"no model in {base} (no modular_model_index.json); set `base` to a diffusers folder")
    pipeline = json.loads(index.read_text(encoding="utf-8"))["_class_name"]
    if pipeline == "MiniMaxH3ModularPipeline":
        from models.families.h3 import H3

        return H3(base, device=device)
    raise ValueError(f"{base} holds a {pipeline}; known: MiniMaxH3ModularPipeline")


def forget_place(folder: Path) -> None:
    """Take out of a part's configuration where it was loaded from: the same model has the same bytes anywhere."""
    path = folder / "config.json"
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
        config.pop("_name_or_path", None)
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
