"""Which way up a picture is, how wide its pixels are, which speaker a channel feeds: what containers hide somewhere."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import cast

import numpy as np
from av.audio.layout import AudioLayout
from av.buffer import Buffer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray

HALF_POWER = math.sqrt(0.5)
"""−3 dB. Source: ITU-R BS.775, downmix of centre and surrounds."""
BY_COUNT = {
    1: ("FC",),
    2: ("FL", "FR"),
    3: ("FL", "FR", "LFE"),
    4: ("FL", "FR", "FC", "BC"),
    5: ("FL", "FR", "FC", "BL", "BR"),
    6: ("FL", "FR", "FC", "LFE", "BL", "BR"),
    7: ("FL", "FR", "FC", "LFE", "BC", "SL", "SR"),
    8: ("FL", "FR", "FC", "LFE", "BL", "BR", "SL", "SR"),
}
"""What a file means that gives a number of channels but not their places."""


@dataclass(frozen=True)
class Orientation:
    """How to show a decoded picture upright: mirror left-right first, then quarter turns clockwise."""

    turns: int = 0
    mirrored: bool = False

    def apply(self, picture_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The upright picture (a view)."""
        return np.rot90(picture_HWC[:, ::-1] if self.mirrored else picture_HWC, -self.turns)


def orientation(frame: VideoFrame) -> Orientation:
    """What the frame's display matrix asks for; decoders do not apply it."""
    try:
        kinds = cast(
            Iterable[Buffer], list(frame.side_data)
        )  # the library's stub says a dictionary; it iterates over values
    except ValueError:  # it stumbles over kinds newer than itself, as EXIF; this way round a mirror is missed
        return Orientation(round(-frame.rotation / 90) % 4)
    for item in kinds:
        kind, content = getattr(item, "type", None), bytes(item)
        if getattr(kind, "name", "") == "DISPLAYMATRIX" and len(content) == 36:
            a, b, _, c, d, *_ = struct.unpack("<9i", content)
            mirrored = a * d - b * c < 0
            across, down = (-a, -b) if mirrored else (a, b)
            return Orientation(round(math.degrees(math.atan2(down, across)) / 90) % 4, mirrored)
    return Orientation()


def pixel_aspect(stream: VideoStream) -> Fraction:
    """Width of a pixel over its height; the container's word goes before the codec's, as in players."""
    return stream.sample_aspect_ratio or stream.codec_context.sample_aspect_ratio or Fraction(1)


def channel_names(layout: AudioLayout) -> tuple[str, ...]:
    """Speaker names in channel order: FL, FR, FC, LFE…"""
    names = tuple(channel.name for channel in layout.channels)
    known = len(set(names)) == len(names) and "NONE" not in names
    return names if known else BY_COUNT.get(len(names), tuple(f"C{index}" for index in range(len(names))))


def downmix(names: tuple[str, ...]) -> NDArray[np.float32]:
    """Gains (2, C): fronts as they are, centre and surrounds at −3 dB, no low-frequency channel (ITU-R BS.775).

    Channels of unknown place go to both sides in equal parts that sum to 1.
    """
    if len(names) == 1:
        return np.ones((2, 1), np.float32)
    gains = np.zeros((2, len(names)), np.float32)
    for index, name in enumerate(names):
        if name in {"FL", "FR", "DL", "DR"}:
            gains[0 if name.endswith("L") else 1, index] = 1
        elif name in {"LFE", "LFE2"}:
            continue
        elif name == "FC":
            gains[:, index] = HALF_POWER
        elif name.endswith("C"):
            gains[:, index] = 0.5
        elif name.endswith(("L", "R")):
            gains[0 if name.endswith("L") else 1, index] = HALF_POWER
        else:
            gains[:, index] = 1 / len(names)
    return gains


def to_stereo(samples_CT: NDArray[np.float32], names: tuple[str, ...]) -> NDArray[np.float32]:
    """Left and right (2, T); a mix of more than two channels that would clip is turned down as a whole."""
    stereo = downmix(names) @ samples_CT
    peak = float(np.abs(stereo).max(initial=0.0))
    if len(names) > 2 and peak > 1:
        stereo /= peak
    return np.ascontiguousarray(stereo, np.float32)
