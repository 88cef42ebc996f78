"""Camera cuts as the published lip-sync pipelines find them, picture by picture.

Source: PySceneDetect's ContentDetector (BSD-3) at its defaults, which those pipelines call: threshold 27, at least 15
frames, flashes merged, pictures brought to 256 px. The pipeline's own cuts (`data.boundaries`) are better and differ.
H height, W width.
"""

from __future__ import annotations

import itertools

import cv2
import numpy as np
from numpy.typing import NDArray

THRESHOLD = 27.0
"""Mean change of hue, saturation and value, levels of 255 (hue of 180)."""
LEAST_FRAMES = 15
SIDE_PX = 256
"""Pictures with a longer side above it are made smaller."""


class Cuts:
    """Takes pictures in order and finds the first frame of each new shot."""

    def __init__(self) -> None:
        self.num_frames = 0
        self._found: list[int] = []
        self._before: NDArray[np.uint8] | None = None
        self._last_above = 0
        self._merging_since: int | None = None

    def take(self, picture_HWC: NDArray[np.uint8]) -> None:
        """The next picture, RGB, of the size of those before."""
        factor = max(1.0, max(picture_HWC.shape[:2]) / SIDE_PX)
        size = tuple(max(1, round(side / factor)) for side in picture_HWC.shape[1::-1])
        small = cv2.resize(picture_HWC, size, interpolation=cv2.INTER_LINEAR) if factor > 1 else picture_HWC
        hsv = np.asarray(cv2.cvtColor(small, cv2.COLOR_RGB2HSV), np.uint8)
        changed = 0.0 if self._before is None else float(cv2.absdiff(self._before, hsv).mean())
        self._before = hsv
        self._judge(self.num_frames, above=changed >= THRESHOLD)
        self.num_frames += 1

    def _judge(self, frame: int, *, above: bool) -> None:
        """Whether a shot begins; changes that follow each other too soon count as one, at the last of them."""
        long_enough = frame - self._last_above >= LEAST_FRAMES
        if above:
            self._last_above = frame
        if self._merging_since is not None:
            if long_enough and not above and self._last_above - self._merging_since >= LEAST_FRAMES:
                self._merging_since = None
                self._found.append(self._last_above)
        elif above and long_enough:
            self._found.append(frame)
        elif above and self._found:
            self._merging_since = frame

    def shots(self) -> list[tuple[int, int]]:
        """First frame of each shot and the one after its last."""
        edges = [0, *self._found, self.num_frames]
        return list(itertools.pairwise(edges))
