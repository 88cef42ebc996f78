"""Films whose transitions are known because they were put there, from seeds and from the footage's stills.

Every film is shots joined by cuts, dissolves and fades through black, disturbed inside by what is often taken for a
cut: flashes, flicker, a lamp switched, a whip pan, a bumped camera, something passing close by.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, cast

import cv2
import numpy as np
from numpy.typing import NDArray

from data import media

FRAME_RATE, HEIGHT, WIDTH = 24, 180, 320
FOOTAGE = Path("data/footage")
STILLS_S = {
    "bbb_pests_and_pursuit": (0.3, 1.6, 3.8),
    "bbb_rabbit_wakes": (0.5, 3.0),
    "bbb_under_the_tree": (0.4, 2.2, 4.3),
}
"""Times within different shots of the footage, s."""
DISTURBANCES = ("flash", "flicker", "lamp", "whip", "bump", "passer", "none")
Pictures = NDArray[np.uint8]


class Label(NamedTuple):
    """One transition: first frame that is not purely the old shot, first frame that is purely the new one."""

    kind: str
    start_frame: int
    end_frame: int


class Film(NamedTuple):
    """Frames (F, H, W, 3) and what is known of them."""

    frames: Pictures
    transitions: tuple[Label, ...]
    disturbances: tuple[str, ...]


def canvases(half: str) -> list[Pictures]:
    """Large stills of the footage for one half of the set: no shot is in both."""
    found: list[Pictures] = []
    for name, times in STILLS_S.items():
        frames = list(media.iter_frames(FOOTAGE / f"{name}.mp4", HEIGHT, WIDTH))
        found += [min(frames, key=lambda frame: abs(frame[0] - at))[1] for at in times]
    chosen = found[::2] if half == "tuning" else found[1::2]
    return [
        cast(Pictures, cv2.resize(still, (WIDTH * 2, HEIGHT * 2), interpolation=cv2.INTER_CUBIC)) for still in chosen
    ]


def painted(random: np.random.Generator) -> Pictures:
    """A made-up place: sky and ground, or a room, with things of its own colours in it."""
    height, width = HEIGHT * 2, WIDTH * 2
    picture = np.zeros((height, width, 3), np.float32)
    for octave in (3, 8, 24, 80):
        noise = random.normal(0, 1, (octave, octave * 2, 3)).astype(np.float32)
        picture += cv2.resize(noise, (width, height), interpolation=cv2.INTER_CUBIC) * 60 / octave**0.6
    horizon = int(height * random.uniform(0.3, 0.7))
    base = random.uniform(30, 220, (2, 3))
    picture[:horizon] += base[0]
    picture[horizon:] += base[1]
    canvas = np.ascontiguousarray(np.clip(picture, 0, 255).astype(np.uint8))
    for _ in range(int(random.integers(6, 16))):
        x, y = int(random.integers(0, width)), int(random.integers(0, height))
        size, colour = int(random.integers(15, 90)), [int(v) for v in random.integers(0, 256, 3)]
        if random.random() < 0.5:
            cv2.circle(canvas, (x, y), size, colour, -1, cv2.LINE_AA)
        else:
            cv2.rectangle(canvas, (x, y), (x + size, y + int(random.integers(20, 140))), colour, -1)
    return canvas


def shot(canvas: Pictures, num_frames: int, random: np.random.Generator, disturbance: str) -> Pictures:
    """A camera that drifts and zooms over `canvas`, with something moving in front, disturbed in the middle."""
    zoom = np.linspace(*random.uniform(1.25, 1.7, 2), num_frames)
    start, drift = random.uniform(0.25, 0.75, 2), random.uniform(-0.12, 0.12, 2)
    centres = start + np.linspace(0, 1, num_frames)[:, None] * drift
    at = num_frames // 2 + int(random.integers(-4, 5))
    blur = np.zeros(num_frames)
    if disturbance == "whip":
        span = int(random.integers(5, 9))
        centres[at:, 0] += np.interp(
            np.arange(at, num_frames), [at, at + span], [0, 0.3 * (1 if start[0] < 0.5 else -1)]
        )
        blur[at : at + span] = 0.3 * WIDTH * 2 / zoom[at] / span
    if disturbance == "bump":
        centres[at : at + 3] += random.uniform(-0.12, 0.12, (3, 2))
        centres[at + 3 :] += random.uniform(-0.04, 0.04, 2)
    size, colour = int(random.integers(8, 26)), [int(v) for v in random.integers(0, 256, 3)]
    path = random.uniform(0, 1, (2, 2))
    frames = [view(canvas, centre, scale) for centre, scale in zip(np.clip(centres, 0.2, 0.8), zoom, strict=True)]
    for index, frame in enumerate(frames):
        x, y = path[0] + (path[1] - path[0]) * index / num_frames
        cv2.circle(frame, (int(x * WIDTH), int(y * HEIGHT)), size, colour, -1, cv2.LINE_AA)
        if blur[index] > 1:
            frames[index] = cast(Pictures, cv2.blur(frame, (int(blur[index]) | 1, 1)))
    return lit(np.stack(frames), at, random, disturbance)


def view(canvas: Pictures, centre: NDArray[np.float64], zoom: float) -> Pictures:
    """What the camera sees, (HEIGHT, WIDTH, 3)."""
    x, y = centre[0] * WIDTH * 2, centre[1] * HEIGHT * 2
    matrix = np.array([[zoom, 0, WIDTH / 2 - x * zoom], [0, zoom, HEIGHT / 2 - y * zoom]]) * [[0.8], [0.8]]
    matrix[:, 2] += [WIDTH * 0.1, HEIGHT * 0.1]
    return cast(
        Pictures,
        cv2.warpAffine(canvas, matrix, (WIDTH, HEIGHT), flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT_101),
    )


def lit(frames: Pictures, at: int, random: np.random.Generator, disturbance: str) -> Pictures:
    """The frames under a flash, flicker or a lamp, or with a passer-by."""
    result = frames.astype(np.float32)
    if disturbance == "flash":
        for _ in range(2):
            first, length = int(random.integers(6, len(frames) - 8)), int(random.integers(1, 4))
            result[first : first + length] = result[first : first + length] * 0.3 + 255 * random.uniform(0.6, 0.9)
    if disturbance == "flicker":
        result *= random.uniform(0.55, 1.3, (len(frames), 1, 1, 1))
    if disturbance == "lamp":
        result[at:] *= random.choice([0.45, 0.6, 1.5])
    if disturbance == "passer":
        width, colour = int(WIDTH * random.uniform(0.4, 0.8)), random.uniform(0, 120, 3)
        for index in range(7):
            left = int(-width + (WIDTH + width) * index / 6)
            result[at + index, :, max(0, left) : max(0, left + width)] = colour
    return np.clip(result, 0, 255).astype(np.uint8)


def join(before: Pictures, after: Pictures, kind: str, length: int) -> tuple[Pictures, int]:
    """Two shots joined, and how many frames the transition takes: 0 for a cut."""
    if kind == "cut":
        return np.concatenate([before, after]), 0
    share = (np.arange(1, length + 1) / (length + 1))[:, None, None, None]
    left, right = before[-length:].astype(np.float32), after[:length].astype(np.float32)
    if kind == "dissolve":
        mixed = left * (1 - share) + right * share
        return np.concatenate([before[:-length], mixed.astype(np.uint8), after[length:]]), length
    dark = np.zeros((2, *before.shape[1:]), np.uint8)
    fades = (left * (1 - share)).astype(np.uint8), (right * share).astype(np.uint8)
    return np.concatenate([before[:-length], fades[0], dark, fades[1], after[length:]]), 2 * length + 2


def film(seed: int, half: str, num_shots: int) -> Film:
    """One film: `num_shots` shots, every second one from the footage's stills."""
    random = np.random.default_rng(seed)
    stills = canvases(half)
    order = random.permutation(len(stills))
    frames: Pictures | None = None
    labels: list[Label] = []
    disturbances: list[str] = []
    for number in range(num_shots):
        canvas = stills[order[number // 2 % len(stills)]] if (number + seed) % 2 else painted(random)
        disturbances.append(DISTURBANCES[int(random.integers(len(DISTURBANCES)))])
        following = shot(canvas, int(random.integers(44, 76)), random, disturbances[-1])
        if frames is None:
            frames = following
            continue
        kind = ("cut", "dissolve", "fade", "cut")[int(random.integers(4))]
        joined, length = join(frames, following, kind, int(random.integers(6, 19)))
        lost = {"cut": 0, "dissolve": length, "fade": (length - 2) // 2}[kind]
        start = len(frames) - lost
        labels.append(Label(kind, start, start + length))
        frames = joined
    assert frames is not None
    return Film(frames, tuple(labels), tuple(disturbances))


def written(path: Path, made: Film) -> None:
    """The film as H.264."""
    media.write_mp4(path, made.frames, None, FRAME_RATE, 48000, crf=23)


def described(made: Film) -> dict[str, Any]:
    """What is published of a film."""
    return {
        "num_frames": len(made.frames),
        "transitions": [list(label) for label in made.transitions],
        "disturbances": list(made.disturbances),
    }
