"""The curriculum: a table of how difficult every training entry is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data.files import ROW_GROUP, schema_of, whole
from data.records import Frozen

Column = NDArray[np.float64]
Mask = NDArray[np.bool_]
arrow, compute = cast(Any, pa), cast(Any, pc)
"""Compiled libraries without a single type."""


class Planned(Frozen):
    """One training entry of the curriculum. Ranks run from 0 (easiest of its bucket) to 1, None where not measured."""

    entry: str
    """`CLIP_ID@CANVAS`."""
    clip_id: str
    source_id: str
    group: str
    bucket: str
    """Entries ranked among each other, by canvas and shape: `base 22f 32x32`."""
    motion: float | None
    tokens: float | None
    cuts: float | None
    caption: float | None
    sound: float | None
    sync: float | None
    quality: float | None
    loss: float | None
    """Ranks of the features: see `data.difficulty.FEATURES`."""
    difficulty: float
    """Rank of the weighted mean of the ranks present; 0.5 where none is."""
    review: bool
    """To be looked at before training: among the hardest by loss, where hard and broken overlap."""


def write_planned(path: Path, texts: Mapping[str, Any], numbers: Mapping[str, Column], review: Mask) -> None:
    """Write columns of `Planned` as `write_records` writes rows, in Arrow alone: a million take seconds.

    Args:
        path: Where to.
        texts: Arrow arrays of the columns of text.
        numbers: Ranks and difficulty, NaN where there is none; rounded to 6 digits.
        review: Entries to be looked at.
    """
    columns = dict(texts) | {"review": arrow.array(review)}
    for name, values in numbers.items():
        columns[name] = arrow.array(np.round(values, 6), arrow.float64(), from_pandas=True)
    schema = schema_of(Planned)
    table = arrow.Table.from_arrays([columns[field.name] for field in schema], schema=schema)
    with whole(path) as temporary:
        cast(Any, pq).write_table(table, temporary, row_group_size=ROW_GROUP)
