"""A curriculum as `plan` would write it, and a report as `evaluate` would, for verbs that read them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.records import Comparison, MetricValue, Report

GROUPS = {"new": 9, "base": 8, "footage": 2}
SUBSETS = {
    "base/fl2va": (20.0, 12.0),
    "tuned/fl2va": (27.0, 8.0),
    "tuned/fl2va_swapped": (16.0, 11.0),
    "base/t2va": (12.0, 14.0),
    "tuned/t2va": (15.0, 12.0),
    "crossfade": (23.0, None),
    "reconstruction": (33.0, 5.0),
}
"""PSNR and log-spectral distance of each kind of generation."""


@pytest.fixture(scope="session")
def curriculum(store_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the common store, each clip harder than the one before."""
    from data.curriculum import Planned
    from data.files import write_records
    from data.latents import LatentStore

    ranks = dict.fromkeys(("motion", "tokens", "cuts", "caption", "sound", "sync", "quality", "loss"))
    planned = [
        Planned(
            entry=row.entry, clip_id=row.clip_id, source_id=row.source_id, group=row.group, bucket="small", **ranks,
            difficulty=index / 5, review=False,
        )
        for index, row in enumerate(LatentStore(store_folder).index.rows())
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("curriculum") / "curriculum.parquet"
    write_records(path, planned, Planned)
    return path


def rows_of(gain_db: float, seed: int, clip_prefix: str) -> list[dict[str, str | float | None]]:
    """Per-clip rows with a little spread; `gain_db` moves the tuned model's picture."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, str | float | None]] = []
    for group, count in GROUPS.items():
        for number in range(count):
            hard = float(rng.normal(0, 2))
            for subset, (psnr, lsd) in SUBSETS.items():
                own = psnr + hard + float(rng.normal(0, 0.3)) + (gain_db if subset == "tuned/fl2va" else 0.0)
                clip = f"{clip_prefix}{group}{number:02d}"
                row = {"clip_id": f"{clip}-000000", "source_id": clip, "group": group, "subset": subset}
                rows.append(
                    row | {"psnr_db": own, "psnr_middle_db": own, "ssim": own / 40, "lsd_db": lsd and lsd - hard / 4}
                )
    return rows


def metric_of(rows: list[dict[str, str | float | None]], name: str, subset: str, group: str) -> MetricValue:
    """The mean of one metric over rows."""
    chosen = [row for row in rows if row["subset"] == subset and group in ("all", row["group"])]
    values = [value for row in chosen if isinstance(value := row[name], float)]
    mean = float(np.mean(values)) if values else None
    return MetricValue(
        name=name, subset=subset, group=group, unit="" if name == "ssim" else "dB", value=mean,
        low=None if mean is None else mean - 0.8, high=None if mean is None else mean + 0.8,
        num_items=len(values), num_attempted=len(chosen), higher_is_better=name != "lsd_db",
        convention="8-bit RGB, mean over frames", reason="" if values else "a cross-fade has no sound",
    )  # fmt: skip


def comparison_of(rows: list[dict[str, str | float | None]], name: str, right: str, group: str) -> Comparison:
    """The paired difference of the tuned model and `right`."""
    values: dict[str, dict[str, float]] = {}
    for row in rows:
        if group in ("all", row["group"]) and isinstance(value := row[name], float):
            values.setdefault(str(row["subset"]), {})[str(row["clip_id"])] = value
    differences = [value - values[right][clip] for clip, value in values["tuned/fl2va"].items()]
    mean, half = float(np.mean(differences)), 0.5 if name != "ssim" else 0.02
    sign = -1 if name == "lsd_db" else 1
    return Comparison(
        name=name, left="tuned/fl2va", right=right, group=group, unit="" if name == "ssim" else "dB",
        difference=mean, low=mean - half, high=mean + half, num_items=len(differences),
        num_sources=len(differences), better=sign * mean > half,
    )  # fmt: skip


@pytest.fixture
def make_report() -> Callable[..., Report]:
    """Build a report; `gain_db` is how much better the tuned picture is than usual."""

    def make(gain_db: float = 0.0, seed: int = 0, weights: str = "a" * 64, clip_prefix: str = "") -> Report:
        rows = rows_of(gain_db, seed, clip_prefix)
        names = ("psnr_db", "psnr_middle_db", "ssim", "lsd_db")
        metrics = [metric_of(rows, n, s, g) for n in names for s in SUBSETS for g in ("all", *GROUPS)]
        lip = MetricValue(
            name="lse_d", subset="tuned/fl2va", group="all", unit="", value=None, num_items=0, num_attempted=16,
            higher_is_better=False, convention="SyncNet", reason="SyncNet weights are not installed",
        )  # fmt: skip
        pairs = [comparison_of(rows, n, "base/fl2va", g) for n in names for g in ("all", *GROUPS)]
        for group in ("all", *GROUPS):
            pairs.append(comparison_of(rows, "psnr_db", "tuned/fl2va_swapped", group))
            pairs.append(comparison_of(rows, "psnr_middle_db", "crossfade", group))
        return Report(
            model="tiny-h3 + all", checkpoint_sha256=weights, base_sha256="b" * 64, seed=0,
            metrics=(*metrics, lip), comparisons=tuple(pairs), per_clip=tuple(rows),
        )  # fmt: skip

    return make


@pytest.fixture
def write_report(tmp_path: Path) -> Callable[[Report], Path]:
    """Write a report where `evaluate` would; the answer is `report.json`."""

    def write(report: Report) -> Path:
        folder = tmp_path / "report"
        (folder / "media").mkdir(parents=True, exist_ok=True)
        (folder / "report.html").write_text("<!doctype html><title>report</title>")
        path = folder / "report.json"
        path.write_text(report.model_dump_json())
        return path

    return write


@pytest.fixture(scope="session")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `candidate`, `champion` and `references` with films of three sources, unlike in size, rate and loudness."""
    from data.media import write_mp4

    folder = tmp_path_factory.mktemp("films")
    rng = np.random.default_rng(0)
    kinds = {"candidate": (12, 64, 96, 32000, 0.05), "champion": (15, 96, 144, 44100, 0.5), "references": (24, 128, 192, 48000, 0.2)}  # fmt: skip
    for number in range(3):
        for name, (num_frames, height, width, rate_hz, peak) in kinds.items():
            frames = np.full((num_frames, height, width, 3), (60 * number, 90, 200 - 60 * number), np.uint8)
            for place, frame in enumerate(frames):
                frame[height // 4 : height // 2, place * 4 : place * 4 + 16] = rng.integers(180, 256, 3)
            time_T = np.arange(rate_hz * num_frames // 24) / rate_hz
            waveform_CT = np.stack([np.sin(2 * np.pi * (220 + 90 * number) * time_T)] * 2).astype(np.float32) * peak
            write_mp4(folder / name / f"film{number}.mp4", frames, waveform_CT, 24, rate_hz)
    return folder


@pytest.fixture(scope="session")
def small_panel(films: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A panel of half a second a film: one for training, six that count, one of them twice."""
    from tasks.panel import Config, run

    folder = tmp_path_factory.mktemp("made") / "panel"
    config = Config(
        panel=folder, mos=folder.parent / "mos.json", candidate=films / "candidate", references=films / "references",
        num_training=1, num_repeats=1,
    )  # fmt: skip
    run(config, "make")
    return folder


@pytest.fixture
def panel_folder(small_panel: Path, tmp_path: Path) -> Path:
    """A copy of it to write votes to."""
    return Path(shutil.copytree(small_panel, tmp_path / "panel"))
