from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from data import soundalikes
from data.hearing import Listener

RATE_HZ = 16000
Wave = NDArray[np.float64]


def speech(seed: int, seconds: float = 8.0) -> Wave:
    """Syllables of uneven length, loudness and pitch, with pauses: as uneven as talk is."""
    rng = np.random.default_rng(seed)
    parts: list[Wave] = []
    while sum(map(len, parts)) < seconds * RATE_HZ:
        times = np.arange(round(rng.uniform(0.08, 0.3) * RATE_HZ)) / RATE_HZ
        swell = np.sin(np.pi * times / times[-1])
        voiced = sum(
            np.sin(2 * np.pi * rng.uniform(90, 220) * k * times) / k ** rng.uniform(0.5, 2) for k in range(1, 9)
        )
        hiss = rng.normal(size=len(times)) * rng.uniform(0, 0.6)
        parts.append(rng.uniform(0.02, 0.2) * swell * (voiced + hiss))
        if rng.random() < 0.3:
            parts.append(np.zeros(round(rng.uniform(0.05, 0.5) * RATE_HZ)))
    return np.concatenate(parts)[: round(seconds * RATE_HZ)] + rng.normal(size=round(seconds * RATE_HZ)) * 1e-4


def times(seconds: float = 8.0) -> Wave:
    return np.arange(round(seconds * RATE_HZ)) / RATE_HZ


def clicks(at_s: NDArray[np.float64], seconds: float = 8.0) -> Wave:
    wave = np.random.default_rng(0).normal(size=round(seconds * RATE_HZ)) * 1e-4
    for at in at_s:
        wave[round(at * RATE_HZ) : round(at * RATE_HZ) + 200] += 0.4
    return wave


def matches(waves: list[Wave], folder: Path) -> set[tuple[int, int]]:
    tracks: list[NDArray[np.float16]] = []
    for wave in waves:
        listener = Listener(RATE_HZ, ["FC"], speech_too=False)
        listener.take(wave[None].astype(np.float32))
        tracks.append(soundalikes.levels(listener.finish(0.0)[0]))
    (folder / "sounds").write_bytes(b"".join(track.tobytes() for track in tracks))
    lengths = np.array([len(track) for track in tracks])
    found = soundalikes.find(folder / "sounds", lengths, folder / "hashed")
    return {(min(match.left, match.right), max(match.left, match.right)) for match in found}


def low_pass(wave: Wave) -> Wave:
    return np.convolve(wave, [0.15, 0.7, 0.15], "same")


COPIES = {
    "quieter": lambda wave: wave * 0.3,
    "filtered": low_pass,
    "shifted by a quarter of a block": lambda wave: wave[round(1.225 * RATE_HZ) :],
    "trimmed": lambda wave: wave[round(0.8 * RATE_HZ) : round(6.8 * RATE_HZ)],
    "with noise": lambda wave: wave + np.random.default_rng(9).normal(size=len(wave)) * 1e-3,
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_a_sound_are_found_among_others(name: str, tmp_path: Path):
    waves = [speech(seed) for seed in range(12)]
    found = matches(waves + [COPIES[name](wave) for wave in waves], tmp_path)
    assert all(right - left == 12 for left, right in found)
    assert len(found) >= 11


def test_different_speech_never_matches(tmp_path: Path):
    assert matches([speech(seed) for seed in range(60)], tmp_path) == set()


DULL = {
    "silence": np.zeros(8 * RATE_HZ),
    "hum": 0.1 * np.sin(2 * np.pi * 50 * times()),
    "noise": np.random.default_rng(3).normal(size=8 * RATE_HZ) * 0.1,
    "fade": 0.3 * times() / 8 * np.sin(2 * np.pi * 300 * times()),
    "tremolo": 0.2 * (1 + 0.8 * np.sin(2 * np.pi * 3 * times())) * np.sin(2 * np.pi * 300 * times()),
    "metronome": clicks(np.arange(0.1, 7.9, 0.5)),
    "one click": clicks(np.array([3.3])),
    "beeps": 0.3 * (times() % 1 < 0.1) * np.sin(2 * np.pi * 1000 * times()),
}


@pytest.mark.parametrize("name", DULL)
def test_silent_or_steady_sound_matches_nothing_not_even_itself(name: str, tmp_path: Path):
    assert matches([DULL[name], DULL[name] * 0.9], tmp_path) == set()


def test_what_is_too_short_or_has_no_sound_is_passed_over(tmp_path: Path):
    assert matches([speech(1, 2.9), speech(1, 2.9), np.zeros(0)], tmp_path) == set()
    assert soundalikes.levels(None).shape == (0, 2)


def test_matches_join_every_group_and_are_bounded(tmp_path: Path):
    found = matches([speech(1)] * 40, tmp_path)
    assert len(found) == 39


def test_likeness_is_symmetric_and_one_for_the_same():
    power = np.random.default_rng(0).uniform(0.001, 1, (2, 60, 2))
    common = np.ones((1, 60), np.bool_)
    assert soundalikes.likeness(power[:1], power[:1], common) == pytest.approx([1])
    there, back = (soundalikes.likeness(a[None], b[None], common) for a, b in (power, power[::-1]))
    assert there == pytest.approx(back)
