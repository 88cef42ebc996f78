"""A tiny guidance-distilled model, and how much of the distillation a model still has.

Released weights were distilled: their prediction with a caption is v0 + s (v - v0) of an ordinary model's, v with and v0
without the caption. The same is made here at the size of the shipped model: an ordinary *teacher* that knows captions
left out, and a *student* taught its guided predictions. As the teacher stays at hand, what tuning wears off can be
measured and not only seen: how near a prediction lies to the guided one, and which scale s' fits it best.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.behaviour_runs import PLACES, batch_of, tuned
from data.candidates import candidates_of
from data.latents import LatentStore
from data.sampler import Sampler
from data.stage import NoiseLevels, Stage
from models.families import Batch, Family, Noisy
from models.families.weights import save_transformer
from models.flow_matching import CONDITIONS, PICTURE, SOUND, noise_of, noised, seed_of
from models.loading import read_batch
from models.objective import Levels, at, levels_of
from models.sft import learning_rate_factor

SCALE = 3.0
"""Of the guidance that is distilled."""


class Kept(NamedTuple):
    """What a model has of the distillation, on clips that nothing was trained on."""

    scale: float
    """s' of v0 + s' (v - v0) that fits the prediction best: `SCALE` when all is kept, 1 when all is lost."""
    distance: float
    """Squared distance to the guided prediction, in those of the ordinary one to it: 0 when all is kept."""


def noisy_of(batch: Batch, levels: Levels, step: int) -> Noisy:
    """A batch on its path to noise, as the objective puts it there."""
    seeds = [(0, step, place) for place in range(len(batch.has_audio_B))]
    pairs = (batch.video_BCFHW, PICTURE, levels.sigma_video), (batch.audio_BSCT, SOUND, levels.sigma_audio)
    made = [noised(x, noise_of([seed_of(*seed, kind) for seed in seeds], x), sigma) for x, kind, sigma in pairs]
    pinned = tuple(seed_of(*seed, CONDITIONS) for seed in seeds)
    return Noisy(made[0], made[1], levels.sigma_video, levels.sigma_audio, pinned)


def with_and_without(family: Family, batch: Batch, noisy: Noisy) -> tuple[Tensor, Tensor]:
    """Velocities of picture and sound as one row a clip, with the caption and without."""
    bare = batch._replace(conditions=batch.uncaptioned, uncaptioned={})
    found = [family.velocities(given, noisy) for given in (batch, bare)]
    with_text, without = (
        torch.cat([part.flatten(1) / part[0].numel() ** 0.5 for part in velocities], 1) for velocities in found
    )
    return with_text, without


def distilled(model: Path, teacher: Path, store: LatentStore, stage: Stage, folder: Path) -> Path:
    """A checkpoint that predicts with a caption what the teacher does under guidance, and without one as the teacher."""
    first, student = tuned(model, teacher), tuned(model, teacher)
    sampler = Sampler(candidates_of(store.index), stage, 0)
    optimiser = torch.optim.AdamW(student.transformer.parameters(), stage.learning_rate, (0.9, 0.95), weight_decay=0)
    student.transformer.train()
    for step in range(stage.num_steps):
        batch = read_batch(store, sampler.batch(step), bare=True)
        noisy = noisy_of(batch, levels_of(student, NoiseLevels(), batch, 0, step), step)
        with torch.no_grad():
            with_text, without = with_and_without(first, batch, noisy)
        wanted = without + SCALE * (with_text - without), without
        found = with_and_without(student, batch, noisy)
        loss = sum((one - other).square().sum(1).mean() for one, other in zip(found, wanted, strict=True))
        optimiser.param_groups[0]["lr"] = stage.learning_rate * learning_rate_factor(step, stage)
        optimiser.zero_grad()
        torch.as_tensor(loss).backward()
        torch.nn.utils.clip_grad_norm_(student.transformer.parameters(), 1.0)
        optimiser.step()
    save_transformer(student, folder / "transformer")
    return folder


@torch.no_grad()
def kept(model: Path, teacher: Path, checkpoint: Path, store: LatentStore, entries: Sequence[str]) -> Kept:
    """How much of the distillation a checkpoint has, over the same noise at the same levels."""
    first, family = tuned(model, teacher), tuned(model, checkpoint)
    along = across = distance = 0.0
    for entry in entries:
        batch = batch_of(store, [entry], "t2va", bare=True)
        for number, place in enumerate(PLACES):
            levels = at(batch, *first.sigmas(place, place, batch))
            noisy = noisy_of(batch, levels, 1000 + number)
            with_text, without = with_and_without(first, batch, noisy)
            found = with_and_without(family, batch, noisy)[0]
            step = with_text - without
            along += float(((found - without) * step).sum())
            across += float(step.square().sum())
            distance += float((found - without - SCALE * step).square().sum())
    return Kept(round(along / across, 3), round(distance / across / (SCALE - 1) ** 2, 3))
