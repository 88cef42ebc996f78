"""What each frame of a source is like, in the one pass that decodes it. F frame, H height, W width, C channel.

Also E sample (a frame with a vector), D value of a vector, J thumbnail, B byte.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

import cv2
import numpy as np
from numpy.typing import NDArray

from data import semantics
from data.sensing import Sensing

cv = cast(Any, cv2)
"""Its types know neither numbers as operands nor what comes back."""
TINY_PX = (16, 9)
"""Width and height of the picture kept of every frame, whatever its aspect: 432 bytes, 37 MB for an hour at 24 fps."""
FLOW_PX = 256
"""Long side of the grid that motion is measured on, so that its noise is the same for every source."""
FLOW_RATE = 12.0
"""Pairs of neighbouring frames a second whose motion is measured; the rest is between them."""
MOVED_LEVELS = 2
"""Mean difference in 8 px, of 255, below which nothing moved: flow has no hold in flat areas and drifts there."""
SAMPLE_RATE = 2.0
"""Vectors a second where nothing happens: a scene shorter than half a second holds no clip."""
ASIDE_S = (0.05, 0.25, 0.5, 0.9)
"""Distances either side of a possible cut at which vectors are taken, s."""
SAMPLE_GAP_S = 0.1
"""A vector this near is not taken again, s, so that flicker costs little."""
PROPOSED = 0.06
"""Change from which on a frame may open a shot: half of PySceneDetect's content threshold of 27 of 255."""
BLACK_LEVEL, BLACK_SHARE = 26, 0.98
"""A frame is black where this share of it is below this level of 255. Source: the defaults of FFmpeg's blackdetect."""
BAR_LEVEL = 32
"""Brightest pixel of a row or column of a bar, of 255: black is coded as 16 and may ring."""
SAME_LEVELS = 2.0
"""Largest mean difference of any 8 px block, of 255, in a frame that repeats one before; still pictures differ by 1."""
SHOWN_S = 0.001
"""A frame counts as shown this long before its timestamp, s: Matroska rounds to milliseconds."""
BLURRING_MOTION = 0.25
"""Mean motion, diagonals a second, that explains half of a blur: 2 % of the diagonal in half a frame at 12 a second."""
THUMB_PX, THUMB_QUALITY, THUMB_S = 160, 80, 1.0
"""Long side, JPEG quality and distance of thumbnails: 4 KB each."""


