from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.media import Unreadable, probe, read_clip, write_media, write_mp4
from data.media_open import opened, picture_stream
from data.media_probe import PictureNotes
from data.records import ClipShape, Source
from tests.data.small_films import flash_and_click

FORMS: dict[str, dict[str, Any]] = {
    "webm": {"container": "webm", "video_codec": "libvpx-vp9", "audio_codec": "libopus"},
}


@pytest.mark.parametrize("container", ["mp4", "mov", "matroska", "webm"])
def test_half_a_file_is_an_error_not_a_crash(tmp_path: Path, container: str) -> None:
    form = FORMS["webm"] if container == "webm" else {"container": container}
    path = tmp_path / "film"
    write_media(path, *flash_and_click(), frame_rate=24, sample_rate_hz=48000, **form)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert "cut short" in str(probe(path)["error"])


@pytest.mark.parametrize("content", [b"", b"not a film\n" * 99, b"\x00" * 4096, b"\x1aE\xdf\xa3" + b"\x42" * 500])
def test_what_is_no_media_is_an_error_not_a_crash(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "film.mp4").write_bytes(content)
    assert set(probe(tmp_path / "film.mp4")) <= {"error", "media_type"}
    with pytest.raises(Unreadable):
        read_clip(tmp_path / "film.mp4", 0, None, ClipShape())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_never_raise(whole_film: bytes, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(whole_film)
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=30)):
        content[place] ^= data.draw(st.integers(1, 255))
    (tmp_path / "film.mp4").write_bytes(bytes(content))
    facts = probe(tmp_path / "film.mp4")
    blank = {"source_id": "", "sha256": "", "path": "", "group": "", "size_bytes": 0}
    assert Source.model_validate({**blank, **facts})


@pytest.fixture(scope="module")
def whole_film(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("media") / "film.mp4"
    write_mp4(path, *flash_and_click(num_frames=24), 24, 48000)
    return path.read_bytes()


def test_sound_alone_is_named_as_such(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "song.mp4"), "w") as output:
        stream = output.add_stream("aac", rate=48000, layout="stereo")
        frame = av.AudioFrame.from_ndarray(np.zeros((2, 1024), np.float32), "fltp", "stereo")
        frame.sample_rate = 48000
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    assert (probe(tmp_path / "song.mp4")["num_frames"], probe(tmp_path / "song.mp4").get("error")) == (0, None)


def test_still_is_named_as_such(tmp_path: Path) -> None:
    write_media(tmp_path / "f", flash_and_click()[0][:1], None, frame_rate=24, sample_rate_hz=48000)
    assert (probe(tmp_path / "f")["num_frames"], probe(tmp_path / "f").get("error")) == (1, None)


def test_ten_bit_and_odd_sides_are_facts(tmp_path: Path) -> None:
    frames = flash_and_click()[0]
    write_media(tmp_path / "ten", frames, None, frame_rate=24, sample_rate_hz=48000, pixel_format="yuv420p10le")
    assert probe(tmp_path / "ten")["pixel_format"] == "yuv420p10le"
    assert abs(int(read_clip(tmp_path / "ten", 0, None, ClipShape())[0][0].mean()) - 60) <= 1
    odd = np.full((5, 93, 127, 3), 90, np.uint8)
    write_media(
        tmp_path / "odd", odd, None, frame_rate=24, sample_rate_hz=48000, container="webm", video_codec="libvpx-vp9"
    )
    assert (probe(tmp_path / "odd")["width"], probe(tmp_path / "odd")["height"]) == (127, 93)


def test_missing_file_is_unreadable(tmp_path: Path) -> None:
    assert probe(tmp_path / "nothing.mp4") == {"error": "there is no such file"}


