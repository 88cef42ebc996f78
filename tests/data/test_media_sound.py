from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.audio.frame import AudioFrame
from scipy import signal

from data.media import Unreadable, probe, read_clip, read_sound, write_media
from data.media_sound import begun, first_sound_s, read_stereo
from data.records import ClipShape
from tests.data.small_films import FLASH, click_s, flash_and_click, flash_index


def write_sound(
    path: Path, samples_CT: np.ndarray, rate: int, codec: str, layout: str, form: str | None = None, skip: float = 0.0
) -> None:
    """A file of sound alone; timestamps leap by `skip` seconds after one second."""
    with av.open(str(path), "w", format=form) as output:
        stream: Any = output.add_stream(codec, rate=rate)
        stream.layout = layout
        context = stream.codec_context
        size = context.frame_size or 1024
        for low in range(0, samples_CT.shape[1], size):
            block = samples_CT[:, low : low + size]
            kind = context.format.name.rstrip("p")
            if kind in {"s16", "s32"}:
                top = 2 ** (int(kind[1:]) - 1)
                block = np.clip(np.round(block * top), -top, top - 1).astype(f"int{kind[1:]}")
            elif kind == "u8":
                block = np.clip(np.round(block * 128 + 128), 0, 255).astype(np.uint8)
            else:
                block = block.astype({"flt": np.float32, "dbl": np.float64}[kind])
            packed = block if context.format.is_planar else block.T.reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(packed), context.format.name, layout)
            frame.sample_rate, frame.time_base = rate, Fraction(1, rate)
            frame.pts = low + (round(skip * rate) if low >= rate else 0)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))


def test_late_sound_starts_with_silence_and_stays_in_sync(tmp_path: Path) -> None:
    frames, sound = flash_and_click()
    late = sound[:, 19200:]
    path = tmp_path / "film.mp4"
    write_media(path, frames, late, frame_rate=24, sample_rate_hz=48000, sound_start_s=0.4)
    assert float(probe(path)["audio_start_s"] or 0) == 0.4
    seen, heard = read_clip(path, 0.0, None, ClipShape(num_frames=39, sample_rate_hz=48000))
    assert np.abs(heard[:, : round(0.399 * 48000)]).max() == 0
    assert abs(click_s(heard, 48000) - flash_index(seen) / 24) <= 0.001


def test_early_sound_is_trimmed_to_the_picture(tmp_path: Path) -> None:
    frames, sound = flash_and_click()
    path = tmp_path / "film.mkv"
    early = np.concatenate([np.zeros((2, 24000), np.float32), sound], axis=1)
    write_media(
        path,
        frames,
        early,
        frame_rate=24,
        sample_rate_hz=48000,
        container="matroska",
        frame_times=[Fraction(1, 2) + Fraction(index, 24) for index in range(48)],
    )
    facts = probe(path)
    assert float(facts["video_start_s"] or 0) - float(facts["audio_start_s"] or 0) == pytest.approx(0.5, abs=0.002)
    assert read_sound(path)[2] == pytest.approx(-0.5, abs=0.002)
    seen, heard = read_clip(path, 0.0, None, ClipShape(num_frames=39, sample_rate_hz=48000))
    assert flash_index(seen) == FLASH
    assert abs(click_s(heard, 48000) - FLASH / 24) <= 0.0015  # Matroska rounds both starts to a millisecond


def test_mono_goes_to_both_sides(tmp_path: Path) -> None:
    frames, sound = flash_and_click()
    write_media(tmp_path / "f", frames, sound[:1], frame_rate=24, sample_rate_hz=48000, layout="mono")
    heard = read_clip(tmp_path / "f", 0, None, ClipShape())[1]
    assert np.array_equal(heard[0], heard[1])
    assert np.abs(heard).max() > 0.05


def test_surround_is_mixed_down_by_itu(tmp_path: Path) -> None:
    frames, _ = flash_and_click()
    time = np.arange(96000) / 48000
    tones = {"FL": 500, "FR": 700, "FC": 1100, "LFE": 60, "BL": 1300, "BR": 1700}
    sound = np.stack([0.2 * np.sin(2 * np.pi * hertz * time) for hertz in tones.values()]).astype(np.float32)
    write_media(tmp_path / "f", frames, sound, frame_rate=24, sample_rate_hz=48000, layout="5.1")
    heard = read_clip(tmp_path / "f", 0.5, None, ClipShape(num_frames=24, sample_rate_hz=48000))[1]

    def level(side: int, hertz: int) -> float:
        wave = np.exp(-2j * np.pi * hertz * np.arange(48000) / 48000)
        return float(2 * abs(np.mean(heard[side] * wave)) / 0.2)

    half = float(np.sqrt(0.5))
    expected = {"FL": (1, 0), "FR": (0, 1), "FC": (half, half), "LFE": (0, 0), "BL": (half, 0), "BR": (0, half)}
    for name, sides in expected.items():
        assert [level(side, tones[name]) for side in (0, 1)] == pytest.approx(sides, abs=0.02)