@dataclass(frozen=True)
class Track:
    """One source's pictures as numbers; times are seconds since the first frame shown."""

    times_s: NDArray[np.float64]
    """(F,) when each is shown, rising."""
    change: NDArray[np.float32]
    """(F,) `change` from the frame before, 0 for the first."""
    luma: NDArray[np.float32]
    """(F,) mean, 0–1."""
    black: NDArray[np.bool_]
    """(F,)"""
    repeat: NDArray[np.bool_]
    """(F,) whether it shows nothing that frames before did not show."""
    sharpness: NDArray[np.float32]
    """(F,) variance of the Laplacian of 8-bit luma."""
    motion: NDArray[np.float32]
    """(F,) mean of the optical flow from the frame before, picture diagonals a second; NaN where not measured."""
    camera: NDArray[np.float32]
    """(F,) median of the same: what most of the picture does."""
    bars: NDArray[np.float32]
    """(F, 4) share of the height (top, bottom) or width (left, right) that is a black bar."""
    tiny_FHWC: NDArray[np.uint8]
    """(F, 9, 16, 3) RGB."""
    cut_chance: NDArray[np.float32]
    """(F,) of a second proposer that a shot ends with this frame; empty without one."""
    sample_frames: NDArray[np.int64]
    """(E,) frames with a vector, rising."""
    sample_vectors: NDArray[np.float16]
    """(E, D) unit vectors."""
    thumb_frames: NDArray[np.int64]
    """(J,) frames with a thumbnail, rising."""
    thumb_ends: NDArray[np.int64]
    """(J,) where each one's bytes end."""
    thumb_bytes: NDArray[np.uint8]
    """(B,) JPEG files, one behind the other."""
    encoder: str = "histogram"
    """What made the vectors, with its weights' hash."""

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything as named arrays."""
        return {field.name: np.asarray(getattr(self, field.name)) for field in fields(self)}

    @staticmethod
    def from_arrays(arrays: dict[str, NDArray[Any]]) -> Track:
        """What `to_arrays` gave."""
        values: dict[str, Any] = {field.name: arrays[field.name] for field in fields(Track)}
        values["encoder"] = str(arrays["encoder"])
        return Track(**values)

    def thumbnail(self, seconds: float) -> bytes:
        """The JPEG file of the frame nearest to a time.

        Raises:
            ValueError: there are no thumbnails.
        """
        if not len(self.thumb_frames):
            raise ValueError("the track holds no thumbnail")
        at = int(np.abs(self.times_s[self.thumb_frames] - seconds).argmin())
        start = int(self.thumb_ends[at - 1]) if at else 0
        return self.thumb_bytes[start : int(self.thumb_ends[at])].tobytes()


class PictureSense:
    """Takes every shown picture once, in order, and holds about a second of them."""

    def __init__(self, sensing: Sensing) -> None:
        self._encoder = semantics.encoder(sensing)
        self._chance = semantics.proposer(sensing)
        self._flow = cv.DISOpticalFlow_create(cv.DISOPTICAL_FLOW_PRESET_ULTRAFAST)
        self._rows: list[tuple[float, ...]] = []
        self._times: list[float] = []
        self._tiny: list[NDArray[np.uint8]] = []
        self._vectors: dict[int, NDArray[np.float16]] = {}
        self._thumbs: dict[int, NDArray[np.uint8]] = {}
        self._recent: deque[tuple[int, float, NDArray[np.uint8]]] = deque()
        self._wanted: list[float] = []
        self._next_sample = self._next_flow = self._next_thumb = 0.0
        self._before: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None = None
        self._anchor: NDArray[np.uint8] | None = None

    def take(self, seconds: float, picture_HWC: NDArray[np.uint8]) -> None:
        """The next picture, upright RGB, which nobody may write to again; one whose time does not rise is never shown."""
        if self._times and seconds <= self._times[-1]:
            return
        if self._before is not None and self._before[0].shape[:2] != picture_HWC.shape[:2]:
            height, width = self._before[0].shape[:2]
            picture_HWC = cast(NDArray[np.uint8], cv.resize(picture_HWC, (width, height)))
        hsv = cv.cvtColor(picture_HWC, cv.COLOR_RGB2HSV)
        grey = cv.cvtColor(picture_HWC, cv.COLOR_RGB2GRAY)
        changed = 0.0 if self._before is None else change(self._before[0], hsv)
        motion = self._motion(seconds, grey)
        repeats = self._repeats(grey)
        sharpness = float(cv.meanStdDev(cv.Laplacian(grey, cv.CV_16S))[1][0, 0]) ** 2
        luma = float(cv.mean(grey)[0]) / 255
        self._rows.append((changed, luma, float(is_black(grey)), float(repeats), sharpness, *motion, *black_bars(grey)))
        self._tiny.append(cast(NDArray[np.uint8], cv.resize(picture_HWC, TINY_PX, interpolation=cv.INTER_AREA)))
        self._times.append(seconds)
        self._before = (hsv, grey)
        if self._chance is not None:
            self._chance.take(picture_HWC)
        self._recent.append((len(self._times) - 1, seconds, picture_HWC))
        self._sample(seconds, proposed=changed >= PROPOSED)

    def finish(self) -> Track:
        """All numbers.

        Raises:
            ValueError: there were no pictures.
        """
        if not self._times:
            raise ValueError("no frames")
        if not self._vectors or max(self._vectors) != len(self._times) - 1:
            self._look(len(self._times) - 1, self._recent[-1][2])
        rows = np.array(self._rows, np.float32)
        frames, thumbs = sorted(self._vectors), sorted(self._thumbs)
        return Track(
            times_s=np.array(self._times),
            change=rows[:, 0],
            luma=rows[:, 1],
            black=rows[:, 2] > 0,
            repeat=rows[:, 3] > 0,
            sharpness=rows[:, 4],
            motion=rows[:, 5],
            camera=rows[:, 6],
            bars=rows[:, 7:],
            tiny_FHWC=np.stack(self._tiny),
            cut_chance=np.zeros(0, np.float32) if self._chance is None else self._chance.finish(),
            sample_frames=np.array(frames, np.int64),
            sample_vectors=np.stack([self._vectors[frame] for frame in frames]),
            thumb_frames=np.array(thumbs, np.int64),
            thumb_ends=np.cumsum([len(self._thumbs[frame]) for frame in thumbs], dtype=np.int64),
            thumb_bytes=np.concatenate([np.zeros(0, np.uint8), *(self._thumbs[frame] for frame in thumbs)]),
            encoder=self._encoder.name,
        )

    def _motion(self, seconds: float, grey: NDArray[np.uint8]) -> tuple[float, float]:
        """Mean and median of the flow from the frame before, diagonals a second; NaN where it is not due."""
        if self._before is None or seconds < self._next_flow:
            return float("nan"), float("nan")
        self._next_flow = max(self._next_flow + 1 / FLOW_RATE, seconds + 0.5 / FLOW_RATE)
        before, after = on_grid(self._before[1]), on_grid(grey)
        flow = cast(NDArray[np.float32], self._flow.calc(before, after, None))
        moved = cv.blur(cv.absdiff(before, after), (8, 8))[::2, ::2] >= MOVED_LEVELS  # flat areas have no flow
        length = np.hypot(flow[::2, ::2, 0], flow[::2, ::2, 1]) * moved  # a quarter of the vectors tells the same
        scale = float(np.hypot(*after.shape)) * (seconds - self._times[-1])
        middle = length.size // 2
        return float(length.mean()) / scale, float(np.partition(length.ravel(), middle)[middle]) / scale

    def _repeats(self, grey: NDArray[np.uint8]) -> bool:
        """Whether the picture shows nothing new since the last one that did; slow motion adds up and is no repeat."""
        if self._anchor is not None:
            height, width = grey.shape
            size = (max(1, width // 8), max(1, height // 8))
            blocks = cv.resize(cv.absdiff(self._anchor, grey), size, interpolation=cv.INTER_AREA)
            if cv.minMaxLoc(blocks)[1] < SAME_LEVELS:
                return True
        self._anchor = grey
        return False

    def _sample(self, seconds: float, *, proposed: bool) -> None:
        """Take vectors and thumbnails that are due now, and around a possible cut."""
        index, _, picture = self._recent[-1]
        if proposed:
            for past in ASIDE_S:
                frame, _, seen = min(self._recent, key=lambda item: abs(item[1] - (seconds - past)))
                self._look(frame, seen)
            self._wanted = sorted({*self._wanted, *(seconds + ahead for ahead in ASIDE_S)})
        due = seconds >= self._next_sample
        while self._wanted and self._wanted[0] <= seconds:
            due = bool(self._wanted.pop(0))
        if due:
            self._look(index, picture)
        if seconds >= self._next_sample:
            self._next_sample = max(self._next_sample + 1 / SAMPLE_RATE, seconds + 0.5 / SAMPLE_RATE)
        if seconds >= self._next_thumb:
            self._thumbs[index] = thumbnail(picture)
            self._next_thumb = seconds + THUMB_S
        elif proposed:  # the shot's own first picture, once what mixes with the one before is over
            self._next_thumb = min(self._next_thumb, seconds + ASIDE_S[1])
        while self._recent[0][1] < seconds - ASIDE_S[-1] and len(self._recent) > 1:
            self._recent.popleft()

    def _look(self, frame: int, picture: NDArray[np.uint8]) -> None:
        """Take a frame's vector, unless one lies very near."""
        now = self._times[frame]
        if all(abs(self._times[other] - now) >= SAMPLE_GAP_S for other in list(self._vectors)[-64:]):
            self._vectors[frame] = self._encoder.embed(picture).astype(np.float16)


