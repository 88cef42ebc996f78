"""The picture of a run's plan: memory of a device by part, a bar a number of devices, below the device's limit."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.files import whole
from tasks.run_costs import GB, Cost

COLOURS = ("#0072b2", "#56b4e9", "#e69f00", "#f0e442", "#cc79a7", "#999999", "#009e73", "#7fd6bd", "#d9d9d9")
"""Told apart by all common kinds of colour vision. Source: Okabe and Ito 2008, Color Universal Design."""
INK, LIMIT = "#333333", "#d55e00"
MAX_OVER = 3
"""Bars end at so many times the limit; their number says the rest."""


def draw(path: Path, title: str, costs: Sequence[Cost], limit_gb: float) -> None:
    """Draw a plan as PNG or SVG, by the path's ending; same plan, same bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 + 1.1 * len(costs), 4.2), layout="constrained")
    axes: Any = figure.subplots()
    names = [str(cost.devices) for cost in costs]
    heights = [0.0] * len(costs)
    parts = [part for part in costs[0].memory_bytes if any(cost.memory_bytes[part] for cost in costs)]
    for part, colour in zip(parts, COLOURS, strict=False):
        sizes = [cost.memory_bytes[part] / GB for cost in costs]
        axes.bar(names, sizes, 0.62, bottom=heights, color=colour, label=part)
        heights = [low + size for low, size in zip(heights, sizes, strict=True)]
    top = min(max(*heights, limit_gb) * 1.12, MAX_OVER * limit_gb)
    for place, (cost, height) in enumerate(zip(costs, heights, strict=True)):
        ink = INK if cost.fits else LIMIT
        text = f"{height:,.0f}" if height >= 10 else f"{height:.1f}"
        axes.text(place, min(height, top), text, ha="center", va="bottom", color=ink, fontsize=9)
    axes.axhline(limit_gb, color=LIMIT, linewidth=1.4)
    axes.text(1.0, limit_gb, f" {limit_gb:g} GB", transform=axes.get_yaxis_transform(), color=LIMIT, va="center")
    axes.set(ylim=(0, top), xlabel="devices", ylabel="memory of one device, GB")
    figure.suptitle(textwrap.fill(title, 16 * len(costs) + 40), fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], frameon=False, fontsize=8, loc="outside right center")
    kind = path.suffix.removeprefix(".").lower() or "png"
    steady: dict[str, Any] = {"Date": None} if kind == "svg" else {"Software": None}
    with whole(path) as temporary, mpl.rc_context({"svg.hashsalt": "plan-run", "svg.fonttype": "none"}):
        figure.savefig(temporary, format=kind, dpi=110, metadata=steady)
