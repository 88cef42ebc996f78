"""The training objective: squared error of the velocity in both modalities, and what keeps the model's guidance.

The same for every family: what differs stands in `models.families.Family`. Letters: B clips, see `models.families`.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from data.conditions import NEED_SOUND
from data.stage import Guidance, NoiseLevels
from models.families import Batch, Family, Noisy, Velocities
from models.flow_matching import (
    CONDITIONS,
    PICTURE,
    SOUND,
    logit_normal,
    min_snr,
    noise_of,
    noised,
    positions,
    seed_of,
    shifted,
    velocity,
)


class Levels(NamedTuple):
    """Noise levels of one forward pass, and what errors at them count."""

    sigma_video: float
    sigma_audio: float
    weight_video: float = 1.0
    weight_audio: float = 1.0
    u: float = 0.0
    """Position of the picture's on its distribution."""


class Losses(NamedTuple):
    """Of one forward pass, per clip, without weights."""

    video_B: Tensor
    """Mean squared error of the velocity; zero where the picture is given."""
    audio_B: Tensor
    """Zero for clips without sound, and where the sound is given."""
    drift_video_B: Tensor
    """Mean squared distance to the first weights' velocities; zero unless they are held near."""
    drift_audio_B: Tensor


def guidance_of(guidance: Guidance, family: Family) -> Guidance:
    """`family` replaced by what that means: contrast at the scale that the weights were distilled with, or none."""
    scale = guidance.scale or family.guidance_scale
    if guidance.form == "family":
        form = "contrast" if family.guidance_scale > 1 else "none"
        return guidance.model_copy(update={"form": form, "scale": scale})
    if guidance.form == "contrast" and scale <= 1:
        raise ValueError(f"guidance.form contrast: {family.name} was not distilled with guidance; set guidance.scale")
    return guidance.model_copy(update={"scale": scale})


def levels_of(family: Family, noise: NoiseLevels, batch: Batch, seed: int, number: int) -> Levels:
    """The `number`-th draw of noise levels; what the mode gives whole lies at 0."""
    shared = family.shared_draw if noise.draws == "family" else noise.draws == "shared"
    u_video, u_audio = positions(seed, number, shared=shared)
    if noise.distribution == "family":
        sigmas = family.sigmas(u_video, u_audio, batch)
    else:
        places = (u_video, u_audio)
        if noise.distribution == "logit_normal":
            places = tuple(logit_normal(u, noise.logit_mean, noise.logit_std) for u in places)
        sigmas = shifted(places[0], noise.shift_video), shifted(places[1], noise.shift_audio)
    return at(batch, *sigmas, noise.min_snr_gamma, u_video)


def at(batch: Batch, sigma_video: float, sigma_audio: float, gamma: float | None = None, u: float = 0.0) -> Levels:
    """Given noise levels, with the weights that min-SNR gives errors at them."""
    sigma_video = 0.0 if batch.mode == "v2a" else sigma_video
    sigma_audio = 0.0 if batch.mode == "a2v" else sigma_audio
    weights = (1.0, 1.0) if gamma is None else (min_snr(sigma_video, gamma), min_snr(sigma_audio, gamma))
    return Levels(sigma_video, sigma_audio, *weights, u)


class Objective:
    """Losses of batches under one family and form of guidance preservation.

    Args:
        family: Its transformer is the one that is trained.
        guidance: As `guidance_of` gives it.
        adapter: Name of the adapter that is trained, if one is: switched off, the first weights are back.
        shared: Let the first weights lie in the family's memory, which is about to be sharded and so left as it is.
    """

    def __init__(self, family: Family, guidance: Guidance, adapter: str | None = None, *, shared: bool = False) -> None:
        self._family, self._guidance, self._adapter = family, guidance, adapter
        self.first: Family | None = None
        """The family with weights that stay as they are now, where `drift` needs a copy of them."""
        if guidance.form == "drift" and adapter is None:
            self.first = cast(Family, copy.copy(cast(Any, family)))
            given = [(item, item.data if shared else item.data.clone()) for item in family.transformer.parameters()]
            known: dict[int, Any] = {id(item): torch.nn.Parameter(data, requires_grad=False) for item, data in given}
            self.first.transformer = copy.deepcopy(family.transformer, known)

    def losses(self, batch: Batch, levels: Levels, seeds: Sequence[tuple[int, int, int]]) -> Losses:
        """One forward pass, and one more without gradients where guidance is preserved by contrast or drift.

        Args:
            batch: Clips of one mode and layout.
            levels: As `levels_of` gives them.
            seeds: Of each clip's noise: (seed, step, place in the global batch).

        Raises:
            ValueError: a clip without sound in a mode that gives or learns nothing but sound.
        """
        if batch.mode in NEED_SOUND and not bool(batch.has_audio_B.all()):
            raise ValueError(f"a clip without sound in mode {batch.mode}; leave the mode out of its variants")
        noise_video = noise_of([seed_of(*seed, PICTURE) for seed in seeds], batch.video_BCFHW)
        noise_audio = noise_of([seed_of(*seed, SOUND) for seed in seeds], batch.audio_BSCT)
        noisy = Noisy(
            noised(batch.video_BCFHW, noise_video, levels.sigma_video),
            noised(batch.audio_BSCT, noise_audio, levels.sigma_audio),
            levels.sigma_video,
            levels.sigma_audio,
            tuple(seed_of(*seed, CONDITIONS) for seed in seeds),
        )
        predicted = self._guided(batch, noisy)
        target = Velocities(velocity(batch.video_BCFHW, noise_video), velocity(batch.audio_BSCT, noise_audio))
        video_B, audio_B = self._errors(batch, predicted, target)
        if self._guidance.form != "drift":
            return Losses(video_B, audio_B, torch.zeros_like(video_B), torch.zeros_like(audio_B))
        with torch.no_grad(), self._first() as first:
            held = first.velocities(batch, noisy)
        return Losses(video_B, audio_B, *self._errors(batch, predicted, held))

    def _guided(self, batch: Batch, noisy: Noisy) -> Velocities:
        """The prediction that the data's velocity is asked of."""
        predicted = self._family.velocities(batch, noisy)
        if self._guidance.form != "contrast" or not batch.uncaptioned:
            return predicted
        with torch.no_grad():
            bare = self._family.velocities(batch._replace(conditions=batch.uncaptioned, uncaptioned={}), noisy)
        scale = cast(float, self._guidance.scale)
        pairs = zip(predicted, bare, strict=True)
        return Velocities(*((with_text + (scale - 1) * without) / scale for with_text, without in pairs))

    def _errors(self, batch: Batch, predicted: Velocities, target: Velocities) -> tuple[Tensor, Tensor]:
        """Mean squared difference per clip, of what is generated.

        What carries no loss keeps its branch in the graph with weight zero, so every process has the same gradients.
        """
        given = self._family.num_given_frames(batch)
        difference = predicted.video_BCFHW - target.video_BCFHW
        video_B = difference[:, :, given:].square().flatten(1).mean(1)
        audio_B = (predicted.audio_BSCT - target.audio_BSCT).square().flatten(1).mean(1)
        heard_B = batch.has_audio_B.to(audio_B) * (batch.mode != "a2v")
        return video_B * (batch.mode != "v2a"), audio_B * heard_B

    @contextmanager
    def _first(self) -> Generator[Family]:
        """The family with the weights that training began with."""
        if self._adapter is None:
            yield cast(Family, self.first)
            return
        transformer = cast(Any, self._family.transformer)
        transformer.disable_adapters()
        try:
            yield self._family
        finally:
            transformer.enable_adapters()
