"""Picture and sound keep their places through every container, codec, rate and start, wherever a clip begins.

Stronger than one flash and one click: every frame shows its own number, and the sound is noise, of which every
millisecond is unlike every other. So each clip tells which frame stands where, and by how much its sound is off.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import pytest
from av.audio.frame import AudioFrame
from av.video.frame import VideoFrame

from data.media import read_clip
from data.records import ClipShape

SIDE, BITS = 64, 8
SHAPE = ClipShape(num_frames=22, frame_rate=24, height=SIDE, width=SIDE, sample_rate_hz=16000)
DURATION_S = 3.0
TICK = Fraction(1, 90000)
MAX_SKEW_S = 0.001
STARTS_S = (0.0, 0.3125, 1.71)
"""At the beginning, between two frames, and deep inside, behind the second key frame."""


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


PRIMING_S = 1024 / 48000
"""One codec frame, which is what FFmpeg's AAC encoder puts before the sound."""
PLAIN = Film()
SELECTED: dict[str, Film] = {
    "mp4": PLAIN,
    "mp4, 23.976": Film(rate=Fraction(24000, 1001)),
    "mp4, 25 and 44.1 kHz": Film(rate=25, hz=44100),
    "mp4, 29.97 and 8 kHz": Film(rate=Fraction(30000, 1001), hz=8000),
    "mp4, 30 and 96 kHz": Film(rate=30, hz=96000),
    "mp4, 50": Film(rate=50),
    "mp4, 60": Film(rate=60),
    "mp4, variable rate": Film(varies=True),
    "mkv, variable rate, 29.97": Film("matroska", "flac", Fraction(30000, 1001), varies=True),
    "mp4, sound late": Film(audio_start_s=Fraction(2, 5)),
    "mp4, picture late": Film(video_start_s=Fraction(3, 10)),
    "mp4, both late": Film(video_start_s=Fraction(1, 2), audio_start_s=Fraction(7, 10)),
    "mp4, no edit list": Film(options=(("use_editlist", "0"),), priming_s=PRIMING_S),
    "mp4, fragments": Film(options=(("movflags", "frag_keyframe+empty_moov+default_base_moof"),), priming_s=PRIMING_S),
    "mp4, fragments that say when they start": Film(options=(("movflags", "frag_keyframe+delay_moov"),)),
    "mp4, fragments, sound late": Film(
        audio_start_s=Fraction(2, 5), options=(("movflags", "frag_keyframe+empty_moov+delay_moov"),)
    ),
    "mp4, mp3": Film(audio="libmp3lame", hz=44100),
    "mp4, ac3": Film(audio="ac3"),
    "mp4, opus": Film(audio="libopus"),
    "mov, pcm": Film("mov", "pcm_s16le"),
    "mov, pcm, sound late": Film("mov", "pcm_s24le", audio_start_s=Fraction(1, 3), hz=44100),
    "mov, aac, picture late": Film("mov", video_start_s=Fraction(852, 1000), audio_start_s=Fraction(8, 1000)),
    "mkv, opus": Film("matroska", "libopus"),
    "mkv, flac, 96 kHz": Film("matroska", "flac", hz=96000),
    "mkv, ac3": Film("matroska", "ac3"),
    "mkv, mp3": Film("matroska", "libmp3lame", hz=44100),
    "mkv, aac, sound late": Film("matroska", audio_start_s=Fraction(2, 5)),
    "mkv, pcm, picture late": Film("matroska", "pcm_s16le", video_start_s=Fraction(3, 10)),
    "webm": Film("webm", "libopus", video="libvpx-vp9"),
    "webm, sound late": Film("webm", "libopus", video="libvpx-vp9", audio_start_s=Fraction(2, 5)),
    "ts": Film("mpegts"),
    "ts, ac3, 25": Film("mpegts", "ac3", 25),
    "ts, sound late": Film("mpegts", audio_start_s=Fraction(2, 5)),
    "ts, mp3, picture late": Film("mpegts", "libmp3lame", 50, video_start_s=Fraction(3, 10)),
    "mono": Film(layout="mono"),
    "5.1": Film("matroska", "flac", layout="5.1"),
    "5.1 aac": Film(layout="5.1"),
    "b-frames": Film(codec_options=(("bf", "3"), ("b_strategy", "0"))),
    "open groups": Film(codec_options=(("bf", "3"), ("x264-params", "open-gop=1:bframes=3:b-adapt=0"))),
    "no b-frames": Film(codec_options=(("bf", "0"),)),
}


def times_of(film: Film) -> list[Fraction]:
    """When each frame is shown, s, from the first."""
    count = int(DURATION_S * Fraction(film.rate))
    if not film.varies:
        return [index / Fraction(film.rate) for index in range(count)]
    steps = np.random.default_rng(5).integers(1, 4, count)  # one to three frames long, none on a millisecond by rule
    return [Fraction(int(value)) / Fraction(film.rate) for value in np.cumsum([0, *steps[:-1]])]