def test_no_sound_is_silence(tmp_path: Path) -> None:
    write_media(tmp_path / "f", flash_and_click()[0], None, frame_rate=24, sample_rate_hz=48000)
    assert probe(tmp_path / "f")["audio_codec"] is None
    assert not read_clip(tmp_path / "f", 0, None, ClipShape())[1].any()
    sound, rate, _ = read_sound(tmp_path / "f")
    assert (sound.shape, rate) == ((0, 0), 0)


def test_resampled_tone_keeps_phase_and_level(tmp_path: Path) -> None:
    time = np.arange(96000) / 48000
    tone = np.stack([0.5 * np.sin(2 * np.pi * 300 * time)] * 2).astype(np.float32)
    write_media(tmp_path / "f", flash_and_click()[0], tone, frame_rate=24, sample_rate_hz=48000)
    heard = read_clip(tmp_path / "f", 0.7, None, ClipShape())[1]
    expected = 0.5 * np.sin(2 * np.pi * 300 * (0.7 + np.arange(heard.shape[1]) / 8000))
    assert 10 * np.log10(np.mean(expected**2) / np.mean((heard[0] - expected) ** 2)) > 35


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 22050, 44100, 48000, 96000, 192000])
@pytest.mark.parametrize(
    ("codec", "error"),
    [
        ("pcm_u8", 2e-2),
        ("pcm_s16le", 1e-4),
        ("pcm_s24le", 1e-4),
        ("pcm_s32le", 1e-4),
        ("pcm_f32le", 1e-4),
        ("pcm_f64le", 1e-4),
    ],
)
def test_every_rate_and_depth_of_plain_samples_reads_as_written(
    tmp_path: Path, rate: int, codec: str, error: float
) -> None:
    time = np.arange(round(0.7 * rate)) / rate
    tones = np.stack([0.6 * np.sin(2 * np.pi * 300 * time), 0.3 * np.cos(2 * np.pi * 500 * time)])
    write_sound(tmp_path / "f.mkv", tones, rate, codec, "stereo", "matroska")
    heard = read_stereo(tmp_path / "f.mkv", 0.2, 0.4, rate)
    low = round(0.2 * rate)
    np.testing.assert_allclose(heard, tones[:, low : low + heard.shape[1]], atol=error)


@pytest.mark.parametrize("codec", ["flac", "alac"])
def test_lossless_codecs_read_as_written(tmp_path: Path, codec: str) -> None:
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (2, 48000))
    write_sound(tmp_path / "f.mkv", noise, 48000, codec, "stereo", "matroska")
    np.testing.assert_allclose(read_sound_of(tmp_path / "f.mkv"), noise, atol=1e-4)


def read_sound_of(path: Path) -> np.ndarray:
    return read_stereo(path, 0.0, 1.0, 48000)


def test_gap_in_the_timestamps_is_silence_and_what_follows_keeps_its_time(tmp_path: Path) -> None:
    samples = np.full((2, 96000), 0.01)
    samples[:, 48000 + 24000] = 0.9
    write_sound(tmp_path / "f.mkv", samples, 48000, "pcm_s16le", "stereo", "matroska", skip=0.4)
    heard = read_stereo(tmp_path / "f.mkv", 0.0, 2.4, 48000)
    assert abs(click_s(heard, 48000) - 1.9) <= 0.001
    assert np.abs(heard[:, 50000:67000]).max() == 0
    facts = probe(tmp_path / "f.mkv")
    assert facts["audio_duration_s"] == pytest.approx(2.4, abs=0.001)
    assert facts["silent_share"] == pytest.approx(0.4 / 2.4, abs=0.05)


@pytest.mark.parametrize("skip", [1000.0, 1e6])
def test_a_leap_of_the_timestamps_is_named_and_costs_nothing(tmp_path: Path, skip: float) -> None:
    write_sound(tmp_path / "f.mkv", np.full((2, 96000), 0.1), 48000, "pcm_s16le", "stereo", "matroska", skip=skip)
    assert "sound leaps from" in str(probe(tmp_path / "f.mkv")["error"])


@pytest.mark.parametrize(("rate", "layout"), [(44100, "stereo"), (48000, "mono")])
def test_sound_that_changes_in_mid_file_is_named(tmp_path: Path, rate: int, layout: str) -> None:
    noise = np.random.default_rng(0).uniform(-0.1, 0.1, (2, 20000))
    write_sound(tmp_path / "a.aac", noise, 48000, "aac", "stereo", "adts")
    write_sound(tmp_path / "b.aac", noise if layout == "stereo" else noise[:1], rate, "aac", layout, "adts")
    (tmp_path / "c.aac").write_bytes((tmp_path / "a.aac").read_bytes() + (tmp_path / "b.aac").read_bytes())
    assert "sound changes from 2 channels at 48000 Hz" in str(probe(tmp_path / "c.aac")["error"])


