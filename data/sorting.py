"""A Parquet file in the order of one of its columns, without holding it: pieces on disk that lie side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data import files
from data.splits import flat

arrow, compute, parquet = cast(Any, pa), cast(Any, pc), cast(Any, pq)
"""Compiled libraries without a single type."""
PIECE = 3 * files.ROW_GROUP
"""Rows sorted at once: some 20 MB of clips; a file is open for every so many rows there are."""


def order_of(values: Any) -> Any:
    """Places of the rows from the smallest value to the largest."""
    column = flat(values)
    if len(column) < 2 or compute.all(compute.less_equal(column[:-1], column[1:])).as_py():
        return np.arange(len(column))
    return compute.sort_indices(column).to_numpy()


def scatter(path: Path, order: Any, schema: Any, work: Path) -> None:
    """Write the rows to files of `PIECE` rows that lie side by side in the wanted order: no table is sorted whole."""
    piece = np.empty(len(order), np.int64)
    piece[order] = np.arange(len(order)) // PIECE
    with contextlib.ExitStack() as stack, parquet.ParquetFile(path) as file:
        names = [str(work / f"{number}.arrow") for number in range(-(-len(order) // PIECE))]
        sinks = [stack.enter_context(arrow.ipc.new_file(name, schema)) for name in names]
        begin = 0
        for batch in file.iter_batches(files.ROW_GROUP):
            table = arrow.Table.from_batches([batch]).select(schema.names).cast(schema)
            mine = piece[begin : begin + len(table)]
            for number in np.unique(mine).tolist():
                sinks[number].write_table(table.filter(arrow.array(mine == number)))
            begin += len(table)


def gathered(order: Any, work: Path) -> Iterator[tuple[Any, Any]]:
    """What `scatter` wrote, in the wanted order: the rows' places in the file, and the rows."""
    for number, begin in enumerate(range(0, len(order), PIECE)):
        places = order[begin : begin + PIECE]
        with arrow.OSFile(str(work / f"{number}.arrow")) as stream, arrow.ipc.open_file(stream) as file:
            yield places, file.read_all().take(arrow.array(np.argsort(np.argsort(places))))


def regrouped(parts: Iterable[Any]) -> Iterator[Any]:
    """The same rows in row groups of one size, so that the file does not depend on how they were read."""
    held: Any = None
    for part in parts:
        held = part if held is None else arrow.concat_tables([held, part])
        while len(held) >= files.ROW_GROUP:
            yield held.slice(0, files.ROW_GROUP).combine_chunks()
            held = held.slice(files.ROW_GROUP)
    if held is not None and len(held):
        yield held.combine_chunks()
