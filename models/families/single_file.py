"""A transformer's weights from elsewhere: a diffusers folder as it is, an original file converted once and kept.

The original layouts are those that the models were published in, one .safetensors file or a folder of shards: fused
q/k/v and the other order of SwiGLU's halves (MiniMax-H3), other names (LTX-2). Renaming is diffusers' own.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import os
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import safetensors.torch
import torch
from torch import Tensor
from tqdm import tqdm

from data.files import sha256, whole
from models.families.tensor_files import DTYPES, TensorFiles, refuse_mismatch, refuse_pruned, refuse_quantised, stamp

QKV = Literal["stacked", "interleaved"]
"""Rows of H3's fused projection: all of q, k, v, or head by head; the tensors themselves cannot tell."""
SHARD_BYTES = 5_000_000_000
"""Largest file that is written, as diffusers writes; as much is held in memory."""
RECORD = "converted.json"
WEIGHTS = "diffusion_pytorch_model"
BESIDE = "model.diffusion_model."
"""Prefix of the transformer in files that hold autoencoders and other parts too."""
RENAMED = {"prompt_adaln_single.": "prompt_adaln."}
"""Parts of LTX-2.3 that diffusers 0.42.1 knows under another name and its converter does not rename."""
Convert = Callable[[dict[str, Tensor]], dict[str, Tensor]]


class Target(NamedTuple):
    """A tensor of the diffusers layout, and the original one that it is made of."""

    origin: str
    meta: Tensor


def weights_folder(
    weights: Path, base: Path, cache: Path, partition: str = "transformer", qkv_layout: QKV | None = None
) -> Path:
    """The diffusers folder of a transformer's weights: `weights` itself, its `partition`, or what `converted` keeps.

    Args:
        weights: A diffusers folder, a folder with one, or an original: a .safetensors file or a folder of shards.
        base: Model that the weights are for, a diffusers folder.
        cache: As `converted`.
        partition: Folder of the transformer in `base`.
        qkv_layout: As `converted`.

    Raises:
        RuntimeError: there is no model in `base`.
        ValueError: as `converted`.
    """
    folder = weights / partition if (weights / partition).is_dir() else weights
    if not (folder / "config.json").is_file() or "_class_name" not in (config := described(folder)):
        return converted(weights, base, cache, partition, qkv_layout)
    files, wanted = TensorFiles(folder), described(base / partition)
    for name in sorted(wanted.keys() & config.keys()):
        if wanted[name] != config[name] and name != "_diffusers_version":
            raise ValueError(
                f"{folder} has {name} = {config[name]}, and {base / partition} {wanted[name]}; it is of another model"
            )
    refuse_quantised(files, files.tensors)
    refuse_pruned(folder, files.tensors)
    refuse_mismatch(folder, base / partition, files.shapes(), shapes_of(sketch(base / partition)))
    return folder


def converted(
    file: Path, base: Path, cache: Path, partition: str = "transformer", qkv_layout: QKV | None = None
) -> Path:
    """The diffusers folder of an original checkpoint, converted on first use; precision stays what it is.

    Kept under the content's hash, the configuration it is converted for and diffusers' version, and made again where
    what was kept is damaged. Every tensor is read back and compared.

    Args:
        file: A .safetensors file, or a folder of shards, of the transformer alone or with the parts beside it.
        base: Model that says the sizes, a diffusers folder.
        cache: Folder that conversions are kept in.
        partition: Folder of the transformer in `base`.
        qkv_layout: Of H3; default `stacked` for a file, as published ones are, `interleaved` for released shards.

    Raises:
        RuntimeError: there is no model in `base`, or the file changed meanwhile.
        ValueError: the file is no whole safetensors file, or pruned, quantised, or of another model.
    """
    layout = qkv_layout or ("interleaved" if file.is_dir() else "stacked")
    files, model = TensorFiles(file), sketch(base / partition)
    plan = planned(files, base / partition, model, layout)
    identity = {
        "sha256": {path.name: hashed(path) for path in files.paths},
        "config": described(base / partition),
        "diffusers": version("diffusers"),
        "qkv_layout": layout,
    }
    text = json.dumps(identity, sort_keys=True)
    target = cache / hashlib.sha256(text.encode()).hexdigest()[:32]
    before = made(target)
    if intact(target):
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with alone(cache / f".{target.name}.lock"):
        if made(target) == before:  # else another process has, meanwhile, and read it back
            with whole(target) as folder:
                folder.mkdir()
                write(folder, plan, files, converter(model, layout))
                files.refuse_changed()
                describe(folder, identity, plan)
    return target


