"""The two dozen things that users' files are, each with what becomes of it.

| no. | what comes in | tests |
|---|---|---|
| 1 | no sound | `no sound`; test_objective.py::test_silence_carries_no_loss_and_neither_gives_nor_learns_sound |
| 2 | mono | `mono` |
| 3 | one silent side | `one side`, `one side unwanted`; test_evaluate.py::test_a_dead_side_is_left_out_of_the_stereo_measure |
| 4 | more than two channels | `5.1`, `7.1`, `unknown layout`, `too many channels` |
| 5 | sound shorter or longer than the picture | `short sound`, `long sound`, `torn sound` |
| 6 | sound or picture late | `late sound`, `early sound`, `late both`, `sound an hour before`, `sound after`; test_sync.py::test_frames_and_sound_stand_where_they_were_put |
| 7 | any frame rate | `23.976`, `25`, `29.97`, `50`, `60`, `65521/2184`, `too slow`, `too fast` |
| 8 | variable rate, more frames promised than shown | `variable rate`, `trimmed on the phone`, `lying duration` |
| 9 | frames that fill no whole clip | `rest`; test_encode.py::test_what_the_family_cannot_do_is_refused_before_anything_is_encoded |
| 10 | very short | `short`, `one frame`; test_cut.py::test_a_source_too_short_for_a_clip_is_a_reject_with_its_longest_shot |
| 11 | odd, tiny, huge, thin | `odd`, `tiny`, `huge`, `thin`; test_measure.py::test_picture_larger_than_the_limit_is_refused_before_it_is_decoded |
| 12 | turned | `turned 90`, `turned 180`, `turned 270`; test_media.py::test_rotated_film_is_shown_upright |
| 13 | PQ and HLG | `pq`, `hlg`, `pq mapped` |
| 14 | damaged | `cut short`, `headless`, `flipped bytes`, `text` |
| 15 | no caption | `no caption`, `empty caption`; test_validate.py::test_too_many_missing_captions_refuse_the_dataset_by_name |
| 16 | any script | `any script` |
| 17 | names that clash | test_cases.py::test_names_that_clash_stay_apart |
| 18 | stills | `png`, `webp`, `gif`, `jpeg named mp4`; test_media_picture.py::test_an_animation_is_a_silent_video_read_by_its_times; test_ingest.py::test_references_and_sounds_have_rows_of_their_own_after_the_clips |
| 19 | a reference is absent | test_cases.py::test_a_clip_without_its_reference_is_left_out_before_anything_trains |
| 20 | fewer clips than a batch | test_sampler.py::test_fewer_clips_than_a_batch_are_refused_with_both_numbers |
| 21 | sound that is none | `no samples`, `all zeros`, `noise for packets`, `noise from the middle`; test_cases.py::test_a_sound_file_that_holds_none_is_named |
| 22 | latents of another model | test_encode.py::test_only_what_changed_is_made_again_and_never_because_a_file_moved; test_sampler.py::test_a_curriculum_of_other_latents_is_refused |
| 23 | killed or disk full while saving | test_files.py::test_a_killed_writer_leaves_the_old_content_and_the_next_one_sweeps_up; test_ingest.py::test_a_machine_that_is_full_stops_the_run_and_blames_no_file |
| 24 | resumed with other data or more processes | test_saving.py::test_states_of_other_settings_or_altered_bytes_are_not_taken; test_sampler.py::test_a_batch_depends_on_seed_and_step_alone |

`name` is a key of `CASES` below; file::test is a test.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import pytest
from av.video.reformatter import ColorTrc

from data import files
from data.clips import read
from data.records import Clip, ClipShape, Reject, Source
from tasks import cut, ingest, inspect, validate

PQ = {"pixels": "yuv420p10le", "transfer": ColorTrc.SMPTE2084}
HLG = {"pixels": "yuv420p10le", "transfer": ColorTrc.ARIB_STD_B67}


class Case(NamedTuple):
    """A file, and what is to become of it."""

    file: tuple[str, str, dict[str, Any]]
    """What of `material` writes it, its name, with which arguments."""
    treated: tuple[str, ...] = ()
    """All that is done to it."""
    rejected: str = ""
    """Or the option that leaves it out."""
    words: str = ""
    """What the treatment or the reject says among other things."""
    limits: dict[str, Any] = {}
    change: Callable[[Path], bytes] | None = None
    """What then replaces the file's content."""
    synced: bool = True
    """Whether flash and click are to be found."""


