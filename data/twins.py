"""What near duplicates mean for a whole dataset: clusters of sources, and which clip of each group to keep.

Sources that look alike share a cluster, and so do those that sound alike; of clips that look alike, one is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data import duplicates, files, soundalikes
from data.records import Clip


class Twins(NamedTuple):
    """Near duplicates among the clips of one file."""

    clusters: dict[str, str]
    """Source to the smallest source of its cluster, for sources that share one."""
    worse: dict[int, tuple[int, float]]
    """Clip, by its row, to the one that is kept instead and how alike they look."""
    num_soundalikes: int = 0
    """Sources that sound like another one."""

    def named(self, path: Path) -> Iterator[tuple[Clip, str, float]]:
        """The worse clips, in order, with the id of the one kept."""
        wanted = {better for better, _ in self.worse.values()}
        names = {row: clip.clip_id for row, clip in enumerate(files.iter_records(path, Clip)) if row in wanted}
        for row, clip in enumerate(files.iter_records(path, Clip)):
            if row in self.worse:
                better, likeness = self.worse[row]
                yield clip, names[better], likeness


def find(clips: Path, signatures: Path, sounds: Path | None = None) -> Twins:
    """Compare all clips of a Parquet file by their signatures, which lie in a file in the same order.

    Args:
        clips: Parquet, the clips of a source in one piece.
        signatures: what each clip looks like.
        sounds: `soundalikes.levels` of each source, beside their lengths in `sounds.npy`; None compares pictures alone.
    """
    columns = cast(Any, pq.read_table(clips, columns=["source_id", "sharpness_p90"]))
    names = np.array(columns["source_id"].to_pylist())
    sources, owners = cast("tuple[NDArray[Any], NDArray[np.int64]]", np.unique(names, return_inverse=True))
    sharpness = np.asarray(columns["sharpness_p90"].to_numpy(), np.float64)
    table = np.memmap(signatures, np.int8, "r").reshape(len(owners), -1)
    together, alike = duplicates.Groups(len(sources)), duplicates.Groups(len(owners))
    likeness: dict[int, float] = {}
    for pair in duplicates.near_duplicates(table, owners):
        together.join(int(owners[pair.left]), int(owners[pair.right]))
        alike.join(pair.left, pair.right)
        for row in (pair.left, pair.right):
            likeness[row] = max(likeness.get(row, 0.0), pair.likeness)
    heard = set[int]()
    if sounds is not None:
        order = owners[np.sort(np.unique(owners, return_index=True)[1])]  # of the sources as they come
        lengths = cast("NDArray[np.int64]", np.load(sounds.with_suffix(".npy"), allow_pickle=False))
        for match in soundalikes.find(sounds, lengths, sounds.with_suffix(".hashed")):
            pair = (int(order[match.left]), int(order[match.right]))
            together.join(*pair)
            heard.update(pair)
    best: dict[int, int] = {}
    for row in sorted(likeness, key=lambda row: (-sharpness[row], row)):
        best.setdefault(alike.find(row), row)
    worse: dict[int, tuple[int, float]] = {}
    for row in sorted(likeness):
        better = best[alike.find(row)]
        if owners[row] != owners[better]:  # what one source shows twice is its own affair
            worse[row] = (better, likeness[row])
    found = sorted({int(owners[row]) for row in likeness} | heard)
    clusters = {str(sources[item]): str(sources[together.find(item)]) for item in found}
    return Twins(clusters, worse, len(heard))
