from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest
from av.stream import Disposition

from data import measure as measuring
from data import media_open
from data.measure import Sensing, measure
from data.media import write_media, write_mp4
from data.records import Source
from tests.data.small_films import film, sound

QUICK = Sensing(speech=False)
BLANK = {"source_id": "", "sha256": "", "path": "", "group": "", "size_bytes": 0}


Track = tuple[str, np.ndarray, dict[str, Any]]
"""Codec, frames (F, H, W, 3) or samples (C, T), and rate, layout, disposition."""


def write(path: Path, *tracks: Track, form: str | None = None) -> None:
    """Any streams side by side, in the order of time; all exist before the first packet."""
    with av.open(str(path), "w", format=form) as output:
        streams: list[Any] = []
        for codec, content, details in tracks:
            stream: Any = output.add_stream(codec, rate=details.get("rate", 24))
            if content.ndim == 4:
                stream.height, stream.width = content.shape[1:3]
                stream.pix_fmt = {"mjpeg": "yuvj420p", "gif": "rgb8"}.get(codec, "yuv420p")
            else:
                stream.layout = details["layout"]
            if "disposition" in details:
                stream.disposition = details["disposition"]
            streams.append(stream)
        frames = [
            ((float(frame.pts * frame.time_base), number), frame)
            for number, (stream, (_, content, details)) in enumerate(zip(streams, tracks, strict=True))
            for frame in (shown(content) if content.ndim == 4 else heard(stream, content, **details))
        ]
        for (_, number), frame in sorted(frames, key=lambda item: item[0]):
            fits = not isinstance(frame, av.VideoFrame) or frame.format.name == streams[number].pix_fmt
            output.mux(streams[number].encode(frame if fits else frame.reformat(format=streams[number].pix_fmt)))
        for stream in streams:
            output.mux(stream.encode(None))


def shown(frames: np.ndarray) -> Iterator[av.VideoFrame]:
    for index, picture in enumerate(frames):
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), "rgb24")
        frame.pts, frame.time_base = index, Fraction(1, 24)
        yield frame


def heard(stream: Any, samples: np.ndarray, rate: int, layout: str, **_: Any) -> Iterator[av.AudioFrame]:
    context = stream.codec_context
    size = context.frame_size or 1024
    for low in range(0, samples.shape[1], size):
        block = samples[:, low : low + size]
        if (bits := context.format.name.strip("sp")) in {"16", "32"}:
            block = np.round(block.astype(float) * (2 ** (int(bits) - 1) - 1)).astype(f"int{bits}")
        packed = block if context.format.is_planar else block.T.reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(packed), context.format.name, layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, low, Fraction(1, rate)
        yield frame


STEREO: dict[str, Any] = {"rate": 48000, "layout": "stereo"}
ART: dict[str, Any] = {"disposition": Disposition.attached_pic}


def test_one_pass_gives_facts_picture_and_sound(tmp_path: Path) -> None:
    write_mp4(tmp_path / "f.mp4", film(), sound(), 24, 48000)
    found = measure(tmp_path / "f.mp4", Sensing())
    source = Source.model_validate(BLANK | found.facts)
    assert source.error is None
    assert (source.media_type, source.num_frames, source.header_num_frames, source.decoded) == (
        "video/mp4", 48, 48, "all",
    )  # fmt: skip
    assert (source.width, source.height, source.frame_rate, source.video_stream, source.audio_stream) == (
        96, 64, "24", 0, 1,
    )  # fmt: skip
    assert source.black_share == pytest.approx(1 / 6, abs=0.03)
    assert source.true_peak_db == pytest.approx(20 * np.log10(0.3), abs=0.3)
    assert source.speech_share == 0
    assert found.picture is not None
    assert found.sound is not None
    assert len(found.picture.times_s) == 48
    np.testing.assert_allclose(found.picture.times_s, np.arange(48) / 24, atol=1e-4)
    assert (found.sound.start_s, found.sound.duration_s) == (0, pytest.approx(2, abs=1e-3))