def film(name: str = "film.mp4", **options: Any) -> tuple[str, str, dict[str, Any]]:
    return "film", name, options


def encoded(name: str, **options: Any) -> tuple[str, str, dict[str, Any]]:
    return "encoded", name, options


def numbers(content: bytes, kind: bytes, *places: int) -> list[int]:
    """Where 32-bit numbers lie in all boxes of a kind."""
    return [match.end() + place for match in re.finditer(re.escape(kind), content) for place in places]


def trimmed(path: Path) -> bytes:
    """As telephones trim: all is kept, and an edit list says that the first second is not shown."""
    new = bytearray(path.read_bytes())

    def value(at: int) -> int:
        return int.from_bytes(new[at : at + 4], "big")

    (movie,) = (value(at) for at in numbers(new, b"mvhd", 12))
    media = [value(at) for at in numbers(new, b"mdhd", 12)]
    shorter = [*numbers(new, b"elst", 8), *numbers(new, b"mvhd", 16), *numbers(new, b"tkhd", 20)]
    changes = [*((at, -movie) for at in shorter), *zip(numbers(new, b"elst", 12), media, strict=True)]
    for at, change in changes:
        new[at : at + 4] = (value(at) + change).to_bytes(4, "big")
    return bytes(new)


def lying(path: Path) -> bytes:
    """A header that promises a hundred seconds."""
    content = path.read_bytes()
    at = content.index(b"\x44\x89\x88") + 3  # Matroska's duration, milliseconds as a double
    return content[:at] + struct.pack(">d", 100_000) + content[at + 8 :]


