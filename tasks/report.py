"""The report as one page a person wants to look at: no request leaves it, and same inputs give same bytes."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from data.files import sha256
from data.records import Clip, ClipShape, Comparison, Frozen, MetricValue, Reject, Report, Treatment
from tasks import charts, curriculum_picture
from tasks.explain import on_page
from tasks.generations import BASE, BASE_TEXT, CROSSFADE, RECONSTRUCTION, SWAPPED, TUNED, TUNED_TEXT

TEMPLATE = Path(__file__).parent / "report.html.j2"
COLUMNS = {
    BASE: "before", TUNED: "after", SWAPPED: "wrong keyframes", CROSSFADE: "cross-fade",
    RECONSTRUCTION: "autoencoder ceiling", BASE_TEXT: "before, text only", TUNED_TEXT: "after, text only",
}  # fmt: skip
NAMES = {
    "psnr_db": "PSNR", "psnr_pooled_db": "PSNR, pooled", "psnr_middle_db": "PSNR, middle half", "ssim": "SSIM", "lsd_db": "log-spectral distance",
    "envelope_r": "envelope correlation", "balance_db": "left-right error", "level_db": "loudness error",
    "pesq_nb": "PESQ, narrow band", "pesq_nb_worst": "PESQ, worse channel", "pesq_wb": "PESQ, wide band",
    "stoi": "STOI", "estoi": "extended STOI", "lse_d": "LSE-D (lip sync)", "lse_c": "LSE-C (lip sync)",
}  # fmt: skip
LABELS = {
    BASE: ("before", "after"),
    SWAPPED: ("wrong keyframes", "own keyframes"),
    CROSSFADE: ("cross-fade", "model"),
}
VIDEOS = {
    "reference": "Reference", "champion": "Champion", "before": "Before", "after": "After", "text": "After, text only",
}  # fmt: skip
"""File names of a clip's videos and what stands above them."""


class Page(Frozen):
    """What the page shows beside the report's numbers."""

    shape: ClipShape
    num_inference_steps: int
    learned_group: str = "new"
    kept_group: str = "base"
    shown: tuple[Clip, ...] = ()
    """Clips with videos in `media/CLIP_ID/`."""
    worst_by: str = "psnr_db"
    """Metric by which the worst clips come first."""
    champion: Path | None = None
    """Folder of the champion's report, whose videos of the same clips are shown beside."""
    checkpoints: Path
    splits: Path
    rejects: tuple[Reject, ...] = ()
    treatments: tuple[Treatment, ...] = ()
    curriculum_picture: Path | None = None


class Card(NamedTuple):
    """One finding at the top of the page."""

    title: str
    labels: tuple[str, str]
    """What the two numbers are."""
    before: str
    after: str
    unit: str
    sentence: str
    drawing: str
    mark: str
    good: bool


class Shown(NamedTuple):
    """One clip with its videos."""

    caption: str
    group: str
    clip_id: str
    videos: list[tuple[str, str, str]]
    """Name, title and data address of each."""
    scores: dict[str, str]


def write_page(folder: Path, report: Report, page: Page) -> None:
    """Write `report.html` into `folder`, with the videos of `folder/media` inside it."""
    (folder / "report.html").write_text(render(report, page, folder / "media"), encoding="utf-8")


