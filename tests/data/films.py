"""Films whose every frame shows its number and whose every millisecond of sound is unlike every other.

Stronger than one flash and one click: each clip tells which frame stands where, and by how much its sound is off.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.video.frame import VideoFrame
from numpy.typing import NDArray

from data import media_write

SIDE, BITS = 64, 8
DURATION_S = 3.0
TICK = Fraction(1, 90000)
PERIOD_S = 8
"""After so long the noise repeats itself, s."""
BLOCK = 960
GAINS = {"mono": [1.0], "stereo": [1.0, 0.5], "5.1": [0.5, 0.25, 0, 0, 0, 0]}
"""A right side that is half as loud, and nothing elsewhere."""
COARSE = ("matroska", "webm", "flv")
"""Containers whose timestamps are milliseconds."""
ENCODERS = {
    "libvpx-vp9": {"deadline": "realtime", "cpu-used": "8", "crf": "20", "lag-in-frames": "0"},
    "mpeg2video": {"b": "2000000"},
    "mpeg4": {"b": "2000000"},
}
"""Settings of all but x264 and x265."""
Picture = Callable[[int], NDArray[np.uint8]]


class Film(NamedTuple):
    """How a film is written."""

    container: str = "mp4"
    audio: str = "aac"
    rate: Fraction | int = 24
    hz: int = 48000
    layout: str = "stereo"
    video_start_s: Fraction = Fraction(0)
    audio_start_s: Fraction = Fraction(0)
    video: str = "libx264"
    options: tuple[tuple[str, str], ...] = ()
    codec_options: tuple[tuple[str, str], ...] = ()
    varies: bool = False
    priming_s: float = 0.0
    """What the encoder put before the sound, where no edit list hides it: the muxer then moves all frames but the first
    back by as much, and holds the first one longer."""
    rotation_deg: int = 0
    """Clockwise turn that a player is asked for; the picture is stored lying down."""
    trimmed_frames: int = 0
    """So many frames, and as much sound, are in the file but left out by its edit list."""


class Truth(NamedTuple):
    """What a reader must find."""

    times: list[float]
    """When each frame is shown, s from the first."""
    numbers: list[int]
    sound_s: float
    """When the sound's first sample is due on the picture's timeline, s."""
    duration_s: float
    """From the first frame to the end of the sound that was written."""


def numbered(index: int) -> NDArray[np.uint8]:
    """A picture of its own number: eight columns, white for a 1."""
    columns = [220 if index >> bit & 1 else 30 for bit in range(BITS)]
    row = np.repeat(np.array(columns, np.uint8), SIDE // BITS)
    return np.broadcast_to(row[None, :, None], (SIDE, SIDE, 3)).copy()


def number_in(picture: NDArray[np.uint8]) -> int:
    bits = picture[:, :, 0].reshape(SIDE, BITS, -1)[:, :, 2:-2].mean(axis=(0, 2)) > 128
    return int(sum(1 << bit for bit, on in enumerate(bits) if on))


@functools.cache
def noise(hz: int) -> NDArray[np.float32]:
    """`PERIOD_S` of noise between 150 and 3000 Hz, the same whatever the rate: all its harmonics, at random phases."""
    random = np.random.default_rng(11)
    spectrum = np.zeros(PERIOD_S * hz // 2 + 1, complex)
    low, high = 150 * PERIOD_S, 3000 * PERIOD_S
    spectrum[low:high] = np.exp(2j * np.pi * random.random(high - low))
    wave = np.fft.irfft(spectrum, PERIOD_S * hz)
    return (0.15 * wave / wave.std()).clip(-1, 1).astype(np.float32)


def shown_at(film: Film) -> list[Fraction]:
    """When each written frame is shown, s from the first."""
    count = int(DURATION_S * Fraction(film.rate))
    if not film.varies:
        return [index / Fraction(film.rate) for index in range(count)]
    steps = np.random.default_rng(5).integers(1, 4, count)  # one to three frames long
    ends = [int(value) for value in np.cumsum([0, *steps[:-1]])]
    return [end / Fraction(film.rate) for end in ends if end / Fraction(film.rate) < 2 * DURATION_S]


def write(
    path: Path,
    film: Film,
    picture: Picture = numbered,
    sound: NDArray[np.float32] | None = None,
    *,
    silent: bool = False,
) -> Truth:
    """The film as a file; `sound` (T,) instead of noise, or none at all where `silent`."""
    times = shown_at(film)
    length_s = float(times[-1] + 1 / Fraction(film.rate))
    wave = noise(film.hz)[: round(length_s * film.hz)] if sound is None else sound
    tick = tick_of(film)
    with av.open(str(path), "w", format=film.container, options=dict(film.options)) as output:
        video = _video(output, film, tick)
        audio: Any = None if silent else output.add_stream(film.audio, rate=film.hz, layout=film.layout)
        if audio is not None:
            audio.bit_rate = 256_000
        pictures = [(film.video_start_s + time, 0, index) for index, time in enumerate(times)]
        pieces = [(film.audio_start_s + Fraction(at, film.hz), 1, at) for at in range(0, len(wave), BLOCK)]
        for seconds, kind, index in sorted(itertools.chain(pictures, [] if silent else pieces)):
            if kind == 0:
                stored = np.rot90(picture(index), film.rotation_deg // 90)
                frame: Any = VideoFrame.from_ndarray(np.ascontiguousarray(stored), format="rgb24")
                frame.pts, frame.time_base = round(seconds / tick), tick
                output.mux(video.encode(frame))
            else:
                output.mux(audio.encode(_piece(wave[index : index + BLOCK], film, index)))
        for stream in (video, audio):
            if stream is not None:
                output.mux(stream.encode(None))
    if film.rotation_deg:
        media_write._turn(path, film.rotation_deg)
    if film.trimmed_frames:
        _trim(path, film.trimmed_frames / Fraction(film.rate))
    return _truth(film, times, length_s)


def write_sound(path: Path, container: str, codec: str, hz: int, start_s: float = 0.0) -> None:
    """`DURATION_S` of noise as a file of its own, whose timestamps begin at `start_s`."""
    film = Film(container, codec, hz=hz, audio_start_s=Fraction(start_s))
    wave = noise(hz)[: round(DURATION_S * hz)]
    with av.open(str(path), "w", format=container) as output:
        audio: Any = output.add_stream(codec, rate=hz, layout="stereo")
        audio.bit_rate = 256_000
        for index in range(0, len(wave), BLOCK):
            output.mux(audio.encode(_piece(wave[index : index + BLOCK], film, index)))
        output.mux(audio.encode(None))


def _video(output: Any, film: Film, tick: Fraction) -> Any:
    video = output.add_stream(film.video, rate=film.rate)
    video.width, video.height, video.pix_fmt, video.time_base = SIDE, SIDE, "yuv420p", tick
    video.codec_context.time_base, video.codec_context.gop_size = tick, 24
    quality = ENCODERS.get(film.video, {"crf": "12", "preset": "ultrafast"})
    video.options = {**quality, **dict(film.codec_options)}
    return video


def tick_of(film: Film) -> Fraction:
    """What timestamps are given in; old codecs count frames."""
    if film.container in COARSE:
        return Fraction(1, 1000)
    return 1 / Fraction(film.rate) if film.container == "avi" or film.video.startswith("mpeg") else TICK


def _piece(mono: NDArray[np.float32], film: Film, index: int) -> AudioFrame:
    samples = (np.array(GAINS[film.layout])[:, None] * mono[None] * 32767).astype(np.int16)
    frame = AudioFrame.from_ndarray(samples.T.reshape(1, -1).copy(), format="s16", layout=film.layout)
    frame.sample_rate, frame.time_base = film.hz, Fraction(1, film.hz)
    frame.pts = index + round(film.audio_start_s * film.hz)
    return frame


def _trim(path: Path, seconds: Fraction) -> None:
    """Let every track's edit list begin later, as an editor that cuts without encoding does."""
    content = bytearray(path.read_bytes())
    place = content.find(b"elst")
    while place >= 0:
        length, start = struct.unpack(">Ii", content[place + 12 : place + 20])
        scale = struct.unpack(">I", content[(clock := content.find(b"mdhd", place)) + 16 : clock + 20])[0]
        struct.pack_into(">Ii", content, place + 12, length - round(seconds * 1000), start + round(seconds * scale))
        place = content.find(b"elst", place + 1)
    path.write_bytes(content)


def _truth(film: Film, times: list[Fraction], length_s: float) -> Truth:
    first = film.trimmed_frames
    trimmed_s = times[first]
    kept = [float(time - trimmed_s) + (film.priming_s if index else 0.0) for index, time in enumerate(times[first:])]
    sound_s = float(film.audio_start_s - film.video_start_s - trimmed_s) + film.priming_s
    return Truth(kept, list(range(first, len(times))), sound_s, sound_s + length_s)
