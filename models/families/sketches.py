"""Models by their configuration alone: what a run would hold and compute, before any weight is there.

A sketch is a transformer on the meta device, of as many blocks as asked for, with inputs of the sizes that a clip has.
Letters: B batch, C channels, F latent frames, H height, W width, S text rows, T sound latents, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from data.conditions import Mode, keyframes_of
from data.records import ClipShape
from models.families import family_of
from models.threads import quiet_libraries

Sizes = Mapping[str, Sequence[int]]
"""Sizes of the condition arrays of one clip, by the names of `Condition.arrays`."""


class Sketch(Protocol):
    """A model of a family that has sizes and no weights."""

    name: str
    num_blocks: int
    """Of the transformer at its full depth."""
    lora_targets: str
    text_side: str
    guidance_scale: float
    groups: Mapping[str, str]
    """Regular expressions of parameter names by what they belong to; the first that matches counts."""
    units: str
    """Regular expression of the modules that FSDP gathers one after another; what is in none of them is the root."""

    def build(self, num_blocks: int, device: str = "meta") -> torch.nn.Module:
        """The transformer with so many blocks, all else at full size."""
        ...

    def shape(self, duration_s: float, height: float, width: float) -> ClipShape:
        """The clip on the family's grid, as `Encoders.shape`."""
        ...

    def sizes(self, shape: ClipShape, mode: Mode, num_text: int) -> dict[str, tuple[int, ...]]:
        """Sizes of what a clip is conditioned on; the reference of `ref2va` is a video with sound as long as the clip."""
        ...

    def layout(self, shape: ClipShape, mode: Mode, sizes: Sizes) -> tuple[str, int]:
        """Packed layout in words and its rows, as `Encoders.layout`."""
        ...

    def inputs(
        self, shape: ClipShape, mode: Mode, sizes: Sizes, batch: int, dtype: torch.dtype, device: str = "meta"
    ) -> dict[str, Any]:
        """What the transformer is called with for a batch of such clips."""
        ...


def sketch_of(base: Path) -> Sketch:
    """The sketch of the model in `base`, a diffusers folder that needs no weights; raises as `family_of`."""
    quiet_libraries()
    return H3Sketch(base) if family_of(base) == "h3" else LTX2Sketch(base)


