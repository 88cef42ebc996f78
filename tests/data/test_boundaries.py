from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from data import media
from data.boundaries import alike, find
from data.features import PictureSense, Track
from data.sensing import Sensing

FOOTAGE = Path("data/footage")
Pictures = NDArray[np.uint8]


def scene(seed: int, num_frames: int = 40) -> Pictures:
    """A patchwork of colours that the camera drifts over, (F, 72, 128, 3)."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (5, 8, 3), np.uint8)
    wide = cv2.resize(coarse, (192, 72), interpolation=cv2.INTER_CUBIC)
    return np.stack([wide[:, index // 2 : index // 2 + 128] for index in range(num_frames)]).astype(np.uint8)


def seen(frames: Sequence[Pictures] | Pictures, rate: float = 24) -> Track:
    sense = PictureSense(Sensing())
    for index, frame in enumerate(frames):
        sense.take(index / rate, frame)
    return sense.finish()


def mixed(left: Pictures, right: Pictures, length: int) -> Pictures:
    share = (np.arange(1, length + 1) / (length + 1))[:, None, None, None]
    middle = left[-length:] * (1 - share) + right[:length] * share
    return np.concatenate([left[:-length], middle.astype(np.uint8), right[length:]])


def test_a_cut_is_found_on_its_frame_and_is_called_one():
    (found,) = find(seen(np.concatenate([scene(1), scene(2)])))
    assert (found.start_s, found.end_s, found.reason) == (40 / 24, 40 / 24, "cut")
    assert 0.1 < found.score <= 1


@pytest.mark.parametrize("rate", [12, 24, 60])
def test_a_cut_is_found_at_any_rate(rate: int):
    frames = np.concatenate([scene(1, 2 * rate), scene(2, 2 * rate)])
    assert [item.end_s for item in find(seen(frames, rate))] == [2.0]


@pytest.mark.parametrize("length", [8, 16, 24])
def test_the_whole_of_a_dissolve_is_trimmed(length: int):
    (found,) = find(seen(mixed(scene(1, 60), scene(2, 60), length)))
    first, last = (60 - length) / 24, 60 / 24
    assert found.reason == "drop"
    assert first - 0.15 <= found.start_s <= first + 0.15
    assert last - 0.15 <= found.end_s <= last + 0.15


def test_a_fade_through_black_is_trimmed_with_the_black():
    fade = np.linspace(1, 0, 12)[:, None, None, None]
    left, right = scene(1, 48), scene(2, 48)
    frames = np.concatenate(
        [left[:-12], (left[-12:] * fade).astype(np.uint8), (right[:12] * fade[::-1]).astype(np.uint8), right[12:]]
    )
    (found,) = find(seen(frames))
    assert found.start_s == pytest.approx(36 / 24, abs=0.1)
    assert found.end_s == pytest.approx(60 / 24, abs=0.1)


def flash(frames: Pictures) -> Pictures:
    result = frames.copy()
    result[30:32] = (result[30:32] * 0.3 + 170).astype(np.uint8)
    return result


def white(frames: Pictures) -> Pictures:
    result = frames.copy()
    result[30:33] = 255
    return result


def flicker(frames: Pictures) -> Pictures:
    gains = np.random.default_rng(0).uniform(0.5, 1.0, len(frames))
    return (frames * gains[:, None, None, None]).astype(np.uint8)


def lamp(frames: Pictures) -> Pictures:
    result = frames.copy()
    result[30:] = (result[30:] * 0.45).astype(np.uint8)
    return result


def bump(frames: Pictures) -> Pictures:
    result = frames.copy()
    result[30:33] = np.roll(result[30:33], (14, 10), axis=(1, 2))
    return result


def passer(frames: Pictures) -> Pictures:
    result = frames.copy()
    for index in range(6):
        result[30 + index, :, max(0, 30 * index - 60) : max(0, 30 * index + 20)] = (20, 40, 30)
    return result


@pytest.mark.parametrize("disturb", [flash, white, flicker, lamp, bump, passer])
def test_what_disturbs_a_shot_does_not_cut_it(disturb):
    frames = disturb(scene(3, 72))
    assert find(seen(frames)) == []


@pytest.mark.parametrize("disturb", [flash, flicker, lamp])
def test_a_cut_beside_a_disturbance_is_still_found(disturb):
    frames = np.concatenate([disturb(scene(3, 72)), scene(4, 40)])
    assert [item.end_s for item in find(seen(frames))] == [3.0]


def test_a_thing_that_moves_over_a_flat_ground_cuts_nothing():
    frames = np.full((72, 64, 64, 3), (120, 84, 52), np.uint8)
    for index in range(72):
        x = 5 + abs(40 - index * 2 % 80)
        frames[index, 20:42, x : x + 20] = (40, 200, 220)
    assert find(seen(frames)) == []


def test_shots_that_come_back_are_told_apart():
    frames = np.concatenate([scene(1, 30), scene(2, 24), scene(1, 30)])
    assert [item.end_s for item in find(seen(frames))] == [30 / 24, 54 / 24]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_short_sources_have_no_boundaries(length: int):
    assert find(seen(scene(1, length))) == []


def test_an_end_in_black_is_trimmed():
    frames = np.concatenate([scene(1, 40), np.zeros_like(scene(1, 20))])
    (found,) = find(seen(frames))
    assert found.start_s == pytest.approx(40 / 24)
    assert found.end_s == pytest.approx(59 / 24)


@pytest.mark.parametrize(
    ("name", "expected_s"),
    [
        ("bbb_rabbit_wakes.mp4", [1.208]),
        ("bbb_pests_and_pursuit.mp4", [1.125, 2.625]),
        ("bbb_under_the_tree.mp4", [1.0, 3.542]),
    ],
)
def test_cuts_of_real_footage_are_those_a_person_sees(name: str, expected_s: list[float]):
    sense = PictureSense(Sensing())
    for seconds, picture in media.iter_frames(FOOTAGE / name, 144, 256):
        sense.take(seconds, picture)
    found = find(sense.finish())
    assert [item.end_s for item in found] == pytest.approx(expected_s, abs=0.001)
    assert {item.reason for item in found} == {"cut"}


def test_a_stricter_look_sees_no_less():
    track = seen(np.concatenate([scene(3, 40), np.roll(scene(3, 40), 25, axis=2)]))
    assert len(find(track, 0.2)) >= len(find(track))
    assert len(find(track, 1.0)) == 1


def test_pictures_are_alike_under_any_light_and_flat_ones_only_to_flat_ones():
    left = scene(5, 1)[0][::8, ::8]
    assert alike(left, (left * 0.4 + 30).astype(np.uint8)) > 0.99
    assert alike(left, scene(6, 1)[0][::8, ::8]) < 0.6
    assert alike(np.zeros_like(left), np.full_like(left, 200)) == 1
    assert alike(np.zeros_like(left), left) == 0
