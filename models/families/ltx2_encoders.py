"""LTX-2 between media and latents: its autoencoders, its vocoder and its text side, from a diffusers folder.

Serves 2.0 (one projection of the text, 24 kHz vocoder) and 2.3 (a projection for either modality, 48 kHz), as the
folder's own configuration says.
Letters: B batch, C channels, F frames, H height, W width, S text rows, D text width, T sound samples or latents,
M mel bands.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from diffusers import LTX2Pipeline
from diffusers.pipelines.ltx2.connectors import per_layer_masked_mean_norm
from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf, resolve_default_image_crf
from diffusers.video_processor import VideoProcessor
from einops import rearrange
from PIL import Image
from torch import Tensor
from transformers.audio_utils import mel_filter_bank

from data.conditions import MODES, Mode, Variant
from data.latents import SHARED
from data.records import ClipShape
from models.families import Arrays, Frames, Posterior, Reference, Waveform
from models.families.ltx2_layout import FRAME_RATE, Grid, layout_key

HOMES = {"diffusers": "diffusers", "transformers": "transformers", "ltx2": "diffusers.pipelines.ltx2"}
"""Module of each library that a folder's `model_index.json` may name."""
STOCK = cast(Any, LTX2Pipeline)
TEXT_LENGTH = 1024
"""Tokens of a caption, padded on the left; the pipeline's own default."""
WINDOW = 1024
"""Samples of one Fourier transform. Source: the LTX-2 trainer's mel spectrogram, 64 ms at 16 kHz."""
QUIETEST = 1e-5
"""Magnitude that the logarithm is clamped at. Source: likewise."""
SAMPLE_SEED = 0


