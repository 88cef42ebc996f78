"""MiniMax-H3 between media and latents: its autoencoders and text side, through the stock modular blocks.

Letters: B batch, C channels, F frames, H height, W width, S text rows or the two sides of sound, D text width,
T sound samples or latents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from diffusers import ModularPipeline
from diffusers.modular_pipelines import MiniMaxH3ModularPipeline
from diffusers.modular_pipelines.minimax_h3 import encoders as stock
from diffusers.modular_pipelines.minimax_h3.before_encoder import MiniMaxH3Ref2VASetupStep
from diffusers.modular_pipelines.minimax_h3.references import (
    MiniMaxH3AudioReference,
    MiniMaxH3ImageReference,
    MiniMaxH3Reference,
    MiniMaxH3VideoReference,
)
from einops import rearrange
from PIL import Image
from torch import Tensor

from data.conditions import KEYFRAMES, NEED_SOUND, Mode, Variant
from data.latents import SHARED
from data.records import ClipShape
from models.families import Arrays, Frames, Posterior, Reference, Waveform
from models.families.h3_layout import FRAME_RATE, MODES, Grid, check_mode, constant, layout_key, sketches

PIXEL_MEAN, PIXEL_STD, ENCODE_SEED = (constant(name) for name in ("pixel_mean", "pixel_std", "keyframe_encode_seed"))
"""The stock pipeline's pixel convention, and the seed of its draws from a posterior."""
TEXT = ("text_encoder", "tokenizer", "processor")
SIZES = "modular_model_index.json"
"""File that says how large references are made, for the autoencoders and for the text side."""
NO_CAPTION = " "
"""What is said without a caption where nothing else is in the text: the conditioner fails on no tokens at all, and a
space is one token that says nothing. With keyframes or references the text is their labels and vision blocks alone."""
BLOCKS = {
    "t2va": stock.MiniMaxH3TextEncoderStep,
    "fl2va": stock.MiniMaxH3FL2VATextEncoderStep,
    "setup": MiniMaxH3Ref2VASetupStep,
    "ref2va": stock.MiniMaxH3Ref2VATextEncoderStep,
    "references": stock.MiniMaxH3Ref2VAReferenceEncoderStep,
}
"""The stock block of each piece of work; run one by one, so that no autoencoder runs for a text."""


class ShortH3Pipeline(MiniMaxH3ModularPipeline):
    """The stock pipeline without its 5 s floor: a property of the class, not of the weights."""

    @property
    def min_duration(self) -> float:
        """Shortest generation, s."""
        return 0.0


