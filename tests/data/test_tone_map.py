from __future__ import annotations

import numpy as np
import pytest
from av.video.reformatter import ColorPrimaries, ColorTrc
from hypothesis import given
from hypothesis import strategies as st

from data import tone_map
from data.tone_map import compressed, hlg_scene, pq_light, pq_signal, to_sdr, to_xyz

PQ, HLG = ColorTrc.SMPTE2084, ColorTrc.ARIB_STD_B67
BT2020, BT709, P3 = ColorPrimaries.BT2020, ColorPrimaries.BT709, ColorPrimaries.SMPTE432
LUMINANCE_2020 = np.array([0.2627, 0.6780, 0.0593])
LUMINANCE_709 = np.array([0.2126, 0.7152, 0.0722])
TO_709 = np.array([[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]])
"""As printed in ITU-R BT.2087."""


def codes(signal: np.ndarray) -> np.ndarray:
    """16-bit codes of a signal of 0–1, (H, W, 3)."""
    return np.rint(np.asarray(signal) * 65535).astype(np.uint16).reshape(1, -1, 3)


def hlg_signal(light: np.ndarray) -> np.ndarray:
    """HLG signal that a display of 1000 cd/m² shows as `light` (N, 3) by BT.2020 primaries: BT.2100, backwards."""
    luminance = np.maximum((light @ LUMINANCE_2020)[:, None] / 1000, 1e-12)
    scene = light / 1000 * luminance ** (1 / 1.2 - 1)
    a = 0.17883277
    b, c = 1 - 4 * a, 0.5 - a * np.log(4 * a)
    return np.where(scene <= 1 / 12, np.sqrt(3 * scene), a * np.log(np.maximum(12 * scene - b, 1e-12)) + c)


def plainly(light: np.ndarray) -> np.ndarray:
    """What `to_sdr` should make of light (N, 3) by BT.2020 primaries, 0–255, one colour at a time, without tables."""
    result: list[list[float]] = []
    for colour in light:
        narrow = TO_709 @ colour
        grey, low = LUMINANCE_709 @ narrow, narrow.min()
        if low < 0:
            narrow = grey + grey / (grey - low) * (narrow - grey)
        top = narrow.max()
        shown = float(compressed(np.array([top]))[0]) if top > 0 else 0.0
        result.append([255 * (max(0.0, part) / top * shown / 203) ** (1 / 2.4) if top > 0 else 0 for part in narrow])
    return np.array(result)


@pytest.mark.parametrize(
    ("signal", "light"),
    [(0.0, 0.0), (0.5081, 100.0), (0.5807, 203.0), (0.7518, 1000.0), (0.9026, 4000.0), (1.0, 10000.0)],
)
def test_pq_is_the_standards_curve(signal: float, light: float) -> None:
    assert float(pq_light(np.array([signal]))[0]) == pytest.approx(light, rel=2e-3)
    assert float(pq_signal(light)) == pytest.approx(signal, abs=1e-4)


@given(st.floats(0, 10000))
def test_pq_there_and_back_is_the_same_light(light: float) -> None:
    assert float(pq_light(pq_signal(light))) == pytest.approx(light, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("signal", "light"), [(0.38, 26.0), (0.75, 203.0), (1.0, 1000.0)])
def test_hlg_shows_the_reference_levels_of_production(signal: float, light: float) -> None:
    """ITU-R BT.2408, table 1: grey card, diffuse white, peak."""
    assert float(1000 * hlg_scene(np.array([signal]))[0] ** 1.2) == pytest.approx(light, rel=0.01)


def test_primaries_give_the_published_matrices() -> None:
    assert np.allclose(np.linalg.solve(to_xyz(BT709), to_xyz(BT2020)), TO_709, atol=1e-4)
    assert np.allclose(to_xyz(BT2020)[1], LUMINANCE_2020, atol=1e-4)
    assert np.allclose(to_xyz(BT709)[1], LUMINANCE_709, atol=1e-4)