class LTX2Encoders:
    """The encoders of an LTX-2, at any size. See `models.families.Encoders` for the contract.

    Every part is loaded when it is first needed: the transformer never, the vocoder only to decode.
    """

    name = "ltx2"
    frame_rate = FRAME_RATE
    modes: tuple[Mode, ...] = MODES
    parts: Mapping[str, tuple[str, ...]] = {
        "picture": ("vae", "text_encoder/config.json"),  # which names the generation that keyframes are coded for
        "sound": ("audio_vae",),
        "text": ("text_encoder", "tokenizer", "connectors"),
        "references": ("vae", "text_encoder/config.json"),
    }
    text_sees = False

    def __init__(self, base: Path, *, device: str = "cpu") -> None:
        self._base, self._device = base, device
        self.grid = Grid.of(base)
        self.sample_rate_hz = self.grid.sample_rate_hz

    # -- parts ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _vae(self) -> Any:
        return load_part(self._base, "vae", self._device, torch_dtype=torch.float32)

    @cached_property
    def _audio_vae(self) -> Any:
        return load_part(self._base, "audio_vae", self._device, torch_dtype=torch.float32)

    @cached_property
    def _vocoder(self) -> Any:
        return load_part(self._base, "vocoder", self._device, torch_dtype=torch.float32)

    @cached_property
    def _text_side(self) -> Any:
        """The stock pipeline with its text side alone, in the precision that its weights are stored in."""
        encoder = load_part(self._base, "text_encoder", self._device, dtype="auto")
        connectors = load_part(self._base, "connectors", self._device, torch_dtype=encoder.dtype)
        tokenizer = load_part(self._base, "tokenizer", self._device)
        others = dict.fromkeys(("scheduler", "vae", "audio_vae", "transformer", "vocoder"))
        return STOCK(text_encoder=encoder, tokenizer=tokenizer, connectors=connectors, **others)

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
        """Sizes of a clip's latents by formula: picture (C, F, H, W), sound (1, C, T) as at inference."""
        return self.grid.latent_shapes(shape)

    def layout(self, shape: ClipShape, mode: Mode, conditions: Mapping[str, Sequence[int]]) -> tuple[str, int]:
        """What clips must have in common to share a batch, and the tokens of both streams together."""
        return layout_key(self.grid, shape, mode, conditions)

    # -- autoencoders --------------------------------------------------------------------------------------------------

    def move(self, device: str) -> str:
        """Take the autoencoders and the vocoder to a device, and say where they were; the text side stays."""
        before, self._device = self._device, device
        for part in (self._vae, self._audio_vae, self._vocoder):
            part.to(device)
        return before

    def encode_picture(self, frames_BFHWC: Frames, posterior: Posterior = "mode") -> Tensor:
        """Normalised picture latents (B, C, F, H, W), not packed."""
        return self._latents(self._pixels(frames_BFHWC), posterior)

    @torch.no_grad()
    def encode_sound(self, waveform_BCT: Waveform, shape: ClipShape, posterior: Posterior = "mode") -> Tensor:
        """Normalised sound latents (B, 1, C, T), of the length that inference generates for `shape`.

        The network takes both sides at once; C is its channels by mel bands, as the transformer's tokens hold them.
        """
        sound = torch.from_numpy(np.ascontiguousarray(waveform_BCT)).to(self._device)[..., : shape.num_samples]
        sound = torch.nn.functional.pad(sound, (0, shape.num_samples - sound.shape[-1]))
        mel = log_mel(sound, self.grid.sample_rate_hz, self.grid.hop, self.grid.num_mels)
        latents = _drawn(self._audio_vae.encode(mel).latent_dist, posterior)
        tokens = STOCK._pack_audio_latents(latents)  # noqa: SLF001
        tokens = STOCK._normalize_audio_latents(tokens, *self._sound_scale())  # noqa: SLF001
        # The encoder gives floor(s) + 1 latents for s seconds' worth and inference round(s): never fewer.
        num_latents = self.grid.latent_shapes(shape)[1][-1]
        return rearrange(tokens[:, :num_latents], "b t c -> b 1 c t").cpu().contiguous()

    @torch.no_grad()
    def decode(self, video_CFHW: Tensor, audio_SCT: Tensor, shape: ClipShape) -> tuple[Frames, Waveform]:
        """Pixels (F, H, W, 3) and stereo sound of normalised latents, at `decoded_rate_hz`.

        The causal sound decoder makes 30 ms less than its latents stand for; up to 50 ms of silence fill the end.
        """
        vae, num_samples = self._vae, round(shape.duration_s * self.decoded_rate_hz)
        latents = STOCK._denormalize_latents(  # noqa: SLF001
            video_CFHW[None].to(self._device), vae.latents_mean, vae.latents_std, vae.config.scaling_factor
        )
        # Decoders that take a timestep are told "clean", the pipeline's default, which also adds no noise.
        timestep = torch.zeros(1, device=self._device) if vae.config.timestep_conditioning else None
        pixels = vae.decode(latents, timestep).sample / 2 + 0.5
        frames = rearrange((pixels.clamp(0, 1) * 255).round().to(torch.uint8), "1 c f h w -> f h w c")
        tokens = rearrange(audio_SCT.to(self._device), "1 c t -> 1 t c")
        tokens = STOCK._denormalize_audio_latents(tokens, *self._sound_scale())  # noqa: SLF001
        heard = rearrange(tokens, "1 t (c m) -> 1 c t m", m=self.grid.num_bands)
        sound = self._vocoder(self._audio_vae.decode(heard).sample)[0, :, :num_samples].clamp(-1, 1)
        sound = torch.nn.functional.pad(sound, (0, num_samples - sound.shape[-1]))
        return frames.cpu().numpy(), sound.cpu().numpy()

    @property
    def decoded_rate_hz(self) -> int:
        """Samples a second of decoded sound: 24,000 in 2.0, 48,000 in 2.3."""
        return int(_read(self._base / "vocoder" / "config.json")["output_sampling_rate"])

    @torch.no_grad()
    def _latents(self, pixels_BCFHW: Tensor, posterior: Posterior) -> Tensor:
        vae = self._vae
        latents = _drawn(vae.encode(pixels_BCFHW.to(self._device)).latent_dist, posterior)
        scale = (vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
        return STOCK._normalize_latents(latents, *scale).cpu()  # noqa: SLF001

    def _pixels(self, frames_BFHWC: Frames) -> Tensor:
        """Pixels as the autoencoder takes them, -1 to 1."""
        video = torch.from_numpy(np.ascontiguousarray(frames_BFHWC)).to(self._device)
        return rearrange(video, "b f h w c -> b c f h w").float() / 127.5 - 1

    def _sound_scale(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of sound latents, one a channel and mel band."""
        return self._audio_vae.latents_mean, self._audio_vae.latents_std

    # -- conditions ----------------------------------------------------------------------------------------------------

    def encode_keyframe(self, frame_HWC: Frames) -> Tensor:
        """Normalised latents (C, H, W) of one frame, compressed by H.264 first as generation does.

        Source: diffusers' `apply_image_conditioning_crf`; the model was trained on keyframes out of compressed video.
        """
        seen = apply_image_conditioning_crf(np.ascontiguousarray(frame_HWC), self._keyframe_crf)
        return self._latents(self._pixels(seen[None, None]), "mode")[0, :, 0].contiguous()

    @cached_property
    def _keyframe_crf(self) -> int:
        kind = _read(self._base / "text_encoder" / "config.json").get("model_type")
        return resolve_default_image_crf(SimpleNamespace(config=SimpleNamespace(model_type=kind)))

    def encode_references(self, references: Sequence[Reference], shape: ClipShape) -> Arrays:
        """Latents of ordered references, named `PLACE/image` or `PLACE/video` (C, F, H, W), at the clip's size.

        A video is cut to the clip's length and to whole latents; its sound is not used.

        Raises:
            ValueError: none, or one that has no picture: LTX-2 takes no sound for a reference.
        """
        if not references:
            raise ValueError("no references given; ref2va needs at least one picture or video")
        arrays: Arrays = {}
        for place, reference in enumerate(references):
            if reference.kind == "audio" or reference.frames_FHWC is None:
                raise ValueError(
                    f"reference {place} is {reference.kind} without a picture; LTX-2 takes images and videos only"
                )
            limit = 1 if reference.kind == "image" else min(len(reference.frames_FHWC), shape.num_frames)
            kept = [Image.fromarray(frame) for frame in reference.frames_FHWC[: self.grid.kept_frames(limit)]]
            fit = VideoProcessor(vae_scale_factor=self.grid.spatial, resample="bilinear")
            pixels = fit.preprocess_video(cast(Any, kept), shape.height, shape.width, resize_mode="crop")
            arrays[f"{place}/{reference.kind}"] = self._latents(pixels, "mode")[0].contiguous()
        return arrays

    @torch.no_grad()
    def encode_text(
        self,
        mode: Mode,  # noqa: ARG002 - text is the same in every mode
        prompt: str | None,
        keyframes: Sequence[Frames] = (),  # noqa: ARG002
        references: Sequence[Reference] = (),  # noqa: ARG002
        shape: ClipShape | None = None,  # noqa: ARG002
    ) -> Arrays:
        """A caption behind its projection, in the connectors' precision; `text_streams` makes of it what the model reads.

        2.3 has `video` (S, D) and `audio` (S, D) behind the connectors. 2.0 has `shared` (S, D) in front of them: what
        both are made of, in half the bytes. Either has `mask` (S,).
        """
        side = self._text_side
        length = min(TEXT_LENGTH, side.tokenizer.model_max_length)
        states, mask, _, _ = side.encode_prompt(
            prompt or "", do_classifier_free_guidance=False, max_sequence_length=length, device=self._device
        )
        return {name: array[0].cpu() for name, array in projected_text(side.connectors, states, mask).items()}

    def text_of(self, variant: str) -> str:
        """Name under which a variant's text is stored: no mode, keyframe or reference changes it."""
        return "t2va" if Variant.parse(variant).captioned else f"{SHARED}/uncaptioned"


def projected_text(connectors: Any, states_BSD: Tensor, mask_BS: Tensor) -> Arrays:
    """What is stored of a text encoder's states, by the names of `encode_text`, with a batch axis."""
    if connectors.config.per_modality_projections:
        video, audio, mask = connectors(states_BSD, mask_BS, padding_side="left")
        return {"video": video, "audio": audio, "mask": mask.to(torch.uint8)}
    layers = cast(Tensor, cast(Any, states_BSD).unflatten(2, (connectors.config.caption_channels, -1)))
    even = per_layer_masked_mean_norm(layers, mask_BS.sum(-1), states_BSD.device, padding_side="left")
    return {"shared": connectors.text_proj_in(even), "mask": mask_BS.to(torch.uint8)}


def text_streams(connectors: Any, text: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """What the transformer attends to, from a batch of `encode_text`: picture and sound rows (B, S, D), mask (B, S).

    Args:
        connectors: Those of the model; only texts of 2.0 run through them.
        text: By the names of `encode_text`.
    """
    mask = text["mask"].long()
    if "shared" not in text:
        return text["video"], text["audio"], mask
    shared = text["shared"]
    hidden = (mask[:, None, None] - 1).to(shared.dtype) * torch.finfo(shared.dtype).max
    video, hidden_after = connectors.video_connector(shared, hidden)
    audio, _ = connectors.audio_connector(shared, hidden)
    seen = (hidden_after < 1e-6).long().view(mask.shape)  # the stock test, which passes every row
    return video * seen[..., None], audio, seen


def log_mel(waveform_BCT: Tensor, sample_rate_hz: int, hop: int, num_mels: int) -> Tensor:
    """Log-mel magnitudes (B, C, T, M) in front of the sound autoencoder, a frame every `hop` samples from time zero.

    Source: the LTX-2 trainer's settings: centred Hann windows, magnitude, Slaney's scale and norm up to half the rate.
    """
    sound = rearrange(waveform_BCT, "b c t -> (b c) t")
    window = torch.hann_window(WINDOW, device=sound.device)
    magnitude = torch.stft(sound, WINDOW, hop, window=window, center=True, return_complex=True).abs()
    mel = _filters(sample_rate_hz, num_mels).to(magnitude) @ magnitude
    return rearrange(mel.clamp(min=QUIETEST).log(), "(b c) m t -> b c t m", b=len(waveform_BCT))


@cache
def _filters(sample_rate_hz: int, num_mels: int) -> Tensor:
    """Weight of every frequency in every mel band (M, frequencies)."""
    bank = mel_filter_bank(
        WINDOW // 2 + 1, num_mels, 0.0, sample_rate_hz / 2, sample_rate_hz, norm="slaney", mel_scale="slaney"
    )
    return torch.from_numpy(bank.T.copy()).float()


def _drawn(distribution: Any, posterior: Posterior) -> Tensor:
    """Its mode, or a draw that is the same whatever an item is encoded beside."""
    if posterior == "mode":
        return distribution.mode()
    mean = cast(Tensor, distribution.mean)
    noise = torch.randn(mean.shape[1:], generator=torch.Generator().manual_seed(SAMPLE_SEED))
    return mean + distribution.std * noise.to(mean)


def load_part(base: Path, name: str, device: str, **options: object) -> Any:
    """One part of the model in `base`, of the class that its `model_index.json` names, frozen.

    Raises:
        RuntimeError: the part is not there.
    """
    library, kind = _read(base / "model_index.json")[name]
    home = importlib.import_module(HOMES[library])
    part = getattr(home, kind).from_pretrained(str(_found(base / name)), **options)
    return part.to(device).requires_grad_(requires_grad=False).eval() if isinstance(part, torch.nn.Module) else part


def _read(path: Path) -> dict[str, Any]:
    return json.loads(_found(path).read_text(encoding="utf-8"))


def _found(path: Path) -> Path:
    if not path.exists():
        raise RuntimeError(f"no {path}; set `base` to a whole LTX-2 in the diffusers layout")
    return path
