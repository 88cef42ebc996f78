from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from data import media
from data.features import Track, measure
from data.shots import Shot, change, find_cuts, shots, windows

FOOTAGE = Path(__file__).parents[2] / "data/footage"
CLIP_S = Fraction(22, 24)


def scene(seed: int, num_frames: int = 24, speed: int = 1) -> NDArray[np.uint8]:
    """A smooth colour texture that drifts by `speed` px a frame, (F, H, W, 3)."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    wide = cv2.resize(coarse, (256, 48), interpolation=cv2.INTER_CUBIC)
    return np.stack([np.roll(wide, speed * index, axis=1)[:, :64] for index in range(num_frames)]).astype(np.uint8)


def tracked(frames: NDArray[np.uint8], frame_rate: float = 24) -> Track:
    return measure((index / frame_rate, frame) for index, frame in enumerate(frames))


def cuts_of(frames: NDArray[np.uint8]) -> list[int]:
    track = tracked(frames)
    return find_cuts(track.changes, track.times_s, track.thumbs_FHW)


def hsv(red: int, green: int, blue: int) -> NDArray[np.uint8]:
    return cv2.cvtColor(np.full((4, 4, 3), (red, green, blue), np.uint8), cv2.COLOR_RGB2HSV).astype(np.uint8)


def test_change_is_a_third_for_each_of_hue_saturation_and_value():
    assert change(hsv(9, 9, 9), hsv(9, 9, 9)) == 0
    assert change(hsv(0, 0, 0), hsv(255, 255, 255)) == pytest.approx(1 / 3)
    assert change(hsv(255, 255, 255), hsv(255, 0, 0)) == pytest.approx(1 / 3)
    assert change(hsv(255, 0, 0), hsv(0, 255, 255)) == pytest.approx(1 / 3)


def test_hue_is_a_circle_and_grey_has_none():
    assert change(hsv(255, 0, 8), hsv(255, 8, 0)) < 0.02
    assert change(hsv(128, 127, 127), hsv(127, 127, 128)) < 0.02


def test_cuts_are_found_at_the_first_frame_of_each_shot():
    assert cuts_of(np.concatenate([scene(1, 30), scene(2, 17), scene(3, 40)])) == [30, 47]


def test_motion_alone_is_no_cut():
    assert cuts_of(scene(1, 48, speed=6)) == []


def test_a_flash_is_no_cut_but_a_cut_beside_it_is():
    flashed = scene(1, 48)
    flashed[[20, 21, 44]] = 255
    assert cuts_of(flashed) == []
    assert cuts_of(np.concatenate([flashed, scene(2, 24)])) == [48]


def test_an_empty_neighbourhood_asks_only_for_the_change_itself():
    assert cuts_of(np.stack([scene(1, 1)[0], scene(2, 1)[0]])) == [1]
    assert cuts_of(scene(1, 1)) == []


@pytest.mark.parametrize(
    ("name", "expected_s"),
    [
        ("bbb_rabbit_wakes.mp4", [1.208]),
        ("bbb_pests_and_pursuit.mp4", [1.125, 2.625]),
        ("bbb_under_the_tree.mp4", [1.0, 3.542]),
    ],
)
def test_cuts_of_real_footage_are_those_a_person_sees(name: str, expected_s: list[float]):
    track = measure(media.iter_frames(FOOTAGE / name, 96, 96))
    found = find_cuts(track.changes, track.times_s, track.thumbs_FHW)
    assert track.times_s[found] == pytest.approx(expected_s, abs=0.001)


def test_shots_cover_the_source_and_short_ones_are_left_out():
    times = np.arange(100) / 10
    assert shots([], times, 10.0, 0.25) == [Shot(0.0, 10.0, opens_with_cut=False, closes_with_cut=False)]
    assert shots([20, 22, 50], times, 10.0, 0.25) == [
        Shot(0.0, 2.0, opens_with_cut=False, closes_with_cut=True),
        Shot(2.2, 5.0, opens_with_cut=True, closes_with_cut=True),
        Shot(5.0, 10.0, opens_with_cut=True, closes_with_cut=False),
    ]


def test_a_source_of_exactly_one_clip_gives_it():
    whole = Shot(0.0, 22 / 24, opens_with_cut=False, closes_with_cut=False)
    (window,) = windows(whole, CLIP_S, 0.05)
    assert window == (0.0, 0.916667, "start")
    assert windows(whole._replace(end_s=21 / 24), CLIP_S, 0.05) == []
    assert windows(whole._replace(closes_with_cut=True), CLIP_S, 0.05) == []


def test_windows_say_why_they_start_where_they_do():
    opening = windows(Shot(0.0, 3.0, opens_with_cut=False, closes_with_cut=True), CLIP_S, 0.05)
    after_cut = windows(Shot(3.0, 6.0, opens_with_cut=True, closes_with_cut=False), CLIP_S, 0.05)
    assert [window.reason for window in opening] == ["start", "stride", "stride"]
    assert [window.reason for window in after_cut] == ["cut", "stride", "stride"]
    assert after_cut[0].start_s == 3.05


spans = st.tuples(st.floats(0, 1000), st.floats(0.001, 60), st.booleans(), st.booleans())


@given(spans, st.integers(1, 200), st.sampled_from([8, 24, 25, 30]), st.floats(0, 0.5))
def test_windows_are_whole_apart_and_inside_the_shot(
    span: tuple[float, float, bool, bool], num_frames: int, frame_rate: int, margin_s: float
):
    start_s, length_s, opens, closes = span
    shot, duration = Shot(start_s, start_s + length_s, opens, closes), Fraction(num_frames, frame_rate)
    found = windows(shot, duration, margin_s)
    for window in found:
        assert window.start_s * 1e6 == pytest.approx(round(window.start_s * 1e6), abs=1e-3)
        assert window.end_s - window.start_s == pytest.approx(float(duration), abs=1.01e-6)
        assert window.start_s >= shot.start_s + margin_s * opens - 1.1e-6
        assert window.end_s <= shot.end_s - margin_s * closes + 2.1e-6
    for left, right in itertools.pairwise(found):
        assert left.end_s == right.start_s
    room = length_s - margin_s * (opens + closes) - len(found) * float(duration)
    assert room < float(duration) + 2e-6
