"""The picture and sound of a clip, wherever its files are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from data.media import read_clip
from data.records import Clip, ClipShape
from data.remote import local


def read(clip: Clip, shape: ClipShape) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Frames (F, H, W, 3) and stereo sound (2, T) of `shape`.

    Raises:
        Unreadable: a file does not decode, or shows no frame in the span.
        RuntimeError: a remote file cannot be fetched.
    """
    sound = None if clip.sound_path is None else local(clip.sound_path)
    return read_clip(local(clip.path), clip.start_s, clip.end_s, shape, sound)
