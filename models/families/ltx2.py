"""LTX-2 and 2.3: a stream of picture tokens and one of sound tokens, text attended to from the side.

Packing, coordinates, timesteps and schedule are those of diffusers' LTX2Pipeline, LTX2ConditionPipeline and
LTX2InContextPipeline. The network predicts noise - x0; its sign is turned here, once.
Letters: B batch, C channels, F latent frames, H height, W width, S text rows, T sound latents, D text width,
R tokens of the picture stream.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTX2VideoTransformer3DModel
from diffusers.pipelines.ltx2 import pipeline_ltx2
from einops import rearrange
from torch import Tensor

from data.conditions import KEYFRAMES, NEED_SOUND, Mode
from data.records import ClipShape
from models.families import Arrays, Batch, Condition, Encoders, Noisy, Velocities
from models.families.ltx2_encoders import LTX2Encoders, load_part, text_streams
from models.families.ltx2_levels import sigma_at
from models.families.tensor_files import filled
from models.families.weights import computes_on

TIMESTEPS = 1000
"""The network is told the noise level times this."""


class Given(NamedTuple):
    """What does not change from step to step of one generation."""

    text_BSD: tuple[Tensor, Tensor, Tensor]
    """What picture and sound attend to, and its mask (B, S)."""
    leading_BRC: Tensor
    """Clean tokens in the place of the first ones."""
    appended_BRC: Tensor
    """Clean tokens behind the generated ones."""
    places_B3R2: Tensor
    """Where every picture token begins and ends, appended ones too: seconds, px, px."""
    times_B1T2: Tensor
    """When every sound token begins and ends, s."""


class LTX2:
    """A loaded LTX-2, at any size. See `models.families.Family` for the contract."""

    name = "ltx2"
    blocks = r"transformer_blocks\.\d+"
    lora_targets = (
        r"transformer_blocks\.\d+\.(?:\w*attn\d?\.(?:to_q|to_k|to_v|to_out\.0)|(?:audio_)?ff\.net\.(?:0\.proj|2))"
    )
    """Attention, across the streams too, and feed-forward of both."""
    modulation_targets = (
        r"(?:(?:audio_)?(?:time_embed|prompt_adaln)|av_cross_attn_\w+)\.(?:emb\.timestep_embedder\.linear_[12]|linear)"
    )
    """They serve all blocks; what a block adds of its own is a table, which takes no adapter."""
    text_side = r"(?:audio_)?(?:caption_projection|prompt_adaln)\..+"
    """2.0 projects the text, 2.3 scales it by noise level."""
    shared_draw = False
    """Source: the LTX-2 trainer's flexible strategy, which draws for each modality on its own."""
    guidance_scale = 1.0
    """The base weights are not distilled; nothing in a diffusers folder tells distilled ones apart."""

    def __init__(
        self,
        base: Path,
        *,
        device: str = "cpu",
        partition: str = "transformer",
        weights: Path | None = None,
        mapped: bool = False,
    ) -> None:
        self._base, self.partition = base, partition
        self._encoders = LTX2Encoders(base, device=device)
        self.grid = self._encoders.grid
        self.transformer = filled(LTX2VideoTransformer3DModel, weights or base / partition, mapped=mapped).to(device)
        config = cast(Any, self.transformer).config
        width = int(config.num_attention_heads * config.attention_head_dim)
        self.timestep_embedding: tuple[str, int] = (r"time_embed\.emb\.timestep_embedder", width)
        self._scheduler = cast(Any, FlowMatchEulerDiscreteScheduler).from_pretrained(str(base), subfolder="scheduler")

    @property
    def encoders(self) -> Encoders:
        """Autoencoders and text side; each part is loaded when first used."""
        return self._encoders

    @cached_property
    def _connectors(self) -> Any:
        """Those of 2.0, whose texts are stored in front of them: frozen, in the precision they encode in."""
        return load_part(self._base, "connectors", "cpu")

    # -- the two streams -----------------------------------------------------------------------------------------------

    def tokens(self, video_BCFHW: Tensor) -> Tensor:
        """Picture latents as tokens (B, R, C·patch)."""
        pt, ph, pw = self.grid.patch
        return rearrange(video_BCFHW, "b c (f pt) (h ph) (w pw) -> b (f h w) (c pt ph pw)", pt=pt, ph=ph, pw=pw)

    def given(
        self, mode: Mode, conditions: Mapping[str, Tensor], video_FHW: Sequence[int], num_audio: int, frame_rate: int
    ) -> Given:
        """Text and clean tokens of a mode, with the coordinates of all tokens.

        A first frame takes the place of the tokens that are there; other keyframes and references are appended.

        Raises:
            ValueError: the keyframes or references are not those of the mode.
        """
        check_conditions(mode, conditions, (video_FHW[0] - 1) * self.grid.temporal + 1)
        text = self._text(conditions)
        num_clips, device = len(text[0]), text[0].device
        network = cast(Any, self.transformer)

        def places(latents_FHW: Sequence[int]) -> Tensor:
            return network.rope.prepare_video_coords(num_clips, *latents_FHW, device, fps=frame_rate)

        seen, where = list[Tensor](), [places(video_FHW)]
        for frame, name in sorted(
            (self.pixel_frame(name, video_FHW[0]), name)
            for name in conditions
            if name.startswith("keyframe/") and name != "keyframe/first"
        ):
            latents = conditions[name][:, :, None]
            seen.append(self.tokens(latents))
            where.append(places(latents.shape[2:]))
            where[-1][:, 0] = torch.tensor([frame, frame + 1.0], device=device) / frame_rate
        for name in sorted(
            (name for name in conditions if name.startswith("references/")), key=lambda name: int(name.split("/")[1])
        ):
            seen.append(self.tokens(conditions[name]))
            where.append(places(conditions[name].shape[2:]))
        none = text[0].new_empty(num_clips, 0, self.grid.video_channels * int(np.prod(self.grid.patch)))
        first = conditions.get("keyframe/first")
        return Given(
            text,
            none if first is None else self.tokens(first[:, :, None]),
            torch.cat(seen, dim=1) if seen else none,
            torch.cat(where, dim=2),
            network.audio_rope.prepare_audio_coords(num_clips, num_audio, device),
        )

    def pixel_frame(self, keyframe: str, num_latent_frames: int) -> int:
        """Frame of the clip that an appended keyframe is placed at, by its name `keyframe/N` or `keyframe/last`.

        The last one is placed at the first frame of the last latent, as by LTX2ConditionPipeline's index -1.
        """
        name = keyframe.removeprefix("keyframe/")
        return (num_latent_frames - 2) * self.grid.temporal + 1 if name == "last" else int(name)

    @torch.no_grad()
    def _text(self, conditions: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """What the transformer attends to; texts of 2.0 run through the connectors, which are never trained."""
        text = {name.removeprefix("text/"): array for name, array in conditions.items() if name.startswith("text/")}
        connectors = self._connectors.to(text["shared"]) if "shared" in text else None
        return text_streams(connectors, text)

    def predict(
        self, video_BRC: Tensor, audio_BTC: Tensor, given: Given, sigmas: tuple[float, float]
    ) -> tuple[Tensor, Tensor]:
        """Velocities of picture and sound tokens at noise levels (picture, sound); given tokens are at none."""
        dtype, num_leading = cast(Any, self.transformer).dtype, given.leading_BRC.shape[1]
        parts = [given.leading_BRC, video_BRC[:, num_leading:], given.appended_BRC]
        of_video, of_audio = (video_BRC.new_full((len(video_BRC),), s, dtype=torch.float32) * TIMESTEPS for s in sigmas)
        timestep = of_video
        if num_leading or parts[2].shape[1]:  # else one for all tokens, as the stock text pipeline has it
            noisy = torch.cat([torch.full_like(part[..., 0], index == 1) for index, part in enumerate(parts)], dim=1)
            timestep = of_video[:, None] * noisy.float()
        picture, sound, mask = given.text_BSD
        video, audio = self.transformer(
            hidden_states=torch.cat([part.to(video_BRC) for part in parts], dim=1).to(dtype),
            audio_hidden_states=audio_BTC.to(dtype),
            encoder_hidden_states=picture.to(dtype),
            audio_encoder_hidden_states=sound.to(dtype),
            timestep=timestep,
            audio_timestep=of_audio,
            sigma=of_video,
            audio_sigma=of_audio,
            encoder_attention_mask=mask,
            audio_encoder_attention_mask=mask,
            video_coords=given.places_B3R2,
            audio_coords=given.times_B1T2,
            # 2.3 looks across the streams at the other's noise level, 2.0 at its own.
            use_cross_timestep=cast(Any, self.transformer).config.cross_attn_mod,
            return_dict=False,
        )
        return -video[:, : video_BRC.shape[1]].to(video_BRC), -audio.to(audio_BTC)

    def latents(self, tokens_BRC: Tensor, video_FHW: Sequence[int]) -> Tensor:
        """Tokens as picture latents (B, C, F, H, W)."""
        pt, ph, pw = self.grid.patch
        f, h, _ = (size // patch for size, patch in zip(video_FHW, self.grid.patch, strict=True))
        return rearrange(
            tokens_BRC, "b (f h w) (c pt ph pw) -> b c (f pt) (h ph) (w pw)", f=f, h=h, pt=pt, ph=ph, pw=pw
        )

    # -- objective and sampling ----------------------------------------------------------------------------------------

    def sigmas(self, u_video: float, u_audio: float, batch: Batch) -> tuple[float, float]:
        """Noise levels at two positions of the published distributions; each modality's depends on its own tokens."""
        return (
            sigma_at(u_video, self.grid.tokens(batch.video_BCFHW.shape[2:])),
            sigma_at(u_audio, batch.audio_BSCT.shape[-1]),
        )

    def num_given_frames(self, batch: Batch) -> int:
        """One where the first frame is a keyframe: others are appended and lie in no latent of the clip."""
        return int("keyframe/first" in batch.conditions)

    def velocities(self, batch: Batch, noisy: Noisy) -> Velocities:
        """One forward pass; conditions are clean, so `noisy.seeds_B` decides nothing.

        Raises:
            ValueError: a clip without sound where sound is given or all that is learnt, what is given is noisy, or
                conditions that are not the mode's.
        """
        if batch.mode in NEED_SOUND and not bool(batch.has_audio_B.all()):
            raise ValueError(f"a clip without sound in mode {batch.mode}; leave the mode out of its variants")
        sigmas = (noisy.sigma_video, noisy.sigma_audio)
        if batch.mode in NEED_SOUND and (level := sigmas[batch.mode == "a2v"]):
            raise ValueError(f"what mode {batch.mode} gives lies at noise level {level:g}; it must lie at 0")
        grid = noisy.video_BCFHW.shape[2:]
        given = self.given(batch.mode, batch.conditions, grid, noisy.audio_BSCT.shape[-1], batch.frame_rate)
        audio = rearrange(noisy.audio_BSCT, "b 1 c t -> b t c")
        video, audio = self.predict(self.tokens(noisy.video_BCFHW), audio, given, sigmas)
        return Velocities(self.latents(video, grid), rearrange(audio, "b t c -> b 1 c t"))

    @torch.no_grad()
    def generate(
        self, condition: Condition, shape: ClipShape, seed: int, num_inference_steps: int
    ) -> tuple[Tensor, Tensor]:
        """Denoise one request with the stock schedule, without guidance; noise is drawn in the stock order from `seed`.

        Raises:
            ValueError: the condition gives the sound or the picture whole, or is not its mode's.
        """
        if condition.mode in NEED_SOUND:
            raise ValueError(f"mode {condition.mode} is for training only; generate from text, keyframes or references")
        (num_channels, *grid), (_, num_audio_channels, num_audio) = self.grid.latent_shapes(shape)
        device = computes_on(self.transformer)
        conditions: Arrays = {name: array[None].to(device) for name, array in condition.arrays.items()}
        given = self.given(condition.mode, conditions, grid, num_audio, shape.frame_rate)
        generator, num_tokens = torch.Generator().manual_seed(seed), given.places_B3R2.shape[2]
        if condition.mode == "t2va" and num_tokens == self.grid.tokens(grid):
            video = self.tokens(torch.randn(1, num_channels, *grid, generator=generator))
            bands = (num_audio_channels // self.grid.num_bands, num_audio, self.grid.num_bands)
            audio = rearrange(torch.randn(1, *bands, generator=generator), "1 c t m -> 1 t (c m)")
        else:  # stock pipelines with conditions draw tokens, for clean ones too
            width = num_channels * int(np.prod(self.grid.patch))
            video = torch.randn(1, num_tokens, width, generator=generator)[:, : self.grid.tokens(grid)]
            audio = torch.randn(1, num_audio, num_audio_channels, generator=generator)
        video, audio = video.to(device), audio.to(device)
        schedulers = [self._scheduled(num_inference_steps, num_tokens, device) for _ in "va"]
        leading = given.leading_BRC
        for sigma, _ in zip(schedulers[0].sigmas.tolist(), schedulers[0].timesteps, strict=False):
            velocities = self.predict(video, audio, given, (sigma, sigma))
            video, audio = (
                stepped(scheduler, latents, velocity)
                for scheduler, latents, velocity in zip(schedulers, (video, audio), velocities, strict=True)
            )
        video = torch.cat([leading.to(video), video[:, leading.shape[1] :]], dim=1)
        return self.latents(video, grid)[0], rearrange(audio, "1 t c -> 1 c t")

    def _scheduled(self, num_inference_steps: int, num_tokens: int, device: torch.device) -> Any:
        """The stock scheduler at its start, shifted by the tokens of the picture's stream."""
        scheduler, config = copy.deepcopy(self._scheduler), self._scheduler.config
        named = ("base_image_seq_len", 1024), ("max_image_seq_len", 4096), ("base_shift", 0.95), ("max_shift", 2.05)
        shift = cast(Any, pipeline_ltx2).calculate_shift
        mu = shift(num_tokens, *(config.get(name, default) for name, default in named))
        levels = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps)
        scheduler.set_timesteps(sigmas=levels, mu=mu, device=device)
        scheduler.set_begin_index(0)
        return scheduler


def check_conditions(mode: Mode, conditions: Mapping[str, Tensor], num_frames: int) -> None:
    """Raise ValueError where keyframes or references are not those of the mode, or a keyframe is not in the clip."""
    frames = sorted(name.removeprefix("keyframe/") for name in conditions if name.startswith("keyframe/"))
    wanted = frames if mode == "kf2va" else list(KEYFRAMES.get(mode, ()))
    if frames != wanted or (mode == "kf2va" and not frames):
        needed = "some" if mode == "kf2va" else " and ".join(wanted) or "none"
        raise ValueError(f"keyframes of mode {mode}: {' and '.join(frames) or 'none'} given, {needed} needed")
    outside = [name for name in frames if name.isdecimal() and not 0 < int(name) < num_frames]
    if outside:
        raise ValueError(
            f"keyframe/{outside[0]} is not in frames 1 to {num_frames - 1} of the clip; frame 0 is keyframe/first"
        )
    references = [name for name in conditions if name.startswith("references/")]
    if bool(references) != (mode == "ref2va"):
        raise ValueError(f"references of mode {mode}: {', '.join(references) or 'none'} given")
    heard = [name for name in references if name.endswith("/audio")]
    if heard:
        raise ValueError(f"{heard[0]}: LTX-2 takes images and videos only")


def stepped(scheduler: Any, latents: Tensor, velocity: Tensor) -> Tensor:
    """One step of the schedule, through the estimate of clean data, which rounds as the stock pipelines do."""
    index = scheduler.step_index or 0
    sigma = scheduler.sigmas[index]
    clean = latents + velocity * sigma
    return scheduler.step((latents - clean) / sigma, scheduler.timesteps[index], latents, return_dict=False)[0]