def render(report: Report, page: Page, media: Path) -> str:
    """The page's HTML."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=on_page)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    groups = ["all", *sorted({str(row["group"]) for row in report.per_clip})]
    learned = page.learned_group if page.learned_group in groups else "all"
    curves = charts.read_curves(page.checkpoints)
    ordered = [learned, *(group for group in groups if group != learned)]
    worst = worst_first(report, page.worst_by)
    shown_worst = sorted(
        page.shown, key=lambda clip: worst.index(clip.clip_id) if clip.clip_id in worst else len(worst)
    )
    return template.render(
        per_clip=per_clip(report, worst), worst_by=NAMES.get(page.worst_by, page.worst_by),
        report=report, page=page, learned=learned, verdict=verdict(report, learned),
        cards=cards(report, learned, page.kept_group), clips=[shown(report, clip, media, page.champion) for clip in shown_worst],
        tables=[(group, table(report, group)) for group in ordered], columns=COLUMNS, names=NAMES,
        comparisons=sorted(report.comparisons, key=lambda pair: (ordered.index(pair.group), pair.name)),
        missing=missing(report),
        conventions=conventions(report),
        drawings=[
            (title, key, charts.losses(curves, key), charts.by_noise_level(curves, key))
            for title, key in (("Picture", "loss_video"), ("Sound", "loss_audio"))
        ],
        stages=[(curve.stage, len({row["step"] for row in curve.rows})) for curve in curves],
        stages_picture=curriculum_picture.draw(page.checkpoints),
        curriculum=data_address(page.curriculum_picture, "image/png"),
        left=left_words(page.rejects), num_treated=len({row.item for row in page.treatments}),
        treatments=grouped(page.treatments), lineage=lineage(report, page),
        num_clips=len({row["clip_id"] for row in report.per_clip}),
        num_sources=len({row["source_id"] for row in report.per_clip}),
    )  # fmt: skip


def verdict(report: Report, group: str) -> tuple[bool, str]:
    """Whether fine-tuning proved itself on `group`, and the sentence that says so."""
    better = {name: pair.better for name in ("psnr_db", "ssim", "lsd_db") if (pair := find(report, name, BASE, group))}
    if better and all(better.values()):
        return True, "Fine-tuning learned: picture and sound are closer to the real clips than before."
    failed = [NAMES[name] for name, good in better.items() if not good] or ["nothing could be compared"]
    return False, f"Fine-tuning has not proved itself: no sure gain in {', '.join(failed)}."


def find(report: Report, name: str, right: str, group: str, left: str = TUNED) -> Comparison | None:
    """One paired difference of the report."""
    key = (name, left, right, group)
    return next((pair for pair in report.comparisons if (pair.name, pair.left, pair.right, pair.group) == key), None)


def value_of(report: Report, name: str, subset: str, group: str) -> MetricValue | None:
    """One metric of the report."""
    key = (name, subset, group)
    return next((value for value in report.metrics if (value.name, value.subset, value.group) == key), None)


def cards(report: Report, learned: str, kept: str) -> list[Card]:
    """The findings that decide, best known first."""
    wanted = [
        ("Picture", "psnr_db", BASE, learned, "PSNR against the real clip."),
        ("Structure", "ssim", BASE, learned, "SSIM against the real clip, 1 is the same."),
        ("Sound", "lsd_db", BASE, learned, "Log-spectral distance to the real sound: less is better."),
        ("Keyframes matter", "psnr_db", SWAPPED, "all", "PSNR with another clip's keyframes and with its own."),
        (
            "Motion",
            "psnr_middle_db",
            CROSSFADE,
            learned,
            "Middle half: fading one keyframe into the other, and the model.",
        ),
        ("Memory", "psnr_db", BASE, kept, "PSNR on what the base model already knew: a loss is what was forgotten."),
    ]
    found = [(row, find(report, row[1], row[2], row[3])) for row in wanted]
    return [card(report, row[0], pair, row[4]) for row, pair in found if pair is not None]


def card(report: Report, title: str, pair: Comparison, words: str) -> Card:
    """One finding: from, to, change with interval; both means over the clips that have both values."""
    metric = value_of(report, pair.name, pair.left, pair.group)
    higher = metric.higher_is_better if metric else True
    after = shared_mean(report, pair)
    before = after - pair.difference
    digits = 3 if pair.unit == "" else 1
    change = ", ".join(f"{value:+.{digits}f}" for value in (pair.low, pair.high))
    clips = f"{pair.num_items} clips of {pair.num_sources} sources"
    where = "all groups" if pair.group == "all" else f"group “{pair.group}”"
    worse = pair.high < 0 if higher else pair.low > 0
    if title == "Memory":
        mark, good = ("forgot some", False) if worse else ("kept", True)
    else:
        mark, good = ("proved", True) if pair.better else ("worse", False) if worse else ("not proved", False)
    return Card(
        title=title,
        labels=LABELS[pair.right],
        before=f"{before:.{digits}f}",
        after=f"{after:.{digits}f}",
        unit=pair.unit,
        sentence=f"{words} Change {pair.difference:+.{digits}f} {pair.unit} [{change}], {clips}, {where}.",
        drawing=charts.change(before, after, pair.low, pair.high, kind="good" if good else "bad"),
        mark=mark,
        good=good,
    )


def shared_mean(report: Report, pair: Comparison) -> float:
    """Mean of the left side over the clips that both sides have."""
    scores: dict[str, dict[str, float]] = {pair.left: {}, pair.right: {}}
    for row in report.per_clip:
        value = row.get(pair.name)
        if row["subset"] in scores and pair.group in ("all", row["group"]) and isinstance(value, float):
            scores[str(row["subset"])][str(row["clip_id"])] = value
    left, right = scores[pair.left], scores[pair.right]
    return fmean(left[clip] for clip in left if clip in right)


def worst_first(report: Report, name: str) -> list[str]:
    """Clips of the tuned model by a metric, the worst first; those without a value before all, as they failed."""
    higher = next((value.higher_is_better for value in report.metrics if value.name == name), True)
    scores = {str(row["clip_id"]): row.get(name) for row in report.per_clip if row["subset"] == TUNED}

    def rank(clip: str) -> tuple[bool, float, str]:
        value = scores[clip]
        return (False, 0.0, clip) if not isinstance(value, float) else (True, value if higher else -value, clip)

    return sorted(scores, key=rank)


def per_clip(report: Report, order: Sequence[str]) -> tuple[list[str], list[tuple[str, str, str, list[float | None]]]]:
    """Names of the metrics, and of every clip its id, source, group and the tuned model's values."""
    rows = {str(row["clip_id"]): row for row in report.per_clip if row["subset"] == TUNED}
    names = [
        name
        for name in dict.fromkeys(value.name for value in report.metrics)
        if any(rows[c].get(name) is not None for c in order)
    ]
    return names, [
        (
            clip,
            str(row["source_id"]),
            str(row["group"]),
            [value if isinstance(value := row.get(name), float) else None for name in names],
        )
        for clip in order
        for row in (rows[clip],)
    ]


