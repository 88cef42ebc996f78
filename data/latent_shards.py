"""One safetensors file of a latent store: written with keys and checksums in its header, read as views of the file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from data.files import whole

if TYPE_CHECKING:
    from torch import Tensor

HEADER = "soundstage"
"""Key of our metadata in a shard's header: one JSON text, since several keys would come in another order every time."""
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "U8": "uint8", "I64": "int64", "BOOL": "bool"}
"""Names of the format, and torch's."""


class Broken(RuntimeError):
    """A shard or an index that may not be used; the message names it."""


def checksum(array: Tensor) -> str:
    """XXH3 of an array's bytes: finds every accident; malice is what the shards' SHA-256 is for."""
    import torch
    import xxhash

    return xxhash.xxh3_64_hexdigest(cast(Any, array.contiguous().view(-1).view(torch.uint8).numpy()))


def seal_of(kinds: Mapping[str, tuple[str, Sequence[int]]], keys: Mapping[str, str], sums: Mapping[str, str]) -> str:
    """XXH3 of all that a reader takes from a header: a name that is damaged would not be found, and so not be missed.

    Args:
        kinds: Precision, as the format names it, and sizes of every array.
        keys: Of every entry.
        sums: Checksum of every array.
    """
    import xxhash

    named = {name: [dtype, list(sizes)] for name, (dtype, sizes) in kinds.items()}
    return xxhash.xxh3_128_hexdigest(json.dumps([named, dict(keys), dict(sums)], sort_keys=True).encode())


def write_shard(path: Path, entries: Mapping[str, Mapping[str, Tensor]], keys: Mapping[str, str]) -> None:
    """Write one part of some entries as one safetensors file; its header holds their keys and every checksum, sealed.

    Raises:
        ValueError: an entry has a slash in its name, or an array is of a precision that no latent has.
    """
    import safetensors.torch

    if odd := [entry for entry in entries if "/" in entry]:
        raise ValueError(f"{path}: entry {odd[0]!r} has a slash in its name, which separates it from its arrays")
    flat = {
        f"{entry}/{name}": array.contiguous() for entry, arrays in entries.items() for name, array in arrays.items()
    }
    sums = {name: checksum(array) for name, array in flat.items()}
    codes = {torch_name: code for code, torch_name in DTYPES.items()}
    try:
        kinds = {
            name: (codes[str(array.dtype).removeprefix("torch.")], tuple(array.shape)) for name, array in flat.items()
        }
    except KeyError as error:
        raise ValueError(f"{path}: latents are {', '.join(codes)}, not {error.args[0]}") from error
    header = {"keys": dict(keys), "sums": sums, "seal": seal_of(kinds, keys, sums)}
    with whole(path) as temporary:
        safetensors.torch.save_file(flat, temporary, {HEADER: json.dumps(header, sort_keys=True)})


class Shard(NamedTuple):
    """An open shard: its arrays are views of the mapped file."""

    mapped: Tensor
    """All bytes of the file."""
    places: dict[str, tuple[Any, tuple[int, ...], int, int]]
    """Of every array: dtype, sizes, first byte and the one after the last."""
    names: dict[str, list[str]]
    """Names of the arrays of each entry."""
    keys: dict[str, str]
    sums: dict[str, str]
    """Checksum of every array."""
    read: dict[str, Tensor]
    """Views that were asked for already; files do not rot while they are open, so those are not checked again."""

    def array(self, name: str) -> Tensor:
        """A new view; many times as fast as asking the library that wrote it."""
        dtype, sizes, start, stop = self.places[name]
        return self.mapped[start:stop].view(dtype).view(sizes)

    def altered(self, name: str) -> bool:
        """Whether an array is not what was written."""
        return checksum(self.array(name)) != self.sums[name]


def opened(path: Path, shown: str) -> Shard:
    """A shard, mapped.

    Raises:
        Broken: it is missing, cut short or no shard of ours, or its header is not what was written.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with cast(Any, safe_open(path, framework="pt")) as file:  # checks that all sizes and offsets agree
            header = json.loads(file.metadata()[HEADER])
        keys, sums, seal = header["keys"], header["sums"], header["seal"]
        size = path.stat().st_size
        mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        length = 8 + int.from_bytes(mapped[:8].numpy().tobytes(), "little")
        listed = cast(dict[str, Any], json.loads(mapped[8:length].numpy().tobytes()))
        del listed["__metadata__"]
        sealed = seal_of({name: (value["dtype"], value["shape"]) for name, value in listed.items()}, keys, sums)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Broken(f"latent shard {shown} is missing or damaged; run `soundstage encode` again") from error
    if sealed != seal:
        raise Broken(
            f"latent shard {shown} is altered: its header is not what was written; run `soundstage encode` again"
        )
    names: dict[str, list[str]] = {}
    places: dict[str, tuple[Any, tuple[int, ...], int, int]] = {}
    for key, value in sorted(listed.items()):
        entry, _, name = key.partition("/")
        names.setdefault(entry, []).append(name)
        start, stop = (length + offset for offset in value["data_offsets"])
        places[key] = (getattr(torch, DTYPES[value["dtype"]]), tuple(value["shape"]), start, stop)
    return Shard(mapped, places, names, keys, sums, {})