def test_picture_is_shown_whole_upright_and_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[np.ndarray] = []

    class Sense:
        def __init__(self, _sensing: Sensing) -> None: ...

        def take(self, _seconds: float, picture: np.ndarray) -> None:
            seen.append(picture)

        def finish(self) -> None: ...

    monkeypatch.setattr("data.media_pass.PictureSense", Sense)
    monkeypatch.setattr(measuring, "picture_shares", lambda *_args, **_keys: {})
    wide = np.zeros((4, 270, 512, 3), np.uint8)
    wide[:, :135] = 200  # stored; the turn puts it on the right
    write_media(tmp_path / "f.mp4", wide, None, frame_rate=24, sample_rate_hz=48000, rotation_deg=90)
    assert measure(tmp_path / "f.mp4", QUICK).facts["rotation_deg"] == 90
    assert {picture.shape for picture in seen} == {(256, 135, 3)}
    assert seen[0][:, 80:].mean() > 190
    assert seen[0][:, :55].mean() < 10


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp", "a.bmp", "a.tiff"])
def test_a_still_is_one_frame_without_error_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    cv2.imwrite(str(tmp_path / name), film(6)[5])
    (tmp_path / "film.mp4").write_bytes((tmp_path / name).read_bytes())
    found = measure(tmp_path / "film.mp4", QUICK)
    assert found.facts.get("error") is None
    assert (found.facts["num_frames"], found.facts["width"], found.facts["height"]) == (1, 96, 64)
    assert found.facts["media_type"] == {"a.jpg": "image/jpeg"}.get(name, f"image/{name[2:]}")
    assert (found.picture, found.sound) == (None, None)


def test_a_photograph_that_says_it_lies_on_its_side_is_turned(tmp_path: Path) -> None:
    picture = np.zeros((32, 64, 3), np.uint8)
    content = cv2.imencode(".jpg", picture)[1].tobytes()
    entry = struct.pack("<HHIHH", 0x112, 3, 1, 6, 0)  # orientation 6: a quarter turn clockwise shows it upright
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 1) + entry + struct.pack("<I", 0)
    (tmp_path / "a.jpg").write_bytes(content[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + content[2:])
    facts = measure(tmp_path / "a.jpg", QUICK).facts
    assert (facts["rotation_deg"], facts["width"], facts["height"]) == (90, 32, 64)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"<!DOCTYPE html><html><body>404</body></html>", "text/html"),
        (b"\xef\xbb\xbf\n<HTML>moved</HTML>", "text/html"),
        (b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n", "application/vnd.apple.mpegurl"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "text/plain"),
        (b'{"caption": "a dog"}', "application/json"),
        (b"<?xml version='1.0'?><MPD/>", "text/xml"),
        ("Grüße, das ist ein Text.\n".encode() * 400, "text/plain"),
        (b"PK\x03\x04" + bytes(60), "application/zip"),
        (b"%PDF-1.7\n\xe2\xe3" + bytes(60), "application/pdf"),
    ],
)  # fmt: skip
def test_what_is_no_media_is_named_by_its_content(tmp_path: Path, content: bytes, kind: str) -> None:
    (tmp_path / "film.mp4").write_bytes(content)
    assert measure(tmp_path / "film.mp4", QUICK).facts == {"media_type": kind, "error": f"is {kind}, not a media file"}


@pytest.mark.parametrize(
    ("form", "video", "audio", "kind"),
    [
        ("mp4", "libx264", "aac", "video/mp4"),
        ("mov", "mpeg4", "aac", "video/quicktime"),
        ("matroska", "libx264", "ac3", "video/x-matroska"),
        ("webm", "libvpx", "libopus", "video/webm"),
        ("avi", "mpeg4", "libmp3lame", "video/x-msvideo"),
        ("mpegts", "mpeg2video", "aac", "video/mp2t"),
        ("flv", "flv", "libmp3lame", "video/x-flv"),
        ("nut", "ffv1", "pcm_s16le", "video/x-nut"),
        ("ogg", None, "libopus", "audio/ogg"),
        ("mp3", None, "libmp3lame", "audio/mpeg"),
        ("flac", None, "flac", "audio/flac"),
        ("wav", None, "pcm_s16le", "audio/wav"),
        ("adts", None, "aac", "audio/aac"),
        ("gif", "gif", None, "image/gif"),
    ],
)
def test_type_rate_and_length_are_by_content_in_every_container(
    tmp_path: Path, form: str, video: str | None, audio: str | None, kind: str
) -> None:
    tracks: list[Track] = [] if video is None else [(video, film(), {})]
    tracks += [] if audio is None else [(audio, sound(), STEREO)]
    write(tmp_path / "film.mp4", *tracks, form=form)
    found = measure(tmp_path / "film.mp4", QUICK)
    assert found.facts.get("error") is None
    assert found.facts["media_type"] == kind
    assert (found.facts["num_frames"], found.picture is None) == ((0, True) if video is None else (48, False))
    if video is not None:
        assert found.facts["video_duration_s"] == pytest.approx(2, abs=0.05)
    if audio is not None:
        assert found.facts["audio_duration_s"] == pytest.approx(2, abs=0.06)
        assert 0.25 < float(found.facts["peak"] or 0) < 0.5  # lossy coders overshoot where the tone sets in


