"""The one door to media files: probe, read a clip, stream frames, write MP4. Nobody else knows containers.

Seconds are on the picture's timeline: 0 is when the first frame is shown.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.measure import probe
from data.media_open import Unreadable
from data.media_picture import iter_frames, read_pictures
from data.media_sound import first_sound_s, read_sound, read_stereo
from data.media_write import write_media, write_mp4
from data.records import ClipShape

__all__ = ["Unreadable", "iter_frames", "probe", "read_clip", "read_sound", "write_media", "write_mp4"]


def read_clip(
    path: Path, start_s: float, end_s: float | None, shape: ClipShape, sound_path: Path | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Frames (F, H, W, 3) and stereo sound (2, T) of `shape`, from `start_s` on the picture's timeline.

    The frame at index i is the one on screen at `start_s + i / frame_rate`, whatever the file's own rate. Nothing at
    or after `end_s` is used: the last frame stays, and the sound is silent. Mono goes to both sides, more channels are
    mixed down by ITU-R BS.775, no sound is silence.

    Args:
        sound_path: File whose sound is taken instead; its first sample sounds with the first frame shown.

    Raises:
        Unreadable: the file does not decode, or shows no frame in the span.
    """
    frames, origin_s = read_pictures(path, start_s, end_s, shape)
    duration_s = float(shape.duration_s) if end_s is None else min(float(shape.duration_s), end_s - start_s)
    heard = path if sound_path is None else sound_path
    begins_s = origin_s if sound_path is None else first_sound_s(sound_path)
    waveform = read_stereo(heard, begins_s + start_s, duration_s, shape.sample_rate_hz)
    result = np.zeros((2, shape.num_samples), np.float32)
    length = min(shape.num_samples, waveform.shape[1])
    result[:, :length] = waveform[:, :length]
    return frames, result
