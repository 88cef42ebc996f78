"""Train the picture and sound autoencoders of tiny-h3 on the base half of the sample world.

Fine-tuning later shows them the other half, so base scenes are augmented: colours turned, straight edges pasted in,
chords drawn anew, sounds made louder and softer. Letters: B batch, C channels, F frames, H height, W width, T samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from data.world import LOOSE, STYLES, Half, Physics, revoiced, scene

PIXEL_MEAN, PIXEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's, which the released picture autoencoder expects."""
POSTERIOR_LOGVAR = -6.0
"""Target log-variance of the posterior: a small, fixed noise keeps the latent space smooth without a KL weight."""


class Pool(NamedTuple):
    """Base scenes in memory."""

    video_NCFHW: Tensor
    """0–1."""
    audio_NCT: Tensor


def make_sounds(num_scenes: int, first_seed: int, num_frames: int, sample_rate_hz: int) -> Tensor:
    """Sounds of base scenes, chords drawn anew for each: an autoencoder must carry any sound of the world (N, 2, T)."""
    sounds: list[Tensor] = []
    for index in range(num_scenes):
        style = revoiced(STYLES["base"], np.random.default_rng([first_seed, index]))
        seen = scene("base", first_seed + index, num_frames / 24, 24, 8, sample_rate_hz, style=style, physics=LOOSE)
        sounds.append(torch.from_numpy(seen.waveform_CT))
    return torch.stack(sounds)


def make_pool(
    num_scenes: int,
    first_seed: int,
    num_frames: int,
    size_px: int,
    sample_rate_hz: int,
    half: Half = "base",
    physics: Physics = LOOSE,
) -> Pool:
    """Render scenes of one clip each."""
    scenes = [
        scene(half, first_seed + index, num_frames / 24, 24, size_px * 3, sample_rate_hz, physics=physics)
        for index in range(num_scenes)
    ]
    video = torch.stack([torch.from_numpy(item.frames_FHWC) for item in scenes])
    video = rearrange(video, "n f (h a) (w b) c -> n c f h w a b", a=3, b=3).float().mean((-2, -1)) / 255
    return Pool(video, torch.stack([torch.from_numpy(item.waveform_CT) for item in scenes]))


def turn_colours(video_BCFHW: Tensor, generator: torch.Generator) -> Tensor:
    """Permute and scale the colour channels of every clip, so that unseen colours are not unseen to the encoder."""
    turned: list[Tensor] = []
    for clip in video_BCFHW:
        order = torch.randperm(3, generator=generator)
        gain = 0.6 + 0.8 * torch.rand(3, 1, 1, 1, generator=generator)
        offset = 0.3 * (torch.rand(3, 1, 1, 1, generator=generator) - 0.3)
        turned.append((clip[order] * gain + offset).clamp(0, 1))
    return torch.stack(turned)


