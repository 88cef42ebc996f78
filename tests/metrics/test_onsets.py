"""Onsets stand where sounds begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import world
from data.world import Event, Kind
from metrics.onsets import onset_times_s
from tests.metrics.sounds import RATE_HZ, noise, tone


@settings(max_examples=30)
@given(st.lists(st.integers(0, 19), min_size=1, max_size=8, unique=True), st.sampled_from([8000, 32_000, 44_100]))
def test_clicks_are_found_to_the_sample_over_a_quiet_tone(tenths: list[int], rate_hz: int) -> None:
    places = sorted(tenth * rate_hz // 10 + 17 for tenth in tenths)
    time = np.arange(2 * rate_hz) / rate_hz
    sound = np.stack([np.zeros_like(time), 0.01 * np.sin(2 * np.pi * 440 * time)])
    sound[0, places] = 0.9
    found = onset_times_s(sound, rate_hz) * rate_hz
    beginning = [place for place in found if place < 0.004 * rate_hz and 17 not in places]  # of the tone itself
    assert found[len(beginning) :] == pytest.approx(places, abs=1e-6)


def test_steady_sound_begins_once_and_silence_never() -> None:
    assert len(onset_times_s(noise(duration_s=5), RATE_HZ)) == 1
    assert onset_times_s(tone(440, 0.1), RATE_HZ) == pytest.approx([0], abs=0.001)
    assert len(onset_times_s(np.zeros((2, RATE_HZ)), RATE_HZ)) == 0
    assert len(onset_times_s(np.zeros((2, 0)), RATE_HZ)) == 0


def events_of(monkeypatch: pytest.MonkeyPatch, seed: int, kind: Kind) -> tuple[list[float], np.ndarray]:
    """What the sample world knows of a scene, s, and how it sounds at 32 kHz."""
    known: list[Event] = []

    def listening(render: Callable[..., Any]) -> Callable[..., Any]:
        return lambda events, *rest: (known.extend(events), render(events, *rest))[1]

    for name in ("struck", "spoken"):
        monkeypatch.setattr(world, name, listening(getattr(world, name)))
    sound = world.scene("base", seed, 2.0, 24, 16, 32_000, kind=kind).waveform_CT
    monkeypatch.undo()
    return [event.time_s for event in known], sound


@pytest.mark.parametrize("seed", range(6))
def test_collisions_of_the_sample_world_are_placed_within_a_millisecond(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    events, sound = events_of(monkeypatch, seed, "collide")
    assert onset_times_s(sound, 32_000) == pytest.approx(events, abs=0.001)


@pytest.mark.parametrize("seed", range(6))
def test_every_syllable_of_the_sample_world_is_heard_while_it_swells(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    events, sound = events_of(monkeypatch, seed, "speak")
    late = onset_times_s(sound, 32_000) - np.array(events)
    assert late.min() >= 0
    assert late.max() < 0.02