def test_the_largest_picture_is_used_and_the_default_sound(tmp_path: Path) -> None:
    write(
        tmp_path / "f.mkv",
        ("libx264", film()[:, :32, :48], {}),
        ("libx264", film(), {}),
        ("aac", sound(), STEREO),
        ("aac", sound()[:1], {"rate": 44100, "layout": "mono", "disposition": Disposition.default}),
    )
    facts = measure(tmp_path / "f.mkv", QUICK).facts
    assert (facts["num_video_streams"], facts["num_audio_streams"]) == (2, 2)
    assert (facts["video_stream"], facts["width"]) == (1, 96)
    assert (facts["audio_stream"], facts["sample_rate_hz"], facts["num_channels"]) == (3, 44100, 1)


def test_cover_art_is_never_the_picture(tmp_path: Path) -> None:
    cover = ("mjpeg", film(1, 256, 256), ART)
    write(tmp_path / "f.mp4", cover, ("libx264", film(), {}))
    write(tmp_path / "song.mp4", cover, ("aac", sound(), STEREO))
    facts = measure(tmp_path / "f.mp4", QUICK).facts
    assert (facts["num_video_streams"], facts["width"], facts["num_frames"]) == (1, 96, 48)
    found = measure(tmp_path / "song.mp4", QUICK)
    assert (found.facts.get("error"), found.facts["num_frames"], found.facts["media_type"]) == (None, 0, "audio/mp4")
    assert found.picture is None
    assert found.sound is not None
    assert found.sound.start_s == 0


def test_late_sound_lies_on_the_pictures_timeline(tmp_path: Path) -> None:
    late = [Fraction(1, 2) + Fraction(index, 24) for index in range(48)]
    write_media(
        tmp_path / "f.mkv", film(), sound(), frame_rate=24, sample_rate_hz=48000, container="matroska", frame_times=late
    )
    found = measure(tmp_path / "f.mkv", QUICK)
    assert found.sound is not None
    assert found.sound.start_s == pytest.approx(-0.5, abs=0.002)
    assert found.facts["video_start_s"] == pytest.approx(0.5, abs=0.002)


def test_sound_of_another_file_is_measured_from_the_first_frame_on(tmp_path: Path) -> None:
    write_media(tmp_path / "f.mkv", film(), sound(), frame_rate=24, sample_rate_hz=48000, container="matroska")
    write(tmp_path / "s.m4a", ("aac", 0.5 * sound(1.0)[:1], {"rate": 44100, "layout": "mono"}), form="mp4")
    found = measure(tmp_path / "f.mkv", QUICK, tmp_path / "s.m4a")
    assert (found.facts["num_channels"], found.facts["sample_rate_hz"]) == (1, 44100)
    assert found.facts["audio_start_s"] == found.facts["video_start_s"]
    assert found.sound is not None
    assert found.sound.start_s == 0
    missing = measure(tmp_path / "f.mkv", QUICK, tmp_path / "none.wav").facts
    assert missing["error"] == "its sound file none.wav there is no such file"
    write_mp4(tmp_path / "mute.mp4", film(), None, 24, 48000)
    assert measure(tmp_path / "f.mkv", QUICK, tmp_path / "mute.mp4").facts["error"] == (
        "its sound file mute.mp4 holds no sound"
    )


@pytest.mark.parametrize("container", ["mp4", "matroska", "webm"])
def test_key_frames_alone_tell_the_same_facts_of_time(tmp_path: Path, container: Any) -> None:
    form: dict[str, Any] = {"container": container}
    if container == "webm":
        form |= {"video_codec": "libvpx-vp9", "audio_codec": "libopus"}
    write_media(tmp_path / "f", film(), sound(), frame_rate=24, sample_rate_hz=48000, **form)
    whole = measure(tmp_path / "f", QUICK).facts
    found = measure(tmp_path / "f", Sensing(decode="keyframes", speech=False))
    assert (found.picture, found.sound, found.facts["decoded"]) == (None, None, "keyframes")
    exact = ("num_frames", "frame_rate", "frame_jitter", "width", "height", "video_codec", "media_type", "num_channels")
    assert {name: found.facts[name] for name in exact} == {name: whole[name] for name in exact}
    for name in ("video_start_s", "video_duration_s", "audio_start_s", "audio_duration_s"):
        assert found.facts[name] == pytest.approx(whole[name], abs=0.025)
    assert found.facts["true_peak_db"] == pytest.approx(whole["true_peak_db"], abs=0.5)