def shown(report: Report, clip: Clip, media: Path, champion: Path | None = None) -> Shown:
    """A clip's videos, as data inside the page, and its scores."""
    videos: list[tuple[str, str, str]] = []
    for name, title in VIDEOS.items():
        path = media / clip.clip_id / f"{name}.mp4"
        if name == "champion":
            path = champion / "media" / clip.clip_id / "after.mp4" if champion else None
        address = data_address(path, "video/mp4")
        if address:
            videos.append((name, title, address))
    scores: dict[str, str] = {}
    for row in report.per_clip:
        if row["clip_id"] == clip.clip_id:
            name = {BASE: "before", TUNED: "after", TUNED_TEXT: "text"}.get(str(row["subset"]))
            if name:
                scores[name] = " · ".join(score_words(row))
    return Shown(clip.caption, clip.group, clip.clip_id, videos, scores)


def score_words(row: dict[str, str | float | None]) -> list[str]:
    """A generation's picture and sound in a few words."""
    known = ((label, row.get(name)) for label, name in (("picture", "psnr_db"), ("sound off by", "lsd_db")))
    return [f"{label} {value:.1f} dB" for label, value in known if isinstance(value, float)]


def table(report: Report, group: str) -> list[tuple[str, str, bool, list[MetricValue | None]]]:
    """Metric, unit, direction and a value a column, for one group; metrics nobody could compute are listed elsewhere."""
    rows: list[tuple[str, str, bool, list[MetricValue | None]]] = []
    for name in dict.fromkeys(value.name for value in report.metrics):
        values = [value_of(report, name, subset, group) for subset in COLUMNS]
        known = [value for value in values if value is not None and value.value is not None]
        if known:
            rows.append((name, known[0].unit, known[0].higher_is_better, values))
    return rows


def missing(report: Report) -> list[tuple[str, str, str]]:
    """Metric, columns and reason of what could not be computed over all clips; one row a reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for value in report.metrics:
        if value.value is None and value.group == "all":
            found.setdefault((value.name, value.reason), []).append(COLUMNS[value.subset])
    return [(name, ", ".join(columns), reason) for (name, reason), columns in found.items()]


def conventions(report: Report) -> list[tuple[str, str]]:
    """How every metric is computed, once."""
    return list({value.name: value.convention for value in report.metrics}.items())


def left_words(rejects: Sequence[Reject]) -> str:
    """How many whole files, and how many spans of files, which verb left out; every row of the table counts once."""
    parts: list[str] = []
    for verb in dict.fromkeys(row.verb for row in rejects):
        own = [row.item for row in rejects if row.verb == verb]
        spans = sum("-" in item for item in own)
        counts = {"file": len(own) - spans, "span": spans}
        said = " and ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items() if count)
        parts.append(f"{said} by {verb}")
    return "; ".join(parts)


def grouped(treatments: Sequence[Treatment]) -> list[tuple[str, list[Treatment]]]:
    """Treatments of the same kind together, most frequent first."""
    kinds: dict[str, list[Treatment]] = {}
    for item in sorted(treatments, key=lambda item: (item.treatment, item.path)):
        kinds.setdefault(item.treatment, []).append(item)
    return sorted(kinds.items(), key=lambda item: (-len(item[1]), item[0]))


def lineage(report: Report, page: Page) -> list[tuple[str, str]]:
    """Everything that made the numbers."""
    shape = page.shape
    size = f"{shape.num_frames} frames at {shape.frame_rate}/s, {shape.width}×{shape.height} px"
    return [
        ("fine-tuned weights", report.checkpoint_sha256),
        ("base model", report.base_sha256),
        *((f"split {path.stem}", sha256(path)) for path in sorted(page.splits.glob("*.parquet"))),
        ("clip", f"{size}, stereo {shape.sample_rate_hz} Hz"),
        ("generation", f"{page.num_inference_steps} steps, seed {report.seed}"),
    ]


def data_address(path: Path | None, kind: str) -> str:
    """A file as an address that holds its bytes; empty where there is none."""
    if path is None or not path.is_file():
        return ""
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
