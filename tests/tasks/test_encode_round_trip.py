"""What comes back out of the latent store: each treatment costs nothing but what the autoencoders cost the ideal clip.

The tiny autoencoders smear a flash over a frame and a click over a latent of 25 ms, and do the same to the ideal clip;
so what is compared is one with the other: same frame, same millisecond, same sides, same quality. Containers round
times to a millisecond, which a chord's phase shows, so the ideal sound is shifted by as much as the film's own is.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from data.files import write_records
from data.latent_index import LatentRow
from data.latents import LatentStore
from data.media import read_clip
from data.records import Clip, ClipShape, Source
from models.families import Encoders, load_encoders
from tasks.encode import Config, run
from tests.data.films import GAINS, SIDE, Film, shown_at, write

ZOO = Path(__file__).parents[2] / "models" / "zoo" / "tiny-h3"
FLASH_S, FLASH_LENGTH_S = 0.5, 0.125
MAX_SKEW_S = 0.001
FILMS = {
    "as it is": Film(),
    "23.976": Film(rate=Fraction(24000, 1001)),
    "25 and 44.1 kHz": Film(rate=25, hz=44100),
    "29.97 and 8 kHz": Film(rate=Fraction(30000, 1001), hz=8000),
    "60": Film(rate=60),
    "variable rate": Film(varies=True),
    "sound late": Film(audio_start_s=Fraction(1, 4)),
    "picture late": Film(video_start_s=Fraction(3, 10)),
    "turned": Film(rotation_deg=90),
    "matroska, flac, 96 kHz": Film("matroska", "flac", hz=96000),
    "webm": Film("webm", "libopus", video="libvpx-vp9"),
    "mono": Film(layout="mono"),
    "5.1": Film("matroska", "flac", layout="5.1"),
}


class Media(NamedTuple):
    frames_FHWC: NDArray[np.uint8]
    waveform_CT: NDArray[np.float32]


def flash_s(film: Film) -> float:
    """When the flash begins: with a frame."""
    return max(float(time) for time in shown_at(film) if time <= FLASH_S)


def bright(seconds: float, begins_s: float) -> int:
    """Level of the picture at a time."""
    return 220 if begins_s <= seconds + 1e-9 < begins_s + FLASH_LENGTH_S else 30


def click(seconds: NDArray[np.float64], begins_s: float) -> NDArray[np.float32]:
    """A struck chord that begins with the flash."""
    since = seconds - begins_s
    tone = sum(np.sin(2 * np.pi * hz * since) for hz in (262, 330, 392)) / 4 * np.exp(-since.clip(0) / 0.1)
    return np.where((since >= 0) & (since < 0.4), tone, 0).astype(np.float32)


def film_at(path: Path, film: Film) -> None:
    """The flash and its click as a file."""
    begins_s, times = flash_s(film), shown_at(film)
    count = round(float(times[-1] + 1) * film.hz)
    late_s = float(film.audio_start_s - film.video_start_s)
    sound = click(np.arange(count) / film.hz + late_s, begins_s)
    write(path, film, lambda index: np.full((SIDE, SIDE, 3), bright(float(times[index]), begins_s), np.uint8), sound)


def ideal(film: Film, shape: ClipShape, skew_s: float = 0.0) -> Media:
    """The same clip without any file; its sound is `skew_s` late."""
    begins_s, gains = flash_s(film), GAINS[film.layout]
    times = [max(float(t) for t in shown_at(film) if t <= n / shape.frame_rate + 1e-9) for n in range(shape.num_frames)]
    levels = np.array([bright(time, begins_s) for time in times], np.uint8)
    frames = np.broadcast_to(levels[:, None, None, None], (shape.num_frames, shape.height, shape.width, 3)).copy()
    mono = click(np.arange(shape.num_samples) / shape.sample_rate_hz - skew_s, begins_s)
    return Media(frames, np.stack([mono * gains[0], mono * gains[min(1, len(gains) - 1)]]))


@pytest.fixture(scope="module")
def encoders() -> Encoders:
    return load_encoders(ZOO)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, make_clip: Callable[..., Clip]) -> LatentStore:
    """All films, encoded by the real verb."""
    folder = tmp_path_factory.mktemp("round")
    clips: list[Clip] = []
    for number, film in enumerate(FILMS.values()):
        path = folder / f"{number}.{film.container}"
        film_at(path, film)
        clips.append(make_clip(f"film{number:02d}", path=str(path), width=SIDE, height=SIDE))
    for name, rows in {"train": clips, "val": [], "test": []}.items():
        write_records(folder / "splits" / f"{name}.parquet", rows, Clip)
    write_records(folder / "accepted.parquet", [], Source)
    names = ("splits", "latents", "work", "docs")
    return LatentStore(
        run(
            Config.model_validate(
                {name: folder / name for name in names}
                | {name: folder / f"{name}.parquet" for name in ("accepted", "rejects")}
                | {"base": ZOO, "expectations": folder / "expectations.json", "modes": ["t2va"], "num_workers": 1}
                | {"canvases": {"tiny": {"area_px": 1024, "durations_s": [22 / 24]}}}
            )
        )
    )


@pytest.fixture
def pair(request: pytest.FixtureRequest, store: LatentStore, encoders: Encoders) -> tuple[Media, Media, Media]:
    """The ideal clip, what the autoencoders make of it, and what comes back from the store of the film."""
    number, film = list(FILMS).index(request.param), FILMS[request.param]
    row = store.index.row(number)
    fine = row.shape.model_copy(update={"sample_rate_hz": 48000})
    path = Path(store.folder).parent / f"{number}.{film.container}"
    read = read_clip(path, 0, float(row.shape.duration_s), fine)[1][0]
    skew_s = lag_s(ideal(film, fine).waveform_CT[0], read, fine.sample_rate_hz)
    assert abs(skew_s) <= MAX_SKEW_S
    clip = ideal(film, row.shape, skew_s)
    return clip, through(encoders, clip, row.shape), decoded(encoders, store, row)


def through(encoders: Encoders, clip: Media, shape: ClipShape) -> Media:
    """What the autoencoders make of a clip."""
    video = encoders.encode_picture(clip.frames_FHWC[None])[0]
    return Media(*encoders.decode(video, encoders.encode_sound(clip.waveform_CT[None], shape)[0], shape))


def decoded(encoders: Encoders, store: LatentStore, row: LatentRow) -> Media:
    """What comes back from the store."""
    return Media(*encoders.decode(store.read(row, "video"), store.read(row, "audio"), row.shape))


def rise(frames: NDArray[np.uint8]) -> int:
    """Frame with which the flash comes."""
    return int(np.argmax(np.diff(frames.mean((1, 2, 3))))) + 1


def lag_s(one: NDArray[np.float32], other: NDArray[np.float32], rate_hz: int) -> float:
    """By how much `other` is later."""
    length = 2 * len(one)
    cross = np.fft.irfft(np.conj(np.fft.rfft(one, length)) * np.fft.rfft(other, length), length)
    shift = int(np.argmax(cross))
    return (shift if shift < len(one) else shift - length) / rate_hz


def error_db(one: NDArray[np.generic], other: NDArray[np.generic]) -> float:
    """Mean squared difference, dB."""
    return float(10 * np.log10(np.square(one.astype(float) - other.astype(float)).mean() + 1e-12))


@pytest.mark.parametrize("pair", FILMS, indirect=True)
def test_a_clip_comes_back_as_the_autoencoders_would_bring_the_ideal_one(pair: tuple[Media, Media, Media]) -> None:
    clip, own, found = pair
    assert rise(found.frames_FHWC) == rise(own.frames_FHWC)
    assert error_db(found.frames_FHWC, clip.frames_FHWC) <= error_db(own.frames_FHWC, clip.frames_FHWC) + 0.5
    for side in range(2):
        assert abs(lag_s(own.waveform_CT[side], found.waveform_CT[side], 8000)) <= MAX_SKEW_S
        allowed = error_db(own.waveform_CT[side], clip.waveform_CT[side]) + 0.5
        assert error_db(found.waveform_CT[side], clip.waveform_CT[side]) <= allowed
    loud = [np.abs(media.waveform_CT).max(axis=1) for media in (own, found)]
    np.testing.assert_allclose(loud[1], loud[0], rtol=0.05)
    assert (loud[1][0] > 1.5 * loud[1][1]) == (clip.waveform_CT[0].max() > 1.5 * clip.waveform_CT[1].max())


def test_a_frame_or_a_side_that_is_off_would_be_noticed(store: LatentStore, encoders: Encoders) -> None:
    shape = store.index.row(0).shape
    clip = ideal(FILMS["as it is"], shape)
    late = Media(np.roll(clip.frames_FHWC, 4, axis=0), np.roll(clip.waveform_CT, 200, axis=1)[::-1].copy())
    own, other = (through(encoders, media, shape) for media in (clip, late))
    assert rise(other.frames_FHWC) == rise(own.frames_FHWC) + 4
    assert abs(lag_s(own.waveform_CT[0], other.waveform_CT[1], 8000) - 0.025) <= MAX_SKEW_S  # one latent
    assert np.abs(other.waveform_CT[1]).max() > 1.5 * np.abs(other.waveform_CT[0]).max()
