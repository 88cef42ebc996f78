"""A sorted file equals what sorting it in memory gives, wherever the pieces end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import files, sorting

arrow, parquet = cast(Any, pa), cast(Any, pq)


@pytest.mark.parametrize("num_rows", [0, 1, 6, 7, 50])
def test_pieces_side_by_side_are_the_sorted_table(
    num_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorting, "PIECE", 6)
    monkeypatch.setattr(files, "ROW_GROUP", 4)
    keys = [f"{number:04d}" for number in np.random.default_rng(num_rows).permutation(num_rows)]
    table = arrow.table({"key": arrow.array(keys, arrow.string()), "row": arrow.array(range(num_rows), arrow.int64())})
    parquet.write_table(table, tmp_path / "rows.parquet")
    order = sorting.order_of(table["key"].combine_chunks())
    sorting.scatter(tmp_path / "rows.parquet", order, table.schema, tmp_path)
    places, parts = [], [table.slice(0, 0)]
    for place, part in sorting.gathered(order, tmp_path):
        places += place.tolist()
        parts.append(part)
    found = arrow.concat_tables(parts)
    assert found["key"].to_pylist() == sorted(keys)
    assert found["row"].to_pylist() == places
    sizes = [len(group) for group in sorting.regrouped(iter(parts))]
    assert sum(sizes) == num_rows
    assert set(sizes[:-1]) <= {4}


def test_a_table_in_order_stays_as_it_is() -> None:
    assert sorting.order_of(arrow.array(["a", "a", "b"])).tolist() == [0, 1, 2]
    assert sorting.order_of(arrow.array(["b", "a", "c"])).tolist() == [1, 0, 2]
