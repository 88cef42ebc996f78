"""What a whole dataset must look like. Rules judge one source, expectations judge them all (`tasks/judging.py` asks).

The definitions are a table (`suite`): to add one, add a row. `kind` is the class in `great_expectations.expectations`
without its `Expect`, `options` are that class's fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from data.records import Frozen, Source
from data.rules import Limits, has_sound, sound_span

if TYPE_CHECKING:
    import pandas as pd

VERSION = 2
"""Of the suites below; raise it when an expectation is added, removed or made stricter."""
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
