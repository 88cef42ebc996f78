"""The curriculum: a table of how difficult every training entry is, and which entries a stage may draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data.conditions import Variant
from data.files import ROW_GROUP, schema_of, whole
from data.records import Frozen
from data.stage import Stage

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


class Columns(NamedTuple):
    """What stages choose entries by; texts are Arrow arrays or sequences."""

    difficulty: Column
    group: Any
    canvas: Any
    duration_s: Column
    variants: Any = None
    """Lists of variants, to ask whether an entry can be presented in a mode of the stage; None does not ask."""


def eligible(stage: Stage, columns: Columns) -> Mask:
    """Entries that a stage may draw: of its canvases, durations and modes, and in its window and mixture, or replayed."""
    result = in_window(stage, columns) | replayed(stage, columns)
    return result & _fits(stage, columns)


def in_window(stage: Stage, columns: Columns) -> Mask:
    """Entries of the stage's groups whose difficulty is in its window (all of it: pacing opens it in the end)."""
    low, high = stage.difficulty
    return (columns.difficulty >= low) & (columns.difficulty <= high) & _mixed(stage, columns)


def replayed(stage: Stage, columns: Columns) -> Mask:
    """Entries that the stage replays: of its replay groups, or else what is easier than its window."""
    if stage.replay_share <= 0:
        return np.zeros(len(columns.difficulty), np.bool_)
    if stage.replay_groups:
        return _among(columns.group, stage.replay_groups)
    return (columns.difficulty < stage.difficulty[0]) & _mixed(stage, columns)


def _mixed(stage: Stage, columns: Columns) -> Mask:
    groups = [name for name, weight in stage.mixture.items() if weight > 0]
    return _among(columns.group, groups) if groups else np.ones(len(columns.difficulty), np.bool_)


def _fits(stage: Stage, columns: Columns) -> Mask:
    result = np.ones(len(columns.difficulty), np.bool_)
    if stage.canvases:
        result &= _among(columns.canvas, stage.canvases)
    if stage.max_duration_s is not None:
        result &= columns.duration_s <= stage.max_duration_s + 5e-4  # limits are written to the millisecond
    if columns.variants is not None:
        lists = arrow.array(columns.variants) if isinstance(columns.variants, list | tuple) else columns.variants
        lists = lists.combine_chunks() if isinstance(lists, arrow.ChunkedArray) else lists
        modes = {name for name, share in stage.conditions.items() if share > 0}
        known = cast("list[str]", compute.unique(lists.flatten()).to_pylist())
        fitting = [name for name in known if Variant.parse(name).mode in modes]
        owner = np.asarray(compute.list_parent_indices(lists).to_numpy(), np.int64)
        result &= np.bincount(owner[_among(lists.flatten(), fitting)], minlength=len(result)) > 0
    return result


def _among(values: Any, names: Sequence[str]) -> Mask:
    """Which of some texts are among `names`."""
    texts = values if isinstance(values, arrow.Array | arrow.ChunkedArray) else arrow.array(values, arrow.string())
    return np.asarray(compute.is_in(texts, arrow.array(list(names), arrow.string())).to_numpy(zero_copy_only=False))
