from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from data.files import sha256
from data.latents import LatentStore
from models.families.h3 import H3
from models.families.tensor_files import TensorFiles
from models.samples import Wanted
from models.sft import SupervisedFineTuning
from tasks import train, training, watching
from tasks.launching import Launch, LocalLauncher
from tasks.train import Config, run
from tests.models.originals import original_h3

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


# -- resuming ----------------------------------------------------------------------------------------------------------


def killed(*_: Any) -> Any:
    raise KeyError("killed")


@pytest.mark.parametrize("plateau", [None, {"window": 1, "min_delta": 1000.0, "patience": 2}])
def test_a_run_that_dies_behind_its_last_step_takes_no_step_again(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plateau: dict[str, Any] | None
) -> None:
    row = next(iter(LatentStore(settings["latents"]).index.rows()))  # the store has no validation clips
    wanted = [Wanted(row, "t2va", 1)]
    monkeypatch.setattr(watching, "chosen", lambda *_args: wanted)
    watch = {"folder": tmp_path / "watch", "log_every": 1, "sample_every": 100, "sample_steps": 2}
    stages = {"easy": {**EASY, "num_steps": 6, "plateau": plateau}}
    config = Config.model_validate({**settings, "stages": stages, "watch": watch})
    calm = run(config.model_copy(update={"checkpoints": tmp_path / "calm"}), "easy")
    with monkeypatch.context() as patched:
        patched.setattr(training, "write_checkpoint", killed)
        with pytest.raises(KeyError):
            run(config, "easy")
    monkeypatch.setattr(SupervisedFineTuning, "training_step", killed)
    ended = run(config, "easy")
    assert sha256(ended) == sha256(calm)
    assert (json.loads((ended / "checkpoint.json").read_text()).get("ended") is None) == (plateau is None)
    assert len(rows_of(ended)) == (6 if plateau is None else 3)
    assert "psnr_db" in rows_of(ended)[-1]


def test_settings_that_are_changed_back_find_their_states_again(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    velocities = H3.velocities
    passed: list[int] = []

    def limited(family: H3, batch: Any, noisy: Any) -> Any:
        passed.append(len(batch.has_audio_B))
        return velocities(family, batch, noisy) if len(passed) < 4 else killed()

    for rate, starts in ((1e-3, 0), (2e-3, 0), (1e-3, 3), (3e-3, 0), (1e-3, 3), (2e-3, 0)):
        stages = {"easy": {**EASY, "num_steps": 20, "learning_rate": rate}}
        passed.clear()
        if starts:
            passed += [0] * 2  # one more step, and the end
        monkeypatch.setattr(H3, "velocities", limited)
        with pytest.raises(KeyError):
            run(Config.model_validate({**settings, "stages": stages, "save_every": 1}), "easy")
        said = capfd.readouterr().err
        assert ("begins anew with other settings" in said) == (rate > 1e-3)
        assert len(list((settings["work"] / "easy").glob("*/latest"))) == (1 if rate == 1e-3 and not starts else 2)


# -- weights and hashes ------------------------------------------------------------------------------------------------


def narrowed(base: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.bfloat16() for name, tensor in weights(base).items()}


@pytest.mark.parametrize("method", [{}, {"method": "lora", "lora_rank": 2}, {"guidance": {"form": "drift"}}])
def test_narrow_weights_train_as_the_same_ones_in_full_precision(
    settings: dict[str, Any], base: Path, tmp_path: Path, method: dict[str, Any]
) -> None:
    written: list[dict[str, torch.Tensor]] = []
    for name, state in (
        ("wide", {name: tensor.float() for name, tensor in narrowed(base).items()}),
        ("narrow", narrowed(base)),
    ):
        shutil.copytree(base / "transformer", tmp_path / name)
        safetensors.torch.save_file(state, tmp_path / name / "diffusion_pytorch_model.safetensors")
        changed = {"weights": tmp_path / name, "checkpoints": tmp_path / f"{name}-trained", "precision": "bf16"}
        written.append(
            weights(run(Config.model_validate({**settings, **changed, "stages": {"easy": {**EASY, **method}}}), "easy"))
        )
    assert {tensor.dtype for tensor in written[1].values()} == {torch.float32}
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(tensor, written[1][name]) for name, tensor in written[0].items())


@pytest.mark.parametrize("touched", [False, True])
def test_processes_take_converted_weights_and_their_hashes_from_who_starts_them(
    settings: dict[str, Any], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, touched: bool
) -> None:
    original = tmp_path / "h3.safetensors"
    safetensors.torch.save_file(original_h3(narrowed(base)), original)
    read: list[str] = []
    digest = hashlib.file_digest

    def noted(stream: Any, kind: str) -> Any:
        read.append(stream.name)
        return digest(stream, kind)

    def as_one(_: LocalLauncher, command: list[str], launch: Launch, environment: dict[str, str]) -> None:
        assert launch.num_processes == 2
        original.unlink()  # nobody needs it any more
        read.clear()
        if touched:
            os.utime(next(tmp_path.glob("converted/*/diffusion_pytorch_model.safetensors")), (1, 1))
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", train.HASHES: environment[train.HASHES]}.items():
            monkeypatch.setenv(name, value)
        run(Config.model_validate(json.loads(Path(command[-1]).read_text())["train"]), command[-3])

    monkeypatch.setattr(hashlib, "file_digest", noted)
    monkeypatch.setattr(LocalLauncher, "run", as_one)
    changed = {"weights": original, "converted": tmp_path / "converted", "launch": {"processes_per_node": 2}}
    ended = run(Config.model_validate({**settings, **changed}), "easy")
    again = [name for name in read if "/converted/" in name and name.endswith(".safetensors")]
    assert len(again) == touched
    (folder,) = (item for item in (tmp_path / "converted").iterdir() if item.is_dir())
    assert json.loads((ended / "checkpoint.json").read_text())["start_sha256"] == sha256(folder)


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
