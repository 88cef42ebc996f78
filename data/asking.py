"""What an expectation and its answer are, and the table of any number of rows that it is asked of."""

from __future__ import annotations

import errno
import html
import itertools
import sqlite3
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, cast

from pydantic import JsonValue

from data import files
from data.records import Frozen

BETWEEN, IN_SET = "ColumnValuesToBeBetween", "ColumnValuesToBeInSet"
UNIQUE, NOT_NULL = "ColumnValuesToBeUnique", "ColumnValuesToNotBeNull"
MATCH, MEAN = "ColumnValuesToMatchRegex", "ColumnMeanToBeBetween"
LENGTH, DISTINCT = "ColumnValueLengthsToBeBetween", "ColumnProportionOfUniqueValuesToBeBetween"
GREATER, ROWS = "ColumnPairValuesAToBeGreaterThanB", "TableRowCountToBeBetween"
KL, COMPOUND = "ColumnKLDivergenceToBeLessThan", "CompoundColumnsToBeUnique"
SHARE: dict[str, JsonValue] = {"min_value": 0, "max_value": 1}
TRUE: dict[str, JsonValue] = {"value_set": [True]}
NAME = "rows"
"""Of the one table in the file."""
CACHE_KB = 20_000
"""Memory that sorting and indexing may take before they go to the disk, KiB."""


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


class Table:
    """Rows in a scratch file at `place`, which is begun anew and is gone after the `with` block.

    Truth is kept as 1 and 0, NaN as no value, and texts escaped: Great Expectations' pages print them as markup.
    """

    def __init__(self, place: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]] = ()) -> None:
        files.remove(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        self.place, self.columns = place, tuple(columns)
        self._data = sqlite3.connect(place, isolation_level=None)
        self._data.executescript(f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-{CACHE_KB};")
        self.ask(f"CREATE TABLE {NAME} ({', '.join(map(quoted, columns))})")
        self._insert(rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._data.close()
        files.remove(self.place)

    def __len__(self) -> int:
        ((count,),) = self.ask(f"SELECT COUNT(*) FROM {NAME}")  # noqa: S608
        return count

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        """The answer to a query whose answer is small.

        Raises:
            OSError: the disk is full.
        """
        with self._room():
            return self._data.execute(query).fetchall()

    def values(self, column: str) -> list[Any]:
        """A column of a table that is small, as given."""
        return [original(value) for (value,) in self.ask(f"SELECT {quoted(column)} FROM {NAME} ORDER BY rowid")]  # noqa: S608

    def counts(self, column: str) -> dict[str, int]:
        """How many rows have each value of a column that has few, by value."""
        name = quoted(column)
        query = f"SELECT {name}, COUNT(*) FROM {NAME} WHERE {name} IS NOT NULL GROUP BY 1"  # noqa: S608
        return dict(sorted((original(value), count) for value, count in self.ask(query)))

    def alike(self, columns: Sequence[str], naming: Sequence[str], most: int) -> list[dict[str, Any]]:
        """The first rows whose values of `columns` other rows have too: these values and those of `naming`."""
        names = [*dict.fromkeys((*naming, *columns))]
        key, wanted = (", ".join(map(quoted, some)) for some in (columns, names))
        several = f"SELECT {key} FROM {NAME} GROUP BY {key} HAVING COUNT(*) > 1"  # noqa: S608
        query = f"SELECT {wanted} FROM {NAME} WHERE ({key}) IN ({several}) ORDER BY rowid LIMIT {most}"  # noqa: S608
        return [dict(zip(names, row, strict=True)) for row in self.ask(query)]

    def _insert(self, rows: Iterable[Mapping[str, Any]]) -> None:
        query = f"INSERT INTO {NAME} VALUES ({', '.join('?' * len(self.columns))})"  # noqa: S608
        stream = iter(rows)
        with self._room():
            self._data.execute("BEGIN")
            while portion := list(itertools.islice(stream, files.ROW_GROUP)):
                self._data.executemany(query, ([escaped(row[name]) for name in self.columns] for row in portion))
            self._data.execute("COMMIT")

    @contextmanager
    def _room(self) -> Generator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise
            raise OSError(errno.ENOSPC, str(error), str(self.place)) from error


def quoted(name: str) -> str:
    """A column's name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def escaped(value: object) -> Any:
    """A value whose texts are escaped, those in lists and mappings too; `html.unescape` undoes it exactly."""
    if isinstance(value, str):
        return html.escape(value, quote=False)
    if isinstance(value, dict):
        return {key: escaped(item) for key, item in cast("dict[str, object]", value).items()}
    return [escaped(item) for item in cast("list[object]", value)] if isinstance(value, (list, tuple)) else value


def original(value: Any) -> Any:
    """What `escaped` was given."""
    return html.unescape(value) if isinstance(value, str) else value
