"""Sound yardsticks against the reference libraries' stored values and closed forms."""

from __future__ import annotations

import json
import math
import wave
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from metrics import sound
from metrics.sound import (
    balance_error_db,
    envelope_r,
    level_db,
    level_error_db,
    lsd_db,
    pesq_many,
    pesq_nb,
    pesq_wb,
    resample,
    stoi,
)

ASSETS = Path(__file__).parents[1] / "assets/eval"
GOLDEN = json.loads((ASSETS / "audio_mos_golden.json").read_text())
RATE_HZ = 8000


def speech(name: str = "speech.wav") -> NDArray[np.float64]:
    """A stored recording, (1, T), at 16 kHz."""
    with wave.open(str(ASSETS / name)) as stream:
        return np.frombuffer(stream.readframes(stream.getnframes()), np.int16)[None] / 32768


def noise(seed: int = 0, duration_s: float = 0.92, level: float = 0.1, channels: int = 2) -> NDArray[np.float64]:
    """White noise, (channels, T)."""
    return level * np.random.default_rng(seed).standard_normal((channels, round(duration_s * RATE_HZ)))


def tone(hz: float, amplitude: float, duration_s: float = 1.0) -> NDArray[np.float64]:
    """A sine in one channel, (1, T)."""
    return amplitude * np.sin(2 * np.pi * hz * np.arange(round(duration_s * RATE_HZ)) / RATE_HZ)[None]


def test_pesq_equals_the_stored_values_both_bands() -> None:
    clean, noisy = speech(), speech("speech_bab_0dB.wav")
    assert pesq_nb(clean, noisy, 16_000).mean.value == pytest.approx(GOLDEN["pesq_nb"], abs=1e-6)
    both = pesq_many([(clean, noisy), (clean, clean)], 16_000, "wb")
    assert both[0].mean.value == pytest.approx(GOLDEN["pesq_wb"], abs=1e-6)
    assert both[1].mean.value == pytest.approx(GOLDEN["pesq_wb_self"], abs=1e-6)


def test_stoi_equals_the_stored_values_within_the_resamplers_tolerance() -> None:
    clean, noisy = speech(), speech("speech_bab_0dB.wav")
    assert stoi(clean, noisy, 16_000).mean.value == pytest.approx(GOLDEN["stoi"], abs=2e-5)
    assert stoi(clean, noisy, 16_000, extended=True).mean.value == pytest.approx(GOLDEN["estoi"], abs=2e-5)


def test_stereo_pesq_gives_the_mean_and_the_worst_channel() -> None:
    clean, noisy = speech(), speech("speech_bab_0dB.wav")
    scores = pesq_wb(np.concatenate([clean, clean]), np.concatenate([clean, noisy]), 16_000)
    assert scores.worst.value == pytest.approx(GOLDEN["pesq_wb"], abs=1e-6)
    assert scores.mean.value == pytest.approx((GOLDEN["pesq_wb"] + GOLDEN["pesq_wb_self"]) / 2, abs=1e-6)


def test_wide_band_at_eight_kilohertz_is_missing_and_narrow_band_is_not() -> None:
    clean, noisy = (resample(speech(name), 16_000, RATE_HZ) for name in ("speech.wav", "speech_bab_0dB.wav"))
    assert "8000 Hz" in pesq_wb(clean, noisy, RATE_HZ).mean.reason
    assert pesq_nb(clean, noisy, RATE_HZ).mean.value == pytest.approx(1.6657, abs=0.002)


def test_what_pesq_cannot_judge_is_missing_with_the_reason() -> None:
    clean = resample(speech(), 16_000, RATE_HZ)
    silent, broken = np.zeros_like(clean), clean.copy()
    broken[0, 5] = np.nan
    pairs = [(clean, silent), (silent, clean), (clean[:, :1600], clean[:, :1600]), (clean, broken), (clean, clean)]
    reasons = [scores.mean.reason for scores in pesq_many(pairs, RATE_HZ, "nb")]
    expected = ["generated sound is silent", "reference is silent", "1/4 of a second", "not finite", ""]
    assert all(part in reason for part, reason in zip(expected, reasons, strict=True))
    assert reasons[-1] == ""


def test_a_silent_channel_is_named_and_not_averaged_away() -> None:
    clean = resample(speech(), 16_000, RATE_HZ)
    scores = pesq_nb(np.concatenate([clean, clean]), np.concatenate([clean, 0 * clean]), RATE_HZ)
    assert scores.mean.value is None
    assert scores.mean.reason.startswith("channel 1: generated sound is silent")