def test_picture_larger_than_the_limit_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    content = bytearray(cv2.imencode(".png", film(6)[5])[1].tobytes())
    header = struct.pack(">II", 60000, 60000) + bytes(content[24:29])
    content[16:33] = header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    (tmp_path / "f.png").write_bytes(bytes(content))
    assert measure(tmp_path / "f.png", QUICK).facts.get("error")


def test_a_stream_may_not_grow_beyond_the_limit_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mp4(tmp_path / "f.mp4", film(), None, 24, 48000)
    monkeypatch.setattr(media_open, "CODEC_OPTIONS", {"max_pixels": "1000"})
    assert "decode" in str(measure(tmp_path / "f.mp4", QUICK).facts["error"])


@pytest.mark.parametrize("num_flips", [1, 3, 20])
def test_flipped_bytes_in_the_pictures_are_damage_and_counted(tmp_path: Path, num_flips: int) -> None:
    random = np.random.default_rng(num_flips)
    smooth = cv2.GaussianBlur(random.normal(128, 300, (180, 240, 3)), (0, 0), 3).clip(0, 255).astype(np.uint8)
    frames = np.stack([np.roll(smooth, 3 * index, axis=1)[:120, :160] for index in range(48)])
    write_media(tmp_path / "f.mp4", frames, None, frame_rate=24, sample_rate_hz=48000)
    content = bytearray((tmp_path / "f.mp4").read_bytes())
    start, stop = content.find(b"mdat") + 2000, len(content) - 100  # behind the encoder's settings
    assert stop - start > 10_000
    for place in random.integers(start, stop, num_flips):
        content[place] ^= 0x55
    (tmp_path / "f.mp4").write_bytes(bytes(content))
    found = measure(tmp_path / "f.mp4", QUICK)
    assert "damaged" in str(found.facts["error"])
    assert (found.picture, found.sound) == (None, None)


def test_a_name_that_looks_like_an_address_is_a_files_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mp4(tmp_path / "f.mp4", film(), None, 24, 48000)
    monkeypatch.chdir(tmp_path)
    for name in ("concat:f.mp4|f.mp4", "-i.mp4", "frame%03d.png", os.fsdecode(b"\xff\xfe.mp4")):
        Path(name).write_bytes(Path("f.mp4").read_bytes())
        assert measure(Path(name), QUICK).facts["num_frames"] == 48
    assert "no such file" in str(measure(Path("concat:f.mp4"), QUICK).facts["error"])


@pytest.mark.parametrize("name", ["f.mkv", "f.mp4"])
def test_a_stream_nobody_uses_may_outlast_the_film(tmp_path: Path, name: str) -> None:
    used, other = STEREO | {"disposition": Disposition.default}, STEREO | {"disposition": Disposition.comment}
    write(tmp_path / name, ("libx264", film(), {}), ("aac", sound(), used), ("aac", sound(8.0), other))
    facts = measure(tmp_path / name, QUICK).facts
    assert float(facts["header_duration_s"] or 0) > 7.9
    assert facts.get("error") is None


@pytest.mark.parametrize("size", [(2, 2), (2, 300), (300, 2), (16, 16), (1, 1), (3, 7)])
def test_tiny_and_thin_pictures_are_measured(tmp_path: Path, size: tuple[int, int]) -> None:
    frames = np.random.default_rng(0).integers(0, 255, (6, *size, 3)).astype(np.uint8)
    with av.open(str(tmp_path / "f.mkv"), "w") as output:
        video: Any = output.add_stream("ffv1", rate=24)
        video.height, video.width, video.pix_fmt = *size, "bgr0"
        for frame in shown(frames):
            output.mux(video.encode(frame.reformat(format="bgr0")))
        output.mux(video.encode(None))
    found = measure(tmp_path / "f.mkv", QUICK)
    assert (found.facts.get("error"), found.facts["num_frames"]) == (None, 6)
    assert (found.facts["height"], found.facts["width"]) == size


def test_clip_semantics_need_weights() -> None:
    with pytest.raises(ValueError, match="semantics_weights"):
        Sensing(semantics="clip")