@pytest.mark.parametrize(
    ("place", "value", "width"),
    [(4, 1, 4), (4, 900_000, 4), (2, 40, 2), (2, 65535, 2)],
    ids=["1 Hz", "MHz", "40", "65535"],
)
def test_absurd_headers_of_sound_are_refused(tmp_path: Path, place: int, value: int, width: int) -> None:
    write_sound(tmp_path / "f.wav", np.full((2, 96000), 0.1), 48000, "pcm_s16le", "stereo", "wav")
    content = bytearray((tmp_path / "f.wav").read_bytes())
    form = content.find(b"fmt ") + 8
    content[form + place : form + place + width] = value.to_bytes(width, "little")
    if width == 2:
        content[form + 12 : form + 14] = ((2 * value) & 0xFFFF).to_bytes(2, "little")
    (tmp_path / "f.wav").write_bytes(bytes(content))
    assert probe(tmp_path / "f.wav").get("error")
    with pytest.raises(Unreadable):
        read_stereo(tmp_path / "f.wav", 0, 1, 8000)


@pytest.mark.parametrize("name", ["f.mp3", "f.m4a", "f.wav", "f.ogg"])
def test_sound_from_another_file_starts_with_the_first_frame_shown(tmp_path: Path, name: str) -> None:
    frames, sound = flash_and_click()
    film = tmp_path / "film.mkv"
    late = [Fraction(3, 10) + Fraction(index, 24) for index in range(48)]
    write_media(
        film, frames, sound[:, ::-1].copy(), frame_rate=24, sample_rate_hz=48000, container="matroska", frame_times=late
    )
    codec = {"f.mp3": "libmp3lame", "f.m4a": "aac", "f.wav": "pcm_s16le", "f.ogg": "libopus"}[name]
    write_sound(tmp_path / name, sound, 48000, codec, "stereo")
    for start in (0.0, 0.5):
        seen, heard = read_clip(film, start, None, ClipShape(num_frames=30, sample_rate_hz=48000), tmp_path / name)
        assert flash_index(seen) == round(FLASH - start * 24)
        assert abs(click_s(heard, 48000) - (FLASH / 24 - start)) <= 0.001
    silent = read_clip(film, 0.5, None, ClipShape(num_frames=30, sample_rate_hz=48000), film)[1]
    assert np.argmax(np.abs(silent[0])) != np.argmax(np.abs(heard[0]))


def test_first_sample_of_a_file_without_sound_is_at_zero(tmp_path: Path) -> None:
    write_media(tmp_path / "f", flash_and_click()[0], None, frame_rate=24, sample_rate_hz=48000)
    assert first_sound_s(tmp_path / "f") == 0


def test_resampling_agrees_with_an_independent_resampler(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    b, a = signal.butter(6, 2000, fs=48000)
    smooth = signal.lfilter(b, a, random.normal(0, 0.3, (2, 96000)))
    write_sound(tmp_path / "f.wav", smooth, 48000, "pcm_f32le", "stereo")
    heard = read_stereo(tmp_path / "f.wav", 0.5, 1.0, 16000)
    expected = signal.resample_poly(smooth, 1, 3, axis=1)[:, 8000:24000]
    assert np.abs(heard - expected)[:, 100:-100].max() < 2e-3


def test_a_cut_first_frame_in_matroska_is_not_rounded_twice(tmp_path: Path) -> None:
    frames, sound = flash_and_click(num_frames=120, rate=25)
    path = tmp_path / "film.mkv"
    write_media(
        path, frames, sound, frame_rate=25, sample_rate_hz=48000, container="matroska", audio_codec="libopus",
        sound_start_s=0.4,
    )  # fmt: skip
    wanted = FLASH / 25 + 0.4
    for may_seek in (True, False):
        for start in (0.0, 1.0):
            heard = read_stereo(path, start, 2.0, 48000, may_seek=may_seek)
            assert abs(click_s(heard, 48000) + start - wanted) <= 0.00055


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_few_frames_are_all_given_and_the_end_is_asked_for_once(count: int) -> None:
    """PyAV's generators raise when they are asked again after their end; a stream may hold no frame or one."""

    class Stern:
        def __init__(self) -> None:
            self.left, self.ended = count, False

        def __iter__(self) -> Stern:
            return self

        def __next__(self) -> AudioFrame:
            assert not self.ended
            if self.left == 0:
                self.ended = True
                raise StopIteration
            self.left -= 1
            frame = AudioFrame(format="s16", layout="mono", samples=8)
            frame.sample_rate, frame.pts, frame.time_base = 8000, 0, Fraction(1, 8000)
            return frame

    class Clock:
        def begin(self, *_: object) -> None: ...

    assert len(list(begun(Clock(), Stern()))) == count