def test_a_crash_in_pesqs_c_code_costs_one_item_and_no_process() -> None:
    """Over about 55 separate utterances overrun a table of 50 in the reference code."""
    rng = np.random.default_rng(0)
    burst = np.concatenate([0.3 * rng.standard_normal(RATE_HZ), np.zeros(RATE_HZ // 2)])
    long = np.tile(burst, 80)[None]
    clean = resample(speech(), 16_000, RATE_HZ)
    scores = pesq_many([(clean, clean), (long, long), (clean, clean)], RATE_HZ, "nb")
    assert scores[1].mean.value is None
    assert "crashed with signal" in scores[1].mean.reason
    assert scores[0].mean.value == scores[2].mean.value == pytest.approx(4.5486, abs=1e-3)


def test_pesq_that_takes_too_long_is_stopped_and_missing() -> None:
    clean = np.tile(resample(speech(), 16_000, RATE_HZ), 8)  # longer than a busy machine keeps us waiting
    assert pesq_many([(clean, clean)], RATE_HZ, "nb", limit_s=0.001)[0].mean.reason == "PESQ took over 0.001 s"


def test_stoi_of_silence_or_too_little_sound_is_missing_not_zero() -> None:
    sounds = noise()
    assert "reference is silent" in stoi(0 * sounds, sounds, RATE_HZ).mean.reason
    assert "generated sound is silent" in stoi(sounds, 0 * sounds, RATE_HZ).mean.reason
    assert "too few" in stoi(sounds[:, :2400], sounds[:, :2400], RATE_HZ).mean.reason
    assert "too short" in stoi(sounds[:, :80], sounds[:, :80], RATE_HZ).mean.reason
    assert stoi(sounds, sounds, RATE_HZ).mean.value == pytest.approx(1, abs=1e-6)


def test_log_spectral_distance_of_a_gain_is_the_gain() -> None:
    sounds = noise(level=0.3)
    assert lsd_db(sounds, sounds / 2, RATE_HZ).value == pytest.approx(20 * math.log10(2), abs=0.05)
    assert lsd_db(sounds, sounds, RATE_HZ).value == 0


def test_log_spectral_distance_equals_a_frame_by_frame_computation() -> None:
    reference, degraded = noise(0, 0.1, channels=1), noise(1, 0.1, channels=1)  # 800 samples: 10 windows, padded
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(256) / 256)
    distances = []
    for start in range(0, 800 - 256 + 64, 64):
        levels = []
        for waveform in (reference, degraded):
            piece = np.zeros(256)
            piece[: len(waveform[0, start : start + 256])] = waveform[0, start : start + 256]
            magnitude = np.abs(np.fft.fft(piece * window))[:129] / 64
            levels.append(np.maximum(20 * np.log10(magnitude), -60))
        distances.append(math.sqrt(np.mean((levels[0] - levels[1]) ** 2)))
    assert lsd_db(reference, degraded, RATE_HZ).value == pytest.approx(np.mean(distances), rel=1e-9)


def test_spectra_are_in_db_of_a_full_scale_sine_and_floored() -> None:
    spectrum = sound.spectrum_db(tone(1000, 0.1), RATE_HZ)
    assert spectrum.max() == pytest.approx(-20, abs=0.01)
    assert spectrum.min() == -60
    assert lsd_db(np.zeros((2, 4000)), np.full((2, 4000), 1e-6), RATE_HZ).value == 0


def test_level_of_a_sine_is_three_db_under_its_peak_and_silence_has_a_floor() -> None:
    assert level_db(tone(100, 0.5)) == pytest.approx(20 * math.log10(0.5 / math.sqrt(2)), abs=1e-6)
    assert level_db(np.zeros((2, 10))) == level_db(np.zeros((2, 0))) == -120
    sounds = noise()
    assert level_error_db(sounds, 2 * sounds).value == pytest.approx(6.0206, abs=1e-4)


@pytest.mark.parametrize("right_gain", [1.0, 0.5, 0.1])
def test_placement_error_is_the_difference_of_the_channel_ratio(right_gain: float) -> None:
    mono = noise(channels=1)[0]
    reference, degraded = np.stack([mono, mono]), np.stack([mono, right_gain * mono])
    assert balance_error_db(reference, degraded).value == pytest.approx(-20 * math.log10(right_gain), abs=1e-6)
    assert balance_error_db(degraded, degraded * 0.3).value == pytest.approx(0, abs=1e-9)


def test_sound_on_the_wrong_side_is_twice_its_placement_away_and_capped() -> None:
    mono = noise(channels=1)[0]
    left, right = np.stack([mono, 0 * mono]), np.stack([0 * mono, mono])
    assert balance_error_db(left, right).value == 80
    assert "2 channels" in balance_error_db(mono[None], mono[None]).reason


def test_envelope_correlation_falls_when_the_click_moves() -> None:
    click = np.zeros((2, RATE_HZ))
    click[:, 2000:2200] = 0.5
    assert envelope_r(click, 0.1 * click, RATE_HZ).value == pytest.approx(1)
    moved = envelope_r(click, np.roll(click, 3000, axis=1), RATE_HZ).value
    assert moved is not None
    assert moved < 0
    assert "constant" in envelope_r(click, np.full_like(click, 0.1), RATE_HZ).reason


def test_resampling_keeps_a_tone_and_the_length() -> None:
    result = resample(tone(440, 0.5), RATE_HZ, 16_000)
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    assert result.shape == (1, 16_000)
    assert np.abs(result[0, 400:-400] - expected[400:-400]).max() < 1e-3


def test_sounds_of_other_lengths_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="same length"):
        lsd_db(noise(), noise()[:, :-1], RATE_HZ)
