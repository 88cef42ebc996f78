"""Picture and sound keep their places through every container, codec, rate and start, wherever a clip begins.

AVI stores no start times and no priming: its PCM is exact, its MP3 and AC-3 hide 23 and 5 ms that no reader can know of.
So do MP3 without a Xing header, ADTS and AC-3 as files of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from data.listing import Listed
from data.media import read_clip
from data.records import ClipShape
from data.sensing import Sensing
from data.tables import Words
from tasks import cut, ingest
from tests.data.films import SIDE, TICK, Film, Truth, noise, number_in, numbered, tick_of, write, write_sound

HZ = 16000
SHAPE = ClipShape(num_frames=22, frame_rate=24, height=SIDE, width=SIDE, sample_rate_hz=HZ)
MAX_SKEW_S = 0.001
STARTS_S = (0.0, 0.3125, 1.71)
"""At the beginning, between two frames, and deep inside, behind the second key frame."""
PRIMING_S = 1024 / 48000
"""One codec frame, which is what FFmpeg's AAC encoder puts before the sound."""
SELECTED: dict[str, Film] = {
    "mp4": Film(),
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
    "mp4, trimmed by its edit list": Film(trimmed_frames=30),
    "mov, pcm, trimmed by its edit list": Film("mov", "pcm_s16le", 25, trimmed_frames=7),
    "mp4, fragments": Film(options=(("movflags", "frag_keyframe+empty_moov+default_base_moof"),), priming_s=PRIMING_S),
    "mp4, fragments that say when they start": Film(options=(("movflags", "frag_keyframe+delay_moov"),)),
    "mp4, fragments, sound late": Film(
        audio_start_s=Fraction(2, 5), options=(("movflags", "frag_keyframe+empty_moov+delay_moov"),)
    ),
    "mp4, mp3": Film(audio="libmp3lame", hz=44100),
    "mp4, ac3": Film(audio="ac3"),
    "mp4, opus": Film(audio="libopus"),
    "mp4, turned": Film(rotation_deg=90, audio_start_s=Fraction(2, 5)),
    "mov, upside down": Film("mov", rotation_deg=180),
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
    "ts, clock wraps": Film("mpegts", "ac3", options=(("output_ts_offset", "95441.5"),)),
    "ps, mpeg-2 with b-frames": Film("mpeg", "mp2", 25, video="mpeg2video", codec_options=(("bf", "2"),)),
    "ts, mpeg-2 with b-frames": Film("mpegts", "mp2", 25, video="mpeg2video", codec_options=(("bf", "2"),)),
    "avi, h.264 with b-frames": Film("avi", "pcm_s16le", 25, codec_options=(("bf", "3"), ("b_strategy", "0"))),
    "avi, mpeg-4 with b-frames": Film("avi", "pcm_s16le", 30, video="mpeg4", codec_options=(("bf", "2"),)),
    "mkv, mpeg-4 with b-frames": Film("matroska", "ac3", 25, video="mpeg4", codec_options=(("bf", "2"),)),
    "mono": Film(layout="mono"),
    "5.1": Film("matroska", "flac", layout="5.1"),
    "5.1 aac": Film(layout="5.1"),
    "b-frames": Film(codec_options=(("bf", "3"), ("b_strategy", "0"))),
    "open groups": Film(codec_options=(("bf", "3"), ("x264-params", "open-gop=1:bframes=3:b-adapt=0"))),
    "no b-frames": Film(codec_options=(("bf", "0"),)),
}


@pytest.mark.parametrize("name", SELECTED)
def test_frames_and_sound_stand_where_they_were_put(name: str, tmp_path: Path) -> None:
    film = SELECTED[name]
    path = tmp_path / f"film.{film.container}"
    truth = write(path, film)
    for start_s in STARTS_S:
        assert fault(path, film, truth, start_s) is None
    assert edge_fault(path, film, truth) is None


def fault(path: Path, film: Film, truth: Truth, start_s: float, sound_path: Path | None = None) -> str | None:
    """What is wrong with the clip at `start_s`."""
    frames, sound = read_clip(path, start_s, None, SHAPE, sound_path)
    return picture_fault(frames, film, truth, start_s) or sound_fault(sound, film, truth, start_s)


