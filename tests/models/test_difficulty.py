"""Losses over a fixed set of noise: the same for a clip whatever else there is, remembered, never guessed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from data.latent_index import LatentRow
from data.latent_shards import write_shard
from data.latents import PARTS, LatentStore, shard_name, write_index
from models.difficulty import levels, losses_of_all
from models.families import Batch, Family, Noisy, Velocities
from models.flow_matching import PICTURE, SOUND, noise_of, seed_of

SHAPE = {"num_frames": 22, "frame_rate": 24, "height": 32, "width": 32, "sample_rate_hz": 8000}


class Fake(torch.nn.Module):
    """Predicts the velocity as `scale` times the noised latents, so that its losses have a closed form."""

    name = "fake"

    def __init__(self) -> None:
        super().__init__()
        self.transformer = torch.nn.Linear(1, 1)
        self.scale, self.asked = -1.0, 0

    def sigmas(self, u_video: float, u_audio: float, batch: Batch) -> tuple[float, float]:
        """Picture and sound at different levels."""
        return u_video, u_audio**2

    def num_given_frames(self, mode: str) -> int:
        """None."""
        return 0

    def velocities(self, batch: Batch, noisy: Noisy) -> Velocities:
        """Those of a batch in the mode that is measured."""
        assert batch.mode == "t2va"
        assert set(batch.conditions) == {"text/rows"}
        assert not self.transformer.training
        self.asked += 1
        return Velocities(self.scale * noisy.video_BCFHW, self.scale * noisy.audio_BSCT)


def family(fake: Fake) -> Family:
    return cast(Family, cast(Any, fake))


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., LatentStore]:
    """A store of clips that hold one number each; those whose name begins with `silent` have no sound."""

    def make(clips: dict[str, float], folder: str = "store", variants: tuple[str, ...] = ("t2va",)) -> LatentStore:
        parts: dict[str, dict[str, dict[str, Tensor]]] = {part: {} for part in PARTS}
        rows: list[LatentRow] = []
        for name, value in sorted(clips.items()):
            parts["picture"][name] = {"video": torch.full((2, 2, 2, 2), value)}
            parts["sound"][name] = {"audio": torch.full((2, 3, 4), value)}
            parts["text"][name] = {"text/t2va/rows": torch.zeros(3, 4)}
            rows.append(
                LatentRow(
                    entry=name, clip_id=name, source_id=name, split="train", group="", canvas="tiny",
                    has_audio=not name.startswith("silent"), variants=variants, layouts=("x",) * len(variants),
                    num_tokens=(5,) * len(variants), shard="00000", keys=(f"{value:g}",) * 4, **SHAPE,
                )
            )  # fmt: skip
        for place, part in enumerate(PARTS):
            keys = {row.entry: row.keys[place] for row in rows}
            write_shard(tmp_path / folder / shard_name(part, "00000"), parts[part], keys)
        write_index(tmp_path / folder, rows, {"family": "fake", "text_of": {"t2va": "t2va"}})
        return LatentStore(tmp_path / folder)

    return make


def test_losses_are_those_of_the_fixed_noise(make_store: Callable[..., LatentStore], tmp_path: Path) -> None:
    store = make_store({"a": 0.5, "silent": 2.0})
    found = losses_of_all(family(Fake()), store, [0, 1], 3, 4, seed=7, remembered=tmp_path / "losses")
    assert found.shape == (2, 2, 3)
    for level, u in enumerate(levels(3)):
        seeds = [[seed_of(7, level, place, stream) for place in range(4)] for stream in (PICTURE, SOUND)]
        noise, sound = noise_of(seeds[0], torch.zeros(4, 2, 2, 2, 2)), noise_of(seeds[1], torch.zeros(4, 2, 3, 4))
        for clip, value in enumerate((0.5, 2.0)):
            # -(1-s) x - s n - x + n = (1-s) n - (2-s) x
            expected = ((1 - u) * noise - (2 - u) * value).square().mean()
            assert found[clip, 0, level] == pytest.approx(float(expected), rel=1e-5)
        expected = ((1 - u**2) * sound - (2 - u**2) * 0.5).square().mean()
        assert found[0, 1, level] == pytest.approx(float(expected), rel=1e-5)
    assert np.isnan(found[1, 1]).all()  # silence is missing, not easy


def test_a_clips_losses_do_not_depend_on_the_others(make_store: Callable[..., LatentStore], tmp_path: Path) -> None:
    many = make_store({"a": 0.5, "b": 1.5, "c": -1.0})
    all_of_them = losses_of_all(family(Fake()), many, [0, 1, 2], 2, 3, 0, tmp_path / "all")
    alone = losses_of_all(family(Fake()), make_store({"c": -1.0}, "alone"), [0], 2, 3, 0, tmp_path / "one")
    assert all_of_them[2].tolist() == alone[0].tolist()
    other_seed = losses_of_all(family(Fake()), many, [2], 2, 3, 1, tmp_path / "other")
    assert other_seed[0].tolist() != alone[0].tolist()


def test_a_killed_run_goes_on_and_only_changed_clips_are_asked_again(
    make_store: Callable[..., LatentStore], tmp_path: Path
) -> None:
    store, remembered = make_store({"a": 0.5, "b": 1.5, "silent": 0.0}), tmp_path / "work" / "losses"
    whole = losses_of_all(family(Fake()), store, [0, 1, 2], 2, 3, 0, remembered)
    content = remembered.read_bytes()
    remembered.write_bytes(content[: content.index(b"\n") + 20])  # the second line is torn
    fake = Fake()
    again = losses_of_all(family(fake), store, [0, 1, 2], 2, 3, 0, remembered)
    np.testing.assert_array_equal(whole, again)
    assert fake.asked == 2 * 2
    assert remembered.read_bytes() == content
    fake.asked = 0
    losses_of_all(family(fake), make_store({"a": 0.5, "b": 9.0}, "changed"), [0, 1], 2, 3, 0, remembered)
    assert fake.asked == 2


def test_what_is_no_number_is_infinite_and_what_lacks_the_mode_is_missing(
    make_store: Callable[..., LatentStore], tmp_path: Path
) -> None:
    broken = losses_of_all(family(Fake()), make_store({"a": float("nan")}), [0], 2, 1, 0, tmp_path / "broken")
    assert np.isinf(broken).all()
    store = make_store({"a": 1.0}, "other", variants=("fl2va",))
    assert np.isnan(losses_of_all(family(Fake()), store, [0], 2, 1, 0, tmp_path / "missing")).all()
