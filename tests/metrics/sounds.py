"""Sounds that several tests of yardsticks begin with, and the stored values of one pair."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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