def picture_fault(frames: NDArray[np.uint8], film: Film, truth: Truth, start_s: float) -> str | None:
    """Which frame is out of place, if one is."""
    slack = 0.0021 if tick_of(film) > TICK else 2e-5  # 2 ms at most are taken for rounding of timestamps
    for index, frame in enumerate(frames):
        at = start_s + index / SHAPE.frame_rate
        allowed = {on_screen(truth, float(at) + sign * slack) for sign in (-1, 1)}
        if number_in(frame) not in allowed:
            return f"{start_s} s: frame {index} is {number_in(frame)}, not {allowed}"
    return None


def on_screen(truth: Truth, at_s: float) -> int:
    """Number of the frame on screen at a time."""
    return max(
        (n for time, n in zip(truth.times, truth.numbers, strict=True) if time <= at_s + 1e-9), default=truth.numbers[0]
    )


def sound_fault(sound: NDArray[np.float32], film: Film, truth: Truth, start_s: float) -> str | None:
    """By how much the sound of a clip is off, if it is; the sides must stay what they were, too."""
    given = noise(HZ)
    at = round((start_s - truth.sound_s) * HZ)
    expected = np.zeros(SHAPE.num_samples, np.float32)
    low, high = max(0, -at), min(len(expected), round((truth.duration_s - truth.sound_s) * HZ) - at)
    expected[low:high] = given[at + low : at + high]
    skew = skew_samples(sound[0], expected)
    skew_s = (skew + (start_s - truth.sound_s) * HZ - at) / HZ
    fit = float(np.corrcoef(sound[0][100:-100], np.roll(expected, round(skew))[100:-100])[0, 1])
    if fit < 0.8:  # half a sample at 16 kHz already costs a tenth
        return f"{start_s} s: sound fits to {fit:.2f} only"
    if abs(skew_s) >= MAX_SKEW_S:
        return f"{start_s} s: sound is {1000 * skew_s:.2f} ms late"
    left, right = np.abs(sound).mean(axis=1)
    wanted = 1.0 if film.layout == "mono" else 0.5
    return None if abs(right / left - wanted) < 0.08 else f"{start_s} s: right is {right / left:.2f} of left"


