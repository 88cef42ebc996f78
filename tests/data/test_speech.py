from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from scipy import signal

from data import speech


def babble(seconds: float, rate: int = 16000) -> np.ndarray:
    """A buzz through moving formants: enough like a voice to stir the network."""
    random = np.random.default_rng(3)
    length = round(seconds * rate)
    pitch = 110 + 25 * np.sin(2 * np.pi * 0.7 * np.arange(length) / rate)
    buzz = signal.sawtooth(2 * np.pi * np.cumsum(pitch) / rate) + 0.02 * random.normal(size=length)
    voiced = np.zeros(length)
    for low in range(0, length, rate // 4):
        piece = buzz[low : low + rate // 4]
        for formant in (random.uniform(300, 800), random.uniform(900, 2300), 2600):
            b, a = signal.iirpeak(formant, 7, fs=rate)
            voiced[low : low + len(piece)] += signal.lfilter(b, a, piece) * np.hanning(len(piece))
    return (0.3 * voiced / np.abs(voiced).max()).astype(np.float32)


def one_by_one(samples: np.ndarray) -> np.ndarray:
    """Silero's streaming network, window by window, as its authors run it."""
    found = importlib.util.find_spec("silero_vad")
    assert found is not None
    assert found.origin is not None
    session = onnxruntime.InferenceSession(str(Path(found.origin).parent / "data" / "silero_vad.onnx"))
    state, context, answers = np.zeros((2, 1, 128), np.float32), np.zeros(64, np.float32), []
    for low in range(0, len(samples) - 511, 512):
        window = samples[low : low + 512]
        given = {"input": np.concatenate([context, window])[None], "state": state, "sr": np.array(16000)}
        probability, state = session.run(None, given)
        answers.append(float(probability[0, 0]))
        context = window[-64:]
    return np.array(answers)


def test_batches_give_what_the_streaming_network_gives() -> None:
    samples = babble(20)
    ear = speech.Ear(16000)
    for low in range(0, len(samples), 5000):
        ear.take(samples[low : low + 5000])
    measured = ear.finish(len(samples) // 512, 512 / 16000)
    expected = one_by_one(samples)
    np.testing.assert_allclose(measured, expected, atol=1e-3)
    assert expected.max() > 0.3  # it says something


@pytest.mark.parametrize("rate", [8000, 44100, 48000])
def test_other_rates_hear_the_same(rate: int) -> None:
    samples = babble(9)
    resampled = signal.resample_poly(samples, rate // 100, 160).astype(np.float32)
    heard_as = []
    for heard, hertz in ((samples, 16000), (resampled, rate)):
        ear = speech.Ear(hertz)
        ear.take(heard)
        heard_as.append(ear.finish(90, 0.1))
    assert heard_as[1].mean() == pytest.approx(heard_as[0].mean(), abs=0.05)
    assert abs(int(heard_as[1].argmax()) - int(heard_as[0].argmax())) <= 1


def test_silence_and_a_tone_are_not_speech() -> None:
    for samples in (np.zeros(48000), 0.5 * np.sin(2 * np.pi * 440 * np.arange(48000) / 16000)):
        ear = speech.Ear(16000)
        ear.take(samples.astype(np.float32))
        assert ear.finish(30, 0.1).max() < 0.5


def test_nothing_heard_gives_no_blocks() -> None:
    assert speech.Ear(48000).finish(0, 0.1).shape == (0,)
