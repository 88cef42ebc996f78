"""Adapters: their files load elsewhere and predict the same, and off they leave the model as it was."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from diffusers.loaders.lora_pipeline import MiniMaxH3LoraLoaderMixin

from models import adapters
from models.families import Batch, Family, Noisy, Velocities, load_family
from tests.models.trials import batch_of, same, stage, trained, weights_of


def predicted(family: Family, batch: Batch) -> Velocities:
    """At a fixed point."""
    noise = torch.Generator().manual_seed(0)
    video, audio = (
        0.5 * clean + 0.5 * torch.randn(clean.shape, generator=noise) for clean in (batch.video_BCFHW, batch.audio_BSCT)
    )
    with torch.no_grad():
        return family.velocities(batch, Noisy(video, audio, 0.5, 0.5, tuple(range(len(video)))))


def equal(left: Velocities, right: Velocities) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def stir(family: Family) -> None:
    """Give every adapter an effect, as training would."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, item in family.transformer.named_parameters():
            if "lora_B" in name:
                item.normal_(std=0.1, generator=generator)


def modules_of(family: Family) -> set[str]:
    """Names of the modules that got an adapter."""
    names = (name for name, _ in family.transformer.named_parameters())
    return {name.partition(".lora_A.")[0] for name in names if ".lora_A." in name}


def test_same_adapter_gives_the_same_bytes_and_says_what_it_is(base: Path, tmp_path: Path) -> None:
    family = load_family(base)
    adapters.add(family, 4, 0)
    contents: set[bytes] = set()
    for _ in range(8):
        adapters.save(family, tmp_path / "adapter.safetensors", {"rank": "4", "alpha": "4", "partition": "transformer"})
        contents.add((tmp_path / "adapter.safetensors").read_bytes())
    assert len(contents) == 1
    assert rb"{\"alpha\": \"4\"" in contents.pop()


