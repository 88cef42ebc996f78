from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.boundaries import Boundary
from data.shots import Shot, shots, windows

CLIP_S = Fraction(22, 24)
CUT = Boundary(3.0, 3.0, "cut", 0.4)


def test_shots_lie_between_transitions_and_short_ones_are_left_out():
    assert shots([], 10.0, 0.25) == [Shot(0.0, 10.0, None, None)]
    fade, cut = Boundary(2.0, 2.6, "drop", 0.5), Boundary(2.8, 2.8, "cut", 0.4)
    assert shots([fade, cut], 10.0, 0.25) == [Shot(0.0, 2.0, None, fade), Shot(2.8, 10.0, cut, None)]


def test_a_source_of_exactly_one_clip_gives_it():
    whole = Shot(0.0, 22 / 24, None, None)
    (window,) = windows(whole, CLIP_S, 0.05)
    assert window == (0.0, 0.916667, "start", 0.0)
    assert windows(whole._replace(end_s=21 / 24), CLIP_S, 0.05) == []
    assert windows(whole._replace(closes=CUT), CLIP_S, 0.05) == []


@pytest.mark.parametrize("reason", ["cut", "drop"])
def test_windows_say_why_they_start_where_they_do_and_how_sure_that_is(reason: str):
    opening = windows(Shot(0.0, 3.0, None, CUT), CLIP_S, 0.05)
    after = windows(Shot(3.0, 6.0, CUT._replace(reason=reason), None), CLIP_S, 0.05)
    assert [(window.reason, window.score) for window in opening] == [("start", 0.0), ("stride", 0.0), ("stride", 0.0)]
    assert [(window.reason, window.score) for window in after] == [(reason, 0.4), ("stride", 0.0), ("stride", 0.0)]
    assert after[0].start_s == 3.05


spans = st.tuples(st.floats(0, 1000), st.floats(0.001, 60), st.booleans(), st.booleans())


@given(spans, st.integers(1, 200), st.sampled_from([8, 24, 25, 30]), st.floats(0, 0.5))
def test_windows_are_whole_apart_and_inside_the_shot(
    span: tuple[float, float, bool, bool], num_frames: int, frame_rate: int, margin_s: float
):
    start_s, length_s, opens, closes = span
    duration = Fraction(num_frames, frame_rate)
    shot = Shot(start_s, start_s + length_s, CUT if opens else None, CUT if closes else None)
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
