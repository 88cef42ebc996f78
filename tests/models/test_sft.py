"""Fine-tuning: it learns, resumes exactly, and its checkpoints load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from models.resume import States

from data.candidates import candidates_of
from data.files import sha256
from data.latents import LatentStore
from data.sampler import Sampler, StepBatch
from data.stage import Stage
from models import adapters
from models.families import Family, load_family
from models.sft import SupervisedFineTuning, read_batch
from tasks import training


def stage(**changes: Any) -> Stage:
    settings = {"conditions": {"t2va": 0.5, "fl2va": 0.5}, "num_steps": 6, "batch_size": 2, "learning_rate": 3e-3}
    return Stage.model_validate({**settings, "warmup_steps": 1, **changes})


def trained(
    base: Path, store_folder: Path, work: Path, plan: Stage, *, stop_after: int | None = None
) -> tuple[Family, Any]:
    """Train a stage; `stop_after` raises in the middle of that step, as a crash would."""
    family, store = load_family(base), LatentStore(store_folder)
    if plan.method == "lora":
        adapters.add(family, plan.lora_rank, 0)
    module = SupervisedFineTuning(family, plan, seed=0)
    losses = family.losses
    calls = iter(range(1000))

    def crashing(*arguments: Any) -> Any:
        if next(calls) == stop_after:
            raise KeyError("crash")
        return losses(*arguments)

    family.losses = crashing  # type: ignore[method-assign]
    training.fit(
        module,
        Sampler(candidates_of(store.index), plan, 0),
        store,
        work,
        {"plan": plan.model_dump()},
        "cpu",
        save_every=2,
    )
    return family, module


def test_resuming_after_a_crash_equals_never_having_stopped(base: Path, store_folder: Path, tmp_path: Path) -> None:
    plan = stage(conditions={"t2va": 0.2, "fl2va_last": 0.2, "ref2va": 0.2, "a2v": 0.2, "v2a": 0.2})
    whole, undisturbed = trained(base, store_folder, tmp_path / "a", plan)
    with pytest.raises(KeyError):
        trained(base, store_folder, tmp_path / "b", plan, stop_after=5)
    assert (tmp_path / "b" / "step-000004.ckpt").is_file()
    continued, resumed = trained(base, store_folder, tmp_path / "b", plan)
    assert undisturbed.curve == resumed.curve
    assert [row["step"] for row in resumed.curve] == list(range(6))
    assert len({row["condition"] for row in resumed.curve}) > 3
    left, right = whole.transformer.state_dict(), continued.transformer.state_dict()
    assert all(torch.equal(left[key], right[key]) for key in left)


def test_states_of_other_settings_or_altered_bytes_are_not_taken(
    base: Path, store_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(KeyError):
        trained(base, store_folder, tmp_path, stage(), stop_after=5)
    identity = {"plan": stage().model_dump()}
    assert States(tmp_path, identity, every=2).latest() == tmp_path / "step-000004.ckpt"
    with (tmp_path / "step-000004.ckpt").open("ab") as stream:
        stream.write(b"x")
    assert States(tmp_path, identity, every=2).latest() == tmp_path / "step-000002.ckpt"
    assert States(tmp_path, {"plan": "other"}, every=2).latest() is None
    assert not list(tmp_path.glob("step-*"))


def test_training_lowers_the_loss_of_both_modalities_on_fixed_draws(
    base: Path, store_folder: Path, tmp_path: Path
) -> None:
    _, module = trained(base, store_folder, tmp_path, stage(num_steps=60, learning_rate=5e-3))
    early, late = module.curve[:20], module.curve[-20:]  # 20 steps see every noise level twice
    for name in ("loss_video", "loss_audio"):
        assert sum(row[name] for row in late) < 0.97 * sum(row[name] for row in early)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_checkpoints_load_as_what_was_trained(base: Path, store_folder: Path, tmp_path: Path, method: str) -> None:
    family, module = trained(base, store_folder, tmp_path / "work", stage(method=method, lora_rank=4))
    frozen = load_family(base).transformer.state_dict()
    training.write_checkpoint(tmp_path / "checkpoint", family, module, {"stage": "test"})
    fresh = load_family(base)
    fresh.load_transformer(tmp_path / "checkpoint" / "transformer")
    left, right = family.transformer.state_dict(), fresh.transformer.state_dict()
    assert left.keys() == right.keys() == frozen.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)
    changed = [key for key in left if not torch.equal(left[key], frozen[key])]
    if method == "lora":
        assert changed
        assert all("transformer_blocks" in key for key in changed)
        adapter = safetensors.torch.load_file(tmp_path / "checkpoint" / "pytorch_lora_weights.safetensors")
        assert any("lora_A" in key for key in adapter)
    else:
        assert len(changed) > 0.9 * len(left)


def test_same_seed_gives_the_same_checkpoint_bytes(base: Path, store_folder: Path, tmp_path: Path) -> None:
    digests: list[str] = []
    for name in ("a", "b"):
        family, module = trained(base, store_folder, tmp_path / f"work-{name}", stage(num_steps=3))
        training.write_checkpoint(tmp_path / name, family, module, {})
        digests.append(sha256(tmp_path / name))
    assert digests[0] == digests[1]


def test_a_batch_is_what_the_store_holds_of_its_entries(store_folder: Path) -> None:
    store = LatentStore(store_folder)
    batch = read_batch(store, StepBatch(0, "fl2va", ("clip-4@small", "clip-5@small"), ("fl2va", "fl2va")))
    rows = [store.index.row(place) for place in (4, 5)]
    assert batch.mode == "fl2va"
    assert batch.frame_rate == 24
    assert batch.has_audio_B.tolist() == [1, 0]
    assert set(batch.conditions) == {"text/rows", "text/tags", "keyframe/first", "keyframe/last"}
    for index, row in enumerate(rows):
        assert torch.equal(batch.video_BCFHW[index], store.read(row, "video"))
        assert torch.equal(batch.audio_BSCT[index], store.read(row, "audio"))
        assert torch.equal(batch.conditions["keyframe/last"][index], store.read(row, "keyframe/last"))
        assert torch.equal(batch.conditions["text/rows"][index], store.read(row, "text/fl2va/rows"))
    mixed = read_batch(store, StepBatch(0, "t2va", ("clip-1@small",), ("t2va-uncaptioned",)))
    assert mixed.conditions["text/rows"].shape == (1, 1, 32)
