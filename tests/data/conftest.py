"""Films of every kind, each with a flash and a click at one instant, so that what is read of them can be checked."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from data.media import write_media

HZ, SIDE, FLASH_S, FLASHING_S, LENGTH_S = 48000, 64, Fraction(5, 4), Fraction(1, 12), Fraction(5, 2)


@pytest.fixture(scope="session")
def material() -> SimpleNamespace:
    """What writes files: `film`, `encoded`, `still`, `wav`; and what they show and sound."""
    return SimpleNamespace(
        film=film, encoded=encoded, still=still, wav=wav, picture=picture, sound=sound, flash_s=float(FLASH_S)
    )


def picture(height: int = SIDE, width: int = SIDE, seed: int = 1) -> NDArray[np.uint8]:
    """Blocks of colour, (H, W, 3)."""
    blocks = np.random.default_rng(seed).integers(30, 160, (8, 8, 3)).astype(np.uint8)
    return cv2.resize(blocks, (width, height), interpolation=cv2.INTER_NEAREST).astype(np.uint8)


def pictures(times: Iterable[Fraction], still_HWC: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    """The picture moving across at 24 px a second, white during the flash."""
    for time in times:
        flash = FLASH_S <= time < FLASH_S + FLASHING_S
        yield np.full_like(still_HWC, 250) if flash else np.roll(still_HWC, int(24 * time), axis=1)


def sound(
    num_channels: int = 2, from_s: float = 0.0, to_s: float = float(LENGTH_S), gains: Sequence[float] = ()
) -> NDArray[np.float32]:
    """Quiet noise, another one on every channel, with a click at the flash, (C, T); before 0 there is noise too."""
    click, first = round(float(FLASH_S) * HZ), round(from_s * HZ)
    random = np.random.default_rng(2)
    samples = 0.05 * random.standard_normal((num_channels, round(to_s * HZ)))
    samples[:, click - 12 : click + 12] = 0.9
    before = 0.05 * random.standard_normal((num_channels, max(0, -first)))
    whole = np.concatenate([before, samples[:, max(0, first) :]], axis=1)
    return (whole * np.reshape(gains or [1.0] * num_channels, (-1, 1))).astype(np.float32)


def film(
    path: Path,
    *,
    heard: dict[str, Any] | None = None,
    silent: bool = False,
    seconds: Fraction = LENGTH_S,
    size: tuple[int, int] = (SIDE, SIDE),
    seed: int = 1,
    caption: str | None = "blocks of colour",
    frame_rate: Fraction | int = 24,
    frame_times: Sequence[Fraction] | None = None,
    **options: Any,
) -> Path:
    """Two and a half seconds, with a caption beside them.

    Args:
        heard: Arguments of `sound`.
        size: Height and width, px.
        options: As in `write_media`.
    """
    rate = Fraction(frame_rate)
    times = frame_times or [index / rate for index in range(int(seconds * rate))]
    shown = pictures([time - times[0] for time in times], picture(*size, seed))
    wave = None if silent else sound(**(heard or {}))
    options |= {"frame_rate": rate, "frame_times": frame_times, "sample_rate_hz": HZ}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_media(path, shown, wave, **options)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


def still(path: Path, suffix: str) -> Path:
    """A photograph in the format of a suffix."""
    path.write_bytes(cv2.imencode(suffix, picture())[1].tobytes())
    return path


def wav(num_samples: int) -> bytes:
    """A mono sound file of silence."""
    content = bytes(2 * num_samples)
    head = b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, HZ, 2 * HZ, 2, 16) + b"data"
    return b"RIFF" + struct.pack("<I", len(head) + 4 + len(content)) + head + struct.pack("<I", len(content)) + content


def encoded(
    path: Path,
    codec: str = "libx264",
    pixels: str = "yuv420p",
    sounds: Sequence[tuple[str, str, dict[str, Any] | None]] = (),
    *,
    frames: Iterable[tuple[Fraction, NDArray[np.uint8]]] | None = None,
    num_frames: int = 60,
    transfer: int | None = None,
    default_sound: int | None = None,
    options: dict[str, str] | None = None,
    metadata: dict[str, str] | None = None,
) -> Path:
    """What `write_media` has no setting for, through the library itself, with a caption.

    Args:
        sounds: Codec, layout and arguments of `sound`, of each stream; without the last it holds nothing.
        frames: Times, s, on a grid of 1/24 or 1/24000 s, and pictures; None are the usual ones.
        transfer: Code of the transfer function, with the colours of BT.2020.
    """
    times = [Fraction(index, 24) for index in range(num_frames)]
    shown = list(frames) if frames is not None else list(zip(times, pictures(times, picture()), strict=True))
    tick = Fraction(1, 24) if all((24 * seconds).denominator == 1 for seconds, _ in shown) else Fraction(1, 24000)
    with av.open(str(path), "w", options=options or {}) as output:
        output.metadata.update(metadata or {})
        video: Any = output.add_stream(codec, rate=24)
        (video.height, video.width), video.pix_fmt = shown[0][1].shape[:2], pixels
        video.codec_context.time_base = tick
        if transfer is not None:
            video.codec_context.color_trc, video.codec_context.colorspace = transfer, 9
        heard: list[Any] = [output.add_stream(name, rate=HZ, layout=layout) for name, layout, _ in sounds]
        for number, stream in enumerate(heard):
            if default_sound is not None:
                stream.disposition = av.stream.Disposition.default if number == default_sound else 0
        output.start_encoding()
        for seconds, image in shown:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), "rgb24").reformat(format=pixels)
            frame.pts, frame.time_base = round(seconds / tick), tick
            output.mux(video.encode(frame))
        output.mux(video.encode(None))
        for stream, (_, layout, content) in zip(heard, sounds, strict=True):
            if content is not None:
                output.mux(stream.encode(pcm(sound(**content), layout)))
                output.mux(stream.encode(None))
    path.with_suffix(".txt").write_text("blocks of colour", encoding="utf-8")
    return path


def pcm(samples_CT: NDArray[np.float32], layout: str) -> av.AudioFrame:
    """Samples as 16-bit integers."""
    packed = (samples_CT * 32767).clip(-32768, 32767).astype(np.int16).T.reshape(1, -1)
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(packed), "s16", layout)
    frame.sample_rate, frame.pts, frame.time_base = HZ, 0, Fraction(1, HZ)
    return frame
