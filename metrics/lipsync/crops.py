"""From a followed face to the pictures and the sound that SyncNet is shown, with the losses of the published way.

Source: run_pipeline.py and SyncNetInstance.py of joonson/syncnet_python (MIT); eval/syncnet_detect.py of
bytedance/LatentSync (Apache-2.0) for AAC. H height, W width, L picture of a track, T sample at 16 kHz.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, cast

import av
import cv2
import numpy as np
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from numpy.typing import NDArray

from metrics.lipsync.distances import median_filter
from metrics.lipsync.faces import Track
from metrics.lipsync.mfcc import RATE_HZ
from metrics.lipsync.syncnet import SIDE_PX

FPS = 25
MEDIAN_FRAMES = 13
PAD_LEVEL = 110
MARGIN = 0.4
"""How much of half the face's side is added left and right; below, twice that."""


def at_25_fps(timed: Iterable[tuple[float, NDArray[np.uint8]]]) -> Iterator[NDArray[np.uint8]]:
    """What is on screen every 40 ms, from pictures and the seconds since the first at which they are shown.

    The last picture is shown as long as the one before it. `data.media_picture.iter_frames` gives such pictures.
    """
    shown, since, interval, count = None, 0.0, 1 / FPS, 0
    for seconds, picture in timed:
        while shown is not None and count / FPS < seconds - 1e-6:
            yield shown
            count += 1
        if shown is not None and seconds > since:
            interval = seconds - since
        shown, since = picture, seconds
    while shown is not None and count / FPS < since + interval - 1e-6:
        yield shown
        count += 1


class Cropper:
    """Cuts one face out of the pictures of its track: BGR, 224 px square."""

    def __init__(self, track: Track) -> None:
        """Smooth the boxes by a median over 13 pictures, beyond whose ends all is 0.

        So the first half side is the smallest of the first seven; a shorter track would have none.

        Raises:
            ValueError: the track is shorter than seven pictures.
        """
        left, top, right, bottom = track.boxes_L4.T
        if len(left) <= MEDIAN_FRAMES // 2:
            raise ValueError(f"a track of {len(left)} pictures cannot be smoothed; it takes {MEDIAN_FRAMES // 2 + 1}")
        raw = (np.maximum(bottom - top, right - left) / 2, (left + right) / 2, (top + bottom) / 2)
        self._half_L, self._x_L, self._y_L = (median_filter(values, MEDIAN_FRAMES) for values in raw)

    def crop(self, picture_HWC: NDArray[np.uint8], index: int) -> NDArray[np.uint8]:
        """The face in picture `index` of the track, from an RGB picture; grey beyond its edges."""
        half, x, y = (float(values[index]) for values in (self._half_L, self._x_L, self._y_L))
        border = int(half * (1 + 2 * MARGIN))
        height, width = picture_HWC.shape[:2]
        top, bottom = cut(y + border - half, y + border + half * (1 + 2 * MARGIN), border, height)
        left, right = cut(x + border - half * (1 + MARGIN), x + border + half * (1 + MARGIN), border, width)
        inside = picture_HWC[max(0, top) : max(0, bottom), max(0, left) : max(0, right), ::-1]
        face = np.full((bottom - top, right - left, 3), PAD_LEVEL, np.uint8)
        face[max(0, -top) :, max(0, -left) :][: inside.shape[0], : inside.shape[1]] = inside
        return resized(face)


def resized(picture_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The picture at 224 px square, bilinear, whatever its shape was."""
    return np.asarray(cv2.resize(picture_HWC, (SIDE_PX, SIDE_PX)), np.uint8)


def cut(start: float, stop: float, border: int, length: int) -> tuple[int, int]:
    """A span of the padded picture, rounded down there as published, in px of the picture itself; never empty."""
    first = min(max(0, int(start)), length + 2 * border - 1) - border
    return first, max(first + 1, min(int(stop), length + 2 * border) - border)


class Jpeg:
    """The round trip of pictures of one size through FFmpeg's JPEG at its default quality, as published.

    Its quality follows the pictures before (200 kbit/s), so each track has its own.
    """

    def __init__(self) -> None:
        self._codec: VideoCodecContext | None = None

    def through(self, picture_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The BGR picture after the round trip."""
        height, width = picture_HWC.shape[:2]
        if self._codec is None:
            codec = av.CodecContext.create("mjpeg", "w")
            codec.width, codec.height, codec.pix_fmt = width, height, "yuvj420p"
            codec.framerate, codec.time_base = Fraction(FPS), Fraction(1, FPS)
            codec.thread_count = 1
            self._codec = codec
        frame = VideoFrame.from_ndarray(np.ascontiguousarray(picture_HWC), format="bgr24").reformat(format="yuvj420p")
        data = b"".join(bytes(packet) for packet in cast("list[Any]", self._codec.encode(frame)))
        return np.asarray(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), np.uint8)


def sixteen_bit(waveform_T: NDArray[np.floating]) -> NDArray[np.int16]:
    """Sound in [-1, 1] as 16-bit samples, the scale that SyncNet was trained on."""
    return np.clip(np.rint(waveform_T * 32768.0), -32768, 32767).astype(np.int16)


def through_aac(sound_T: NDArray[np.int16]) -> NDArray[np.int16]:
    """Sound after FFmpeg's AAC at its default rate, of the same length."""
    stored = io.BytesIO()
    with av.open(stored, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=RATE_HZ, layout="mono")
        frame = av.AudioFrame.from_ndarray(sound_T[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = RATE_HZ, 0, Fraction(1, RATE_HZ)  # or the lead-in is heard
        container.mux([*stream.encode(frame), *stream.encode(None)])
    stored.seek(0)
    resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE_HZ)
    with av.open(stored, "r") as container:
        decoded = [part.to_ndarray()[0] for frame in container.decode(audio=0) for part in resampler.resample(frame)]
    heard = np.concatenate(decoded)[: len(sound_T)]
    return np.pad(heard, (0, len(sound_T) - len(heard)))