@pytest.mark.parametrize(
    "options",
    [{}, {"alpha": 12.0}, {"alpha": 1.0, "targets": r"transformer_blocks\.[02]\.attn\.to_q"}, {"modulation": True}],
)
def test_an_exported_adapter_predicts_the_same_through_diffusers_own_loader(
    family: Family, base: Path, store_folder: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    adapters.add(family, 4, 0, **options)
    stir(family)
    adapters.save(family, tmp_path / "adapter.safetensors", {})
    fresh, batch = load_family(base), batch_of(store_folder, "fl2va", 1, 2)
    plain = predicted(fresh, batch)
    loader = cast(Any, MiniMaxH3LoraLoaderMixin)
    state, metadata = loader.lora_state_dict(str(tmp_path / "adapter.safetensors"), return_lora_metadata=True)
    loader.load_lora_into_transformer(state, fresh.transformer, metadata=metadata)
    assert modules_of(fresh) == modules_of(family)
    assert equal(predicted(fresh, batch), predicted(family, batch))
    assert not equal(predicted(fresh, batch), plain)


def test_alpha_over_rank_scales_what_an_adapter_adds(family: Family, base: Path, store_folder: Path) -> None:
    batch, twice = batch_of(store_folder, "t2va", 1), load_family(base)
    adapters.add(family, 4, 0, alpha=12.0)
    adapters.add(twice, 4, 0)
    for one in (family, twice):
        stir(one)
    with torch.no_grad():
        for name, item in twice.transformer.named_parameters():
            if "lora_B" in name:
                item.mul_(3)
    for left, right in zip(predicted(family, batch), predicted(twice, batch), strict=True):
        assert torch.allclose(left, right, atol=1e-5)


def test_a_trained_adapter_predicts_as_the_weights_it_is_merged_into(
    base: Path, store_folder: Path, tmp_path: Path
) -> None:
    plan = stage(method="lora", lora_rank=2, lora_alpha=6.0, lora_modulation=True, num_steps=3)
    family, _ = trained(base, store_folder, tmp_path, plan)
    batch, first = (
        batch_of(store_folder, "fl2va", 1, 2),
        predicted(load_family(base), batch_of(store_folder, "fl2va", 1, 2)),
    )
    with_adapter = predicted(family, batch)
    adapters.merge(family)
    assert weights_of(family).keys() == weights_of(load_family(base)).keys()
    merged = predicted(family, batch)
    for left, right, before in zip(with_adapter, merged, first, strict=True):
        assert torch.allclose(left, right, atol=1e-5)
        assert float((left - before).abs().max()) > 1e-3


def test_adapters_go_where_they_are_asked_to(base: Path) -> None:
    plain, chosen, modulated = (load_family(base) for _ in range(3))
    adapters.add(plain, 2, 0)
    adapters.add(chosen, 2, 0, targets=r"transformer_blocks\.[02]\.attn\.to_[qk]")
    adapters.add(modulated, 2, 0, modulation=True)
    assert all(re.fullmatch(plain.lora_targets, name) for name in modules_of(plain))
    assert len(modules_of(plain)) == 4 * 6
    assert modules_of(chosen) == {f"transformer_blocks.{block}.attn.to_{part}" for block in (0, 2) for part in "qk"}
    more = {f"transformer_blocks.{block}.adaln_proj.linear" for block in range(4)}
    assert modules_of(modulated) == modules_of(plain) | more
    for family in (plain, chosen, modulated):
        taught = [name for name, item in family.transformer.named_parameters() if item.requires_grad]
        assert taught
        assert all(".lora_" in name for name in taught)


def test_switched_off_an_adapter_leaves_the_model_as_it_was(family: Family, base: Path, store_folder: Path) -> None:
    batch, first = batch_of(store_folder, "ref2va.0", 1, 2), weights_of(family)
    before = predicted(family, batch)
    adapters.add(family, 4, 0, alpha=12.0, modulation=True)
    assert equal(predicted(family, batch), before)
    stir(family)
    assert not equal(predicted(family, batch), before)
    transformer = cast(Any, family.transformer)
    transformer.disable_adapters()
    assert equal(predicted(family, batch), before)
    held = {name.replace(".base_layer", ""): item for name, item in weights_of(family).items() if "lora_" not in name}
    assert same(held, first)
    transformer.enable_adapters()
    assert not equal(predicted(family, batch), before)


def test_targets_that_match_nothing_are_refused_in_one_line(family: Family) -> None:
    with pytest.raises(ValueError, match="lora_targets") as caught:
        adapters.add(family, 4, 0, targets=r"decoder\.attention")
    assert r"decoder\.attention" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(ValueError, match="lora_targets"):  # also where something else would match
        adapters.add(family, 4, 0, targets=r"decoder\.attention", modulation=True)


def test_adapters_begin_alike_on_weights_left_in_narrow_files(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "narrow"
    cast(Any, load_family(base).transformer.bfloat16()).save_pretrained(folder)
    wide, narrow = (load_family(base, weights=folder, mapped=mapped) for mapped in (False, True))
    stock = cast(Any, type(wide.transformer)).from_pretrained(str(folder), torch_dtype=torch.float32)
    assert same(dict(wide.transformer.state_dict()), dict(stock.state_dict()))
    for family in (wide, narrow):  # those that no file holds too
        assert same(dict(family.transformer.named_buffers()), dict(stock.named_buffers()))
    begun: list[dict[str, torch.Tensor]] = []
    for family in (wide, narrow):
        adapters.add(family, 2, 0, modulation=True)
        begun.append({name: item for name, item in family.transformer.named_parameters() if item.requires_grad})
    assert begun[0].keys() == begun[1].keys() != set()
    assert all(torch.equal(item, begun[1][name]) for name, item in begun[0].items())
    assert {item.dtype for item in begun[1].values()} == {torch.float32}
    assert {item.dtype for item in narrow.transformer.parameters() if not item.requires_grad} == {torch.bfloat16}
