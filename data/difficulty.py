"""How difficult every training entry is, by features that were measured of it.

Every column holds one number an entry, NaN where it was not measured: what is missing is masked, never guessed. Values
are ranked inside their *bucket* (entries of one canvas and shape), since raw features have no common scale.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data.captions import SCRIPTS, STOP_WORDS, WORD

Column = NDArray[np.float64]
Codes = NDArray[np.int64]
"""Number of each entry's bucket."""
Mask = NDArray[np.bool_]
arrow, compute = cast(Any, pa), cast(Any, pc)
"""Compiled libraries without a single type."""


class Feature(NamedTuple):
    """One aspect of difficulty: the rank of the mean rank of its parts, over those parts that an entry has."""

    definition: str
    parts: tuple[tuple[str, int], ...]
    """Columns, each with 1 where more is harder, -1 where less is."""


FEATURES: dict[str, Feature] = {
    "motion": Feature(
        "optical flow, diagonals a second: median and 90th percentile over frames; more is harder (`cut`)",
        (("motion_p50", 1), ("motion_p90", 1)),
    ),
    "tokens": Feature(
        "rows of the packed sequence, of the longest of the entry's variants; more is harder (`encode`)",
        (("num_tokens", 1),),
    ),
    "cuts": Feature(
        "boundaries that a stricter look still sees inside the clip; more is harder (`cut`)", (("residual_cuts", 1),)
    ),
    "caption": Feature(
        "words, and distinct words that are not among the commonest of seven languages; a Chinese, Japanese or Thai"
        " character is a word; more is harder (caption)",
        (("num_words", 1), ("num_content_words", 1)),
    ),
    "sound": Feature(
        "how much goes on: share of speech (more is harder), DNSMOS of the speech (less is harder), share of silence"
        " (less is harder); missing without sound (`cut`)",
        (("speech_share", 1), ("dnsmos", -1), ("silent_share", -1)),
    ),
    "sync": Feature("offset and confidence of lips and sound; nothing measures it yet, so it is missing", ()),
    "quality": Feature(
        "sharpness, 90th percentile over frames (less is harder, blur by motion included), and share of frozen frames"
        " (more is harder) (`cut`)",
        (("sharpness_p90", -1), ("freeze_share", 1)),
    ),
    "loss": Feature(
        "training loss over a fixed set of noise levels and draws, z-scored by level and modality inside the bucket,"
        " then averaged; more is harder (`plan.loss`)",
        (("loss", 1),),
    ),
}
"""Source of the choice: Movie Gen (arXiv 2410.13720) and HunyuanVideo (2412.03603) for length, Koala-36M (2410.08260)
for cuts and quality, TQD (2603.25527) for motion, Kim et al. 2024 (2403.10348) for loss. Their weights are not published."""
_DENSE = re.compile("|".join(SCRIPTS[name].pattern for name in ("kana", "han", "thai")))
_COMMON = frozenset[str]().union(*STOP_WORDS.values())
_CLIP_COLUMNS = (
    "clip_id", "motion_p50", "motion_p90", "residual_cuts", "caption", "has_audio", "speech_share", "dnsmos",
    "silent_share", "sharpness_p90", "freeze_share",
)  # fmt: skip
DIGITS = 9
"""Means of ranks are rounded to so many digits before they are ranked: equal sums tie, in whatever order they were added."""


