from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from data.curriculum import Planned
from data.files import sha256, write_records
from data.latents import LatentStore
from models.families.tensor_files import TensorFiles
from tasks.train import Config, run

EASY = {"conditions": {"t2va": 1.0}, "num_steps": 3, "batch_size": 2, "learning_rate": 0.003, "difficulty": [0.0, 0.5]}
ALL = {
    **EASY,
    "start_from": "easy",
    "difficulty": [0.0, 1.0],
    "conditions": {"fl2va": 1.0},
    "replay_share": 0.5,
    "replay_groups": ["base"],
}


@pytest.fixture
def settings(base: Path, store_folder: Path, tmp_path: Path) -> dict[str, Any]:
    """Two short stages over the shared latent store."""
    ranks = dict.fromkeys(("motion", "tokens", "cuts", "caption", "sound", "sync", "quality", "loss"))
    planned = [
        Planned(
            entry=row.entry, clip_id=row.clip_id, source_id=row.source_id, group=row.group, bucket="small", **ranks,
            difficulty=index / 5, review=False,
        )
        for index, row in enumerate(LatentStore(store_folder).index.rows())
    ]  # fmt: skip
    write_records(tmp_path / "curriculum.parquet", planned, Planned)
    return {
        "seed": 0,
        "base": base,
        "latents": store_folder,
        "curriculum": tmp_path / "curriculum.parquet",
        "checkpoints": tmp_path / "checkpoints",
        "work": tmp_path / "work",
        "accelerator": "cpu",
        "stages": {"easy": {**EASY, "method": "lora", "lora_rank": 2}, "all": ALL},
    }


def test_an_unknown_stage_is_refused_with_the_names_there_are(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"hard.*easy, all"):
        run(Config.model_validate(settings), "hard")


def test_a_stage_whose_start_is_missing_says_what_to_run_first(settings: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="soundstage train easy"):
        run(Config.model_validate(settings), "all")


def test_each_transformer_of_two_has_stages_of_its_own(settings: dict[str, Any], tmp_path: Path) -> None:
    base = shutil.copytree(settings["base"], tmp_path / "twofold")
    shutil.copytree(base / "transformer", base / "transformer_ref")
    (base / "transformer_ref" / "mark.txt").touch()
    stages = {
        "easy": {**EASY, "num_steps": 1},
        "mixed": {**EASY, "conditions": {"t2va": 0.5, "ref2va": 0.5}},
        "shown": {**EASY, "num_steps": 1, "conditions": {"ref2va": 1.0, "t2va": 0.0}, "method": "lora"},
        "after": {**EASY, "conditions": {"ref2va": 1.0}, "start_from": "easy"},
    }
    config = Config.model_validate({**settings, "base": base, "stages": stages})
    with pytest.raises(ValueError, match=r"t2va by transformer and ref2va by transformer_ref; make a stage"):
        run(config, "mixed")
    records = {name: json.loads((run(config, name) / "checkpoint.json").read_text()) for name in ("easy", "shown")}
    assert {name: record["partition"] for name, record in records.items()} == {
        "easy": "transformer",
        "shown": "transformer_ref",
    }
    assert records["shown"]["start_sha256"] == sha256(base / "transformer_ref") != sha256(base / "transformer")
    adapter = TensorFiles(config.checkpoints / "shown" / "pytorch_lora_weights.safetensors")
    assert json.loads(adapter.metadata["soundstage"])["partition"] == "transformer_ref"
    with pytest.raises(ValueError, match=r"easy was trained from transformer, and transformer_ref is what"):
        run(config, "after")


def test_a_stage_continues_the_one_before_and_repeats_to_the_byte(settings: dict[str, Any], tmp_path: Path) -> None:
    hashes: list[str] = []
    for name in ("once", "again"):
        config = Config.model_validate({**settings, "checkpoints": tmp_path / name})
        easy, all_of = (json.loads((run(config, stage) / "checkpoint.json").read_text()) for stage in ("easy", "all"))
        hashes.append(sha256(tmp_path / name))
    assert hashes[0] == hashes[1]
    assert all_of["start_sha256"] == easy["weights_sha256"] != all_of["weights_sha256"]
    assert easy["start_sha256"] == sha256(settings["base"] / "transformer")
    assert (easy["method"], all_of["method"]) == ("lora", "full")
    rows = [json.loads(line) for line in (tmp_path / "once" / "all" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert {row["condition"] for row in rows} == {"fl2va"}
    assert not list((tmp_path / "work").glob("*"))
