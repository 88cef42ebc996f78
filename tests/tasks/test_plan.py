from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import stats

from data.curriculum import Planned
from data.files import read_records, write_records
from data.latent_index import LatentRow
from data.latents import LatentStore, write_index
from data.records import Clip
from tasks import plan_picture
from tasks.plan import Config, run

NUM_CLIPS = 40
FEATURES = ("motion", "tokens", "cuts", "caption", "sound", "sync", "quality", "loss")
STAGE = {"conditions": {"t2va": 1.0}, "num_steps": 10, "learning_rate": 1.0, "batch_size": 4}


def entry_of(clip: Clip, canvas: str, num_tokens: int, **fields: Any) -> LatentRow:
    side = 32 if canvas == "small" else 64
    ordinary = {
        "entry": f"{clip.clip_id}@{canvas}", "clip_id": clip.clip_id, "source_id": clip.source_id, "split": "train",
        "group": clip.group, "canvas": canvas, "has_audio": clip.has_audio, "num_frames": 22, "frame_rate": 24,
        "height": side, "width": side, "sample_rate_hz": 8000, "variants": ["t2va", "fl2va"], "layouts": ["1", "2"],
        "num_tokens": [num_tokens, num_tokens + 7], "shard": "00000", "keys": ["1", "2", "3", ""],
    }  # fmt: skip
    return LatentRow.model_validate(ordinary | fields)


@pytest.fixture
def settings(tmp_path: Path, make_clip: Callable[..., Clip]) -> dict[str, Any]:
    """Forty clips at two canvases (every fifth silent), one of them only in the test split."""
    generator = np.random.default_rng(0)
    clips: list[Clip] = []
    rows: list[LatentRow] = []
    for number in range(NUM_CLIPS):
        motion, has_audio = float(generator.random()), number % 5 > 0
        clip = make_clip(
            f"c{number:02d}",
            clip_id=f"c{number:02d}",
            group="old" if number < 10 else "new",
            motion_p50=motion,
            motion_p90=motion + 0.1,
            residual_cuts=number % 3,
            caption=" ".join(f"thing{word}" for word in range(number % 7)),
            has_audio=has_audio,
            speech_share=float(generator.random()) if has_audio else None,
            sharpness_p90=float(generator.integers(10, 900)),
        )
        clips.append(clip)
        held = {"split": "test"} if number == 0 else {}
        rows += [entry_of(clip, canvas, int(generator.integers(100, 200)), **held) for canvas in ("small", "large")]
    write_records(tmp_path / "clips.parquet", clips, Clip)
    write_index(tmp_path / "latents", rows, {"family": "fake", "text_of": {}})
    return {
        "clips": tmp_path / "clips.parquet",
        "latents": tmp_path / "latents",
        "curriculum": tmp_path / "curriculum.parquet",
        "picture": tmp_path / "curriculum.png",
        "summary": tmp_path / "curriculum.json",
        "work": tmp_path / "work",
        "stages": {"easy": {**STAGE, "difficulty": [0.0, 0.5]}, "all": STAGE},
    }


def planned(settings: dict[str, Any], **changed: Any) -> tuple[list[Planned], dict[str, Any]]:
    run(Config.model_validate(settings | changed))
    return read_records(settings["curriculum"], Planned), json.loads(settings["summary"].read_text(encoding="utf-8"))


def test_difficulty_is_the_rank_of_the_weighted_ranks_inside_the_bucket(settings: dict[str, Any]) -> None:
    rows, _ = planned(settings, weights={"motion": 0.75, "sound": 0.25})
    assert [row.entry for row in rows] == sorted(row.entry for row in rows)
    assert len(rows) == 2 * (NUM_CLIPS - 1)
    clips = {clip.clip_id: clip for clip in read_records(settings["clips"], Clip)}
    for bucket in ("small 22f 32x32", "large 22f 64x64"):
        own = [row for row in rows if row.bucket == bucket]
        assert len(own) == NUM_CLIPS - 1
        motion = (stats.rankdata([clips[row.clip_id].motion_p50 for row in own]) - 1) / (len(own) - 1)
        assert [row.motion for row in own] == pytest.approx(list(motion), abs=1e-6)
        assert [row.sound is None for row in own] == [not clips[row.clip_id].has_audio for row in own]
        mixed = [
            row.motion if row.sound is None else 0.75 * row.motion + 0.25 * row.sound
            for row in own
            if row.motion is not None
        ]
        expected = (stats.rankdata(np.round(mixed, 4)) - 1) / (len(own) - 1)
        assert [row.difficulty for row in own] == pytest.approx(list(expected), abs=1e-6)


