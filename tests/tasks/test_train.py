from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from data.files import sha256
from models.families.h3 import H3
from models.families.tensor_files import TensorFiles
from tasks.train import Config, run

PLAIN = {"form": "none"}
EASY = {
    "conditions": {"t2va": 1.0},
    "guidance": PLAIN,
    "num_steps": 3,
    "batch_size": 2,
    "learning_rate": 0.003,
    "difficulty": [0.0, 0.5],
}
ALL = {
    **EASY,
    "start_from": "easy",
    "difficulty": [0.0, 1.0],
    "conditions": {"fl2va": 1.0},
    "replay_share": 0.5,
    "replay_groups": ["base"],
}


@pytest.fixture
def settings(base: Path, store_folder: Path, curriculum: Path, tmp_path: Path) -> dict[str, Any]:
    """Two short stages over the shared latent store."""
    return {
        "seed": 0,
        "base": base,
        "latents": store_folder,
        "curriculum": curriculum,
        "checkpoints": tmp_path / "checkpoints",
        "work": tmp_path / "work",
        "accelerator": "cpu",
        "precision": "fp32",
        "stages": {"easy": {**EASY, "method": "lora", "lora_rank": 2}, "all": ALL},
    }


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_an_unknown_stage_is_refused_with_the_names_there_are(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"hard.*easy, all"):
        run(Config.model_validate(settings), "hard")


def test_a_stage_whose_start_is_missing_says_what_to_run_first(settings: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="soundstage train easy"):
        run(Config.model_validate(settings), "all")


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
    rows = rows_of(tmp_path / "once" / "all")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert {row["condition"] for row in rows} == {"fl2va"}
    assert not list((tmp_path / "work").glob("*"))
    other = Config.model_validate({**settings, "seed": 1, "checkpoints": tmp_path / "other"})
    assert json.loads((run(other, "easy") / "checkpoint.json").read_text())["weights_sha256"] != easy["weights_sha256"]


def test_guidance_without_uncaptioned_text_names_the_option_that_encodes_it(settings: dict[str, Any]) -> None:
    for mode in ("fl2va", "ref2va", "a2v"):
        stage = {**EASY, "conditions": {"t2va": 0.5, mode: 0.5}, "guidance": {"form": "family"}}
        with pytest.raises(ValueError, match=rf"{mode}.*-uncaptioned; set encode\.uncaptioned to true"):
            run(Config.model_validate({**settings, "stages": {"easy": stage}}), "easy")
    stage = {**EASY, "guidance": {"form": "family"}, "num_steps": 1}  # of t2va the store has it
    assert (run(Config.model_validate({**settings, "stages": {"easy": stage}}), "easy") / "checkpoint.json").is_file()


def test_a_checkpoint_holds_the_moving_average(settings: dict[str, Any], base: Path, tmp_path: Path) -> None:
    written: list[dict[str, torch.Tensor]] = []
    for name, decay in (("plain", None), ("average", 0.75)):
        stages = {"easy": {**EASY, "num_steps": 1, "ema_decay": decay}}
        config = Config.model_validate({**settings, "stages": stages, "checkpoints": tmp_path / name})
        written.append(weights(run(config, "easy")))
    first = weights(base)
    for name, value in first.items():
        expected = 0.75 * value + 0.25 * written[0][name]
        assert torch.allclose(written[1][name], expected, atol=1e-7)
    assert any(not torch.equal(first[name], written[1][name]) for name in first)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")