def measured(index: Any, clips: Path) -> dict[str, Column]:
    """Columns of `FEATURES` that need no model, one value an entry.

    Args:
        index: Table of the latent store's entries.
        clips: Table that `cut` wrote.

    Raises:
        ValueError: an entry's clip is not in `clips`, or a column is missing there.
    """
    columns = cast("list[str]", pq.read_schema(clips).names)
    if missing := [name for name in _CLIP_COLUMNS if name not in columns]:
        raise ValueError(f"{clips} has no column {missing[0]}; is it of another version? Run `soundstage cut` again")
    table = cast(Any, pq.read_table(clips, columns=list(_CLIP_COLUMNS)))
    place = compute.index_in(index["clip_id"].combine_chunks(), table["clip_id"].combine_chunks())
    if place.null_count:
        first = index["clip_id"].filter(place.is_null())[0].as_py()
        raise ValueError(
            f"{place.null_count} of {len(place)} entries of the latent store are of clips that {clips} lacks, first"
            f" {first}; run `soundstage encode` again"
        )
    words = np.array([count_words(text) for text in table["caption"].to_pylist()], np.float64).reshape(-1, 2)
    at = np.asarray(place.to_numpy(zero_copy_only=False), np.int64)
    result = {name: _floats(table[name])[at] for name in _CLIP_COLUMNS if name not in {"clip_id", "caption"}}
    silent = result.pop("has_audio") == 0
    for name, _ in FEATURES["sound"].parts:
        result[name][silent] = np.nan
    result |= {"num_words": words[at, 0], "num_content_words": words[at, 1]}
    return {**result, "num_tokens": longest(index["num_tokens"])}


def _floats(column: Any) -> Column:
    """A column of numbers or truths, NaN for null."""
    return np.asarray(column.cast(arrow.float64()).to_numpy(), np.float64).copy()


def longest(lists: Any) -> Column:
    """Largest number of each list, NaN where it is empty."""
    flat = lists.combine_chunks()
    sizes = np.asarray(compute.list_value_length(flat).to_numpy(zero_copy_only=False), np.int64)
    result, filled = np.full(len(sizes), np.nan), sizes > 0
    if filled.any():
        starts = (np.cumsum(sizes) - sizes)[filled]
        result[filled] = np.maximum.reduceat(np.asarray(flat.flatten().to_numpy(), np.int64), starts)
    return result


def count_words(caption: str) -> tuple[int, int]:
    """Words of a caption, and distinct ones among them that are not common; see `FEATURES`."""
    words = WORD.findall(_DENSE.sub(r" \g<0> ", caption.casefold()))
    return len(words), len(set(words) - _COMMON)


def buckets_of(index: Any) -> tuple[list[str], Codes]:
    """Names of the buckets, sorted, and the number of each entry's."""
    text = [index[name].cast(arrow.string()) for name in ("canvas", "num_frames", "width", "height")]
    canvas, frames, width, height = text
    join = compute.binary_join_element_wise
    names = join(join(canvas, join(frames, arrow.scalar("f"), ""), " "), join(width, height, "x"), " ")
    coded = names.combine_chunks().dictionary_encode()
    known = cast("list[str]", coded.dictionary.to_pylist())
    ordered = sorted(known)
    number = np.searchsorted(np.array(ordered), np.array(known))
    return ordered, number[np.asarray(coded.indices.to_numpy(), np.int64)]


def ranked(values: Column, buckets: Codes) -> Column:
    """Ranks inside each bucket, 0 to 1, equal values sharing their mean rank; NaN stays.

    One value alone has rank 0.5, as all of many equal ones have: nothing tells whether it is easy or hard.
    """
    result = np.full(len(values), np.nan)
    present = np.flatnonzero(~np.isnan(values))
    if not len(present):
        return result
    order = present[np.lexsort((values[present], buckets[present]))]
    value, bucket, place = values[order], buckets[order], np.arange(len(order))
    new_bucket = np.r_[True, bucket[1:] != bucket[:-1]]
    new_tie = new_bucket | np.r_[True, value[1:] != value[:-1]]
    start, size = _runs(new_bucket)
    tie, ties = _runs(new_tie)
    middle = tie + (ties - 1) / 2
    own = np.cumsum(new_bucket) - 1
    within = middle[np.cumsum(new_tie) - 1] - start[own]
    result[order[place]] = np.where(size[own] > 1, within / np.maximum(size[own] - 1, 1), 0.5)
    return result


def _runs(new: Mask) -> tuple[Codes, Codes]:
    """Where each run begins, and how long it is."""
    starts = np.flatnonzero(new)
    return starts, np.diff(np.r_[starts, len(new)])