def test_tokens_are_those_of_the_longest_variant_and_weights_choose_them(settings: dict[str, Any]) -> None:
    rows, _ = planned(settings, weights={"tokens": 1.0})
    assert [row.difficulty for row in rows] == [row.tokens for row in rows]
    longest = {row.entry: max(row.num_tokens) for row in LatentStore(settings["latents"]).index.rows()}
    small = [row for row in rows if row.bucket.startswith("small")]
    ranks = (stats.rankdata([longest[row.entry] for row in small]) - 1) / (len(small) - 1)
    assert [row.tokens for row in small] == pytest.approx(list(ranks), abs=1e-6)


def test_planning_again_gives_the_same_bytes(settings: dict[str, Any]) -> None:
    written: list[bytes] = []
    for _ in range(2):
        run(Config.model_validate(settings))
        written.append(b"".join(settings[name].read_bytes() for name in ("curriculum", "picture", "summary")))
    assert settings["picture"].read_bytes().startswith(b"\x89PNG")
    assert written[0] == written[1]


def test_random_order_is_a_seeded_control_that_leaves_the_features_alone(settings: dict[str, Any]) -> None:
    ordered, _ = planned(settings)
    first, facts = planned(settings, order="random", seed=3)
    again, _ = planned(settings, order="random", seed=3)
    other, _ = planned(settings, order="random", seed=4)
    difficulty = [[row.difficulty for row in rows] for rows in (ordered, first, again, other)]
    assert difficulty[1] == difficulty[2]
    assert difficulty[1] not in (difficulty[0], difficulty[3])
    assert [[getattr(row, name) for name in FEATURES] for row in first] == [
        [getattr(row, name) for name in FEATURES] for row in ordered
    ]
    assert (facts["order"], facts["seed"]) == ("random", 3)


def test_summary_counts_what_every_stage_may_draw(settings: dict[str, Any]) -> None:
    stages = {
        "easy": {**STAGE, "difficulty": [0.0, 0.5], "canvases": ["small"]},
        "all": {**STAGE, "difficulty": [0.25, 1.0], "replay_share": 0.2},
    }
    _, facts = planned(settings, stages=stages)
    easy, rest = facts["stages"]["easy"], facts["stages"]["all"]
    assert easy["by_bucket"] == {"large 22f 64x64": 0, "small 22f 32x32": 20}
    assert (easy["eligible"], easy["difficulty"], easy["num_steps"]) == (20, [0.0, 0.5], 10)
    assert easy["coverage"] == pytest.approx(20 / 78, abs=1e-6)
    assert easy["max_draws_per_entry"] == 2.0
    assert (rest["eligible"], rest["coverage"], rest["replayed"]) == (78, 1.0, 20)
    assert facts["uncovered"] == []
    assert facts["latents"] == LatentStore(settings["latents"]).fingerprint
    assert facts["features"]["sound"]["present"] == 2 * 32
    assert facts["features"]["sync"]["present"] == 0
    names, rho = facts["correlations"]["names"], np.array(facts["correlations"]["rho"], np.float64)
    assert names == [*FEATURES, "difficulty"]
    assert rho[0, 0] == rho[-1, -1] == 1.0
    assert np.isnan(rho[names.index("sync")]).all()


def test_entries_that_no_stage_draws_are_refused_by_name_unless_allowed(settings: dict[str, Any]) -> None:
    stages = {"easy": {**STAGE, "difficulty": [0.0, 0.9], "mixture": {"new": 1.0}}}
    with pytest.raises(
        ValueError, match=re.escape("of 78 training entries can be drawn by none of the stages easy; first c01@")
    ):
        run(Config.model_validate(settings | {"stages": stages}))
    assert not settings["curriculum"].exists()
    rows, facts = planned(settings, stages=stages, allow_uncovered=True)
    expected = [row.entry for row in rows if row.difficulty > 0.9 or row.group == "old"]
    assert facts["uncovered"] == expected


