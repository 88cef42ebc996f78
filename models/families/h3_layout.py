"""MiniMax-H3's sizes: the grid of its latents and its packed sequence, which both halves of the family must agree on.

Nothing here needs weights. Letters: S text rows, T sound latents, F latent frames, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines import MiniMaxH3ModularPipeline
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    MiniMaxH3Ref2VAPrepareLayoutStep,
)
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import (
    MINIMAX_H3_AUDIO_CHANNELS,
    MINIMAX_H3_AUDIO_TAG,
    MINIMAX_H3_FPS,
    MINIMAX_H3_VIDEO_TAG,
    audio_latent_num_frames,
    video_latent_num_frames,
)
from torch import Tensor

from data import conditions
from data.conditions import KEYFRAMES, Mode
from data.records import ClipShape

FRAME_RATE = MINIMAX_H3_FPS
"""The family's fixed rate, frames a second."""
MODES: tuple[Mode, ...] = tuple(mode for mode in conditions.MODES if mode != "kf2va")
"""Conditioning modes: of keyframes its packed layout has places for the first and the last."""
Triple = tuple[int, int, int]


class Grid(NamedTuple):
    """Sizes that follow from a model's configuration files; the files of its weights may be missing."""

    video_channels: int
    audio_channels: int
    ratio: int
    """Pixels a side of one latent."""
    chunk: int
    """Frames that the picture autoencoder takes at once: the 17 of 17n + 5."""
    extra: int
    """The 5 of 17n + 5."""
    hop: int
    """Sound samples a latent."""
    sample_rate_hz: int
    patch: Triple
    """Latents (F, H, W) of one row of the sequence."""

    @classmethod
    def of(cls, parts: Mapping[str, Any]) -> Grid:
        """The grid of a model's autoencoders and transformer, or of their sketches."""
        vae, audio_vae = parts["vae"], parts["audio_vae"]
        return cls(
            video_channels=vae.config.latent_channels,
            audio_channels=audio_vae.config.latent_channels,
            ratio=vae.spatial_compression_ratio,
            chunk=vae.config.clip_length,
            extra=vae.tokens_chunk_size,
            hop=audio_vae.hop_length,
            sample_rate_hz=audio_vae.config.sampling_rate,
            patch=tuple(parts["transformer"].config.patch_size),
        )

    @property
    def multiple(self) -> int:
        """What both sides of the picture are multiples of, px."""
        return self.ratio * self.patch[2]

    def shape(self, duration_s: float, height: float, width: float) -> ClipShape:
        """The clip on the grid: the most frames that fit within half a frame, sides to the nearest multiple.

        Raises:
            ValueError: the duration is below the shortest.
        """
        num_chunks = (math.floor(duration_s * FRAME_RATE + 0.5) - self.extra) // self.chunk
        shortest = self.chunk + self.extra
        if num_chunks < 1:
            raise ValueError(
                f"{duration_s:g} s are too short: H3 needs at least {shortest} frames at {FRAME_RATE} frames a second,"
                f" {shortest / FRAME_RATE:.3f} s; raise durations_s"
            )
        sides = [max(1, round(side / self.multiple)) * self.multiple for side in (height, width)]
        return ClipShape(
            num_frames=num_chunks * self.chunk + self.extra,
            frame_rate=FRAME_RATE,
            height=sides[0],
            width=sides[1],
            sample_rate_hz=self.sample_rate_hz,
        )

    def check(self, shape: ClipShape) -> None:
        """Raise ValueError where the shape is not on the grid, naming the field and what it may be."""
        chunk, extra = self.chunk, self.extra
        if shape.num_frames % chunk != extra or shape.num_frames < chunk + extra:
            raise ValueError(f"shape.num_frames = {shape.num_frames}; H3 needs {chunk}n + {extra}, e.g. 22, 39, 124")
        if shape.frame_rate != FRAME_RATE:
            raise ValueError(f"shape.frame_rate = {shape.frame_rate}; H3 runs at {FRAME_RATE} frames a second only")
        if shape.height % self.multiple or shape.width % self.multiple:
            raise ValueError(f"shape is {shape.width}x{shape.height} px; this H3 needs multiples of {self.multiple}")
        if shape.sample_rate_hz != self.sample_rate_hz:
            raise ValueError(
                f"shape.sample_rate_hz = {shape.sample_rate_hz}; this H3's sound runs at {self.sample_rate_hz} Hz"
            )

    def latent_shapes(self, shape: ClipShape) -> tuple[tuple[int, int, int, int], Triple]:
        """Sizes of a clip's latents by formula: picture (C, F, H, W), sound (2, C, T)."""
        frames = video_latent_num_frames(shape.num_frames, self.chunk, self.extra)
        video = (self.video_channels, frames, shape.height // self.ratio, shape.width // self.ratio)
        return video, (MINIMAX_H3_AUDIO_CHANNELS, self.audio_channels, audio_latent_num_frames(shape.num_frames))

    def rows(self, latents_FHW: Sequence[int]) -> int:
        """Rows of the sequence that picture latents of a size take."""
        return math.prod(size // patch for size, patch in zip(latents_FHW, self.patch, strict=True))


def sketches(base: Path) -> dict[str, Any]:
    """Autoencoders and transformer by their configuration alone, without memory or weights.

    A folder without a transformer is taken to belong to the released one, as diffusers does.

    Raises:
        OSError: the configuration of an autoencoder is missing.
    """
    kinds: dict[str, Any] = {"vae": AutoencoderKLMiniMaxH3, "audio_vae": AutoencoderKLMiniMaxH3Audio}
    with torch.device("meta"):
        made = {name: kind.from_config(kind.load_config(str(base / name))) for name, kind in kinds.items()}
        kind, folder = cast(Any, MiniMaxH3Transformer3DModel), base / "transformer"
        folder = folder if folder.is_dir() else base / "transformer_ref"  # both have one shape
        known = kind.load_config(str(folder)) if folder.is_dir() else dict[str, Any]()
        return {**made, "transformer": kind.from_config(known)}


def constant(name: str) -> Any:
    """A number that the stock pipeline keeps as a property, the same for every model."""
    return getattr(MiniMaxH3ModularPipeline, name).fget(None)


class Place(NamedTuple):
    """Sizes of one reference, as the packed layout sees it."""

    kind: Literal["image", "video", "audio"]
    grid: Triple | None
    """Picture latents (F, H, W)."""
    num_audio_latents: int

    def __str__(self) -> str:
        seen = f" {'x'.join(map(str, self.grid))}" if self.grid else ""
        return f"{self.kind}{seen}{f' sound {self.num_audio_latents}' if self.num_audio_latents else ''}"


def check_mode(mode: Mode) -> None:
    """Raise ValueError where the family has no such mode."""
    if mode not in MODES:
        raise ValueError(
            f"MiniMax-H3 has no {mode}: it takes keyframes at the first and the last frame alone; leave the others out,"
            " or set `base` to an LTX-2"
        )


def places_of(sizes: Mapping[str, Sequence[int]]) -> tuple[Place, ...]:
    """References in packed order, from the sizes of condition arrays by name; other arrays are passed over."""
    found: dict[int, dict[str, Sequence[int]]] = {}
    for name, size in sizes.items():
        if name.startswith("references/"):
            _, number, what = name.split("/")
            found.setdefault(int(number), {})[what] = size
    places: list[Place] = []
    for _, arrays in sorted(found.items()):
        kind = "image" if "image" in arrays else "video" if "video" in arrays else "audio"
        grid = None if kind == "audio" else cast(Triple, tuple(arrays[kind][-3:]))
        places.append(Place(kind, grid, arrays["audio"][-1] if "audio" in arrays else 0))
    return tuple(places)


class Layout(NamedTuple):
    """Where every row of the packed sequence sits."""

    fields: dict[str, Tensor]
    """What the transformer reads by name: position_ids, token_tags and three index tensors."""
    num_condition_rows: int
    """Leading picture rows that are keyframes or references."""
    num_condition_audio_rows: int
    """Leading sound rows that are references."""


def packed(
    grid: Grid, mode: Mode, tags_S: Tensor, video_FHW: Triple, num_audio_latents: int, places: Sequence[Place]
) -> Layout:
    """The stock layout of text, conditions, sound and picture.

    Raises:
        ValueError: the family has no such mode.
    """
    check_mode(mode)
    target = (*video_FHW, num_audio_latents)
    model = (grid.patch, MINIMAX_H3_AUDIO_CHANNELS, MINIMAX_H3_AUDIO_TAG, MINIMAX_H3_VIDEO_TAG)
    if mode == "ref2va":
        # The builder reads the kinds of references and the sizes of their latents, nothing in them.
        kinds = [SimpleNamespace(kind=place.kind, has_audio=place.num_audio_latents > 0) for place in places]
        seen = [torch.empty(1, 1, *place.grid, device="meta") for place in places if place.grid]
        num_rows = [MINIMAX_H3_AUDIO_CHANNELS * place.num_audio_latents for place in places]
        heard = [torch.empty(rows, 1, device="meta") for rows in num_rows if rows]
        built = MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
            tags_S, cast(Any, kinds), seen, heard, *target, *model
        )
    else:
        built = MiniMaxH3PrepareLayoutStep.build_packed_sequence(tags_S, *target, *model, KEYFRAMES.get(mode, ()))
    names = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")
    return Layout(dict(zip(names, built[:5], strict=True)), built[5], built[6])


def layout_key(grid: Grid, shape: ClipShape, mode: Mode, sizes: Mapping[str, Sequence[int]]) -> tuple[str, int]:
    """What decides the packed layout, in words, and the rows of the sequence.

    The tags of the text rows need no place in it: the label and the vision block of every keyframe and reference
    follow from its latents' size, and what is left of the text is the caption.

    Raises:
        ValueError: the family has no such mode.
    """
    check_mode(mode)
    (_, *video_FHW), (num_sides, _, num_audio_latents) = grid.latent_shapes(shape)
    num_text, places = sizes["text/rows"][0], places_of(sizes)
    words = (mode, "x".join(map(str, video_FHW)), f"sound {num_audio_latents}", f"text {num_text}", *map(str, places))
    num_rows = num_text + grid.rows(video_FHW) + num_sides * num_audio_latents
    num_rows += len(KEYFRAMES.get(mode, ())) * grid.rows((grid.patch[0], *video_FHW[1:]))
    num_rows += sum(
        (grid.rows(place.grid) if place.grid else 0) + num_sides * place.num_audio_latents for place in places
    )
    return ", ".join(words), num_rows
