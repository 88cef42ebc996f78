"""Fine-tuning: it learns, and neither micro-batches, recomputation nor compilation change what."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import safetensors.torch
import torch

from data.files import sha256
from data.latents import LatentStore
from models import parallel
from models.families import Family, load_family
from models.families.weights import load_transformer
from models.sft import PLAIN
from tasks import training
from tests.models.trials import (
    Tensors,
    distance,
    drawn_of,
    gradients_of,
    same,
    stage,
    trained,
    weights_of,
)

DRAWN = [drawn_of("t2va", 0, 1, 2, 3), drawn_of("fl2va", 4, 5), drawn_of("ref2va.0", 1, 2, 3), drawn_of("a2v", 0, 3)]
"""One layout each; the second has a silent clip."""


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
    load_transformer(fresh, tmp_path / "checkpoint" / "transformer")
    left, right = weights_of(family), weights_of(fresh)
    assert left.keys() == frozen.keys()
    assert same(left, right)
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


def test_the_learning_rate_rises_then_falls_to_a_twentieth(base: Path, store_folder: Path, tmp_path: Path) -> None:
    plan = stage(num_steps=12, warmup_steps=3, learning_rate=1e-3)
    used: list[float] = []

    def listen(module: Any) -> None:
        update = module._step

        def noting(optimiser: Any) -> None:
            used.append(optimiser.param_groups[0]["lr"])
            update(optimiser)

        module._step = noting

    _, module = trained(base, store_folder, tmp_path, plan, drawn=[drawn_of("t2va", 1)] * 12, tamper=listen)
    assert used == [row["learning_rate"] for row in module.curve]
    assert used[:3] == sorted(used[:3])
    assert used[2:] == sorted(used[2:], reverse=True)
    assert used[0] == pytest.approx(1e-3 / 3)
    assert used[-1] == pytest.approx(5e-5)


# -- exactness ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(base: Path, store_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Gradients and last weights of whole batches, in double and single precision."""
    return {
        kind: gradients_of(
            base, store_folder, tmp_path_factory.mktemp(kind), stage(num_steps=4), drawn=DRAWN, change=precision(kind)
        )
        for kind in ("double", "float")
    }


def precision(kind: str) -> Any:
    return lambda family: getattr(family.transformer, kind)()


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
@pytest.mark.parametrize(("kind", "tolerance"), [("double", 1e-12), ("float", 1e-5)])
def test_micro_batches_add_up_to_the_whole_batch(
    base: Path, store_folder: Path, tmp_path: Path, whole: dict[str, Any], micro_batch: int, kind: str, tolerance: float
) -> None:
    run = PLAIN.model_copy(update={"micro_batch": micro_batch})
    found, weights = gradients_of(
        base, store_folder, tmp_path, stage(num_steps=4), run, drawn=DRAWN, change=precision(kind)
    )
    expected, last = whole[kind]
    assert len(found) == 4
    assert distance(found[0], expected[0]) < tolerance
    if kind == "double":  # AdamW divides by the gradient's size, so single precision drifts
        assert max(distance(left, right) for left, right in zip(found, expected, strict=True)) < 1e-10
        assert distance(weights, last) < 1e-9


def test_micro_batches_keep_the_noise_level_of_every_clip(base: Path, store_folder: Path, tmp_path: Path) -> None:
    plan = stage(num_steps=2, noise={"per_update": 2, "min_snr_gamma": 5.0}, audio_weight=2.0)
    runs = [
        gradients_of(
            base, store_folder, tmp_path / f"{size}", plan, PLAIN.model_copy(update={"micro_batch": size}),
            drawn=DRAWN[:2], change=precision("double"),
        )[0]
        for size in (1, 1024)
    ]  # fmt: skip
    assert max(distance(left, right) for left, right in zip(*runs, strict=True)) < 1e-10


