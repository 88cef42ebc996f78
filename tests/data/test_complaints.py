"""What users of other tools complained about, and what happens to the same files here.

| elsewhere | what went wrong | tests |
|---|---|---|
| PySceneDetect 168, 479 | cuts of variable-rate films at wrong times | `shots` |
| PySceneDetect 431, 159, 306, 279 | a neighbour's frame at a clip's edge | `shots` |
| PySceneDetect 464, 502 | times rounded to milliseconds, drift at 23.976 | `shots` |
| PySceneDetect 561 | the last scene of a DVD ends before it starts | `shots` |
| PySceneDetect's splitter | picture and sound start apart, and every cut is early | `shots` |
| PySceneDetect 258 | one damaged frame ends the work on all | test_measure.py::test_flipped_bytes_in_the_pictures_are_damage_and_counted; test_cut.py::test_a_broken_file_costs_only_itself |
| PySceneDetect 179 | several sounds in one MP4 | `several sounds` |
| Curator 1959 | a run ends well with no clip at all | test_cut.py::test_no_clip_at_all_refuses_the_dataset_and_says_why |
| Curator 1999 | motion of some codecs alone; the rest is left out as still | `codecs` |
| Curator | PCM sound ends the run; small pictures count as still | `codecs` |
| Curator | cover art is taken for the picture | test_measure.py::test_cover_art_is_never_the_picture |
| Curator | a margin is cut off every clip of a long shot | `one shot` |
| data-juicer 241, 255 | clips whose files do not exist | `shots`; test_cut.py::test_a_broken_file_costs_only_itself |
| data-juicer 369, 1031 | files left open, memory that grows | `left open`; test_workers.py::test_hostile_item_costs_itself_alone |
| data-juicer 433 | no limit on the frame rate | test_rules.py::test_each_fault_is_rejected_by_its_option_with_what_was_measured |
| finetrainers 78, 241 | a shape that crashes training, an error without the file's name | test_cases.py::test_every_case_has_its_treatment_or_is_left_out_by_name |
| diffusion-pipe 542 | more frames promised than shown | test_cases.py::test_every_case_has_its_treatment_or_is_left_out_by_name |
| diffusion-pipe 61 | clips too short leave a bucket empty | test_sampler.py::test_nothing_to_draw_is_refused_with_the_option_to_change |
| diffusion-pipe 391 | retimed without a word | test_rules.py::test_each_peculiarity_has_its_one_treatment_in_words_with_numbers |
| decord 373, 375, 269 | hangs for ever | test_workers.py::test_a_crash_and_a_hang_cost_one_item_each |
| moviepy 2284, NVEnc 386 | streams that do not start at zero drift apart | `offsets`; test_sync.py::test_frames_and_sound_stand_where_they_were_put |
| musubi-tuner 1127 | sound tens of milliseconds late, as captured | `offsets` |
| musubi-tuner 1066 | gaps between clips of one film | `one shot` |
| musubi-tuner 1100 | a cache of another shape | test_encode.py::test_only_what_changed_is_made_again_and_never_because_a_file_moved |
| musubi-tuner 619 | large pictures fill the memory | test_measure.py::test_picture_larger_than_the_limit_is_refused_before_it_is_decoded |
| a fork of musubi-tuner 83 | sound that fails to decode is only logged | test_cases.py::test_every_case_has_its_treatment_or_is_left_out_by_name |
| SimpleTuner 2537, 2350 | silent films divide by zero; sound is not seen | test_cases.py::test_every_case_has_its_treatment_or_is_left_out_by_name |
| OneTrainer 1134 | the resolution is no part of the cache's key | test_encode.py::test_only_what_changed_is_made_again_and_never_because_a_file_moved |
| Model-Optimizer 1082 | row numbers as keys: another clip's latents | test_ingest.py::test_a_grown_or_renamed_set_measures_only_what_is_new |
| DALI 2221, 5489 | a damaged film kills the process | test_ingest.py::test_a_decoder_that_crashes_costs_one_file |

`name` is a test of this file; file::test is another one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from data import files, measure
from data.clips import read
from data.limits import Limits
from data.media import Unreadable, read_clip, write_media
from data.records import Clip, ClipShape, Source
from data.rules import judge_one, treatments
from tasks import cut

HZ, RATE_HZ = 48000, 8000
TONES_HZ = (400, 700, 1100)
SHAPE = ClipShape()


def source_of(path: Path) -> Source:
    """The row that `ingest` would write."""
    digest = files.sha256(path)
    known = {
        "source_id": digest[:16],
        "sha256": digest,
        "path": str(path),
        "group": "",
        "size_bytes": 1,
        "caption": "x",
    }
    return Source.model_validate(known | measure.probe(path))


def clips_of(source: Source, folder: Path) -> tuple[Clip, ...]:
    places = {name: folder / name for name in ("accepted", "clips", "rejects", "work")}
    config = cut.Config.model_validate(places | {"shape": SHAPE, "sensing": {"speech": False}})
    return cut.cut_source(source, config).clips


def scene(material: Any, number: int) -> NDArray[np.uint8]:
    """A picture that is red, green or blue in turn, (H, W, 3)."""
    tint = np.full(3, 0.15)
    tint[number % 3] = 1.4
    return (material.picture(seed=number) * tint).clip(0, 255).astype(np.uint8)


def scenes(material: Any, times: Sequence[Fraction], length_s: Fraction) -> list[NDArray[np.uint8]]:
    """A frame a time: scenes of one length, each moving."""
    still = [scene(material, number) for number in range(int((times[-1] - times[0]) / length_s) + 1)]
    return [np.roll(still[int((time - times[0]) / length_s)], int(24 * time), axis=1) for time in times]


def tones(num: int, length_s: Fraction, before_s: float = 0.0) -> NDArray[np.float32]:
    """A tone a scene, and noise before the picture begins, (2, T)."""
    time = np.arange(round(num * length_s * HZ)) / HZ
    pitch = np.array(TONES_HZ)[(time / float(length_s) + 1e-9).astype(int) % 3]
    wave = 0.4 * np.sin(2 * np.pi * pitch * time)
    noise = 0.1 * np.random.default_rng(0).standard_normal(round(before_s * HZ))
    return np.stack([np.concatenate([noise, wave])] * 2).astype(np.float32)


def even(rate: Fraction | int, count: int, start: Fraction = Fraction(0)) -> list[Fraction]:
    return [start + index / Fraction(rate) for index in range(count)]


def uneven(count: int, tick: int, most: int) -> list[Fraction]:
    """Frames one to `most` ticks long."""
    steps = np.random.default_rng(4).integers(1, most + 1, count - 1)
    return [Fraction(int(step), tick) for step in np.cumsum([0, *steps])]


NTSC = Fraction(24000, 1001)
SHOTS: dict[str, tuple[str, list[Fraction], Fraction, Fraction]] = {
    # container or codec, times of frames, length of a scene, when the sound begins
    "23.976, twenty seconds": ("mp4", even(NTSC, 480), 32 / NTSC, Fraction(0)),
    "29.97 in Matroska": ("matroska", even(Fraction(30000, 1001), 200), 40 / Fraction(30000, 1001), Fraction(0)),
    "50": ("mp4", even(50, 325), Fraction(65, 50), Fraction(0)),
    "variable rate": ("mp4", uneven(160, 48, 4), Fraction(4, 3), Fraction(0)),
    "variable rate in Matroska": ("matroska", uneven(160, 60, 5), Fraction(4, 3), Fraction(0)),
    "picture late, sound early": (
        "mov", even(25, 170, Fraction(852, 1000)), Fraction(34, 25), Fraction(8, 1000)
    ),
    "MPEG-2 with frames left out": ("ts", uneven(110, 24, 2), Fraction(4, 3), Fraction(0)),
    "the same as on a DVD, which times one frame in a few": ("vob", uneven(110, 24, 2), Fraction(4, 3), Fraction(0)),
}  # fmt: skip


def write_scenes(material: Any, folder: Path, name: str) -> tuple[Path, int]:
    """The film of one row of `SHOTS`, and how many scenes it has."""
    form, times, length_s, begins_s = SHOTS[name]
    frames = scenes(material, times, length_s)
    if form in {"ts", "vob"}:
        path = material.encoded(folder / f"film.{form}", "mpeg2video", frames=list(zip(times, frames, strict=True)))
    else:
        path, before_s = folder / "film", float(times[0] - begins_s)
        num = int((times[-1] - times[0]) / length_s) + 1
        own: dict[str, Any] = {"container": form, "frame_times": times, "sound_start_s": float(begins_s)}
        rate = round(1 / min(later - earlier for earlier, later in itertools.pairwise(times)))
        write_media(path, frames, tones(num, length_s, before_s), frame_rate=rate, sample_rate_hz=HZ, **own)
    return path, int((times[-1] - times[0]) / length_s) + 1


@pytest.mark.parametrize("name", SHOTS)
def test_shots(name: str, tmp_path: Path, material: Any) -> None:
    """Every clip shows its own shot alone, and sounds of it alone."""
    path, num_scenes = write_scenes(material, tmp_path, name)
    length_s = float(SHOTS[name][2])
    source = source_of(path)
    assert judge_one(source, Limits()) == []
    clips = clips_of(source, tmp_path)
    homes = [int(clip.start_s / length_s) for clip in clips]
    if path.suffix != ".vob":
        assert set(homes) >= set(range(num_scenes - 1))  # the last one may be too short
    assert all(clip.start_s < clip.end_s <= source.video_duration_s + 1e-6 for clip in clips)
    assert all(former.end_s <= latter.start_s for former, latter in itertools.pairwise(clips))
    for clip, home in zip(clips, homes, strict=True):
        assert Path(clip.path).is_file()
        frames, heard = read(clip, SHAPE)
        colours = set(frames.mean(axis=(1, 2)).argmax(axis=1).tolist())
        assert len(colours) == 1 if path.suffix == ".vob" else colours == {home % 3}
        if source.audio_codec is None:
            continue
        wave = np.exp(-2j * np.pi * np.outer(TONES_HZ, np.arange(200) / RATE_HZ))
        loudest = [int(np.abs(wave @ heard[0, at : at + 200]).argmax()) for at in range(0, heard.shape[1] - 200, 200)]
        assert set(loudest) == {home % 3}


def test_several_sounds(tmp_path: Path, material: Any) -> None:
    """The default one is taken, and that is said."""
    gains = [{"gains": (gain, gain)} for gain in (0.1, 1, 0.3)]
    path = material.encoded(
        tmp_path / "f.mp4", sounds=[("aac", "stereo", content) for content in gains], default_sound=1
    )
    source = source_of(path)
    (said,) = treatments(source, Limits())
    assert (said.treatment, said.detail) == ("choose_stream", "sound is stream 2 of 3")
    heard = [read(clip, SHAPE)[1] for clip in clips_of(source, tmp_path)]
    assert len(heard) == 2
    assert max(np.abs(sound).max() for sound in heard) > 0.5


def drifting(path: Path, material: Any, codec: str, pixels: str, sound: str) -> Path:
    """A smooth texture that moves by a pixel a frame."""
    coarse = np.random.default_rng(6).integers(0, 256, (6, 12, 3), np.uint8)
    wide = cv2.resize(coarse, (256, 64), interpolation=cv2.INTER_CUBIC)
    frames = [(Fraction(index, 24), np.roll(wide, index, axis=1)[:, :64]) for index in range(60)]
    return material.encoded(path, codec, pixels, [(sound, "stereo", {})], frames=frames)


@pytest.fixture(scope="module")
def lossless(tmp_path_factory: pytest.TempPathFactory, material: Any) -> float:
    """Motion of that film without any loss, picture diagonals a second."""
    folder = tmp_path_factory.mktemp("lossless")
    (first, _) = clips_of(source_of(drifting(folder / "f.mkv", material, "ffv1", "bgr0", "flac")), folder)
    return first.motion_p50


@pytest.mark.parametrize(
    ("name", "codec", "pixels", "sound"),
    [
        ("f.webm", "libvpx-vp9", "yuv420p", "libopus"), ("f.avi", "mpeg4", "yuv420p", "pcm_s16le"),
        ("f.mov", "mjpeg", "yuvj420p", "pcm_s16be"), ("f.mov", "prores_ks", "yuv422p10le", "pcm_s24le"),
        ("f.ts", "mpeg2video", "yuv420p", "mp2"), ("f.mkv", "ffv1", "yuv420p", "flac"),
        ("f.mp4", "libx265", "yuv420p", "ac3"), ("f.mkv", "libx264", "yuv444p", "libmp3lame"),
        ("f.flv", "flv", "yuv420p", "libmp3lame"),
    ],
)  # fmt: skip
def test_codecs(tmp_path: Path, material: Any, lossless: float, name: str, codec: str, pixels: str, sound: str) -> None:
    """Motion and sound are those of the film, whatever it is coded with, and however small it is."""
    source = source_of(drifting(tmp_path / name, material, codec, pixels, sound))
    assert judge_one(source, Limits()) == []
    clips = clips_of(source, tmp_path)
    assert len(clips) == 2
    assert lossless > 0.1
    for clip in clips:
        assert clip.has_audio
        assert clip.motion_p50 == pytest.approx(lossless, rel=0.15)
        frames, heard = read(clip, SHAPE)
        assert (frames.shape, heard.shape) == ((22, 32, 32, 3), (2, 7333))


def test_one_shot(tmp_path: Path, material: Any) -> None:
    """Its clips follow each other without a gap in picture or sound, and lose nothing but an incomplete last one."""
    path = material.film(tmp_path / "f.mp4", seconds=Fraction(5), heard={"to_s": 5.0})
    clips = clips_of(source_of(path), tmp_path)
    assert [clip.start_s for clip in clips] == pytest.approx([number * 22 / 24 for number in range(5)], abs=1e-6)
    whole, sound = read_clip(path, 0.0, None, ClipShape(num_frames=110, sample_rate_hz=HZ))
    for number, clip in enumerate(clips):
        frames, heard = read(clip, ClipShape(sample_rate_hz=HZ))
        assert np.array_equal(frames, whole[22 * number : 22 * number + 22])
        assert np.abs(heard - sound[:, 44000 * number : 44000 * (number + 1)]).max() < 1e-5


@pytest.mark.parametrize("late_s", [0.01, 0.04, 0.2, -0.04])
@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_offsets(tmp_path: Path, material: Any, container: Any, late_s: float) -> None:
    """Sound is where its timestamps say, to a millisecond, and what anyone would notice is said."""
    start = Fraction(1, 2)
    path = material.film(
        tmp_path / "f",
        container=container,
        frame_times=even(24, 60, start),
        heard={"from_s": late_s},
        sound_start_s=float(start) + late_s,
    )
    source = source_of(path)
    said = {item.treatment: item.detail for item in treatments(source, Limits())}
    assert list(said) == (["delay_sound"] if abs(late_s) > 0.025 else [])
    if said:
        assert f"sound starts {abs(late_s) * 1000:.0f} ms" in said["delay_sound"]
    heard = read_clip(path, 0.0, None, ClipShape(num_frames=56, sample_rate_hz=HZ))[1]
    assert np.abs(heard[0]).argmax() / HZ == pytest.approx(material.flash_s, abs=0.001)


def test_left_open(tmp_path: Path, material: Any) -> None:
    """Nothing is, after good files and bad ones."""
    good = material.film(tmp_path / "good.mp4")
    content = good.read_bytes()
    bad = [tmp_path / name for name in ("torn", "headless", "none", "text")]
    for path, piece in zip(bad, (content[: len(content) // 2], content[4000:], None, b"later"), strict=True):
        if piece is not None:
            path.write_bytes(piece)
    measure.probe(good)

    def look() -> int:
        for path in (good, *bad):
            measure.probe(path)
            for start_s in (0.0, 1.0, 99.0):
                try:
                    read_clip(path, start_s, None, SHAPE)
                except Unreadable:
                    continue
        return len(list(Path("/proc/self/fd").iterdir()))

    assert len({look() for _ in range(3)}) == 1


def test_every_row_of_the_table_names_tests_there_are() -> None:
    cells = re.findall(
        r"^\| [^|]*\d[^|]*\|[^|]*\| (.*) \|$|^\| Curator \|[^|]*\| (.*) \|$", __doc__ or "", re.MULTILINE
    )
    cells = [first or second for first, second in cells]
    assert len(cells) == 29
    known = {f"{path.name}::{test}" for path in Path(__file__).parents[1].rglob("test_*.py") for test in named_in(path)}
    own = {test.removeprefix("test_").replace("_", " ") for test in named_in(Path(__file__))}
    assert {name for cell in cells for name in re.findall(r"test_\w+\.py::\w+", cell)} <= known
    assert {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)} == own - {
        "every row of the table names tests there are"
    }


def named_in(path: Path) -> list[str]:
    return re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