def test_a_curriculum_of_token_counts_is_called_one(settings: dict[str, Any], capsys: Any) -> None:
    _, facts = planned(settings, weights={"tokens": 1.0, "motion": 0.05})
    assert facts["difficulty_against_tokens"]["rho"] > 0.95
    assert any("rediscovers length" in text for text in facts["warnings"])
    assert "rediscovers length" in capsys.readouterr().err
    _, facts = planned(settings)
    assert facts["warnings"] == []


def test_a_weight_without_effect_and_a_stage_without_entries_are_warned_of(settings: dict[str, Any]) -> None:
    stages = {"all": STAGE, "none": {**STAGE, "max_duration_s": 0.1}}
    _, facts = planned(settings, stages=stages, weights={"motion": 1.0, "sync": 0.2})
    assert len(facts["warnings"]) == 2
    assert facts["warnings"][0].startswith("weights.sync = 0.2 has no effect")
    assert facts["warnings"][1] == "stage none may draw no training entry at all"


def test_latents_of_clips_that_the_table_lacks_are_refused(settings: dict[str, Any]) -> None:
    clips = read_records(settings["clips"], Clip)
    write_records(settings["clips"], [clip for clip in clips if clip.clip_id != "c07"], Clip)
    with pytest.raises(ValueError, match=r"2 of 78 entries .* first c07; run `soundstage encode`"):
        run(Config.model_validate(settings))


def test_a_store_without_training_entries_is_refused(settings: dict[str, Any]) -> None:
    rows = [row.model_copy(update={"split": "val"}) for row in LatentStore(settings["latents"]).index.rows()]
    write_index(settings["latents"], rows, {"family": "fake", "text_of": {}})
    with pytest.raises(ValueError, match="no entry of the split train among 80"):
        run(Config.model_validate(settings))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"length": 1.0}, r"weights\.length: no such feature; there are motion, tokens"),
        ({"motion": 0.0}, "not all 0"),
        ({}, "not all 0"),
        ({"motion": -1.0, "tokens": 2.0}, "none may be below 0"),
        ({"loss": 1.0}, r"weights\.loss needs plan\.loss"),
    ],
)
def test_weights_that_choose_no_feature_are_refused(
    settings: dict[str, Any], weights: dict[str, float], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        Config.model_validate({**settings, "weights": weights})


def test_losses_of_a_real_model_order_clips_and_mark_some_for_review(
    settings: dict[str, Any], base: Path, store_folder: Path, make_clip: Callable[..., Clip]
) -> None:
    clips = [make_clip(f"clip-{number}", clip_id=f"clip-{number}", has_audio=number != 5) for number in range(6)]
    write_records(settings["clips"], clips, Clip)
    loss = {"base": base, "num_noise": 2, "num_draws": 1, "review_share": 0.2}
    given = settings | {"latents": store_folder, "weights": {"loss": 1.0}, "loss": loss}
    rows, facts = planned(given)
    assert [row.difficulty for row in rows] == [row.loss for row in rows]
    assert sorted(row.difficulty for row in rows) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1], abs=1e-6)
    hardest = max(rows, key=lambda row: row.difficulty)
    review = [item["entry"] for item in facts["review"]]
    assert hardest.entry in review
    assert 1 <= len(review) <= 2  # a fifth of six, by picture and by sound
    assert {row.entry for row in rows if row.review} == set(review)
    assert len(facts["loss"]["weights_sha256"]) == 64
    (remembered,) = settings["work"].iterdir()
    first = [settings[name].read_bytes() for name in ("curriculum", "summary")]
    remembered.unlink()
    planned(given)
    assert [settings[name].read_bytes() for name in ("curriculum", "summary")] == first


def test_a_checkpoint_without_a_transformer_is_refused(settings: dict[str, Any], base: Path, tmp_path: Path) -> None:
    loss = {"base": base, "checkpoint": tmp_path / "nowhere"}
    with pytest.raises(RuntimeError, match=r"no transformer in .*nowhere"):
        run(Config.model_validate(settings | {"loss": loss}))


def test_small_groups_are_drawn_together() -> None:
    groups = [f"g{number}" for number in range(9) for _ in range(9 - number)]
    entries = plan_picture.Entries(groups, {}, np.zeros(len(groups)), np.zeros(len(groups), np.bool_))
    shown, colours = plan_picture.coloured(entries)
    assert [*colours] == ["g0", "g1", "g2", "g3", "g4", "g5", "(3 more groups)"]
    assert np.count_nonzero(shown == "(3 more groups)") == 6