@pytest.mark.parametrize("transfer", [PQ, HLG])
def test_greys_stay_grey_and_every_step_up_is_no_step_down(transfer: int) -> None:
    ramp = np.arange(65536, dtype=np.uint16)[None, :, None].repeat(3, axis=2)
    seen = to_sdr(ramp, transfer, BT2020)[0].astype(int)
    assert np.ptp(seen, axis=1).max() == 0
    assert np.diff(seen[:, 0]).min() >= 0
    assert np.diff(seen[:, 0]).max() == 1  # no level of 256 is left out
    assert (seen[0, 0], seen[-1, 0]) == (0, 255)


@pytest.mark.parametrize(
    ("light", "level"),
    [(26.0, 0.425), (88.0, 0.706), (203.0, 0.903), (1000.0, 1.0)],
    ids=["grey card", "knee", "diffuse white", "peak"],
)
def test_reference_levels_land_where_the_docstring_says(light: float, level: float) -> None:
    """18 % grey is at 41 % of BT.709's own camera curve: a viewer sees the same exposure."""
    for transfer, signal in ((PQ, pq_signal(light)), (HLG, hlg_signal(np.full((1, 3), light)))):
        seen = to_sdr(codes(np.broadcast_to(signal, (1, 3))), transfer, BT2020)
        assert np.abs(seen / 255 - level).max() < 0.004


def test_light_below_the_knee_is_not_touched_and_none_above_passes_white() -> None:
    light = np.linspace(0, 10000, 5001)
    seen = compressed(light)
    assert np.array_equal(seen[light <= 87], light[light <= 87])
    assert np.diff(seen).min() >= -1e-9
    assert seen.max() == pytest.approx(203)
    assert (seen <= light + 1e-9).all()


@pytest.mark.parametrize("transfer", [PQ, HLG])
def test_any_colour_is_what_the_standards_say_worked_out_plainly(transfer: int) -> None:
    light = np.random.default_rng(0).uniform(0, 1, (400, 3)) ** 3 * 900
    light[:60] *= np.eye(3)[np.arange(60) % 3]  # BT.709 does not reach these
    light = light[hlg_signal(light).max(axis=1) <= 1]  # nor HLG the brightest of them
    assert len(light) > 300
    seen = to_sdr(codes(pq_signal(light) if transfer == PQ else hlg_signal(light)), transfer, BT2020)[0]
    assert np.abs(seen - plainly(light)).max() <= 1


def test_the_channels_keep_their_ratios_above_the_knee_too() -> None:
    light = np.array([[800.0, 400.0, 200.0], [900.0, 90.0, 450.0], [60.0, 30.0, 15.0]])
    seen = to_sdr(codes(pq_signal(light)), PQ, BT709)[0]
    shown = (seen / 255.0) ** 2.4
    assert np.allclose(shown / shown[:, :1], light / light[:, :1], rtol=0.03)
    assert shown[0, 0] > 0.95  # bright, yet no grey


def test_a_colour_outside_bt709_pales_and_keeps_its_luminance() -> None:
    light = np.array([[0.0, 60.0, 0.0]])
    shown = 203 * (to_sdr(codes(pq_signal(light)), PQ, BT2020)[0] / 255.0) ** 2.4
    assert float(shown[0] @ LUMINANCE_709) == pytest.approx(60 * 0.678, rel=0.02)
    assert shown[0].argmax() == 1


def test_primaries_count_and_unknown_ones_are_bt2020() -> None:
    red = codes(pq_signal(np.array([[60.0, 5.0, 5.0]])))
    seen = {item: to_sdr(red, PQ, item)[0, 0].tolist() for item in (BT709, P3, BT2020, 2, 200)}
    assert seen[2] == seen[200] == seen[BT2020]
    assert seen[BT709][0] < seen[P3][0] < seen[BT2020][0]
    assert seen[BT709][1] == round(255 * (5 / 203) ** (1 / 2.4))


def test_the_same_frame_gives_the_same_bytes_whatever_lies_beside_it() -> None:
    noise = np.random.default_rng(1).integers(0, 65536, (8, 8, 3)).astype(np.uint16)
    both = to_sdr(np.concatenate([noise, np.full_like(noise, 65535)]), PQ, BT2020)
    assert np.array_equal(both[:8], to_sdr(noise, PQ, BT2020))
    assert both.flags.c_contiguous
    assert tone_map.NUM_CODES == 65536
