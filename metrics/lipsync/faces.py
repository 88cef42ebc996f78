"""Faces: who finds them, and how they are followed from picture to picture.

Source: run_pipeline.py of joonson/syncnet_python (MIT). H height, W width, C colour, N face, L picture of a track.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from data.detectors import PACKAGES
from data.files import sha256

Boxes = NDArray[np.float64]


class Detector(Protocol):
    """What finds faces. A box decides the crop and so the score, so that a result names it."""

    name: str
    weights_sha256: str

    def faces(self, picture_HWC: NDArray[np.uint8], scale: float, min_confidence: float) -> Boxes:
        """Left, top, right, bottom in px of the given picture, and confidence (N, 5), of an RGB picture.

        Args:
            picture_HWC: the picture.
            scale: how the protocol scales it before S3FD looks at it.
            min_confidence: faces above it are told.
        """
        ...


class MTCNN:
    """The detector whose weights come in a wheel; its boxes are tighter than S3FD's, and its scores no one's LSE.

    Source: Zhang et al. 2016 (arXiv 1604.02878), facenet-pytorch 2.6.0 (MIT). The wheel pins an old torch that it does
    not need: `pip install --no-deps facenet-pytorch`.
    """

    name = "MTCNN (not S3FD)"

    def __init__(self, device: str = "cpu", min_face_px: int = 50) -> None:
        """Load the wheel's weights; faces below `min_face_px` are not looked for, which saves most of the time.

        Raises:
            RuntimeError: the wheel is not installed.
        """
        package, remedy = PACKAGES["faces"]
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise RuntimeError(f"the face detector MTCNN is not installed; get it: {remedy}")
        library = cast(Any, importlib.import_module(package))  # by name: a type checker seldom has it
        self._net = library.MTCNN(keep_all=True, min_face_size=min_face_px, post_process=False, device=device)
        self._least_px = min_face_px
        self.weights_sha256 = sha256(Path(spec.origin).parent / "data")

    def faces(self, picture_HWC: NDArray[np.uint8], scale: float, min_confidence: float) -> Boxes:
        """As `Detector.faces`; the scale is S3FD's alone."""
        del scale
        if min(picture_HWC.shape[:2]) < self._least_px:  # the first stage would have nothing to slide over
            return np.empty((0, 5))
        boxes, confidence = self._net.detect(picture_HWC)
        if boxes is None:
            return np.empty((0, 5))
        found = np.column_stack([boxes, confidence]).astype(np.float64)
        return found[found[:, 4] > min_confidence]


class Track(NamedTuple):
    """One face through consecutive pictures."""

    first: int
    """Frame of the clip that it begins with."""
    num_found: int
    """In how many of its pictures the face was found; between them its box is interpolated."""
    boxes_L4: Boxes
    """Left, top, right, bottom, px."""

    @property
    def last(self) -> int:
        """Frame of the clip that it ends with."""
        return self.first + len(self.boxes_L4) - 1

    @property
    def side_px(self) -> float:
        """Mean width or mean height of the face, whichever is larger."""
        return float((self.boxes_L4[:, 2:] - self.boxes_L4[:, :2]).mean(axis=0).max())


def overlap(one: Boxes, other: Boxes) -> float:
    """Area in both boxes over area in any: 0–1."""
    width, height = np.minimum(one[2:4], other[2:4]) - np.maximum(one[:2], other[:2])
    both = max(0.0, width) * max(0.0, height)
    areas = [float((box[2] - box[0]) * (box[3] - box[1])) for box in (one, other)]
    return both / (sum(areas) - both)


def tracks(faces: Sequence[Boxes], first: int, max_gap: int, min_overlap: float) -> list[Track]:
    """Faces of one shot joined greedily: a track starts with the first face left and takes what overlaps its last box.

    Args:
        faces: of each picture of the shot, (N, 4 or more).
        first: which frame of the clip the shot begins with.
        max_gap: frames by which a face may follow the last one of its track.
        min_overlap: intersection over union with the last box that a face must exceed.
    """
    left = [list(found) for found in faces]
    result: list[Track] = []
    while (start := next((frame for frame, found in enumerate(left) if found), None)) is not None:
        frames, boxes = [start], [left[start].pop(0)]
        for frame in range(start + 1, len(left)):
            if frame - frames[-1] > max_gap:
                break
            match = next((i for i, box in enumerate(left[frame]) if overlap(box, boxes[-1]) > min_overlap), None)
            if match is not None:
                frames.append(frame)
                boxes.append(left[frame].pop(match))
        result.append(Track(first + start, len(frames), between(frames, np.stack(boxes)[:, :4])))
    return result


def between(frames: Sequence[int], boxes_N4: Boxes) -> Boxes:
    """Boxes (L, 4) of all frames from the first to the last, straight lines between those found."""
    every = np.arange(frames[0], frames[-1] + 1)
    return np.stack([np.interp(every, frames, boxes_N4[:, side]) for side in range(4)], axis=1)