class H3Encoders:
    """The encoders of an H3, at any size; weights are loaded when first used. See `models.families.Encoders` for the contract."""

    name = "h3"
    frame_rate = FRAME_RATE
    modes: tuple[Mode, ...] = MODES
    parts: Mapping[str, tuple[str, ...]] = {
        "picture": ("vae",),
        "sound": ("audio_vae",),
        "text": (*TEXT, SIZES),
        "references": ("vae", "audio_vae", SIZES),
    }
    text_sees = True

    def __init__(self, base: Path, *, device: str = "cpu") -> None:
        self._sketches = sketches(base)
        self.grid = Grid.of(self._sketches)
        self.sample_rate_hz = self.grid.sample_rate_hz
        self._base, self._device = base, device
        self._blocks: dict[str, ShortH3Pipeline] = {}

    @cached_property
    def _media(self) -> dict[str, Any]:
        """The autoencoders, loaded when first used."""
        return load_parts(self._base, ("vae", "audio_vae"), self._device)

    @cached_property
    def _text(self) -> dict[str, Any]:
        """The text side, loaded when first used."""
        return load_parts(self._base, TEXT, self._device)

    def _run(self, name: str, **given: Any) -> Any:
        """What a stock block makes of its inputs, with no more of the model loaded than it uses."""
        if name not in self._blocks:
            parts = {} if name == "setup" else self._media if name == "references" else self._text
            self._blocks[name] = alone(BLOCKS[name](), self._base, {**self._sketches, **parts})
        return cast(Any, self._blocks[name])(**given)

    # -- grids ---------------------------------------------------------------------------------------------------------

    def shape(self, duration_s: float, height: float, width: float) -> ClipShape:
        """The clip on the family's grid: the longest that `duration_s` fills, sides rounded to its multiple.

        Raises:
            ValueError: the duration is below the family's shortest.
        """
        return self.grid.shape(duration_s, height, width)

    def check(self, shape: ClipShape) -> None:
        """Raise ValueError where the shape is not on the family's grid."""
        self.grid.check(shape)

    def latent_shapes(self, shape: ClipShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of a clip's latents by formula: picture (C, F, H, W), sound (2, C, T)."""
        return self.grid.latent_shapes(shape)

    def layout(self, shape: ClipShape, mode: Mode, conditions: Mapping[str, Sequence[int]]) -> tuple[str, int]:
        """What clips must have in common to share a batch, and the rows of their packed sequence."""
        return layout_key(self.grid, shape, mode, conditions)

    # -- autoencoders --------------------------------------------------------------------------------------------------

    def move(self, device: str) -> str:
        """Take the autoencoders to a device, and say where they were; the text side stays."""
        before, self._device = self._device, device
        for part in self._media.values():
            part.to(device)
        return before

    @torch.no_grad()
    def encode_picture(self, frames_BFHWC: Frames, posterior: Posterior = "mode") -> Tensor:
        """Normalised picture latents (B, C, F, H, W)."""
        video = torch.from_numpy(frames_BFHWC).to(self._device)
        pixels = rearrange(video, "b f h w c -> b c f h w").float() / 255
        pixels = (pixels - self._column(PIXEL_MEAN)) / self._column(PIXEL_STD)
        latents = self._drawn(self._media["vae"].encode(pixels).latent_dist, posterior)
        config = self._media["vae"].config
        return ((latents - self._column(config.latents_mean)) / self._column(config.latents_std)).cpu()

    @torch.no_grad()
    def encode_sound(self, waveform_BCT: Waveform, shape: ClipShape, posterior: Posterior = "mode") -> Tensor:
        """Normalised sound latents (B, 2, C, T), of the length that inference generates for `shape`."""
        length = self.grid.latent_shapes(shape)[1][-1] * self.grid.hop
        sound = torch.from_numpy(waveform_BCT).to(self._device)[..., :length]
        sound = torch.nn.functional.pad(sound, (0, length - sound.shape[-1]))
        mono = rearrange(sound, "b s t -> (b s) 1 t")  # the network is mono: two sides are two items
        latents = self._drawn(self._media["audio_vae"].encode(mono).latent_dist, posterior)
        mean, std = self._sound_scale()
        return rearrange((latents - mean) / std, "(b s) c t -> b s c t", b=len(sound)).cpu()

    @torch.no_grad()
    def decode(self, video_CFHW: Tensor, audio_SCT: Tensor, shape: ClipShape) -> tuple[Frames, Waveform]:
        """Pixels (F, H, W, 3) and sound (2, num_samples) of normalised latents."""
        config = self._media["vae"].config
        latents = video_CFHW[None].to(self._device) * self._column(config.latents_std) + self._column(
            config.latents_mean
        )
        pixels = self._media["vae"].decode(latents).sample
        pixels = pixels * self._column(PIXEL_STD) + self._column(PIXEL_MEAN)
        frames = rearrange((pixels.clamp(0, 1) * 255).round().to(torch.uint8), "1 c f h w -> f h w c")
        mean, std = self._sound_scale()
        sound = self._media["audio_vae"].decode(audio_SCT.to(self._device) * std + mean).sample
        return frames.cpu().numpy(), sound[:, 0, : shape.num_samples].clamp(-1, 1).float().cpu().numpy()

    @property
    def decoded_rate_hz(self) -> int:
        """Samples a second of decoded sound."""
        return self.sample_rate_hz

    def _drawn(self, distribution: Any, posterior: Posterior) -> Tensor:
        """Its mode, or a draw that is the same whatever an item is encoded beside."""
        if posterior == "mode":
            return distribution.mode()
        mean = cast(Tensor, distribution.mean)
        generator = torch.Generator().manual_seed(ENCODE_SEED)
        return mean + distribution.std * torch.randn(mean.shape[1:], generator=generator).to(mean)

    def _column(self, values: Any) -> Tensor:
        """Per-channel constants against (B, C, F, H, W)."""
        return torch.tensor(values, device=self._device).view(1, -1, 1, 1, 1)

    def _sound_scale(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of sound latents, against (B, C, T)."""
        config = self._media["audio_vae"].config
        return self._column(config.latents_mean)[..., 0, 0], self._column(config.latents_std)[..., 0, 0]

    # -- conditions ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode_keyframe(self, frame_HWC: Frames) -> Tensor:
        """Normalised latents (C, H, W) of one frame: a draw by a fixed seed in half precision, as the stock block does."""
        pixels = rearrange(torch.from_numpy(frame_HWC.copy()).to(self._device), "h w c -> 1 c 1 h w")
        latents = stock.encode_vae_condition(self._media["vae"], pixels, PIXEL_MEAN, PIXEL_STD, ENCODE_SEED)
        return latents[0, :, 0]

    def encode_references(self, references: Sequence[Reference], shape: ClipShape) -> Arrays:
        """Latents of ordered references, named `PLACE/image`, `PLACE/video` (C, F, H, W), `PLACE/audio` (2, C, T).

        Raises:
            ValueError: none, more than 9 images, 3 videos, 3 sounds or 12 in all, sound alone, or a video too short.
        """
        normalized = self._normalized(references, shape)
        state = self._run("references", normalized_references=normalized)
        seen, heard = iter(state.get("condition_latents")), iter(state.get("audio_condition_latents"))
        arrays: Arrays = {}
        for place, reference in enumerate(normalized):
            if reference.kind != "audio":
                arrays[f"{place}/{reference.kind}"] = next(seen)[0]
            if reference.has_audio:
                arrays[f"{place}/audio"] = rearrange(next(heard), "(s t) c -> s c t", s=2).contiguous()
        return arrays

    def encode_text(
        self,
        mode: Mode,
        prompt: str | None,
        keyframes: Sequence[Frames] = (),
        references: Sequence[Reference] = (),
        shape: ClipShape | None = None,
    ) -> Arrays:
        """What the conditioner makes of a prompt: `rows` (S, D), and `tags` (S,), the modality of every row.

        Raises:
            ValueError: no such mode, other keyframes than the mode has, or references without a shape.
        """
        check_mode(mode)
        wanted = KEYFRAMES.get(mode, ())
        if len(keyframes) != len(wanted):
            raise ValueError(f"{len(keyframes)} keyframes given; {mode} takes {', '.join(wanted) or 'none'}")
        if mode == "ref2va":
            if shape is None:
                raise ValueError("references without a shape: how much of them is used depends on it")
            given = {"normalized_references": self._normalized(references, shape)}
            state = self._run("ref2va", prompt=prompt or "", **given)
        elif keyframes:
            images = [Image.fromarray(frame) for frame in keyframes]
            state = self._run("fl2va", prompt=prompt or "", keyframes=images)
        else:
            state = self._run("t2va", prompt=prompt or NO_CAPTION)
        rows = cast(Tensor, state.get("prompt_embeds"))[0].float()
        return {"rows": rows.cpu(), "tags": cast(Tensor, state.get("text_token_tags")).to("cpu", torch.uint8)}

    def text_of(self, variant: str) -> str:
        """Name under which a variant's text is stored; given sound or picture changes no text."""
        facts = Variant.parse(variant)
        if facts.mode == "t2va" or facts.mode in NEED_SOUND:
            return "t2va" if facts.captioned else f"{SHARED}/uncaptioned"
        return variant

    def _normalized(self, references: Sequence[Reference], shape: ClipShape) -> list[Any]:
        """References at the family's rates and sizes, by the stock set-up."""
        given = [self._stock(reference, shape) for reference in references]
        size = {"height": shape.height, "width": shape.width, "num_frames": shape.num_frames}
        return self._run("setup", references=given, **size).get("normalized_references")

    def _stock(self, reference: Reference, shape: ClipShape) -> MiniMaxH3Reference:
        """A reference as the stock blocks take it.

        A video is cut to the frames that the autoencoder keeps of it; the stock text block would read up to 16 more,
        and then the text's layout would not follow from the latents' size.
        """
        frames, waveform = reference.frames_FHWC, reference.waveform_CT
        sound = None if waveform is None else torch.from_numpy(waveform)
        if reference.kind == "audio" and sound is not None:
            return MiniMaxH3AudioReference(sound)
        if reference.kind == "image" and frames is not None:
            return MiniMaxH3ImageReference(Image.fromarray(frames[0]))
        if reference.kind == "video" and frames is not None:
            length, (chunk, extra) = min(len(frames), shape.num_frames), (self.grid.chunk, self.grid.extra)
            kept = max(1, (length - extra) // chunk) * chunk + extra
            return MiniMaxH3VideoReference(frames[: min(length, kept)], audio=sound)
        raise ValueError(f"a reference of kind {reference.kind} without its {reference.kind}")


def load_parts(base: Path, names: Sequence[str], device: str) -> dict[str, Any]:
    """Components by name, in full precision and frozen, from the folder itself wherever it was moved to."""
    pipe = cast(Any, ModularPipeline).from_pretrained(str(base))
    pipe.load_components(names=list(names), pretrained_model_name_or_path=str(base), dtype=torch.float32)
    components = {name: getattr(pipe, name) for name in names}
    for part in components.values():
        if isinstance(part, torch.nn.Module):
            part.to(device).requires_grad_(requires_grad=False).eval()
    return components


def alone(block: Any, base: Path, parts: Mapping[str, Any]) -> ShortH3Pipeline:
    """A pipeline of one stock block, configured as the model's folder says."""
    pipe = block.init_pipeline(str(base))
    pipe.__class__ = ShortH3Pipeline
    pipe.update_components(**{name: part for name, part in parts.items() if name in pipe.component_names})
    for name in parts.keys() - set(pipe.component_names):
        setattr(pipe, name, parts[name])  # a block reads sizes and rates off parts that it does not run
    return pipe
