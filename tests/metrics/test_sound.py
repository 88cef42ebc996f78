"""Sound yardsticks together: closed forms, independent implementations, and which way each moves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyloudnorm
import pytest
import torch
from torchmetrics.functional.audio import scale_invariant_signal_distortion_ratio

from metrics import sound
from metrics.score import Score
from metrics.sound import envelope_r, resample, si_sdr_db
from tests.metrics.sounds import RATE_HZ, coded, noise, speech


def test_envelope_correlation_falls_when_the_click_moves() -> None:
    click = np.zeros((2, RATE_HZ))
    click[:, 2000:2200] = 0.5
    assert envelope_r(click, 0.1 * click, RATE_HZ).value == pytest.approx(1)
    moved = envelope_r(click, np.roll(click, 3000, axis=1), RATE_HZ).value
    assert moved is not None
    assert moved < 0
    assert "constant" in envelope_r(click, np.full_like(click, 0.1), RATE_HZ).reason


@pytest.fixture
def no_dnsmos(monkeypatch: pytest.MonkeyPatch) -> None:
    """DNSMOS needs no reference and seconds; its own tests are elsewhere."""
    monkeypatch.setattr(sound, "dnsmos", lambda *_: Score.missing("left out"))


def test_measure_gives_every_metric_of_the_table_but_pesq() -> None:
    clean = np.concatenate([speech(), 0.5 * speech()])
    found = sound.measure(clean, clean, 16_000)
    assert found.keys() == {name for name in sound.SOUND_METRICS if not name.startswith("pesq")}
    assert all(score.value is not None for score in found.values()), found
    assert all(metric.convention for metric in sound.SOUND_METRICS.values())


@pytest.mark.parametrize("case", ["silent reference", "silent generation", "offset", "not finite", "no samples"])
def test_what_is_undefined_is_missing_with_a_reason_and_never_a_number(case: str) -> None:
    clean = np.concatenate([speech(), speech()])
    broken = clean.copy()
    broken[1, 100] = np.nan
    reference, made, reason = {
        "silent reference": (0 * clean, clean, "reference is silent"),
        "silent generation": (clean, 0 * clean, "generated sound is silent"),
        "offset": (clean, np.full_like(clean, 0.1), "constant"),
        "not finite": (clean, broken, "not finite"),
        "no samples": (clean[:, :0], clean[:, :0], "no samples"),
    }[case]
    found = sound.measure(reference, made, 16_000) | {
        name: sound.pesq_many([(reference, made)], 16_000, name[-2:])[0].mean for name in ("pesq_nb", "pesq_wb")
    }
    defined = {"silent reference": {"lsd_db", "dnsmos"}}.get(case, {"lsd_db"} if case != "not finite" else set())
    for name, score in found.items():
        if name not in defined:
            assert score.value is None, name
            assert reason in score.reason or name == "dnsmos", (name, score)


def test_si_sdr_equals_torchmetrics_and_its_ends_are_capped() -> None:
    reference, made = noise(0), noise(0) + noise(1, level=0.03) + 0.2
    expected = scale_invariant_signal_distortion_ratio(
        torch.from_numpy(made), torch.from_numpy(reference), zero_mean=True
    )
    scores = si_sdr_db(reference, made)
    assert scores.mean.value == pytest.approx(float(expected.mean()), abs=1e-6)
    assert scores.worst.value == pytest.approx(float(expected.min()), abs=1e-6)
    assert si_sdr_db(reference, 3 * reference).mean.value == si_sdr_db(reference, -reference).mean.value == 100
    sine, cosine = (wave(2 * np.pi * np.arange(800) / 100)[None] for wave in (np.sin, np.cos))
    assert si_sdr_db(sine, cosine).mean.value == -100


def test_loudness_equals_pyloudnorm_and_a_gain_is_its_difference() -> None:
    rate_hz = 48_000
    sounds = resample(np.concatenate([speech(), 0.3 * speech()])[:, :48_000], 16_000, rate_hz)
    expected = pyloudnorm.Meter(rate_hz, filter_class="DeMan").integrated_loudness(sounds.T)
    assert sound.loudness_lufs(sounds, rate_hz) == pytest.approx(expected, abs=0.01)
    assert sound.loudness_error_lu(sounds, sounds / 2, rate_hz).value == pytest.approx(20 * np.log10(2), abs=0.05)
    faint = np.random.default_rng(0).normal(0, 2e-3, (2, rate_hz))
    hum = 2e-3 * np.sin(2 * np.pi * 15 * np.arange(rate_hz) / rate_hz)[None].repeat(2, 0)
    assert "generated sound is below -70 LUFS" in sound.loudness_error_lu(faint, hum, rate_hz).reason


@pytest.mark.usefixtures("no_dnsmos")
def test_every_metric_gets_worse_with_more_noise() -> None:
    clean = np.concatenate([speech(), np.roll(speech(), 2000)])
    disturbance = np.random.default_rng(0).standard_normal(clean.shape)
    levels = (0.001, 0.01, 0.05, 0.2)
    found = [sound.measure(clean, clean + level * disturbance, 16_000) for level in levels]
    wide = sound.pesq_many([(clean, clean + level * disturbance) for level in levels], 16_000, "wb")
    for name in ("lsd_db", "stft_distance", "envelope_r", "level_db", "si_sdr", "si_sdr_aligned", "stoi", "estoi"):
        values = [scores[name].value for scores in found]
        assert values == sorted(values, reverse=bool(sound.SOUND_METRICS[name].higher_is_better)), name
    values = [scores.mean.value for scores in wide]
    assert values == sorted(values, reverse=True)


@pytest.mark.usefixtures("no_dnsmos")
@pytest.mark.parametrize("frames", [-10, -1, 1, 3])
def test_a_delay_costs_what_is_compared_sample_by_sample_and_nothing_once_it_is_taken_out(frames: int) -> None:
    clean = np.pad(np.concatenate([speech(), speech()]), ((0, 0), (8000, 8000)))
    found = sound.measure(clean, np.roll(clean, frames * 640, axis=1), 16_000)
    assert found["lag_ms"].value == 40 * frames
    assert found["stoi"].value < 0.7
    assert found["estoi"].value < 0.5
    assert found["si_sdr"].value < 0
    assert found["stoi_aligned"].value == pytest.approx(1, abs=1e-6)
    assert found["estoi_aligned"].value == pytest.approx(1, abs=1e-6)
    assert found["si_sdr_aligned"].value == 100


@pytest.mark.usefixtures("no_dnsmos")
def test_codecs_stand_in_the_order_of_their_quality(tmp_path: Path) -> None:
    ladder = (
        ("aac", 48_000, "mp4"),
        ("libopus", 32_000, "mkv"),
        ("libmp3lame", 64_000, "mp3"),
        ("aac", 128_000, "m4a"),
    )
    clean = resample(speech(), 16_000, 48_000).astype(np.float32)
    heard = [coded(tmp_path / f"{rate}.{ending}", codec, rate, clean, 48_000) for codec, rate, ending in ladder]
    found = [sound.measure(clean, made, 48_000) for made in heard]
    for name in ("stoi", "estoi", "si_sdr"):
        values = [scores[name].value for scores in found]
        assert values == sorted(values), (name, values)
    wide = [scores.mean.value for scores in sound.pesq_many([(clean, made) for made in heard], 48_000, "wb")]
    assert min(wide[1:]) > wide[0] + 1
    assert max(abs(scores["lag_ms"].value) for scores in found) < 0.1
