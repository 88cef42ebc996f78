"""Read every byte of a latent store, say what it holds, and copy it to S3 or OSS or to another folder where asked.

example: soundstage verify copy_to=s3://bucket/latents
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

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
    """Send every file, the record last; files that an earlier copy has, by its own record, are not sent again.

    Until the record is there a copy that was cut short is refused by name: its shards are not what its record says.
    """
    from tqdm import tqdm

    from data.latent_shards import Broken
    from data.latents import INDEX, RECORD, LatentStore
    from data.remote import is_remote, send

    if is_remote(store.folder):
        raise ValueError(f"copy_to: {store.folder} is remote itself; copy it with its own tools")
    there: dict[str, str] = {}
    with contextlib.suppress(Broken, Unreadable):  # there is nothing whole
        there = LatentStore(target).record["shards"]
    names = [name for name, digest in store.record["shards"].items() if there.get(name) != digest]
    for name in tqdm([*names, INDEX, RECORD], desc="copy", unit="file", disable=None):
        send(Path(store.folder) / name, f"{target.rstrip('/')}/{name}")
    sys.stderr.write(f"verify: {len(names)} of {len(store.record['shards'])} shards copied to {target}\n")
