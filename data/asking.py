"""What an expectation and its answer are, and how rows become the table they are asked of."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from pydantic import JsonValue

from data import files
from data.records import Frozen

if TYPE_CHECKING:
    import pandas as pd

BETWEEN, IN_SET = "ColumnValuesToBeBetween", "ColumnValuesToBeInSet"
UNIQUE, NOT_NULL = "ColumnValuesToBeUnique", "ColumnValuesToNotBeNull"
MATCH, MEAN = "ColumnValuesToMatchRegex", "ColumnMeanToBeBetween"
LENGTH, DISTINCT = "ColumnValueLengthsToBeBetween", "ColumnProportionOfUniqueValuesToBeBetween"
GREATER, ROWS = "ColumnPairValuesAToBeGreaterThanB", "TableRowCountToBeBetween"
KL = "ColumnKLDivergenceToBeLessThan"
SHARE: dict[str, JsonValue] = {"min_value": 0, "max_value": 1}
TRUE: dict[str, JsonValue] = {"value_set": [True]}


class Expectation(Frozen):
    """One thing that is true of a good dataset."""

    name: str
    kind: str
    options: dict[str, JsonValue]
    critical: bool = True
    """Whether its failure stops the run; a warning is only written down."""
    why: str


class Outcome(Frozen):
    """What one expectation found."""

    name: str
    kind: str
    column: str | None
    critical: bool
    success: bool
    measured: str
    """The observed value, or unexpected rows of all rows with a value."""
    limit: str
    num_unexpected: int
    unexpected: tuple[str, ...]
    """`source_id path` of the first rows at fault, sorted."""
    why: str


Suite = tuple[Expectation, ...]


def _row(critical: bool, name: str, kind: str, why: str, options: dict[str, JsonValue]) -> Expectation:
    return Expectation(name=name, kind=kind, options=options, critical=critical, why=why)


def must(name: str, kind: str, why: str, **options: JsonValue) -> Expectation:
    """An expectation whose failure stops the run."""
    return _row(True, name, kind, why, options)


def should(name: str, kind: str, why: str, **options: JsonValue) -> Expectation:
    """An expectation whose failure is only written down."""
    return _row(False, name, kind, why, options)


def table_of(rows: Iterable[dict[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """Rows as a table, by way of Arrow in portions: the objects of all rows are never in memory together."""
    pa, stream = files.arrow, iter(rows)
    parts: list[Any] = []
    while portion := list(itertools.islice(stream, files.ROW_GROUP)):
        parts.append(pa.table({name: [row[name] for row in portion] for name in columns}))
    if not parts:
        import pandas as pd

        return pd.DataFrame(columns=[*columns])
    return cast("pd.DataFrame", pa.concat_tables(parts, promote_options="permissive").to_pandas(self_destruct=True))


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    """One line a failed critical expectation: its name, what was measured, the limit and the rows."""
    lines: list[str] = []
    for item in outcomes:
        if item.success or not item.critical:
            continue
        rows = f"; {', '.join(item.unexpected[:10])}" if item.unexpected else ""
        more = f" and {item.num_unexpected - 10} more" if item.num_unexpected > 10 else ""
        subject = f"{item.name} ({item.column})" if item.column else item.name
        why = f" ({item.why})" if item.why else ""
        lines.append(f"{subject}: {item.measured}, expected {item.limit}{why}{rows}{more}")
    return lines
