"""Decoding on the graphics card through the one media door (PyAV's own NVDEC path), once it has proved itself.

Other decoders (torchcodec, PyNvVideoCodec) would be a second door with other timestamps, rotations and errors.
"""

from __future__ import annotations

import functools
import io
import multiprocessing
import sys
from typing import Literal, cast

import av
import av.error
import numpy as np
from av.codec.hwaccel import HWAccel, hwdevices_available
from numpy.typing import NDArray

Decoder = Literal["cpu", "auto", "cuda"]
SIDE_PX, NUM_FRAMES = 256, 3
"""The trial clip: above the least size of every NVDEC generation, and with a predicted frame."""


def hwaccel(decoder: Decoder) -> HWAccel | None:
    """What `av.open(hwaccel=…)` takes: None decodes on the processor.

    `auto` falls back to the processor and says so once, in the first process alone. A stream that the card cannot
    decode is decoded by the processor in any case.

    Raises:
        RuntimeError: `cuda`, and the card does not decode.
    """
    if decoder == "cpu":
        return None
    reason = fault()
    if reason is None:
        return HWAccel("cuda", allow_software_fallback=True)
    if decoder == "cuda":
        raise RuntimeError(
            f"decoder = cuda: {reason}; install NVIDIA's driver with its video libraries (in a container:"
            " NVIDIA_DRIVER_CAPABILITIES=video,compute), or set decoder = cpu"
        )
    if multiprocessing.parent_process() is None:
        _say_once(f"decoder = auto: {reason}; decoding on the processor")
    return None


@functools.cache
def _say_once(message: str) -> None:
    sys.stderr.write(message + "\n")


@functools.cache
def fault() -> str | None:
    """Why the card is not to be trusted with decoding; None where it decodes a clip to the processor's very pixels.

    The H.264 standard leaves a decoder no freedom, so one differing pixel is a fault.
    """
    if "cuda" not in hwdevices_available():
        return "this build of FFmpeg knows no NVDEC"
    clip = trial_clip()
    try:
        pictures, on_card = decoded(clip, HWAccel("cuda", allow_software_fallback=False))
    except (av.error.FFmpegError, OSError, RuntimeError, ValueError) as error:
        return f"the card did not decode a trial clip ({getattr(error, 'strerror', None) or error})"
    if not on_card:
        return "the trial clip was decoded by the processor after all"
    expected, _ = decoded(clip, None)
    if pictures.shape != expected.shape:
        return f"the card gave {len(pictures)} of {len(expected)} frames of a trial clip"
    if wrong := int(np.count_nonzero(pictures != expected)):
        return f"the card decoded {wrong} of {expected.size} samples of a trial clip wrongly"
    return None


def decoded(clip: bytes, hardware: HWAccel | None) -> tuple[NDArray[np.uint8], bool]:
    """All planes of all frames, and whether the card decoded them."""
    with av.open(io.BytesIO(clip), "r", hwaccel=hardware) as container:
        stream = container.streams.video[0]
        planes = [frame.reformat(format="yuv420p").to_ndarray() for frame in container.decode(stream)]
        return np.stack(cast("list[NDArray[np.uint8]]", planes)), stream.codec_context.is_hwaccel


def trial_clip() -> bytes:
    """A tiny H.264 file of moving texture."""
    file = io.BytesIO()
    texture = np.random.default_rng(0).integers(0, 255, (SIDE_PX, SIDE_PX, 3), dtype=np.uint8)
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=24)
        stream.width, stream.height, stream.pix_fmt = SIDE_PX, SIDE_PX, "yuv420p"
        for shift in range(NUM_FRAMES):
            frame = av.VideoFrame.from_ndarray(np.roll(texture, 3 * shift, axis=1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()
