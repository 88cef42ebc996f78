"""What each frame and each clip is like, measured in one decoding pass. F frame, H height, W width, C channel, T sample."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, cast

import cv2
import numpy as np
from numpy.typing import NDArray

from data import shots

THUMB_PX = 32
"""Short side of the pictures kept to compare frames, px; an hour at 24 fps and 16:9 takes 160 MB."""
SHOWN_S = 0.001
"""A frame counts as shown this long before its timestamp: Matroska rounds to milliseconds."""
SILENCE_DB = -120.0
"""Loudness of no sound at all, dB full scale; below the noise of 16 bits (-98)."""


@dataclass(frozen=True)
class Track:
    """One source's frames as numbers."""

    times_s: NDArray[np.float64]
    """(F,) when each is shown, rising."""
    changes: NDArray[np.float64]
    """(F,) `shots.change` from the frame before, 0 for the first."""
    luma: NDArray[np.float64]
    """(F,) mean, 0–1."""
    sharpness: NDArray[np.float64]
    """(F,) variance of the Laplacian of 8-bit luma."""
    thumbs_FHW: NDArray[np.uint8]
    """Small luma pictures."""


class Look(NamedTuple):
    """What a clip looks like; units as in `records.Clip`."""

    motion: float
    luma: float
    sharpness: float


class Sound(NamedTuple):
    """All sound of a source, as `media.read_sound` gives it."""

    samples_CT: NDArray[np.float32]
    rate_hz: int
    start_s: float


def measure(frames: Iterable[tuple[float, NDArray[np.uint8]]]) -> Track:
    """Numbers of every frame, in one pass; a frame whose time does not rise is never shown and is skipped.

    Raises:
        ValueError: there are no frames.
    """
    times: list[float] = []
    changes: list[float] = []
    lumas: list[float] = []
    sharpness: list[float] = []
    thumbs: list[NDArray[np.uint8]] = []
    previous: NDArray[np.uint8] | None = None
    for seconds, picture in frames:
        if times and seconds <= times[-1]:
            continue
        hsv = cast("NDArray[np.uint8]", cv2.cvtColor(picture, cv2.COLOR_RGB2HSV))
        grey = cast("NDArray[np.uint8]", cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY))
        times.append(seconds)
        changes.append(0.0 if previous is None else shots.change(previous, hsv))
        lumas.append(float(grey.mean()) / 255)
        sharpness.append(float(cv2.Laplacian(grey, cv2.CV_32F).var()))
        thumbs.append(thumb(grey))
        previous = hsv
    if not times:
        raise ValueError("no frames")
    return Track(np.array(times), np.array(changes), np.array(lumas), np.array(sharpness), np.stack(thumbs))


def thumb(grey_HW: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The picture with its short side at `THUMB_PX`, never enlarged."""
    scale = THUMB_PX / min(grey_HW.shape)
    if scale >= 1:
        return grey_HW
    height, width = (max(1, round(side * scale)) for side in grey_HW.shape)
    return cast("NDArray[np.uint8]", cv2.resize(grey_HW, (width, height), interpolation=cv2.INTER_AREA))


def look(track: Track, start_s: float, num_frames: int, frame_rate: int) -> Look:
    """What the clip from `start_s` looks like when retimed to `frame_rate`, the frame on screen at each instant."""
    grid = start_s + np.arange(num_frames) / frame_rate
    index = np.maximum(np.searchsorted(track.times_s, grid + SHOWN_S, side="right") - 1, 0)
    shown = track.thumbs_FHW[index].astype(np.float32)
    motion = float(np.abs(np.diff(shown, axis=0)).mean()) / 255 if num_frames > 1 else 0.0
    return Look(motion, float(track.luma[index].mean()), float(np.percentile(track.sharpness[index], 90)))


def loudness_db(sound: Sound, start_s: float, end_s: float) -> float:
    """Root mean square over all channels of the sound in a span, dB full scale; what is missing counts as silence."""
    length = round((end_s - start_s) * sound.rate_hz)
    first = round((start_s - sound.start_s) * sound.rate_hz)
    span = sound.samples_CT[:, max(first, 0) : max(first + length, 0)].astype(np.float64)
    if length <= 0 or not span.size:
        return SILENCE_DB
    mean_square = float(np.square(span).sum()) / (length * span.shape[0])
    return max(SILENCE_DB, 10 * float(np.log10(max(mean_square, 1e-30))))
