"""The one door to media files: probe, read a clip, stream frames, write MP4. Nobody else knows containers.

Seconds are on the picture's timeline: 0 is when the first frame is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.measure import probe
from data.media_open import Unreadable
from data.media_picture import first_frame_s, iter_frames, read_pictures
from data.media_sound import first_sound_s, read_sound, read_stereo
from data.media_write import write_media, write_mp4
from data.records import ClipShape

__all__ = [
    "Unreadable",
    "iter_frames",
    "probe",
    "read_clip",
    "read_clips",
    "read_excerpt",
    "read_sound",
    "write_media",
    "write_mp4",
]


def read_clip(
    path: Path, start_s: float, end_s: float | None, shape: ClipShape, sound_path: Path | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Frames (F, H, W, 3) and stereo sound (2, T) of `shape`; see `read_clips`."""
    return read_clips(path, start_s, end_s, [shape], sound_path)[0]


def read_clips(
    path: Path, start_s: float, end_s: float | None, shapes: Sequence[ClipShape], sound_path: Path | None = None
) -> list[tuple[NDArray[np.uint8], NDArray[np.float32]]]:
    """Frames (F, H, W, 3) and stereo sound (2, T) of each shape, from `start_s` on the picture's timeline, in one pass.

    The frame at index i is the one on screen at `start_s + i / frame_rate`, whatever the file's own rate. Nothing at
    or after `end_s` is used: the last frame stays, and the sound is silent. Mono goes to both sides, more channels are
    mixed down by ITU-R BS.775, no sound is silence.

    Args:
        shapes: Of equal rates; they differ in size and length.
        sound_path: File whose sound is taken instead; its first sample sounds with the first frame shown.

    Raises:
        Unreadable: the file does not decode, or shows no frame in the span.
    """
    pictures, origin_s = read_pictures(path, start_s, end_s, shapes)
    (rate_hz,) = {shape.sample_rate_hz for shape in shapes}
    longest_s = max(float(shape.duration_s) for shape in shapes)
    duration_s = longest_s if end_s is None else min(longest_s, end_s - start_s)
    heard = path if sound_path is None else sound_path
    begins_s = origin_s if sound_path is None else first_sound_s(sound_path)
    waveform = read_stereo(heard, begins_s + start_s, duration_s, rate_hz)
    return [(frames, _exactly(waveform, shape.num_samples)) for frames, shape in zip(pictures, shapes, strict=True)]


def read_excerpt(
    path: Path, start_s: float, duration_s: float, sample_rate_hz: int, sound_path: Path | None = None
) -> NDArray[np.float32]:
    """Stereo sound (2, T) from `start_s` on the picture's timeline, of a file that has a picture.

    Args:
        sound_path: File whose sound is taken instead, with or without a picture; its first sample is at 0.

    Raises:
        Unreadable: the file does not decode.
    """
    if sound_path is not None:
        return read_stereo(sound_path, first_sound_s(sound_path) + start_s, duration_s, sample_rate_hz)
    return read_stereo(path, first_frame_s(path) + start_s, duration_s, sample_rate_hz)


def _exactly(waveform_CT: NDArray[np.float32], num_samples: int) -> NDArray[np.float32]:
    """The first samples, and silence after the last."""
    result = np.zeros((2, num_samples), np.float32)
    length = min(num_samples, waveform_CT.shape[1])
    result[:, :length] = waveform_CT[:, :length]
    return result
