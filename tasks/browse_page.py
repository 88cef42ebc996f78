"""The page about the data: drawings as SVG, tables, and the clips as data for its script. No request leaves it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import quote

from data import cards
from data.splits import SPLITS
from tasks.explain import on_page

if TYPE_CHECKING:
    from data.records import Reject
    from tasks.browse import Config, Left

TEMPLATE = Path(__file__).parent / "browse.html.j2"
WIDTH, NODE, GAP, LABEL = 560, 12, 14, 132
"""Width of a drawing, of a node, between nodes, and kept free for the last labels, px."""
HEIGHT, SMALLEST = 190, 3.0
"""Height of all nodes of a column together, and of the smallest, px."""
HISTOGRAM_HEIGHT, MARGIN = 120, 12
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""What could end a script, or a line of it, inside JSON."""


DONE = {
    "list": "only listed",
    "default": "the default caption is used",
    "clean": "cleaned",
    "reject": "the file is left out",
}
"""What an action on a caption does."""


class Page(NamedTuple):
    """Everything the page shows."""

    config: Config
    counts: Mapping[str, int]
    items: Sequence[Mapping[str, Any]]
    rejects: Sequence[Mapping[str, Any]]
    rules: Sequence[Mapping[str, Any]]
    num_left: Mapping[bool, int]
    """Rejects of files, and of spans (True)."""
    faults: Mapping[str, int]
    """Captions by what is wrong with them."""
    fault_rows: Sequence[Mapping[str, Any]]
    treatments: Mapping[str, int]


class Node(NamedTuple):
    """One bar of a flow drawing."""

    name: str
    num: int
    kind: str
    """Style class."""


def render(page: Page) -> str:
    """The page's HTML."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=on_page)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    config, counts = page.config, page.counts
    known = [read_card(config.cards / f"{name}.json") for name in SPLITS]
    summary = cast("dict[str, Any]", json.loads((config.splits / "summary.json").read_text(encoding="utf-8")))
    return template.render(
        counts=counts, rejects=page.rejects, rules=page.rules, treatments=page.treatments, cards=known,
        histograms=[(item.name, unit_words(item.name, known), histogram(item.name, known)) for item in known[0].histograms],
        flows=flows(counts), summary=summary, groups=by_group(summary), suites=suites(config),
        num_left=page.num_left, faults=page.faults, fault_rows=page.fault_rows, done=DONE, params=config.settings_file or "params.yaml", problems=problems(counts),
        report=link(config.report, config.pages), card_links={n: link(config.cards / f"{n}.md", config.pages) for n in SPLITS},
        data=script_json(list(page.items)), names=list(SPLITS), num_items=len(page.items),
    )  # fmt: skip


def script_json(value: object) -> str:
    """JSON that stands inside a script element, whatever its texts hold."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return "".join(ESCAPES.get(char, char) for char in text)


def read_card(path: Path) -> cards.Card:
    """The data card of a split."""
    return cards.Card.model_validate_json(path.read_bytes())


def link(target: Path, pages: Path) -> str:
    """Where a page lies, seen from ours."""
    return Path(os.path.relpath(target, pages)).as_posix()


def suites(config: Config) -> list[dict[str, Any]]:
    """Of every suite: how many of its expectations hold, those that do not, and its pages."""
    rows: list[dict[str, Any]] = []
    for path in config.expectations:
        found = cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
        broken = [item for item in found["outcomes"] if not item["success"]]
        page = link(config.docs / str(found["suite"]) / "index.html", config.pages)
        total, answers = len(found["outcomes"]), link(path, config.pages)
        rows.append({"name": found["suite"], "total": total, "broken": broken, "page": page, "json": answers})
    return rows


def problems(counts: Mapping[str, int]) -> list[str]:
    """Sums that do not come out; on a good day there is none."""
    sums = {
        f"{counts['given']} given, but {counts['accepted']} accepted + {counts['rejected']} rejected": counts["given"]
        - counts["accepted"]
        - counts["rejected"],
        f"{counts['left_out']} clips left out by `split`": min(counts["left_out"], 0),
    }
    return [text for text, rest in sums.items() if rest]


