"""Low-rank adapters (LoRA), through PEFT."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import peft
import safetensors.torch
import torch
from torch import Tensor

from models.families import Family
from models.families.tensor_files import TensorFiles

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
    names: list[str] = [name for name, _ in cast(Any, family.transformer).named_modules()]
    if not any(re.fullmatch(pattern, name) for name in names):
        raise ValueError(f"lora_targets {pattern} matches no module of the transformer of {family.name}")
    torch.manual_seed(seed)
    put(family.transformer, f"(?:{pattern}|{family.modulation_targets})" if modulation else pattern, rank, alpha)


def put(transformer: torch.nn.Module, targets: str, rank: int, alpha: float | None = None) -> None:
    """`add` on a bare transformer, of any device, with random numbers as they come."""
    transformer.requires_grad_(requires_grad=False)
    config = peft.LoraConfig(r=rank, lora_alpha=cast(int, alpha or rank), target_modules=targets)
    with as_full(transformer):
        cast(Any, transformer).add_adapter(config, adapter_name=NAME)


@contextmanager
def as_full(transformer: torch.nn.Module) -> Generator[None]:
    """Show PEFT narrow weights as full ones: it rounds an adapter to the type of what it is put on."""
    narrow = [(item, item.data) for item in transformer.parameters() if item.itemsize < torch.float32.itemsize]
    for item, data in narrow:
        item.data = torch.zeros((), device=data.device).expand(data.shape)  # of no size
    try:
        yield
    finally:
        for item, data in narrow:
            item.data = data


def assist(family: Family, path: Path) -> None:
    """Put an adapter that is not trained beside what is; `dismiss` takes it off again.

    Raises:
        RuntimeError: it cannot be read, or is not of this transformer.
    """
    transformer = cast(Any, family.transformer)
    trained = [parameter for parameter in family.transformer.parameters() if parameter.requires_grad]
    try:
        with as_full(family.transformer):
            transformer.load_lora_adapter(str(path), adapter_name=ASSISTANT, prefix=family.partition)
    except (OSError, ValueError, RuntimeError) as error:
        raise RuntimeError(f"guidance.adapter {path}: {str(error).splitlines()[0]}") from error
    if ASSISTANT not in getattr(transformer, "peft_config", {}):
        raise RuntimeError(
            f"guidance.adapter {path} has nothing for {family.partition}: no key begins with {family.partition}."
        )
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
    """Write the adapter alone, keys as diffusers reads them; its header has rank, alpha, its transformer and `facts`.

    The header tells diffusers' loaders the alpha; without it they take it for the rank.
    """
    transformer, partition = cast(Any, family.transformer), family.partition
    state: dict[str, Tensor] = peft.get_peft_model_state_dict(transformer, adapter_name=NAME)
    tensors = {f"{partition}.{key}": value.contiguous() for key, value in state.items()}
    config = transformer.peft_config[NAME]
    settings = {"r": config.r, "lora_alpha": float(config.lora_alpha), "target_modules": modules_of(state)}
    own = {**facts, "rank": f"{config.r}", "alpha": f"{config.lora_alpha:g}", "partition": partition}
    header = {f"{partition}.{key}": value for key, value in settings.items()} | {NAME: own}
    # Several keys would come in another order every time.
    safetensors.torch.save_file(tensors, path, metadata={METADATA: json.dumps(header, sort_keys=True)})


def modules_of(state: Mapping[str, Tensor]) -> list[str]:
    """Modules that have an adapter."""
    return sorted({key.rpartition(".lora_")[0] for key in state})


def load(family: Family, path: Path) -> None:
    """Put an adapter that `save` wrote on the transformer, bit for bit.

    Raises:
        ValueError: the file is none of ours, or its adapter is of another transformer or does not fit this one.
    """
    files = TensorFiles(path)
    try:
        facts = cast(dict[str, str], json.loads(files.metadata[METADATA])[NAME])
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
    state = {name.removeprefix(f"{found}."): files.read(name).clone() for name in files.tensors}
    sizes = {name: tuple(tensor.shape) for name, tensor in family.transformer.named_parameters()}
    for name, tensor in state.items():
        module, _, side = name.removesuffix(".weight").rpartition(".lora_")
        size = sizes.get(f"{module}.weight", ())
        fits = {"A": (rank, *size[1:]), "B": (*size[:1], rank)}
        if len(size) != 2 or tuple(tensor.shape) != fits.get(side):
            raise ValueError(f"adapter {path}: {name} of size {tuple(tensor.shape)} does not fit this model")
    transformer = cast(Any, family.transformer)
    settings = {"r": rank, "lora_alpha": alpha, "target_modules": modules_of(state)}
    transformer.load_lora_adapter(state, prefix=None, adapter_name=NAME, metadata=settings)
    held = peft.get_peft_model_state_dict(transformer, adapter_name=NAME)
    if held.keys() != state.keys() or not all(torch.equal(held[name].cpu(), state[name]) for name in state):
        raise ValueError(f"adapter {path} does not fit this model: what was loaded is not what the file holds")


def merge(family: Family) -> None:
    """Fold the adapter into the weights and take it off."""
    transformer = cast(Any, family.transformer)
    transformer.fuse_lora(adapter_names=[NAME])
    transformer.unload_lora()
    family.transformer.requires_grad_(requires_grad=True)
