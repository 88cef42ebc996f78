"""What a picture shows, as a unit vector: two of one scene have a product near 1. H height, W width, C channel, D value.

A ladder: a histogram that needs no weights, then encoders that do; each has thresholds of its own, found with
`benchmarks/shots.py` on its tuning half.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, cast

import cv2
import numpy as np
from numpy.typing import NDArray

from data.sensing import Sensing

cv = cast(Any, cv2)
"""Its types do not say what comes back."""
GRID = 4
"""Blocks a side of the histogram: coarse enough that a moving camera stays in them, fine enough to know above from below."""
ANALYSED_PX = (64, 36)
"""Width and height that the histogram looks at; smaller pictures are more alike, larger ones cost more."""
NUM_HUES, NUM_GREYS, NUM_EDGES = 12, 5, 6
GREY_CHROMA = 36
"""Largest less smallest channel, of 255, up to which a pixel counts as grey: hue is noise below it."""
MEAN_VALUE = 110
"""Brightness, of 255, that every picture is scaled to before it is compared, so that a lamp makes no new scene."""


class Thresholds(NamedTuple):
    """Products of vectors that mean something."""

    same: float
    """From this on, pictures either side of a proposed cut show one scene, and the cut is none."""
    other: float
    """Below this, neighbouring samples show different scenes although no cut was proposed between them."""


class Encoder(Protocol):
    """Anything that turns pictures into unit vectors."""

    @property
    def name(self) -> str:
        """Kind, and the first 12 hex digits of its weights' SHA-256 where it has some."""
        ...

    def embed(self, picture_HWC: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The picture's (D,) vector."""
        ...


class Histogram:
    """Colours and edge directions in blocks, after evening out the light."""

    name = "histogram"

    def embed(self, picture_HWC: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The picture's (D,) vector: square roots of shares, so that the product is Bhattacharyya's coefficient."""
        small = cv.resize(picture_HWC, ANALYSED_PX, interpolation=cv.INTER_AREA).astype(np.float32)
        value = small.max(axis=2)
        gain = MEAN_VALUE / max(float(value.mean()), 1.0)
        chroma = (value - small.min(axis=2)) * gain
        hsv = cv.cvtColor(small.astype(np.uint8), cv.COLOR_RGB2HSV)
        hue = hsv[..., 0].astype(np.int64) * NUM_HUES // 180
        grey = np.minimum(value * gain * NUM_GREYS / 256, NUM_GREYS - 1).astype(np.int64)
        colour = cast(NDArray[np.int64], np.where(chroma > GREY_CHROMA, hue, NUM_HUES + grey))
        weight = np.ones_like(value)
        luma = cv.cvtColor(small.astype(np.uint8), cv.COLOR_RGB2GRAY).astype(np.float32)
        across, down = cv.Sobel(luma, cv.CV_32F, 1, 0), cv.Sobel(luma, cv.CV_32F, 0, 1)
        strength = np.hypot(across, down) * gain
        edge = (np.arctan2(down, across) % np.pi * NUM_EDGES / np.pi).astype(np.int64) % NUM_EDGES
        whole = shares(colour, weight, NUM_HUES + NUM_GREYS, 1)
        blocks = shares(colour, weight, NUM_HUES + NUM_GREYS, GRID)
        edges = shares(edge, strength, NUM_EDGES, GRID)
        parts = ((whole, 0.25), (blocks, 0.4), (edges, 0.35))
        vector = np.concatenate([np.sqrt(part * share) for part, share in parts])
        return (vector / max(float(np.linalg.norm(vector)), 1e-9)).astype(np.float32)


def shares(bins_HW: NDArray[np.int64], weight_HW: NDArray[np.float32], num_bins: int, grid: int) -> NDArray[np.float64]:
    """Weight in every bin of every block, all summing to 1."""
    height, width = bins_HW.shape
    rows = np.arange(height, dtype=np.int64) * grid // height
    columns = np.arange(width, dtype=np.int64) * grid // width
    index = (rows[:, None] * grid + columns) * num_bins + bins_HW
    counted = np.bincount(index.ravel(), weight_HW.ravel().astype(np.float64) + 1e-6, grid * grid * num_bins)
    return counted / counted.sum()


THRESHOLDS = {
    "histogram": Thresholds(0.83, 0.62),
    "efficientnet_lite0": Thresholds(0.75, 0.52),
    "clip": Thresholds(0.85, 0.65),
}
"""By kind of encoder. The last is not calibrated: no such weights were at hand."""


def encoder(sensing: Sensing) -> Encoder:
    """The encoder that the settings ask for.

    Raises:
        RuntimeError: its weights or its runtime are not installed; the message says how to get them.
    """
    if sensing.semantics == "histogram":
        return Histogram()
    from data import encoders

    return encoders.named(sensing.semantics, sensing.semantics_weights)


def thresholds(name: str) -> Thresholds:
    """Those of an encoder's name."""
    return THRESHOLDS[name.partition(" ")[0]]


class Proposer(Protocol):
    """Anything else that says where shots may end."""

    def take(self, picture_HWC: NDArray[np.uint8]) -> None:
        """The next picture."""
        ...

    def finish(self) -> NDArray[np.float32]:
        """Chance (F,) that a shot ends with each frame."""
        ...


def proposer(sensing: Sensing) -> Proposer | None:
    """The second proposer that the settings ask for, or None.

    Raises:
        RuntimeError: it is not installed; the message says how to get it.
    """
    if sensing.proposer == "content":
        return None
    from data import encoders

    return encoders.TransNet()
