from __future__ import annotations

import base64
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import numpy as np
import pytest

from data.media import write_mp4
from data.records import Clip, ClipShape, Reject, Report, Treatment
from tasks import charts
from tasks.report import Page, render, worst_first, write_page

if TYPE_CHECKING:
    from playwright.sync_api import Page as Tab

Maker = Callable[..., Report]
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FRAME_S = 1 / 24
TIMES = "[...document.querySelectorAll('.clip.current video')].map(video => video.currentTime)"


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
    videos = re.findall(r'<video controls[^>]*src="data:video/mp4;base64,([^"]+)"', html)
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


def test_the_worst_clips_come_first_and_failed_ones_before_them(page: Page, make_report: Maker, tmp_path: Path) -> None:
    report = make_report()
    tuned = {str(row["clip_id"]): row for row in report.per_clip if row["subset"] == "tuned/fl2va"}
    assert worst_first(report, "psnr_db") == sorted(tuned, key=lambda clip: tuned[clip]["psnr_db"])
    assert worst_first(report, "lsd_db") == sorted(tuned, key=lambda clip: tuned[clip]["lsd_db"], reverse=True)
    failed = max(tuned, key=lambda clip: tuned[clip]["psnr_db"])
    rows = tuple(row | {"psnr_db": None} if row == tuned[failed] else row for row in report.per_clip)
    assert worst_first(report.model_copy(update={"per_clip": rows}), "psnr_db")[0] == failed
    clips = [f"<code>{clip}</code>" for clip in worst_first(report, "psnr_db")]
    html = render(report, page, tmp_path / "media")
    assert [html.index(clip) for clip in clips] == sorted(html.index(clip) for clip in clips)


def test_the_champions_videos_stand_beside_the_candidates(page: Page, make_report: Maker, tmp_path: Path) -> None:
    clip = page.shown[0].clip_id
    after = tmp_path / "champion/media" / clip / "after.mp4"
    after.parent.mkdir(parents=True)
    shutil.copy(tmp_path / "media" / clip / "before.mp4", after)
    beside = page.model_copy(update={"champion": tmp_path / "champion"})
    assert render(make_report(), beside, tmp_path / "media").count('data-title="Champion"') == 1
    assert 'data-title="Champion"' not in render(make_report(), page, tmp_path / "media")


@pytest.fixture
def tab(page: Page, make_report: Maker, tmp_path: Path) -> Iterator[Tab]:
    """The page in a browser that has no network."""
    if CHROMIUM is None:
        pytest.skip("no Chromium (Debian, Ubuntu: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    write_page(tmp_path, make_report(), page)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--mute-audio", "--autoplay-policy=no-user-gesture-required"],
        )
        context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
        tab = context.new_page()
        errors: list[Any] = []
        tab.on("pageerror", lambda error: errors.append(error))  # noqa: PLW0108 # Playwright wants a function of its own
        tab.goto((tmp_path / "report.html").as_uri())
        tab.wait_for_function("document.getElementById('time').value.startsWith('frame 1 of 22')")
        yield tab
        browser.close()
    assert not errors


def settled(tab: Tab, frame: int) -> list[float]:
    """Where the videos of the marked clip stand, once the player says that it shows `frame`."""
    tab.wait_for_function(f"document.getElementById('time').value === 'frame {frame} of 22'")
    return tab.evaluate(TIMES)


@pytest.mark.slow
def test_the_videos_of_a_clip_stay_in_step(tab: Tab) -> None:
    tab.locator("#seek").fill("12")
    times = settled(tab, 13)
    assert len(times) == 3
    assert times == pytest.approx([12.5 * FRAME_S] * 3, abs=1e-3)
    tab.keyboard.press("ArrowLeft")
    assert settled(tab, 12) == pytest.approx([11.5 * FRAME_S] * 3, abs=1e-3)
    tab.locator("#play").click()
    for _ in range(3):  # it goes on after the end, and catches up where one video is thrown off
        tab.wait_for_function(f"{TIMES}[0] > 0.3 && {TIMES}[0] < 0.6")
        tab.evaluate("document.querySelectorAll('.clip.current video')[1].currentTime = 0.9")
        tab.wait_for_function(
            f"(() => {{ const times = {TIMES}; return Math.max(...times) - Math.min(...times) < {FRAME_S}; }})()"
        )
        tab.wait_for_function(f"{TIMES}[0] < 0.2")
    tab.locator("#play").click()
    tab.wait_for_function("document.getElementById('play').textContent === 'Play'")
    assert tab.evaluate("[...document.querySelectorAll('video')].every(video => video.paused)")


@pytest.mark.slow
def test_playing_videos_drift_apart_by_less_than_a_frame(tab: Tab) -> None:
    tab.locator("#play").click()
    apart = tab.evaluate(
        """() => new Promise(done => {
          const seen = [];
          const look = () => {
            const videos = [...document.querySelectorAll('.clip.current video')];
            if (videos.every(video => !video.paused && !video.seeking)) {
              const times = videos.map(video => video.currentTime);
              seen.push(Math.max(...times) - Math.min(...times));
            }
            seen.length < 60 ? requestAnimationFrame(look) : done(seen);
          };
          look();
        })"""
    )
    assert np.quantile(apart, 0.9) < FRAME_S  # the rest may be the moment in which one was caught up with


@pytest.mark.slow
def test_the_keyboard_moves_every_part_of_the_player(tab: Tab) -> None:
    unmuted = "[...document.querySelectorAll('video')].map(video => !video.muted)"
    current = "[...document.querySelectorAll('.clip')].map(clip => clip.classList.contains('current'))"
    assert not any(tab.evaluate(unmuted))
    tab.keyboard.press("2")
    assert tab.evaluate(unmuted) == [False, True, False, False, False, False]
    tab.keyboard.press("ArrowDown")
    settled(tab, 1)
    assert tab.evaluate(current) == [False, True]
    assert tab.evaluate(unmuted) == [False, False, False, False, True, False]
    tab.keyboard.press("0")
    assert not any(tab.evaluate(unmuted))
    tab.keyboard.press("ArrowRight")
    settled(tab, 2)
    tab.keyboard.press("ArrowRight")
    settled(tab, 3)
    tab.keyboard.press("Home")
    settled(tab, 1)
    tab.keyboard.press(" ")
    tab.wait_for_function("document.querySelectorAll('.clip')[1].querySelector('video').currentTime > 0.2")
    tab.keyboard.press("ArrowUp")
    assert tab.evaluate(current) == [True, False]
    assert tab.evaluate("[...document.querySelectorAll('.clip')[1].querySelectorAll('video')].every(v => v.paused)")


@pytest.mark.slow
def test_the_table_of_clips_sorts_by_any_column(tab: Tab) -> None:
    column = "[...document.querySelectorAll('.sortable tbody tr')].map(row => +row.cells[3].dataset.value)"
    button = tab.locator(".sortable th button").nth(3)
    first = tab.evaluate(column)
    assert first == sorted(first)
    button.click()
    button.click()
    assert tab.evaluate(column) == sorted(first, reverse=True)
    assert tab.locator("th[aria-sort=descending]").count() == 1
    tab.locator(".sortable th button").nth(0).click()
    names = tab.evaluate("[...document.querySelectorAll('.sortable tbody tr')].map(row => row.cells[0].textContent)")
    assert names == sorted(names)