def by_group(summary: Mapping[str, Any]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Rows of the stratification, by group."""
    rows = cast("list[Mapping[str, Any]]", summary["stratification"])
    names = list(dict.fromkeys(str(row["group"]) for row in rows))
    return [(name, [row for row in rows if row["group"] == name]) for name in names]


def flows(counts: Mapping[str, int]) -> list[tuple[str, str, str]]:
    """Title, words and drawing of the way of files, and of clips."""
    treated, used, without = counts["treated"], counts["with_clips"], counts["without_clips"]
    sources = [
        [Node("given", counts["given"], "ink")],
        [
            Node("used as they are", used - treated, "good"),
            Node("used, treated", treated, "mild"),
            Node("gave no clip", without, "bad"),
            Node("left out", counts["rejected"], "bad"),
        ],
    ]
    spans = [
        [Node("spans", counts["spans"], "ink")],
        [Node("clips", counts["clips"], "good"), Node("filtered", counts["filtered"], "bad")],
        [
            *(Node(name, counts[name], name) for name in SPLITS),
            *([Node("in no split", counts["left_out"], "bad")] if counts["left_out"] else []),
        ],
    ]
    extra = f"; {counts['references']} references beside them" if counts["references"] else ""
    return [
        (
            "Files",
            f"{counts['given']} given = {used} used + {without} that gave no clip + {counts['rejected']} left out{extra}.",
            flow(sources),
        ),
        (
            "Clips",
            f"{counts['spans']} spans of the files = {counts['clips']} clips + {counts['filtered']} filtered.",
            flow(spans),
        ),
    ]


def flow(columns: Sequence[Sequence[Node]]) -> str:
    """Bars in columns, each column fed by the first bar of the one before."""
    total = max(1, *(sum(node.num for node in column) for column in columns))
    step = (WIDTH - LABEL - NODE) / max(1, len(columns) - 1)
    bottom = max((len(column) - 1) * GAP for column in columns) + HEIGHT
    parts: list[str] = []
    fed_at = 0.0
    for place, column in enumerate(columns):
        x, y, source = place * step, 0.0, fed_at
        for node in column:
            tall = height(node.num, total)
            if place:
                parts.append(ribbon(x - step + NODE, source, x, y, tall, node.kind))
            last = place == len(columns) - 1
            parts.append(
                f'<rect class="{node.kind}" x="{x:.1f}" y="{y:.1f}" width="{NODE}" height="{tall:.1f}" rx="2"/>'
            )
            at = x + NODE + 8
            anchor = y + min(tall / 2, 60) + 4 if last or place else y + 18
            parts.append(f'<text x="{at:.1f}" y="{anchor:.1f}"><tspan class="n">{node.num}</tspan> {node.name}</text>')
            source += tall
            y += max(tall, 12) + GAP
        fed_at = 0.0
    return (
        f'<svg class="flow" viewBox="0 0 {WIDTH} {bottom + 8:.0f}" role="img" aria-hidden="true">{"".join(parts)}</svg>'
    )


def height(count: int, total: int) -> float:
    """Of a bar, px: in proportion, yet seen."""
    return max(SMALLEST, HEIGHT * count / total) if count else 1.0


def ribbon(x0: float, y0: float, x1: float, y1: float, tall: float, kind: str) -> str:
    """A band from one bar to another."""
    middle = (x0 + x1) / 2
    top = f"M{x0:.1f},{y0:.1f} C{middle:.1f},{y0:.1f} {middle:.1f},{y1:.1f} {x1:.1f},{y1:.1f}"
    back = f"L{x1:.1f},{y1 + tall:.1f} C{middle:.1f},{y1 + tall:.1f} {middle:.1f},{y0 + tall:.1f} {x0:.1f},{y0 + tall:.1f} Z"
    return f'<path class="band {kind}" d="{top} {back}"/>'


def histogram(name: str, known: Sequence[cards.Card]) -> str:
    """Clips by value, the splits stacked; below, the values between the bars."""
    own = [next(item for item in card.histograms if item.name == name) for card in known]
    totals = [sum(item.counts[place] for item in own) for place in range(len(own[0].counts))]
    held = [place for place, count in enumerate(totals) if count]
    if not held:
        return ""
    first, last, largest, edges = held[0], held[-1], max(totals), own[0].edges
    wide = (WIDTH / 2 - 2 * MARGIN) / max(4, last - first + 1)
    parts: list[str] = []
    for place in range(first, last + 1):
        x, y = MARGIN + (place - first) * wide, HISTOGRAM_HEIGHT + 14.0
        for split, item in zip(SPLITS, own, strict=True):
            tall = HISTOGRAM_HEIGHT * item.counts[place] / largest
            y -= tall
            parts.append(
                f'<rect class="{split}" x="{x + 2:.1f}" y="{y:.1f}" width="{wide - 4:.1f}" height="{tall:.1f}"/>'
            )
        parts.append(f'<text class="n" x="{x + wide / 2:.1f}" y="{y - 3:.1f}">{totals[place] or ""}</text>')
    for place in range(max(first, 1), min(last + 1, len(edges)) + 1):
        x = MARGIN + (place - first) * wide
        parts.append(f'<text x="{x:.1f}" y="{HISTOGRAM_HEIGHT + 28}">{edges[place - 1]:g}</text>')
    return f'<svg class="bars" viewBox="0 0 {WIDTH / 2:.0f} {HISTOGRAM_HEIGHT + 34}" role="img" aria-hidden="true">{"".join(parts)}</svg>'


def unit_words(name: str, known: Sequence[cards.Card]) -> str:
    """A histogram's unit, and how many clips have no such value."""
    own = [next(item for item in card.histograms if item.name == name) for card in known]
    missing = sum(item.num_missing for item in own)
    return f"{own[0].unit}; {missing} clips without" if missing else own[0].unit


def address(path: str, pages: Path) -> str | None:
    """A file's address relative to the pages; None for a remote one."""
    if "://" in path:
        return None
    return quote(Path(os.path.relpath(path, pages)).as_posix(), safe="/")


def rounded(value: object) -> object:
    """A number with as many digits as a reader uses."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def is_span(reject: Reject) -> bool:
    """Whether a span of a source was left out, not the whole."""
    return "-" in reject.item


def start_of(item: str) -> float:
    """Where a clip starts, by its id, s."""
    return int(item.partition("-")[2] or 0) / 1000


def rules_of(left: Left, pictured: set[str], num_examples: int) -> list[dict[str, Any]]:
    """Every rule that left something out: how often, the first measured value and limit, thumbnails."""
    rows: list[dict[str, Any]] = []
    for (rule, spans), count in sorted(left.by_rule.items(), key=lambda pair: (-pair[1], pair[0])):
        own = [reject for reject in left.rows if reject.rule == rule and is_span(reject) == spans]
        pictures = [reject.item for reject in own if reject.item in pictured][:num_examples]
        example = {"measured": own[0].measured, "limit": own[0].limit}
        rows.append({"rule": rule, "count": count, "pictures": pictures, "spans": spans, **example})
    return rows
