"""The picture of a plan: difficulty by group below the stages' windows, how the features relate, motion and difficulty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from data.files import whole

if TYPE_CHECKING:
    from data.curriculum import Mask
    from data.stage import Stage

    Column = NDArray[np.float64]

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""Told apart by all common kinds of colour vision. Source: Okabe and Ito 2008, Color Universal Design."""
REST = "#8a8a8a"
INK, PALE = "#333333", "#bbbbbb"
MAX_DOTS = 4000
"""Entries of the scatter; of more, every so-manieth."""


class Entries(NamedTuple):
    """What is drawn of the training entries, one value an entry."""

    groups: Sequence[str]
    ranks: Mapping[str, Column]
    """By feature."""
    difficulty: Column
    review: Mask


def draw(
    path: Path,
    entries: Entries,
    stages: Mapping[str, Stage],
    masks: Mapping[str, Mask],
    rho: NDArray[np.float64],
) -> None:
    """Draw a plan as PNG; same plan, same bytes.

    Args:
        path: Where to.
        entries: What was found.
        stages: In order.
        masks: What each may draw.
        rho: Correlations of the features and, last, the difficulty.
    """
    from matplotlib.figure import Figure

    above = 0.5 + 0.34 * len(stages)
    figure = Figure(figsize=(13, 3.6 + above), layout="constrained")
    left, middle, right = cast("Any", figure.subfigures(1, 3, width_ratios=[1.25, 1.15, 0.95], wspace=0.03))
    windows, bars = left.subplots(2, 1, sharex=True, height_ratios=[above, 3.2])
    groups, colours = coloured(entries)
    draw_windows(windows, stages, masks)
    draw_bars(bars, entries, groups, colours)
    draw_relations(middle.subplots(), [*entries.ranks, "difficulty"], rho)
    draw_dots(right.subplots(), entries, groups, colours)
    with whole(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110, metadata={"Software": None})


def coloured(entries: Entries) -> tuple[NDArray[np.str_], dict[str, str]]:
    """The group of every entry, the smallest taken together where there are many, and a colour for each."""
    groups = np.array([group or "(no group)" for group in entries.groups])
    counts = Counter(cast("list[str]", groups.tolist()))
    kept = sorted(counts, key=lambda name: (-counts[name], name))[: len(COLOURS)]
    if rest := len(counts) - len(kept):
        groups = np.where(np.isin(groups, kept), groups, f"({rest} more groups)")
    shown = {name: COLOURS[place] for place, name in enumerate(sorted(kept))}
    return groups, shown | ({f"({rest} more groups)": REST} if rest else {})


def draw_windows(axes: Any, stages: Mapping[str, Stage], masks: Mapping[str, Mask]) -> None:
    """A bar a stage: its window of difficulty, the part that pacing opens later in a paler tone."""
    paced = any(stage.pacing == "competence" for stage in stages.values())
    title = "stages: windows of difficulty" + (" (hatched: opened later)" if paced else "")
    for place, (name, stage) in enumerate(stages.items()):
        low, high = stage.difficulty
        opened = low + (high - low) * (stage.competence_start if stage.pacing == "competence" else 1.0)
        axes.barh(place, max(opened - low, 0.004), left=low, height=0.34, color=INK)
        axes.barh(place, high - opened, left=opened, height=0.34, color=PALE, hatch="///", edgecolor="white")
        replay = (
            stage.replay_share
            and f", {100 * stage.replay_share:g} % replay of {' '.join(stage.replay_groups) or 'easier'}"
        )
        text = f"{name}: {np.count_nonzero(masks[name])} eligible, {stage.num_steps} steps{replay or ''}"
        axes.text(0.0, place - 0.22, text, fontsize=8, color=INK, va="bottom")
    axes.set(ylim=(len(stages) - 0.7, -0.85), yticks=[], xlim=(0, 1), title=title)
    axes.title.set_fontsize(10)
    axes.tick_params(bottom=False)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)


def draw_bars(axes: Any, entries: Entries, groups: NDArray[np.str_], colours: Mapping[str, str]) -> None:
    """Entries by difficulty, stacked by group."""
    axes.hist(
        [entries.difficulty[groups == name] for name in colours],
        bins=np.linspace(0, 1, 21),
        stacked=True,
        color=list(colours.values()),
        label=list(colours),
        edgecolor="white",
        linewidth=0.4,
    )
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="difficulty (rank inside the bucket)", ylabel="training entries")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.18))


def draw_relations(axes: Any, names: list[str], rho: NDArray[np.float64]) -> None:
    """Correlations as a heat map with their values; features that nothing measured are left out."""
    known = np.flatnonzero(~np.isnan(rho).all(1))
    missing = [name for place, name in enumerate(names) if place not in known]
    shown = rho[np.ix_(known, known)]
    axes.imshow(np.nan_to_num(shown), cmap="PuOr_r", vmin=-1, vmax=1)
    for row, column in np.ndindex(*shown.shape):
        value = float(shown[row, column])
        text = "–" if np.isnan(value) else f"{round(value, 2) + 0.0:.2f}"  # no negative zero
        ink = "white" if abs(value) > 0.6 else INK
        axes.text(column, row, text, ha="center", va="center", fontsize=7.5, color=ink)
    labels = [names[place] for place in known]
    axes.set_xticks(range(len(known)), labels, rotation=45, ha="right", fontsize=8.5)
    axes.set_yticks(range(len(known)), labels, fontsize=8.5)
    axes.set_title("rank correlation inside buckets", fontsize=10)
    if missing:
        axes.set_xlabel(f"constant or not measured: {', '.join(missing)}", fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def draw_dots(axes: Any, entries: Entries, groups: NDArray[np.str_], colours: Mapping[str, str]) -> None:
    """Difficulty against the rank of motion; entries to review are ringed."""
    chosen = np.arange(0, len(groups), max(1, -(-len(groups) // MAX_DOTS)))
    for name, colour in colours.items():
        own = chosen[groups[chosen] == name]
        axes.scatter(entries.ranks["motion"][own], entries.difficulty[own], s=9, alpha=0.75, color=colour, linewidths=0)
    odd = np.flatnonzero(entries.review)[:MAX_DOTS]
    if len(odd):
        place = entries.ranks["motion"][odd], entries.difficulty[odd]
        axes.scatter(*place, s=42, facecolors="none", edgecolors=INK, linewidths=1, label="to review")
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    axes.set(xlabel="motion (rank)", ylabel="difficulty (rank)", xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
    axes.set_title("motion and difficulty", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
