from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.media import iter_frames, probe, read_clip, read_sound, write_media, write_mp4
from data.records import ClipShape
from tests.data.small_films import FLASH, click_s, flash_and_click, flash_index

FORMS: dict[str, dict[str, Any]] = {
    "mp4": {},
    "mov": {"container": "mov"},
    "mkv_aac": {"container": "matroska"},
    "mkv_opus": {"container": "matroska", "audio_codec": "libopus"},
    "webm": {"container": "webm", "video_codec": "libvpx-vp9", "audio_codec": "libopus"},
}


@pytest.mark.parametrize("hz", [8000, 44100, 48000])
@pytest.mark.parametrize("rate", [24, 25, Fraction(30000, 1001)])
def test_mp4_keeps_count_rate_length_sides_and_sync(tmp_path: Path, hz: int, rate: Fraction | int) -> None:
    frames, sound = flash_and_click(rate=rate, hz=hz)
    path = tmp_path / "film.mp4"
    write_mp4(path, frames, sound, rate, hz)
    facts = probe(path)
    assert (facts["num_frames"], facts["frame_rate"], facts["frame_jitter"]) == (48, str(Fraction(rate)), 0)
    assert facts["num_channels"] == 2
    heard, heard_hz, start_s = read_sound(path)
    assert start_s == 0
    assert heard.shape[1] == round(Fraction(sound.shape[1] * heard_hz, hz))
    seen = [(seconds, frame.mean()) for seconds, frame in iter_frames(path, 32, 32)]
    flash_s = max(seen, key=lambda item: item[1])[0]
    assert flash_s == pytest.approx(float(FLASH / Fraction(rate)), abs=1e-4)
    assert abs(click_s(heard, heard_hz) - flash_s) <= 0.001
    assert np.abs(heard[0]).max() > 5 * np.abs(heard[1]).max()


@pytest.mark.parametrize("form", FORMS)
def test_every_container_keeps_sync_to_a_millisecond(tmp_path: Path, form: str) -> None:
    frames, sound = flash_and_click()
    path = tmp_path / "film"
    write_media(path, frames, sound, frame_rate=24, sample_rate_hz=48000, **FORMS[form])
    shape = ClipShape(sample_rate_hz=8000)
    for start in (0.0, 0.5, FLASH / 24):
        seen, heard = read_clip(path, start, None, shape)
        assert seen.shape == (22, 32, 32, 3)
        assert heard.shape == (2, shape.num_samples)
        assert flash_index(seen) == round(FLASH - start * 24)
        assert abs(click_s(heard, 8000) - (FLASH / 24 - start)) <= 0.001


@pytest.mark.parametrize("form", FORMS)
def test_same_input_gives_same_bytes(tmp_path: Path, form: str) -> None:
    random = np.random.default_rng(0)
    frames = np.cumsum(random.integers(0, 9, (30, 64, 64, 3)), axis=0).astype(np.uint8)
    sound = random.uniform(-0.3, 0.3, (2, 60000)).astype(np.float32)
    written: set[bytes] = set()
    for _ in range(4):
        write_media(tmp_path / "film", frames, sound, frame_rate=24, sample_rate_hz=48000, **FORMS[form])
        written.add((tmp_path / "film").read_bytes())
    assert len(written) == 1


def test_mp4_starts_playing_before_it_is_whole(tmp_path: Path) -> None:
    write_mp4(tmp_path / "film.mp4", *flash_and_click(hz=8000), 24, 8000)
    content = (tmp_path / "film.mp4").read_bytes()
    assert 0 < content.find(b"moov") < content.find(b"mdat")
    with av.open(str(tmp_path / "film.mp4")) as container:
        assert container.streams.video[0].codec_context.pix_fmt == "yuv420p"
        assert container.streams.audio[0].codec_context.sample_rate == 48000


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="even sides"):
        write_mp4(tmp_path / "film.mp4", np.zeros((3, 31, 32, 3), np.uint8), None, 24, 8000)
    assert list(tmp_path.iterdir()) == []


def test_sound_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"stereo needs \(2, T\)"):
        write_mp4(tmp_path / "film.mp4", np.zeros((3, 32, 32, 3), np.uint8), np.zeros((1, 8000), np.float32), 24, 8000)


def test_colour_survives_a_lossless_round_trip(tmp_path: Path) -> None:
    smooth = np.stack(np.meshgrid(np.linspace(20, 235, 64), np.linspace(235, 20, 64)), axis=-1)
    picture = np.concatenate([smooth, 255 - smooth[..., :1]], axis=-1).astype(np.uint8)
    for codec, container in (("libx264", "mp4"), ("libvpx-vp9", "webm")):
        path = tmp_path / container
        write_media(
            path,
            [picture] * 4,
            None,
            frame_rate=24,
            sample_rate_hz=48000,
            crf=0,
            container=container,  # pyright: ignore[reportArgumentType]
            video_codec=codec,  # pyright: ignore[reportArgumentType]
        )
        seen = next(iter(iter_frames(path, 64, 64)))[1]
        error = np.mean((seen.astype(float) - picture) ** 2)
        assert 10 * np.log10(255**2 / error) > 46  # the default chroma path gives about 37 dB


