"""What only shows in motion: flicker, frozen frames, how much moves. Nothing is warped, no flow is guessed.

Legend: H height, W width of luma; levels are of 8 bits. Frames are paired by index.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from metrics.score import Score

BLOCK_PX = 8
"""Luma is averaged over blocks of so many px for flicker and motion: coding noise then hardly counts."""
STILL_LEVELS = 0.255
"""A frame that is off the one before by no more is a repeat. Source: FFmpeg's freezedetect, -60 dB of full scale."""
MOVING_LEVELS = 2 * STILL_LEVELS
"""What the reference must change by for a repeat to be a fault; at one limit for both, coding noise would decide."""


class MotionScores(NamedTuple):
    """What `MotionMeter` found."""

    flicker: Score
    """Half the second difference of block luma over time, absolute, mean over blocks and times, levels: how far
    light swings from frame to frame and back. Steady fades count nothing; fast motion counts a little."""
    flicker_excess: Score
    """The same less the reference's own, levels; above 0 it flickers more than it should."""
    frozen_frames: Score
    """Repeats of the frame before, where the reference goes on."""
    longest_freeze: Score
    """Most of them in a row, frames."""
    motion_ratio: Score
    """Mean absolute difference of block luma from frame to frame, over the reference's; 1 moves as much."""
    motion_error: Score
    """|log2| of the ratio, octaves: 1 moves twice or half as much."""


class MotionMeter:
    """Temporal scores of luma pairs given one after the other; keeps two frames of each side."""

    def __init__(self) -> None:
        self._reference, self._distorted = _Side(), _Side()
        self._frozen = self._run = self._longest = 0

    def add(self, reference_HW: NDArray[np.uint8], distorted_HW: NDArray[np.uint8]) -> None:
        """The next pair.

        Raises:
            ValueError: they differ in shape.
        """
        if reference_HW.shape != distorted_HW.shape:
            raise ValueError(f"reference is {reference_HW.shape}, distorted {distorted_HW.shape}; resize")
        reference_step, step = self._reference.take(reference_HW), self._distorted.take(distorted_HW)
        if self._reference.num_frames > 1 and reference_step >= MOVING_LEVELS:
            repeats = step <= STILL_LEVELS
            self._run = self._run + 1 if repeats else 0
            self._frozen += repeats
            self._longest = max(self._longest, self._run)

    def result(self) -> MotionScores:
        """Of the frames so far."""
        reference, distorted = self._reference, self._distorted
        short = Score.missing(f"the clip has {reference.num_frames} frames; motion needs 2")
        frozen, longest = Score(float(self._frozen)), Score(float(self._longest))
        if reference.num_frames < 2:
            return MotionScores(short, short, short, short, short, short)
        ratio = error = Score.missing(f"the reference moves by less than {STILL_LEVELS} levels a frame")
        if reference.motion >= STILL_LEVELS:
            ratio = Score(distorted.motion / reference.motion)
            error = Score(abs(math.log2(max(distorted.motion, STILL_LEVELS) / reference.motion)))
        flicker = excess = Score.missing(f"the clip has {reference.num_frames} frames; flicker needs 3")
        if reference.num_frames > 2:
            flicker, excess = Score(distorted.flicker), Score(distorted.flicker - reference.flicker)
        return MotionScores(flicker, excess, frozen, longest, ratio, error)


class _Side:
    """Running sums of one film."""

    def __init__(self) -> None:
        self.num_frames, self._motion, self._flicker = 0, 0.0, 0.0
        self._luma: NDArray[np.uint8] | None = None
        self._step: NDArray[np.float32] | None = None
        self._blocks: NDArray[np.float32] | None = None

    @property
    def motion(self) -> float:
        """Levels a frame."""
        return self._motion / (self.num_frames - 1)

    @property
    def flicker(self) -> float:
        """Levels."""
        return self._flicker / (self.num_frames - 2)

    def take(self, luma_HW: NDArray[np.uint8]) -> float:
        """The next frame; its mean absolute difference to the one before, levels."""
        blocks, step, changed = block_means(luma_HW), None, 0.0
        if self._blocks is not None and self._luma is not None:
            step = blocks - self._blocks
            self._motion += float(np.abs(step).mean())
            changed = cv2.norm(luma_HW, self._luma, cv2.NORM_L1) / luma_HW.size
        if step is not None and self._step is not None:
            self._flicker += float(np.abs(step - self._step).mean()) / 2
        self.num_frames += 1
        self._luma, self._blocks, self._step = luma_HW.copy(), blocks, step
        return changed


def block_means(luma_HW: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Luma averaged over blocks; a last partial block is left out, and what is smaller than a block is one."""
    height, width = (side // BLOCK_PX * BLOCK_PX or side for side in luma_HW.shape)
    size = (max(1, width // BLOCK_PX), max(1, height // BLOCK_PX))
    levels = np.ascontiguousarray(luma_HW[:height, :width], np.float32)
    return np.asarray(cv2.resize(levels, size, interpolation=cv2.INTER_AREA), np.float32)
