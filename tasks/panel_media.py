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
from data.media import Unreadable, probe, read_clip, write_media
from data.records import ClipShape
from tasks.panel_plan import CANDIDATE, LOW_ANCHOR, REFERENCE

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


class Film(NamedTuple):
    """Picture and sound of one system."""

    frames_FHWC: NDArray[np.uint8]
    waveform_CT: NDArray[np.float32]


class Level(NamedTuple):
    """How loud a film may be made."""

    loudness_lufs: float | None
    """None where it is silent."""
    highest_lufs: float
    """Where its true peak reaches `PEAK_DB`."""


def films_of(paths: Mapping[str, Path], max_duration_s: float) -> tuple[dict[str, Film], int]:
    """Each system's film of one source, with a low anchor made from the reference, and the frame rate of all.

    Size and rate are the candidate's, the length is the shortest's.

    Raises:
        Unreadable: one of the files cannot be shown; the message names its system.
    """
    facts = {name: known(name, path) for name, path in paths.items()}
    rate = max(1, round(facts[CANDIDATE].frame_rate))
    length_s = min(max_duration_s, *(fact.duration_s for fact in facts.values()))
    shape = ClipShape(
        num_frames=max(1, math.floor(length_s * rate + 1e-3)),
        frame_rate=rate,
        height=facts[CANDIDATE].height // 2 * 2,
        width=facts[CANDIDATE].width // 2 * 2,
        sample_rate_hz=SAMPLE_RATE_HZ,
    )
    films = {name: Film(*read_clip(path, 0.0, None, shape)) for name, path in paths.items()}
    films[LOW_ANCHOR] = low_anchor(films[REFERENCE], rate)
    return films, rate


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


def low_anchor(film: Film, frame_rate: int) -> Film:
    """The reference made clearly bad on every scale: coarse picture, dull sound, sound too late."""
    height, width = film.frames_FHWC.shape[1:3]
    small = (max(1, width // ANCHOR_SCALE), max(1, height // ANCHOR_SCALE))
    pictures = cast("Iterable[NDArray[np.uint8]]", film.frames_FHWC)
    coarse = (cv2.resize(picture, small, interpolation=cv2.INTER_AREA) for picture in pictures)
    frames = [cast("NDArray[np.uint8]", cv2.resize(picture, (width, height))) for picture in coarse]
    dull_TC = soxr.resample(soxr.resample(film.waveform_CT.T, SAMPLE_RATE_HZ, ANCHOR_HZ), ANCHOR_HZ, SAMPLE_RATE_HZ)
    waveform_CT = np.zeros_like(film.waveform_CT)
    late_s = min(ANCHOR_DELAY_S, len(film.frames_FHWC) / frame_rate / 4)
    late = round(late_s * SAMPLE_RATE_HZ)
    kept_CT = np.asarray(dull_TC, np.float32).T[:, : waveform_CT.shape[1] - late]
    waveform_CT[:, late : late + kept_CT.shape[1]] = kept_CT
    return Film(np.stack(frames), waveform_CT)


def level(waveform_CT: NDArray[np.float32]) -> Level:
    """How loud sound is, and could be made."""
    meter = Meter(SAMPLE_RATE_HZ, ("FL", "FR"))
    starts = cast("NDArray[np.int64]", np.arange(0, waveform_CT.shape[1], SAMPLE_RATE_HZ // 10, dtype=np.int64))
    loudness = integrated(meter.take(waveform_CT, starts)) if waveform_CT.shape[1] else None
    if loudness is None:
        return Level(None, math.inf)
    return Level(loudness, loudness + PEAK_DB - 20 * math.log10(max(meter.true_peak, 1e-9)))


def levelled(films: Mapping[str, Film], wanted_lufs: float) -> tuple[dict[str, Film], dict[str, float | None], float]:
    """The films of one source equally loud, the gain put on each, dB, and the loudness reached, LUFS.

    That is less than wanted where a peak would clip; then all films of the source are that quiet.
    """
    levels = {name: level(film.waveform_CT) for name, film in films.items()}
    target = min(wanted_lufs, *(found.highest_lufs for found in levels.values()))
    gains = {name: None if each.loudness_lufs is None else target - each.loudness_lufs for name, each in levels.items()}
    equal = {
        name: film._replace(waveform_CT=(film.waveform_CT * 10 ** ((gains[name] or 0.0) / 20)).astype(np.float32))
        for name, film in films.items()
    }
    return equal, gains, target


def write(path: Path, film: Film, frame_rate: int) -> None:
    """Write a film like all others: MP4, H.264, stereo AAC, no metadata, no time of writing."""
    frames = film.frames_FHWC
    times = max(1, -(-MIN_SIDE_PX // min(frames.shape[1:3])))
    shown = (frame.repeat(times, axis=0).repeat(times, axis=1) for frame in frames)
    write_media(path, shown, film.waveform_CT, frame_rate=frame_rate, sample_rate_hz=SAMPLE_RATE_HZ, crf=CRF)
