from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest

from data.media import write_mp4
from data.records import Clip, ClipShape, Reject, Report, Treatment
from tasks import charts
from tasks.report import Page, render, write_page

Maker = Callable[..., Report]


@pytest.fixture
def page(tmp_path: Path, make_clip: Callable[..., Clip]) -> Page:
    """A page with two shown clips, a curriculum of two stages, a reject and treatments."""
    clips = [make_clip(f"new{number:02d}", group="new", caption=f"ball {number} <b>&") for number in (0, 1)]
    rng = np.random.default_rng(0)
    for clip in clips:
        for name in ("reference", "before", "after"):
            frames = rng.integers(0, 256, (22, 32, 32, 3)).astype(np.uint8)
            waveform = (0.1 * rng.standard_normal((2, 7333))).astype(np.float32)
            write_mp4(tmp_path / "media" / clip.clip_id / f"{name}.mp4", frames, waveform, 24, 8000)
    for stage, start, steps in (("all", "easy", 60), ("easy", None, 30)):
        folder = tmp_path / "checkpoints" / stage
        folder.mkdir(parents=True)
        (folder / "checkpoint.json").write_text(json.dumps({"settings": {"start_from": start}}))
        rows = [
            {"step": n, "loss_video": 1 / (n + 1), "loss_audio": 0.0 if n % 7 == 3 else 0.5, "timestep_bin": n % 10}
            for n in range(steps)
        ]
        (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits/test.parquet").write_bytes(b"x")
    return Page(
        shape=ClipShape(),
        num_inference_steps=20,
        shown=tuple(clips),
        checkpoints=tmp_path / "checkpoints",
        splits=tmp_path / "splits",
        rejects=(
            Reject(
                item="x",
                path="in/text.mp4",
                verb="validate",
                rule="validate.usable",
                measured="is text",
                limit="a film",
            ),
            *(
                Reject(item=item, path="in/dim.mp4", verb=verb, rule=f"{verb}.x", measured="0.1", limit="0.2")
                for verb, item in (("cut", "y"), ("cut", "z-000917"), ("split", "w"))
            ),
        ),
        treatments=(
            *(
                Treatment(item=f"{n}", path=f"in/{n}.mp4", treatment="mono_to_stereo", detail="1 channel")
                for n in range(5)
            ),
            Treatment(item="0", path="in/0.mp4", treatment="resize", detail="93x127 to 32x32 px"),
        ),
    )


def test_the_page_asks_nothing_of_the_network(page: Page, make_report: Maker, tmp_path: Path) -> None:
    html = render(make_report(), page, tmp_path / "media")
    for attribute in ("src", "href", "poster", "srcset", "action"):
        assert all(value.startswith(("data:", "#")) for value in re.findall(rf'{attribute}="([^"]*)"', html))
    assert "http:" not in html
    assert "https:" not in html
    assert "url(" not in html
    assert "@import" not in html


def test_every_shown_video_is_inside_plays_and_has_stereo_sound(page: Page, make_report: Maker, tmp_path: Path) -> None:
    html = render(make_report(), page, tmp_path / "media")
    videos = re.findall(r'<video controls loop[^>]*src="data:video/mp4;base64,([^"]+)"', html)
    assert len(videos) == 6
    for video in videos:
        with av.open(io.BytesIO(base64.b64decode(video))) as container:
            assert sum(1 for _ in container.decode(video=0)) == 22
            assert container.streams.audio[0].channels == 2


def test_the_same_inputs_give_the_same_bytes(page: Page, make_report: Maker, tmp_path: Path) -> None:
    assert render(make_report(), page, tmp_path / "media") == render(make_report(), page, tmp_path / "media")


def test_text_from_the_corpus_cannot_become_markup(page: Page, make_report: Maker, tmp_path: Path) -> None:
    html = render(make_report(), page, tmp_path / "media")
    assert "ball 0 &lt;b&gt;&amp;" in html
    assert "ball 0 <b>" not in html


def test_the_verdict_follows_the_intervals(page: Page, make_report: Maker, tmp_path: Path) -> None:
    assert "Fine-tuning learned" in render(make_report(), page, tmp_path / "media")
    worse = render(make_report(gain_db=-7.0), page, tmp_path / "media")
    assert "no sure gain in PSNR, SSIM." in worse
    assert "Fine-tuning learned" not in worse


def test_the_first_card_shows_before_after_and_their_difference(page: Page, make_report: Maker, tmp_path: Path) -> None:
    report = make_report()
    html = render(report, page, tmp_path / "media")
    card = html[html.index("<h3>Picture") : html.index("<h3>Structure")]
    before, after = (float(value) for value in re.findall(r">\s*(\d+\.\d)\s*<", card)[:2])
    difference = next(
        pair.difference for pair in report.comparisons if (pair.right, pair.group) == ("base/fl2va", "new")
    )
    assert after - before == pytest.approx(difference, abs=0.11)
    assert "9 clips of 9 sources" in card


def test_what_was_not_measured_is_listed_with_its_reason(page: Page, make_report: Maker, tmp_path: Path) -> None:
    html = render(make_report(), page, tmp_path / "media")
    missing = html[html.index("Not measured") :]
    assert "LSE-D (lip sync)" in missing
    assert "SyncNet weights are not installed" in missing
    assert "a cross-fade has no sound" in missing


def test_rejects_treatments_lineage_and_stages_are_on_the_page(page: Page, make_report: Maker, tmp_path: Path) -> None:
    html = render(make_report(), page, tmp_path / "media")
    assert "in/text.mp4" in html
    assert "validate.usable" in html
    assert "Left out: 4" in html
    assert "<p>1 file by validate; 1 file and 1 span by cut; 1 file by split</p>" in html
    assert "Treated: 5" in html
    assert "a" * 64 in html
    assert html.index(">easy</text>") < html.index(">all</text>")


def test_the_whole_curriculum_is_on_the_page_as_one_drawing(page: Page, make_report: Maker, tmp_path: Path) -> None:
    html = render(make_report(), page, tmp_path / "media")
    assert html.count('<svg class="plot curriculum"') == 1
    assert 'aria-label="Curriculum: 2 stages over 90 steps"' in html
    for word in ("curriculum", "window", "replay", "rate", "mode0"):
        assert f".{word}" in html[: html.index("</style>")]  # what it is coloured by


def test_a_bare_page_without_videos_curves_or_groups_still_renders(make_report: Maker, tmp_path: Path) -> None:
    bare = Page(shape=ClipShape(), num_inference_steps=1, checkpoints=tmp_path / "none", splits=tmp_path / "none")
    write_page(tmp_path, make_report().model_copy(update={"comparisons": (), "metrics": ()}), bare)
    html = (tmp_path / "report.html").read_text()
    assert "nothing could be compared" in html
    assert "No loss was logged" in html
    assert "The whole curriculum" not in html


def test_curves_are_in_the_order_of_the_curriculum_and_skip_steps_without_sound(page: Page) -> None:
    curves = charts.read_curves(page.checkpoints)
    assert [curve.stage for curve in curves] == ["easy", "all"]
    assert charts.losses(curves, "loss_video").count("<circle") == 90
    assert charts.losses(curves, "loss_audio").count("<circle") == 90 - 4 - 9 + 1 - 1
    assert set(charts.binned(curves[0].rows, "loss_audio").values()) == {0.5}


def test_running_median_ignores_a_spike_and_nice_ticks_lie_within() -> None:
    assert charts.running_median([1.0, 1.0, 99.0, 1.0, 1.0], 3) == [1.0, 1.0, 1.0, 1.0, 1.0]
    assert charts.nice(0.1, 1.0) == pytest.approx([0.1, 0.2, 0.5, 1.0])
    assert all(0.21 <= tick <= 0.26 for tick in charts.nice(0.21, 0.26))
