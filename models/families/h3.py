"""MiniMax-H3: one packed sequence of text, keyframes, sound and picture, through the stock modular blocks.

Conditions, layouts and time assignments come from diffusers' own blocks, so training and generation cannot disagree.
Letters: B batch, C channels, F latent frames, H height, W width, K keyframes, S text rows or the two sides of sound,
T sound latents, D text width, R rows of the packed sequence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from diffusers import MiniMaxH3Transformer3DModel, ModularPipeline
from diffusers.modular_pipelines import MiniMaxH3Blocks, MiniMaxH3ModularPipeline
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    MiniMaxH3SetTimestepsStep,
    patchify_video_latents,
)
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import audio_latent_num_frames, video_latent_num_frames
from einops import rearrange, repeat
from PIL import Image
from torch import Tensor

from data.records import ClipShape
from models.families import Batch, Condition, Frames, Losses, Waveform, forget_place
from models.flow_matching import Draw, noised, shifted, velocity

PARTS = ("text_encoder", "tokenizer", "processor", "vae", "audio_vae", "transformer", "scheduler", "audio_scheduler")
ANCHORS = {"t2va": (), "fl2va_first": ("first",), "fl2va": ("first", "last")}
"""Keyframes of each mode, in packed order."""
FRAME_RATE = 24
"""The family's fixed rate, frames a second."""


class ShortH3Pipeline(MiniMaxH3ModularPipeline):
    """The stock pipeline without its 5 s floor: a property of the class, not of the weights."""

    @property
    def min_duration(self) -> float:
        """Shortest generation, s."""
        return 0.0


class Layout(NamedTuple):
    """Where every row of the packed sequence sits."""

    fields: dict[str, Tensor]
    """What the transformer reads by name: position_ids, token_tags and three index tensors."""
    num_condition_rows: int


