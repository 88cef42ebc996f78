"""PSNR and SSIM against stored values, scikit-image, torchmetrics and closed forms."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import get_args

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torchmetrics.functional.image import peak_signal_noise_ratio as torch_psnr
from torchmetrics.functional.image import structural_similarity_index_measure as torch_ssim

from metrics.picture import PictureMeter, luma, psnr_db, ssim
from metrics.ssim import Convention, picture_ssim

GOLDEN = json.loads((Path(__file__).parents[1] / "assets/eval/psnr_ssim_golden.json").read_text())


def golden_pair() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The two pictures of the stored recipe."""
    y, x, c = np.meshgrid(np.arange(96), np.arange(128), np.arange(3), indexing="ij")
    reference = np.round(np.clip(128 + 60 * np.sin(x / 9 + c) + 50 * np.cos(y / 7 - c), 0, 255))
    distorted = np.clip(reference + (13 * x + 29 * y) % 17 - 8, 0, 255)
    return reference[None].astype(np.uint8), distorted[None].astype(np.uint8)


def noisy_clip(seed: int, num_frames: int = 3) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """A clip whose frames are hurt by ever more noise."""
    rng = np.random.default_rng(seed)
    reference = rng.integers(0, 256, (num_frames, 24, 20, 3))
    noise = rng.normal(0, 1, reference.shape) * (5 + 20 * np.arange(num_frames))[:, None, None, None]
    return reference.astype(np.uint8), np.clip(reference + noise, 0, 255).astype(np.uint8)


def test_psnr_and_ssim_equal_the_stored_values() -> None:
    pair = golden_pair()
    assert psnr_db(*pair).mean.value == pytest.approx(GOLDEN["psnr_rgb"], abs=1e-9)
    for convention, name in (
        ("gaussian", "ssim_gauss_crop_skimage"),
        ("gaussian_reflect", "ssim_reflect_full_torchmetrics"),
        ("uniform_7", "ssim_uniform7_skimage_default"),
    ):
        assert ssim(*pair, convention).value == pytest.approx(GOLDEN[name], abs=1e-6), convention


def test_psnr_headline_is_scikit_images_mean_and_pooled_is_torchmetrics() -> None:
    reference, distorted = noisy_clip(0)
    expected = np.mean([peak_signal_noise_ratio(a, b) for a, b in zip(reference, distorted, strict=True)])
    result = psnr_db(reference, distorted)
    assert result.mean.value == pytest.approx(expected, abs=1e-9)
    pooled = torch_psnr(torch.from_numpy(distorted).double(), torch.from_numpy(reference).double(), data_range=255.0)
    assert result.pooled.value == pytest.approx(float(pooled), abs=1e-6)
    assert result.mean.value is not None
    assert result.pooled.value is not None
    assert result.mean.value > result.pooled.value + 0.5


def test_ssim_equals_scikit_image_with_wangs_settings() -> None:
    reference, distorted = noisy_clip(1)
    expected = [
        structural_similarity(
            a, b, channel_axis=2, gaussian_weights=True, sigma=1.5, use_sample_covariance=False, data_range=255
        )
        for a, b in zip(reference, distorted, strict=True)
    ]
    assert ssim(reference, distorted).value == pytest.approx(np.mean(expected), abs=1e-6)


@given(level=st.integers(1, 255), base=st.integers(0, 255))
def test_psnr_of_a_constant_error_is_the_closed_form(level: int, base: int) -> None:
    low, high = min(base, 255 - level), min(base, 255 - level) + level
    reference = np.full((2, 4, 4, 3), low, np.uint8)
    expected = 20 * math.log10(255 / level)
    assert psnr_db(reference, np.full_like(reference, high)).mean.value == pytest.approx(expected)


def test_an_identical_frame_counts_a_hundred_db_and_is_counted() -> None:
    reference = np.zeros((4, 16, 16, 3), np.uint8)
    distorted = reference.copy()
    distorted[1:] = 255
    result = psnr_db(reference, distorted)
    assert result.num_identical == 1
    assert result.mean.value == pytest.approx(25.0)  # one frame of 100 dB and three of 0 dB
    assert psnr_db(reference, reference).pooled.value == 100


def test_ssim_of_two_flat_pictures_is_the_luminance_term() -> None:
    reference = np.full((1, 16, 16, 3), 100, np.uint8)
    distorted = np.full_like(reference, 150)
    c1 = (0.01 * 255) ** 2
    assert ssim(reference, distorted).value == pytest.approx((2 * 100 * 150 + c1) / (100**2 + 150**2 + c1), abs=1e-6)


def test_ssim_of_a_tiny_picture_is_missing_with_its_size() -> None:
    tiny = np.zeros((1, 10, 40, 3), np.uint8)
    score = ssim(tiny, tiny)
    assert score.value is None
    assert "40x10 px" in score.reason


def test_clips_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="retime or resize"):
        psnr_db(np.zeros((2, 16, 16, 3), np.uint8), np.zeros((3, 16, 16, 3), np.uint8))
    with pytest.raises(ValueError, match="uint8"):
        ssim(np.zeros((2, 16, 16, 3), np.float32), np.zeros((2, 16, 16, 3), np.float32))  # pyright: ignore[reportArgumentType]


def test_reflected_ssim_equals_torchmetrics() -> None:
    pair = noisy_clip(2)
    tensors = [torch.from_numpy(frames).permute(0, 3, 1, 2).double() for frames in pair]
    _, full = torch_ssim(*tensors, data_range=255.0, return_full_image=True)
    assert ssim(*pair, "gaussian_reflect").value == pytest.approx(float(full.mean()), abs=1e-6)


