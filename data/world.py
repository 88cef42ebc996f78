"""The sample world: small scenes in which every sound has a visible cause and comes from where it happens.

Things bounce off walls, collide and speak. The world has two halves that share no colour, shape, place or sound:
the tiny base model is trained on `base` only, fine-tuning moves it towards `new`, as a real run moves a released
checkpoint towards a customer's material. Everything is a pure function of (half, seed).

Shape letters: F frames, H height, W width, C channels (RGB or left, right), T sound samples.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Half = Literal["base", "new"]
Kind = Literal["bounce", "collide", "speak"]
Colour = tuple[int, int, int]
Floats = NDArray[np.float64]

KINDS: tuple[Kind, ...] = ("bounce", "collide", "speak")
SIMULATION_RATE = 960
"""Physics steps a second: an event is placed to 1.04 ms."""
FLOOR = 0.82
"""Where the floor begins, as a share of the height."""
SCALE_HZ = (220.0, 330.0, 440.0, 550.0, 660.0, 880.0, 1100.0, 1320.0)
"""Every partial of the world."""
SYLLABLE_S = 0.2
"""How long a mouth is open, s."""
GAIN = 0.4
"""Amplitude of one event at the nearer side, full scale = 1."""


class Style(NamedTuple):
    """What one half of the world is made of."""

    shapes: tuple[str, ...]
    colours: dict[str, Colour]
    places: dict[str, tuple[Colour, Colour]]
    """Name → wall and floor colour."""
    tones: dict[str, tuple[float, ...]]
    """Name of what a bounce rings → partials, Hz; likewise below."""
    knocks: dict[str, tuple[float, ...]]
    voices: dict[str, tuple[float, ...]]
    decay: float
    """How fast a ringing tone dies, nepers a second."""


# The halves share a scale, so that one sound autoencoder can carry both, but no sound: which partials sound together,
# and how they die, is each half's own.
STYLES: dict[Half, Style] = {
    "base": Style(
        shapes=("ball",),
        colours={"red": (220, 50, 40), "green": (50, 190, 70), "blue": (60, 90, 230), "yellow": (230, 205, 50)},
        places={"dark room": ((24, 26, 34), (52, 46, 44)), "grey hall": ((100, 100, 106), (66, 68, 72))},
        tones={"low bell": (330.0, 660.0), "high bell": (660.0, 1320.0)},
        knocks={"wooden knock": (440.0, 1100.0), "dull thud": (220.0, 550.0)},
        voices={"deep voice": (220.0, 330.0, 440.0), "plain voice": (440.0, 660.0, 880.0)},
        decay=12.0,
    ),
    "new": Style(
        shapes=("box", "diamond"),
        colours={"pink": (240, 120, 190), "cyan": (40, 210, 220), "lime": (170, 240, 60), "white": (240, 240, 235)},
        places={"teal pool": ((16, 74, 84), (10, 44, 60)), "brown field": ((122, 84, 52), (74, 104, 44))},
        tones={"warm chime": (220.0, 880.0), "bright chime": (550.0, 1100.0)},
        knocks={"glass clink": (1320.0, 880.0), "tin clank": (660.0, 550.0)},
        voices={"clear voice": (330.0, 550.0, 1100.0), "thin voice": (550.0, 880.0, 1320.0)},
        decay=7.0,
    ),
}


class Physics(NamedTuple):
    """How things move and ring; ranges are drawn from uniformly."""

    radius: tuple[float, float]
    """Of a body, shares of the side."""
    speed: tuple[float, float]
    """Along x, sides a second."""
    drift: tuple[float, float]
    """Along y, sides a second."""
    first_syllable_s: tuple[float, float]
    syllable_period_s: tuple[float, float]
    ring: float
    """How many times longer than its style says a struck thing rings."""


LAWFUL = Physics((0.15, 0.2), (0.7, 0.7), (0.25, 0.25), (0.05, 0.05), (22 / 72, 22 / 72), 3.0)
"""The sample world's: from where things are at two moments follows what happens between, so that it can be learned
from a few hundred clips. Three syllables fill a clip of 22 frames."""
LOOSE = Physics((0.12, 0.18), (0.5, 0.8), (0.1, 0.4), (0.05, 0.2), (0.28, 0.38), 1.0)
"""More varied: what the autoencoders are trained on."""


class Scene(NamedTuple):
    """A rendered scene with its caption."""

    frames_FHWC: NDArray[np.uint8]
    waveform_CT: NDArray[np.float32]
    caption: str
    kind: Kind


class Event(NamedTuple):
    """Something audible: when (s) and where (0 left, 1 right)."""

    time_s: float
    x: float


class Bodies(NamedTuple):
    """Moving bodies over physics steps: positions (N, steps, 2) in shares of the side, and radii."""

    positions: Floats
    radii: Floats
    walls: list[Event]
    pairs: list[Event]


def scene(
    half: Half,
    seed: int,
    duration_s: float,
    frame_rate: Fraction | int,
    size_px: int,
    sample_rate_hz: int,
    kind: Kind | None = None,
    style: Style | None = None,
    physics: Physics = LAWFUL,
) -> Scene:
    """Render one scene: seed and half decide everything, the rates only sample it.

    `style` and `physics` let the same things look, sound and move otherwise, for augmentation.
    """
    random = np.random.default_rng([seed, 0 if half == "base" else 1])
    style = style or STYLES[half]
    chosen = kind or KINDS[int(random.integers(len(KINDS)))]
    colours = [str(name) for name in random.permutation(list(style.colours))[:2]]
    shape = str(random.choice(list(style.shapes)))
    place = str(random.choice(list(style.places)))
    sounds = {"bounce": style.tones, "collide": style.knocks, "speak": style.voices}[chosen]
    sound = str(random.choice(list(sounds)))
    bodies = move(random, 2 if chosen == "collide" else 1, duration_s, physics)
    events = {"bounce": bodies.walls, "collide": bodies.pairs, "speak": syllables(random, bodies, duration_s, physics)}[
        chosen
    ]
    num_samples = round(duration_s * sample_rate_hz)
    if chosen == "speak":
        waveform = spoken(events, sounds[sound], num_samples, sample_rate_hz)
        caption = f"a {colours[0]} face speaks in a {place} with a {sound}"
    else:
        decay = (style.decay if chosen == "bounce" else 3 * style.decay) / physics.ring
        waveform = struck(events, sounds[sound], decay, num_samples, sample_rate_hz)
        caption = (
            f"a {colours[0]} {shape} bounces in a {place} and each bounce rings a {sound}"
            if chosen == "bounce"
            else f"a {colours[0]} {shape} and a {colours[1]} {shape} collide in a {place} with a {sound}"
        )
    times = np.arange(round(duration_s * float(frame_rate))) / float(frame_rate)
    painted = [style.colours[name] for name in colours]
    drawn = "face" if chosen == "speak" else shape
    frames = render(bodies, events, times, drawn, painted, style.places[place], size_px)
    return Scene(frames, waveform, caption, chosen)


def revoiced(style: Style, random: np.random.Generator) -> Style:
    """The same style with chords and decays drawn from the whole scale."""

    def voice(sounds: dict[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
        chords = {name: random.permutation(SCALE_HZ)[: int(random.integers(2, 4))] for name in sounds}
        return {name: tuple(float(hertz) for hertz in chord) for name, chord in chords.items()}

    return style._replace(
        tones=voice(style.tones),
        knocks=voice(style.knocks),
        voices=voice(style.voices),
        decay=float(random.uniform(5.0, 14.0)),
    )


def move(random: np.random.Generator, num_bodies: int, duration_s: float, physics: Physics) -> Bodies:
    """Let bodies fly between the walls; equal masses that meet exchange velocity along x."""
    radii = random.uniform(*physics.radius, num_bodies)
    x = np.linspace(0.25, 0.75, num_bodies) if num_bodies > 1 else random.uniform(0.2, 0.8, 1)
    position = np.stack([x, np.full(num_bodies, random.uniform(0.3, FLOOR - 0.3))], axis=1)
    speed = random.uniform(*physics.speed, num_bodies)
    direction = np.array([1.0, -1.0])[:num_bodies] if num_bodies > 1 else random.choice([-1.0, 1.0], 1)
    drift = random.uniform(*physics.drift) * random.choice([-1.0, 1.0])
    velocity = np.stack([speed * direction, np.full(num_bodies, 0.0 if num_bodies > 1 else drift)], axis=1)
    num_steps = int(duration_s * SIMULATION_RATE) + 1
    path = np.empty((num_bodies, num_steps, 2))
    walls: list[Event] = []
    pairs: list[Event] = []
    for step in range(num_steps):
        path[:, step] = position
        time_s = step / SIMULATION_RATE
        position = position + velocity / SIMULATION_RATE
        for body in range(num_bodies):
            for axis, far in ((0, 1.0), (1, FLOOR)):
                low, high = radii[body], far - radii[body]
                outside = (position[body, axis] < low and velocity[body, axis] < 0) or (
                    position[body, axis] > high and velocity[body, axis] > 0
                )
                if outside:
                    velocity[body, axis] = -velocity[body, axis]
                    walls.append(Event(time_s, float(position[body, 0])))
        if num_bodies > 1:
            gap = position[1, 0] - position[0, 0]
            if gap < radii.sum() and velocity[0, 0] > velocity[1, 0]:
                velocity[[0, 1], 0] = velocity[[1, 0], 0]
                pairs.append(Event(time_s, float(position[:, 0].mean())))
    return Bodies(path, radii, walls, pairs)


def syllables(random: np.random.Generator, bodies: Bodies, duration_s: float, physics: Physics) -> list[Event]:
    """When the face opens its mouth: about three times a second, from where it then is."""
    first_s, period_s = random.uniform(*physics.first_syllable_s), random.uniform(*physics.syllable_period_s)
    times = np.arange(first_s, duration_s - SYLLABLE_S, period_s)
    return [Event(float(time), float(bodies.positions[0, int(time * SIMULATION_RATE), 0])) for time in times]


def panned(mono: Floats, x: float) -> Floats:
    """Place a sound between left and right at constant power; returns (2, T)."""
    angle = (0.1 + 0.8 * x) * np.pi / 2
    return np.stack([mono * np.cos(angle), mono * np.sin(angle)])


def struck(
    events: list[Event], partials: tuple[float, ...], decay: float, num_samples: int, sample_rate_hz: int
) -> NDArray[np.float32]:
    """Sound of struck things: decaying partials at every event. Returns (2, num_samples)."""
    sound = np.zeros((2, num_samples))
    for event in events:
        start = round(event.time_s * sample_rate_hz)
        time = np.arange(min(num_samples - start, round(0.6 * sample_rate_hz))) / sample_rate_hz
        tone = sum(
            np.sin(2 * np.pi * hertz * time) * np.exp(-decay * (1 + index) * time) / (1 + index)
            for index, hertz in enumerate(partials)
        )
        attack = np.minimum(1.0, time * 500)  # 2 ms, or the click hides the pitch
        sound[:, start : start + time.size] += panned(GAIN * np.asarray(tone) * attack, event.x)
    return np.clip(sound, -1, 1).astype(np.float32)


def spoken(
    events: list[Event], partials: tuple[float, ...], num_samples: int, sample_rate_hz: int
) -> NDArray[np.float32]:
    """Sound of a face that speaks: partials that swell and die once a syllable. Returns (2, num_samples)."""
    sound = np.zeros((2, num_samples))
    for event in events:
        start = round(event.time_s * sample_rate_hz)
        time = np.arange(min(num_samples - start, round(SYLLABLE_S * sample_rate_hz))) / sample_rate_hz
        tone = sum(np.sin(2 * np.pi * hertz * time) for hertz in partials)
        arch = np.sin(np.pi * time / SYLLABLE_S) ** 2
        sound[:, start : start + time.size] += panned(GAIN * np.asarray(tone) / len(partials) * arch, event.x)
    return np.clip(sound, -1, 1).astype(np.float32)


def render(
    bodies: Bodies,
    events: list[Event],
    times: Floats,
    shape: str,
    colours: list[Colour],
    place: tuple[Colour, Colour],
    size_px: int,
) -> NDArray[np.uint8]:
    """Draw the bodies at the given times (s) with soft edges. Returns (F, size_px, size_px, 3)."""
    grid_y, grid_x = np.mgrid[0:size_px, 0:size_px].astype(np.float64) + 0.5
    wall, floor = (np.array(colour, dtype=np.float64) for colour in place)
    is_floor = np.clip(grid_y - FLOOR * size_px + 0.5, 0, 1)[..., None]
    backdrop = wall * (1 - is_floor) + floor * is_floor
    frames = np.empty((times.size, size_px, size_px, 3), np.uint8)
    for index, time in enumerate(times):
        canvas = backdrop
        step = min(int(time * SIMULATION_RATE), bodies.positions.shape[1] - 1)
        for body, radius in enumerate(bodies.radii * size_px):
            x, y = bodies.positions[body, step] * size_px
            ink = np.array(colours[body], dtype=np.float64)
            canvas = paint(canvas, inside(shape, grid_x - x, grid_y - y, radius), ink)
            if shape == "face":
                canvas = paint_features(canvas, grid_x - x, grid_y - y, radius, mouth_opening(events, float(time)))
        frames[index] = canvas.round().astype(np.uint8)
    return frames


def mouth_opening(events: list[Event], time_s: float) -> float:
    """How far the mouth is open at a time, 0–1: the arch of the syllable being spoken."""
    spoken_s = [time_s - event.time_s for event in events if 0 <= time_s - event.time_s < SYLLABLE_S]
    return float(np.sin(np.pi * spoken_s[0] / SYLLABLE_S) ** 2) if spoken_s else 0.0


def inside(shape: str, x: Floats, y: Floats, radius: float) -> Floats:
    """Coverage, 0–1, of every pixel by a shape centred at the origin; edges are one pixel soft."""
    if shape == "box":
        distance = radius - np.maximum(np.abs(x), np.abs(y))
    elif shape == "diamond":
        distance = (radius - np.abs(x) - np.abs(y)) / np.sqrt(2)
    else:
        distance = radius - np.hypot(x, y)
    return np.clip(distance + 0.5, 0, 1)


def paint(canvas: Floats, coverage: Floats, ink: Floats) -> Floats:
    """Lay a colour over the canvas where it is covered."""
    return canvas * (1 - coverage[..., None]) + ink * coverage[..., None]


def paint_features(canvas: Floats, x: Floats, y: Floats, radius: float, opening: float) -> Floats:
    """Two eyes and a mouth that is as open as the sound is loud."""
    dark = np.array((20.0, 16.0, 20.0))
    for side in (-0.4, 0.4):
        eye = inside("ball", x - side * radius, y + 0.3 * radius, 0.16 * radius)
        canvas = paint(canvas, eye, dark)
    tall = 0.08 + 0.42 * opening
    mouth = inside("ball", x * tall / 0.5, y - 0.4 * radius, tall * radius)
    return paint(canvas, mouth, dark)
