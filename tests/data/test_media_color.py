from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
import pytest

from data.limits import Limits
from data.measure import Sensing, measure, probe
from data.media import iter_frames, read_clip
from data.media_color import FOREIGN_MATRICES, matrix_of, rgb
from data.media_open import Unreadable
from data.records import ClipShape, Source
from data.rules import judge_one, treatments
from data.tone_map import compressed, pq_light
from tests.data.small_films import write

WEIGHTS = {
    1: (0.2126, 0.0722),
    4: (0.30, 0.11),
    5: (0.299, 0.114),
    6: (0.299, 0.114),
    7: (0.212, 0.087),
    9: (0.2627, 0.0593),
}
"""Luma of red and blue by FFmpeg's number of the matrix. Source: ITU-T H.273, table 4."""
COLOURS = ((0.8, 0.3, 0.1), (0.1, 0.7, 0.9), (0.5, 0.5, 0.5), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0))
QUICK = Sensing(speech=False)
BLANK = {"source_id": "0", "sha256": "0", "path": "f", "group": "", "size_bytes": 1}
SQUARE = 64


def coded(colour: Sequence[float], matrix: int, bits: int, *, full: bool) -> tuple[int, int, int]:
    """Y, Cb, Cr of one colour, by the definition."""
    red_weight, blue_weight = WEIGHTS[matrix]
    red, green, blue = colour
    luma = red_weight * red + (1 - red_weight - blue_weight) * green + blue_weight * blue
    cb, cr = (blue - luma) / (2 * (1 - blue_weight)), (red - luma) / (2 * (1 - red_weight))
    if full:
        top, middle = 2**bits - 1, 2 ** (bits - 1)
        return round(luma * top), min(top, round(cb * top) + middle), min(top, round(cr * top) + middle)
    step = 2 ** (bits - 8)
    return round((16 + 219 * luma) * step), round((128 + 224 * cb) * step), round((128 + 224 * cr) * step)


