"""Low-rank adapters (LoRA), through PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import peft
import safetensors.torch
import torch

from models.families import Family

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
    """Write the adapter alone, keys as diffusers reads them, with `facts` as JSON in its header.

    Alpha is not stored by the format and is taken as the rank on loading, which is why `add` never sets another.
    """
    state = peft.get_peft_model_state_dict(cast(Any, family.transformer), adapter_name=NAME)
    tensors = {f"transformer.{key}": value.contiguous() for key, value in state.items()}
    metadata = {NAME: json.dumps(facts, sort_keys=True)}  # several keys would come in another order every time
    safetensors.torch.save_file(tensors, path, metadata=metadata)


def merge(family: Family) -> None:
    """Fold the adapter into the weights and take it off."""
    transformer = cast(Any, family.transformer)
    transformer.fuse_lora(adapter_names=[NAME])
    transformer.unload_lora()
    family.transformer.requires_grad_(requires_grad=True)
