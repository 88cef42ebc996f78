"""Which source goes to which split: by hash of its near-duplicate cluster, once and for ever.

Columns are NumPy and Arrow arrays throughout: a million sources are tens of megabytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data.files import whole

arrow, compute = cast(Any, pa), cast(Any, pc)
"""Compiled libraries without a single type."""
SplitName = Literal["train", "val", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "val", "test")
TRAIN, VAL, TEST = 0, 1, 2
"""Places in `SPLITS`, which the arrays below hold; `OUT` is a source left out."""
OUT = -1
MIN_CLUSTERS = 3
"""One for each split."""

Codes = NDArray[np.int64]


@dataclass(frozen=True)
class Ledger:
    """Every source that was ever drawn, with its split: what keeps a draw the same when data is added."""

    source_id: Any
    """Arrow array of strings."""
    cluster: Any
    """The cluster's name when the source was drawn; names change when a smaller source id joins."""
    split: Codes

    def __len__(self) -> int:
        """How many sources were drawn so far."""
        return len(self.split)


@dataclass(frozen=True)
class Drawn:
    """The split of every source, in the order the sources were given."""

    split: Codes
    """Place in `SPLITS`, or `OUT`."""
    cluster: Any
    """The cluster's name by which no two splits share one, Arrow array of strings."""
    met: NDArray[np.uint8]
    """Bits `1 << place` of the splits in which the source's cluster already had members."""
    is_new: NDArray[np.bool_]
    """Whether the ledger did not know the source."""


EMPTY = Ledger(arrow.array([], arrow.string()), arrow.array([], arrow.string()), np.zeros(0, np.int64))


def unit(seed: int, cluster: str) -> float:
    """A number in [0, 1) that looks random and depends on nothing but its arguments."""
    return int.from_bytes(hashlib.sha256(f"{seed} {cluster}".encode()).digest()[:8]) / 2**64


def assign(
    source_id: Any, cluster: Any, seed: int, val_share: float, test_share: float, ledger: Ledger = EMPTY
) -> Drawn:
    """The split of every source: test where the hash of its cluster is below `test_share`, then val, else train.

    A source in the ledger stays where it is. A new one goes where its cluster is; if the cluster has members in two
    splits, the new ones that brought them together are left out. Where old sources alone are found to look alike
    across splits (the likeness was made stricter, say), test keeps its own and the others' are left out. A split
    that would be empty gets the new clusters whose hashes are nearest to it.

    Args:
        source_id: Arrow array of strings, each once.
        cluster: Name of the near-duplicate cluster of each, likewise.
        seed: Another seed is another draw.
        val_share: Share of clusters, 0–1.
        test_share: Likewise.
        ledger: What was drawn before with the same seed and shares.

    Raises:
        ValueError: fewer than three clusters, or a split stays empty because everything was drawn before.
    """
    place, names = coded(cluster)
    if len(names) < MIN_CLUSTERS:
        raise ValueError(
            f"{len(names)} clusters of sources, since sources that look or sound alike count as one; train, val and"
            f" test need at least {MIN_CLUSTERS}"
        )
    row = rows_in(source_id, ledger.source_id)
    old = np.where(row >= 0, ledger.split[row] if len(ledger) else OUT, OUT)
    met = np.zeros(len(names), np.uint8)
    np.bitwise_or.at(met, place[old >= 0], (1 << old[old >= 0]).astype(np.uint8))
    hashes = np.array([unit(seed, name) if not bits else np.nan for name, bits in zip(names, met, strict=True)])
    wanted = np.where(hashes < test_share, TEST, np.where(hashes < test_share + val_share, VAL, TRAIN))
    for code in (TRAIN, VAL, TEST):
        wanted[met == 1 << code] = code
    wanted[np.bitwise_count(met) > 1] = OUT
    split = np.where(old >= 0, old, wanted[place])
    split[yields(place, old, met, len(names))] = OUT
    fill(split, wanted, hashes, place, {TEST: test_share, VAL: val_share, TRAIN: 1.0})
    return Drawn(split, kept_names(cluster, place, row, ledger), met[place], row < 0)


def yields(place: Codes, old: Codes, met: NDArray[np.uint8], num_clusters: int) -> NDArray[np.bool_]:
    """Old sources that give way: their cluster has no new member to blame, and members in a split that counts more."""
    blamed = np.zeros(num_clusters, np.bool_)
    blamed[place[old < 0]] = True
    highest = np.where(met >= 1 << TEST, TEST, VAL)
    quarrel = (np.bitwise_count(met) > 1) & ~blamed
    return quarrel[place] & (old < highest[place])