def _mean(columns: Sequence[Column], weights: Sequence[float]) -> Column:
    """Weighted mean over the columns that are present in each row, NaN where none is."""
    total, weight = np.zeros(len(columns[0])), np.zeros(len(columns[0]))
    for column, share in zip(columns, weights, strict=True):
        present = ~np.isnan(column)
        total[present] += share * column[present]
        weight[present] += share
    known = weight > 0
    result = np.full(len(total), np.nan)
    result[known] = np.round(total[known] / weight[known], DIGITS)
    return result


def feature_ranks(columns: Mapping[str, Column], buckets: Codes) -> dict[str, Column]:
    """Rank of every feature inside its bucket, NaN for entries that have none of its parts."""
    result: dict[str, Column] = {}
    for name, feature in FEATURES.items():
        parts = [ranked(sign * columns[part], buckets) for part, sign in feature.parts if part in columns]
        means = _mean(parts, [1.0] * len(parts)) if parts else np.full(len(buckets), np.nan)
        result[name] = ranked(means, buckets)
    return result


def difficulty_of(ranks: Mapping[str, Column], weights: Mapping[str, float], buckets: Codes) -> Column:
    """Rank of the weighted mean of an entry's ranks; the weights of features it lacks fall to the others."""
    used = [name for name in ranks if weights.get(name, 0) > 0]
    mixed = ranked(_mean([ranks[name] for name in used], [weights[name] for name in used]), buckets)
    return np.where(np.isnan(mixed), 0.5, mixed)


def random_order(buckets: Codes, seed: int) -> Column:
    """Difficulty that means nothing: the control that a curriculum is compared with."""
    return ranked(np.random.default_rng(seed).random(len(buckets)), buckets)


def standardised(losses_NML: NDArray[np.float64], buckets: Codes) -> Column:
    """Mean z-score of every entry's losses, each by noise level and modality over its bucket.

    What is missing (NaN, as the sound of silent clips) or not finite takes no part; where all losses of a bucket are
    equal their score is 0.

    Args:
        losses_NML: Mean loss of each entry, modality and noise level.
        buckets: Number of each entry's bucket.
    """
    losses_NC = losses_NML.reshape(len(losses_NML), -1)
    scores = np.full_like(losses_NC, np.nan)
    for column in range(losses_NC.shape[1]):
        known = np.flatnonzero(np.isfinite(losses_NC[:, column]))
        values, codes = losses_NC[known, column], buckets[known]
        size = np.maximum(np.bincount(codes), 1)
        centred = values - (np.bincount(codes, values) / size)[codes]
        spread = np.sqrt(np.bincount(codes, centred**2) / size)[codes]
        scores[known, column] = np.divide(centred, spread, out=np.zeros_like(centred), where=spread > 0)
    return _mean(list(scores.T), [1.0] * scores.shape[1])


def hardest(loss: Column, share: float) -> Mask:
    """The `share` of entries with the highest loss above the mean, rounded up; the first of equals."""
    known = np.flatnonzero(loss > 0)
    count = int(np.ceil(share * np.count_nonzero(~np.isnan(loss))))
    result = np.zeros(len(loss), np.bool_)
    result[known[np.argsort(-loss[known], kind="stable")[:count]]] = True
    return result


def correlations(ranks: Mapping[str, Column], buckets: Codes) -> NDArray[np.float64]:
    """Spearman's rank correlation of every pair inside the buckets, over entries that have both; NaN below 3 of them.

    Each bucket's ranks have mean 0.5, so pooling them mixes in no difference between buckets; entries that are alone
    add nothing.
    """
    names = list(ranks)
    present = {name: ~np.isnan(ranks[name]) for name in names}
    result = np.full((len(names), len(names)), np.nan)
    for row, first in enumerate(names):
        for column, second in enumerate(names[: row + 1]):
            both = present[first] & present[second]
            if np.count_nonzero(both) < 3:
                continue
            pair: list[Column] = []
            for name in (first, second):
                own = ranks[name][both]
                alike = np.array_equal(present[name], both)
                pair.append((own if alike else ranked(own, buckets[both])) - 0.5)
            scale = float(np.sqrt((pair[0] @ pair[0]) * (pair[1] @ pair[1])))
            if scale > 0:
                result[row, column] = result[column, row] = np.clip(pair[0] @ pair[1] / scale, -1, 1)
    return result
