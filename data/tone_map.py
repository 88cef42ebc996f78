"""PQ and HLG pictures as ordinary ones: 8-bit BT.709, the same way for every frame of every file.

From signal to light of the display (ITU-R BT.2100), to BT.709 primaries, paled where BT.709 cannot show a colour,
compressed above the knee of ITU-R BT.2390, to the signal of an ordinary display (ITU-R BT.1886). Up to 88 cd/m² light
stays as it is; diffuse white lands at 90 % of the signal, and what is brighter than `PEAK` is white.

Arrays: H height, W width, 3 red, green, blue.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
from av.video.reformatter import ColorPrimaries, ColorTrc
from numpy.typing import NDArray

Light = NDArray[np.float32]
"""Light of one or more channels, cd/m²."""

HDR: Final = (ColorTrc.SMPTE2084, ColorTrc.ARIB_STD_B67)
"""PQ and HLG as decoders number them."""
PEAK: Final = 1000.0
"""Brightest light that is told apart, cd/m²: HLG's nominal display (BT.2100) and the screens most PQ is graded on."""
WHITE: Final = 203.0
"""Light that the ordinary display's white stands for, cd/m²: the diffuse white of ITU-R BT.2408."""
PQ_PEAK: Final = 10000.0
"""Light of PQ's full signal, cd/m²."""
M1, M2 = 2610 / 16384, 2523 / 4096 * 128
C1, C2, C3 = 3424 / 4096, 2413 / 4096 * 32, 2392 / 4096 * 32
"""PQ. Source: SMPTE ST 2084, equations 4.1 and 5.1."""
A: Final = 0.17883277
B, C = 1 - 4 * A, 0.5 - A * np.log(4 * A)
"""HLG. Source: ITU-R BT.2100, table 5."""
SYSTEM_GAMMA: Final = 1.2
"""HLG's rendering for a display of 1000 cd/m². Source: ITU-R BT.2100, table 5."""
DISPLAY_GAMMA: Final = 2.4
"""Source: ITU-R BT.1886, with a black of 0."""
NUM_CODES: Final = 2**16
"""Of the signal that comes in, and steps of the tables; they are laid over the root of light, finest in the dark."""
D65: Final = (0.3127, 0.3290)
BT2020: Final = ((0.708, 0.292), (0.170, 0.797), (0.131, 0.046))
PRIMARIES: Final = {
    ColorPrimaries.BT709: ((0.640, 0.330), (0.300, 0.600), (0.150, 0.060)),
    ColorPrimaries.SMPTE432: ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060)),
}
"""Chromaticities x, y of red, green and blue. Source: ITU-R BT.2020, BT.709, SMPTE RP 431-2."""


def to_sdr(
    signal_HW3: NDArray[np.uint16], transfer: int, primaries: int, levels: tuple[int, int] = (0, NUM_CODES - 1)
) -> NDArray[np.uint8]:
    """The picture on an ordinary display (H, W, 3); greys stay grey, and no channel's light passes another's.

    Args:
        signal_HW3: 16-bit codes.
        transfer: One of `HDR`.
        primaries: FFmpeg's number; what is not known is BT.2020, as the standard has it.
        levels: Codes of the signal's 0 and 1.
    """
    known = next((item for item in PRIMARIES if item == primaries), ColorPrimaries.BT2020)
    table = light_of(transfer, *levels)
    red, green, blue = (table[signal_HW3[..., index]] for index in range(3))
    if transfer == ColorTrc.ARIB_STD_B67:
        rendered = rendering(red, green, blue, known)
        red, green, blue = red * rendered, green * rendered, blue * rendered
    light_3HW = paled(narrowed(red, green, blue, known))
    brightest = light_3HW.max(axis=0)
    light_3HW /= np.maximum(brightest, np.finfo(np.float32).tiny)
    light_3HW *= shown()[rooted(brightest, PEAK)]
    return np.ascontiguousarray(signals()[rooted(light_3HW, WHITE)].transpose(1, 2, 0))


def rooted(light: Light, full: float) -> NDArray[np.uint16]:
    """Place in a table that is laid over the root of light from 0 to `full`; what is brighter is at its end."""
    root = np.sqrt(np.minimum(light, np.float32(full)) * np.float32((NUM_CODES - 1) ** 2 / full))
    return (root + np.float32(0.5)).astype(np.uint16)