def skew_samples(heard: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """By how many samples the sound is late: where it fits the expected one best."""
    reach = 120
    core = expected[reach:-reach]
    scores = np.correlate(heard, core, "valid")
    best = int(scores.argmax())
    if not 0 < best < 2 * reach:
        return float(best - reach)
    low, mid, high = scores[best - 1 : best + 2]
    return float(best - reach + (low - high) / (2 * (low - 2 * mid + high)))


def edge_fault(path: Path, film: Film, truth: Truth) -> str | None:
    """What is wrong with clips that begin exactly where a frame does, and end where the fourth after it begins."""
    shape = ClipShape(num_frames=64, frame_rate=120, height=SIDE, width=SIDE, sample_rate_hz=HZ)
    for first in (0, 5, 29):
        start_s, end_s = truth.times[first], truth.times[first + 4]
        frames, sound = read_clip(path, start_s, end_s, shape)
        shown, wanted = list(dict.fromkeys(map(number_in, frames))), truth.numbers[first : first + 4]
        if shown != wanted:
            return f"{start_s}-{end_s} s: frames {shown}, not {wanted}"
        if np.abs(sound[:, round((end_s - start_s) * HZ) + 1 :]).max(initial=0) > 0:
            return f"{start_s}-{end_s} s: sound behind the end"
    return None


@pytest.mark.parametrize(("container", "video"), [("h264", "libx264"), ("hevc", "libx265"), ("m4v", "mpeg4")])
def test_frames_without_any_times_are_counted(container: str, video: str, tmp_path: Path) -> None:
    b_frames = (("bf", "2"), *((("x265-params", "log-level=none"),) if video == "libx265" else ()))
    film = Film(container, rate=25, video=video, codec_options=b_frames)
    truth = write(tmp_path / "film", film, silent=True)
    for start_s in STARTS_S:
        assert picture_fault(read_clip(tmp_path / "film", start_s, None, SHAPE)[0], film, truth, start_s) is None
    assert edge_fault(tmp_path / "film", film, truth) is None


def test_faults_are_seen(tmp_path: Path) -> None:
    film = Film()
    truth = write(tmp_path / "film.mp4", film)
    one_early = truth._replace(numbers=[number + 1 for number in truth.numbers])
    assert "frame 0 is 0, not {1}" in str(fault(tmp_path / "film.mp4", film, one_early, 0.0))
    assert "frames [0, 1, 2, 3]" in str(edge_fault(tmp_path / "film.mp4", film, one_early))
    for skew_s in (0.0011, -0.0011, 0.004):
        moved = truth._replace(sound_s=truth.sound_s - skew_s)
        assert f"{1000 * skew_s:.1f}" in str(fault(tmp_path / "film.mp4", film, moved, 0.0))
    assert "fits to" in str(fault(tmp_path / "film.mp4", film, truth._replace(sound_s=0.1), 0.0))
    assert "right is 0.5" in str(fault(tmp_path / "film.mp4", film._replace(layout="mono"), truth, 0.0))


@pytest.mark.parametrize(
    ("name", "container", "codec", "hz"),
    [
        ("s.wav", "wav", "pcm_s16le", 44100),
        ("s.flac", "flac", "flac", 48000),
        ("s.m4a", "mp4", "aac", 48000),
        ("s.mp3", "mp3", "libmp3lame", 44100),
        ("s.opus", "ogg", "libopus", 48000),
        ("s.mka", "matroska", "ac3", 48000),
    ],
)
def test_sound_of_another_file_begins_with_the_first_frame_shown(
    name: str, container: str, codec: str, hz: int, tmp_path: Path
) -> None:
    film = Film(video_start_s=Fraction(852, 1000))
    truth = write(tmp_path / "film.mp4", film, silent=True)
    write_sound(tmp_path / name, container, codec, hz)
    due = truth._replace(sound_s=0.0, duration_s=3.0)
    for start_s in STARTS_S:
        assert fault(tmp_path / "film.mp4", film, due, start_s, tmp_path / name) is None


@pytest.mark.parametrize("container", ["mp4", "mov", "matroska", "mpegts"])
def test_cuts_of_a_late_picture_land_on_the_cuts_and_each_clip_has_its_own_sound(
    container: str, tmp_path: Path
) -> None:
    """Picture from 0.852 s, sound from 0.008 s: whoever counts from the container's start cuts 0.84 s too early."""
    film = Film(container, video_start_s=Fraction(852, 1000), audio_start_s=Fraction(8, 1000))
    time = np.arange(4 * 48000) / 48000 - 0.844  # on the picture's timeline
    pitch = np.array([500, 1100, 2300])[np.clip(np.floor(time).astype(int), 0, 2)]
    path = tmp_path / f"film.{container}"
    write(path, film, scene, (0.3 * np.sin(2 * np.pi * pitch * time)).astype(np.float32))
    row = Listed(str(path), path.name, "", "clip", Words("three scenes"), None, None, (), None)
    source = ingest.measure(row, Sensing(speech=False), tmp_path)
    assert source.error is None
    shape = ClipShape(num_frames=18, frame_rate=24, height=SIDE, width=SIDE, sample_rate_hz=HZ)
    paths = {name: tmp_path / name for name in ("accepted", "clips", "rejects")}
    config = cut.Config.model_validate({**paths, "work": tmp_path, "shape": shape, "sensing": {"speech": False}})
    clips = cut.cut_source(source.model_copy(update={"path": str(path)}), config).clips
    assert [int(clip.start_s) for clip in clips] == [0, 1, 2]
    for number, clip in enumerate(clips):
        assert number <= clip.start_s < clip.end_s <= number + 1 + 1e-6
        frames, sound = read_clip(path, clip.start_s, clip.end_s, shape)
        for frame in frames:
            errors = [np.abs(frame.mean(axis=(0, 1)) - scene(24 * other).mean(axis=(0, 1))).max() for other in range(3)]
            assert int(np.argmin(errors)) == number
        loudest = np.abs(np.fft.rfft(sound[0])).argmax() * HZ / sound.shape[1]
        assert loudest == pytest.approx([500, 1100, 2300][number], abs=2)
        power = np.abs(np.fft.rfft(sound[0])) ** 2
        near = np.abs(np.fft.rfftfreq(sound.shape[1], 1 / HZ) - loudest) < 60
        assert power[near].sum() / power.sum() > 0.98


def scene(index: int) -> NDArray[np.uint8]:
    """Of three scenes of a second each, the frame `index`: patches that rise by a line a frame."""
    coarse = np.random.default_rng(min(index // 24, 2)).integers(0, 256, (4, 4, 3))
    still = np.kron(coarse, np.ones((SIDE // 4, SIDE // 4, 1))).astype(np.uint8)
    return np.roll(still, -(index % 24), axis=0)


def test_late_sound_that_we_write_starts_when_it_was_meant_to(tmp_path: Path) -> None:
    """The muxer alone lets it begin 21 ms early, with what the encoder put before it."""
    from data.media import probe, read_sound, write_media

    frames = [numbered(index) for index in range(48)]
    for container, codec in (("mp4", "aac"), ("mov", "aac"), ("mp4", "libopus")):
        sound = np.stack([noise(48000)[:76800]] * 2)
        path = tmp_path / f"{codec}.{container}"
        form = {"container": container, "audio_codec": codec, "sound_start_s": 0.4}
        write_media(path, frames, sound, frame_rate=24, sample_rate_hz=48000, **form)  # pyright: ignore[reportArgumentType]
        facts = probe(path)
        assert (facts["audio_start_s"], facts["audio_duration_s"]) == (0.4, 1.6)
        heard = read_sound(path)[0]
        assert np.corrcoef(heard[0][1000:-1000], sound[0][1000:-1000])[0, 1] > 0.95


PAIRS = {
    "mp4": ("aac", "libmp3lame", "ac3", "libopus", "alac", "flac"),
    "mov": ("aac", "pcm_s16le", "alac"),
    "matroska": ("aac", "libmp3lame", "ac3", "eac3", "libopus", "flac", "pcm_s16le"),
    "webm": ("libopus",),
    "mpegts": ("aac", "libmp3lame", "mp2", "ac3", "eac3", "libopus"),
}
RATES_HZ = {"libopus": (48000,), "libmp3lame": (44100, 48000), "mp2": (44100, 48000), "ac3": (44100, 48000)}
RATES_HZ["eac3"] = RATES_HZ["ac3"]
RATES = (Fraction(24000, 1001), 24, 25, Fraction(30000, 1001), 30, 50, 60, None)
"""Frames a second; None varies."""
BEGINNINGS = [(0, 0), (0, 400), (300, 0), (852, 8), (500, 700)]
"""Of picture and sound, ms."""
CODINGS = ((), (("bf", "3"), ("b_strategy", "0")), (("bf", "3"), ("x264-params", "open-gop=1:bframes=3:b-adapt=0")))
LAYOUTS = ("stereo", "mono", "5.1")
TWO_SIDED = ("libmp3lame", "mp2", "libopus", "alac")
"""Codecs that have two channels at most, or are spared more."""


def product(container: str, codec: str) -> Iterator[Film]:
    """Every rate, sampling rate and beginning; how pictures depend on each other, and the channels, take turns."""
    every = itertools.product(RATES_HZ.get(codec, (8000, 44100, 48000, 96000)), RATES, BEGINNINGS)
    for number, (hz, rate, (video_ms, audio_ms)) in enumerate(every):
        layout = LAYOUTS[number % (2 if codec in TWO_SIDED else 3)]
        yield Film(
            container,
            codec,
            24 if rate is None else rate,
            hz,
            layout,
            Fraction(video_ms, 1000),
            Fraction(audio_ms, 1000),
            video="libvpx-vp9" if container == "webm" else "libx264",
            codec_options=() if container == "webm" else CODINGS[number // 2 % len(CODINGS)],
            varies=rate is None,
        )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("container", "codec"), [(c, codec) for c, codecs in PAIRS.items() for codec in codecs])
def test_no_combination_moves_a_frame_or_a_millisecond(container: str, codec: str, tmp_path: Path) -> None:
    misses: list[tuple[Film, str | None]] = []
    path, films = tmp_path / f"film.{container}", list(product(container, codec))
    for film in films:
        truth = write(path, film)
        faults = [*(fault(path, film, truth, start_s) for start_s in STARTS_S), edge_fault(path, film, truth)]
        misses += [(film, found) for found in faults if found is not None]
    print(f"{container} {codec}: {len(films)} films, {len(misses)} misses")  # noqa: T201
    assert misses == []
