"""Model families behind one contract. The rest of the code never asks which family it holds.

A family comes in two halves: `Encoders` (autoencoders and text side: what `encode` needs, and decoding) and `Family`
(the transformer with its objective and sampling), so that no verb loads more than it uses.
Letters: B batch, F frames, H height, W width, C channels, T sound samples or latents, S sides of sound: 2 where the
network takes one side at a time (H3), 1 where it takes both at once (LTX-2).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.conditions import Mode, keyframe_at, mode_of
from data.records import ClipShape
from data.references import Reference
from models.threads import quiet_libraries

Frames = NDArray[np.uint8]
Waveform = NDArray[np.float32]
Arrays = dict[str, Tensor]


class Condition(NamedTuple):
    """What a generation is given, encoded: everything about it that does not change from step to step."""

    mode: Mode
    arrays: Arrays
    """By the names that `LatentStore.conditions` gives them: `text/NAME`, `keyframe/first`, `keyframe/24`,
    `references/0/image`…"""


class Batch(NamedTuple):
    """Clips that share one packed layout, in the same mode."""

    mode: Mode
    video_BCFHW: Tensor
    """Normalised picture latents."""
    audio_BSCT: Tensor
    """Normalised sound latents."""
    has_audio_B: Tensor
    """Clips without sound carry no sound loss."""
    conditions: Arrays
    """As `Condition.arrays`, with a batch axis in front."""
    frame_rate: int
    """Of the picture, as encoded: coordinates in seconds are derived from it and nothing else."""
    uncaptioned: Arrays = {}  # a NamedTuple's default, never written to
    """The conditions of the same clips without their captions, where the objective asks for them."""


class Noisy(NamedTuple):
    """A batch on the straight path from data to noise. What is given whole lies at noise level 0: it is the data."""

    video_BCFHW: Tensor
    audio_BSCT: Tensor
    sigma_video: float
    sigma_audio: float
    seeds_B: tuple[int, ...]
    """Decide the noise that conditions are held at, where a family adds any: one a clip."""


class Velocities(NamedTuple):
    """What the transformer predicts for every latent, from noise towards data; for given ones it means nothing."""

    video_BCFHW: Tensor
    audio_BSCT: Tensor


Posterior = Literal["mode", "sample"]
"""Of an autoencoder's posterior: its most likely latents, or a draw by a fixed seed."""


