"""Sounds that several tests of yardsticks begin with, and the stored values of one pair."""

from __future__ import annotations

import json
import wave
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.audio.frame import AudioFrame
from numpy.typing import NDArray

from data.media_sound import first_sound_s, read_stereo

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


def coded(
    path: Path, codec: str, bits_per_s: int, waveform_CT: NDArray[np.floating], rate_hz: int
) -> NDArray[np.float32]:
    """The sound after a codec, as a player hears it, (C, T)."""
    layout = "mono" if len(waveform_CT) == 1 else "stereo"
    with av.open(str(path), "w") as output:
        stream = output.add_stream(codec, rate=rate_hz, layout=layout, bit_rate=bits_per_s)
        frame = AudioFrame.from_ndarray(np.ascontiguousarray(waveform_CT, np.float32), "fltp", layout)
        frame.sample_rate, frame.pts, frame.time_base = rate_hz, 0, Fraction(1, rate_hz)
        resampler = av.AudioResampler(stream.format.name, layout, rate_hz, stream.frame_size or None)
        for piece in (*resampler.resample(frame), *resampler.resample(None)):
            output.mux(stream.encode(piece))
        output.mux(stream.encode(None))
    return read_stereo(path, first_sound_s(path), waveform_CT.shape[1] / rate_hz, rate_hz)[: len(waveform_CT)]