def test_ssim_is_as_exact_on_flat_areas_and_over_strips() -> None:
    reference, distorted = noisy_clip(3, 1)
    reference, distorted = (np.tile(item, (1, 9, 2, 1)) for item in (reference, distorted))  # 216 rows
    reference[:, :150], distorted[:, :150] = 100, 150
    expected = structural_similarity(
        reference[0], distorted[0], channel_axis=2, gaussian_weights=True, sigma=1.5,
        use_sample_covariance=False, data_range=255,
    )  # fmt: skip
    assert ssim(reference, distorted).value == pytest.approx(expected, abs=1e-6)


def test_luma_is_bt709_of_limited_range_rounded() -> None:
    frame = np.random.default_rng(0).integers(0, 256, (40, 50, 3)).astype(np.uint8)
    frame[0, :3] = [(0, 0, 0), (255, 255, 255), (255, 0, 0)]
    assert luma(frame)[0, :3].tolist() == [16, 235, 63]
    assert np.array_equal(luma(frame), np.rint(16 + 219 / 255 * (frame @ np.array([0.2126, 0.7152, 0.0722]))))


def test_meter_gives_what_whole_clips_give_and_luma_too() -> None:
    reference, distorted = noisy_clip(4)
    meter = PictureMeter()
    for pair in zip(reference, distorted, strict=True):
        meter.add(*pair)
    found = meter.result()
    assert found.psnr_rgb == psnr_db(reference, distorted)
    assert found.ssim_rgb == ssim(reference, distorted)
    lumas = [np.stack([luma(frame) for frame in frames]) for frames in (reference, distorted)]
    expected = np.mean([peak_signal_noise_ratio(*pair) for pair in zip(*lumas, strict=True)])
    assert found.psnr_y.mean.value == pytest.approx(expected, abs=1e-9)
    expected = np.mean(
        [
            structural_similarity(*pair, gaussian_weights=True, sigma=1.5, use_sample_covariance=False)
            for pair in zip(*lumas, strict=True)
        ]
    )
    assert found.ssim_y.value == pytest.approx(expected, abs=1e-6)


def test_meter_without_frames_and_with_frames_of_another_size() -> None:
    meter = PictureMeter()
    found = meter.result()
    assert {found.ssim_y.reason, found.psnr_rgb.mean.reason, found.psnr_y.pooled.reason} == {"the clip has no frames"}
    meter.add(np.zeros((16, 16, 3), np.uint8), np.zeros((16, 16, 3), np.uint8))
    with pytest.raises(ValueError, match="those before"):
        meter.add(np.zeros((16, 18, 3), np.uint8), np.zeros((16, 18, 3), np.uint8))


def test_the_largest_error_is_summed_exactly() -> None:
    black = np.zeros((1, 2048, 2048, 3), np.uint8)
    assert psnr_db(black, black + 255).mean.value == 0


@given(seed=st.integers(0, 99), small=st.integers(2, 8), factor=st.integers(2, 5))
@settings(max_examples=20, deadline=None)
def test_more_noise_more_blur_and_swapped_colours_score_worse(seed: int, small: int, factor: int) -> None:
    rng = np.random.default_rng(seed)
    y, x, c = np.meshgrid(np.arange(48), np.arange(64), np.arange(3), indexing="ij")
    clean = np.clip(128 + 60 * np.sin(x / (4 + seed % 5) + c) + 50 * np.cos(y / 5 - c), 0, 255).astype(np.uint8)[None]
    noise = rng.normal(0, small, clean.shape)
    little, much = (np.clip(clean + k * noise, 0, 255).astype(np.uint8) for k in (1, factor))
    soft, softer = (cv2.GaussianBlur(clean[0], (0, 0), sigma)[None] for sigma in (1.0, 1.0 + factor / 2))
    for better, worse in ((clean, little), (little, much), (soft, softer), (clean, clean[..., ::-1])):
        high, low = (psnr_db(clean, np.ascontiguousarray(item)).mean.value for item in (better, worse))
        assert high is not None
        assert low is not None
        assert high > low
        for convention in get_args(Convention):
            high, low = (ssim(clean, item, convention).value for item in (better, worse))
            assert high is not None
            assert low is not None
            assert high > low, convention


@pytest.mark.parametrize(("height", "width"), [(8, 8), (11, 9), (75, 40), (76, 43), (140, 23)])
def test_boxes_every_four_pixels_are_all_counted_once(height: int, width: int) -> None:
    pair = np.random.default_rng(height).integers(0, 256, (2, height, width)).astype(np.uint8)
    expected = []
    for top in range(0, height // 4 * 4 - 7, 4):
        for left in range(0, width // 4 * 4 - 7, 4):
            x, y = (item[top : top + 8, left : left + 8].astype(int) for item in pair)
            s1, s2, both = int(x.sum()), int(y.sum()), int((x * y).sum()) * 64
            squares = int((x * x + y * y).sum()) * 64
            above = (2 * s1 * s2 + 416) * (2 * (both - s1 * s2) + 235963)
            expected.append(above / (s1 * s1 + s2 * s2 + 416) / (squares - s1 * s1 - s2 * s2 + 235963))
    assert picture_ssim(*pair, "ffmpeg") == pytest.approx(np.mean(expected), abs=1e-12)