def test_narrow_frozen_weights_are_written_as_they_were_loaded(
    settings: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    narrow = {"precision": "bf16", "frozen_weights": "compute", "recompute": "selective"}
    written = weights(run(Config.model_validate({**settings, **narrow}), "easy"))
    first = weights(base)
    assert written.keys() == first.keys()
    same = {name for name in first if torch.equal(first[name], written[name])}
    assert {name for name in first if "transformer_blocks" not in name or "norm" in name} <= same
    assert "transformer_blocks.0.attn.to_q.weight" not in same


def test_a_frozen_text_side_stays_as_it_was(settings: dict[str, Any], base: Path) -> None:
    stage = {**EASY, "freeze_text_side": True, "num_steps": 1}
    written = weights(run(Config.model_validate({**settings, "stages": {"easy": stage}}), "easy"))
    same = {name for name, value in weights(base).items() if torch.equal(written[name], value)}
    assert {name for name in written if name.startswith(("context_embedder.", "token_refiner."))} <= same
    assert len(same) < len(written) / 3


# -- out of memory -----------------------------------------------------------------------------------------------------


def scarce(monkeypatch: pytest.MonkeyPatch, most: int, spared: int = 0) -> list[int]:
    """Leave memory for `most` clips a forward pass after the first `spared` passes; the answer lists the clips of each."""
    velocities = H3.velocities
    passed: list[int] = []

    def limited(family: H3, batch: Any, noisy: Any) -> Any:
        num_clips = len(batch.has_audio_B)
        if num_clips > most and len(passed) >= spared:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee the documentation")
        passed.append(num_clips)
        return velocities(family, batch, noisy)

    monkeypatch.setattr(H3, "velocities", limited)
    return passed


def test_out_of_memory_a_run_goes_on_with_smaller_micro_batches_and_the_same_batches(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stage = {**EASY, "difficulty": [0.0, 0.6], "batch_size": 4, "num_steps": 5}
    changed = {"stages": {"easy": stage}, "micro_batch": 4, "save_every": 2}
    calm = run(Config.model_validate({**settings, **changed, "checkpoints": tmp_path / "calm"}), "easy")
    capfd.readouterr()
    passed = scarce(monkeypatch, most=1, spared=3)
    ended = run(Config.model_validate({**settings, **changed}), "easy")
    # Three steps at once, then from the state after two of them clip by clip.
    assert passed == [4] * 3 + [1] * 4 * 3
    said = capfd.readouterr().err
    assert "micro_batch 4 -> 2, the same global batch" in said
    assert "micro_batch 2 -> 1, the same global batch" in said
    rows, undisturbed = rows_of(ended), rows_of(calm)
    assert [(row["step"], row["condition"]) for row in rows] == [(row["step"], row["condition"]) for row in undisturbed]
    for name in ("loss_video", "loss_audio", "sigma_video"):
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in undisturbed], abs=1e-4)
    assert not list((tmp_path / "work").glob("*"))


def test_a_micro_batch_that_did_not_fit_is_not_tried_again(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = {**EASY, "difficulty": [0.0, 0.6], "batch_size": 4}
    config = Config.model_validate({**settings, "stages": {"easy": stage}, "micro_batch": sys.maxsize})
    passed = scarce(monkeypatch, most=2)
    velocities = H3.velocities

    def killed(family: H3, batch: Any, noisy: Any) -> Any:
        if len(passed) == 3:
            raise KeyError("killed")
        return velocities(family, batch, noisy)

    with monkeypatch.context() as patched:
        patched.setattr(H3, "velocities", killed)
        with pytest.raises(KeyError):
            run(config, "easy")
    assert (config.work / "easy" / "micro_batch").read_text() == "2\n"
    run(config, "easy")
    assert set(passed) == {2}


def test_one_clip_that_does_not_fit_is_an_error_with_its_remedies(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce(monkeypatch, most=0)
    with pytest.raises(RuntimeError, match=r"out of memory with one clip.*Tried to allocate 2 GiB.*plan-run") as caught:
        run(Config.model_validate({**settings, "micro_batch": 2}), "easy")
    assert len(str(caught.value).splitlines()) == 1


def test_other_failures_are_not_taken_for_too_little_memory(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(H3, "velocities", broken)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        run(Config.model_validate({**settings, "micro_batch": 2}), "easy")


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
    assert json.loads(adapter.metadata["lora_adapter_metadata"])["soundstage"]["partition"] == "transformer_ref"
    with pytest.raises(ValueError, match=r"easy was trained from transformer, and transformer_ref is what"):
        run(config, "after")