def described(folder: Path) -> dict[str, Any]:
    """A transformer's configuration, wherever it lies.

    Raises:
        RuntimeError: there is none.
        ValueError: it does not read.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise RuntimeError(f"no {path}; set `base` to a diffusers folder with the configuration of its transformer")
    try:
        config = cast(object, json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no settings")  # noqa: TRY004 - wrong content, not a wrong call
    return {name: value for name, value in cast(dict[str, Any], config).items() if name != "_name_or_path"}


def sketch(folder: Path) -> torch.nn.Module:
    """The transformer that a folder describes, without memory or weights; raises as `described`."""
    config = described(folder)
    kind = getattr(importlib.import_module("diffusers"), str(config.get("_class_name")), None)
    if kind is None:
        raise ValueError(f"{folder / 'config.json'} names no class of diffusers: {config.get('_class_name')}")
    with torch.device("meta"):
        return kind.from_config(config)


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and sizes of all that a model's file holds."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def converter(model: torch.nn.Module, layout: QKV) -> Convert:
    """Diffusers' conversion of some of a checkpoint's tensors.

    Raises:
        ValueError: diffusers converts no such model.
    """
    known = cast(
        dict[str, dict[str, Any]],
        importlib.import_module("diffusers.loaders.single_file_model").SINGLE_FILE_LOADABLE_CLASSES,
    ).get(type(model).__name__)
    if known is None:
        raise ValueError(f"diffusers has no original layout of {type(model).__name__}; name a diffusers folder")
    names = set(shapes_of(model))

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = {renamed(name): tensor for name, tensor in tensors.items()}
        if tensors.keys() <= names:  # LTX-2 calls most things alike; H3's SwiGLU has another name where it is swapped
            return tensors
        return known["checkpoint_mapping_fn"](
            checkpoint=tensors, config=dict(cast(Any, model).config), qkv_layout=layout
        )

    return convert


def renamed(name: str) -> str:
    """An original name without what is said in front of all of them."""
    name = name.removeprefix(BESIDE)
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return name


def planned(files: TensorFiles, folder: Path, model: torch.nn.Module, layout: QKV) -> dict[str, Target]:
    """What becomes of every tensor, checked against the model before any is read.

    Raises:
        ValueError: as `converted`.
    """
    own = [name for name in files.tensors if name.startswith(BESIDE)] or list(files.tensors)
    refuse_quantised(files, own)
    refuse_pruned(files.path, own)
    convert, plan = converter(model, layout), dict[str, Target]()
    for name in own:
        kind, shape, _ = files.tensors[name]
        try:
            made = convert({name: torch.empty(shape, dtype=DTYPES[kind], device="meta")})
        except (ValueError, RuntimeError) as error:
            said = str(error).partition(". ")[0]
            raise ValueError(f"{files.path}: {name} of size {shape} does not convert: {said}") from error
        for new, meta in made.items():
            if new in plan:
                raise ValueError(f"{files.path}: {name} and {plan[new].origin} both are {new}; is it of two models?")
            plan[new] = Target(name, meta)
    found = {name: tuple(target.meta.shape) for name, target in plan.items()}
    refuse_mismatch(files.path, folder, found, shapes_of(model))
    return plan


def write(folder: Path, plan: Mapping[str, Target], files: TensorFiles, convert: Convert) -> None:
    """The converted tensors as diffusers keeps them, read back and compared.

    Raises:
        RuntimeError: what was read back differs.
        ValueError: a tensor holds values that are not finite.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    metas = {name: target.meta for name, target in sorted(plan.items())}
    split = split_torch_state_dict_into_shards(
        metas, filename_pattern=f"{WEIGHTS}{{suffix}}.safetensors", max_shard_size=SHARD_BYTES
    )
    total = sum(meta.nbytes for meta in metas.values())
    with tqdm(total=total, desc=f"convert {files.path.name}", unit="B", unit_scale=True, disable=None) as bar:
        for shard, names in split.filename_to_tensors.items():
            held: dict[str, Tensor] = {}
            for name in names:
                origin = plan[name].origin
                if name not in held:
                    made = convert({origin: files.read(origin)})
                    held |= {key: tensor.clone() for key, tensor in made.items() if key in names}
                if not bool(held[name].isfinite().all()):
                    raise ValueError(f"{files.path}: {origin} holds values that are not finite; fetch the file again")
                bar.update(plan[name].meta.nbytes)
            safetensors.torch.save_file(held, folder / shard, metadata={"format": "pt"})
            refuse_altered(folder / shard, held)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{WEIGHTS}.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")


def refuse_altered(path: Path, held: Mapping[str, Tensor]) -> None:
    """Raise RuntimeError where a file does not hold these bits."""
    files = TensorFiles(path)
    same = files.tensors.keys() == held.keys() and all(
        files.read(name).dtype == tensor.dtype and torch.equal(bits(files.read(name)), bits(tensor))
        for name, tensor in held.items()
    )
    if not same:
        raise RuntimeError(f"{path} does not read back as it was written; check the disk and run it again")


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, which compare where values may not."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def describe(folder: Path, identity: Mapping[str, Any], plan: Mapping[str, Target]) -> None:
    """Add the configuration, and a record of what this was made of and holds."""
    (folder / "config.json").write_text(json.dumps(identity["config"], indent=2, sort_keys=True) + "\n")
    record = {
        **identity,
        "num_tensors": len(plan),
        "dtypes": Counter(str(target.meta.dtype).removeprefix("torch.") for target in plan.values()),
        "files": {path.name: sha256(path) for path in sorted(folder.iterdir())},
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def made(folder: Path) -> tuple[int, int, int] | None:
    """When a kept conversion was; None where there is none."""
    try:
        return stamp(folder / RECORD)
    except OSError:
        return None


def intact(folder: Path) -> bool:
    """Whether a kept conversion is still what was written."""
    try:
        files = cast(dict[str, str], json.loads((folder / RECORD).read_text(encoding="utf-8"))["files"])
        return all(sha256(folder / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError):
        return False


def hashed(path: Path) -> str:
    """SHA-256 of a large file, with a bar."""
    digest = hashlib.sha256()
    size = path.stat().st_size
    with (
        tqdm(total=size, desc=f"read {path.name}", unit="B", unit_scale=True, disable=None, leave=False) as bar,
        path.open("rb") as stream,
    ):
        while block := stream.read(1 << 24):
            digest.update(block)
            bar.update(len(block))
    return digest.hexdigest()


@contextmanager
def alone(path: Path) -> Generator[None]:
    """One process at a time, of all that name this file: of many ranks one converts, and the others find it done."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
