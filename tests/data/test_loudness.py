from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyloudnorm
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import signal

from data import loudness


def tone(hertz: float, rate: int, seconds: float, amplitude: float = 1.0, phase: float = 0.0) -> np.ndarray:
    time = np.arange(round(seconds * rate)) / rate
    return (amplitude * np.sin(2 * np.pi * hertz * time + phase)).astype(np.float32)[None]


def block_powers(samples: np.ndarray, rate: int, names: tuple[str, ...]) -> np.ndarray:
    starts = np.array([round(block * rate / 10) for block in range(int(samples.shape[1] / rate * 10 + 1e-9))])
    return loudness.Meter(rate, names).take(samples, starts)


def test_weighting_at_48_khz_is_the_standards() -> None:
    shelf = [1.53512485958697, -2.69169618940638, 1.19839281085285, 1, -1.69065929318241, 0.73248077421585]
    passes = [1, -2, 1, 1, -1.99004745483398, 0.99007225036621]
    np.testing.assert_allclose(loudness.weighting(48000), [shelf, passes], atol=2e-6)


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000, 96000, 192000])
def test_full_scale_tone_on_one_side_reads_as_the_standard_says(rate: int) -> None:
    samples = np.concatenate([tone(997, rate, 3), np.zeros((1, 3 * rate), np.float32)])
    measured = loudness.integrated(block_powers(samples, rate, ("FL", "FR")))
    assert measured == pytest.approx(-3.01, abs=0.05 if rate > 8000 else 0.4)


@pytest.mark.parametrize("rate", [16000, 44100, 48000])
@pytest.mark.parametrize("names", [("FC",), ("FL", "FR"), ("FL", "FR", "FC", "BL", "BR")])
def test_integrated_loudness_agrees_with_pyloudnorm(rate: int, names: tuple[str, ...]) -> None:
    random = np.random.default_rng(0)
    swell = np.repeat(10.0 ** random.uniform(-3, -0.5, 20), rate // 2)
    samples = (random.normal(0, 0.3, (len(names), len(swell))) * swell).astype(np.float32)
    # pyloudnorm's own filters for its default class differ by 0.1 dB near the corner; DeMan's are the standard's
    expected = pyloudnorm.Meter(rate, filter_class="DeMan").integrated_loudness(samples.T.astype(float))
    measured = loudness.integrated(block_powers(samples, rate, names))
    assert measured == pytest.approx(expected, abs=0.1)


def test_gate_leaves_out_what_is_ten_units_quieter() -> None:
    loud, quiet = tone(997, 48000, 5, 0.1), tone(997, 48000, 5, 0.001)
    both = block_powers(np.concatenate([loud, quiet], axis=1), 48000, ("FC",))
    alone = block_powers(loud, 48000, ("FC",))
    assert loudness.integrated(both) == pytest.approx(loudness.integrated(alone), abs=0.3)
    assert loudness.integrated(np.full(40, 1e-8)) is None
    assert loudness.integrated(np.zeros(0)) is None


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(1, 4999), max_size=6), seed=st.integers(0, 99))
def test_matrix_filter_in_pieces_is_the_sample_by_sample_filter(cuts: list[int], seed: int) -> None:
    samples = np.random.default_rng(seed).normal(0, 0.3, (2, 5000)).astype(np.float32)
    sections = loudness.weighting(44100)
    filters = loudness.Recursion(sections, 2)
    edges = [0, *sorted(set(cuts)), 5000]
    pieces = [filters.take(samples[:, low:high]) for low, high in pairwise(edges)]
    expected = signal.sosfilt(sections, samples.astype(float), axis=1)
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), expected, atol=1e-9)


@pytest.mark.parametrize(("rate", "hertz"), [(48000, 12000), (44100, 11025), (8000, 2000), (96000, 24000)])
def test_true_peak_sees_the_crest_between_samples(rate: int, hertz: float) -> None:
    meter = loudness.Meter(rate, ("FC",))
    samples = tone(hertz, rate, 1, 0.5, phase=np.pi / 4) * np.minimum(1, np.arange(rate) / 1000).astype(np.float32)
    for low in range(0, rate, 1600):
        meter.take(samples[:, low : low + 1600], np.array([0]))
    assert 20 * np.log10(meter.peak) == pytest.approx(-9.03, abs=0.01)
    assert 20 * np.log10(meter.true_peak) == pytest.approx(-6.02, abs=0.1)


def test_true_peak_looks_everywhere_it_could_be() -> None:
    random = np.random.default_rng(1)
    samples = (random.normal(0, 0.2, (1, 48000)) * np.linspace(0.2, 1, 48000)).astype(np.float32)
    meter = loudness.Meter(48000, ("FC",))
    for low in range(0, 48000, 4800):
        meter.take(samples[:, low : low + 4800], np.array([0]))
    windows = np.lib.stride_tricks.sliding_window_view(samples[0], 2 * loudness.REACH)
    between = np.abs(windows @ loudness.interpolator(48000)).max()
    assert meter.true_peak == pytest.approx(max(between, np.abs(samples).max()), rel=1e-6)


def test_low_frequency_channel_does_not_count_and_surrounds_count_more() -> None:
    assert [loudness.channel_gain(name) for name in ("FL", "FC", "LFE", "BL", "SR")] == [1, 1, 0, 1.41, 1.41]


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, 0.4])
def test_interpolated_sines_keep_their_height(share: float) -> None:
    weights = loudness.interpolator(48000).astype(float)
    taps = np.arange(-loudness.REACH + 1, loudness.REACH + 1)
    for point in range(3):
        there = np.exp(2j * np.pi * share * (taps - (point + 1) / 4))
        assert abs(20 * np.log10(abs(there @ weights[:, point]))) < 0.1