def change(before_HWC: NDArray[np.uint8], after_HWC: NDArray[np.uint8]) -> float:
    """How different two HSV pictures (as OpenCV has them, hue 0–179) are, 0–1.

    Mean difference in hue, saturation and value, as PySceneDetect's content detector measures it
    (github.com/Breakthrough/PySceneDetect), but hue is a circle and counts as far as there is colour.
    """
    difference = cv.absdiff(before_HWC, after_HWC)
    hue, saturation, value = cv.split(difference)
    colour = cv.min(cv.extractChannel(before_HWC, 1), cv.extractChannel(after_HWC, 1))
    turned = cv.mean(cv.multiply(cv.min(hue, cv.subtract(180, hue)), colour, scale=1 / 90, dtype=cv.CV_8U))[0]
    return float(turned + cv.mean(saturation)[0] + cv.mean(value)[0]) / (3 * 255)


def is_black(grey_HW: NDArray[np.uint8]) -> bool:
    """Whether nearly all of a picture is dark."""
    return int(np.count_nonzero(grey_HW < BLACK_LEVEL)) >= BLACK_SHARE * grey_HW.size


def black_bars(grey_HW: NDArray[np.uint8]) -> tuple[float, float, float, float]:
    """Shares of height and width that are black from the top, bottom, left and right edge inwards."""
    rows = grey_HW.max(axis=1) > BAR_LEVEL
    columns = grey_HW.max(axis=0) > BAR_LEVEL
    if not rows.any():
        return 1.0, 1.0, 1.0, 1.0
    height, width = grey_HW.shape
    top, bottom = int(rows.argmax()), int(rows[::-1].argmax())
    left, right = int(columns.argmax()), int(columns[::-1].argmax())
    return top / height, bottom / height, left / width, right / width


