"""Read every byte of a latent store, say what it holds, and copy it to S3 or OSS or to another folder where asked.

example: soundstage verify copy_to=s3://bucket/latents
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, field_validator

from data.media_open import Unreadable
from data.records import Frozen

if TYPE_CHECKING:
    from data.latents import LatentStore


class Config(Frozen):
    """Settings of the verify verb."""

    latents: str
    """Folder of the store, or where it lies on `s3://` or `oss://`."""
    copy_to: str | None = None
    """Where a copy goes that is read like the store itself: a folder, `s3://…` or `oss://…`; null copies nothing."""
    num_threads: int = Field(default=4, gt=0)
    """Shards that are read at once."""

    @field_validator("latents", mode="before")
    @classmethod
    def _names_a_store(cls, value: object) -> object:
        if value in (None, ""):
            raise ValueError("is empty; name the folder of a latent store, or where it lies on s3:// or oss://")
        return value


def run(config: Config) -> str:
    """Check every shard against its SHA-256; returns the fingerprint of the store.

    Raises:
        Broken: shards are missing or altered; all of them are named.
    """
    from concurrent.futures import ThreadPoolExecutor

    from tqdm import tqdm

    from data.latent_shards import Broken
    from data.latents import INDEX, LatentStore

    store = LatentStore(config.latents)
    names = [INDEX, *store.record["shards"]]

    def fault(name: str) -> str | None:
        try:
            store.verify_file(name)
        except (Broken, OSError) as error:
            return str(error)
        return None

    with ThreadPoolExecutor(config.num_threads) as pool:
        faults = list(tqdm(pool.map(fault, names), total=len(names), desc="verify", unit="shard", disable=None))
    if broken := [text for text in faults if text is not None]:
        raise Broken(f"{len(broken)} of {len(names)} files: " + "; ".join(broken))
    sys.stderr.write(described(store, len(names) - 1))
    if config.copy_to is not None:
        copy(store, config.copy_to)
    return store.fingerprint


def described(store: LatentStore, num_shards: int) -> str:
    """What a whole store holds, in lines."""
    rows = Counter(zip(*(store.index.table[name].to_pylist() for name in ("split", "canvas")), strict=True))
    listed = ", ".join(f"{split}/{canvas} {count}" for (split, canvas), count in sorted(rows.items()))
    family, dtype = store.record.get("family", "?"), store.record.get("dtype", "?")
    return (
        f"verify: {store.folder} is whole: {len(store.index)} entries in {num_shards} shards, {family}, {dtype},"
        f" fingerprint {store.fingerprint[:12]}…: {listed}\n"
    )


def copy(store: LatentStore, target: str) -> None:
    """Send every file, the record last, but for those that an earlier copy has: a folder's are read, remote ones believed.

    Until the record is there a copy that was cut short is refused by name: its shards are not what its record says.

    Raises:
        ValueError: the target is no place for a copy.
    """
    from tqdm import tqdm

    from data.latent_shards import Broken
    from data.latents import INDEX, RECORD, LatentStore
    from data.remote import is_remote, send

    check_target(store, target)
    shards, there = store.record["shards"], set[str]()
    with contextlib.suppress(Broken, Unreadable):  # there is nothing whole
        earlier = LatentStore(target, check=False)
        for name in sorted(shards.keys() & earlier.record["shards"].keys()):
            with contextlib.suppress(Broken):
                if not is_remote(target):
                    earlier.verify_file(name)
                if earlier.record["shards"][name] == shards[name]:
                    there.add(name)
    names = [name for name in shards if name not in there]
    for name in tqdm([*names, INDEX, RECORD], desc="copy", unit="file", disable=None):
        send(Path(store.folder) / name, f"{target.rstrip('/')}/{name}")
    remark = f"; {len(there)} were there by its record, verify latents={target} reads them" if is_remote(target) else ""
    sys.stderr.write(f"verify: {len(names)} of {len(shards)} shards copied to {target}{remark}\n")


def check_target(store: LatentStore, target: str) -> None:
    """Raise ValueError where a copy cannot go, or would overwrite what is no copy."""
    from data.files import refuse_others
    from data.latents import RECORD
    from data.remote import is_remote, plain

    if is_remote(store.folder):
        raise ValueError(f"copy_to: {store.folder} is remote itself; copy it with its own tools")
    if is_remote(target):
        if target.partition("://")[0].lower() in ("http", "https"):
            raise ValueError(f"copy_to: {target} cannot be written to; name a folder, s3://… or oss://…")
        return
    if not target.strip("/ ") or (re.match(r"[A-Za-z0-9+.-]+:/", target) and plain(target) == target):
        raise ValueError(f"copy_to: {target!r} is no place for a store; name a folder, s3://BUCKET/… or oss://BUCKET/…")
    place = Path(plain(target))
    if place.exists() and not place.is_dir():
        raise ValueError(f"copy_to: {place} is a file, and a folder is to be written")
    if place.resolve() == Path(store.folder).resolve():
        raise ValueError(f"copy_to: {place} is the store itself")
    refuse_others(place, {RECORD, *store.record["shards"]}, "copy_to: ")