def flat(codes: Sequence[int], form: str, side: int = SQUARE, **tags: int) -> av.VideoFrame:
    """A frame all of whose planes hold one number each."""
    frame = av.VideoFrame(side, side, form)
    deep = any(component.bits > 8 for component in frame.format.components)
    for plane, code in zip(frame.planes, codes, strict=True):
        kind = np.dtype("<u2") if deep else np.dtype(np.uint8)
        plane.update(np.full(plane.buffer_size // kind.itemsize, code, kind).tobytes())
    for name, value in tags.items():
        setattr(frame, name, value)
    return frame


@pytest.mark.parametrize("full", [False, True], ids=["limited", "full"])
@pytest.mark.parametrize("matrix", WEIGHTS)
@pytest.mark.parametrize(
    ("form", "bits"),
    [
        ("yuv420p", 8),
        ("yuv422p", 8),
        ("yuv444p", 8),
        ("nv12", 8),
        ("yuv420p10le", 10),
        ("yuv422p10le", 10),
        ("yuv444p12le", 12),
    ],
)
def test_colours_are_what_their_codes_mean(form: str, bits: int, matrix: int, full: bool) -> None:
    for colour in COLOURS:
        codes = coded(colour, matrix, bits, full=full)
        if form == "nv12":
            frame = flat((codes[0], 0), form)
            frame.planes[1].update(bytes(codes[1:]) * (frame.planes[1].buffer_size // 2))
        else:
            frame = flat(codes, form)
        frame.colorspace, frame.color_range = matrix, 2 if full else 1
        for side in (SQUARE, 24):
            assert np.abs(rgb(frame, side, side) - 255 * np.array(colour)).max() <= 1.6  # 8-bit codes round to 1.5


@pytest.mark.parametrize(("side", "matrix"), [(SQUARE, 5), (720, 1)])
def test_an_untagged_picture_is_bt601_or_by_its_lines_bt709(side: int, matrix: int) -> None:
    colour = (0.8, 0.3, 0.1)
    for untagged in (2, 3):
        seen = rgb(flat(coded(colour, matrix, 8, full=False), "yuv420p", side, colorspace=untagged), 24, 24)
        assert np.abs(seen - 255 * np.array(colour)).max() <= 1.6


@pytest.mark.parametrize(("primaries", "matrix"), [(1, 1), (9, 9), (6, 5), (7, 7)])
def test_a_matrix_given_by_primaries_is_found(primaries: int, matrix: int) -> None:
    assert matrix_of(flat((0, 0, 0), "yuv420p", colorspace=12, color_primaries=primaries)) == matrix


@pytest.mark.parametrize("matrix", FOREIGN_MATRICES)
def test_colours_that_nothing_converts_are_named_and_not_guessed(matrix: int) -> None:
    with pytest.raises(Unreadable, match=r"has colours coded as .*nothing here converts"):
        rgb(flat((120, 100, 150), "yuv444p", colorspace=matrix), 24, 24)


def test_a_file_in_such_colours_is_named_where_it_is_measured(tmp_path: Path) -> None:
    frames = [flat((120, 100, 150), "yuv444p", colorspace=8) for _ in range(3)]
    path = write(tmp_path / "film.mp4", "libx264", frames, {"colorspace": 8})
    assert str(probe(path)["error"]).startswith("has colours coded as YCgCo")


@pytest.mark.parametrize(
    ("form", "codes", "expected"),
    [
        ("gray", (128,), (128, 128, 128)),
        ("gray10le", (512,), (128, 128, 128)),
        ("gbrp", (77, 25, 204), (204, 77, 25)),
        ("gbrp10le", (308, 100, 816), (204, 77, 25)),
        ("yuvj420p", (128, 128, 128), (128, 128, 128)),
    ],
)
def test_grey_planar_and_full_range_formats(form: str, codes: tuple[int, ...], expected: tuple[int, ...]) -> None:
    frame = flat(codes, form)
    if form.startswith("gray"):
        frame.color_range = 2
    assert np.abs(rgb(frame, 24, 24) - np.array(expected)).max() <= 1


@pytest.mark.parametrize("form", ["yuv420p", "yuv422p"])
def test_halved_chroma_lies_where_it_was_taken(tmp_path: Path, form: str) -> None:
    """A ramp of red whose samples lie on the left one of two pixels, as H.264 has it, is no half pixel late."""
    frames = [flat((128, 128, 128), form, 128, colorspace=1, color_range=1) for _ in range(3)]
    for frame in frames:
        plane = frame.planes[2]
        rows = np.tile(64 + np.arange(plane.line_size) * 2, (plane.height, 1)).clip(0, 255).astype(np.uint8)
        plane.update(rows.tobytes())
    path = write(tmp_path / "film.mp4", "libx264", frames, {"colorspace": 1, "color_range": 1}, crf="0")
    seen = next(iter(iter_frames(path, 128, 128)))[1][64, 32:64, 0].astype(float)
    ramp = 255 * ((128 - 16) / 219 + (64 + np.arange(32, 64) - 128) / 224 * 2 * (1 - WEIGHTS[1][0]))
    slope = float(np.diff(ramp).mean())
    assert abs((seen - ramp).mean()) / slope < 0.1


@pytest.mark.parametrize(("form", "codes"), [("gray", (16, 126, 235)), ("gray10le", (64, 504, 940))])
def test_grey_of_limited_range_is_not_taken_for_full(form: str, codes: tuple[int, ...]) -> None:
    for code, expected in zip(codes, (0, 128, 255), strict=True):
        assert np.abs(rgb(flat((code,), form, color_range=1), 24, 24).astype(int) - expected).max() <= 1


def test_a_monochrome_film_has_its_blacks_and_whites(tmp_path: Path) -> None:
    frames = [flat((code,), "gray", color_range=1) for code in (16, 235, 16)]
    path = write(tmp_path / "film.mp4", "libx265", frames, {"color_range": 1}, **HDR_FILES["hevc_10"][3])
    assert [int(picture.mean()) for _, picture in iter_frames(path, 32, 32)] == [0, 255, 0]


def test_transparency_is_black_whatever_colour_lies_below() -> None:
    layers = np.zeros((SQUARE, SQUARE, 4), np.uint8)
    layers[:] = (200, 100, 50, 255)
    layers[:, 32:, 3] = 0
    layers[32:, :32, 3] = 128
    seen = rgb(av.VideoFrame.from_ndarray(layers, format="rgba"), 32, 32)
    assert np.abs(seen[:15, :15] - np.array((200, 100, 50))).max() <= 1
    assert np.abs(seen[17:, :15] - np.array((200, 100, 50)) * 128 / 255).max() <= 1
    assert seen[:, 17:].max() <= 1


def test_an_opaque_picture_is_the_same_with_and_without_an_alpha_channel() -> None:
    opaque = np.random.default_rng(0).integers(0, 256, (SQUARE, SQUARE, 4)).astype(np.uint8)
    opaque[..., 3] = 255
    frame = av.VideoFrame.from_ndarray(opaque, format="rgba")
    assert np.array_equal(rgb(frame, SQUARE, SQUARE), opaque[..., :3])


HDR_FILES = {
    "hevc_10": ("film.mp4", "libx265", "yuv420p10le", {"x265-params": "log-level=none:lossless=1"}),
    "hevc_12": ("film.mkv", "libx265", "yuv420p12le", {"x265-params": "log-level=none:lossless=1"}),
    "tags_in_the_container_alone": ("film.mkv", "ffv1", "yuv444p12le", {}),
    "prores": ("film.mov", "prores_ks", "yuv422p10le", {}),
    "avc_10": ("film.mp4", "libx264", "yuv444p10le", {"crf": "0"}),
}


@pytest.mark.parametrize("transfer", [16, 18], ids=["pq", "hlg"])
@pytest.mark.parametrize("kind", HDR_FILES)
def test_hdr_is_tone_mapped_wherever_it_is_read(tmp_path: Path, kind: str, transfer: int) -> None:
    name, codec, form, options = HDR_FILES[kind]
    tags = {"color_trc": transfer, "color_primaries": 9, "colorspace": 9, "color_range": 1}
    bits = 12 if "12" in form else 10
    level = 0.58 if transfer == 16 else 0.75  # diffuse white, ITU-R BT.2408
    codes = coded((level, level, level), 9, bits, full=False)
    level = (codes[0] / 2 ** (bits - 8) - 16) / 219
    path = write(tmp_path / name, codec, [flat(codes, form, **tags) for _ in range(24)], tags, **options)
    light = float(pq_light(np.array([level]))[0]) if transfer == 16 else 203.0
    expected = round(255 * float((compressed(np.array([light]))[0] / 203) ** (1 / 2.4)))
    found = measure(path, QUICK)
    source = Source.model_validate({**BLANK, **found.facts})
    assert source.color_transfer == {16: "smpte2084", 18: "arib_std_b67"}[transfer]
    assert {"tone_map", "ten_bit"} <= {item.treatment for item in treatments(source, Limits())}
    assert judge_one(source, Limits(min_duration_s=0.5)) == []
    assert [item.rule for item in judge_one(source, Limits(min_duration_s=0.5, hdr="reject"))] == ["validate.hdr"]
    streamed = next(iter(iter_frames(path, 32, 32)))[1]
    clip, _ = read_clip(path, 0.25, None, ClipShape(num_frames=5))
    assert np.abs(streamed - expected).max() <= 1
    assert np.abs(clip - expected).max() <= 1
    assert found.picture is not None
    assert np.abs(255 * found.picture.luma - expected).max() <= 1.5


@pytest.mark.parametrize("full", [False, True], ids=["limited", "full"])
@pytest.mark.parametrize(
    ("form", "bits"), [("yuv420p10le", 10), ("yuv444p12le", 12), ("gray10le", 10), ("gbrp12le", 12)]
)
def test_hdr_white_and_grey_are_exact_in_every_range_and_depth(form: str, bits: int, full: bool) -> None:
    for level, expected in ((0.0, 0), (0.5081, 189), (0.7518, 255), (1.0, 255)):
        codes = coded((level, level, level), 9, bits, full=full or (form.startswith("g") and form != "gray10le"))
        codes = (codes[0],) * 3 if form.startswith("gbr") else codes[: 1 if form == "gray10le" else 3]
        frame = flat(codes, form, color_trc=16, color_primaries=9, color_range=2 if full else 1)
        assert np.abs(rgb(frame, 24, 24).astype(int) - expected).max() <= 1


def test_hdr_colours_are_turned_and_scaled_like_any_other(tmp_path: Path) -> None:
    left, right = (coded(colour, 9, 10, full=False) for colour in ((0.5, 0.3, 0.3), (0.3, 0.3, 0.5)))
    frame = flat(left, "yuv444p10le", color_trc=16, color_primaries=9, colorspace=9, color_range=1)
    for plane, code in zip(frame.planes, right, strict=True):
        lines = np.frombuffer(plane, "<u2").reshape(SQUARE, -1).copy()
        lines[:, 32:] = code
        plane.update(lines.tobytes())
    for side in (SQUARE, 32):
        seen = rgb(frame, side, side).astype(int)
        assert (seen[:, : side // 2 - 2, 0] > seen[:, : side // 2 - 2, 2] + 40).all()
        assert (seen[:, side // 2 + 2 :, 2] > seen[:, side // 2 + 2 :, 0] + 40).all()
