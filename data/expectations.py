"""What a whole dataset must look like, judged by Great Expectations. Rules judge one source; these judge them all.

The definitions are a table (`suite`): to add one, add a row. `kind` is the class in `great_expectations.expectations`
without its `Expect`, `options` are that class's fields.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import JsonValue

from data.records import Frozen, Source
from data.rules import Limits, has_sound, sound_span

if TYPE_CHECKING:
    import pandas as pd

MAX_ROWS_NAMED = 100
"""Rows named for one failed expectation; the count is always whole."""
REFUSALS = (
    r"(?i)(as an ai\b|language model|i'm sorry|i am sorry|i cannot|i can't|unable to (see|view|describe)"
    r"|https?://|www\.|\.(mp4|mov|mkv|webm|avi)\b)"
)
"""Captions that a captioning model or an export script left by mistake."""
BETWEEN, IN_SET = "ColumnValuesToBeBetween", "ColumnValuesToBeInSet"
UNIQUE, NOT_NULL = "ColumnValuesToBeUnique", "ColumnValuesToNotBeNull"
MATCH, NO_MATCH = "ColumnValuesToMatchRegex", "ColumnValuesToNotMatchRegex"
LENGTH, DISTINCT = "ColumnValueLengthsToBeBetween", "ColumnProportionOfUniqueValuesToBeBetween"


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


def suite(limits: Limits, min_sources: int) -> tuple[Expectation, ...]:
    """The expectations on the accepted sources."""
    slowest, fastest = limits.min_frame_rate, limits.max_frame_rate
    shortest, side = limits.min_duration_s - 1e-6, limits.min_side_px
    table: tuple[tuple[str, str, dict[str, JsonValue], str], ...] = (
        ("enough_sources", "TableRowCountToBeBetween", {"min_value": min_sources}, "three splits need sources"),
        ("one_row_a_content", UNIQUE, {"column": "source_id"}, "a source in two rows leaks between splits"),
        ("one_row_a_file", UNIQUE, {"column": "path"}, "every file is judged once"),
        ("content_hash", MATCH, {"column": "sha256", "regex": "^[0-9a-f]{64}$"}, "lineage rests on it"),
        ("id_of_content", MATCH, {"column": "source_id", "regex": "^[0-9a-f]{16}$"}, "ids join the tables"),
        ("path_known", NOT_NULL, {"column": "path"}, "a clip must be found again"),
        ("caption_known", NOT_NULL, {"column": "caption"}, "text is a condition of every mode"),
        ("long_enough", BETWEEN, {"column": "video_duration_s", "min_value": shortest}, "shorter sources hold no clip"),
        (
            "plausible_rate",
            BETWEEN,
            {"column": "rate_fps", "min_value": slowest, "max_value": fastest},
            "other rates mean broken timestamps",
        ),
        ("tall_enough", BETWEEN, {"column": "height", "min_value": side}, "no upscaled thumbnails"),
        ("wide_enough", BETWEEN, {"column": "width", "min_value": side}, "no upscaled thumbnails"),
        (
            "quarter_turns",
            IN_SET,
            {"column": "rotation_deg", "value_set": [0, 90, 180, 270]},
            "pictures turn by quarters",
        ),
        ("known_layouts", IN_SET, {"column": "num_channels", "value_set": [*range(9)]}, "up to 7.1 have a downmix"),
        ("full_scale", BETWEEN, {"column": "peak", "min_value": 0, "max_value": 2}, "sound is scaled to 1"),
    )
    warned: tuple[tuple[str, str, dict[str, JsonValue], str], ...] = (
        (
            "starts_together",
            BETWEEN,
            {"column": "sound_offset_s", "min_value": -1, "max_value": 1},
            "what is missing is padded",
        ),
        (
            "ends_together",
            BETWEEN,
            {"column": "sound_gap_s", "max_value": 1, "mostly": 0.95},
            "what is missing is padded",
        ),
        (
            "mostly_sound",
            "ColumnMeanToBeBetween",
            {"column": "has_sound", "min_value": 0.5},
            "a joint model needs both",
        ),
        ("caption_length", LENGTH, {"column": "caption", "min_value": 3, "max_value": 2000}, "encoders cut long texts"),
        ("captions_differ", DISTINCT, {"column": "caption", "min_value": 0.1}, "one caption for all teaches nothing"),
        ("captions_describe", NO_MATCH, {"column": "caption", "regex": REFUSALS}, "refusals and links are no captions"),
    )
    return tuple(
        Expectation(name=name, kind=kind, options=options, critical=critical, why=why)
        for critical, rows in ((True, table), (False, warned))
        for name, kind, options, why in rows
    )


def frame(sources: Sequence[Source]) -> pd.DataFrame:
    """The manifest as a table, with the derived columns that expectations speak of; NaN where there is no sound."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for source in sources:
        start, end = sound_span(source)
        heard = has_sound(source)
        rows.append(
            source.model_dump()
            | {
                "rate_fps": float(Fraction(source.frame_rate)),
                "has_sound": float(heard),
                "sound_offset_s": start if heard else float("nan"),
                "sound_gap_s": source.video_duration_s - end if heard else float("nan"),
            }
        )
    derived = ("rate_fps", "has_sound", "sound_offset_s", "sound_gap_s")
    return pd.DataFrame(rows, columns=[*Source.model_fields, *derived])


