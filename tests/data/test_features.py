from __future__ import annotations

import io

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from data.features import PictureSense, Track, black_bars, change, is_black, look
from data.sensing import Sensing

Picture = NDArray[np.uint8]


def grey(value: float, height: int = 72, width: int = 128) -> Picture:
    return np.full((height, width, 3), round(value), np.uint8)


def texture(seed: int = 0, height: int = 144, width: int = 256) -> Picture:
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC).astype(np.uint8)


def seen(frames: list[Picture], rate: float = 24) -> Track:
    sense = PictureSense(Sensing())
    for index, frame in enumerate(frames):
        sense.take(index / rate, frame)
    return sense.finish()


def panned(pixels_per_frame: int, count: int = 25) -> list[Picture]:
    wide = texture(width=256 + 8 * count)
    return [np.ascontiguousarray(wide[:, pixels_per_frame * i : pixels_per_frame * i + 256]) for i in range(count)]


@pytest.mark.parametrize(("speed", "rate"), [(1, 24), (2, 24), (4, 24), (2, 12), (2, 48)])
def test_a_pan_has_the_motion_it_was_made_with(speed: int, rate: int):
    found = look(seen(panned(speed), rate), 0.0, 25 / rate)
    wanted = speed * rate / np.hypot(144, 256)
    assert found.motion_p50 == pytest.approx(wanted, rel=0.1)
    assert found.motion_p90 >= found.motion_p50


def test_motion_does_not_depend_on_the_size_of_the_picture():
    small = [cv2.resize(frame, (128, 72), interpolation=cv2.INTER_AREA).astype(np.uint8) for frame in panned(4)]
    assert look(seen(small), 0.0, 1.0).motion_p50 == pytest.approx(look(seen(panned(4)), 0.0, 1.0).motion_p50, rel=0.15)


def test_a_still_has_no_motion_and_is_frozen_and_a_slow_pan_is_neither():
    still = look(seen([texture()] * 24), 0.0, 1.0)
    assert (still.motion_p50, still.motion_p90, still.freeze_share) == (0.0, 0.0, 1.0)
    moving = look(seen(panned(1)), 0.0, 1.0)
    assert moving.freeze_share == 0.0


def test_frames_shown_twice_are_half_repeats():
    frames = [frame for frame in panned(3, 12) for _ in range(2)]
    assert seen(frames).repeat[1:].mean() == pytest.approx(0.5, abs=0.05)


def test_luma_and_black_are_what_was_painted():
    track = seen([grey(0)] * 6 + [grey(100)] * 6)
    assert track.luma[-1] == pytest.approx(100 / 255, abs=1e-4)
    assert track.black.tolist() == [True] * 6 + [False] * 6
    assert look(track, 0.0, 0.5).black_share == pytest.approx(0.5)


@pytest.mark.parametrize(("level", "black"), [(20, True), (30, False)])
def test_black_has_a_level(level: int, black: bool):
    assert is_black(grey(level)[..., 0]) is black


def test_bars_are_measured_and_dark_skies_are_none():
    framed = texture()
    framed[:18] = framed[-18:] = 16
    assert black_bars(framed[..., 1]) == (18 / 144, 18 / 144, 0.0, 0.0)
    assert look(seen([framed] * 4), 0.0, 4 / 24).letterbox_share == pytest.approx(0.25)
    night = texture()
    night[:72] = 0
    assert look(seen([night] * 4), 0.0, 4 / 24).letterbox_share == 0.0


def test_sharpness_is_the_variance_of_the_laplacian_of_luma_and_falls_with_blur():
    picture = np.repeat(np.random.default_rng(0).integers(0, 256, (72, 128, 1), np.uint8), 3, axis=2)
    luma = picture[..., 0].astype(float)
    padded = np.pad(luma, 1, mode="reflect")
    laplacian = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:] - 4 * luma
    assert seen([picture]).sharpness[0] == pytest.approx(laplacian.var(), rel=1e-4)
    blurred = cv2.GaussianBlur(picture, (0, 0), 2).astype(np.uint8)
    assert seen([blurred]).sharpness[0] < 0.1 * laplacian.var()


def test_blur_that_goes_with_motion_is_told_from_blur_that_does_not():
    fast = [cv2.blur(frame, (25, 1)).astype(np.uint8) for frame in panned(8)]
    sharp = panned(1)
    soft = [cv2.GaussianBlur(frame, (0, 0), 3).astype(np.uint8) for frame in panned(1)]
    moved, defocused = look(seen(sharp + fast), 1.1, 2.0), look(seen(sharp + soft), 1.1, 2.0)
    assert moved.motion_blur_index > 0.4
    assert defocused.motion_blur_index < 0.5 * moved.motion_blur_index
    assert look(seen(sharp), 0.0, 1.0).motion_blur_index < 0.1


