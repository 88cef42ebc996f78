"""Low-rank adapters (LoRA), through PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import peft
import safetensors.torch
import torch

from models.families import Family
from models.families.tensor_files import TensorFiles

NAME = "soundstage"


def add(family: Family, rank: int, seed: int) -> None:
    """Freeze the transformer and put trainable adapters of `rank` on the family's targets; alpha equals rank."""
    torch.manual_seed(seed)
    put(family.transformer, family.lora_targets, rank)


def put(transformer: torch.nn.Module, targets: str, rank: int) -> None:
    """`add` on a bare transformer, of any device, with random numbers as they come."""
    transformer.requires_grad_(requires_grad=False)
    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=targets)
    cast(Any, transformer).add_adapter(config, adapter_name=NAME)


def save(family: Family, path: Path, facts: dict[str, str]) -> None:
    """Write the adapter alone, keys as diffusers reads them, with `facts` and its transformer as JSON in its header.

    Alpha is not stored by the format and is taken as the rank on loading, which is why `add` never sets another.
    """
    state = peft.get_peft_model_state_dict(cast(Any, family.transformer), adapter_name=NAME)
    tensors = {f"{family.partition}.{key}": value.contiguous() for key, value in state.items()}
    facts = {**facts, "partition": family.partition}
    metadata = {NAME: json.dumps(facts, sort_keys=True)}  # several keys would come in another order every time
    safetensors.torch.save_file(tensors, path, metadata=metadata)


def load(family: Family, path: Path) -> None:
    """Put an adapter that `save` wrote on the transformer, bit for bit.

    Raises:
        ValueError: the file is none of ours, or its adapter is of another transformer or does not fit this one.
    """
    files = TensorFiles(path)
    try:
        facts = cast(dict[str, str], json.loads(files.metadata[NAME]))
        found, rank, alpha = facts["partition"], int(facts["rank"]), float(facts["alpha"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not say which transformer its adapter is of; name one that `train` wrote"
        ) from error
    if found != family.partition:
        raise ValueError(
            f"adapter {path} was trained on {found}, and {family.partition} is loaded: it would fit, and spoil the"
            f" result; name an adapter of {family.partition}"
        )
    if alpha != rank:
        raise ValueError(f"adapter {path} has alpha {alpha:g} and rank {rank}; only alpha = rank is loaded as trained")
    state = {name.removeprefix(f"{found}."): files.read(name).clone() for name in files.tensors}
    sizes = {name: tuple(tensor.shape) for name, tensor in family.transformer.named_parameters()}
    for name, tensor in state.items():
        module, _, side = name.removesuffix(".weight").rpartition(".lora_")
        size = sizes.get(f"{module}.weight", ())
        fits = {"A": (rank, *size[1:]), "B": (*size[:1], rank)}
        if len(size) != 2 or tuple(tensor.shape) != fits.get(side):
            raise ValueError(f"adapter {path}: {name} of size {tuple(tensor.shape)} does not fit this model")
    transformer = cast(Any, family.transformer)
    transformer.load_lora_adapter(state, prefix=None, adapter_name=NAME)
    held = peft.get_peft_model_state_dict(transformer, adapter_name=NAME)
    if held.keys() != state.keys() or not all(torch.equal(held[name].cpu(), state[name]) for name in state):
        raise ValueError(f"adapter {path} does not fit this model: what was loaded is not what the file holds")


def merge(family: Family) -> None:
    """Fold the adapter into the weights and take it off."""
    transformer = cast(Any, family.transformer)
    transformer.fuse_lora(adapter_names=[NAME])
    transformer.unload_lora()
    family.transformer.requires_grad_(requires_grad=True)
