"""The drawing of a curriculum shows what the checkpoints say, in place and to scale."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from data.sampler import opened
from data.stage import Stage
from tasks import curriculum_picture
from tasks.curriculum_picture import LEFT, RIGHT, WIDTH, draw, parts_of

SPAN = WIDTH - LEFT - RIGHT
EASY: dict[str, Any] = {
    "conditions": {"t2va": 1.0},
    "difficulty": (0.0, 0.5),
    "num_steps": 40,
    "learning_rate": 1e-3,
    "method": "lora",
}
ALL: dict[str, Any] = {
    "conditions": {"t2va": 0.5, "fl2va": 0.5}, "num_steps": 100, "learning_rate": 2e-3, "start_from": "easy",
    "replay_share": 0.25, "replay_groups": ("base",), "pacing": "competence",
}  # fmt: skip


def write(folder: Path, name: str, settings: dict[str, Any] | None, rows: list[dict[str, Any]], **facts: Any) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if settings is not None:
        record = {"settings": Stage.model_validate(settings).model_dump(mode="json"), **facts}
        (folder / name / "checkpoint.json").write_text(json.dumps(record))


def rows_of(num: int, rate: float, *modes: str) -> list[dict[str, Any]]:
    return [
        {"step": n, "loss_video": 2.0 / (n + 1), "loss_audio": 0.0 if n % 5 == 1 else 1.0, "learning_rate": rate, "condition": modes[n % len(modes)]}
        for n in range(num)
    ]  # fmt: skip


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A stage that ended early, after one that went to its end; in the alphabet they stand the other way round."""
    write(tmp_path, "all", ALL, rows_of(60, 2e-3, "t2va", "fl2va", "t2va", "t2va"), ended="plateau at step 59: <loss>")
    write(tmp_path, "easy", EASY, rows_of(40, 1e-3, "t2va"))
    return tmp_path


def lanes(drawing: str) -> dict[str, ET.Element]:
    return {group.attrib["data-lane"]: group for group in ET.fromstring(drawing).iter("g")}


def boxes(group: ET.Element, kind: str) -> list[tuple[float, float, float, float]]:
    """x, y, width, height of rectangles of a class."""
    found = [item for item in group.iter("rect") if kind in item.attrib["class"].split()]
    return [tuple(float(item.attrib[name]) for name in ("x", "y", "width", "height")) for item in found]  # type: ignore[misc]


def points(group: ET.Element, kind: str) -> list[list[tuple[float, float]]]:
    lines = [item for item in group.iter("polyline") if kind in item.attrib["class"].split()]
    return [[tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()] for line in lines]  # type: ignore[misc]


def test_stages_stand_side_by_side_in_order_with_the_reason_they_ended(checkpoints: Path) -> None:
    easy, everything = parts_of(checkpoints)
    assert (easy.curve.stage, easy.first, easy.num_steps, easy.reason) == ("easy", 0, 40, "all 40 steps")
    assert (everything.first, everything.num_steps) == (40, 60)
    assert everything.reason == "plateau at step 59: <loss>"
    drawing = draw(checkpoints)
    drawn = ET.fromstring(drawing)  # well formed, whatever names and reasons hold
    words = ["".join(item.itertext()) for item in drawn.iter("text")]
    assert any(word.startswith("easy, lora") for word in words)
    assert any(word.endswith("plateau at step 59: <loss>") for word in words)
    starts = [float(item.attrib["x1"]) for item in drawn.iter("line") if item.attrib["class"] == "border"]
    assert starts == pytest.approx([LEFT, LEFT + 0.4 * SPAN], abs=0.06)
    assert list(lanes(drawing)) == ["loss", "learning rate", "difficulty", "modes", "replay"]


def test_a_stage_cut_short_without_a_reason_says_how_far_it_came(tmp_path: Path) -> None:
    write(tmp_path, "all", {**ALL, "start_from": None}, rows_of(60, 1e-3, "t2va"))
    assert parts_of(tmp_path)[0].reason == "60 of 100 steps"


def test_windows_and_replay_are_to_scale_and_open_with_competence(checkpoints: Path) -> None:
    found = lanes(draw(checkpoints))
    windows = boxes(found["difficulty"], "window")
    x, _, width, height = windows[0]
    assert (x, width) == pytest.approx((LEFT, 0.4 * SPAN), abs=0.06)
    assert height == pytest.approx(0.5 * curriculum_picture.LANES["difficulty"], abs=0.1)
    later = windows[1:]
    limits = [limit for step, limit in opened(Stage.model_validate(ALL)) if step < 60]
    tall = curriculum_picture.LANES["difficulty"]
    assert [box[3] / tall for box in later] == pytest.approx(limits, abs=0.01)
    assert limits[0] < limits[-1] < 1  # the stage ended before its window was open
    assert later[0][0] == pytest.approx(LEFT + 0.4 * SPAN, abs=0.06)
    assert later[-1][0] + later[-1][2] == pytest.approx(LEFT + SPAN, abs=0.2)
    ((x, _, width, height),) = boxes(found["replay"], "replay")
    assert (x, width) == pytest.approx((LEFT + 0.4 * SPAN, 0.6 * SPAN), abs=0.1)
    assert height == pytest.approx(curriculum_picture.LANES["replay"], abs=0.1)  # 25 % is the axis' end


def test_modes_fill_the_lane_in_the_shares_that_were_drawn(checkpoints: Path) -> None:
    group = lanes(draw(checkpoints))["modes"]
    tall = curriculum_picture.LANES["modes"]
    area = {
        mode: sum(width * height for _, _, width, height in boxes(group, kind)) / (SPAN * tall)
        for mode, kind in (("fl2va", "mode0"), ("t2va", "mode1"))
    }
    assert area == pytest.approx({"fl2va": 15 / 100, "t2va": 85 / 100}, abs=0.005)
    assert "■ fl2va" in "".join(group.itertext())


def test_losses_fall_from_left_to_right_and_steps_without_sound_are_left_out(checkpoints: Path) -> None:
    group = lanes(draw(checkpoints))["loss"]
    video, audio = points(group, "loss_video"), points(group, "loss_audio")
    assert len(video) == len(audio) == 2
    assert video[0][0][1] < video[0][-1][1]  # down the drawing
    assert video[0][-1][0] < video[1][0][0]
    assert {y for line in audio for _, y in line} == {audio[0][0][1]}  # 1.0 throughout: no zero came in
    rates = points(lanes(draw(checkpoints))["learning rate"], "rate")
    height = curriculum_picture.LANES["learning rate"]
    assert rates[0][0][1] - rates[1][0][1] == pytest.approx(height / 2, abs=0.1)


def test_curves_alone_are_drawn_and_nothing_is_where_nothing_was_logged(tmp_path: Path) -> None:
    assert draw(tmp_path) == ""
    write(tmp_path, "old", None, [{"step": n, "loss_video": 1.0} for n in range(10)])
    assert list(lanes(draw(tmp_path))) == ["loss"]
    (tmp_path / "old" / "checkpoint.json").write_text(json.dumps({"settings": {"of": "another version"}}))
    assert list(lanes(draw(tmp_path))) == ["loss"]
    assert draw(tmp_path) == draw(tmp_path)
