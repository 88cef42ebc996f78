"""MiniMax-H3: one packed sequence of text, conditions, sound and picture.

Layouts and time assignments come from diffusers' own blocks, so training and generation cannot disagree.
Letters: B batch, C channels, F latent frames, H height, W width, S text rows or the two sides of sound,
T sound latents, D text width, R rows of the packed sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from models.families import Arrays, Batch, Condition, Encoders, Losses, forget_place
from models.families.h3_layout import Grid, Layout, constant, packed, places_of, sketches
from models.flow_matching import Draw, noised, shifted, velocity

PINNED: float = constant("keyframe_noise_aug")
"""Timestep that keyframes and visual references are held at, just short of clean."""


class Given(NamedTuple):
    """Conditions as rows in front of the generated ones; none where R is 0."""

    video_BRC: Tensor
    audio_BRC: Tensor


class H3:
    """A loaded H3, at any size. See `models.families.Family` for the contract."""

    name = "h3"
    lora_targets = r"transformer_blocks\.\d+\.(?:attn\.(?:to_q|to_k|to_v|to_out\.0)|ff\.net\.(?:0\.proj|2))"
    """Attention and feed-forward of the blocks; a plain name list would also hit the text refiner."""
    text_side = r"(?:context_embedder|token_refiner)\..+"
    """The projection of the conditioner's states and the refiner behind it."""

    def __init__(
        self, base: Path, *, device: str = "cpu", partition: str = "transformer", weights: Path | None = None
    ) -> None:
        self._base, self._device, self.partition = base, device, partition
        self._encoders: Encoders | None = None
        self.grid = Grid.of(sketches(base))
        self.transformer: torch.nn.Module = loaded(weights or base / partition).to(device)
        self._schedulers = [
            cast(Any, MiniMaxH3Scheduler).from_pretrained(str(base), subfolder=name)
            for name in ("scheduler", "audio_scheduler")
        ]
        self._layouts: dict[tuple[Any, ...], Layout] = {}

    @property
    def encoders(self) -> Encoders:
        """Autoencoders and text side, loaded when first used."""
        if self._encoders is None:
            from models.families.h3_encoders import H3Encoders

            self._encoders = H3Encoders(self._base, device=self._device)
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
            made = packed(self.grid, mode, tags_BS[0], grid, num_audio, places)
            fields = {name: tensor.to(self._device) for name, tensor in made.fields.items()}
            self._layouts[key] = made._replace(fields=fields)
        return self._layouts[key]

    def video_rows(self, video_BCFHW: Tensor) -> Tensor:
        """Latents as rows (B, R, C·patch)."""
        rows = patchify_video_latents(video_BCFHW, self.grid.patch)
        return rearrange(rows, "(b r) c -> b r c", b=len(video_BCFHW))

    def predict(
        self, video_BRC: Tensor, audio_BRC: Tensor, text_BSD: Tensor, layout: Layout, sigmas: tuple[float, float]
    ) -> tuple[Tensor, Tensor]:
        """Velocities of the picture and sound rows behind the conditions, at noise levels (picture, sound)."""
        fields, times = layout.fields, (1 - sigmas[0], 1 - sigmas[1])
        timestep, indices = MiniMaxH3SetTimestepsStep.build_row_timesteps(
            fields["video_indices"].cpu(),
            fields["audio_indices"].cpu(),
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
            timestep=timestep.to(self._device),
            timestep_indices=indices.to(self._device),
            return_dict=False,
            **fields,
        )
        return video[:, layout.num_condition_rows :].float(), audio[:, layout.num_condition_audio_rows :].float()

    def given(self, mode: Mode, conditions: Mapping[str, Tensor], generator: torch.Generator) -> Given:
        """Keyframes and visual references at the conditioning level, and reference sound as it is, in packed order."""
        seen: list[Tensor] = []
        heard: list[Tensor] = []
        if mode in KEYFRAMES:  # one draw for all of them: the order that earlier checkpoints were trained with
            keyframes_BKCHW = torch.stack([conditions[f"keyframe/{name}"] for name in KEYFRAMES[mode]], dim=1)
            noise = torch.randn(keyframes_BKCHW.shape, generator=generator)
            pairs = zip(keyframes_BKCHW.unbind(1), noise.unbind(1), strict=True)
            seen = [self._pinned(frame[:, :, None], dots[:, :, None]) for frame, dots in pairs]
        for place in range(len(places_of({name: array.shape for name, array in conditions.items()}))):
            for kind in ("image", "video"):
                latents = conditions.get(f"references/{place}/{kind}")
                if latents is not None:
                    seen.append(self._pinned(latents, torch.randn(latents.shape, generator=generator)))
            if f"references/{place}/audio" in conditions:
                heard.append(audio_rows(conditions[f"references/{place}/audio"].to(self._device)))
        return Given(*(torch.cat(rows, dim=1) if rows else torch.empty(0) for rows in (seen, heard)))

    def _pinned(self, latents_BCFHW: Tensor, noise: Tensor) -> Tensor:
        """Rows of a condition just short of clean."""
        return self.video_rows(noised(latents_BCFHW.to(self._device), noise.to(self._device), 1 - PINNED))

    # -- objective and sampling ----------------------------------------------------------------------------------------

    def losses(self, batch: Batch, draw: Draw) -> Losses:
        """One forward pass: both modalities noised from one draw through two shifts, mean squared velocity error.

        What is given whole (the sound of `a2v`, the picture of `v2a`) stays clean, at t = 1, and carries no loss.

        Raises:
            ValueError: a clip without sound in a mode that gives or learns nothing but sound.
        """
        if batch.mode in NEED_SOUND and not bool(batch.has_audio_B.all()):
            raise ValueError(f"a clip without sound in mode {batch.mode}; leave the mode out of its variants")
        picture_given, sound_given = batch.mode == "v2a", batch.mode == "a2v"
        sigma_video = 0.0 if picture_given else shifted(draw.u, self._schedulers[0].shift)
        sigma_audio = 0.0 if sound_given else shifted(draw.u, self._schedulers[1].shift)
        grid, num_audio = tuple(batch.video_BCFHW.shape[2:]), batch.audio_BSCT.shape[-1]
        layout = self.layout(batch.mode, batch.conditions, grid, num_audio)
        given = self.given(batch.mode, batch.conditions, draw.generator)
        clean_video = self.video_rows(batch.video_BCFHW.to(self._device).float())
        clean_audio = audio_rows(batch.audio_BSCT.to(self._device).float())
        noise_video = torch.randn(clean_video.shape, generator=draw.generator).to(self._device)
        noise_audio = torch.randn(clean_audio.shape, generator=draw.generator).to(self._device)
        video = behind(given.video_BRC, noised(clean_video, noise_video, sigma_video))
        audio = behind(given.audio_BRC, noised(clean_audio, noise_audio, sigma_audio))
        text = batch.conditions["text/rows"].to(self._device).float()
        predicted = self.predict(video, audio, text, layout, (sigma_video, sigma_audio))
        error_video = (predicted[0] - velocity(clean_video, noise_video)).square().mean((1, 2))
        error_audio = (predicted[1] - velocity(clean_audio, noise_audio)).square().mean((1, 2))
        # What carries no loss keeps its branch in the graph with weight zero, so every rank has the same gradients.
        heard = batch.has_audio_B.to(error_audio) * (not sound_given)
        return Losses(error_video * (not picture_given), error_audio * heard, sigma_video, sigma_audio)

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
        generator = torch.Generator().manual_seed(seed)
        (num_channels, *grid), (_, num_audio_channels, num_audio) = self.grid.latent_shapes(shape)
        conditions: Arrays = {name: array[None] for name, array in condition.arrays.items()}
        layout = self.layout(condition.mode, conditions, tuple(grid), num_audio)
        given = self.given(condition.mode, conditions, generator)
        video = self.video_rows(torch.randn(1, num_channels, *grid, generator=generator).to(self._device))
        audio = torch.randn(2 * num_audio, num_audio_channels, generator=generator)[None].to(self._device)
        for scheduler in self._schedulers:
            scheduler.set_timesteps(num_inference_steps)
        text = conditions["text/rows"].to(self._device)
        of_video, of_audio = self._schedulers
        for t_video, t_audio in zip(of_video.timesteps, of_audio.timesteps, strict=True):
            sigmas = (1 - float(t_video), 1 - float(t_audio))
            rows = behind(given.video_BRC, video), behind(given.audio_BRC, audio)
            velocities = self.predict(*rows, text, layout, sigmas)
            video = of_video.step(velocities[0], t_video, video, return_dict=False)[0]
            audio = of_audio.step(velocities[1], t_audio, audio, return_dict=False)[0]
        pt, ph, pw = self.grid.patch
        latents = rearrange(
            video, "1 (f h w) (c pt ph pw) -> c (f pt) (h ph) (w pw)",
            f=grid[0] // pt, h=grid[1] // ph, w=grid[2] // pw, pt=pt, ph=ph, pw=pw,
        )  # fmt: skip
        return latents, rearrange(audio, "1 (s t) c -> s c t", s=2)

    # -- weights -------------------------------------------------------------------------------------------------------

    def load_transformer(self, folder: Path) -> None:
        """Take the transformer's weights from `folder` (diffusers layout), checking every key and shape."""
        self.transformer.load_state_dict(loaded(folder).state_dict())

    def save_transformer(self, folder: Path) -> None:
        """Write the transformer to `folder` (diffusers layout)."""
        cast(Any, self.transformer).to("cpu").save_pretrained(folder)
        forget_place(folder)


def loaded(folder: Path) -> Any:
    """A transformer in full precision."""
    return cast(Any, MiniMaxH3Transformer3DModel).from_pretrained(
        str(folder), use_safetensors=True, torch_dtype=torch.float32
    )


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