def judge(table: pd.DataFrame, expectations: Sequence[Expectation], docs: Path | None = None) -> list[Outcome]:
    """What every expectation finds in `table`, in the given order; Data Docs are written into the folder `docs`.

    Raises:
        ValueError: an expectation names a kind or an option that Great Expectations does not have.
    """
    with quiet():
        gx = great_expectations("")
        context = gx.get_context(mode="ephemeral")
        types = great_expectations(".data_context.types.base")
        context.variables.progress_bars = types.ProgressBarsConfig(globally=False)
        batch = context.data_sources.add_pandas("manifest").add_dataframe_asset("accepted")
        definition = gx.ValidationDefinition(
            name="accepted",
            data=batch.add_batch_definition_whole_dataframe("all"),
            suite=context.suites.add(gx_suite(expectations)),
        )
        checkpoint = gx.Checkpoint(
            name="validate",
            validation_definitions=[context.validation_definitions.add(definition)],
            actions=docs_actions(context, docs),
            result_format={
                "result_format": "SUMMARY",
                "partial_unexpected_count": MAX_ROWS_NAMED,
                "unexpected_index_column_names": ["source_id", "path"],
            },
        )
        run = context.checkpoints.add(checkpoint).run(batch_parameters={"dataframe": table})
    (validation,) = list(run.run_results.values())
    found = {str(item.expectation_config.meta["name"]): item.to_json_dict() for item in validation.results}
    return [outcome(expectation, found[expectation.name]) for expectation in expectations]


def great_expectations(module: str) -> Any:
    """One of its modules; without types, as it gives too few, and late, as it takes 4 s to import."""
    return importlib.import_module(f"great_expectations{module}")


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


def gx_suite(expectations: Sequence[Expectation]) -> Any:
    """The table of expectations as Great Expectations' own objects."""
    kinds = great_expectations(".expectations")
    built: list[Any] = []
    for item in expectations:
        kind = getattr(kinds, f"Expect{item.kind}", None)
        if kind is None:
            raise ValueError(f"expectation {item.name}: Great Expectations has no Expect{item.kind}")
        severity = "critical" if item.critical else "warning"
        built.append(kind(**item.options, severity=severity, notes=item.why, meta={"name": item.name}))
    return great_expectations("").ExpectationSuite(name="accepted", expectations=built)


def docs_actions(context: Any, docs: Path | None) -> list[Any]:
    """The action that writes Data Docs into `docs`, where wanted."""
    if docs is None:
        return []
    store = {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(docs.absolute())}
    index = {"class_name": "DefaultSiteIndexBuilder"}
    site = {"class_name": "SiteBuilder", "site_index_builder": index, "store_backend": store}
    context.add_data_docs_site("docs", site)
    return [great_expectations(".checkpoint").UpdateDataDocsAction(name="docs", site_names=["docs"])]


def outcome(expectation: Expectation, found: dict[str, Any]) -> Outcome:
    """Great Expectations' result without its clocks; an expectation that raised has failed."""
    result = cast("dict[str, Any]", found["result"])
    num_unexpected = int(result.get("unexpected_count", 0))
    rows = cast("list[dict[str, str]]", result.get("partial_unexpected_index_list") or [])
    if raised := raised_message(found):
        measured = f"could not be computed: {raised}"
    elif "observed_value" in result:
        observed = result["observed_value"]
        measured = f"{observed:.6g}" if isinstance(observed, (int, float)) else f"{observed}"
    else:
        measured = f"{num_unexpected} of {result.get('element_count', 0)} rows"
    column = expectation.options.get("column")
    limit = ", ".join(f"{key} {value}" for key, value in expectation.options.items() if key != "column")
    return Outcome(
        name=expectation.name,
        kind=expectation.kind,
        column=str(column) if column is not None else None,
        critical=expectation.critical,
        success=bool(found["success"]),
        measured=measured,
        limit=limit,
        num_unexpected=num_unexpected,
        unexpected=tuple(sorted({f"{row['source_id']} {row['path']}" for row in rows})),
        why=expectation.why,
    )


def raised_message(found: dict[str, Any]) -> str | None:
    """The first exception inside a result; Great Expectations nests them by metric or not at all."""
    info = cast("dict[str, Any]", found.get("exception_info") or {})
    entries = [info] if "raised_exception" in info else list(info.values())
    return next((str(item["exception_message"]) for item in entries if item.get("raised_exception")), None)


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    """One line a failed critical expectation: its name, what was measured, the limit and the rows."""
    lines: list[str] = []
    for item in outcomes:
        if item.success or not item.critical:
            continue
        rows = f"; {', '.join(item.unexpected[:10])}" if item.unexpected else ""
        more = f" and {item.num_unexpected - 10} more" if item.num_unexpected > 10 else ""
        subject = f"{item.name} ({item.column})" if item.column else item.name
        lines.append(f"{subject}: {item.measured}, expected {item.limit}{rows}{more}")
    return lines