@pytest.mark.parametrize("recompute", ["blocks", "selective"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_computing_activations_again_changes_no_bit(
    base: Path, store_folder: Path, tmp_path: Path, whole: dict[str, Any], recompute: str, method: str
) -> None:
    plan = stage(num_steps=4, method=method, lora_rank=2)
    expected = whole["float"]
    if method == "lora":
        expected = gradients_of(base, store_folder, tmp_path / "plain", plan, drawn=DRAWN)
    run = PLAIN.model_copy(update={"recompute": recompute})
    again: list[int] = []

    def count(family: Family) -> None:
        block = next(module for name, module in family.transformer.named_modules() if name == "transformer_blocks.0")
        block.register_forward_pre_hook(lambda *_: again.append(1))

    found = gradients_of(base, store_folder, tmp_path / recompute, plan, run, drawn=DRAWN, change=count)
    assert len(again) == 2 * 4
    assert same(found[1], expected[1])
    assert all(same(left, right) for left, right in zip(found[0], expected[0], strict=True))


def shorten(family: Family) -> None:
    """To one block, which is quicker to compile."""
    transformer = cast(Any, family.transformer)
    transformer.transformer_blocks = transformer.transformer_blocks[:1]


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiled_blocks_train_alike(base: Path, store_folder: Path, tmp_path: Path) -> None:
    plan, drawn = stage(num_steps=3), [drawn_of("t2va", 1, 2)] * 3
    curves: list[list[float]] = []
    for compiled in (False, True):
        family, module = trained(
            base, store_folder, tmp_path / f"{compiled}", plan, drawn=drawn, change=shorten, compiled=compiled
        )
        block = next(module for name, module in family.transformer.named_modules() if name == "transformer_blocks.0")
        assert (cast(Any, block)._compiled_call_impl is not None) == compiled
        curves.append([row[name] for row in module.curve for name in ("loss_video", "loss_audio")])
    assert curves[1] == pytest.approx(curves[0], rel=1e-3)


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("frozen_weights", ["fp32", "compute"])
def test_narrow_precision_loses_about_as_much_and_spares_what_its_authors_spare(
    base: Path, store_folder: Path, tmp_path: Path, kind: str, frozen_weights: str
) -> None:
    settings: dict[str, Any] = {"num_steps": 2}
    if frozen_weights == "compute":
        settings |= {"method": "lora", "lora_rank": 2}
    seen: dict[str, tuple[Any, Any]] = {}

    def listen(family: Family) -> None:
        for name, module in family.transformer.named_modules():
            if not list(module.children()):
                module.register_forward_hook(
                    lambda _, given, made, name=name: (
                        seen.__setitem__(name, (given[0].dtype, made.dtype)) if isinstance(made, torch.Tensor) else None
                    )
                )

    run = PLAIN.model_copy(update={"precision": kind, "frozen_weights": frozen_weights})
    family, module = trained(base, store_folder, tmp_path / kind, stage(**settings), run, drawn=DRAWN, change=listen)
    _, full = trained(base, store_folder, tmp_path / "fp32", stage(**settings), drawn=DRAWN)
    narrow = parallel.COMPUTE[kind]
    spared = [
        name
        for name in seen
        if name.split(".")[0] in ("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out")
    ]
    assert len(spared) >= 6
    assert all(seen[name] == (torch.float32, torch.float32) for name in spared)
    inside = [name for name in seen if name.startswith("transformer_blocks.0.attn.to_q")]
    assert inside
    assert all(seen[name][1] == narrow for name in inside)
    assert (module.scaler is not None) == (kind == "fp16")
    for name in ("loss_video", "loss_audio"):
        assert [row[name] for row in module.curve] == pytest.approx([row[name] for row in full.curve], rel=0.03)
    assert module.curve[0]["loss_video"] != full.curve[0]["loss_video"]
    types = {name: item.dtype for name, item in family.transformer.named_parameters()}
    assert all(types[name] == torch.float32 for name, _ in module.trained())
    assert types["time_embedder.linear_1.weight"] == torch.float32
    if frozen_weights == "compute":
        assert types["transformer_blocks.0.attn.to_q.base_layer.weight"] == narrow
        assert types["transformer_blocks.0.norm1.weight"] == narrow


def test_the_scaler_leaves_out_a_step_that_would_spoil_the_weights(
    base: Path, store_folder: Path, tmp_path: Path
) -> None:
    run = PLAIN.model_copy(update={"precision": "fp16"})
    held: list[Tensors] = []

    def overflow(module: Any) -> None:
        update, calls = module._step, iter(range(10))
        first = next(module.transformer.parameters())
        first.register_hook(lambda gradient: gradient * (float("inf") if next(calls) == 1 else 1.0))

        def noting(optimiser: Any) -> None:
            update(optimiser)
            held.append({name: item.detach().clone() for name, item in module.trained()})

        module._step = noting

    _, module = trained(
        base, store_folder, tmp_path, stage(num_steps=3), run, drawn=[drawn_of("t2va", 1)] * 3, tamper=overflow
    )
    assert same(held[0], held[1])
    assert not same(held[1], held[2])
    assert module.scaler.get_scale() == 2.0**15


# -- moving average ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_moving_average_is_that_of_the_steps_weights(
    base: Path, store_folder: Path, tmp_path: Path, method: str
) -> None:
    held: list[Tensors] = []

    def listen(module: Any) -> None:
        held.append({name: item.detach().double() for name, item in module.trained()})
        update = module._step

        def noting(optimiser: Any) -> None:
            update(optimiser)
            held.append({name: item.detach().double() for name, item in module.trained()})

        module._step = noting

    plan = stage(method=method, lora_rank=2, num_steps=5, ema_decay=0.7, learning_rate=1e-2)
    _, module = trained(base, store_folder, tmp_path, plan, tamper=listen)
    shares = [0.7**5, *(0.3 * 0.7 ** (5 - step) for step in range(1, 6))]
    assert sum(shares) == pytest.approx(1.0)
    assert len(held) == 6
    for name in held[0]:
        expected = sum(share * weights[name] for share, weights in zip(shares, held, strict=True))
        assert torch.allclose(module.average[name].double(), cast(Any, expected), atol=1e-6)
    gathered = parallel.gathered(module)
    assert gathered.keys() == module.average.keys()
    assert all(torch.equal(gathered[name], module.average[name]) for name in gathered)
    assert any(not torch.equal(gathered[name].double(), held[-1][name]) for name in gathered)


# -- what is not finite ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch", [1, 1024])
@pytest.mark.parametrize("array", ["video", "audio"])
def test_a_broken_latent_stops_the_run_with_the_name_of_its_clip(
    base: Path, store_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro_batch: int, array: str
) -> None:
    read = LatentStore.read

    def broken(store: LatentStore, row: Any, name: str) -> torch.Tensor:
        found = read(store, row, name).clone()
        if (row.entry, name) == ("clip-2@small", array):
            found.view(-1)[7] = float("nan")
        return found

    monkeypatch.setattr(LatentStore, "read", broken)
    families: list[Family] = []
    drawn = [drawn_of("fl2va", 1, 2, 3)]
    run = PLAIN.model_copy(update={"micro_batch": micro_batch})
    with pytest.raises(RuntimeError, match=r"step 0: the loss is not finite on clip-2@small \(fl2va\)"):
        trained(base, store_folder, tmp_path, stage(num_steps=1), run, drawn=drawn, change=families.append)
    assert same(weights_of(families[0]), weights_of(load_family(base)))


def test_a_gradient_without_end_stops_the_run_before_the_weights_are_spoilt(
    base: Path, store_folder: Path, tmp_path: Path
) -> None:
    families: list[Family] = []

    def spoil(family: Family) -> None:
        families.append(family)
        next(family.transformer.parameters()).register_hook(lambda gradient: gradient * float("inf"))

    drawn = [drawn_of("fl2va", 4, 5)]
    with pytest.raises(RuntimeError, match=r"gradient is not finite on clip-4@small, clip-5@small \(fl2va\)"):
        trained(base, store_folder, tmp_path, stage(num_steps=1), drawn=drawn, change=spoil)
    assert same(weights_of(families[0]), weights_of(load_family(base)))
