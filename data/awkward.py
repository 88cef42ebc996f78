"""The files users really have, one of each kind, with pictures and sounds of the sample world."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np

from data.media import write_media
from data.world import Scene, scene

RATE_HZ = 48000
DURATION_S = 2.5
SIDE_PX = 96
LATE_S = 0.4
"""How long the picture is alone in the file whose sound starts late, s."""


def awkward(folder: Path, seed: int) -> list[Path]:
    """Write every awkward file and its caption into an existing folder; `seed` is the first scene's."""
    written: list[Path] = []
    for index, (name, make) in enumerate(MAKERS.items()):
        path = folder / name
        caption = make(path, seed + index)
        if caption:
            path.with_suffix(".txt").write_text(caption + "\n", encoding="utf-8")
        written.append(path)
    return written


def _scene(seed: int, frame_rate: int = 24, side_px: int = SIDE_PX) -> Scene:
    return scene("new", seed, DURATION_S, frame_rate, side_px, RATE_HZ)


def _no_sound(path: Path, seed: int) -> str:
    made = _scene(seed)
    write_media(path, made.frames_FHWC, None, frame_rate=24, sample_rate_hz=RATE_HZ)
    return made.caption


def _mono(path: Path, seed: int) -> str:
    made = _scene(seed)
    mono = made.waveform_CT.mean(axis=0, keepdims=True)
    write_media(path, made.frames_FHWC, mono, frame_rate=24, sample_rate_hz=RATE_HZ, layout="mono")
    return made.caption


def _surround(path: Path, seed: int) -> str:
    made = _scene(seed)
    left, right = 0.5 * made.waveform_CT
    silent = np.zeros_like(left)
    channels = np.stack([left, right, 0.5 * (left + right), silent, 0.3 * left, 0.3 * right])
    write_media(path, made.frames_FHWC, channels, frame_rate=24, sample_rate_hz=RATE_HZ, layout="5.1")
    return made.caption


def _variable_rate(path: Path, seed: int) -> str:
    """A screen or phone recording drops frames as it likes: between one and four of 48 a second pass."""
    made = _scene(seed, frame_rate=48)
    steps = np.random.default_rng(seed).integers(1, 5, len(made.frames_FHWC))
    kept = [0, *(int(index) for index in np.cumsum(steps) if index < len(made.frames_FHWC))]
    write_media(
        path,
        made.frames_FHWC[kept],
        made.waveform_CT,
        frame_rate=24,
        sample_rate_hz=RATE_HZ,
        frame_times=[Fraction(index, 48) for index in kept],
    )
    return made.caption


def _phone(path: Path, seed: int) -> str:
    """A phone held upright stores the picture lying on its left side and asks players to turn it clockwise."""
    made = _scene(seed, frame_rate=30, side_px=128)
    narrow = made.frames_FHWC[:, :, np.linspace(0, 127, 96).round().astype(int)]
    lying = np.rot90(narrow, 1, axes=(1, 2))
    write_media(
        path,
        lying,
        made.waveform_CT,
        frame_rate=30,
        sample_rate_hz=RATE_HZ,
        container="mov",
        rotation_deg=90,
    )
    return made.caption


def _late_sound(path: Path, seed: int) -> str:
    made = _scene(seed)
    late = made.waveform_CT[:, round(LATE_S * RATE_HZ) :]
    write_media(path, made.frames_FHWC, late, frame_rate=24, sample_rate_hz=RATE_HZ, sound_start_s=LATE_S)
    return made.caption


def _odd_size(path: Path, seed: int) -> str:
    made = _scene(seed, side_px=127)
    flat = made.frames_FHWC[:, np.linspace(0, 126, 93).round().astype(int)]
    write_media(
        path,
        flat,
        made.waveform_CT,
        frame_rate=24,
        sample_rate_hz=RATE_HZ,
        crf=24,
        container="webm",
        video_codec="libvpx-vp9",
        audio_codec="libopus",
    )
    return made.caption


def _ten_bit(path: Path, seed: int) -> str:
    made = _scene(seed)
    write_media(
        path,
        made.frames_FHWC,
        made.waveform_CT,
        frame_rate=24,
        sample_rate_hz=RATE_HZ,
        container="matroska",
        pixel_format="yuv420p10le",
    )
    return made.caption


def _truncated(path: Path, seed: int) -> str:
    """A download that stopped: the header is whole, two fifths of the content are missing."""
    caption = _plain(path, seed)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 3 // 5])
    return caption


def _text(path: Path, seed: int) -> str:
    path.write_text(f"scene {seed}: to be filmed\n" * 20, encoding="utf-8")
    return "notes that someone saved under the wrong name"


def _plain(path: Path, seed: int) -> str:
    made = _scene(seed)
    write_media(path, made.frames_FHWC, made.waveform_CT, frame_rate=24, sample_rate_hz=RATE_HZ)
    return made.caption


def _no_caption(path: Path, seed: int) -> str:
    _plain(path, seed)
    return ""


MAKERS: dict[str, Callable[[Path, int], str]] = {
    "late_sound.mp4": _late_sound,
    "mono.mp4": _mono,
    "no_caption.mp4": _no_caption,
    "no_sound.mp4": _no_sound,
    "odd_size.webm": _odd_size,
    "phone_upright.mov": _phone,
    "surround_5_1.mp4": _surround,
    "ten_bit.mkv": _ten_bit,
    "text.mp4": _text,
    "truncated.mp4": _truncated,
    "variable_rate.mp4": _variable_rate,
    "мяч 球 ñ.mp4": _plain,
}
"""File name → how it is made; each returns the caption, or "" for none."""