class Encoders(Protocol):
    """Autoencoders and text side of a family: between media and latents."""

    name: str
    frame_rate: int
    """The family's own, frames a second: every clip is retimed to it."""
    sample_rate_hz: int
    """Of the sound the autoencoder takes."""
    modes: tuple[Mode, ...]
    """Conditioning modes it can encode."""
    parts: Mapping[str, tuple[str, ...]]
    """Folders and files of the model that decide each part of the store: `picture`, `sound`, `text`, `references`."""
    text_sees: bool
    """Whether the text of a mode depends on its keyframes and references too."""

    def shape(self, duration_s: float, height: float, width: float) -> ClipShape:
        """The clip on the family's grid: the longest that `duration_s` fills, sides rounded to its multiple.

        Raises:
            ValueError: the duration is below the family's shortest.
        """
        ...

    def check(self, shape: ClipShape) -> None:
        """Raise ValueError where the shape is not on the family's grid."""
        ...

    def latent_shapes(self, shape: ClipShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of a clip's latents by formula: picture (C, F, H, W), sound (S, C, T) as at inference."""
        ...

    def encode_picture(self, frames_BFHWC: Frames, posterior: Posterior = "mode") -> Tensor:
        """Normalised picture latents (B, C, F, H, W)."""
        ...

    def encode_sound(self, waveform_BCT: Waveform, shape: ClipShape, posterior: Posterior = "mode") -> Tensor:
        """Normalised sound latents (B, S, C, T), of the length that inference generates for `shape`."""
        ...

    def encode_keyframe(self, frame_HWC: Frames) -> Tensor:
        """Normalised latents (C, H, W) of one frame, exactly as generation conditions on it."""
        ...

    def encode_references(self, references: Sequence[Reference], shape: ClipShape) -> Arrays:
        """Latents of ordered references, named `PLACE/image`, `PLACE/video` (C, F, H, W), `PLACE/audio` (S, C, T).

        Raises:
            ValueError: more or other references than the family takes.
        """
        ...

    def encode_text(
        self,
        mode: Mode,
        prompt: str | None,
        keyframes: Sequence[Frames] = (),
        references: Sequence[Reference] = (),
        shape: ClipShape | None = None,
    ) -> Arrays:
        """What the text side makes of a prompt (None: no caption) in a mode, after projection, as generation does.

        Args:
            mode: Conditioning mode.
            prompt: The caption.
            keyframes: Those of the mode, in packed order, (H, W, 3) at the clip's size.
            references: Those of the mode, in order.
            shape: Of the clip, needed with references.
        """
        ...

    def text_of(self, variant: str) -> str:
        """Name under which a variant's text is stored: `shared/…` where it is the same for all clips.

        Variants of the same text share a name.
        """
        ...

    def layout(self, shape: ClipShape, mode: Mode, conditions: Mapping[str, Sequence[int]]) -> tuple[str, int]:
        """What clips must have in common to share a batch, and the rows of their packed sequence.

        Args:
            shape: Of the clip.
            mode: Conditioning mode.
            conditions: Sizes of the condition arrays, by the names of `Condition.arrays`.
        """
        ...

    def move(self, device: str) -> str:
        """Take the autoencoders to a device, and say where they were; the text side stays."""
        ...

    def decode(self, video_CFHW: Tensor, audio_SCT: Tensor, shape: ClipShape) -> tuple[Frames, Waveform]:
        """Pixels (F, H, W, 3) and stereo sound of latents, cut to the clip's exact length; sound at `decoded_rate_hz`."""
        ...

    @property
    def decoded_rate_hz(self) -> int:
        """Samples a second of decoded sound; LTX-2's vocoder gives more than its autoencoder takes."""
        ...


class Family(Protocol):
    """One model family, loaded to train or generate."""

    name: str
    partition: str
    """Folder of the transformer in the model: the one of two that is loaded, where a model has two."""
    transformer: torch.nn.Module
    blocks: str
    """Regular expression of the repeated modules that are recomputed, sharded and compiled one by one."""
    lora_targets: str
    """Regular expression of the modules an adapter is put on."""
    modulation_targets: str
    """Regular expression of what turns timesteps into scales and shifts (AdaLN), for adapters that go there too."""
    text_side: str
    """Regular expression of the parameters that take the text in, for stages that freeze them."""
    timestep_embedding: tuple[str, int]
    """Regular expression of the module that embeds timesteps, and the width that its output has."""
    shared_draw: bool
    """Whether one draw decides the noise levels of picture and sound both, as published."""
    guidance_scale: float
    """Of the guidance that the released weights were distilled with; 1 where there was none."""

    @property
    def encoders(self) -> Encoders:
        """Loaded when first used: training from a latent store never does."""
        ...

    def sigmas(self, u_video: float, u_audio: float, batch: Batch) -> tuple[float, float]:
        """Noise levels of picture and sound at two positions in [0, 1] of the published training distributions.

        They are the distributions' inverse cumulative functions: uniform positions give published draws.
        """
        ...

    def num_given_frames(self, batch: Batch) -> int:
        """Leading latent frames that the batch's conditions put in place clean; they carry no loss."""
        ...

    def velocities(self, batch: Batch, noisy: Noisy) -> Velocities:
        """One forward pass. Tensors lie on the transformer's device; results have the type of the noisy latents.

        Raises:
            ValueError: the clips of the batch differ in layout.
        """
        ...

    def generate(
        self, condition: Condition, shape: ClipShape, seed: int, num_inference_steps: int
    ) -> tuple[Tensor, Tensor]:
        """Latents of one generation: picture (C, F, H, W) and sound (S, C, T)."""
        ...


def encode_condition(
    encoders: Encoders,
    prompt: str | None,
    first: Frames | None = None,
    last: Frames | None = None,
    references: Sequence[Reference] = (),
    shape: ClipShape | None = None,
    keyframes: Mapping[int, Frames] | None = None,
) -> Condition:
    """Encode what a generation is given, exactly as `encode` does for training.

    Args:
        encoders: Of the family.
        prompt: The caption; None is none.
        first: Frame that the clip starts with, (H, W, 3) at its size.
        last: Frame that it ends with.
        references: In order.
        shape: Of the clip, needed with references.
        keyframes: More frames by their place in the clip, counted from 0; one at 0 is another name for `first`.

    Raises:
        ValueError: keyframes and references together, which no mode takes, or keyframes that the family does not take.
    """
    numbered = [(keyframe_at(frame), image) for frame, image in sorted((keyframes or {}).items())]
    given = {name: frame for name, frame in (("first", first), *numbered, ("last", last)) if frame is not None}
    mode = mode_of(tuple(given), references=bool(references))
    text = encoders.encode_text(mode, prompt, list(given.values()), references, shape)
    arrays = {f"text/{name}": array for name, array in text.items()}
    arrays |= {f"keyframe/{name}": encoders.encode_keyframe(frame) for name, frame in given.items()}
    if references and shape is not None:
        latents = encoders.encode_references(references, shape)
        arrays |= {f"references/{name}": array for name, array in latents.items()}
    return Condition(mode, arrays)


def class_of(base: Path) -> str:
    """Pipeline class that a diffusers folder says it belongs to.

    Raises:
        RuntimeError: there is no model in `base`.
    """
    for name in ("modular_model_index.json", "model_index.json"):
        if (base / name).is_file():
            return str(json.loads((base / name).read_text(encoding="utf-8"))["_class_name"])
    raise RuntimeError(
        f"no model in {base} (no modular_model_index.json or model_index.json); set `base` to a diffusers folder"
    )


def family_of(base: Path) -> Literal["h3", "ltx2"]:
    """Which family the model in `base` (a diffusers folder) is of.

    Raises:
        RuntimeError: there is no model in `base`.
        ValueError: the model belongs to no known family.
    """
    name = class_of(base)
    if name == "MiniMaxH3ModularPipeline":
        return "h3"
    if name.startswith("LTX2"):
        return "ltx2"
    raise ValueError(f"{base} holds a {name}; known: MiniMaxH3ModularPipeline, LTX2Pipeline")


def load_encoders(base: Path, *, device: str = "cpu") -> Encoders:
    """Load the encoders of the model in `base` with its family's code, and nothing else of it; raises as `family_of`."""
    quiet_libraries()
    if family_of(base) == "h3":
        from models.families.h3_encoders import H3Encoders

        return H3Encoders(base, device=device)
    from models.families.ltx2_encoders import LTX2Encoders

    return LTX2Encoders(base, device=device)


def load_family(
    base: Path,
    *,
    device: str = "cpu",
    partition: str = "transformer",
    weights: Path | None = None,
    mapped: bool = False,
) -> Family:
    """Load the model in `base` with its family's code; its encoders only when they are used.

    Args:
        base: A diffusers folder.
        device: Torch device.
        partition: Which of the model's transformers, see `models.families.partitions`.
        weights: A diffusers folder of the transformer's weights, instead of those in `base`.
        mapped: As `models.families.tensor_files.filled`, for training.

    Raises:
        RuntimeError: there is no model in `base`, or its weights are not whole.
        ValueError: the model belongs to no known family.
    """
    quiet_libraries()
    if family_of(base) == "h3":
        from models.families.h3 import H3

        return H3(base, device=device, partition=partition, weights=weights, mapped=mapped)
    from models.families.ltx2 import LTX2

    return LTX2(base, device=device, partition=partition, weights=weights, mapped=mapped)
