"""A whole curriculum as one drawing for the report: stages side by side over steps, from what their checkpoints say.

Inline SVG like `tasks.charts`: no library, no clock, colours from the page's style sheet.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, cast

from pydantic import ValidationError

from data.sampler import opened
from data.stage import Stage
from tasks.charts import NUM_SMOOTH, Curve, bounds, nice, read_curves, running_median

WIDTH, LEFT, RIGHT, TOP, BOTTOM, GAP = 1080, 64, 12, 40, 24, 26
LANES = {"loss": 130, "learning rate": 70, "difficulty": 80, "modes": 90, "replay": 50}
"""Heights, px."""
NUM_PARTS = 24
"""Parts of a stage in which the shares of its modes are counted: fewer where it has under 5 steps a part."""
MAX_POINTS = 400
"""Of one line in one stage."""


class Part(NamedTuple):
    """One stage in the drawing."""

    curve: Curve
    first: int
    """Steps of the stages before it."""
    num_steps: int
    settings: Stage | None
    """As its checkpoint recorded them; None where it has none, or those of another version."""
    reason: str
    """Why it ended."""


class Lane(NamedTuple):
    """One strip of the drawing, with its own vertical axis."""

    top: float
    height: float
    low: float
    high: float
    num_steps: int
    """Of all stages together."""
    logarithmic: bool = False

    def x(self, step: float) -> float:
        """Place along the drawing, px."""
        return LEFT + step / max(1, self.num_steps) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Place in the strip, px."""
        of: Callable[[float], float] = math.log if self.logarithmic else float
        clamped = min(max(value, self.low), self.high)
        up = (of(clamped) - of(self.low)) / ((of(self.high) - of(self.low)) or 1)
        return self.top + (1 - up) * self.height

    def line(self, points: Sequence[tuple[float, float]], kind: str) -> str:
        """A polyline of class `kind`, thinned."""
        thinned = [*points[:: max(1, len(points) // MAX_POINTS)], *points[-1:]]
        pairs = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in thinned)
        return f'<polyline class="{kind}" points="{pairs}"/>'

    def box(self, start: float, end: float, low: float, high: float, kind: str, words: str = "") -> str:
        """A rectangle between two steps and two values, with words that show when pointed at."""
        x, y = self.x(start), self.y(high)
        size = f'width="{self.x(end) - x:.1f}" height="{max(self.y(low) - y, 0.8):.1f}"'
        title = f"<title>{escape(words)}</title>" if words else ""
        return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" {size}>{title}</rect>'

    def frame(self, title: str, ticks: Sequence[tuple[float, str]]) -> str:
        """Title, grid and numbers."""
        parts = [f'<text class="lane" x="{LEFT}" y="{self.top - 6:.1f}">{title}</text>']
        for value, words in ticks:
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{words}</text>')
        return "".join(parts)


def draw(checkpoints: Path) -> str:
    """The drawing of all stages below a folder of checkpoints; empty where none has logged anything."""
    parts = parts_of(checkpoints)
    if not parts:
        return ""
    total = parts[-1].first + parts[-1].num_steps
    drawn: list[str] = []
    top = float(TOP)
    drawers = (draw_losses, draw_rates, draw_difficulty, draw_modes, draw_replay)
    for (name, height), drawer in zip(LANES.items(), drawers, strict=True):
        if content := drawer(parts, Lane(top, height, 0, 1, total)):
            drawn.append(f'<g data-lane="{name}">{content}</g>')
            top += height + GAP
    bottom = top - GAP + BOTTOM
    body = "".join([borders(parts, Lane(TOP, top - GAP - TOP, 0, 1, total)), *drawn])
    return (
        f'<svg class="plot curriculum" viewBox="0 0 {WIDTH} {bottom:.0f}" role="img"'
        f' aria-label="Curriculum: {len(parts)} stages over {total} steps">{body}</svg>'
    )


def parts_of(checkpoints: Path) -> list[Part]:
    """The stages in the order in which each starts from the one before."""
    parts: list[Part] = []
    first = 0
    for curve in read_curves(checkpoints):
        path = checkpoints / curve.stage / "checkpoint.json"
        facts = cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
        try:
            settings = Stage.model_validate(facts["settings"]) if "settings" in facts else None
        except ValidationError:
            settings = None  # of another version: what the curve says is drawn all the same
        num_steps = int(curve.rows[-1]["step"]) + 1
        planned = settings.num_steps if settings is not None else num_steps
        reason = facts.get("ended") or (
            f"all {planned} steps" if num_steps == planned else f"{num_steps} of {planned} steps"
        )
        parts.append(Part(curve, first, num_steps, settings, str(reason)))
        first += num_steps
    return parts


def borders(parts: Sequence[Part], lane: Lane) -> str:
    """Where stages begin, what they are called, how they end, and the steps below."""
    drawn: list[str] = []
    bottom = lane.top + lane.height
    for part in parts:
        x = lane.x(part.first)
        drawn.append(f'<line class="border" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{bottom:.1f}"/>')
        room = max(1, int((lane.x(part.first + part.num_steps) - x) / 6))  # some 6 px a character
        method = f", {part.settings.method}" if part.settings is not None else ""
        for words, y, kind in ((part.curve.stage + method, 12, "stage"), (part.reason, 24, "reason")):
            shown = words if len(words) <= room else f"{words[: room - 1]}…"
            drawn.append(
                f'<text class="{kind}" x="{x + 5:.1f}" y="{y}">{escape(shown)}<title>{escape(words)}</title></text>'
            )
        drawn.append(f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{part.first}</text>')
    end = lane.num_steps
    drawn.append(f'<text x="{lane.x(end):.1f}" y="{bottom + 16:.1f}" text-anchor="end">{end} steps</text>')
    return "".join(drawn)


def draw_losses(parts: Sequence[Part], lane: Lane) -> str:
    """Running medians of both modalities' losses; a loss of 0 is that of a step without it."""
    curves: list[tuple[str, list[tuple[float, float]]]] = []
    for part in parts:
        for key in ("loss_video", "loss_audio"):
            points = [(float(part.first + row["step"]), float(row[key])) for row in part.curve.rows if row.get(key)]
            if points:
                smooth = running_median([value for _, value in points], NUM_SMOOTH)
                curves.append((key, [(x, y) for (x, _), y in zip(points, smooth, strict=True)]))
    if not curves:
        return ""
    low, high = bounds([y for _, points in curves for _, y in points])
    scaled = lane._replace(low=low, high=high, logarithmic=True)
    frame = scaled.frame(
        "loss: picture and sound, running median", [(value, f"{value:g}") for value in nice(low, high)]
    )
    return frame + "".join(scaled.line(points, f"curve {key}") for key, points in curves)


def draw_rates(parts: Sequence[Part], lane: Lane) -> str:
    """The learning rate of every step."""
    lines = [
        [
            (float(part.first + row["step"]), float(row["learning_rate"]))
            for row in part.curve.rows
            if "learning_rate" in row
        ]
        for part in parts
    ]
    highest = max((rate for points in lines for _, rate in points), default=0.0)
    if highest <= 0:
        return ""
    scaled = lane._replace(high=highest)
    ticks = [(value, f"{value:.2g}") for value in (0.0, highest / 2, highest)]
    return scaled.frame("learning rate", ticks) + "".join(
        scaled.line(points, "curve rate") for points in lines if points
    )


def draw_difficulty(parts: Sequence[Part], lane: Lane) -> str:
    """The window of difficulty that is open, as it opens."""
    boxes: list[str] = []
    for part in parts:
        if part.settings is None:
            continue
        low = part.settings.difficulty[0]
        starts = [(step, limit) for step, limit in opened(part.settings) if step < part.num_steps]
        ends = [*(step for step, _ in starts[1:]), part.num_steps]
        for (start, limit), end in zip(starts, ends, strict=True):
            words = f"{part.curve.stage}: difficulty {low:g} to {limit:.2f}"
            boxes.append(lane.box(part.first + start, part.first + end, low, limit, "window", words))
    ticks = [(0.0, "easiest"), (0.5, "0.5"), (1.0, "hardest")]
    return lane.frame("difficulty that is drawn from", ticks) + "".join(boxes) if boxes else ""


def draw_modes(parts: Sequence[Part], lane: Lane) -> str:
    """How often each mode was drawn, counted over pieces of each stage."""
    modes = sorted({str(row["condition"]) for part in parts for row in part.curve.rows if "condition" in row})
    if not modes:
        return ""
    boxes: list[str] = []
    for part in parts:
        pieces = max(1, min(NUM_PARTS, part.num_steps // 5))
        for piece in range(pieces):
            start, end = (at * part.num_steps // pieces for at in (piece, piece + 1))
            shares = shares_of([row for row in part.curve.rows if start <= row["step"] < end], modes)
            below = 0.0
            for place, mode in enumerate(modes):
                if share := shares.get(mode, 0.0):
                    words = f"{part.curve.stage}: {mode} {share:.0%} of steps {start} to {end - 1}"
                    kind = f"mode mode{place}"
                    boxes.append(lane.box(part.first + start, part.first + end, below, below + share, kind, words))
                below += share
    key = " ".join(f'<tspan class="mode{place}">■ {escape(mode)}</tspan>' for place, mode in enumerate(modes))
    return lane.frame(f"steps of each mode: {key}", [(0.0, "0"), (1.0, "100%")]) + "".join(boxes)


def shares_of(rows: Sequence[Mapping[str, Any]], modes: Sequence[str]) -> dict[str, float]:
    """Share of the rows that each mode has; nothing where there are no rows."""
    counts = Counter(str(row["condition"]) for row in rows if "condition" in row)
    total = sum(counts.values())
    return {mode: counts[mode] / total for mode in modes if total}


def draw_replay(parts: Sequence[Part], lane: Lane) -> str:
    """Share of the clips that are replayed; only where a stage replays any."""
    known = [(part, part.settings) for part in parts if part.settings is not None]
    highest = max((settings.replay_share for _, settings in known), default=0.0)
    if not highest:
        return ""
    scaled = lane._replace(high=highest)
    boxes = [
        scaled.box(
            part.first, part.first + part.num_steps, 0, settings.replay_share, "replay",
            f"{part.curve.stage}: {settings.replay_share:.0%} of {', '.join(settings.replay_groups) or 'what is easier'}",
        )
        for part, settings in known
        if settings.replay_share
    ]  # fmt: skip
    return scaled.frame("replay of what was learned before", [(0.0, "0"), (highest, f"{highest:.0%}")]) + "".join(boxes)
