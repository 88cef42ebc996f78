"""Which size a clip is encoded at."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from data.canvases import HALF_FRAME_S, Fit, fits
from data.records import Canvas, Clip, ClipShape, Reject

MakeClip = Callable[..., Clip]
WIDE = Canvas(area_px=1280 * 720, aspects=("16:9", "1:1", "9:16"), durations_s=(1.0, 5.0))


def grid(duration_s: float, height: float, width: float) -> ClipShape:
    """A family of whole frames at 24 a second, and sides that are multiples of 16."""
    return ClipShape(
        num_frames=round(duration_s * 24), frame_rate=24, height=16 * round(height / 16), width=16 * round(width / 16)
    )


def fit(clip: Clip, **canvases: Canvas) -> list[Fit]:
    found = fits(clip, canvases, grid)
    assert not isinstance(found, Reject), found
    return found


@pytest.mark.parametrize(
    ("size", "expected"),
    [((1920, 1080), (1280, 720)), ((480, 854), (720, 1280)), ((600, 500), (960, 960)), ((0, 0), (960, 960))],
)
def test_the_nearest_aspect_is_taken_at_the_same_area(
    make_clip: MakeClip, size: tuple[int, int], expected: tuple[int, int]
) -> None:
    (found,) = fit(make_clip("a", end_s=7.0, width=size[0], height=size[1]), wide=WIDE)
    assert (found.shape.width, found.shape.height) == expected


def test_the_longest_duration_that_the_clip_fills_is_taken(make_clip: MakeClip) -> None:
    lengths = [fit(make_clip("a", end_s=end_s), wide=WIDE)[0].shape.num_frames for end_s in (1.0, 4.9, 4.98, 60.0)]
    assert lengths == [24, 24, 120, 120]  # half a frame is forgiven


def test_a_clip_is_encoded_at_every_canvas_that_takes_it(make_clip: MakeClip) -> None:
    small = Canvas(area_px=4096, durations_s=(1.0,))
    sharp = Canvas(area_px=4096, durations_s=(1.0,), max_upscale=1.0)
    found = fit(make_clip("a", end_s=2.0, width=60, height=60), wide=WIDE, small=small, sharp=sharp)
    assert [item.canvas for item in found] == ["wide", "small"]


def test_a_clip_that_no_canvas_takes_is_a_reject_with_numbers(make_clip: MakeClip) -> None:
    found = fits(make_clip("a", end_s=0.5), {"wide": WIDE}, grid)
    assert isinstance(found, Reject)
    assert (found.rule, found.measured, found.limit) == ("encode.canvases.durations_s", "0.500 s", "at least 1 s")
    sharp = Canvas(area_px=4096, durations_s=(1.0,), max_upscale=1.5)
    found = fits(make_clip("a", end_s=2.0, width=32, height=32), {"sharp": sharp}, grid)
    assert isinstance(found, Reject)
    assert (found.rule, found.measured) == ("encode.canvases.max_upscale", "32x32 px, 2.000 s")


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("changes", "rule", "measured"),
    [
        ({"end_s": INF}, "encode.span", "0 to inf s"),
        ({"start_s": -INF}, "encode.span", "-inf to 2 s"),
        ({"start_s": -0.5}, "encode.span", "-0.5 to 2 s"),
        ({"start_s": NAN}, "encode.span", "nan to 2 s"),
        ({"end_s": NAN}, "encode.span", "0 to nan s"),
        ({"start_s": 2.0}, "encode.span", "2 to 2 s"),
        ({"width": 10**12}, "encode.size", "1000000000000x64 px"),
        ({"height": -1}, "encode.size", "64x-1 px"),
    ],
)
def test_a_row_that_cannot_be_true_is_a_reject(
    make_clip: MakeClip, changes: dict[str, Any], rule: str, measured: str
) -> None:
    clip = make_clip("a", **{"end_s": 2.0, "width": 64, "height": 64, **changes})
    found = fits(clip, {"small": Canvas(area_px=4096, durations_s=(1.0,))}, grid)
    assert isinstance(found, Reject)
    assert (found.item, found.rule, found.measured) == (clip.clip_id, rule, measured)


@given(st.integers(16, 4000), st.integers(16, 4000), st.floats(1.0, 30.0))
def test_no_aspect_on_offer_is_nearer_and_no_frame_is_invented(width: int, height: int, end_s: float) -> None:
    clip = Clip.model_construct(clip_id="a", path="p", start_s=0.0, end_s=end_s, width=width, height=height)
    (found,) = fit(clip, wide=WIDE)
    ratios = {1280 / 720, 720 / 1280, 1.0}
    taken = min(ratios, key=lambda ratio: abs(ratio - found.shape.width / found.shape.height))
    assert all(abs(log(taken * height / width)) <= abs(log(ratio * height / width)) + 1e-9 for ratio in ratios)
    assert found.shape.num_frames / 24 <= end_s + HALF_FRAME_S


@pytest.mark.parametrize(
    "wrong",
    [{"aspects": ("16/9",)}, {"aspects": ("0:1",)}, {"aspects": ()}, {"durations_s": ()}, {"durations_s": (0.0,)}],
)
def test_canvases_that_nothing_fills_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Canvas.model_validate({"area_px": 100, "durations_s": (1.0,), **wrong})