def numbered(index: int) -> np.ndarray:
    """A picture of its own number: eight columns, white for a 1."""
    columns = [220 if index >> bit & 1 else 30 for bit in range(BITS)]
    row = np.repeat(np.array(columns, np.uint8), SIDE // BITS)
    return np.broadcast_to(row[None, :, None], (SIDE, SIDE, 3)).copy()


def number_in(picture: np.ndarray) -> int:
    bits = picture[:, :, 0].reshape(SIDE, BITS, -1)[:, :, 2:-2].mean(axis=(0, 2)) > 128
    return int(sum(1 << bit for bit, on in enumerate(bits) if on))


@functools.cache
def noise(hz: int, duration_s: float) -> np.ndarray:
    """Noise below 3 kHz, the same at every rate: a sum of tones of random phase."""
    random = np.random.default_rng(11)
    tones, phases = random.uniform(150, 3000, 400), random.uniform(0, 2 * np.pi, 400)
    time = np.arange(round(duration_s * hz)) / hz
    total = np.zeros_like(time)
    for tone, phase in zip(tones, phases, strict=True):
        total += np.sin(2 * np.pi * tone * time + phase)
    return (0.02 * total).clip(-1, 1).astype(np.float32)


def write(path: Path, film: Film) -> list[Fraction]:
    """The film as a file; returns when its frames are shown."""
    times = times_of(film)
    length_s = float(times[-1] + 1 / Fraction(film.rate))
    tick = Fraction(1, 1000) if film.container in {"matroska", "webm"} else TICK
    with av.open(str(path), "w", format=film.container, options=dict(film.options)) as output:
        video: Any = output.add_stream(film.video, rate=film.rate, options=dict(film.codec_options))
        video.width, video.height, video.pix_fmt, video.time_base = SIDE, SIDE, "yuv420p", tick
        video.codec_context.time_base, video.codec_context.gop_size = tick, 24
        if film.video == "libvpx-vp9":
            video.options = {"deadline": "realtime", "cpu-used": "8", "crf": "20", "lag-in-frames": "0"}
        else:
            video.options = {"crf": "12", "preset": "ultrafast", **dict(film.codec_options)}
        audio: Any = output.add_stream(film.audio, rate=film.hz, layout=film.layout)
        audio.bit_rate = 256_000
        packets = sorted(
            itertools.chain(
                ((film.video_start_s + time, 0, index) for index, time in enumerate(times)),
                (
                    (film.audio_start_s + Fraction(at, film.hz), 1, at)
                    for at in range(0, round(length_s * film.hz), 960)
                ),
            )
        )
        sound = noise(film.hz, length_s)
        for seconds, kind, index in packets:
            if kind == 0:
                frame: Any = VideoFrame.from_ndarray(numbered(index), format="rgb24")
                frame.pts, frame.time_base = round(seconds / tick), tick
                output.mux(video.encode(frame))
            else:
                for block in blocks(sound[index : index + 960], film, index):
                    output.mux(audio.encode(block))
        for stream in (video, audio):
            output.mux(stream.encode(None))
    return [time + Fraction(film.priming_s) if index else time for index, time in enumerate(times)]


def blocks(mono: np.ndarray, film: Film, index: int) -> Iterator[AudioFrame]:
    """A piece of sound on every channel but the low-frequency one; a right side that is half as loud."""
    gains = {"mono": [1.0], "stereo": [1.0, 0.5], "5.1": [0.5, 0.25, 0, 0, 0, 0]}[film.layout]
    samples = (np.array(gains)[:, None] * mono[None] * 32767).astype(np.int16)
    frame = AudioFrame.from_ndarray(samples.T.reshape(1, -1).copy(), format="s16", layout=film.layout)
    frame.sample_rate, frame.time_base = film.hz, Fraction(1, film.hz)
    frame.pts = index + round(film.audio_start_s * film.hz)
    yield frame


def skew_s(heard: np.ndarray, expected: np.ndarray, hz: int) -> float:
    """By how much the sound is late, s: where it fits the expected one best, to a part of a sample."""
    lags = np.arange(-120, 121)
    core = slice(200, len(expected) - 200)
    scores = np.array([float(heard[200 + lag : len(heard) - 200 + lag] @ expected[core]) for lag in lags])
    best = int(scores.argmax())
    if 0 < best < len(lags) - 1:
        low, mid, high = scores[best - 1 : best + 2]
        return float(lags[best] + (low - high) / (2 * (low - 2 * mid + high))) / hz
    return float(lags[best]) / hz


def check(path: Path, film: Film, times: Sequence[Fraction], start_s: float) -> None:
    frames, sound = read_clip(path, start_s, None, SHAPE)
    slack = (
        0.0016 if film.container in {"matroska", "webm"} else 2e-5
    )  # those store milliseconds, and are read with one of tolerance
    grid = [start_s + index / SHAPE.frame_rate for index in range(SHAPE.num_frames)]
    allowed = [
        {
            max((k for k, time in enumerate(times) if float(time) <= at + sign * slack + 1e-9), default=0) % 256
            for sign in (-1, 1)
        }
        for at in grid
    ]
    shown = [number_in(frame) for frame in frames]
    assert all(number in known for number, known in zip(shown, allowed, strict=True)), (shown, allowed)
    hz = SHAPE.sample_rate_hz
    offset_s = float(film.audio_start_s - film.video_start_s) + film.priming_s
    length_s = float(times[-1] + 1 / Fraction(film.rate))
    whole = noise(hz, length_s)
    at = round((start_s - offset_s) * hz)
    expected = np.zeros(SHAPE.num_samples, np.float32)
    low, high = max(0, -at), min(len(expected), len(whole) - at)
    expected[low:high] = whole[at + low : at + high]
    assert sound.shape == (2, SHAPE.num_samples)
    rounding_s = ((start_s - offset_s) * hz - at) / hz
    skew = skew_s(sound[0], expected, hz)
    assert abs(skew + rounding_s) < MAX_SKEW_S
    lag = round(skew * hz)
    fit = float(np.corrcoef(sound[0][100:-100], np.roll(expected, lag)[100:-100])[0, 1])
    assert fit > 0.8  # half a sample at 16 kHz already costs a tenth
    left, right = np.abs(sound).mean(axis=1)
    assert right / left == pytest.approx(1.0 if film.layout == "mono" else 0.5, abs=0.08)


@pytest.mark.parametrize("name", SELECTED)
def test_frames_and_sound_stand_where_they_were_put(name: str, tmp_path: Path) -> None:
    film = SELECTED[name]
    path = tmp_path / f"film.{film.container}"
    times = write(path, film)
    for start_s in STARTS_S:
        check(path, film, times, start_s)


def test_cuts_land_on_the_cut_where_the_picture_starts_late(tmp_path: Path, make_source: Any) -> None:
    from data.measure import measure
    from data.sensing import Sensing
    from tasks.cut import Config, cut_source

    film = Film("mov", video_start_s=Fraction(852, 1000), audio_start_s=Fraction(8, 1000))
    path, shots = tmp_path / "film.mov", ((200, 60, 40), (40, 180, 70), (50, 60, 200))
    length_s, rate = 6, 24
    texture = np.random.default_rng(3).integers(-30, 30, (SIDE, 2 * SIDE, 1))
    with av.open(str(path), "w", format="mov") as output:
        video: Any = output.add_stream("libx264", rate=rate, options={"crf": "12", "preset": "ultrafast"})
        video.width, video.height, video.pix_fmt, video.time_base = SIDE, SIDE, "yuv420p", TICK
        video.codec_context.time_base = TICK
        audio: Any = output.add_stream("pcm_s16le", rate=48000, layout="stereo")
        for index in range(length_s * rate):
            moved = texture[:, index % SIDE : index % SIDE + SIDE]
            picture = (np.array(shots[index // (2 * rate)]) + moved).clip(0, 255).astype(np.uint8)
            frame: Any = VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = round((film.video_start_s + Fraction(index, rate)) / TICK), TICK
            output.mux(video.encode(frame))
        sound = noise(48000, length_s)
        for index in range(0, len(sound), 960):
            for block in blocks(sound[index : index + 960], film, index):
                output.mux(audio.encode(block))
        for stream in (video, audio):
            output.mux(stream.encode(None))
    facts = measure(path, Sensing()).facts
    source = make_source(
        "film.mov", path=str(path), **{key: value for key, value in facts.items() if value is not None}
    )
    config = Config(accepted=path, clips=path, rejects=path, shape=SHAPE, work=tmp_path / "work", margin_s=0)
    clips = cut_source(source, config).clips
    assert [clip.start_s for clip in clips if clip.boundary_reason == "cut"] == pytest.approx([2.0, 4.0], abs=1e-3)
    for clip in clips:
        frames, heard = read_clip(path, clip.start_s, clip.end_s, SHAPE)
        shot = shots[int(clip.start_s // 2)]
        assert np.abs(frames.mean(axis=(1, 2)) - np.array(shot)).max() < 25  # no frame of a neighbour, first to last
        at = round((clip.start_s + 0.844) * 16000)
        expected = noise(16000, length_s)[at : at + heard.shape[1]]
        expected = np.pad(expected, (0, heard.shape[1] - len(expected)))
        assert abs(skew_s(heard[0], expected, 16000)) < MAX_SKEW_S