class H3:
    """A loaded H3, at any size. See `models.families.Family` for the contract."""

    name = "h3"
    lora_targets = r"transformer_blocks\.\d+\.(?:attn\.(?:to_q|to_k|to_v|to_out\.0)|ff\.net\.(?:0\.proj|2))"
    """Attention and feed-forward of the blocks; a plain name list would also hit the text refiner."""

    def __init__(self, base: Path, *, device: str = "cpu") -> None:
        stock = cast(Any, ModularPipeline).from_pretrained(str(base))
        components = load_parts(stock, base, device)
        self._conditioners = {mode: conditioner(mode, components) for mode in ("t2va", "fl2va")}
        self._pipe = self._conditioners["t2va"]
        self.transformer: torch.nn.Module = components["transformer"]
        self._parts: dict[str, Any] = components
        self._device = device
        self._layouts: dict[tuple[Any, ...], Layout] = {}
        for name in ("text_encoder", "vae", "audio_vae"):
            components[name].requires_grad_(False).eval()
        self._patch = cast(tuple[int, int, int], tuple(components["transformer"].config.patch_size))

    # -- grids ---------------------------------------------------------------------------------------------------------

    def check(self, shape: ClipShape) -> None:
        """Raise ValueError where the shape is not on the family's grid, naming the field and what it may be."""
        vae = self._parts["vae"]
        chunk, extra = vae.config.clip_length, vae.tokens_chunk_size
        multiple = vae.spatial_compression_ratio * self._patch[2]
        rate = self._parts["audio_vae"].config.sampling_rate
        if shape.num_frames % chunk != extra:
            raise ValueError(f"shape.num_frames = {shape.num_frames}; H3 needs {chunk}n + {extra}, e.g. 22, 39, 124")
        if shape.frame_rate != FRAME_RATE:
            raise ValueError(f"shape.frame_rate = {shape.frame_rate}; H3 runs at {FRAME_RATE} frames a second only")
        if shape.height % multiple or shape.width % multiple:
            raise ValueError(f"shape is {shape.width}x{shape.height} px; this H3 needs multiples of {multiple}")
        if shape.sample_rate_hz != rate:
            raise ValueError(f"shape.sample_rate_hz = {shape.sample_rate_hz}; this H3's sound runs at {rate} Hz")

    # -- autoencoders --------------------------------------------------------------------------------------------------

    def latent_shapes(self, shape: ClipShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of a clip's latents by formula: picture (C, F, H, W), sound (2, C, T)."""
        vae, audio_vae = self._parts["vae"], self._parts["audio_vae"]
        ratio = vae.spatial_compression_ratio
        frames = video_latent_num_frames(shape.num_frames, vae.config.clip_length, vae.tokens_chunk_size)
        video = (vae.config.latent_channels, frames, shape.height // ratio, shape.width // ratio)
        return video, (2, audio_vae.config.latent_channels, audio_latent_num_frames(shape.num_frames))

    @torch.no_grad()
    def encode_clip(self, frames_FHWC: Frames, waveform_CT: Waveform) -> tuple[Tensor, Tensor]:
        """Normalised latents by posterior mode: picture (C, F, H, W) and sound (2, C, T)."""
        vae, audio_vae = self._parts["vae"], self._parts["audio_vae"]
        video = torch.from_numpy(frames_FHWC).to(self._device)
        pixels = rearrange(video, "f h w c -> 1 c f h w").float() / 255
        pixels = (pixels - self._column(self._pipe.pixel_mean)) / self._column(self._pipe.pixel_std)
        latents = vae.encode(pixels).latent_dist.mode()
        latents = (latents - self._column(vae.config.latents_mean)) / self._column(vae.config.latents_std)
        num_latents = audio_latent_num_frames(len(frames_FHWC))
        length = num_latents * audio_vae.hop_length
        sound = torch.from_numpy(waveform_CT).to(self._device)[:, :length]
        sound = torch.nn.functional.pad(sound, (0, length - sound.shape[-1]))
        heard = audio_vae.encode(sound[:, None]).latent_dist.mode()  # the network is mono: two sides are two items
        mean, std = (
            self._column(value)[..., 0, 0] for value in (audio_vae.config.latents_mean, audio_vae.config.latents_std)
        )
        return latents[0], (heard - mean) / std

    @torch.no_grad()
    def decode(self, video_CFHW: Tensor, audio_SCT: Tensor, shape: ClipShape) -> tuple[Frames, Waveform]:
        """Pixels (F, H, W, 3) and sound (2, num_samples) of normalised latents."""
        vae, audio_vae = self._parts["vae"], self._parts["audio_vae"]
        latents = video_CFHW[None] * self._column(vae.config.latents_std) + self._column(vae.config.latents_mean)
        pixels = vae.decode(latents).sample * self._column(self._pipe.pixel_std) + self._column(self._pipe.pixel_mean)
        frames = rearrange((pixels.clamp(0, 1) * 255).round().to(torch.uint8), "1 c f h w -> f h w c")
        mean, std = (
            self._column(value)[..., 0, 0] for value in (audio_vae.config.latents_mean, audio_vae.config.latents_std)
        )
        sound = audio_vae.decode(audio_SCT * std + mean).sample[:, 0, : shape.num_samples].clamp(-1, 1)
        return frames.cpu().numpy(), sound.float().cpu().numpy()

    def _column(self, values: Any) -> Tensor:
        """Per-channel constants against (B, C, F, H, W)."""
        return torch.tensor(values, device=self._device).view(1, -1, 1, 1, 1)

    # -- conditions ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode_condition(self, prompt: str, first: Frames | None, last: Frames | None) -> Condition:
        """Encode a prompt and its keyframes with the stock blocks.

        Raises:
            ValueError: a last keyframe without a first one, which no workflow here trains.
        """
        if first is None and last is not None:
            raise ValueError("a last frame needs a first frame")
        mode = "t2va" if first is None else "fl2va_first" if last is None else "fl2va"
        images = {"image": first, "last_image": last}
        given = {name: Image.fromarray(frame) for name, frame in images.items() if frame is not None}
        if first is not None:
            given = {**given, "height": first.shape[0], "width": first.shape[1]}
        state = self._conditioners["fl2va" if given else "t2va"](prompt=prompt, num_frames=22, **given)
        text = cast(Tensor, state.get("prompt_embeds"))[0].float()
        keyframes = cast(list[Tensor], state.get("condition_latents") or [])
        channels = self._parts["vae"].config.latent_channels
        stacked = torch.cat(keyframes)[:, :, 0] if keyframes else torch.zeros(0, channels, 1, 1)
        return Condition(mode, text.cpu(), cast(Tensor, state.get("text_token_tags")).cpu(), stacked.cpu())

    # -- the packed sequence -------------------------------------------------------------------------------------------

    def layout(self, tags_S: Tensor, grid: tuple[int, int, int], num_audio_latents: int, mode: str) -> Layout:
        """The stock layout of text, keyframes, sound and picture; the same object for the same arguments."""
        key = (bytes(tags_S.to(torch.uint8).numpy()), grid, num_audio_latents, mode)
        if key not in self._layouts:
            pipe = self._pipe
            *tensors, num_condition_rows, _ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
                tags_S,
                *grid,
                num_audio_latents,
                self._patch,
                pipe.audio_channels,
                pipe.audio_tag,
                pipe.video_tag,
                ANCHORS[mode],
            )
            names = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")
            fields = {name: tensor.to(self._device) for name, tensor in zip(names, tensors, strict=True)}
            self._layouts[key] = Layout(fields, num_condition_rows)
        return self._layouts[key]

    def video_rows(self, video_BCFHW: Tensor) -> Tensor:
        """Latents as rows (B, R, C·patch)."""
        rows = patchify_video_latents(video_BCFHW, self._patch)
        return rearrange(rows, "(b r) c -> b r c", b=len(video_BCFHW))

    def predict(
        self, video_BRC: Tensor, audio_BRC: Tensor, text_BSD: Tensor, layout: Layout, sigmas: tuple[float, float]
    ) -> tuple[Tensor, Tensor]:
        """Velocities of the generated picture and sound rows at noise levels (picture, sound)."""
        fields, times = layout.fields, (1 - sigmas[0], 1 - sigmas[1])
        timestep, indices = MiniMaxH3SetTimestepsStep.build_row_timesteps(
            fields["video_indices"].cpu(),
            fields["audio_indices"].cpu(),
            layout.num_condition_rows,
            0,
            fields["text_indices"].numel(),
            times[0],
            times[1],
            max(times[0], self._pipe.keyframe_noise_aug),
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
        return video[:, layout.num_condition_rows :].float(), audio.float()

    def pinned_keyframes(self, keyframes_BKCHW: Tensor, generator: torch.Generator) -> Tensor:
        """Keyframe rows (B, R, C) at the family's conditioning level, just short of clean."""
        noise = torch.randn(keyframes_BKCHW.shape, generator=generator).to(self._device)
        level = 1 - self._pipe.keyframe_noise_aug
        rows = [
            self.video_rows(noised(frame, dots, level)[:, :, None])
            for frame, dots in zip(keyframes_BKCHW.to(self._device).unbind(1), noise.unbind(1), strict=True)
        ]
        return torch.cat(rows, dim=1)

    # -- objective and sampling ----------------------------------------------------------------------------------------

    def losses(self, batch: Batch, draw: Draw) -> Losses:
        """One forward pass: both modalities noised from one draw through two shifts, mean squared velocity error."""
        sigma_video = shifted(draw.u, self._parts["scheduler"].shift)
        sigma_audio = shifted(draw.u, self._parts["audio_scheduler"].shift)
        grid = cast(tuple[int, int, int], tuple(batch.video_BCFHW.shape[2:]))
        layout = self.layout(batch.tags_S, grid, batch.audio_BSCT.shape[-1], batch.mode)
        conditions = self.pinned_keyframes(batch.keyframes_BKCHW, draw.generator) if layout.num_condition_rows else None
        clean_video = self.video_rows(batch.video_BCFHW.to(self._device))
        clean_audio = rearrange(batch.audio_BSCT.to(self._device), "b s c t -> b (s t) c")
        noise_video = torch.randn(clean_video.shape, generator=draw.generator).to(self._device)
        noise_audio = torch.randn(clean_audio.shape, generator=draw.generator).to(self._device)
        video = noised(clean_video, noise_video, sigma_video)
        video = video if conditions is None else torch.cat([conditions, video], dim=1)
        audio = noised(clean_audio, noise_audio, sigma_audio)
        text = batch.text_BSD.to(self._device)
        predicted = self.predict(video, audio, text, layout, (sigma_video, sigma_audio))
        error_video = (predicted[0] - velocity(clean_video, noise_video)).square().mean((1, 2))
        error_audio = (predicted[1] - velocity(clean_audio, noise_audio)).square().mean((1, 2))
        # Silent clips keep the sound branch in the graph with weight zero, so every rank has the same gradients.
        return Losses(error_video, error_audio * batch.has_audio_B.to(error_audio), sigma_video, sigma_audio)

    @torch.no_grad()
    def generate(
        self, condition: Condition, shape: ClipShape, seed: int, num_inference_steps: int
    ) -> tuple[Tensor, Tensor]:
        """Denoise one request with the stock scheduler pair; noise is drawn in the stock order from `seed`."""
        generator = torch.Generator().manual_seed(seed)
        (num_channels, *grid), (_, num_audio_channels, num_audio) = self.latent_shapes(shape)
        layout = self.layout(condition.tags_S, (grid[0], grid[1], grid[2]), num_audio, condition.mode)
        keyframes = (
            self.pinned_keyframes(condition.keyframes_KCHW[None], generator) if layout.num_condition_rows else None
        )
        video = self.video_rows(torch.randn(1, num_channels, *grid, generator=generator).to(self._device))
        audio = torch.randn(2 * num_audio, num_audio_channels, generator=generator)[None].to(self._device)
        schedulers = (self._parts["scheduler"], self._parts["audio_scheduler"])
        for scheduler in schedulers:
            scheduler.set_timesteps(num_inference_steps)
        text = condition.text_SD[None].to(self._device)
        for t_video, t_audio in zip(schedulers[0].timesteps, schedulers[1].timesteps, strict=True):
            rows = video if keyframes is None else torch.cat([keyframes, video], dim=1)
            sigmas = (1 - float(t_video), 1 - float(t_audio))
            velocities = self.predict(rows, audio, text, layout, sigmas)
            video = schedulers[0].step(velocities[0], t_video, video, return_dict=False)[0]
            audio = schedulers[1].step(velocities[1], t_audio, audio, return_dict=False)[0]
        pt, ph, pw = self._patch
        latents = rearrange(
            video, "1 (f h w) (c pt ph pw) -> c (f pt) (h ph) (w pw)",
            f=grid[0] // pt, h=grid[1] // ph, w=grid[2] // pw, pt=pt, ph=ph, pw=pw,
        )  # fmt: skip
        return latents, rearrange(audio, "1 (s t) c -> s c t", s=2)

    # -- weights -------------------------------------------------------------------------------------------------------

    def load_transformer(self, folder: Path) -> None:
        """Take the transformer's weights from `folder` (diffusers layout), checking every key and shape."""
        loaded = cast(Any, MiniMaxH3Transformer3DModel).from_pretrained(str(folder), use_safetensors=True)
        self.transformer.load_state_dict(loaded.state_dict())

    def save_transformer(self, folder: Path) -> None:
        """Write the transformer to `folder` (diffusers layout)."""
        cast(Any, self.transformer).to("cpu").save_pretrained(folder)
        forget_place(folder)


def load_parts(stock: Any, base: Path, device: str) -> dict[str, Any]:
    """Every component, in full precision, from the folder itself wherever it was moved to."""
    wanted = [name for name in PARTS if name in stock.component_names]
    stock.load_components(names=wanted, pretrained_model_name_or_path=str(base), dtype=torch.float32)
    components = {name: getattr(stock, name) for name in wanted}
    for part in components.values():
        if isinstance(part, torch.nn.Module):
            part.to(device)
    return components


def conditioner(mode: str, components: dict[str, Any]) -> Any:
    """The stock workflow of a mode with its denoise and decode blocks left out: it ends at encoded conditions."""
    blocks = cast(Any, MiniMaxH3Blocks()).get_workflow(mode)
    for name in [name for name in blocks.sub_blocks if name.split(".")[0] in ("denoise", "decode")]:
        blocks.sub_blocks.pop(name)
    pipe = blocks.init_pipeline()
    pipe.__class__ = ShortH3Pipeline
    pipe.update_components(**{name: part for name, part in components.items() if name in pipe.component_names})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def count_parameters_on_meta(config: dict[str, Any]) -> int:
    """Parameters of a transformer of this configuration, without allocating one: a full-size check costs nothing."""
    with torch.device("meta"):
        model = MiniMaxH3Transformer3DModel(**config)
    return sum(int(np.prod(parameter.shape)) for parameter in model.parameters())


def repeat_condition(condition: Condition, batch_size: int) -> Tensor:
    """Text rows of one condition for a batch."""
    return repeat(condition.text_SD, "s d -> b s d", b=batch_size)
