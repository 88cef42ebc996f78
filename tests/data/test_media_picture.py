from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from data.limits import Limits
from data.measure import Sensing, measure, probe
from data.media import iter_frames, read_clip, write_media
from data.media_layout import Orientation
from data.records import ClipShape, Source
from data.rules import judge_one, treatments
from tasks.ingest import unfit
from tests.data.small_films import write

QUICK = Sensing(speech=False)
BLANK = {"source_id": "0", "sha256": "0", "path": "f", "group": "", "size_bytes": 1}


def film(pictures: np.ndarray, form: str) -> list[av.VideoFrame]:
    return [av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format=form) for picture in pictures]


@pytest.mark.parametrize(("codec", "suffix", "kind"), [("gif", "gif", "image/gif"), ("apng", "apng", "image/apng")])
def test_an_animation_is_a_silent_video_read_by_its_times(tmp_path: Path, codec: str, suffix: str, kind: str) -> None:
    pictures = np.zeros((30, 32, 32, 3), np.uint8)
    for index, picture in enumerate(pictures):
        picture[:, index : index + 3] = (255, 0, 0)  # a colour that every palette has
    path = write(tmp_path / f"film.{suffix}", codec, film(pictures, "rgb8" if codec == "gif" else "rgba"), {}, rate=20)
    facts = measure(path, QUICK).facts
    assert (facts["media_type"], facts["num_frames"], facts["audio_codec"]) == (kind, 30, None)
    assert facts["video_duration_s"] == pytest.approx(1.5, abs=0.011)
    assert unfit("clip", facts) is None
    source = Source.model_validate({**BLANK, **facts})
    assert judge_one(source, Limits()) == []
    assert "silence" in {item.treatment for item in treatments(source, Limits())}
    seen, sound = read_clip(path, 0.5, None, ClipShape(num_frames=10, frame_rate=20, height=32, width=32))
    assert [int(frame[16, :, 0].argmax()) for frame in seen] == list(range(10, 20))
    assert not sound.any()


def test_of_an_avif_the_film_is_read_and_not_its_still(tmp_path: Path) -> None:
    pictures = np.arange(20, dtype=np.uint8)[:, None, None, None] * np.full((64, 64, 3), 10, np.uint8)
    path = write(tmp_path / "film.avif", "libsvtav1", film(pictures, "yuv420p"), {}, rate=20, preset="12")
    facts = probe(path)
    assert (facts["media_type"], facts["num_frames"], facts["video_stream"]) == ("image/avif", 20, 1)
    assert unfit("clip", facts) is None


def test_an_animation_of_one_picture_is_a_still(tmp_path: Path) -> None:
    path = write(tmp_path / "film.gif", "gif", film(np.full((1, 32, 32, 3), 255, np.uint8), "rgb8"), {})
    assert unfit("clip", probe(path)) == "is a still picture (image/gif), not a video"


@pytest.mark.parametrize("brand", [b"\x02", b"\x12", b"\x00"])
def test_an_animated_webp_is_named_as_one(tmp_path: Path, brand: bytes) -> None:
    path = tmp_path / "film.webp"
    body = b"WEBPVP8X" + struct.pack("<I", 10) + brand + b"\0" * 9 + b"ANIM" + struct.pack("<I", 6) + b"\0" * 60
    path.write_bytes(b"RIFF" + struct.pack("<I", len(body)) + body)
    error = str(probe(path)["error"])
    assert error.startswith("is an animated WebP") == (brand != b"\x00")


def combed(num_frames: int = 12) -> np.ndarray:
    """A bright bar that moves 6 px a field: even lines at one instant, odd lines at the next."""
    fields = np.full((2 * num_frames, 96, 192, 3), 30, np.uint8)
    for index, field in enumerate(fields):
        field[:, 20 + 6 * index : 40 + 6 * index] = 220
    return np.where((np.arange(96) % 2 == 0)[None, :, None, None], fields[::2], fields[1::2])


