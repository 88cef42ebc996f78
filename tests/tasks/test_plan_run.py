"""Planning a stage of the tiny H3 and of LTX-2, from configuration files alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from data.latents import LatentStore
from data.stage import Stage
from models import tiny_ltx2
from tasks.plan_run import Config, run

STAGES = {
    "all": Stage(conditions={"t2va": 0.5, "fl2va": 0.5}, num_steps=1800, learning_rate=1e-3, replay_share=0.25, replay_groups=("base",)),
    "references": Stage(conditions={"ref2va": 1.0}, method="lora", lora_rank=4, num_steps=10, learning_rate=1e-3),
    "elsewhere": Stage(conditions={"t2va": 1.0}, canvases=("large",), num_steps=10, learning_rate=1e-3),
}  # fmt: skip


@pytest.fixture
def config(base: Path, store_folder: Path, tmp_path: Path) -> Config:
    bare = tmp_path / "bare"
    shutil.copytree(
        base, bare, ignore=shutil.ignore_patterns("*.safetensors", "text_encoder", "tokenizer", "processor")
    )
    return Config(
        base=bare,
        stages=STAGES,
        latents=store_folder,
        plan=tmp_path / "plan_run.json",
        picture=tmp_path / "plan_run.png",
        devices=(1, 4),
    )


def planned(config: Config, name: str) -> dict[str, Any]:
    return json.loads(run(config, name).read_text(encoding="utf-8"))


def test_a_stage_is_planned_for_the_longest_clip_of_its_store(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(config, "all")
    rows = [
        tokens
        for row in LatentStore(config.latents).index.rows()
        for variant, tokens in zip(row.variants, row.num_tokens, strict=True)
        if variant in {"t2va", "fl2va"}
    ]
    assert found["clip"]["num_rows"] == max(rows)
    assert found["clip"]["mode"] == "fl2va"
    assert found["disk_bytes"]["latents"] == sum(path.stat().st_size for path in config.latents.iterdir())
    for cost in found["costs"]:
        assert cost["total_bytes"] == sum(cost["memory_bytes"].values())
        assert cost["hours"] == pytest.approx(1800 * cost["step_s"] / 3600)
        assert cost["device_hours"] == pytest.approx(cost["hours"] * cost["devices"])
    assert [cost["num_micro_batches"] for cost in found["costs"]] == [4, 1]
    assert config.picture.read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "fits 80 GB  " in text
    table = [line for line in text.splitlines() if line.startswith(("devices", "total, GB", "step, s"))]
    assert len({len(line) for line in table}) == 1, "aligned"


def test_references_come_from_the_store_with_their_own_sizes(config: Config) -> None:
    found = planned(config, "references")
    assert {name.partition("/")[0] for name in found["clip"]["sizes"]} == {"text", "references"}
    assert found["setup"]["lora_rank"] == 4
    assert found["parameters"]["trainable"] < found["parameters"]["total"] / 5


def test_what_does_not_fit_comes_with_what_would(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    small = config.model_copy(
        update={"device_memory_gb": 0.02, "reserve_gb": 0.0, "recompute": "none", "devices": (1,)}
    )
    found = planned(small, "all")["costs"][0]
    assert not found["fits"]
    assert f"devices=1: would fit with {found['remedy']}" in capsys.readouterr().out
    words = dict(word.split("=") for word in found["remedy"].split())
    assert {"recompute", "offload", "micro_batch", "frozen_weights", "devices", "strategy", "method"} >= set(words)
    changed = {**small.model_dump(), **words, "devices": [int(words.get("devices", 1))]}
    assert planned(Config.model_validate(changed), "all")["costs"][0]["fits"]


def test_same_plan_same_bytes(config: Config) -> None:
    for ending in ("png", "svg"):
        chosen = config.model_copy(update={"picture": config.picture.with_suffix(f".{ending}")})
        run(chosen, "all")
        first = chosen.plan.read_bytes(), chosen.picture.read_bytes()
        run(chosen, "all")
        assert (chosen.plan.read_bytes(), chosen.picture.read_bytes()) == first


def test_a_size_can_be_asked_for_without_any_latents(config: Config, tmp_path: Path) -> None:
    asked = {"latents": tmp_path / "none", "height": 64, "width": 64, "duration_s": 39 / 24, "text_tokens": 40}
    found = planned(config.model_copy(update=asked), "all")
    assert found["clip"]["shape"]["num_frames"] == 39
    assert found["clip"]["mode"] == "fl2va"
    assert "latents" not in found["disk_bytes"]


def test_ltx2_is_planned_by_its_size_where_the_latents_are_of_h3(config: Config, tmp_path: Path) -> None:
    base = tmp_path / "ltx2"
    tiny_ltx2.save(tiny_ltx2.build(3), base)
    other = {"base": base, "height": 64, "width": 96, "duration_s": 1.0, "guidance": "drift", "ema": True}
    cost = planned(config.model_copy(update=other), "all")["costs"][1]
    assert cost["fits"]
    assert cost["memory_bytes"]["frozen copy"] > 0
    text, middle = (planned(config.model_copy(update={**other, "mode": mode}), "all") for mode in ("t2va", "kf2va"))
    assert middle["clip"]["num_rows"] == text["clip"]["num_rows"] + 6  # 2x3 latents of one keyframe
    with pytest.raises(ValueError, match="MiniMax-H3 has no kf2va"):
        planned(config.model_copy(update={**other, "base": config.base, "mode": "kf2va"}), "all")
    with pytest.raises(ValueError, match="are of h3, base is ltx2"):
        run(config.model_copy(update={"base": base}), "all")


@pytest.mark.parametrize(
    ("changed", "stage", "message"),
    [
        ({}, "none", "no stage 'none' in plan-run.stages; there are all, references, elsewhere"),
        ({}, "elsewhere", "canvases: no 'large' in the latent store"),
        (
            {"latents": Path("nowhere")},
            "all",
            "no latents in nowhere to take a size from; set height, width, duration_s",
        ),
        ({"mode": "v2a", "stages": STAGES}, "elsewhere", "canvases: no 'large'"),
    ],
)
def test_what_cannot_be_planned_is_named(config: Config, changed: dict[str, Any], stage: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(config.model_copy(update=changed), stage)


def test_half_a_size_is_refused(config: Config) -> None:
    with pytest.raises(ValueError, match="height, width and duration_s go together; width, duration_s is not set"):
        Config.model_validate({**config.model_dump(), "height": 64})