def test_change_is_that_of_a_closed_form_and_hue_is_a_circle():
    def hsv(hue: int, saturation: int, value: int) -> Picture:
        return np.full((8, 8, 3), (hue, saturation, value), np.uint8)

    assert change(hsv(0, 255, 200), hsv(90, 255, 200)) == pytest.approx(1 / 3, abs=0.002)
    assert change(hsv(178, 255, 200), hsv(2, 255, 200)) == pytest.approx(4 / 90 / 3, abs=0.002)
    assert change(hsv(0, 0, 50), hsv(90, 0, 101)) == pytest.approx(51 / 255 / 3, abs=0.002)  # grey has no hue


def test_frames_whose_time_does_not_rise_are_never_shown():
    sense = PictureSense(Sensing())
    for seconds in (0.0, 0.1, 0.1, 0.05, 0.2):
        sense.take(seconds, grey(50 + 100 * seconds))
    assert sense.finish().times_s.tolist() == [0.0, 0.1, 0.2]


def test_no_frames_are_an_error():
    with pytest.raises(ValueError, match="no frames"):
        PictureSense(Sensing()).finish()


def test_vectors_are_taken_twice_a_second_and_around_a_cut():
    quiet = seen(panned(0, 72))
    assert quiet.times_s[quiet.sample_frames] == pytest.approx([0, 0.5, 1, 1.5, 2, 2.5, 71 / 24], abs=0.03)
    track = seen([texture(1)] * 36 + [texture(2)] * 36)
    times = track.times_s[track.sample_frames]
    for aside in (-0.9, -0.5, -0.25, -0.05, 0.05, 0.25, 0.5, 0.9):
        assert np.abs(times - (1.5 + aside)).min() <= 0.1 + 1e-6
    assert np.linalg.norm(track.sample_vectors.astype(float), axis=1) == pytest.approx(1, abs=0.01)


def test_flicker_takes_a_bounded_number_of_vectors():
    frames = [texture(index % 2) for index in range(96)]
    assert len(seen(frames).sample_frames) <= 4 / 0.1 + 2


def test_thumbnails_are_small_pictures_a_second_apart_and_always_the_same_bytes():
    track = seen(panned(1, 20) * 4)
    assert track.times_s[track.thumb_frames[0]] == 0
    assert len(track.thumb_frames) >= 3
    picture = cv2.imdecode(np.frombuffer(track.thumbnail(1.0), np.uint8), cv2.IMREAD_COLOR)
    assert picture.shape == (90, 160, 3)
    again = seen(panned(1, 20) * 4)
    assert track.thumb_bytes.tobytes() == again.thumb_bytes.tobytes()


def test_a_track_survives_storage_without_pickles():
    track = seen(panned(2, 30))
    stream = io.BytesIO()
    np.savez(stream, **track.to_arrays())
    stream.seek(0)
    with np.load(stream, allow_pickle=False) as stored:
        back = Track.from_arrays(dict(stored))
    assert back.encoder == track.encoder == "histogram"
    for name, array in track.to_arrays().items():
        np.testing.assert_array_equal(back.to_arrays()[name], array)


@pytest.mark.parametrize("size", [(1, 1), (2, 300), (16, 16), (144, 256), (256, 20)])
def test_pictures_of_any_size_are_measured(size: tuple[int, int]):
    rng = np.random.default_rng(0)
    track = seen([rng.integers(0, 256, (*size, 3), np.uint8) for _ in range(8)])
    assert np.isfinite(track.sharpness).all()
    assert np.isfinite(look(track, 0.0, 8 / 24)).all()


def test_a_picture_that_changes_its_size_goes_on_at_the_first_one():
    track = seen([texture(), cv2.resize(texture(), (128, 72)).astype(np.uint8), texture()])
    assert len(track.times_s) == 3


def test_a_span_takes_the_frame_on_screen_at_its_start():
    track = seen([grey(10 * index) for index in range(24)])
    assert look(track, 0.49, 0.51).luma == pytest.approx((110 + 120) / 2 / 255, abs=1e-3)
    assert look(track, 0.99, 5.0).luma == pytest.approx(230 / 255, abs=1e-3)
