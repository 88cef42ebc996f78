"""How hard a model finds every clip: its training loss over a fixed set of noise levels and draws.

Source: Kim et al. 2024 (arXiv 2403.10348) order by the difficulty of denoising; the fixed set makes clips comparable.
Letters: N clips, M modalities (picture, sound), L noise levels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from data.latent_index import LatentRow
from data.latents import LatentStore
from data.stage import Guidance
from models.families import Batch, Family
from models.objective import Objective, at

VERSION = 2
"""Raised when the same model and noise come to mean other losses: what was remembered is then not used."""
MODE = "t2va"
"""The mode that every family has: what a clip asks of the model when nothing but text is given."""


def levels(num_noise: int) -> list[float]:
    """Positions on the noise schedule: the middles of `num_noise` equal parts of [0, 1]."""
    return [(number + 0.5) / num_noise for number in range(num_noise)]


@torch.no_grad()
def losses_of(
    family: Family, store: LatentStore, row: LatentRow, num_noise: int, num_draws: int, seed: int
) -> list[list[float | None]]:
    """Mean loss of one clip over the draws: of picture and of sound (None without), by noise level.

    The clip fills the batch alone, once a draw, so its noise depends on the level and the shape and on no other clip.
    """

    def repeated(array: Tensor) -> Tensor:
        return array[None].expand(num_draws, *array.shape).contiguous()

    objective = Objective(family, Guidance(form="none"))
    batch = Batch(
        mode=MODE,
        video_BCFHW=repeated(store.read(row, "video")),
        audio_BSCT=repeated(store.read(row, "audio")),
        has_audio_B=torch.full((num_draws,), float(row.has_audio)),
        conditions={name: repeated(array) for name, array in store.conditions(row, MODE).items()},
        frame_rate=row.frame_rate,
    )
    video: list[float | None] = []
    audio: list[float | None] = []
    for number, u in enumerate(levels(num_noise)):
        seeds = [(seed, number, place) for place in range(num_draws)]
        losses = objective.losses(batch, at(batch, *family.sigmas(u, u, batch)), seeds)
        video.append(finite(losses.video_B))
        audio.append(finite(losses.audio_B) if row.has_audio else None)
    return [video, audio]


def finite(losses_B: Tensor) -> float:
    """Their mean, infinite where it is no number: that clip is broken, not missing."""
    mean = float(losses_B.double().mean())
    return mean if math.isfinite(mean) else math.inf


def losses_of_all(
    family: Family,
    store: LatentStore,
    places: Sequence[int],
    num_noise: int,
    num_draws: int,
    seed: int,
    remembered: Path,
) -> NDArray[np.float64]:
    """`losses_of` every entry, as (N, M, L), NaN where there is none, infinite where it is no number.

    A killed run goes on where it was.

    Args:
        family: The model, as trained so far.
        store: Where the entries lie.
        places: Places of the entries in the store's index; those without the mode t2va get no loss.
        num_noise: Noise levels.
        num_draws: Draws of noise at each level.
        seed: Decides the noise.
        remembered: File that gets a line an entry; entries whose latents are those of their line are not asked again.
    """
    known = recalled(remembered)
    family.transformer.eval()
    result = np.full((len(places), 2, num_noise), np.nan)
    remembered.parent.mkdir(parents=True, exist_ok=True)
    with remembered.open("a", encoding="utf-8") as file:
        for number, place in enumerate(tqdm(places, desc="plan: loss", unit="clip", disable=None)):
            row = store.index.row(place)
            if MODE not in row.variants:
                continue
            name = f"{row.entry} {' '.join(row.keys[:3])}"  # of picture, sound and text
            if name not in known:
                known[name] = losses_of(family, store, row, num_noise, num_draws, seed)
                file.write(json.dumps({"name": name, "losses": known[name]}) + "\n")
                file.flush()
            result[number] = np.array(known[name], np.float64)
    return result


def recalled(path: Path) -> dict[str, list[list[float | None]]]:
    """Losses of an earlier run by entry and latents; a line cut short by its end is cut off."""
    known: dict[str, list[list[float | None]]] = {}
    if not path.is_file():
        return known
    text = path.read_bytes()
    lines, _, torn = text.rpartition(b"\n")
    if torn:
        path.write_bytes(lines + b"\n" if lines else b"")
    for line in lines.splitlines():
        item = json.loads(line)
        known[cast(str, item["name"])] = item["losses"]
    return known
