"""A decoded frame as 8-bit RGB, whatever its matrix, range, depth, transfer, fields or transparency.

Arrays: H height, W width.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, Interpolation
from numpy.typing import NDArray

from data import tone_map
from data.media_open import Unreadable

ACCURATE = Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT
"""Without these swscale halves chroma cheaply: 37 dB instead of 48 dB after a lossless round trip (measured)."""

MATRICES = (0, Colorspace.ITU709, Colorspace.FCC, Colorspace.ITU601, 6, Colorspace.SMPTE240M, Colorspace.BT2020)
"""Colour matrices that swscale converts, as FFmpeg numbers them; 0 is RGB, 6 the same as 5."""
FOREIGN_MATRICES = {
    8: "YCgCo",
    10: "BT.2020 with constant luminance",
    11: "SMPTE ST 2085",
    13: "constant luminance by primaries",
    14: "ICtCp",
    15: "IPT-C2",
    16: "YCgCo-Re",
    17: "YCgCo-Ro",
}
"""Those that it does not. Source: ITU-T H.273, table 4."""
BY_PRIMARIES = {
    ColorPrimaries.BT709: Colorspace.ITU709,
    ColorPrimaries.SMPTE240M: Colorspace.SMPTE240M,
    ColorPrimaries.BT2020: Colorspace.BT2020,
}
"""What number 12, "by primaries", comes to; BT.601 for the rest."""
FULL_GREY = np.clip(np.rint((np.arange(256) - 16) * 255 / 219), 0, 255).astype(np.uint8)
"""Full range by code of limited range."""
LIMITED_WHITE = 65283
"""swscale's 16-bit code of the white of limited range, whatever the depth (measured)."""
HD_LINES = 720
"""Untagged pictures are BT.709 from this many lines on, BT.601 below: so players assume."""


def rgb(frame: VideoFrame, height: int, width: int) -> NDArray[np.uint8]:
    """The whole frame as it lies, (H, W, 3): HDR tone-mapped, what is transparent on black, of two fields the top one.

    The fields of an interlaced frame were taken at two instants; together they comb.
    """
    if frame.color_trc in tone_map.HDR:
        signal = scaled(frame, height, width, "rgb48le")
        return tone_map.to_sdr(signal, frame.color_trc, frame.color_primaries, levels(frame))
    if frame.format.has_palette or any(component.is_alpha for component in frame.format.components):
        frame = on_black(frame)
    picture = scaled(frame, height, width, "rgb24")
    return FULL_GREY[picture] if is_limited_grey(frame) else picture


def is_limited_grey(frame: VideoFrame) -> bool:
    """Whether a picture has luma alone, of limited range; swscale takes all of them for full range."""
    return is_grey(frame) and frame.color_range == ColorRange.MPEG


def is_grey(frame: VideoFrame) -> bool:
    """Whether a picture has luma alone."""
    return frame.format.name.startswith(("gray", "ya"))


def levels(frame: VideoFrame) -> tuple[int, int]:
    """Codes of black and white where swscale makes 16 bits of a frame.

    It widens limited range to 255/256 of full, and shifts full range up without filling the bits below (measured).
    """
    if is_limited_grey(frame):
        return 16 << 8, 235 << 8
    form = frame.sw_format or frame.format
    if frame.color_range != ColorRange.JPEG and not form.is_rgb and not is_grey(frame):
        return 0, LIMITED_WHITE
    bits = form.components[0].bits
    return 0, (2**bits - 1) << (16 - bits)


def scaled(frame: VideoFrame, height: int, width: int, form: str) -> NDArray[Any]:
    """RGB of another size: averaged by area where it shrinks.

    Raises:
        Unreadable: its colours cannot be converted.
    """
    fields = 2 if frame.interlaced_frame else 1  # swscale keeps fields apart: every second line is of the top one
    shrinks = width < frame.width or height * fields < frame.height
    picture = frame.reformat(
        width,
        height * fields,
        form,
        src_colorspace=matrix_of(frame),
        interpolation=int((Interpolation.AREA if shrinks else Interpolation.BICUBIC) | ACCURATE),
        threads=1,
    ).to_ndarray()
    return picture[::fields]


def matrix_of(frame: VideoFrame) -> int:
    """Colour matrix of a frame, guessed where it is not tagged.

    Raises:
        Unreadable: it is a known one that cannot be converted.
    """
    matrix = frame.colorspace
    if matrix in MATRICES:
        return matrix
    if matrix in FOREIGN_MATRICES:
        raise Unreadable(f"has colours coded as {FOREIGN_MATRICES[matrix]}, which nothing here converts")
    if matrix == 12:
        return next((found for item, found in BY_PRIMARIES.items() if item == frame.color_primaries), Colorspace.ITU601)
    if frame.color_trc in tone_map.HDR:
        return Colorspace.BT2020
    return Colorspace.ITU709 if frame.height >= HD_LINES else Colorspace.ITU601


def on_black(frame: VideoFrame) -> VideoFrame:
    """The frame without transparency; the colours below transparent pixels are anything, and must not be seen."""
    best = int(Interpolation.BICUBIC | ACCURATE)
    layers = frame.reformat(format="rgba", src_colorspace=matrix_of(frame), interpolation=best, threads=1)
    picture = cast(NDArray[np.uint8], layers.to_ndarray())
    alpha = picture[..., 3:].astype(np.uint16)
    if alpha.min() == 255:
        return frame
    return VideoFrame.from_ndarray(((picture[..., :3] * alpha + 127) // 255).astype(np.uint8), "rgb24")