@pytest.mark.parametrize(
    ("rate", "container", "jitter"),
    [
        (Fraction(24000, 1001), "mp4", 0),
        (Fraction(30000, 1001), "matroska", 0),
        (50, "webm", 0),
        (Fraction(65521, 2184), "mp4", 0),
    ],
)
def test_rates_time_bases_and_counts_are_exact(
    tmp_path: Path, rate: Fraction | int, container: str, jitter: float
) -> None:
    form = FORMS["webm"] if container == "webm" else {"container": container}
    write_media(tmp_path / "f", *flash_and_click(rate=rate), frame_rate=rate, sample_rate_hz=48000, **form)
    facts = probe(tmp_path / "f")
    assert facts.get("error") is None
    assert Fraction(str(facts["frame_rate"])) == pytest.approx(Fraction(rate), rel=1e-4 if container != "mp4" else 0)
    assert (facts["num_frames"], facts["frame_jitter"]) == (48, jitter)
    assert facts["video_duration_s"] == pytest.approx(48 / Fraction(rate), abs=0.0021)
    if container == "mp4":
        assert facts["header_num_frames"] == 48
        with av.open(str(tmp_path / "f")) as opened:
            assert facts["time_base"] == str(opened.streams.video[0].time_base)
    assert facts["header_duration_s"] == pytest.approx(48 / Fraction(rate), abs=0.05)


def test_a_lying_duration_in_mp4_is_not_believed(tmp_path: Path) -> None:
    write_mp4(tmp_path / "f.mp4", *flash_and_click(), 24, 48000)
    content = bytearray((tmp_path / "f.mp4").read_bytes())
    header = content.find(b"mvhd") + 4
    scale = int.from_bytes(content[header + 12 : header + 16], "big")
    for box, place in ((b"mvhd", 16), (b"tkhd", 20)):
        at = content.find(box) + 4 + place
        content[at : at + 4] = (100 * scale).to_bytes(4, "big")
    for at in [index for index in range(len(content) - 4) if content[index : index + 4] == b"elst"]:
        content[at + 12 : at + 16] = (100 * scale).to_bytes(4, "big")
    (tmp_path / "f.mp4").write_bytes(bytes(content))
    facts = probe(tmp_path / "f.mp4")
    assert facts.get("error") is None  # the tables of samples say better, and do not promise more
    assert (facts["num_frames"], facts["header_duration_s"]) == (48, pytest.approx(2, abs=0.05))


def test_two_recordings_in_one_stream_are_named(tmp_path: Path) -> None:
    frames = flash_and_click()[0]
    write_ts(tmp_path / "a.ts", frames, 200)
    write_ts(tmp_path / "b.ts", frames, 0)
    (tmp_path / "c.ts").write_bytes((tmp_path / "a.ts").read_bytes() + (tmp_path / "b.ts").read_bytes())
    assert "a packet at" in str(probe(tmp_path / "c.ts")["error"])


@pytest.mark.parametrize(
    ("seconds", "word"), [(3.5, "go back from 5.00 s to 3.50 s"), (2e5, "apart"), (-2e5, "go back")]
)
def test_a_frame_far_from_all_others_is_named(tmp_path: Path, seconds: float, word: str) -> None:
    write_mp4(tmp_path / "f.mp4", *flash_and_click(), 24, 48000)
    with opened(tmp_path / "f.mp4") as container:
        notes = PictureNotes(picture_stream(container))
        for time in (0.0, 5.0, 4.9, 5.0):
            notes.note_time(time, 0.04)
        with pytest.raises(Unreadable, match=word):
            notes.note_time(seconds, 0.04)


def write_ts(path: Path, frames: np.ndarray, first: int) -> None:
    with av.open(str(path), "w", format="mpegts") as output:
        stream: Any = output.add_stream("libx264", rate=24)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        for index, picture in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(picture, "rgb24")
            frame.pts, frame.time_base = first + index, Fraction(1, 24)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))


def test_a_recording_that_starts_between_key_frames_is_read_from_its_first_one(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (280, 32, 32, 3)).astype(np.uint8)
    write_ts(tmp_path / "a.ts", noise, 0)  # a key frame every 250
    content = (tmp_path / "a.ts").read_bytes()
    (tmp_path / "b.ts").write_bytes(content[188 * (len(content) // 188 // 10) :])
    facts = probe(tmp_path / "b.ts")
    assert (facts.get("error"), facts["media_type"]) == (None, "video/mp2t")
    assert 0 < int(facts["num_frames"] or 0) <= 40
