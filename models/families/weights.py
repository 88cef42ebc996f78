"""A transformer's weights: where they compute, and to and from folders in the layout of diffusers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.tensor import DTensor

from models.families.tensor_files import filled

if TYPE_CHECKING:
    from models.families import Family


def computes_on(transformer: torch.nn.Module) -> torch.device:
    """Where a transformer computes: where its weights lie, but for shards, which FSDP2 may keep in host memory."""
    weight = next(transformer.parameters())
    return torch.device(weight.device_mesh.device_type) if isinstance(weight, DTensor) else weight.device


def load_transformer(family: Family, folder: Path) -> None:
    """Take the transformer's weights from `folder`, checking every key and shape."""
    family.transformer.load_state_dict(filled(type(family.transformer), folder).state_dict())


def save_transformer(family: Family, folder: Path) -> None:
    """Write the transformer to `folder`, as `load_transformer` reads it; same weights, same bytes."""
    cast(Any, family.transformer).save_pretrained(folder)
    forget_place(folder)


def forget_place(folder: Path) -> None:
    """Take out of a part's configuration where it was loaded from: the same model has the same bytes anywhere."""
    path = folder / "config.json"
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
        config.pop("_name_or_path", None)
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
