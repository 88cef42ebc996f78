"""The data card of a split: what is in it, in numbers that compare with the other splits' and in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data.files import sha256
from data.records import Frozen

arrow, compute = cast(Any, pa), cast(Any, pc)
"""Compiled libraries without a single type."""
EDGES: dict[str, tuple[str, tuple[float, ...]]] = {
    "duration": ("s", (0.5, 1, 2, 3, 5, 8, 13, 21, 34)),
    "short side": ("px", (64, 128, 256, 480, 720, 1080, 1440, 2160)),
    "frame rate": ("fps", (12, 23, 24.5, 25.5, 30.5, 50.5, 60.5)),
    "motion, median": ("diagonals a second", (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)),
    "loudness": ("LUFS", (-60, -50, -40, -35, -30, -25, -20, -15, -10)),
    "sharpness": ("variance of the Laplacian", (10, 30, 100, 300, 1000, 3000)),
}
"""Unit and inner borders of each histogram: round numbers between which the formats of cameras and screens fall, the
same for every split and data set, so that cards can be laid side by side."""
COUNTED = ("group", "licence", "caption_language", "boundary_reason")
"""Columns of clips whose values are counted."""
NOT_STATED = "not stated"
BAR = 24
"""Characters of the longest bar."""


class Histogram(Frozen):
    """How many clips lie between which values."""

    name: str
    unit: str
    edges: tuple[float, ...]
    """Inner borders; the first bin lies below the first, the last from the last on."""
    counts: tuple[int, ...]
    num_missing: int = 0
    """Clips without the value: no sound has no loudness."""


class Card(Frozen):
    """What a split holds."""

    split: str
    sha256: str
    """Content hash of the split's file, which the card belongs to."""
    num_clips: int
    num_sources: int
    num_clusters: int
    """Sources that look alike count as one."""
    hours: float
    num_with_sound: int
    num_captions: int
    """Different ones."""
    counts: dict[str, dict[str, int]]
    """Clips by group, licence, caption language, reason of their start; sources by origin of their caption, treatment."""
    histograms: tuple[Histogram, ...]


def describe(name: str, split: Path, accepted: Path, treatments: Path) -> Card:
    """The card of the split file `split`, whose sources stand in `accepted` and their treatments in `treatments`.

    Reads one column at a time.
    """
    source_id = column(split, "source_id")
    sources = compute.unique(source_id)
    place = rows_of(source_id, column(accepted, "source_id"))
    start, end = (numbers(column(split, edge)) for edge in ("start_s", "end_s"))
    values = {
        "duration": end - start,
        "short side": np.minimum(numbers(column(accepted, "width")), numbers(column(accepted, "height")))[place],
        "frame rate": rates(column(accepted, "frame_rate"))[place],
        "motion, median": numbers(column(split, "motion_p50")),
        "loudness": numbers(column(split, "loudness_lufs")),
        "sharpness": numbers(column(split, "sharpness_p90")),
    }
    counted = {key: tally(column(split, key)) for key in COUNTED}
    mine = compute.is_in(column(accepted, "source_id"), value_set=sources)
    treated = compute.is_in(column(treatments, "item"), value_set=sources)
    counted |= {
        "caption_from": tally(first_words(column(accepted, "caption_from").filter(mine))),
        "treatment": tally(column(treatments, "treatment").filter(treated)),
    }
    return Card(
        split=name,
        sha256=sha256(split),
        num_clips=len(source_id),
        num_sources=len(sources),
        num_clusters=len(compute.unique(column(split, "cluster"))),
        hours=round(float((end - start).sum()) / 3600, 6),
        num_with_sound=int(compute.sum(column(split, "has_audio")).as_py() or 0),
        num_captions=len(compute.unique(column(split, "caption"))),
        counts=counted,
        histograms=tuple(histogram(key, values[key]) for key in EDGES),
    )


def histogram(name: str, values: NDArray[np.float64]) -> Histogram:
    """How many of `values` fall between the borders of `EDGES[name]`; NaN is missing."""
    unit, edges = EDGES[name]
    known = values[~np.isnan(values)]
    counts = np.bincount(np.searchsorted(edges, known, side="right"), minlength=len(edges) + 1)
    return Histogram(
        name=name, unit=unit, edges=edges, counts=tuple(counts.tolist()), num_missing=len(values) - len(known)
    )