def paste_edges(video_BCFHW: Tensor, generator: torch.Generator) -> Tensor:
    """Move a straight-edged patch of another clip across every second clip: boxes, not only balls."""
    pasted = video_BCFHW.clone()
    num_frames, size = video_BCFHW.shape[2], video_BCFHW.shape[-1]
    for index in range(0, len(pasted), 2):
        side = int(torch.randint(size // 6, size // 3, (), generator=generator))
        start, velocity = torch.rand(2, 2, generator=generator)
        colour = torch.rand(3, 1, 1, generator=generator)
        diamond = bool(torch.rand((), generator=generator) < 0.5)
        ramp = (torch.arange(side) - (side - 1) / 2).abs()
        distance = (
            ramp[:, None] + ramp[None] if diamond else torch.maximum(ramp[:, None], ramp[None].expand(side, side))
        )
        cover = (side / 2 - distance + 0.5).clamp(0, 1)
        for frame in range(num_frames):
            corner = ((start + (velocity - 0.5) * frame / 20) % 1) * (size - side)
            y, x = cast(list[int], corner.long().tolist())
            window = pasted[index, :, frame, y : y + side, x : x + side]
            pasted[index, :, frame, y : y + side, x : x + side] = window * (1 - cover) + colour * cover
    return pasted


def normalise_pixels(video_BCFHW: Tensor) -> Tensor:
    """0–1 pixels in the autoencoder's convention."""
    mean, std = (torch.tensor(value).view(1, 3, 1, 1, 1) for value in (PIXEL_MEAN, PIXEL_STD))
    return (video_BCFHW - mean) / std


def denormalise_pixels(pixels_BCFHW: Tensor) -> Tensor:
    """Back to 0–1, clipped."""
    mean, std = (torch.tensor(value).view(1, 3, 1, 1, 1) for value in (PIXEL_MEAN, PIXEL_STD))
    return (pixels_BCFHW * std + mean).clamp(0, 1)


def picture_loss(vae: Any, pool: Pool, generator: torch.Generator, batch_size: int) -> Tensor:
    """Squared and absolute error, weighted towards what differs from the backdrop, plus a pull on the posterior."""
    index = torch.randint(len(pool.video_NCFHW), (batch_size,), generator=generator)
    video = paste_edges(turn_colours(pool.video_NCFHW[index], generator), generator)
    pixels = normalise_pixels(video)
    posterior = vae.encode(pixels).latent_dist
    latents = posterior.mean + 0.05 * torch.randn(posterior.mean.shape, generator=generator)
    decoded = vae.decode(latents).sample
    backdrop = pixels.median(-1, True)[0].median(-2, True)[0]
    weight = 1 + 3 * ((pixels - backdrop).abs().mean(1, True) > 0.3).float()  # moving things fill a tenth of the frame
    error = (weight * ((decoded - pixels) ** 2 + 0.2 * (decoded - pixels).abs())).mean()
    return error + 1e-3 * posterior.mean.square().mean() + 1e-3 * (posterior.logvar - POSTERIOR_LOGVAR).square().mean()


def spectral_distance(left_BT: Tensor, right_BT: Tensor) -> Tensor:
    """Mean absolute difference of log magnitudes at two window lengths."""
    total = torch.zeros(())
    for window in (512, 128):
        spectra = [
            torch.stft(sound, window, window // 4, window=torch.hann_window(window), return_complex=True).abs()
            for sound in (left_BT, right_BT)
        ]
        total = total + functional.l1_loss((spectra[0] + 1e-2).log(), (spectra[1] + 1e-2).log())
    return total / 2


def sound_loss(vae: Any, audio_NCT: Tensor, generator: torch.Generator, batch_size: int) -> Tensor:
    """Waveform and spectral error over quarter-second excerpts that are not silent, plus a pull on the posterior."""
    index = torch.randint(len(audio_NCT), (batch_size,), generator=generator)
    length = 10 * vae.hop_length
    excerpts: list[Tensor] = []
    for sound in audio_NCT[index]:
        loud = (sound.abs().sum(0) > 0.02).nonzero()[:, 0]
        centre = int(loud[torch.randint(len(loud), (), generator=generator)]) if len(loud) else 0
        start = max(0, min(centre - int(torch.randint(length, (), generator=generator)), sound.shape[-1] - length))
        gain = 0.5 + float(torch.rand((), generator=generator))
        excerpts.append(gain * sound[:, start : start + length])
    audio = torch.cat(excerpts)[:, None]
    posterior = vae.encode(audio).latent_dist
    latents = posterior.mean + 0.02 * torch.randn(posterior.mean.shape, generator=generator)
    decoded = vae.decode(latents).sample[..., :length]
    error = 200 * functional.mse_loss(decoded, audio) + 5 * functional.l1_loss(decoded, audio)
    error = error + 0.1 * spectral_distance(decoded[:, 0], audio[:, 0])
    return error + 1e-3 * posterior.mean.square().mean() + 1e-3 * (posterior.logs + 3).square().mean()


def train(
    vae: Any, loss_of: Callable[[torch.Generator], Tensor], num_steps: int, learning_rate: float, seed: int
) -> None:
    """Minimise a loss with AdamW, linear warm-up and cosine decay; same seed, same weights."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(vae.parameters(), learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser,
        lambda step: (
            min(1.0, (step + 1) / 30)
            * (0.02 + 0.98 * (0.5 + 0.5 * float(torch.cos(torch.tensor(torch.pi * step / num_steps)))))
        ),
    )
    vae.train()
    progress = tqdm(range(num_steps), desc=type(vae).__name__, unit="step", disable=None, mininterval=5)
    for _ in progress:
        loss = loss_of(generator)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.3f}")
    vae.eval()


@torch.no_grad()
def set_latent_statistics(vae: Any, encoded: list[Tensor]) -> None:
    """Record each latent channel's mean and deviation in the autoencoder's configuration."""
    latents = torch.cat([rearrange(item, "b c ... -> c (b ...)") for item in encoded], dim=1)
    vae.register_to_config(
        latents_mean=[round(float(value), 6) for value in latents.mean(1)],
        latents_std=[round(max(float(value), 1e-3), 6) for value in latents.std(1)],
    )


@torch.no_grad()
def measure(picture: Any, sound: Any, pool: Pool) -> dict[str, float]:
    """Reconstruction of clips never trained on: picture PSNR (dB) and sound signal-to-noise ratio (dB)."""
    decoded = denormalise_pixels(
        picture.decode(picture.encode(normalise_pixels(pool.video_NCFHW)).latent_dist.mode()).sample
    )
    errors = (decoded - pool.video_NCFHW).square().flatten(1).mean(1)
    audio = rearrange(pool.audio_NCT, "n c t -> (n c) 1 t")
    padded = functional.pad(audio, (0, -audio.shape[-1] % sound.hop_length))
    heard = sound.decode(sound.encode(padded).latent_dist.mode()).sample[..., : audio.shape[-1]]
    ratio = audio.square().sum((1, 2)) / (audio - heard).square().sum((1, 2)).clamp_min(1e-9)
    return {
        "picture_psnr_db": round(float(-10 * errors.log10().mean()), 2),
        "sound_snr_db": round(float(10 * ratio.clamp_min(1e-3).log10().mean()), 2),
    }