def on_grid(grey_HW: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The picture with its long side at `FLOW_PX` and its short one no shorter than the flow's coarsest patch allows."""
    height, width = grey_HW.shape
    scale = FLOW_PX / max(height, width)
    size = (max(32, round(width * scale)), max(32, round(height * scale)))
    return grey_HW if size == (width, height) else cast(NDArray[np.uint8], cv.resize(grey_HW, size))


def thumbnail(picture_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The bytes (B,) of a small JPEG file; the same picture gives the same bytes."""
    height, width = picture_HWC.shape[:2]
    scale = min(1.0, THUMB_PX / max(height, width))
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    small = cv.cvtColor(cv.resize(picture_HWC, size, interpolation=cv.INTER_AREA), cv.COLOR_RGB2BGR)
    return cast(NDArray[np.uint8], cv.imencode(".jpg", small, [cv.IMWRITE_JPEG_QUALITY, THUMB_QUALITY])[1]).ravel()


class Look(NamedTuple):
    """What a span looks like; units as in `records.Clip`."""

    motion_p50: float
    motion_p90: float
    luma: float
    sharpness_p90: float
    motion_blur_index: float
    black_share: float
    freeze_share: float
    letterbox_share: float


def look(track: Track, start_s: float, end_s: float) -> Look:
    """What the frames shown within a span look like, the one on screen at its start among them."""
    first = max(0, int(np.searchsorted(track.times_s, start_s + SHOWN_S, side="right")) - 1)
    last = max(first + 1, int(np.searchsorted(track.times_s, end_s - SHOWN_S)))
    span = slice(first, last)
    motion = track.motion[first + 1 : last]  # how the first frame was reached is no part of the span
    motion = motion[~np.isnan(motion)]
    slow, fast = np.percentile(motion, [50, 90]) if len(motion) else (0.0, 0.0)
    repeat = track.repeat[first + 1 : last]
    return Look(
        motion_p50=float(slow),
        motion_p90=float(fast),
        luma=float(track.luma[span].mean()),
        sharpness_p90=float(np.percentile(track.sharpness[span], 90)),
        motion_blur_index=motion_blur(track, span),
        black_share=float(track.black[span].mean()),
        freeze_share=float(repeat.mean()) if len(repeat) else 1.0,
        letterbox_share=letterbox(track.bars[span][~track.black[span]]),
    )


def motion_blur(track: Track, span: slice) -> float:
    """Sharpness missing from the source's sharp frames, as far as motion explains it, mean over the span, 0–1."""
    sharp = max(float(np.percentile(track.sharpness, 90)), 1e-6)
    missing = np.clip(1 - track.sharpness[span] / sharp, 0, 1)
    known = np.flatnonzero(~np.isnan(track.motion))
    if not len(known):
        return 0.0
    frames = np.arange(int(span.start), int(span.stop))
    motion = np.interp(frames, known, track.motion[known])
    return float((missing * motion / (motion + BLURRING_MOTION)).mean())


def letterbox(bars: NDArray[np.float32]) -> float:
    """Share of the picture that bars (F, 4) cover in every frame, as far as opposite ones are equally wide."""
    if not len(bars):
        return 0.0
    top, bottom, left, right = (float(side) for side in bars.min(axis=0))
    return 1 - (1 - 2 * min(top, bottom)) * (1 - 2 * min(left, right))
