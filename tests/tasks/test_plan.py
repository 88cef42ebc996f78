from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from data.curriculum import Planned
from data.files import read_records, write_records
from data.latents import LatentRow, LatentStore, write_index, write_shard
from data.records import Clip
from tasks.plan import Config, plan, run

MOTION = {"a": 0.04, "b": 0.01, "c": 0.02, "d": 0.03, "held": 0.9}
TOKENS = {"a": 100, "b": 300, "c": 100, "d": 200, "held": 900}


@pytest.fixture
def settings(tmp_path: Path, make_clip: Callable[..., Clip]) -> dict[str, Any]:
    """Four training clips and one held out, in a latent store and a table of clips."""
    clips = [make_clip(name, clip_id=name, motion_p50=motion) for name, motion in MOTION.items()]
    write_records(tmp_path / "clips.parquet", clips, Clip)
    latents = tmp_path / "latents"
    write_shard(latents / "shard.safetensors", {name: {"video": np.zeros(1, np.float32)} for name in TOKENS})
    rows = [
        LatentRow(
            clip_id=name, source_id=name, split="test" if name == "held" else "train", group="new" if name < "c" else "",
            has_audio=True, shard="shard.safetensors", modes="t2va", layout="1", num_tokens=num_tokens,
        )
        for name, num_tokens in TOKENS.items()
    ]  # fmt: skip
    write_index(latents, rows, "abc", {})
    return {
        "clips": tmp_path / "clips.parquet",
        "latents": latents,
        "curriculum": tmp_path / "curriculum.parquet",
        "picture": tmp_path / "curriculum.png",
    }


def test_difficulty_is_the_rank_of_the_weighted_ranks_of_training_clips(settings: dict[str, Any]) -> None:
    planned = run(Config.model_validate({**settings, "weights": {"motion": 0.75, "tokens": 0.25}}))
    assert planned == read_records(settings["curriculum"], Planned)
    ranks = {row.clip_id: (row.motion, row.tokens) for row in planned}
    third, two_thirds = round(1 / 3, 6), round(2 / 3, 6)
    sixth = round(1 / 6, 6)  # a and c share ranks 0 and 1 of 3
    assert ranks == {"a": (1.0, sixth), "b": (0.0, 1.0), "c": (third, sixth), "d": (two_thirds, two_thirds)}
    # Mixed: a 0.792, b 0.25, c 0.292, d 0.667.
    assert {row.clip_id: row.difficulty for row in planned} == {"a": 1.0, "b": 0.0, "c": third, "d": two_thirds}
    assert [row.group for row in planned] == ["new", "new", "", ""]


def test_weights_choose_the_feature(settings: dict[str, Any]) -> None:
    clips = {clip.clip_id: clip for clip in read_records(settings["clips"], Clip)}
    rows = [*LatentStore(settings["latents"]).rows.values()]
    planned = plan(rows, clips, {"tokens": 1.0})
    assert {row.clip_id: row.difficulty for row in planned} == {row.clip_id: row.tokens for row in planned}


def test_planning_again_gives_the_same_bytes(settings: dict[str, Any]) -> None:
    written: list[bytes] = []
    for _ in range(2):
        run(Config.model_validate(settings))
        written.append(settings["curriculum"].read_bytes() + settings["picture"].read_bytes())
    assert settings["picture"].read_bytes().startswith(b"\x89PNG")
    assert written[0] == written[1]


@pytest.mark.parametrize("weights", [{"length": 1.0}, {"motion": 0.0}, {}])
def test_weights_without_a_known_feature_are_refused(settings: dict[str, Any], weights: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match="motion and tokens"):
        Config.model_validate({**settings, "weights": weights})