def fill(split: Codes, wanted: Codes, hashes: NDArray[np.float64], place: Codes, shares: dict[int, float]) -> None:
    """Move new clusters into splits that would be empty, in place: smallest hashes first, out of train if it can spare.

    Raises:
        ValueError: no new cluster can be moved.
    """
    sizes = np.bincount(place, minlength=len(hashes))
    fresh = np.flatnonzero(~np.isnan(hashes))
    for code, share in shares.items():
        if share <= 0 or (split == code).any():
            continue
        ranked = fresh[np.argsort(-hashes[fresh] if code == TRAIN else hashes[fresh], kind="stable")]
        ranked = ranked[np.argsort(wanted[ranked] != TRAIN, kind="stable")]
        spare = [item for item in ranked if (split == wanted[item]).sum() > sizes[item]]
        if spare:
            wanted[spare[0]] = code
            split[place == spare[0]] = code
        else:
            raise ValueError(
                f"{SPLITS[code]} is empty and every source was drawn before; add sources, or delete split.ledger to draw"
                " all anew"
            )


def num_torn(cluster: Any, split: Codes) -> int:
    """How many clusters have members in two splits: drawn there before they were known to be alike.

    They keep their names (`Drawn.cluster`) and their places, because what a model has learnt from cannot be taken back.
    """
    place, names = coded(cluster)
    held = np.zeros(len(names), np.uint8)
    np.bitwise_or.at(held, place[split >= 0], (1 << split[split >= 0]).astype(np.uint8))
    return int((np.bitwise_count(held) > 1).sum())


def kept_names(cluster: Any, place: Codes, row: Codes, ledger: Ledger) -> Any:
    """The cluster of every source as the ledger knows it; of a new one, the smallest name its cluster had, else its own."""
    row_or_null = arrow.array(row, mask=row < 0)
    own = ledger.cluster.take(row_or_null)
    known = arrow.table({"place": place, "name": own}).filter(arrow.array(row >= 0))
    smallest = known.group_by("place").aggregate([("name", "min")])
    inherited = flat(smallest["name_min"]).take(compute.index_in(arrow.array(place), value_set=flat(smallest["place"])))
    return compute.coalesce(own, inherited, flat(cluster))


def merged(ledger: Ledger, source_id: Any, drawn: Drawn) -> Ledger:
    """The ledger with what was drawn new, sorted by source id."""
    new = arrow.array(drawn.is_new & (drawn.split != OUT))
    ids = arrow.concat_arrays([ledger.source_id, source_id.filter(new)])
    clusters = arrow.concat_arrays([ledger.cluster, drawn.cluster.filter(new)])
    split = np.concatenate([ledger.split, drawn.split[new.to_numpy(zero_copy_only=False)]])
    order = compute.sort_indices(ids)
    return Ledger(ids.take(order), clusters.take(order), split[order.to_numpy()])


def draw_name(seed: int, val_share: float, test_share: float) -> str:
    """What a ledger was drawn with; under other settings it does not count."""
    return f"seed {seed}, val {val_share!r}, test {test_share!r}"


def write_ledger(path: Path, ledger: Ledger, draw: str) -> None:
    """Write a ledger as Parquet, with the name of its draw."""
    names = arrow.array(SPLITS, arrow.string()).take(arrow.array(ledger.split))
    schema = arrow.schema(
        [("source_id", arrow.string()), ("cluster", arrow.string()), ("split", arrow.string())],
        metadata={"draw": draw},
    )
    with whole(path) as temporary:
        cast(Any, pq.write_table)(
            arrow.Table.from_arrays([ledger.source_id, ledger.cluster, names], schema=schema), temporary
        )


def read_ledger(path: Path, draw: str) -> Ledger:
    """The ledger of a draw; an empty one where there is none or it is of another draw."""
    if not path.is_file():
        return EMPTY
    table = cast(Any, pq.read_table)(path).combine_chunks()
    if (table.schema.metadata or {}).get(b"draw") != draw.encode():
        return EMPTY
    ids, clusters, names = (flat(table[name]) for name in ("source_id", "cluster", "split"))
    return Ledger(ids, clusters, rows_in(names, arrow.array(SPLITS, arrow.string())))


def flat(column: Any) -> Any:
    """A column in one piece."""
    return column.combine_chunks() if isinstance(column, arrow.ChunkedArray) else column


def coded(column: Any) -> tuple[Codes, list[str]]:
    """Place of every value in the list of distinct ones, and that list."""
    encoded = flat(column).dictionary_encode()
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), encoded.dictionary.to_pylist()


def rows_in(values: Any, table: Any) -> Codes:
    """Place of every value in `table`, -1 where it is not there."""
    return (
        compute.fill_null(compute.index_in(values, value_set=table), -1).to_numpy(zero_copy_only=False).astype(np.int64)
    )
