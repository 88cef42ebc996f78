"""The picture and sound of a clip, wherever its files are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from data.media import read_clips
from data.records import Clip, ClipShape
from data.remote import local

Media = tuple[NDArray[np.uint8], NDArray[np.float32]]
"""Frames (F, H, W, 3) and stereo sound (2, T)."""


def read(clip: Clip, shape: ClipShape) -> Media:
    """Frames and sound of `shape`; see `read_all`."""
    return read_all(clip, [shape])[0]


def read_all(clip: Clip, shapes: Sequence[ClipShape]) -> list[Media]:
    """Frames and sound of each shape, in one pass over the file.

    Raises:
        Unreadable: a file does not decode, or shows no frame in the span.
        RuntimeError: a remote file cannot be fetched.
    """
    sound = None if clip.sound_path is None else local(clip.sound_path)
    return read_clips(local(clip.path), clip.start_s, clip.end_s, shapes, sound)
