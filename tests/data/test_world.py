"""The sample world: what is heard is caused by what is seen, in rendered scenes alone."""

from __future__ import annotations

import re

import numpy as np
import pytest
from numpy.typing import NDArray

from data.world import STYLES, Half, Kind, Scene, scene

FRAME_RATE, RATE_HZ, SIZE_PX = 240, 8000, 48
Floats = NDArray[np.float64]


def seen(half: Half, seed: int, kind: Kind) -> Scene:
    """A second, filmed fast enough to time a contact."""
    return scene(half, seed, 1.0, FRAME_RATE, SIZE_PX, RATE_HZ, kind)


def track(item: Scene, colour: tuple[int, int, int]) -> Floats:
    """Centre (x, y) of what has a colour, in shares of the side, by frame: (F, 2)."""
    near = np.abs(item.frames_FHWC.astype(float) - colour).sum(-1) < 30
    y, x = np.mgrid[0:SIZE_PX, 0:SIZE_PX] + 0.5
    area = near.sum((1, 2))
    return np.stack([(near * axis).sum((1, 2)) / area / SIZE_PX for axis in (x, y)], axis=1)


def meeting_s(place: Floats, near_s: float) -> float | None:
    """When a coordinate turned round near a time: where the straight lines before and after meet; None if it did not."""
    time = np.arange(place.size) / FRAME_RATE
    before = (time > near_s - 0.1) & (time < near_s - 0.01)
    after = (time > near_s + 0.01) & (time < near_s + 0.1)
    (came, start), (left, end) = (np.polyfit(time[part], place[part], 1) for part in (before, after))
    return float((end - start) / (came - left)) if came * left < -0.01 else None


def first_sound_s(item: Scene, rate_hz: int = RATE_HZ) -> float:
    """When the waveform stops being exactly silent, s."""
    return int(np.flatnonzero(np.abs(item.waveform_CT).sum(0))[0]) / rate_hz


def heard_at(item: Scene, start_s: float, duration_s: float = 0.03) -> float:
    """Place between left (0) and right (1) by the energies of the sides, under the documented constant-power law."""
    start = round(start_s * RATE_HZ)
    energy = np.square(item.waveform_CT[:, start : start + round(duration_s * RATE_HZ)].astype(float)).sum(1)
    return float((np.arctan2(*np.sqrt(energy[::-1])) * 2 / np.pi - 0.1) / 0.8)


def colours_of(item: Scene, half: Half) -> list[tuple[int, int, int]]:
    return [STYLES[half].colours[word] for word in item.caption.split() if word in STYLES[half].colours]


@pytest.mark.parametrize("half", ["base", "new"])
@pytest.mark.parametrize("seed", [0, 1, 4])
def test_a_bounce_sounds_when_and_where_the_body_turns_round(half: Half, seed: int) -> None:
    item = seen(half, seed, "bounce")
    path = track(item, colours_of(item, half)[0])
    heard_s = first_sound_s(item)
    turned = [time for axis in (0, 1) if (time := meeting_s(path[:, axis], heard_s)) is not None]
    assert len(turned) == 1
    assert abs(turned[0] - heard_s) < 1.5 / FRAME_RATE
    assert abs(path[round(heard_s * FRAME_RATE), 0] - heard_at(item, heard_s)) < 0.02


@pytest.mark.parametrize("half", ["base", "new"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_collision_sounds_when_and_between_where_two_bodies_part(half: Half, seed: int) -> None:
    item = seen(half, seed, "collide")
    left, right = (track(item, colour)[:, 0] for colour in colours_of(item, half))
    heard_s = first_sound_s(item)
    parted_s = meeting_s(right - left, heard_s)
    assert parted_s is not None
    assert abs(parted_s - heard_s) < 1.5 / FRAME_RATE
    assert abs((left + right)[round(heard_s * FRAME_RATE)] / 2 - heard_at(item, heard_s)) < 0.02


@pytest.mark.parametrize("seed", [0, 1])
def test_a_mouth_is_open_while_it_is_heard(seed: int) -> None:
    item = scene("new", seed, 2.0, 50, 96, RATE_HZ, "speak")
    dark = (item.frames_FHWC.max(-1) < 40).sum((1, 2))  # eyes and mouth
    sound = item.waveform_CT[0].reshape(len(dark), -1)  # 20 ms a frame
    loud = np.sqrt(np.square(sound.astype(float)).mean(1))
    assert np.corrcoef(dark[:-1], loud[:-1])[0, 1] > 0.9
    assert dark[loud > 0.5 * loud.max()].min() > dark[loud == 0].max()


def test_half_and_seed_decide_everything() -> None:
    asked: tuple[tuple[Half, int], ...] = (("base", 7), ("base", 7), ("base", 8), ("new", 7))
    one, again, other, twin = (scene(half, seed, 0.5, 24, 24, RATE_HZ) for half, seed in asked)
    assert one.caption == again.caption
    assert np.array_equal(one.frames_FHWC, again.frames_FHWC)
    assert np.array_equal(one.waveform_CT, again.waveform_CT)
    assert not np.array_equal(one.frames_FHWC, other.frames_FHWC)
    assert not np.array_equal(one.frames_FHWC, twin.frames_FHWC)


def test_rates_only_sample_the_same_scene() -> None:
    slow, fast = (scene("new", 3, 1.0, rate, 24, rate * 400, "bounce") for rate in (20, 40))
    assert slow.caption == fast.caption
    assert np.array_equal(slow.frames_FHWC, fast.frames_FHWC[::2])
    assert slow.waveform_CT.shape == (2, 8000)
    assert abs(first_sound_s(slow, 8000) - first_sound_s(fast, 16000)) < 1e-3


def names_of(half: Half) -> dict[str, set[str]]:
    style = STYLES[half]
    sounds = {**style.tones, **style.knocks, **style.voices}
    return {"colours": {*style.colours}, "shapes": {*style.shapes}, "places": {*style.places}, "sounds": {*sounds}}


def test_halves_share_no_colour_shape_place_or_sound() -> None:
    base, new = names_of("base"), names_of("new")
    assert all(base[kind] and new[kind] and not base[kind] & new[kind] for kind in base)
    for part in ("colours", "places"):
        assert not {*getattr(STYLES["base"], part).values()} & {*getattr(STYLES["new"], part).values()}
    chords = [
        {frozenset(chord) for chord in (*style.tones.values(), *style.knocks.values(), *style.voices.values())}
        for style in STYLES.values()
    ]
    assert not chords[0] & chords[1]


@pytest.mark.parametrize("half", ["base", "new"])
@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("bounce", r"a {colours} {shapes} bounces in a {places} and each bounce rings a {sounds}"),
        ("collide", r"a {colours} {shapes} and a {colours} {shapes} collide in a {places} with a {sounds}"),
        ("speak", r"a {colours} face speaks in a {places} with a {sounds}"),
    ],
)
def test_captions_name_what_is_seen_and_heard_in_the_words_of_their_half(half: Half, kind: Kind, pattern: str) -> None:
    choices = {name: f"({'|'.join(sorted(words))})" for name, words in names_of(half).items()}
    captions = {scene(half, seed, 0.1, 24, 8, RATE_HZ, kind).caption for seed in range(12)}
    assert len(captions) > 3
    assert all(re.fullmatch(pattern.format(**choices), caption) for caption in captions)
