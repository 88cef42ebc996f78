"""The page's drawings as inline SVG: no library, no clock, colours from the page's style sheet (light and dark)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, cast

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 14, 30
NUM_SMOOTH = 31
"""Steps of the running median: a step's loss depends mostly on its noise level, which jumps from step to step."""
NUM_BINS = 10


class Curve(NamedTuple):
    """What one curriculum stage logged."""

    stage: str
    rows: list[dict[str, Any]]


class Plot(NamedTuple):
    """A frame with linear x and logarithmic y."""

    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Position in the drawing, px."""
        along = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1)
        low, high = (math.log(value) for value in self.y)
        up = (math.log(min(max(y, self.y[0]), self.y[1])) - low) / ((high - low) or 1)
        return LEFT + along * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    def line(self, points: Sequence[tuple[float, float]], kind: str) -> str:
        """A polyline of class `kind`."""
        pairs = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.at(*point) for point in points))
        return f'<polyline class="{kind}" points="{pairs}"/>'

    def dots(self, points: Sequence[tuple[float, float]], kind: str, radius: float) -> str:
        """Points of class `kind`."""
        places = (self.at(*point) for point in points)
        return "".join(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"/>' for x, y in places)


def read_curves(checkpoints: Path) -> list[Curve]:
    """Loss rows of every stage, each after the one it starts from."""
    curves: dict[str, Curve] = {}
    after: dict[str, str | None] = {}
    for log in sorted(checkpoints.glob("*/log.jsonl")):
        name = log.parent.name
        rows = [cast(dict[str, Any], json.loads(line)) for line in log.read_text(encoding="utf-8").splitlines() if line]
        curves[name] = Curve(name, rows)
        facts = log.parent / "checkpoint.json"
        known = cast("dict[str, Any]", json.loads(facts.read_text(encoding="utf-8"))) if facts.is_file() else {}
        after[name] = known.get("settings", {}).get("start_from")
    ordered: list[Curve] = []
    while curves:
        done = {curve.stage for curve in ordered}
        name = next((name for name in curves if after[name] in done or after[name] not in curves), min(curves))
        ordered.append(curves.pop(name))
    return [curve for curve in ordered if curve.rows]


def losses(curves: Sequence[Curve], key: str) -> str:
    """One modality's loss over all stages: every step as a dot, and a running median."""
    points: list[tuple[float, float]] = []
    borders: list[tuple[int, str]] = []
    start = 0
    for curve in curves:
        borders.append((start, curve.stage))
        points += [(start + row["step"], row[key]) for row in curve.rows if row.get(key)]
        start += len(curve.rows)
    if not points:
        return ""
    plot = Plot((0, start), bounds(value for _, value in points))
    thinned = points[:: max(1, len(points) // 900)]
    parts = [axes(plot, "step"), plot.dots(thinned, f"raw {key}", 1.3)]
    for border, stage in borders:
        x, _ = plot.at(border, plot.y[0])
        parts.append(f'<line class="border" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text class="stage" x="{x + 5:.1f}" y="{TOP + 8}">{stage}</text>')
    smooth = running_median([value for _, value in points], NUM_SMOOTH)
    step = max(1, len(points) // 300)
    parts.append(plot.line([(x, y) for (x, _), y in zip(points, smooth, strict=True)][::step], f"curve {key}"))
    return svg(parts, f"{key} by step")


def by_noise_level(curves: Sequence[Curve], key: str) -> str:
    """One modality's loss by noise level: at the beginning of the first stage and at the end of the last."""
    if not curves:
        return ""
    first, last = curves[0].rows, curves[-1].rows
    early, late = binned(first[: max(1, len(first) // 3)], key), binned(last[-max(1, len(last) // 3) :], key)
    if not early or not late:
        return ""
    plot = Plot((0, NUM_BINS), bounds([*early.values(), *late.values()]))
    parts = [axes(plot, "noise level: clean → pure noise", ticks=False)]
    for number in sorted(early.keys() & late.keys()):
        (x, y1), (_, y2) = plot.at(number + 0.5, early[number]), plot.at(number + 0.5, late[number])
        parts.append(f'<line class="fall {key}" x1="{x:.1f}" x2="{x:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>')
    parts.append(plot.dots([(bin_ + 0.5, value) for bin_, value in sorted(early.items())], "early", 4))
    parts.append(plot.dots([(bin_ + 0.5, value) for bin_, value in sorted(late.items())], f"late {key}", 4.5))
    return svg(parts, f"{key} by noise level")


def binned(rows: Sequence[dict[str, Any]], key: str) -> dict[int, float]:
    """Mean loss of each tenth of the noise levels."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if row.get(key):
            found.setdefault(int(row["timestep_bin"]), []).append(row[key])
    return {number: fmean(values) for number, values in found.items()}


def running_median(values: Sequence[float], size: int) -> list[float]:
    """Median over a centred window, shorter at the ends."""
    half = size // 2
    return [median(values[max(0, place - half) : place + half + 1]) for place in range(len(values))]


def bounds(values: Iterator[float] | Sequence[float]) -> tuple[float, float]:
    """Axis limits with a little air, on a logarithmic axis."""
    known = sorted(values)
    return known[0] / 1.1, known[-1] * 1.1


def axes(plot: Plot, x_title: str, *, ticks: bool = True) -> str:
    """Grid, numbers and the x axis' title."""
    parts: list[str] = []
    for value in nice(*plot.y):
        _, y = plot.at(plot.x[0], value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{value:g}</text>')
    if ticks:
        for quarter in range(5):
            value = plot.x[0] + (plot.x[1] - plot.x[0]) * quarter / 4
            x, _ = plot.at(value, plot.y[0])
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{value:.0f}</text>'
            )
    title_y = HEIGHT - 3 if ticks else HEIGHT - BOTTOM + 18
    parts.append(
        f'<text class="tick" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{title_y}" text-anchor="middle">{x_title}</text>'
    )
    return "".join(parts)


def nice(low: float, high: float) -> list[float]:
    """Round numbers within logarithmic limits: 1, 2 and 5 of every decade, or finer where that gives under three."""
    for steps in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [value for decade in decades for step in steps if low <= (value := step * 10.0**decade) <= high]
        if len(found) >= 3:
            return found
    return [low, high]


def change(before: float, after: float, low: float, high: float, *, kind: str) -> str:
    """A bar from before to after, with the interval of the change around its end; a tenth of the value at least."""
    values = (before, after, before + low, before + high)
    span = max(max(values) - min(values), abs(before) / 10, 1e-9)
    start = (max(values) + min(values) - span) / 2

    def place(value: float) -> float:
        return 12 + 236 * (value - start) / span

    x0, x1, lo, hi = (place(value) for value in (before, after, before + low, before + high))
    box = f'x="{min(lo, hi):.1f}" y="6" width="{max(2, abs(hi - lo)):.1f}" height="14" rx="4"'
    return (
        f'<svg class="change" viewBox="0 0 260 26" role="img" aria-label="{before:.2f} to {after:.2f}">'
        f'<line class="rail" x1="6" x2="254" y1="13" y2="13"/><rect class="interval {kind}" {box}/>'
        f'<line class="move {kind}" x1="{x0:.1f}" x2="{x1:.1f}" y1="13" y2="13"/>'
        f'<circle class="before" cx="{x0:.1f}" cy="13" r="5"/><circle class="after {kind}" cx="{x1:.1f}" cy="13" r="6"/>'
        "</svg>"
    )


def svg(parts: Sequence[str], title: str) -> str:
    """A drawing that scales with the page."""
    body = "".join(parts)
    return f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">{body}</svg>'
