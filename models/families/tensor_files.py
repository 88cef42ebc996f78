"""Safetensors files of others: what they hold, and why some of them cannot be trained from."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Precisions that weights are trained from, by their names in files."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
PICKLE = "a pickle file, which can run code when it is read"
HEADS = {b"GGUF": "is a GGUF file, which is quantised", b"PK\x03\x04": f"is {PICKLE}", b"\x80": f"is {PICKLE}"}
"""First bytes of what does not open, whatever it is called."""
REMEDY = "use the whole model's .safetensors file in bf16 or fp32"
MODULATION = re.compile(r"adaln|time_embed|norm_out\.linear|scale_shift")
"""What files are pruned of: the tables that turn timesteps into scales and shifts."""
MAX_HEADER_BYTES = 100_000_000
"""Longest header that the format allows. Source: the safetensors specification."""
Shape = tuple[int, ...]


class TensorFiles:
    """One safetensors file, or all of a folder, opened without reading any weights.

    Raises:
        ValueError: a file is missing, cut short, a pickle or of another format, or a tensor is there twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.paths = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not self.paths:
            found = sorted(item.name for item in path.iterdir() if item.suffix in PICKLES)
            why = f"; {found[0]} is {PICKLE}" if found else ""
            raise ValueError(f"{path} holds no .safetensors file{why}; {REMEDY}")
        self.tensors: dict[str, tuple[str, Shape, int]] = {}
        """Precision, size and file of every tensor."""
        self.metadata: dict[str, str] = {}
        """Words in the files' headers."""
        self._opened: list[Any] = []
        for number, file in enumerate(self.paths):
            refuse_foreign(file)
            try:
                opened = cast(Any, safe_open)(file, framework="pt")
                listed = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file} {damage_of(file)}; {REMEDY}") from error
            self._opened.append(opened)
            self.metadata |= cast("dict[str, str] | None", opened.metadata()) or {}
            for name, part in listed.items():
                if name in self.tensors:
                    raise ValueError(
                        f"{file}: {name} is in {self.paths[self.tensors[name][2]].name} too; name one file"
                    )
                self.tensors[name] = (part.get_dtype(), tuple(part.get_shape()), number)
        self._stamps = [stamp(file) for file in self.paths]

    def shapes(self) -> dict[str, Shape]:
        """Size of every tensor."""
        return {name: shape for name, (_, shape, _) in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        """One tensor, mapped."""
        return self._opened[self.tensors[name][2]].get_tensor(name)

    def refuse_changed(self) -> None:
        """Raise RuntimeError where a file is not the one that was opened."""
        for file, before in zip(self.paths, self._stamps, strict=True):
            if stamp(file) != before:
                raise RuntimeError(f"{file} changed while it was read; run it again when it is whole")


def filled(kind: Any, folder: Path, *, mapped: bool = False) -> torch.nn.Module:
    """A model of diffusers' class `kind` with the weights of its folder, in full precision.

    Args:
        kind: The class.
        folder: Its configuration and weights.
        mapped: Leave the weights in their files, in their precision, for `models.parallel.prepare` to take up: until
            then they are pages that all processes of a machine share.

    Raises:
        ValueError: as `TensorFiles`.
        RuntimeError: weights are missing, or of another size.
    """
    with init_empty_weights(include_buffers=False):  # buffers outside of files have their values from the start
        model = cast(torch.nn.Module, kind.from_config(kind.load_config(str(folder))))
    files = TensorFiles(folder)
    found = cast(Any, model).load_state_dict(
        {name: files.read(name) for name in files.tensors}, strict=False, assign=True
    )
    missing = cast(list[str], found.missing_keys)
    if missing:
        raise RuntimeError(f"{folder} lacks {len(missing)} tensors, e.g. {missing[0]}; {REMEDY}")
    if strays := cast(list[str], found.unexpected_keys):
        warnings.warn(f"{folder} holds {len(strays)} tensors that the model has not, e.g. {strays[0]}", stacklevel=2)
    return (model if mapped else widen(model)).eval()


def widen(model: torch.nn.Module) -> torch.nn.Module:
    """A model with its parameters in full precision, in place; wider ones stay."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.itemsize < torch.float32.itemsize:
            parameter.data = parameter.data.float()
    return model


def stamp(path: Path) -> tuple[int, int, int]:
    """What changes when a file is written to or replaced."""
    found = os.stat(path)  # noqa: PTH116 - follows links, as opening does
    return found.st_ino, found.st_size, found.st_mtime_ns


def refuse_foreign(path: Path) -> None:
    """Raise ValueError where there is no such file, or its name is that of a pickle."""
    if not path.is_file():
        raise ValueError(f"weights {path}: there is no such file or folder")
    if path.suffix.lower() in PICKLES:
        raise ValueError(f"{path} is {PICKLE}; {REMEDY}")


def damage_of(path: Path) -> str:
    """What is wrong with a file that does not open."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(length) if length <= MAX_HEADER_BYTES else b""
        stream.seek(0)
        head = stream.read(4)
    if not text.startswith(b"{"):
        return next((said for magic, said in HEADS.items() if head.startswith(magic)), "is no safetensors file")
    if len(text) < length:
        return f"is cut short: {size} bytes, and its header alone needs {8 + length}"
    try:
        listed = cast(dict[str, dict[str, Any]], json.loads(text))
        wanted = 8 + length + max(int(part["data_offsets"][1]) for name, part in listed.items() if name[:2] != "__")
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return "has a damaged header"
    return f"is cut short: {size} of {wanted} bytes" if size < wanted else "has a damaged header"


def refuse_quantised(files: TensorFiles, names: Iterable[str]) -> None:
    """Raise ValueError where a tensor has a precision that weights are not trained from."""
    odd = [name for name in names if files.tensors[name][0] not in DTYPES]
    if odd:
        where = f"{files.path}: {odd[0]} is {files.tensors[odd[0]][0]} (and {len(odd) - 1} more)"
        raise ValueError(f"{where}: quantised weights cannot be trained or converted; {REMEDY}")


def refuse_pruned(path: Path, names: Iterable[str]) -> None:
    """Raise ValueError where the names are those of an adapter, or of a model whose AdaLN tables were folded."""
    for name in names:
        if "lora_" in name:
            raise ValueError(f"{path} is an adapter (LoRA) with {name}, not a transformer; {REMEDY}")
        if "adaln_t_table" in name:
            raise ValueError(f"{path} is pruned: {name} stands for its time embedding and AdaLN tensors; {REMEDY}")


def refuse_mismatch(path: Path, folder: Path, found: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> None:
    """Hold the names and sizes of a file against those of the model that it is for.

    Args:
        path: Of the file.
        folder: Of the transformer in the base model.
        found: Sizes of what the file holds, by the model's names.
        wanted: Sizes of what the model has.

    Raises:
        ValueError: it is pruned, or of another model or size.
    """
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing and all(MODULATION.search(name) for name in missing):
        raise ValueError(f"{path} is pruned: it lacks {len(missing)} AdaLN tensors, e.g. {missing[0]}; {REMEDY}")
    if missing or extra:
        said = [f"lacks {len(missing)} of {len(wanted)} tensors, e.g. {missing[0]}"] if missing else []
        said += [f"has {len(extra)} that are none of the model's, e.g. {extra[0]}"] if extra else []
        raise ValueError(f"{path} is not the transformer that {folder} describes: it {' and '.join(said)}; {REMEDY}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ValueError(
                f"{path}: {name} has size {found[name]}, and {folder} describes {shape}; it is of another size or"
                " version of the model: change `base`, or the weights"
            )
