"""Every frame once at the film's own rate, what is on screen at another; planes as they lie."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from data.media import Unreadable, write_media
from data.media_timeline import Coding, iter_shown, stated_rate


def greys(path: Path, count: int, **options: object) -> Path:
    """A film whose frame i is the grey 8·i."""
    frames = [np.full((32, 48, 3), 8 * index, np.uint8) for index in range(count)]
    write_media(path, frames, None, **({"frame_rate": 24, "sample_rate_hz": 48000, "crf": 1} | options))  # pyright: ignore[reportArgumentType]
    return path


def seen(path: Path, rate: Fraction) -> list[int]:
    """Which frame is on screen at each instant."""
    return [round(float(shown.rgb.mean()) / 8) for shown in iter_shown(path, rate)]


@pytest.mark.parametrize("container", ["mp4", "matroska"])
@pytest.mark.parametrize("rate", [Fraction(24), Fraction(24000, 1001), Fraction(30000, 1001), Fraction(60)])
def test_every_frame_is_shown_once_at_the_films_own_rate(tmp_path: Path, container: str, rate: Fraction) -> None:
    path = greys(tmp_path / "film", 30, frame_rate=rate, container=container)
    assert stated_rate(path) == rate
    assert seen(path, rate) == list(range(30))


def test_at_another_rate_it_is_what_is_on_screen(tmp_path: Path) -> None:
    path = greys(tmp_path / "film.mp4", 12)
    assert seen(path, Fraction(48)) == [index // 2 for index in range(24)]
    assert seen(path, Fraction(12)) == list(range(0, 12, 2))


def test_uneven_timestamps_decide_what_is_on_screen(tmp_path: Path) -> None:
    times = [Fraction(tick, 24) for tick in (0, 1, 4, 5)]
    path = greys(tmp_path / "film.mp4", 4, frame_times=times)
    assert seen(path, Fraction(24))[:6] == [0, 1, 1, 1, 2, 3]


def test_planes_are_as_stored_where_they_are_what_is_shown(tmp_path: Path) -> None:
    shown = next(iter_shown(greys(tmp_path / "film.mp4", 2), Fraction(24)))
    assert shown.coding == Coding("yuv420p", 1, is_full_range=False)
    assert [plane.shape for plane in shown.planes] == [(32, 48), (16, 24), (16, 24)]
    assert [int(plane[0, 0]) for plane in shown.planes] == [16, 128, 128]
    assert shown.size == (32, 48)
    turned = next(iter_shown(greys(tmp_path / "turned.mp4", 2, rotation_deg=90), Fraction(24)))
    assert turned.coding is None
    assert turned.size == turned.rgb.shape[:2] == (48, 32)


def test_what_does_not_decode_is_refused(tmp_path: Path) -> None:
    (tmp_path / "film.mp4").write_text("no film")
    with pytest.raises(Unreadable, match="text/plain"):
        stated_rate(tmp_path / "film.mp4")
    with pytest.raises(Unreadable, match="no such file"):
        next(iter_shown(tmp_path / "none.mp4", Fraction(24)))
