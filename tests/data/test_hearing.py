from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyloudnorm
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.hearing import CLIPPED, Listener, SoundTrack, loudness_lufs, silent_share, speech_share


def listened(samples: np.ndarray, rate: int = 48000, start_s: float = 0.0, cuts: tuple[int, ...] = ()):
    names = ("FC",) if samples.shape[0] == 1 else ("FL", "FR", "FC", "LFE", "BL", "BR")[: samples.shape[0]]
    listener = Listener(rate, names, speech_too=False)
    edges = [0, *sorted(set(cuts)), samples.shape[1]]
    for low, high in pairwise(edges):
        listener.take(samples[:, low:high].astype(np.float32))
    return listener.finish(start_s)


def noise(seconds: float, rate: int = 48000, channels: int = 2, level: float = 0.1) -> np.ndarray:
    return np.random.default_rng(0).normal(0, level, (channels, round(seconds * rate))).astype(np.float32)


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(1, 66000), max_size=8), rate=st.sampled_from([11025, 22050, 44100]))
def test_pieces_do_not_matter(cuts: list[int], rate: int) -> None:
    samples = noise(3, 22050)
    whole, facts = listened(samples, rate)
    pieces, same = listened(samples, rate, cuts=tuple(cuts))
    assert facts == same
    np.testing.assert_allclose(whole.power_B, pieces.power_B, rtol=1e-5)
    assert len(whole.power_B) == int(np.ceil(samples.shape[1] / rate * 10 - 1e-6))


def test_facts_agree_with_closed_forms_and_pyloudnorm() -> None:
    samples = noise(6)
    samples[:, 48000:96000] = 0
    track, facts = listened(samples)
    expected = pyloudnorm.Meter(48000, filter_class="DeMan").integrated_loudness(samples.T.astype(float))
    assert facts["loudness_lufs"] == pytest.approx(expected, abs=0.1)
    assert facts["peak"] == pytest.approx(np.abs(samples).max(), abs=1e-6)
    assert facts["silent_share"] == pytest.approx(1 / 6, abs=1e-3)
    assert (facts["clipped_share"], facts["dead_side"], facts["speech_share"]) == (0, None, None)
    assert track.duration_s == 6


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), cuts=st.lists(st.integers(1, 29999), max_size=5))
def test_clipped_samples_are_those_with_a_neighbour_at_full_scale(seed: int, cuts: list[int]) -> None:
    random = np.random.default_rng(seed)
    samples = random.choice([0.1, 1.0, -1.0], p=[0.7, 0.2, 0.1], size=(2, 30000)).astype(np.float32)
    full = np.pad(np.abs(samples) >= CLIPPED, ((0, 0), (1, 1)))
    expected = (full[:, 1:-1] & (full[:, :-2] | full[:, 2:])).mean()
    facts = listened(samples, 8000, cuts=tuple(cuts))[1]
    assert facts["clipped_share"] == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize(("side", "name"), [(0, "left"), (1, "right")])
def test_dead_side_is_named_even_with_a_click_on_it(side: int, name: str) -> None:
    samples = noise(20)
    samples[side] = 0
    samples[side, 5000] = 0.8
    assert listened(samples)[1]["dead_side"] == name
    assert listened(noise(2))[1]["dead_side"] is None
    assert listened(np.zeros((2, 48000)))[1]["dead_side"] is None


def test_spans_weigh_blocks_by_what_they_share_and_missing_sound_is_silence() -> None:
    samples = noise(4)
    samples[:, 96000:] *= 0.1
    track, _ = listened(samples, start_s=1.0)
    loud, quiet = loudness_lufs(track, 1.0, 3.0), loudness_lufs(track, 3.0, 5.0)
    assert loud is not None
    assert quiet is not None
    assert loud - quiet == pytest.approx(20, abs=0.2)
    half = loudness_lufs(track, 0.0, 2.0)
    assert loud - (half or 0) == pytest.approx(10 * np.log10(2), abs=0.1)
    assert silent_share(track, 0.0, 2.0) == pytest.approx(0.5, abs=1e-6)
    assert silent_share(track, 4.75, 5.25) == pytest.approx(0.5, abs=1e-6)
    assert loudness_lufs(track, 7, 8) is None
    assert silent_share(track, 7, 8) == 1
    assert speech_share(track, 1, 2) is None


def test_speech_share_counts_likely_blocks() -> None:
    likely = np.array([0.9, 0.9, 0.1, 0.6, 0.4], np.float32)
    track = SoundTrack(0.0, 0.5, np.ones(5, np.float32), np.ones(5, np.float32), likely)
    assert speech_share(track, 0, 0.5) == pytest.approx(0.6)
    assert speech_share(track, 0, 1.0) == pytest.approx(0.3)
    assert speech_share(track, 0.15, 0.25) == pytest.approx(0.5)


def test_track_survives_its_arrays() -> None:
    track, _ = listened(noise(1), start_s=-0.25)
    again = SoundTrack.from_arrays(track.to_arrays())
    assert (again.start_s, again.duration_s, again.block_s) == (-0.25, 1.0, 0.1)
    assert np.array_equal(again.loudness_B, track.loudness_B)
    assert again.speech_B is None


def test_gap_is_silence_and_nothing_at_all_is_an_empty_track() -> None:
    listener = Listener(8000, ("FC",), speech_too=False)
    listener.take(noise(0.5, 8000, 1))
    listener.take_silence(8000)
    listener.take(noise(0.5, 8000, 1))
    track, facts = listener.finish(0.0)
    assert facts["silent_share"] == pytest.approx(0.5)
    assert track.duration_s == 2
    empty, facts = Listener(8000, ("FC",), speech_too=False).finish(0.0)
    assert (empty.duration_s, facts["loudness_lufs"], facts["true_peak_db"]) == (0, None, None)
