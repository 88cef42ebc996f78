"""A model with two transformers: each serves its modes, and nothing of one is put into the other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import safetensors.torch
import torch

from data.conditions import MODES, Mode
from data.records import ClipShape
from data.world import scene
from models import adapters, tiny_h3
from models.families import Family, Reference, load_family
from models.families.partitions import partition_for, partition_of, partitions_of
from models.generation import Generation, Generator

SHAPE = ClipShape(num_frames=22, frame_rate=24, height=16, width=16, sample_rate_hz=8000)
OTHER = scene("new", 4, 22 / 24, 24, 32, 8000, "bounce")
IMAGE = [Reference("image", OTHER.frames_FHWC[5:6])]


@pytest.fixture(scope="module")
def twofold(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny H3 with a second transformer of other weights, for references."""
    folder = shutil.copytree(base, tmp_path_factory.mktemp("zoo") / "twofold")
    torch.manual_seed(7)
    tiny_h3.build_transformer().save_pretrained(folder / "transformer_ref")
    return folder


@pytest.fixture(scope="module")
def swapped(twofold: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose one transformer has the other's weights."""
    folder = shutil.copytree(twofold, tmp_path_factory.mktemp("zoo") / "swapped")
    shutil.rmtree(folder / "transformer")
    (folder / "transformer_ref").rename(folder / "transformer")
    return folder


def of_image(generator: Generator) -> Generation:
    return generator.generate(["a ball"], references=[IMAGE], seed=1, num_inference_steps=3)[0]


def test_the_rule_follows_from_the_folders(base: Path, twofold: Path, ltx2_base: Path, tmp_path: Path) -> None:
    modes: tuple[Mode, ...] = tuple(mode for mode in MODES if mode != "kf2va")
    assert partitions_of(base) == {"transformer": modes}
    assert partitions_of(ltx2_base) == {"transformer": MODES}
    two = partitions_of(twofold)
    assert two == {"transformer": tuple(mode for mode in modes if mode != "ref2va"), "transformer_ref": ("ref2va",)}
    assert partition_for(twofold, ["t2va", "fl2va", "a2v"]) == "transformer"
    assert partition_for(twofold, ["ref2va"]) == "transformer_ref"
    assert partition_for(base, modes) == partition_for(ltx2_base, MODES) == "transformer"
    with pytest.raises(ValueError, match="MiniMax-H3 has no kf2va: it takes keyframes at the first and the last frame"):
        partition_for(base, ["kf2va"])
    half = tmp_path / "half"
    (half / "transformer_ref").mkdir(parents=True)
    shutil.copy(twofold / "modular_model_index.json", half)
    assert partition_for(half, ["ref2va"]) == "transformer_ref"
    with pytest.raises(RuntimeError, match=r"half has no transformer for fl2va \(it has transformer_ref for ref2va\)"):
        partition_for(half, ["ref2va", "fl2va"])


def test_modes_of_two_transformers_are_refused_by_their_names(twofold: Path) -> None:
    with pytest.raises(ValueError, match=r"serves t2va, fl2va by transformer and ref2va by transformer_ref"):
        partition_for(twofold, ["t2va", "ref2va", "fl2va"])


def test_references_are_generated_from_by_the_transformer_of_their_own(
    base: Path, twofold: Path, swapped: Path
) -> None:
    right = of_image(Generator.load(twofold, None, SHAPE, partition="transformer_ref"))
    same, other = (of_image(Generator.load(folder, None, SHAPE)) for folder in (swapped, base))
    assert np.array_equal(right.frames_FHWC, same.frames_FHWC)
    assert np.array_equal(right.waveform_CT, same.waveform_CT)
    assert not np.array_equal(right.frames_FHWC, other.frames_FHWC)


def test_a_transformer_does_not_generate_what_the_other_serves(twofold: Path, base: Path) -> None:
    with pytest.raises(ValueError, match=r"transformer serves t2va.*; ref2va needs another transformer"):
        of_image(Generator.load(twofold, None, SHAPE))
    generator = Generator.load(twofold, None, SHAPE, partition="transformer_ref")
    with pytest.raises(ValueError, match=r"transformer_ref serves ref2va; t2va needs another"):
        generator.generate(["a ball"], seed=1, num_inference_steps=3)
    with pytest.raises(RuntimeError, match=r"has no transformer_ref, it has transformer"):
        Generator.load(base, None, SHAPE, partition="transformer_ref")


def test_a_model_with_the_second_transformer_alone_generates_from_references(twofold: Path, tmp_path: Path) -> None:
    half = shutil.copytree(twofold, tmp_path / "half")
    shutil.rmtree(half / "transformer")
    whole, alone = (
        of_image(Generator.load(folder, None, SHAPE, partition="transformer_ref")) for folder in (twofold, half)
    )
    assert np.array_equal(whole.frames_FHWC, alone.frames_FHWC)


def test_a_checkpoint_of_the_other_transformer_is_refused(twofold: Path, swapped: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "tuned"
    shutil.copytree(swapped / "transformer", checkpoint / "transformer")
    assert partition_of(checkpoint) == "transformer"
    with pytest.raises(ValueError, match=r"tuned was trained from transformer, and transformer_ref is what this needs"):
        Generator.load(twofold, checkpoint, SHAPE, partition="transformer_ref")
    (checkpoint / "checkpoint.json").write_text(json.dumps({"partition": "transformer_ref"}))
    with pytest.raises(ValueError, match="was trained from transformer_ref"):
        Generator.load(twofold, checkpoint, SHAPE, partition="transformer")
    of_image(Generator.load(twofold, checkpoint, SHAPE))  # which is of the checkpoint's own
    (checkpoint / "checkpoint.json").write_text("[")
    with pytest.raises(ValueError, match=r"checkpoint\.json is not the record"):
        Generator.load(twofold, checkpoint, SHAPE)


def adapted(family: Family, path: Path) -> dict[str, torch.Tensor]:
    """An adapter that changes something, written; the tensors of its file."""
    adapters.add(family, 4, 0)
    torch.manual_seed(5)
    for name, parameter in family.transformer.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    adapters.save(family, path, {"rank": "4", "alpha": "4"})
    return safetensors.torch.load_file(path)


def test_an_adapter_comes_back_bit_for_bit_and_changes_what_is_generated(twofold: Path, tmp_path: Path) -> None:
    path, again = tmp_path / "adapter.safetensors", tmp_path / "again.safetensors"
    trained = load_family(twofold, partition="transformer_ref")
    tensors = adapted(trained, path)
    assert all(name.startswith("transformer_ref.transformer_blocks.") for name in tensors)
    family = load_family(twofold, partition="transformer_ref")
    adapters.load(family, path)
    adapters.save(family, again, {"rank": "4", "alpha": "4"})
    assert again.read_bytes() == path.read_bytes()
    plain = of_image(Generator.load(twofold, None, SHAPE, partition="transformer_ref"))
    loaded = of_image(Generator.load(twofold, None, SHAPE, partition="transformer_ref", adapter=path))
    direct = of_image(Generator(trained, SHAPE))
    assert np.array_equal(loaded.frames_FHWC, direct.frames_FHWC)
    assert not np.array_equal(loaded.frames_FHWC, plain.frames_FHWC)


def test_an_adapter_of_the_other_transformer_is_refused(twofold: Path, tmp_path: Path) -> None:
    path = tmp_path / "adapter.safetensors"
    adapted(load_family(twofold, partition="transformer_ref"), path)
    with pytest.raises(
        ValueError, match=r"adapter\.safetensors was trained on transformer_ref, and transformer is load"
    ):
        adapters.load(load_family(twofold), path)


@pytest.mark.parametrize(
    ("facts", "change", "words"),
    [
        (None, {}, "does not say which transformer"),
        ({"rank": "four", "alpha": "4"}, {}, "does not say which"),
        ({"rank": "2", "alpha": "2"}, {}, r"of size .* does not fit this model"),
        (
            {"rank": "4", "alpha": "4"},
            {"transformer.nowhere.lora_A.weight": torch.ones(4, 96)},
            "nowhere.* does not fit",
        ),
        (
            {"rank": "4", "alpha": "4"},
            {"transformer.transformer_blocks.0.norm1.lora_A.weight": torch.ones(4, 96)},
            "norm1.* does not fit",
        ),
        ({"rank": "4", "alpha": "4"}, {"transformer.proj_in.weight": torch.ones(96, 96)}, "proj_in.* does not fit"),
    ],
)
def test_what_is_no_adapter_of_this_model_is_refused(
    family: Family, base: Path, tmp_path: Path, facts: dict[str, str] | None, change: dict[str, Any], words: str
) -> None:
    path = tmp_path / "odd.safetensors"
    tensors = adapted(family, path)
    said = (
        None
        if facts is None
        else {adapters.METADATA: json.dumps({adapters.NAME: {"partition": "transformer", **facts}})}
    )
    safetensors.torch.save_file(tensors | change, path, cast(Any, said))
    with pytest.raises(ValueError, match=words) as caught:
        adapters.load(load_family(base), path)
    assert "odd.safetensors" in str(caught.value)