def bins(item: Histogram) -> list[tuple[str, int]]:
    """Words and count of every bin from the first to the last that holds something, then of the missing."""
    labels = [f"< {item.edges[0]:g}"]
    labels += [f"{low:g} – {high:g}" for low, high in zip(item.edges, item.edges[1:], strict=False)]
    labels.append(f"≥ {item.edges[-1]:g}")
    held = [place for place, count in enumerate(item.counts) if count]
    rows = list(zip(labels, item.counts, strict=True))[held[0] : held[-1] + 1] if held else []
    return [*rows, ("none", item.num_missing)] if item.num_missing else rows


def markdown(card: Card, shares: Mapping[str, str]) -> str:
    """The card as a page of text; `shares` are lines about the draw."""
    lines = [
        f"# Data card: {card.split}",
        "",
        f"{card.num_clips} clips of {card.num_sources} sources ({card.num_clusters} that do not look alike).",
        f"{card.hours:.4g} hours; {card.num_with_sound} clips with sound; {card.num_captions} different captions.",
        "",
        *(f"- {name}: {value}" for name, value in shares.items()),
        f"- SHA-256: `{card.sha256}`",
    ]
    for name, counts in card.counts.items():
        what = "sources" if name in ("caption_from", "treatment") else "clips"
        rows = [(cell(key or ("(root)" if name == "group" else "")), count) for key, count in counts.items()]
        lines += table(name.replace("_", " ").capitalize(), what, rows or [("none", 0)])
    for item in card.histograms:
        lines += table(f"{item.name.capitalize()}, {item.unit}", "clips", bins(item))
    return "\n".join(lines) + "\n"


def table(title: str, what: str, rows: Iterable[tuple[str, int]]) -> list[str]:
    """A heading and a table with bars."""
    listed = list(rows)
    largest = max((count for _, count in listed), default=0) or 1
    body = [f"| {name} | {count} | {'█' * round(BAR * count / largest)} |" for name, count in listed]
    return ["", f"## {title}", "", f"| | {what} | |", "|---|---:|:---|", *body]


def cell(text: str) -> str:
    """Text that cannot leave its cell of a Markdown table, nor become markup."""
    plain = " ".join(text.split()) or "(none)"
    return "".join(f"\\{char}" if char in "\\|`*_[]<>#!&~" else char for char in plain)


def tally(values: Any) -> dict[str, int]:
    """How often each value occurs, most frequent first, then by name; null counts as not stated."""
    found = compute.value_counts(values).to_pylist()
    pairs = [(NOT_STATED if item["values"] is None else str(item["values"]), int(item["counts"])) for item in found]
    return dict(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))


def column(path: Path, name: str) -> Any:
    """One column of a Parquet file, in one piece."""
    return cast(Any, pq.read_table)(path, columns=[name])[name].combine_chunks()


def numbers(values: Any) -> NDArray[np.float64]:
    """Values as floats, null as NaN."""
    return values.cast(arrow.float64()).to_numpy(zero_copy_only=False)


def rates(values: Any) -> NDArray[np.float64]:
    """Frames a second of exact fractions; each different one is read once."""
    coded = values.dictionary_encode()
    known = np.array([float(Fraction(text)) for text in coded.dictionary.to_pylist()])
    return known[coded.indices.to_numpy(zero_copy_only=False)] if len(known) else np.zeros(0)


def rows_of(values: Any, among: Any) -> NDArray[np.int64]:
    """Place of every value in `among`.

    Raises:
        ValueError: one is not there.
    """
    place = compute.index_in(values, value_set=among)
    if place.null_count:
        lost = values.filter(compute.is_null(place))[0]
        raise ValueError(f"source {lost} has clips but is not among the accepted; run `soundstage cut` again")
    return place.to_numpy(zero_copy_only=False).astype(np.int64)


def first_words(values: Any) -> Any:
    """`model` of `model NAME prompt HASH`: cards count kinds of origins."""
    return compute.list_element(compute.split_pattern(compute.coalesce(values, NOT_STATED), " prompt "), 0)
