"""MiniMax-H3: one packed sequence of text, conditions, sound and picture.

Layouts and time assignments come from diffusers' own blocks, so training and generation cannot disagree.
Letters: B batch, C channels, F latent frames, H height, W width, S text rows or the two sides of sound,
T sound latents, D text width, R rows of the packed sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from diffusers import MiniMaxH3Scheduler, MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3SetTimestepsStep, patchify_video_latents
from einops import rearrange
from torch import Tensor

from data.conditions import KEYFRAMES, NEED_SOUND, Mode
from data.records import ClipShape
from models.families import Arrays, Batch, Condition, Encoders, Noisy, Velocities
from models.families.h3_layout import Grid, Layout, constant, packed, places_of, sketches
from models.families.tensor_files import filled
from models.families.weights import computes_on
from models.flow_matching import noised, shifted

PINNED: float = constant("keyframe_noise_aug")
"""Timestep that keyframes and visual references are held at, just short of clean."""


class Given(NamedTuple):
    """Conditions as rows in front of the generated ones; none where R is 0."""

    video_BRC: Tensor
    audio_BRC: Tensor


class H3:
    """A loaded H3, at any size. See `models.families.Family` for the contract."""

    name = "h3"
    blocks = r"transformer_blocks\.\d+"
    lora_targets = r"transformer_blocks\.\d+\.(?:attn\.(?:to_q|to_k|to_v|to_out\.0)|ff\.net\.(?:0\.proj|2))"
    """Attention and feed-forward of the blocks; a plain name list would also hit the text refiner."""
    modulation_targets = r"transformer_blocks\.\d+\.adaln_proj\.linear"
    text_side = r"(?:context_embedder|token_refiner)\..+"
    """The projection of the conditioner's states and the refiner behind it."""
    shared_draw = True
    guidance_scale = 4.0
    """Source: diffusion-pipe and DiffSynth-Studio, which train the released weights with it."""

    def __init__(
        self,
        base: Path,
        *,
        device: str = "cpu",
        partition: str = "transformer",
        weights: Path | None = None,
        mapped: bool = False,
    ) -> None:
        self._base, self._encoders_device, self.partition = base, device, partition
        self._encoders: Encoders | None = None
        self.grid = Grid.of(sketches(base))
        self.transformer = filled(MiniMaxH3Transformer3DModel, weights or base / partition, mapped=mapped).to(device)
        self._schedulers = [
            cast(Any, MiniMaxH3Scheduler).from_pretrained(str(base), subfolder=name)
            for name in ("scheduler", "audio_scheduler")
        ]
        self.timestep_embedding: tuple[str, int] = (
            r"time_embedder",
            int(cast(Any, self.transformer).config.time_embed_dim),
        )
        self._layouts: dict[tuple[Any, ...], Layout] = {}
        self._fields: dict[tuple[int, torch.device], dict[str, Tensor]] = {}

    @property
    def encoders(self) -> Encoders:
        """Autoencoders and text side, loaded when first used."""
        if self._encoders is None:
            from models.families.h3_encoders import H3Encoders

            self._encoders = H3Encoders(self._base, device=self._encoders_device)
        return self._encoders

    # -- the packed sequence -------------------------------------------------------------------------------------------

    def layout(
        self, mode: Mode, conditions: Mapping[str, Tensor], video_FHW: tuple[int, ...], num_audio: int
    ) -> Layout:
        """The stock layout of text, conditions, sound and picture; the same object for the same arguments.

        Args:
            mode: Conditioning mode.
            conditions: As `Batch.conditions`.
            video_FHW: Sizes of the picture latents.
            num_audio: Sound latents a side.

        Raises:
            ValueError: the texts of a batch differ in layout.
        """
        tags_BS = conditions["text/tags"].cpu()
        if bool((tags_BS != tags_BS[:1]).any()):
            raise ValueError("clips of one batch differ in the layout of their text; draw them from one layout")
        places = places_of({name: array.shape[1:] for name, array in conditions.items()})
        key = (mode, bytes(tags_BS[0].to(torch.uint8).numpy()), video_FHW, num_audio, places)
        if key not in self._layouts:
            grid = cast("tuple[int, int, int]", video_FHW)
            self._layouts[key] = packed(self.grid, mode, tags_BS[0], grid, num_audio, places)
        return self._layouts[key]

    def _on_device(self, layout: Layout, device: torch.device) -> dict[str, Tensor]:
        """The fields of a layout on a device; they stay on the CPU too, where timesteps are laid out."""
        key = (id(layout), device)  # layouts are never forgotten, so a number stays theirs
        if key not in self._fields:
            self._fields[key] = {name: tensor.to(device) for name, tensor in layout.fields.items()}
        return self._fields[key]

    def video_rows(self, video_BCFHW: Tensor) -> Tensor:
        """Latents as rows (B, R, C·patch)."""
        rows = patchify_video_latents(video_BCFHW, self.grid.patch)
        return rearrange(rows, "(b r) c -> b r c", b=len(video_BCFHW))

    def video_latents(self, rows_BRC: Tensor, video_FHW: tuple[int, ...]) -> Tensor:
        """The latents (B, C, F, H, W) that `video_rows` made rows of."""
        pt, ph, pw = self.grid.patch
        return rearrange(
            rows_BRC, "b (f h w) (c pt ph pw) -> b c (f pt) (h ph) (w pw)",
            f=video_FHW[0] // pt, h=video_FHW[1] // ph, w=video_FHW[2] // pw, pt=pt, ph=ph, pw=pw,
        )  # fmt: skip

    def predict(
        self, video_BRC: Tensor, audio_BRC: Tensor, text_BSD: Tensor, layout: Layout, sigmas: tuple[float, float]
    ) -> tuple[Tensor, Tensor]:
        """Velocities of the picture and sound rows behind the conditions, at noise levels (picture, sound)."""
        fields, times = layout.fields, (1 - sigmas[0], 1 - sigmas[1])
        timestep, indices = MiniMaxH3SetTimestepsStep.build_row_timesteps(
            fields["video_indices"],
            fields["audio_indices"],
            layout.num_condition_rows,
            layout.num_condition_audio_rows,
            fields["text_indices"].numel(),
            times[0],
            times[1],
            max(times[0], PINNED),
            1.0,
        )
        video, audio = self.transformer(
            hidden_states=video_BRC,
            audio_hidden_states=audio_BRC,
            encoder_hidden_states=text_BSD,
            timestep=timestep.to(video_BRC.device),
            timestep_indices=indices.to(video_BRC.device),
            return_dict=False,
            **self._on_device(layout, video_BRC.device),
        )
        return video[:, layout.num_condition_rows :], audio[:, layout.num_condition_audio_rows :]

    def given(self, mode: Mode, conditions: Mapping[str, Tensor], generators: Sequence[torch.Generator]) -> Given:
        """Keyframes and visual references at the conditioning level, and reference sound as it is, in packed order.

        Each clip's noise comes from a generator of its own.
        """
        seen: list[Tensor] = []
        heard: list[Tensor] = []
        if mode in KEYFRAMES:  # one draw for all of them: the order that earlier checkpoints were trained with
            frames_BKCFHW = torch.stack([conditions[f"keyframe/{name}"][:, :, None] for name in KEYFRAMES[mode]], dim=1)
            seen = [self.video_rows(frame) for frame in pinned(frames_BKCFHW, generators).unbind(1)]
        for place in range(len(places_of({name: array.shape for name, array in conditions.items()}))):
            for kind in ("image", "video"):
                latents = conditions.get(f"references/{place}/{kind}")
                if latents is not None:
                    seen.append(self.video_rows(pinned(latents, generators)))
            if f"references/{place}/audio" in conditions:
                heard.append(audio_rows(conditions[f"references/{place}/audio"]))
        return Given(*(torch.cat(rows, dim=1) if rows else torch.empty(0) for rows in (seen, heard)))

    # -- objective and sampling ----------------------------------------------------------------------------------------

    def sigmas(self, u_video: float, u_audio: float, batch: Batch) -> tuple[float, float]:  # noqa: ARG002
        """Noise levels at two positions of the published distributions: uniform, under a shift each."""
        return shifted(u_video, self._schedulers[0].shift), shifted(u_audio, self._schedulers[1].shift)

    def num_given_frames(self, batch: Batch) -> int:  # noqa: ARG002
        """None: keyframes stand in front of the picture."""
        return 0

    def velocities(self, batch: Batch, noisy: Noisy) -> Velocities:
        """One forward pass over the packed sequence. See the contract.

        Raises:
            ValueError: the clips of the batch differ in the layout of their text.
        """
        video_BCFHW, audio_BSCT = noisy.video_BCFHW, noisy.audio_BSCT
        grid, kind = tuple(video_BCFHW.shape[2:]), video_BCFHW.dtype
        layout = self.layout(batch.mode, batch.conditions, grid, audio_BSCT.shape[-1])
        generators = [torch.Generator().manual_seed(seed) for seed in noisy.seeds_B]
        given = self.given(batch.mode, {name: item.to(kind) for name, item in latents(batch)}, generators)
        video = behind(given.video_BRC, self.video_rows(video_BCFHW))
        audio = behind(given.audio_BRC, audio_rows(audio_BSCT))
        text = batch.conditions["text/rows"].to(video)
        rows = self.predict(video, audio, text, layout, (noisy.sigma_video, noisy.sigma_audio))
        return Velocities(
            self.video_latents(rows[0].to(kind), grid), rearrange(rows[1].to(kind), "b (s t) c -> b s c t", s=2)
        )

    @torch.no_grad()
    def generate(
        self, condition: Condition, shape: ClipShape, seed: int, num_inference_steps: int
    ) -> tuple[Tensor, Tensor]:
        """Denoise one request with the stock scheduler pair; noise is drawn in the stock order from `seed`.

        Raises:
            ValueError: the condition gives the sound or the picture whole, which no stock workflow generates from.
        """
        if condition.mode in NEED_SOUND:
            raise ValueError(f"mode {condition.mode} is for training only; generate from text, keyframes or references")
        generator, device = torch.Generator().manual_seed(seed), computes_on(self.transformer)
        (num_channels, *grid), (_, num_audio_channels, num_audio) = self.grid.latent_shapes(shape)
        conditions: Arrays = {name: array[None].to(device) for name, array in condition.arrays.items()}
        layout = self.layout(condition.mode, conditions, tuple(grid), num_audio)
        given = self.given(condition.mode, conditions, [generator])
        video = self.video_rows(torch.randn(1, num_channels, *grid, generator=generator).to(device))
        audio = torch.randn(2 * num_audio, num_audio_channels, generator=generator)[None].to(device)
        for scheduler in self._schedulers:
            scheduler.set_timesteps(num_inference_steps)
        text = conditions["text/rows"]
        of_video, of_audio = self._schedulers
        for t_video, t_audio in zip(of_video.timesteps, of_audio.timesteps, strict=True):
            sigmas = (1 - float(t_video), 1 - float(t_audio))
            rows = behind(given.video_BRC, video), behind(given.audio_BRC, audio)
            velocities = [rows.float() for rows in self.predict(*rows, text, layout, sigmas)]
            video = of_video.step(velocities[0], t_video, video, return_dict=False)[0]
            audio = of_audio.step(velocities[1], t_audio, audio, return_dict=False)[0]
        return self.video_latents(video, tuple(grid))[0], rearrange(audio, "1 (s t) c -> s c t", s=2)


def latents(batch: Batch) -> list[tuple[str, Tensor]]:
    """The conditions that are latents, by name."""
    return [(name, array) for name, array in batch.conditions.items() if not name.startswith("text/")]


def pinned(latents: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Conditions (B, …) just short of clean, each clip's noise from a generator of its own."""
    noise = torch.stack([torch.randn(latents.shape[1:], generator=generator) for generator in generators])
    return noised(latents, noise.to(latents), 1 - PINNED)


def audio_rows(audio_BSCT: Tensor) -> Tensor:
    """Sound latents as rows (B, R, C), side by side."""
    return rearrange(audio_BSCT, "b s c t -> b (s t) c")


def behind(given_BRC: Tensor, rows_BRC: Tensor) -> Tensor:
    """Generated rows behind the conditions, if there are any."""
    return torch.cat([given_BRC, rows_BRC], dim=1) if given_BRC.numel() else rows_BRC


def count_parameters_on_meta(config: dict[str, Any]) -> int:
    """Parameters of a transformer of this configuration, without allocating one: a full-size check costs nothing."""
    with torch.device("meta"):
        model = MiniMaxH3Transformer3DModel(**config)
    return sum(int(np.prod(parameter.shape)) for parameter in model.parameters())
