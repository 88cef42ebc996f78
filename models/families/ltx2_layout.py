"""LTX-2's sizes: the grid of its latents and its two streams of tokens. Nothing here needs weights.

Letters: C channels, F latent frames, H height, W width, S text rows, T sound latents.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video

from data.conditions import Mode
from data.records import ClipShape

FRAME_RATE = 24
"""Frames a second of every clip; the rate diffusers' pipelines generate at unless told otherwise."""
Triple = tuple[int, int, int]


class Grid(NamedTuple):
    """Sizes that follow from a model's configuration files; the files of its weights may be missing."""

    video_channels: int
    spatial: int
    """Pixels a side of one picture latent."""
    temporal: int
    """Frames a picture latent behind the first: the 8 of 8n + 1."""
    patch: Triple
    """Latents (F, H, W) of one token."""
    audio_channels: int
    """Channels by mel bands of one sound latent, which is one token."""
    num_bands: int
    """Mel bands of a sound latent."""
    sample_rate_hz: int
    num_mels: int
    hop: int
    """Sound samples a mel frame."""
    mels_per_latent: int
    num_mirrored: int
    """Picture latents a side that the autoencoder mirrors at its borders; a side has more, or it cannot be decoded."""

    @classmethod
    def of(cls, base: Path) -> Grid:
        """The grid of the model in `base`."""
        with torch.device("meta"):
            vae = _configured(AutoencoderKLLTX2Video, base / "vae")
            audio_vae = _configured(AutoencoderKLLTX2Audio, base / "audio_vae")
        config = audio_vae.config
        num_bands = config.mel_bins // audio_vae.mel_compression_ratio
        return cls(
            video_channels=vae.config.latent_channels,
            spatial=vae.spatial_compression_ratio,
            temporal=vae.temporal_compression_ratio,
            patch=_patch(base / "transformer" / "config.json"),
            audio_channels=config.latent_channels * num_bands,
            num_bands=num_bands,
            sample_rate_hz=config.sample_rate,
            num_mels=config.mel_bins,
            hop=config.mel_hop_length,
            mels_per_latent=audio_vae.temporal_compression_ratio,
            num_mirrored=_mirrored(vae),
        )

    @property
    def multiple(self) -> int:
        """What both sides of the picture are multiples of, px."""
        return self.spatial * self.patch[2]

    @property
    def least_px(self) -> int:
        """Shortest side of the picture, px."""
        return math.ceil((self.num_mirrored + 1) / self.patch[2]) * self.multiple

    def shape(self, duration_s: float, height: float, width: float) -> ClipShape:
        """The clip on the grid: the most frames that fit within half a frame, sides to the nearest multiple that can be decoded.

        Raises:
            ValueError: the duration is below the shortest.
        """
        num_steps = (math.floor(duration_s * FRAME_RATE + 0.5) - 1) // self.temporal
        if num_steps < 1:
            raise ValueError(
                f"{duration_s:g} s are too short: LTX-2 needs at least {self.temporal + 1} frames at {FRAME_RATE} frames"
                f" a second, {(self.temporal + 1) / FRAME_RATE:.3f} s; raise durations_s"
            )
        sides = [max(self.least_px, round(side / self.multiple) * self.multiple) for side in (height, width)]
        return ClipShape(
            num_frames=num_steps * self.temporal + 1,
            frame_rate=FRAME_RATE,
            height=sides[0],
            width=sides[1],
            sample_rate_hz=self.sample_rate_hz,
        )

    def check(self, shape: ClipShape) -> None:
        """Raise ValueError where the shape is not on the grid, naming the field and what it may be."""
        step = self.temporal
        if shape.num_frames % step != 1 or shape.num_frames <= step:
            raise ValueError(
                f"shape.num_frames = {shape.num_frames}; LTX-2 needs {step}n + 1, e.g. {step + 1}, {15 * step + 1}"
            )
        if shape.frame_rate != FRAME_RATE:
            raise ValueError(
                f"shape.frame_rate = {shape.frame_rate}; LTX-2 is encoded at {FRAME_RATE} frames a second only"
            )
        if shape.height % self.multiple or shape.width % self.multiple:
            raise ValueError(f"shape is {shape.width}x{shape.height} px; this LTX-2 needs multiples of {self.multiple}")
        if min(shape.height, shape.width) < self.least_px:
            raise ValueError(
                f"shape is {shape.width}x{shape.height} px; the picture autoencoder of this LTX-2 needs {self.least_px} px"
                " a side or more; raise shape.height and shape.width"
            )
        if shape.sample_rate_hz != self.sample_rate_hz:
            raise ValueError(
                f"shape.sample_rate_hz = {shape.sample_rate_hz}; this LTX-2's sound runs at {self.sample_rate_hz} Hz"
            )

    def latent_frames(self, num_frames: int) -> int:
        """Picture latents in time that cover some frames."""
        return (num_frames - 1) // self.temporal + 1

    def kept_frames(self, num_frames: int) -> int:
        """Most of some frames that fill latents whole."""
        return (num_frames - 1) // self.temporal * self.temporal + 1

    def latent_shapes(self, shape: ClipShape) -> tuple[tuple[int, int, int, int], Triple]:
        """Sizes of a clip's latents as inference makes them: picture (C, F, H, W), sound (1, C, T).

        The sound's length is written as the pipeline writes it, in the same floating-point steps: 126 latents for 121
        frames, where the autoencoder, which rounds up, gives 127.
        """
        sides = (shape.height // self.spatial, shape.width // self.spatial)
        latents_per_s = self.sample_rate_hz / self.hop / self.mels_per_latent
        num_sounds = round(shape.num_frames / shape.frame_rate * latents_per_s)
        return (self.video_channels, self.latent_frames(shape.num_frames), *sides), (1, self.audio_channels, num_sounds)

    def tokens(self, latents_FHW: Sequence[int]) -> int:
        """Tokens that picture latents of a size take."""
        return math.prod(size // patch for size, patch in zip(latents_FHW, self.patch, strict=True))


def _configured(kind: Any, folder: Path) -> Any:
    """A model of a class by its configuration alone."""
    return kind.from_config(kind.load_config(str(folder)))


def _mirrored(vae: torch.nn.Module) -> int:
    """Latents that a convolution mirrors at a border; torch needs more than that to mirror."""
    convolutions = [module for module in vae.modules() if isinstance(module, torch.nn.Conv3d)]
    return max((int(each.padding[-1]) for each in convolutions if each.padding_mode == "reflect"), default=0)


def _patch(config: Path) -> Triple:
    """Latents (F, H, W) of one token; those of every released transformer where its folder is not there."""
    sizes: dict[str, Any] = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    side = int(sizes.get("patch_size", 1))
    return int(sizes.get("patch_size_t", 1)), side, side


def layout_key(grid: Grid, shape: ClipShape, mode: Mode, sizes: Mapping[str, Sequence[int]]) -> tuple[str, int]:
    """What decides the tokens of both streams, in words, and how many they are.

    Text is attended to from the side and has a fixed, masked length, so it adds no tokens. A first frame takes the
    place of tokens that are there anyway; other keyframes and references are appended, clean, with coordinates of their
    own. Source: diffusers' LTX2ConditionPipeline and LTX2InContextPipeline.
    """
    (_, *video_FHW), (_, _, num_sounds) = grid.latent_shapes(shape)
    words = [mode, "x".join(map(str, video_FHW)), f"sound {num_sounds}", f"text {sizes['text/mask'][0]}"]
    num_tokens = grid.tokens(video_FHW) + num_sounds
    for name, size in sizes.items():
        part, _, rest = name.partition("/")
        if part == "keyframe":
            words.append(f"{rest} {'x'.join(map(str, size[-2:]))}")
            num_tokens += grid.tokens((grid.patch[0], *size[-2:])) if rest != "first" else 0
        elif part == "references":
            words.append(f"reference {rest} {'x'.join(map(str, size[-3:]))}")
            num_tokens += grid.tokens(size[-3:])
    return ", ".join(words), num_tokens