def condition_sizes(
    mode: Mode, video_CFHW: tuple[int, ...], audio_SCT: tuple[int, ...], text: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Sizes of text, keyframes and one reference like the clip itself; of `kf2va` one keyframe."""
    result = {f"text/{name}": size for name, size in text.items()}
    channels, _, height, width = video_CFHW
    result |= {f"keyframe/{name}": (channels, height, width) for name in keyframes_of(mode, (1.0,), 2)}
    if mode == "ref2va":
        result |= {"references/0/video": video_CFHW, "references/0/audio": audio_SCT}
    return result


class _OfConfiguration:
    """What the sketches of all families do alike, from the class, configuration and grid of a transformer."""

    def __init__(self, kind: Any, config: Mapping[str, Any], grid: Any) -> None:
        self._kind, self._config, self._grid = kind, dict(config), grid
        self.num_blocks = int(config["num_layers"])

    def build(self, num_blocks: int, device: str = "meta") -> torch.nn.Module:
        """See `Sketch`."""
        with torch.device(device):
            return cast(torch.nn.Module, self._kind.from_config({**self._config, "num_layers": num_blocks}))

    def shape(self, duration_s: float, height: float, width: float) -> ClipShape:
        """See `Sketch`."""
        return cast(ClipShape, self._grid.shape(duration_s, height, width))


class H3Sketch(_OfConfiguration):
    """MiniMax-H3: one packed sequence."""

    name = "h3"
    groups: Mapping[str, str] = {
        "attention": r"transformer_blocks\.\d+\.attn\.",
        "feed-forward": r"transformer_blocks\.\d+\.ff\.",
        "AdaLN": r"transformer_blocks\.\d+\.adaln_proj\.|time_embedder\.|norm_out\.",
        "text": r"context_embedder\.|token_refiner\.",
        "picture in and out": r"proj_(?:in|out)\.",
        "sound in and out": r"audio_proj_(?:in|out)\.",
        "norms": r"transformer_blocks\.\d+\.norm",
    }
    units = r"transformer_blocks\.\d+|token_refiner\.refiner_blocks\.\d+"

    def __init__(self, base: Path) -> None:
        from models.families.h3 import H3
        from models.families.h3_layout import Grid, sketches

        parts = sketches(base)
        self.lora_targets, self.text_side, self.guidance_scale = H3.lora_targets, H3.text_side, H3.guidance_scale
        super().__init__(type(parts["transformer"]), parts["transformer"].config, Grid.of(parts))

    def sizes(self, shape: ClipShape, mode: Mode, num_text: int) -> dict[str, tuple[int, ...]]:
        """See `Sketch`; `num_text` counts the vision rows of keyframes and references too."""
        video, audio = self._grid.latent_shapes(shape)
        return condition_sizes(mode, video, audio, {"rows": (num_text, self._config["text_dim"])})

    def layout(self, shape: ClipShape, mode: Mode, sizes: Sizes) -> tuple[str, int]:
        """See `Sketch`."""
        from models.families.h3_layout import layout_key

        return layout_key(self._grid, shape, mode, sizes)

    def inputs(
        self, shape: ClipShape, mode: Mode, sizes: Sizes, batch: int, dtype: torch.dtype, device: str = "meta"
    ) -> dict[str, Any]:
        """See `Sketch`; every text row is tagged as text, which changes no size."""
        from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3SetTimestepsStep

        from models.families.h3 import PINNED
        from models.families.h3_layout import packed, places_of

        (_, *video_FHW), (_, num_channels, num_audio) = self._grid.latent_shapes(shape)
        tags_S = torch.ones(sizes["text/rows"][0], dtype=torch.long)
        grid = cast("tuple[int, int, int]", tuple(video_FHW))
        layout = packed(self._grid, mode, tags_S, grid, num_audio, places_of(sizes))
        fields = layout.fields
        timestep, indices = MiniMaxH3SetTimestepsStep.build_row_timesteps(
            fields["video_indices"],
            fields["audio_indices"],
            layout.num_condition_rows,
            layout.num_condition_audio_rows,
            fields["text_indices"].numel(),
            0.5,
            0.6,
            PINNED,
            1.0,
        )
        widths = {
            "hidden_states": (fields["video_indices"].numel(), self._grid.video_channels * math.prod(self._grid.patch)),
            "audio_hidden_states": (fields["audio_indices"].numel(), num_channels),
            "encoder_hidden_states": tuple(sizes["text/rows"]),
        }
        rows = {name: torch.zeros(batch, *size, dtype=dtype, device=device) for name, size in widths.items()}
        placed = {name: tensor.to(device) for name, tensor in fields.items()}
        times = {"timestep": timestep.to(device), "timestep_indices": indices.to(device)}
        return {**rows, **placed, **times, "return_dict": False}


class LTX2Sketch(_OfConfiguration):
    """LTX-2: a stream of picture and one of sound, text attended to from the side."""

    name = "ltx2"
    groups: Mapping[str, str] = {
        "attention": r"transformer_blocks\.\d+\.\w*attn\d?\.",
        "feed-forward": r"transformer_blocks\.\d+\.(?:audio_)?ff\.",
        "AdaLN": r".*scale_shift|(?:audio_)?time_embed\.|av_cross_attn_|(?:audio_)?prompt_adaln\.",
        "text": r"(?:audio_)?caption_projection\.",
        "picture in and out": r"proj_(?:in|out)\.",
        "sound in and out": r"audio_proj_(?:in|out)\.",
        "norms": r"transformer_blocks\.\d+\.\w*norm",
    }
    units = r"transformer_blocks\.\d+"

    def __init__(self, base: Path) -> None:
        from diffusers import LTX2VideoTransformer3DModel

        from models.families.ltx2 import LTX2
        from models.families.ltx2_layout import Grid

        self.lora_targets, self.text_side, self.guidance_scale = LTX2.lora_targets, LTX2.text_side, LTX2.guidance_scale
        kind = cast(Any, LTX2VideoTransformer3DModel)
        with torch.device("meta"):
            known = kind.from_config(kind.load_config(str(base / "transformer"))).config
        super().__init__(kind, known, Grid.of(base))

    def sizes(self, shape: ClipShape, mode: Mode, num_text: int) -> dict[str, tuple[int, ...]]:
        """See `Sketch`; of a reference LTX-2 takes the picture alone."""
        video, audio = self._grid.latent_shapes(shape)
        sizes = condition_sizes(mode, video, audio, {"mask": (num_text,)})
        sizes.pop("references/0/audio", None)
        return sizes

    def layout(self, shape: ClipShape, mode: Mode, sizes: Sizes) -> tuple[str, int]:
        """See `Sketch`."""
        from models.families.ltx2_layout import layout_key

        return layout_key(self._grid, shape, mode, sizes)

    def inputs(
        self, shape: ClipShape, mode: Mode, sizes: Sizes, batch: int, dtype: torch.dtype, device: str = "meta"
    ) -> dict[str, Any]:
        """See `Sketch`; only text alone has one noise level for the whole picture, as in the stock pipelines."""
        config, (_, num_rows) = self._config, self.layout(shape, mode, sizes)
        num_audio, num_text = self._grid.latent_shapes(shape)[1][2], sizes["text/mask"][0]
        num_video = num_rows - num_audio
        widths = [
            config[f"{stream}num_attention_heads"] * config[f"{stream}attention_head_dim"] for stream in ("", "audio_")
        ]
        if config["use_prompt_embeddings"]:
            widths = [config["caption_channels"]] * 2

        def zeros(*size: int, of: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(batch, *size, dtype=of, device=device)

        result = {
            "hidden_states": zeros(num_video, config["in_channels"]),
            "audio_hidden_states": zeros(num_audio, config["audio_in_channels"]),
            "encoder_hidden_states": zeros(num_text, widths[0]),
            "audio_encoder_hidden_states": zeros(num_text, widths[1]),
            "encoder_attention_mask": zeros(num_text, of=torch.long),
            "audio_encoder_attention_mask": zeros(num_text, of=torch.long),
            "timestep": zeros(*([] if mode == "t2va" else [num_video]), of=torch.float32),
            "audio_timestep": zeros(of=torch.float32),
            "sigma": zeros(of=torch.float32),
            "video_coords": zeros(3, num_video, 2, of=torch.float32),
            "audio_coords": zeros(1, num_audio, 2, of=torch.float32),
        }
        return {**result, "use_cross_timestep": bool(config["cross_attn_mod"]), "return_dict": False}