def test_shrinking_averages_areas(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    picture = random.integers(0, 256, (128, 128, 1), dtype=np.uint8).repeat(3, axis=2)
    path = tmp_path / "film.mp4"
    write_mp4(path, np.stack([picture] * 3), None, 24, 48000, crf=0)
    seen = next(iter(iter_frames(path, 32, 32)))[1]
    expected = picture.reshape(32, 4, 32, 4, 3).mean(axis=(1, 3))
    assert np.abs(seen - expected).max() <= 2.5


def test_wide_picture_is_cropped_at_the_centre(tmp_path: Path) -> None:
    picture = np.zeros((32, 96, 3), np.uint8)
    picture[:, 32:64] = 200
    write_mp4(tmp_path / "film.mp4", np.stack([picture] * 3), None, 24, 48000, crf=0)
    seen = next(iter(iter_frames(tmp_path / "film.mp4", 32, 32)))[1]
    assert np.abs(seen[:, 1:-1].astype(int) - 200).max() <= 2


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_rotated_film_is_shown_upright(tmp_path: Path, degrees: int) -> None:
    upright = np.zeros((64, 32, 3), np.uint8)
    upright[:16, :16] = (250, 250, 250)  # top left
    stored = np.rot90(upright, degrees // 90)
    path = tmp_path / "film.mp4"
    write_media(path, [stored] * 4, None, frame_rate=24, sample_rate_hz=48000, rotation_deg=degrees)
    facts = probe(path)
    assert (facts["rotation_deg"], facts["width"], facts["height"]) == (degrees, 32, 64)
    seen = next(iter(iter_frames(path, 64, 32)))[1]
    assert seen[4:12, 4:12].mean() > 230
    assert seen[40:, :].mean() < 10
    assert seen[:12, 20:].mean() < 10


def test_variable_rate_shows_the_frame_that_is_on_screen(tmp_path: Path) -> None:
    times = [Fraction(number, 48) for number in (0, 3, 4, 10, 11, 20, 30, 31, 44, 60)]
    frames = np.stack([np.full((32, 32, 3), 20 * index, np.uint8) for index in range(10)])
    path = tmp_path / "film.mp4"
    write_media(path, frames, None, frame_rate=24, sample_rate_hz=48000, frame_times=times, crf=4)
    assert float(probe(path)["frame_jitter"] or 0) > 0.5
    seen, _ = read_clip(path, 0.25, None, ClipShape())
    expected = [
        max(i for i, time in enumerate(times) if time <= Fraction(1, 4) + Fraction(index, 24)) for index in range(22)
    ]
    assert [round(float(frame.mean()) / 20) for frame in seen] == expected


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.floats(0, 1.9), rate=st.sampled_from([8, 24, 30]), has_end=st.booleans())
def test_frames_on_the_grid_are_those_on_screen(long_film: Path, start: float, rate: int, has_end: bool) -> None:
    end = start + 0.3 if has_end else None
    seen, sound = read_clip(long_film, start, end, ClipShape(num_frames=9, frame_rate=rate, sample_rate_hz=8000))
    for index, frame in enumerate(seen):
        time = start + index / rate
        last = 59 if end is None else min(59, int(np.ceil((end - 1e-3) * 25)) - 1)
        on_screen = {min(last, int((time + slack) * 25)) for slack in (0, 0.0011)}
        assert round(float(frame.mean()) / 4) in on_screen
    assert sound.shape == (2, round(9 / rate * 8000))


@pytest.fixture(scope="module")
def long_film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 frames at 25 a second, each 4 levels brighter than the one before, in several groups of pictures."""
    path = tmp_path_factory.mktemp("media") / "long.mkv"
    frames = np.stack([np.full((32, 32, 3), 4 * index, np.uint8) for index in range(60)])
    write_media(path, frames, None, frame_rate=25, sample_rate_hz=8000, container="matroska", crf=0)
    return path


def test_end_keeps_out_the_next_shot(tmp_path: Path) -> None:
    frames, sound = flash_and_click()
    write_mp4(tmp_path / "f.mp4", frames, sound, 24, 48000)
    seen, heard = read_clip(tmp_path / "f.mp4", 0.5, FLASH / 24, ClipShape())
    assert seen.max() < 100
    assert np.abs(heard[:, round((FLASH / 24 - 0.5) * 8000) :]).max() == 0


def test_start_behind_the_end_is_unreadable_or_holds_the_last_frame(tmp_path: Path) -> None:
    frames, sound = flash_and_click()
    write_mp4(tmp_path / "f.mp4", frames, sound, 24, 48000)
    seen, heard = read_clip(tmp_path / "f.mp4", 1.5, None, ClipShape())
    assert (seen[-1] == seen[11]).all()
    assert not heard[:, round(0.56 * 8000) :].any()