def flipped(path: Path) -> bytes:
    """Every hundredth byte of the second half turned over."""
    new = bytearray(path.read_bytes())
    for at in range(len(new) // 2, len(new) - 100, 100):
        new[at] ^= 0xFF
    return bytes(new)


def torn(path: Path) -> bytes:
    return path.read_bytes()[: path.stat().st_size * 3 // 5]


def deaf(path: Path, *, first: int = 0) -> bytes:
    """Packets of sound from one on are overwritten."""
    new = bytearray(path.read_bytes())
    with av.open(str(path)) as container:
        spans = [(packet.pos, packet.size) for packet in container.demux(audio=0) if packet.size and packet.pos]
    for at, size in spans[first:]:
        new[at : at + size] = b"\xff" * size
    return bytes(new)


UNEVEN = [Fraction(step, 48) for step in np.cumsum([0, *np.random.default_rng(3).integers(1, 5, 46)]).tolist()]
LATE = [Fraction(3, 10) + Fraction(index, 24) for index in range(60)]
MKV: dict[str, Any] = {"container": "matroska"}
CASES: dict[str, Case] = {
    "plain": Case(film()),
    "no sound": Case(film(silent=True), ("silence",), words="no sound"),
    "mono": Case(film(layout="mono", heard={"num_channels": 1}), ("mono_to_stereo",)),
    "one side": Case(film(heard={"gains": (0, 1)}), ("dead_side",), words="the left side is silent"),
    "one side unwanted": Case(
        film(heard={"gains": (1, 0)}), rejected="dead_side", words="right", limits={"dead_side": "reject"}
    ),
    "5.1": Case(film(layout="5.1", heard={"num_channels": 6}), ("downmix",), words="6 channels (5.1)"),
    "7.1": Case(
        encoded("f.mkv", sounds=[("flac", "7.1", {"num_channels": 8})]), ("downmix",), words="8 channels (7.1)"
    ),
    "unknown layout": Case(
        encoded("f.mkv", sounds=[("pcm_s16le", "4.0", {"num_channels": 4})]), ("downmix",), words="4 channels (4 channels)"
    ),
    "too many channels": Case(
        encoded("f.mkv", sounds=[("pcm_s16le", "hexadecagonal", {"num_channels": 16})]),
        rejected="max_channels", words="16 channels",
    ),
    "short sound": Case(film(heard={"to_s": 1.6}), ("pad_sound",), words="900 ms before the picture"),
    "long sound": Case(film(heard={"to_s": 4.5}), ("trim_sound",), words="2000 ms after the picture"),
    "torn sound": Case(film(heard={"to_s": 8.5}), rejected="max_sound_gap_s", words="ends 6.000 s after the picture"),
    "late sound": Case(
        film("f.mkv", **MKV, heard={"from_s": 0.4}, sound_start_s=0.4), ("delay_sound",), words="400 ms after the picture"
    ),
    "early sound": Case(
        film("f.mkv", **MKV, frame_times=LATE, heard={"from_s": -0.1}, sound_start_s=0.2),
        ("delay_sound",), words="100 ms before the picture",
    ),
    "sound an hour before": Case(
        film("f.mkv", **MKV, frame_times=[3600 + at for at in LATE]), rejected="max_sound_gap_s", words="never overlaps"
    ),
    "sound after": Case(
        film("f.mkv", **MKV, sound_start_s=4), rejected="max_sound_gap_s", words="never overlaps the picture"
    ),
    "late both": Case(film("f.mkv", **MKV, frame_times=LATE, sound_start_s=0.3)),
    **{
        name: Case(film(frame_rate=Fraction(rate)), ("retime",), words=f"{words} fps (constant rate) to 24 fps")
        for name, rate, words in (
            ("23.976", "24000/1001", "23.976"), ("25", "25", "25.000"), ("29.97", "30000/1001", "29.970"),
            ("50", "50", "50.000"), ("60", "60", "60.000"), ("65521/2184", "65521/2184", "30.000"),
        )
    },
    "too slow": Case(film(frame_rate=5), rejected="min_frame_rate", words="5.00 fps"),
    "too fast": Case(film(frame_rate=300, size=(32, 32)), rejected="max_frame_rate", words="300.00 fps"),
    "variable rate": Case(film(frame_times=UNEVEN), ("retime",), words="intervals vary by"),
    "trimmed on the phone": Case(film(), change=trimmed, synced=False),
    "lying duration": Case(
        film("f.mkv", **MKV), change=lying, rejected="usable", words="is cut short: 2.52 s of 100.00 s decode"
    ),
    "rest": Case(film(seconds=Fraction(40, 24), heard={"to_s": 40 / 24})),
    "short": Case(film(seconds=Fraction(1, 2), heard={"to_s": 0.5}), rejected="min_duration_s", words="0.500 s"),
    "one frame": Case(film(seconds=Fraction(1, 24), silent=True), rejected="picture", words="1 frames"),
    "odd": Case(
        film("f.webm", container="webm", video_codec="libvpx-vp9", audio_codec="libopus", size=(93, 127)),
        ("resize",), words="127x93 to 32x32 px, odd size",
    ),
    "tiny": Case(film(size=(8, 16)), rejected="min_side_px", words="16x8 px"),
    "huge": Case(film(size=(128, 128)), rejected="max_side_px", words="128x128 px", limits={"max_side_px": 100}),
    "thin": Case(film(size=(20, 100)), rejected="max_aspect", words="100x20 px, 5.00:1"),
    **{
        f"turned {turn}": Case(
            film("f.mov", container="mov", rotation_deg=turn), ("rotate",), words=f"turned {turn} degrees clockwise"
        )
        for turn in (90, 180, 270)
    },
    "pq": Case(encoded("f.mkv", **PQ), rejected="hdr", words="transfer smpte2084", limits={"hdr": "reject"}),
    "hlg": Case(encoded("f.mkv", **HLG), rejected="hdr", words="transfer arib_std_b67", limits={"hdr": "reject"}),
    "pq mapped": Case(
        encoded("f.mkv", **PQ), ("silence", "ten_bit", "tone_map"), words="to BT.709", limits={"hdr": "tone_map"},
    ),
    "cut short": Case(film(), change=torn, rejected="usable", words="cut short"),
    "headless": Case(film(), change=lambda path: bytes(4096) + path.read_bytes()[4096:], rejected="usable", words="not decode"),
    "flipped bytes": Case(film(), change=flipped, rejected="usable", words="damaged"),
    "text": Case(film(), change=lambda _: b"later\n" * 99, rejected="usable", words="is text/plain, not a media file"),
    "no caption": Case(film(caption=None), ("caption_by_default",), words='no caption; "a video with sound"'),
    "empty caption": Case(film(caption=" \n"), ("caption_by_default",), words='no caption; "a video with sound"'),
    "any script": Case(film("мяч 球 ñ é.mp4", caption="球が跳ねる, мяч, ñ, 🎈")),
    "png": Case(("still", "f.png", {"suffix": ".png"}), rejected="kind", words="is image/png"),
    "webp": Case(("still", "f.webp", {"suffix": ".webp"}), rejected="kind", words="is image/webp"),
    "gif": Case(encoded("f.gif", codec="gif", pixels="rgb8", num_frames=1), rejected="kind", words="is image/gif"),
    "jpeg named mp4": Case(("still", "f.mp4", {"suffix": ".jpg"}), rejected="kind", words="is image/jpeg"),
    "no samples": Case(encoded("f.mp4", sounds=[("aac", "stereo", None)]), ("silence",), words="no sound"),
    "all zeros": Case(film(heard={"gains": (0, 0)}), ("silence",), words="is all zeros"),
    "noise for packets": Case(film(), ("silence",), change=deaf, words="holds no samples"),
    "noise from the middle": Case(
        film(), change=lambda path: deaf(path, first=50), rejected="usable", words="sound does not decode at 1.0"
    ),
}  # fmt: skip


def settings(folder: Path, **limits: Any) -> inspect.Config:
    """What the pipeline would judge by."""

    def at(*names: str) -> dict[str, Path]:
        return {name: folder / name for name in names}

    judged = at("manifest", "accepted", "rejects", "treatments", "expectations", "docs")
    quick = {"sensing": {"speech": False}, "work": folder / ".work"}
    given = {
        "ingest": {"source": str(folder), **at("manifest"), **quick},
        "validate": judged | {"min_duration_s": 0.916} | limits,
        "cut": {**at("accepted", "clips", "rejects"), "shape": ClipShape(), **quick},
    }
    return inspect.Config.model_validate(given)


@pytest.mark.parametrize("name", CASES)
def test_every_case_has_its_treatment_or_is_left_out_by_name(name: str, tmp_path: Path, material: Any) -> None:
    case = CASES[name]
    way, file, options = case.file
    path = getattr(material, way)(tmp_path / file, **options)
    if case.change is not None:
        path.write_bytes(case.change(path))
    found = inspect.look(str(path), settings(tmp_path, **case.limits))
    assert [item.rule for item in found.rejects] == ([f"validate.{case.rejected}"] if case.rejected else [])
    assert tuple(item.treatment for item in found.treatments) == case.treated
    said = [item.measured for item in found.rejects] + [item.detail for item in found.treatments]
    assert case.words in " ".join(said)
    if case.rejected:
        assert all(item.limit and item.path == found.source.path for item in found.rejects)
        return
    assert found.cut.clips
    for clip in found.cut.clips:
        check(clip, found.source, case, material.flash_s)


def check(clip: Clip, source: Source, case: Case, flash_s: float) -> None:
    """A clip has the exact shape, and flash and click where they belong."""
    frames, heard = read(clip, ClipShape())
    assert (frames.shape, heard.shape) == ((22, 32, 32, 3), (2, 7333))
    assert clip.has_audio == ("silence" not in case.treated)
    assert np.abs(heard).max() > 0.05 or not clip.has_audio
    if not case.synced or not clip.start_s <= flash_s < clip.end_s - 0.1:
        return
    due_s = flash_s - clip.start_s
    lit = np.flatnonzero(frames.mean(axis=(1, 2, 3)) > 200)
    late_s = 1 / Fraction(source.frame_rate) if source.frame_jitter < 0.1 else Fraction(4, 48)
    assert -0.002 <= lit[0] / 24 - due_s <= late_s + Fraction(1, 24)
    if clip.has_audio:
        clicks = np.abs(heard[[0, 1] if "dead_side" not in case.treated else [1]]).argmax(axis=1) / 8000
        assert np.abs(clicks - due_s).max() <= 0.001


def test_every_row_of_the_table_names_tests_there_are() -> None:
    rows = re.findall(r"^\| (\d+) \|[^|]*\| (.*) \|$", __doc__ or "", re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 25))
    named = set(itertools.chain.from_iterable(re.findall(r"`([^`]+)`", cell) for _, cell in rows))
    assert named == set(CASES) - {"plain"}
    known = {f"{path.name}::{test}" for path in Path(__file__).parents[1].rglob("test_*.py") for test in named_in(path)}
    pointed = set(itertools.chain.from_iterable(re.findall(r"test_\w+\.py::\w+", cell) for _, cell in rows))
    assert pointed - known == set()
    assert all(re.search(r"`|::", cell) for _, cell in rows)


def named_in(path: Path) -> list[str]:
    return re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are measured in this process; another one takes seconds to start."""
    monkeypatch.setattr("data.engines.map_ordered", lambda function, items, _engine: map(function, items))


def rows_of(source: Path, config: inspect.Config) -> list[Source]:
    """The manifest that `ingest` writes."""
    ingest.run(config.ingest.model_copy(update={"source": str(source)}))
    return files.read_records(config.ingest.manifest, Source)


@pytest.mark.usefixtures("here")
def test_names_that_clash_stay_apart(tmp_path: Path, material: Any) -> None:
    folder = tmp_path / "films"
    names = ["a_b.mp4", "a/b.mp4", "a.mp4", "A.mp4", "a b.mp4", "a__b.mp4", "a.mov"]
    for index, name in enumerate(names):
        material.film(folder / name, container="mov" if name == "a.mov" else "mp4", silent=True, seed=index)
    rows = rows_of(folder, settings(tmp_path))
    assert [Path(row.path).relative_to(folder).as_posix() for row in rows] == sorted(names)
    assert (len({row.source_id for row in rows}), [row.error for row in rows]) == (7, [None] * 7)
    config = settings(tmp_path).cut
    clips = [clip for row in rows for clip in cut.cut_source(row, config).clips]
    assert len({clip.clip_id for clip in clips}) == len(clips) == 14
    assert {clip.path for clip in clips} == {row.path for row in rows}


@pytest.mark.usefixtures("here")
def test_a_clip_without_its_reference_is_left_out_before_anything_trains(tmp_path: Path, material: Any) -> None:
    for index in range(5):
        material.film(tmp_path / f"{index}.mp4", silent=True, seed=index, caption=f"blocks, take {index}")
    material.still(tmp_path / "face.png", ".png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "face.png").read_bytes()[:99])
    table = tmp_path / "set.csv"
    table.write_text("video,reference_image\n0.mp4,face.png\n1.mp4,Face.png\n2.mp4,cut.png\n3.mp4,\n4.mp4,\n")
    config = settings(tmp_path)
    rows_of(table, config)
    result = validate.run(config.limits)
    assert (result.num_accepted, result.num_rejected, result.num_references) == (3, 4, 1)
    rejects = {
        Path(item.path).name: (item.rule, item.measured) for item in files.read_records(tmp_path / "rejects", Reject)
    }
    assert rejects["1.mp4"] == ("validate.references", f"{tmp_path}/Face.png there is no such file")
    assert rejects["2.mp4"][0] == "validate.references"
    assert rejects["2.mp4"][1].startswith(f"{tmp_path}/cut.png holds no frame that decodes")
    assert {"Face.png", "cut.png"} < set(rejects)


@pytest.mark.parametrize(
    ("size", "reason"), [(0, "is empty"), (30, "does not decode"), (44, "the pcm_s16le stream holds no samples")]
)
def test_a_sound_file_that_holds_none_is_named(tmp_path: Path, material: Any, size: int, reason: str) -> None:
    path = material.film(tmp_path / "film.mp4")
    (tmp_path / "film.sound.wav").write_bytes(material.wav(0)[:size])
    found = inspect.look(str(path), settings(tmp_path))
    if size == 44:
        assert [item.detail.startswith(f"{reason}; silence is used") for item in found.treatments] == [True]
        assert not any(clip.has_audio or read(clip, ClipShape())[1].any() for clip in found.cut.clips)
    else:
        assert [item.measured.startswith(f"its sound file film.sound.wav {reason}") for item in found.rejects] == [True]