def pq_light(signal: NDArray[np.float64]) -> NDArray[np.float64]:
    """Light of the display, cd/m², of a PQ signal of 0–1."""
    root = signal ** (1 / M2)
    return PQ_PEAK * (np.maximum(root - C1, 0) / (C2 - C3 * root)) ** (1 / M1)


def pq_signal(light: NDArray[np.float64] | float) -> NDArray[np.float64]:
    """PQ signal of 0–1 of a light in cd/m²."""
    power = (np.asarray(light, np.float64) / PQ_PEAK) ** M1
    return ((C1 + C2 * power) / (1 + C3 * power)) ** M2


def hlg_scene(signal: NDArray[np.float64]) -> NDArray[np.float64]:
    """Light of the scene, 0–1, of an HLG signal of 0–1."""
    return np.where(signal <= 0.5, signal**2 / 3, (np.exp((signal - C) / A) + B) / 12)


@functools.cache
def light_of(transfer: int, black: int, white: int) -> Light:
    """Light by signal code: of the display in cd/m² for PQ, of the scene with 1000 for its white for HLG."""
    signal = np.clip((np.arange(NUM_CODES) - black) / (white - black), 0, 1)
    light = PEAK * hlg_scene(signal) if transfer == ColorTrc.ARIB_STD_B67 else pq_light(signal)
    return light.astype(np.float32)


def rendering(red: Light, green: Light, blue: Light, primaries: int) -> Light:
    """Factor from light of the scene to light of the display: HLG's rendering, by luminance."""
    weights = to_xyz(primaries)[1].astype(np.float32)
    luminance = weights[0] * red + weights[1] * green + weights[2] * blue
    return (luminance / np.float32(PEAK)) ** np.float32(SYSTEM_GAMMA - 1)


@functools.cache
def to_xyz(primaries: int) -> NDArray[np.float64]:
    """Matrix (3, 3) from linear red, green and blue to CIE XYZ, white being D65 with Y = 1."""
    corners = np.array([(x / y, 1, (1 - x - y) / y) for x, y in PRIMARIES.get(ColorPrimaries(primaries), BT2020)]).T
    x, y = D65
    return corners * np.linalg.solve(corners, np.array((x / y, 1, (1 - x - y) / y)))


def narrowed(red: Light, green: Light, blue: Light, primaries: int) -> Light:
    """Light (3, H, W) by BT.709 primaries, below 0 where BT.709 does not reach; equal channels stay exactly equal."""
    matrix = np.linalg.solve(to_xyz(ColorPrimaries.BT709), to_xyz(primaries)).astype(np.float32)
    channels, result = (red, green, blue), np.empty((3, *red.shape), np.float32)
    for index, own in enumerate(channels):
        result[index] = own
        for other, light in enumerate(channels):
            if other != index:
                result[index] += matrix[index, other] * (light - own)  # a row sums to 1
    return result


def paled(light_3HW: Light) -> Light:
    """Colours outside BT.709 mixed with the grey of their luminance until no channel is below 0."""
    low = np.minimum(light_3HW.min(axis=0), 0)
    if not low.any():
        return light_3HW
    grey = np.tensordot(to_xyz(ColorPrimaries.BT709)[1].astype(np.float32), light_3HW, 1)
    share = grey / np.maximum(grey - low, np.finfo(np.float32).tiny)
    return np.maximum(grey + np.where(low < 0, share, 1) * (light_3HW - grey), 0)


def compressed(light: NDArray[np.float64]) -> NDArray[np.float64]:
    """Light of a display whose peak is `WHITE`, cd/m². Source: ITU-R BT.2390, 5.4.1, for blacks of 0."""
    full = pq_signal(PEAK)
    given, most = pq_signal(np.minimum(light, PEAK)) / full, pq_signal(WHITE) / full
    knee = 1.5 * most - 0.5
    t = np.maximum(given - knee, 0) / (1 - knee)
    bend = (2 * t**3 - 3 * t**2 + 1) * knee + (t**3 - 2 * t**2 + t) * (1 - knee) + (-2 * t**3 + 3 * t**2) * most
    return np.where(given < knee, light, pq_light(bend * full))


@functools.cache
def shown() -> Light:
    """`compressed` by the root of light from 0 to `PEAK`."""
    return compressed(np.linspace(0, 1, NUM_CODES) ** 2 * PEAK).astype(np.float32)


@functools.cache
def signals() -> NDArray[np.uint8]:
    """8-bit signal by the root of light."""
    return np.rint(255 * np.linspace(0, 1, NUM_CODES) ** (2 / DISPLAY_GAMMA)).astype(np.uint8)
