"""Low-rank adapters (LoRA), through PEFT."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import peft
import safetensors.torch
import torch
from torch import Tensor

from models.families import Family

NAME, ASSISTANT = "soundstage", "assistant"
METADATA = "lora_adapter_metadata"
"""Key under which diffusers' loaders look for an adapter's settings in a file's header."""


def add(
    family: Family,
    rank: int,
    seed: int,
    *,
    alpha: float | None = None,
    targets: str | None = None,
    modulation: bool = False,
) -> None:
    """Freeze the transformer and put trainable adapters on it.

    Args:
        family: Of the transformer.
        rank: Of the adapters.
        seed: Decides their first values.
        alpha: They count alpha / rank; None is the rank.
        targets: Regular expression of the modules that get one; None is the family's.
        modulation: Put them on what turns timesteps into scales and shifts too.

    Raises:
        ValueError: `targets` matches no module.
    """
    pattern = targets or family.lora_targets
    names = dict(cast(Any, family.transformer).named_modules())
    if not any(re.fullmatch(pattern, name) for name in names):
        raise ValueError(f"lora_targets {pattern} matches no module of the transformer of {family.name}")
    torch.manual_seed(seed)
    put(family.transformer, f"(?:{pattern}|{family.modulation_targets})" if modulation else pattern, rank, alpha)


def put(transformer: torch.nn.Module, targets: str, rank: int, alpha: float | None = None) -> None:
    """`add` on a bare transformer, of any device, with random numbers as they come."""
    transformer.requires_grad_(requires_grad=False)
    config = peft.LoraConfig(r=rank, lora_alpha=cast(int, alpha or rank), target_modules=targets)
    cast(Any, transformer).add_adapter(config, adapter_name=NAME)


def assist(family: Family, path: Path) -> None:
    """Put an adapter that is not trained beside what is; `dismiss` takes it off again.

    Raises:
        RuntimeError: it cannot be read, or is not of this transformer.
    """
    transformer = cast(Any, family.transformer)
    trained = [parameter for parameter in family.transformer.parameters() if parameter.requires_grad]
    try:
        transformer.load_lora_adapter(str(path), adapter_name=ASSISTANT, prefix="transformer")
    except (OSError, ValueError, RuntimeError) as error:
        raise RuntimeError(f"guidance.adapter {path}: {str(error).splitlines()[0]}") from error
    if ASSISTANT not in getattr(transformer, "peft_config", {}):
        raise RuntimeError(f"guidance.adapter {path} has nothing for this transformer: no key begins with transformer.")
    transformer.set_adapters([name for name in (NAME, ASSISTANT) if name in transformer.peft_config])
    family.transformer.requires_grad_(requires_grad=False)
    for parameter in trained:
        parameter.requires_grad = True


def dismiss(family: Family) -> None:
    """Take the assisting adapter off, if there is one."""
    transformer = cast(Any, family.transformer)
    put_on = getattr(transformer, "peft_config", {})
    if ASSISTANT in put_on and NAME in put_on:
        transformer.delete_adapters(ASSISTANT)
        transformer.set_adapters(NAME)
    elif ASSISTANT in put_on:
        transformer.unload_lora()  # with the layers that held it, which would rename the weights


def save(family: Family, path: Path, facts: Mapping[str, str]) -> None:
    """Write the adapter alone, keys as diffusers reads them, with rank, alpha and `facts` in its header.

    The header tells diffusers' loaders the alpha; without it they take it for the rank.
    """
    transformer = cast(Any, family.transformer)
    state: dict[str, Tensor] = peft.get_peft_model_state_dict(transformer, adapter_name=NAME)
    tensors = {f"transformer.{key}": value.contiguous() for key, value in state.items()}
    config = transformer.peft_config[NAME]
    modules = sorted({key.rpartition(".lora_")[0] for key in state})
    settings = {"r": config.r, "lora_alpha": config.lora_alpha, "target_modules": modules}
    header = {f"transformer.{key}": value for key, value in settings.items()} | {NAME: dict(facts)}
    # Several keys would come in another order every time.
    safetensors.torch.save_file(tensors, path, metadata={METADATA: json.dumps(header, sort_keys=True)})


def merge(family: Family) -> None:
    """Fold the adapter into the weights and take it off."""
    transformer = cast(Any, family.transformer)
    transformer.fuse_lora(adapter_names=[NAME])
    transformer.unload_lora()
    family.transformer.requires_grad_(requires_grad=True)