@pytest.mark.parametrize(
    ("codec", "suffix", "options"),
    [
        ("libx264", "mp4", {"x264-params": "tff=1", "crf": "1"}),
        ("libx264", "mkv", {"x264-params": "bff=1", "crf": "1"}),
        ("mpeg2video", "ts", {"flags": "+ildct+ilme", "b": "20000k"}),
    ],
)
def test_an_interlaced_film_shows_one_instant_a_frame(
    tmp_path: Path, codec: str, suffix: str, options: dict[str, str]
) -> None:
    path = write(tmp_path / f"film.{suffix}", codec, film(combed(), "yuv420p"), {}, rate=25, **options)
    found = measure(path, QUICK)
    source = Source.model_validate({**BLANK, **found.facts})
    assert source.interlaced_share == 1
    assert "deinterlace" in {item.treatment for item in treatments(source, Limits())}
    for height, width in ((96, 192), (48, 96), (32, 64)):
        for index, (_, picture) in enumerate(iter_frames(path, height, width)):
            columns = np.nonzero(picture[..., 1].min(axis=0) > 125)[0] * (192 / width)
            assert abs(columns.mean() + 96 / width - (30 + 12 * index)) <= 2
            assert np.ptp(picture[..., 1].astype(int), axis=0).max() <= 40  # two instants in one differ by 190


def test_a_progressive_film_keeps_all_its_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "film.mp4", "libx264", film(combed(), "yuv420p"), {}, crf="1")
    assert probe(path)["interlaced_share"] == 0
    picture = next(iter(iter_frames(path, 96, 192)))[1]
    assert np.abs(np.diff(picture[..., 1].astype(int), axis=0)).max() > 150


@pytest.mark.parametrize(
    ("codec", "suffix", "form"), [("prores_ks", "mov", "yuv422p10le"), ("libx264", "mkv", "yuv420p")]
)
def test_pixels_are_as_wide_as_the_container_or_the_codec_says(
    tmp_path: Path, codec: str, suffix: str, form: str
) -> None:
    picture = np.full((96, 96, 3), 30, np.uint8)
    picture[36:60, 36:60] = 220  # shown 32 px wide, 24 px high
    path = tmp_path / f"film.{suffix}"
    write(path, codec, film(np.stack([picture] * 4), form), {"sample_aspect_ratio": Fraction(4, 3)})
    found = measure(path, QUICK)
    assert (found.facts["width"], found.facts["height"]) == (128, 96)
    seen = next(iter(iter_frames(path, 96, 128)))[1][..., 1] > 125
    assert abs(seen.any(axis=0).sum() - 32) <= 1
    assert abs(seen.any(axis=1).sum() - 24) <= 1
    cropped = next(iter(iter_frames(path, 96, 96)))[1][..., 1] > 125
    assert abs(cropped.any(axis=0).sum() - 32) <= 1


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("mirrored", [False, True])
def test_every_way_a_phone_is_held_is_shown_upright(tmp_path: Path, turns: int, mirrored: bool) -> None:
    upright = np.full((64, 96, 3), 30, np.uint8)
    upright[4:28, 4:28] = (220, 30, 30)
    upright[36:60, 68:92] = (30, 30, 220)
    stored = np.rot90(upright, turns)
    stored = stored[:, ::-1] if mirrored else stored
    assert np.array_equal(Orientation(turns, mirrored).apply(stored), upright)
    path = tmp_path / "film.mp4"
    write_media(path, [np.ascontiguousarray(stored)] * 3, None, frame_rate=24, sample_rate_hz=48000, crf=1)
    content = bytearray(path.read_bytes())
    a, b, c, d = ((1, 0, 0, 1), (0, 1, -1, 0), (-1, 0, 0, -1), (0, -1, 1, 0))[turns]
    a, b = (-a, -b) if mirrored else (a, b)  # the first row is where a step to the right goes: mirror first, then turn
    matrix = [value << 16 for value in (a, b, 0, c, d, 0, 0, 0)]
    place = content.find(b"tkhd") + 44
    content[place : place + 36] = struct.pack(">8i", *matrix) + struct.pack(">i", 1 << 30)
    path.write_bytes(content)
    facts = probe(path)
    assert (facts["width"], facts["height"], facts["rotation_deg"]) == (96, 64, 90 * turns)
    seen = next(iter(iter_frames(path, 64, 96)))[1].astype(int)
    assert np.abs(seen[8:24, 8:24] - (220, 30, 30)).max() <= 6
    assert np.abs(seen[40:56, 72:88] - (30, 30, 220)).max() <= 6
