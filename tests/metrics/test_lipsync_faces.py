"""Faces, tracks, cuts and crops against the published pipeline, written plainly here."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.signal import medfilt

from metrics.lipsync import faces
from metrics.lipsync.crops import Cropper, Jpeg, at_25_fps, sixteen_bit, through_aac
from metrics.lipsync.faces import MTCNN, Track, tracks
from metrics.lipsync.s3fd import S3FD, S3FDNet, priors
from metrics.lipsync.shots import Cuts

BOX = np.array([100.0, 60, 200, 180, 0.99])


def moved(by: float) -> NDArray[np.float64]:
    return BOX + np.array([by, 0, by, 0, 0])


def none() -> NDArray[np.float64]:
    return np.empty((0, 5))


def test_track_takes_gaps_up_to_the_limit_and_lies_straight_between() -> None:
    found = [BOX[None]] * 5 + [none()] * 24 + [moved(25)[None]] * 5
    (track,) = tracks(found, 100, 25, 0.5)
    assert (track.first, track.last, track.num_found) == (100, 133, 10)
    assert track.boxes_L4[4 + 10, 0] == pytest.approx(110)
    assert track.side_px == 120
    two = tracks([BOX[None]] * 5 + [none()] * 25 + [BOX[None]] * 5, 0, 25, 0.5)
    assert [(track.first, track.last) for track in two] == [(0, 4), (30, 34)]


def test_two_people_give_two_tracks_whatever_their_order_in_a_frame() -> None:
    pairs = [np.stack([BOX, moved(300)]) if frame % 2 else np.stack([moved(300), BOX]) for frame in range(20)]
    first, second = tracks(pairs, 0, 25, 0.5)
    assert first.num_found == second.num_found == 20
    assert (first.boxes_L4[:, 0] == 400).all()
    assert (second.boxes_L4[:, 0] == 100).all()


def test_a_jump_ends_a_track() -> None:
    assert [track.num_found for track in tracks([BOX[None]] * 8 + [moved(90)[None]] * 9, 0, 25, 0.5)] == [8, 9]


def published_crops(boxes: NDArray[np.float64], picture: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """The published crop of one picture by each box of a track: the whole picture padded, then cut."""
    half = medfilt(np.maximum(boxes[:, 3] - boxes[:, 1], boxes[:, 2] - boxes[:, 0]) / 2, 13)
    y, x = medfilt((boxes[:, 1] + boxes[:, 3]) / 2, 13), medfilt((boxes[:, 0] + boxes[:, 2]) / 2, 13)
    result = []
    for s, cy, cx in zip(half, y, x, strict=True):
        pad = int(s * 1.8)
        padded = np.pad(picture, ((pad, pad), (pad, pad), (0, 0)), "constant", constant_values=110)
        my, mx = cy + pad, cx + pad
        face = padded[int(my - s) : int(my + s * 1.8), int(mx - s * 1.4) : int(mx + s * 1.4)]
        result.append(cv2.resize(face, (224, 224)))
    return result


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_crops_equal_the_published_ones_also_over_the_edges(seed: int) -> None:
    random = np.random.default_rng(seed)
    picture = random.integers(0, 256, (120, 160, 3), dtype=np.uint8)
    centre, half = random.uniform((0, 0), (160, 120)), random.uniform(15, 80)
    corners = np.concatenate([centre - half, centre + half]) + random.normal(0, 3, (20, 4))
    cropper = Cropper(Track(0, 20, corners))
    for index, expected in enumerate(published_crops(corners, picture[..., ::-1])):
        assert np.array_equal(cropper.crop(picture, index), expected)


def test_crop_refuses_a_track_that_has_no_median() -> None:
    with pytest.raises(ValueError, match="6 pictures"):
        Cropper(Track(0, 6, np.tile(BOX[:4], (6, 1))))


def test_jpeg_loses_little_and_keeps_colours_in_place() -> None:
    y, x = np.mgrid[:224, :224]
    smooth = np.stack([x, y, 255 - x], axis=-1).astype(np.uint8)
    textured = (smooth // 2 + np.random.default_rng(0).integers(0, 60, smooth.shape)).astype(np.uint8)
    codec = Jpeg()
    for picture, most in ((smooth, 2.5), (textured, 25)):
        loss = np.abs(codec.through(picture).astype(int) - picture).mean()
        assert 0 < loss < most


def test_aac_keeps_length_and_place() -> None:
    random = np.random.default_rng(0)
    sound = sixteen_bit(0.2 * np.convolve(random.standard_normal(16_000), np.ones(8) / 3, "same"))
    heard = through_aac(sound)
    assert heard.shape == sound.shape
    assert not np.array_equal(heard, sound)
    spectra = np.fft.rfft(sound.astype(float)).conj() * np.fft.rfft(heard.astype(float))
    assert np.fft.irfft(spectra).argmax() == 0


def test_sixteen_bit_clips() -> None:
    assert sixteen_bit(np.array([-2.0, -1, 0, 0.5, 1])).tolist() == [-32768, -32768, 0, 16384, 32767]


@pytest.mark.parametrize(
    ("fps", "expected"), [(25, list(range(10))), (50, [0, 2, 4, 6, 8]), (12.5, [0, 0, 1, 1, 2, 2])]
)
def test_retimed_pictures_are_what_is_on_screen(fps: float, expected: list[int]) -> None:
    count = 3 if fps == 12.5 else 10
    timed = [(number / fps, np.full((1, 1, 3), number, np.uint8)) for number in range(count)]
    assert [int(picture[0, 0, 0]) for picture in at_25_fps(timed)] == expected


def scenes(lengths: list[int]) -> Cuts:
    """Cuts of scenes of alternating brightness."""
    cuts = Cuts()
    for number, length in enumerate(lengths):
        for _ in range(length):
            cuts.take(np.full((20, 300, 3), 250 if number % 2 else 20, np.uint8))
    return cuts


def test_cuts_part_shots_and_flashes_are_one() -> None:
    assert scenes([40, 30, 20]).shots() == [(0, 40), (40, 70), (70, 90)]
    assert scenes([10, 50]).shots() == [(0, 60)]  # the first shot is never shorter than 15 frames
    # The answers of PySceneDetect 0.7.2: changes sooner than 15 frames after another wait until it is calm.
    assert scenes([40, 30, 5, 5, 5, 5, 40]).shots() == [(0, 40), (40, 70), (70, 90), (90, 130)]


def test_s3fd_has_the_official_layout_and_refuses_another(tmp_path: Path) -> None:
    state = S3FDNet().state_dict()
    assert len(state) == 65
    assert state["conf.0.weight"].shape == (4, 256, 3, 3)
    assert sum(tensor.numel() for tensor in state.values()) * 4 == pytest.approx(89.8e6, rel=1e-3)
    del state["L2Norm4_3.weight"]
    torch.save(state, tmp_path / "s3fd.pth")
    with pytest.raises(RuntimeError, match="L2Norm4_3"):
        S3FD(tmp_path / "s3fd.pth")


def test_s3fd_boxes_follow_from_priors_and_moves(tmp_path: Path) -> None:
    """A net that is sure of map 4's priors alone, 256 px wide every 64 px, moved right by a tenth of their width."""
    state = {name: torch.zeros_like(tensor) for name, tensor in S3FDNet().state_dict().items()}
    for number in range(6):
        state[f"conf.{number}.bias"][-1] = 5.0 if number == 4 else -5.0
    state["loc.4.bias"][0] = 1.0
    torch.save(state, tmp_path / "s3fd.pth")
    detector = S3FD(tmp_path / "s3fd.pth")
    picture = np.zeros((512, 512, 3), np.uint8)
    found = detector.faces(picture, 0.25, 0.9)  # looked at in 128 px: 2 x 2 priors, of which three overlap the surest
    assert found.shape == (1, 5)
    assert found[0, 4] == pytest.approx(1 / (1 + np.exp(-5)), rel=1e-5)
    left, top, right, bottom = found[0, :4]
    assert right - left == pytest.approx(4 * 256)
    assert bottom - top == pytest.approx(4 * 256)
    assert (left + right) / 2 - 4 * 25.6 in (pytest.approx(4 * 32), pytest.approx(4 * 96))
    assert len(detector.faces(picture, 0.25, 0.995)) == 0
    assert len(detector.faces(picture[:100], 0.25, 0.1)) == 0  # too small to look at


def test_priors_are_in_rows_and_shares_of_the_picture() -> None:
    maps = [torch.Size((rows, 2)) for rows in (3, 1, 1, 1, 1, 1)]
    found = priors(torch.Size((100, 200)), maps)
    assert found[1].tolist() == pytest.approx([1.5 * 4 / 200, 0.5 * 4 / 100, 16 / 200, 16 / 100])
    assert found[2].tolist() == pytest.approx([0.5 * 4 / 200, 1.5 * 4 / 100, 16 / 200, 16 / 100])


def test_mtcnn_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(faces.PACKAGES, "faces", ("no_such_package", "pip install --no-deps facenet-pytorch"))
    with pytest.raises(RuntimeError, match="--no-deps facenet-pytorch"):
        MTCNN()
    assert "not S3FD" in MTCNN.name
