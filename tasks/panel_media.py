"""The films of a panel: every system's of one source at the same size, rate, length, loudness and coding, nothing else in them.

Legend: F frames, H height, W width, C 3 colours or 2 channels, T samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, cast

import cv2
import numpy as np
import soxr
from numpy.typing import NDArray

from data.loudness import Meter, integrated
from data.media import Unreadable, probe, read_clip, read_excerpt, write_media
from data.records import ClipShape
from tasks.panel_plan import CANDIDATE, LOW_ANCHOR, REFERENCE

Frame = NDArray[np.uint8]
Waveform = NDArray[np.float32]
SAMPLE_RATE_HZ = 48000
CRF = 12
"""Of x264: no difference can be seen, and every system is coded once more alike."""
MIN_SIDE_PX = 128
"""Smaller films are shown with their pixels repeated."""
PEAK_DB = -1.0
"""True peak that no film exceeds, dBTP. Source: EBU R 128."""
ANCHOR_SCALE, ANCHOR_HZ, ANCHOR_DELAY_S = 8, 7000, 0.4
"""The low anchor's picture is an eighth as fine, its sound ends at 3.5 kHz (ITU-R BS.1534's low anchor) and comes far
later than anyone accepts (ITU-R BT.1359: 185 ms)."""


class Level(NamedTuple):
    """How loud a film may be made."""

    loudness_lufs: float | None
    """None where it is silent."""
    highest_lufs: float
    """Where its true peak reaches `PEAK_DB`."""


def shape_of(paths: Mapping[str, Path], max_duration_s: float) -> ClipShape:
    """What all films of one source are: of the candidate's size and rate, and as long as the shortest.

    Raises:
        Unreadable: one of the files cannot be shown; the message names its system.
    """
    facts = {name: known(name, path) for name, path in paths.items()}
    rate = max(1, round(facts[CANDIDATE].frame_rate))
    length_s = min(max_duration_s, *(fact.duration_s for fact in facts.values()))
    return ClipShape(
        num_frames=max(1, math.floor(length_s * rate + 1e-3)),
        frame_rate=rate,
        height=facts[CANDIDATE].height // 2 * 2,
        width=facts[CANDIDATE].width // 2 * 2,
        sample_rate_hz=SAMPLE_RATE_HZ,
    )


class Facts(NamedTuple):
    """What decides the common shape."""

    width: int
    height: int
    frame_rate: float
    duration_s: float


def known(system: str, path: Path) -> Facts:
    """Facts of a system's file; Unreadable where it cannot be shown."""
    found = probe(path)
    if error := found.get("error"):
        raise Unreadable(f"{system}: {path} {error}")
    above, _, below = str(found["frame_rate"]).partition("/")
    width, height = cast("int", found["width"]), cast("int", found["height"])
    if width < 2 or height < 2 or float(above) <= 0:
        raise Unreadable(f"{system}: {path} shows no moving picture")
    return Facts(width, height, float(above) / float(below or 1), float(cast("float", found["video_duration_s"])))


def sounds_of(paths: Mapping[str, Path], shape: ClipShape) -> dict[str, Waveform]:
    """Each system's sound (2, T), and the low anchor's."""
    sounds = {name: read_excerpt(path, 0.0, float(shape.duration_s), SAMPLE_RATE_HZ) for name, path in paths.items()}
    return sounds | {LOW_ANCHOR: dull_and_late(sounds[REFERENCE])}


def dull_and_late(waveform_CT: Waveform) -> Waveform:
    """The low anchor's sound, made from the reference's."""
    dull_TC = soxr.resample(soxr.resample(waveform_CT.T, SAMPLE_RATE_HZ, ANCHOR_HZ), ANCHOR_HZ, SAMPLE_RATE_HZ)
    result_CT = np.zeros_like(waveform_CT)
    late = min(round(ANCHOR_DELAY_S * SAMPLE_RATE_HZ), waveform_CT.shape[1] // 4)
    kept_CT = np.asarray(dull_TC, np.float32).T[:, : waveform_CT.shape[1] - late]
    result_CT[:, late : late + kept_CT.shape[1]] = kept_CT
    return result_CT


def coarse(frame_HWC: Frame) -> Frame:
    """A frame of the low anchor, made from the reference's."""
    height, width = frame_HWC.shape[:2]
    small = (max(1, width // ANCHOR_SCALE), max(1, height // ANCHOR_SCALE))
    shrunk = cast("Frame", cv2.resize(frame_HWC, small, interpolation=cv2.INTER_AREA))
    return cast("Frame", cv2.resize(shrunk, (width, height)))


def level(waveform_CT: Waveform) -> Level:
    """How loud sound is, and could be made."""
    meter = Meter(SAMPLE_RATE_HZ, ("FL", "FR"))
    starts = cast("NDArray[np.int64]", np.arange(0, waveform_CT.shape[1], SAMPLE_RATE_HZ // 10, dtype=np.int64))
    loudness = integrated(meter.take(waveform_CT, starts)) if waveform_CT.shape[1] else None
    if loudness is None:
        return Level(None, math.inf)
    return Level(loudness, loudness + PEAK_DB - 20 * math.log10(max(meter.true_peak, 1e-9)))


def gains_of(sounds: Mapping[str, Waveform], wanted_lufs: float) -> tuple[dict[str, float | None], float]:
    """What makes the films of one source equally loud: the gain of each, dB, and the loudness reached, LUFS.

    That is less than wanted where a peak would clip; then all films of the source are that quiet.
    """
    levels = {name: level(waveform_CT) for name, waveform_CT in sounds.items()}
    target = min(wanted_lufs, *(found.highest_lufs for found in levels.values()))
    gains = {name: None if each.loudness_lufs is None else target - each.loudness_lufs for name, each in levels.items()}
    return gains, target


def amplified(waveform_CT: Waveform, gain_db: float | None) -> Waveform:
    """The sound with its gain; silence stays."""
    return (waveform_CT * 10 ** ((gain_db or 0.0) / 20)).astype(np.float32)


def write(path: Path, source: Path, shape: ClipShape, waveform_CT: Waveform, *, is_low_anchor: bool) -> None:
    """Write the picture of a file with the given sound like all others: MP4, H.264, stereo AAC, no metadata, no date.

    Raises:
        Unreadable: the picture does not decode.
    """
    frames_FHWC, _ = read_clip(source, 0.0, None, shape)
    times = max(1, -(-MIN_SIDE_PX // min(shape.height, shape.width)))
    pictures = (coarse(frame) if is_low_anchor else frame for frame in cast("Iterable[Frame]", frames_FHWC))
    shown = (picture.repeat(times, axis=0).repeat(times, axis=1) for picture in pictures)
    write_media(path, shown, waveform_CT, frame_rate=shape.frame_rate, sample_rate_hz=SAMPLE_RATE_HZ, crf=CRF)
