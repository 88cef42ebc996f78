from __future__ import annotations

import math

import cv2
import numpy as np
import pytest

from data.features import Sound, look, loudness_db, measure, thumb


def grey(value: float, height: int = 32, width: int = 48) -> np.ndarray:
    return np.full((height, width, 3), round(value), np.uint8)


def test_a_ramp_of_brightness_has_the_motion_and_luma_it_was_made_with():
    track = measure((index / 24, grey(10 + 2 * index)) for index in range(48))
    found = look(track, 0.5, 22, 24)
    assert found.motion == pytest.approx(2 / 255)
    assert found.luma == pytest.approx((10 + 2 * np.arange(12, 34)).mean() / 255)
    assert found.sharpness == 0


@pytest.mark.parametrize("frame_rate", [12, 24, 48, 96])
def test_motion_is_that_of_the_retimed_clip_whatever_the_rate_of_the_source(frame_rate: int):
    track = measure((index / frame_rate, grey(10 + index * 48 / frame_rate)) for index in range(2 * frame_rate))
    assert look(track, 0.0, 25, 24).motion == pytest.approx(2 / 255, rel=1e-6)


def test_a_timestamp_rounded_to_milliseconds_still_counts_as_shown():
    track = measure((math.ceil(index * 1000 / 24) / 1000, grey(10 + 2 * index)) for index in range(30))
    assert look(track, 0.0, 22, 24).luma == pytest.approx((10 + 2 * np.arange(22)).mean() / 255)


def test_motion_of_a_still_is_zero_and_of_a_short_source_counts_the_frame_that_stays():
    track = measure([(0.0, grey(100))])
    assert look(track, 0.0, 22, 24) == (0.0, pytest.approx(100 / 255), 0.0)


def test_sharpness_is_the_variance_of_the_laplacian_of_luma_and_falls_with_blur():
    rng = np.random.default_rng(0)
    picture = np.repeat(rng.integers(0, 256, (32, 48, 1), np.uint8), 3, axis=2)
    luma = picture[..., 0].astype(float)
    padded = np.pad(luma, 1, mode="reflect")
    laplacian = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:] - 4 * luma
    sharp = measure([(0.0, picture)]).sharpness[0]
    assert sharp == pytest.approx(laplacian.var(), rel=1e-5)
    blurred = cv2.GaussianBlur(picture, (0, 0), 2).astype(np.uint8)
    assert measure([(0.0, blurred)]).sharpness[0] < 0.1 * sharp


def test_one_sharp_moment_makes_a_clip_sharp():
    rng = np.random.default_rng(0)
    sharp = np.repeat(rng.integers(0, 256, (32, 48, 1), np.uint8), 3, axis=2)
    frames = [sharp if index % 4 == 0 else grey(128) for index in range(24)]
    track = measure((index / 24, frame) for index, frame in enumerate(frames))
    assert look(track, 0.0, 22, 24).sharpness == pytest.approx(track.sharpness[0])


def test_frames_whose_time_does_not_rise_are_skipped():
    track = measure([(0.0, grey(1)), (0.1, grey(2)), (0.1, grey(3)), (0.05, grey(4)), (0.2, grey(5))])
    assert track.times_s.tolist() == [0.0, 0.1, 0.2]
    assert (track.luma * 255).round().tolist() == [1, 2, 5]


def test_no_frames_are_an_error():
    with pytest.raises(ValueError, match="no frames"):
        measure([])


def test_thumbs_keep_the_aspect_and_are_never_enlarged():
    assert thumb(np.zeros((96, 192), np.uint8)).shape == (32, 64)
    assert thumb(np.zeros((20, 30), np.uint8)).shape == (20, 30)


def test_loudness_of_a_full_sine_is_three_decibels_below_full_scale():
    time = np.arange(8000) / 8000
    sine = np.sin(2 * np.pi * 100 * time).astype(np.float32)
    sound = Sound(np.stack([sine, sine]), 8000, 0.0)
    assert loudness_db(sound, 0.0, 1.0) == pytest.approx(-3.0103, abs=1e-3)
    assert loudness_db(sound, 0.5, 1.5) == pytest.approx(-6.0206, abs=1e-3)
    one_side = Sound(np.stack([sine, 0 * sine]), 8000, 0.0)
    assert loudness_db(one_side, 0.0, 1.0) == pytest.approx(-6.0206, abs=1e-3)


def test_loudness_follows_where_the_sound_starts():
    sound = Sound(np.ones((1, 1000), np.float32), 1000, 0.5)
    assert loudness_db(sound, 0.0, 0.5) == -120
    assert loudness_db(sound, 0.0, 1.0) == pytest.approx(-3.0103, abs=1e-3)
    assert loudness_db(sound, 0.5, 1.5) == pytest.approx(0, abs=1e-6)
    early = Sound(np.ones((1, 1000), np.float32), 1000, -0.5)
    assert loudness_db(early, 0.0, 1.0) == pytest.approx(-3.0103, abs=1e-3)


def test_no_sound_is_silence():
    assert loudness_db(Sound(np.zeros((0, 0), np.float32), 0, 0.0), 0.0, 1.0) == -120
    assert loudness_db(Sound(np.zeros((2, 100), np.float32), 100, 0.0), 0.0, 1.0) == -120
