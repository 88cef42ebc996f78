"""Ask Great Expectations, which is imported late: it takes 4 s and its types say too little, hence `Any`."""

from __future__ import annotations

import html
import json
import logging
import re
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from data import files
from data.asking import BETWEEN, COMPOUND, IN_SET, KL, LENGTH, NAME, Expectation, Outcome, Table, escaped, failures
from data.expectations import VERSION
from data.records import DataRefused

MAX_ROWS_NAMED = 100
"""Rows named for one failed expectation; the count is always whole."""
NAMING = ("clip_id", "source_id", "path")
"""Columns that name a row; the first of them that a table has is its id."""
RANGES = (BETWEEN, LENGTH, IN_SET)
"""Kinds of expectations that a value can lie outside of."""
log = logging.getLogger(__name__)


def enforce(
    name: str, table: Table, suite: Sequence[Expectation], answers: Path, docs: Path, *, also: Sequence[str] = ()
) -> list[Outcome]:
    """Hold `table` against the suite called `name`; what was found is written to `answers`, its pages to `docs/name`.

    Args:
        also: complaints that come from elsewhere; they refuse the dataset too.

    Raises:
        DataRefused: a critical expectation failed; the message names it, what was measured, and the rows at fault.
            The evidence is written all the same.
    """
    pages = docs / name
    with files.whole(pages) as folder:
        outcomes = judge(table, suite, folder, name)
    found = {
        "suite": name,
        "version": VERSION,
        "num_rows": len(table),
        "outcomes": [outcome.model_dump() for outcome in outcomes],
    }
    files.write_text(answers, json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    for item in outcomes:
        if not item.success and not item.critical:
            log.warning("expectation %s: %s, expected %s (%s)", item.name, item.measured, item.limit, item.why)
    if problems := [*also, *failures(outcomes)]:
        raise DataRefused(f"{name}: " + "; ".join(problems) + f". Pages: {pages / 'index.html'}")
    return outcomes


def judge(
    table: Table, expectations: Sequence[Expectation], docs: Path | None = None, name: str = "manifest"
) -> list[Outcome]:
    """What every expectation finds in `table`, in the given order; Data Docs are written into the folder `docs`.

    Raises:
        ValueError: an expectation names a kind or an option that Great Expectations does not have.
    """
    with quiet():
        import great_expectations
        from great_expectations.data_context.types.base import ProgressBarsConfig

        gx = cast("Any", great_expectations)
        context = gx.get_context(mode="ephemeral")
        context.variables.progress_bars = ProgressBarsConfig(globally=False)
        source = context.data_sources.add_sqlite("soundstage", connection_string=address(table.place))
        asset = source.add_table_asset(name, table_name=NAME)
        definition = gx.ValidationDefinition(
            name=name,
            data=asset.add_batch_definition_whole_table("all"),
            suite=context.suites.add(gx_suite(expectations, name)),
        )
        checkpoint = gx.Checkpoint(
            name=name,
            validation_definitions=[context.validation_definitions.add(definition)],
            actions=docs_actions(context, docs),
            result_format={
                "result_format": "SUMMARY",
                "partial_unexpected_count": MAX_ROWS_NAMED,
                "unexpected_index_column_names": naming(table),
            },
        )
        run = context.checkpoints.add(checkpoint).run()
        source.get_engine().dispose()
    (validation,) = list(run.run_results.values())
    found = {str(item.expectation_config.meta["name"]): item.to_json_dict() for item in validation.results}
    return [outcome(expectation, found[expectation.name], table) for expectation in expectations]


def address(place: Path) -> str:
    """Where SQLAlchemy finds the file, to read only; a folder's name may hold whatever means something in an address."""
    from sqlalchemy import URL

    query = {"mode": "ro", "uri": "true"}
    return URL.create("sqlite", database=f"file:{quote(str(place.absolute()))}", query=query).render_as_string()


def naming(table: Table) -> list[str]:
    """Columns that tell a person which row is meant: the id of what a row is, then its path where there is one."""
    identity = next(column for column in NAMING if column in table.columns)
    return [identity, *(column for column in ("path",) if column in table.columns)]


@contextmanager
def quiet() -> Generator[None]:
    """Silence what Great Expectations says about itself while it runs."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # its loggers set levels of their own
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def gx_suite(expectations: Sequence[Expectation], name: str) -> Any:
    """The table of expectations as Great Expectations' own objects."""
    import great_expectations as gx
    from great_expectations import expectations as kinds

    built: list[Any] = []
    for item in expectations:
        kind = getattr(kinds, f"Expect{item.kind}", None)
        if kind is None:
            raise ValueError(f"expectation {item.name}: Great Expectations has no Expect{item.kind}")
        severity = "critical" if item.critical else "warning"
        built.append(kind(**escaped(item.options), severity=severity, notes=item.why, meta={"name": item.name}))
    return gx.ExpectationSuite(name=name, expectations=built)


def docs_actions(context: Any, docs: Path | None) -> list[Any]:
    """The action that writes Data Docs into `docs`, where wanted."""
    from great_expectations.checkpoint.actions import UpdateDataDocsAction

    if docs is None:
        return []
    store = {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(docs.absolute())}
    index = {"class_name": "DefaultSiteIndexBuilder"}
    site = {"class_name": "SiteBuilder", "site_index_builder": index, "store_backend": store}
    context.add_data_docs_site("docs", site)
    return [UpdateDataDocsAction(name="docs", site_names=["docs"])]


def outcome(expectation: Expectation, found: dict[str, Any], table: Table) -> Outcome:
    """Great Expectations' result on `table` without its clocks; an expectation that raised has failed."""
    result = cast("dict[str, Any]", found["result"])
    num_unexpected = int(result.get("unexpected_count") or 0)  # None where there are no rows
    rows = cast("list[dict[str, str]]", result.get("partial_unexpected_index_list") or [])
    if num_unexpected and expectation.kind == COMPOUND:  # it counts these in SQL, but names none
        rows = table.alike(cast("list[str]", expectation.options["column_list"]), naming(table), MAX_ROWS_NAMED)
    if raised := raised_message(found):
        measured = f"could not be computed: {raised}"
    elif "observed_value" in result:
        observed = result["observed_value"]
        measured = f"{observed:.6g}" if isinstance(observed, (int, float)) else html.unescape(f"{observed}")
    else:
        fault = "outside" if expectation.kind in RANGES else "at fault"
        measured = f"{num_unexpected} of {result.get('element_count', 0)} rows {fault}"
    column = expectation.options.get("column")
    return Outcome(
        name=expectation.name,
        kind=expectation.kind,
        column=str(column) if column is not None else None,
        critical=expectation.critical,
        success=bool(found["success"]),
        measured=measured,
        limit=worded(expectation),
        num_unexpected=num_unexpected,
        unexpected=tuple(
            sorted({html.unescape(" ".join(str(row[key]) for key in NAMING if key in row)) for row in rows})
        ),
        why=expectation.why,
    )


def worded(expectation: Expectation) -> str:
    """What is expected: the options, or the kind where it has none."""
    options = expectation.options
    if expectation.kind == KL:
        part = str(options["column"]).rpartition("_")[0]
        return f"mix by {part} within {options['threshold']} nats of the whole"
    limit = ", ".join(f"{key} {value}" for key, value in options.items() if key != "column")
    return limit or re.sub(r"(?<!^)(?=[A-Z])", " ", expectation.kind).lower()


def raised_message(found: dict[str, Any]) -> str | None:
    """The first exception inside a result; Great Expectations nests them by metric or not at all."""
    info = cast("dict[str, Any]", found.get("exception_info") or {})
    entries = [info] if "raised_exception" in info else list(info.values())
    return next((str(item["exception_message"]) for item in entries if item.get("raised_exception")), None)
