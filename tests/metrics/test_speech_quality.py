"""STOI against stored values, DNSMOS where there is speech."""

from __future__ import annotations

import numpy as np
import pytest

from data import detectors
from metrics.pieces import pieces
from metrics.speech_quality import STOI_PIECE_S, dnsmos, stoi
from tests.metrics.sounds import GOLDEN, RATE_HZ, noise, speech


def test_stoi_equals_the_stored_values_to_nine_places() -> None:
    clean, noisy = speech(), speech("speech_bab_0dB.wav")
    assert stoi(clean, noisy, 16_000).mean.value == pytest.approx(GOLDEN["stoi"], abs=1e-9)
    assert stoi(clean, noisy, 16_000, extended=True).mean.value == pytest.approx(GOLDEN["estoi"], abs=1e-9)


def test_stoi_of_silence_or_too_little_sound_is_missing_not_zero() -> None:
    sounds = noise()
    assert "reference is silent" in stoi(0 * sounds, sounds, RATE_HZ).mean.reason
    assert "generated sound is silent" in stoi(sounds, 0 * sounds, RATE_HZ).mean.reason
    assert "too few" in stoi(sounds[:, :2400], sounds[:, :2400], RATE_HZ).mean.reason
    assert "too short" in stoi(sounds[:, :80], sounds[:, :80], RATE_HZ).mean.reason
    assert stoi(sounds, sounds, RATE_HZ).mean.value == pytest.approx(1, abs=1e-6)


def test_stoi_of_an_offset_or_of_what_is_not_finite_is_missing() -> None:
    """The library gives two constants 0.99999985."""
    offset, broken = np.full((1, 8000), 0.3), noise(channels=1)
    assert "reference is constant" in stoi(offset, offset, RATE_HZ).mean.reason
    broken[0, 7] = np.nan
    assert "not finite" in stoi(noise(channels=1), broken, RATE_HZ).mean.reason


def test_stoi_of_a_long_sound_is_that_of_its_pieces() -> None:
    clean, noisy = (np.tile(speech(name), 20) for name in ("speech.wav", "speech_bab_0dB.wav"))
    cuts = pieces(clean[0], 16_000, STOI_PIECE_S)
    assert len(cuts) == 2
    parts = [stoi(clean[:, cut], noisy[:, cut], 16_000).mean.value for cut in cuts]
    value = stoi(clean, noisy, 16_000).mean.value
    assert value == pytest.approx(np.average(parts, weights=[cut.stop - cut.start for cut in cuts]), abs=1e-12)


def test_dnsmos_prefers_clean_speech_and_is_missing_without_speech() -> None:
    pytest.importorskip("speechmos")
    clean, noisy = (dnsmos(speech(name), 16_000).value for name in ("speech.wav", "speech_bab_0dB.wav"))
    assert clean == pytest.approx(3.246, abs=0.01)  # what the package's own function answers
    assert noisy == pytest.approx(1.089, abs=0.01)
    assert "silent" in dnsmos(np.zeros((2, 16_000)), 16_000).reason
    assert "is speech; limit 20%" in dnsmos(noise(duration_s=3), RATE_HZ).reason


def test_dnsmos_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(detectors.PACKAGES, "dnsmos", ("no_such_package", "pip install no-such-package"))
    reason = dnsmos(speech(), 16_000).reason
    assert reason == "no_such_package is not installed; pip install no-such-package"
