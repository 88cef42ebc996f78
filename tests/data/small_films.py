"""Small films: one flash with one click, a moving square with two tones, or any frames as they are."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

FLASH = 20
"""Index of the white frame."""


def flash_and_click(
    num_frames: int = 48, rate: Fraction | int = 24, hz: int = 48000, side: int = 32
) -> tuple[np.ndarray, np.ndarray]:
    """A grey film with one white frame; on the left a click at the instant it shows, on the right a quiet tone."""
    frames = np.full((num_frames, side, side, 3), 60, np.uint8)
    frames[FLASH] = 250
    sound = np.zeros((2, round(num_frames / Fraction(rate) * hz)), np.float32)
    sound[0, round(FLASH / Fraction(rate) * hz)] = 0.9
    sound[1] = 0.05 * np.sin(2 * np.pi * 440 * np.arange(sound.shape[1]) / hz)
    return frames, sound


def click_s(sound: np.ndarray, hz: int) -> float:
    return int(np.argmax(np.abs(sound[0]))) / hz


def flash_index(frames: np.ndarray) -> int:
    return int(frames.mean(axis=(1, 2, 3)).argmax())


def film(num_frames: int = 48, height: int = 64, width: int = 96) -> np.ndarray:
    """A grey film with a moving square; the first sixth is black."""
    frames = np.full((num_frames, height, width, 3), 60, np.uint8)
    for index, frame in enumerate(frames):
        left = index % (width - 16)
        frame[20:36, left : left + 16] = (200, 180, 90)
    frames[: num_frames // 6] = 0
    return frames


def sound(seconds: float = 2.0) -> np.ndarray:
    time = np.arange(round(48000 * seconds)) / 48000
    return np.stack([0.3 * np.sin(2 * np.pi * 440 * time), 0.1 * np.sin(2 * np.pi * 550 * time)]).astype(np.float32)


def write(
    path: Path, codec: str, frames: Sequence[av.VideoFrame], tags: dict[str, Any], rate: int = 24, **options: str
) -> Path:
    """Frames as they are, with the stream's tags."""
    with av.open(str(path), "w") as output:
        stream: Any = output.add_stream(codec, rate=rate, options=options)
        stream.width, stream.height, stream.pix_fmt = frames[0].width, frames[0].height, frames[0].format.name
        for name, value in tags.items():
            setattr(stream.codec_context, name, value)
        for index, frame in enumerate(frames):
            frame.pts, frame.time_base = index, Fraction(1, rate)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return path
