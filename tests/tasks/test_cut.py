from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from data import files, measure, media
from data.engines import Lost
from data.filters import Filters, fault
from data.hearing import SoundTrack
from data.records import Clip, ClipShape, DataRefused, Reject, Source
from tasks import cut
from tasks.cut import Config, hears, run

Maker = Callable[..., Source]
RATE_HZ = 32000


def scene(seed: int, num_frames: int, speed: int = 1) -> NDArray[np.uint8]:
    """A smooth colour texture that drifts by `speed` px a frame, (F, H, W, 3)."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 12, 3), np.uint8)
    wide = cv2.resize(coarse, (256, 48), interpolation=cv2.INTER_CUBIC)
    return np.stack([np.roll(wide, speed * index, axis=1)[:, :64] for index in range(num_frames)]).astype(np.uint8)


def tone(num_frames: int, amplitude: float = 0.5) -> NDArray[np.float32]:
    """A stereo tone as long as `num_frames` at 24 fps, (2, T)."""
    time = np.arange(num_frames * RATE_HZ // 24) / RATE_HZ
    wave = amplitude * np.sin(2 * np.pi * 440 * time)
    return np.stack([wave, wave]).astype(np.float32)


def filmed(path: Path, frames: NDArray[np.uint8], waveform: NDArray[np.float32] | None) -> Source:
    """The manifest row of a file written here."""
    media.write_mp4(path, frames, waveform, 24, RATE_HZ)
    digest = files.sha256(path)
    facts = media.probe(path)
    return Source.model_validate(
        {"source_id": digest[:16], "sha256": digest, "path": str(path), "group": "", "size_bytes": 1, "caption": "x"}
        | facts
    )


def config_of(folder: Path, sources: list[Source], **options: object) -> Config:
    files.write_records(folder / "accepted.parquet", sources, Source)
    paths = {name: folder / f"{name}.parquet" for name in ("accepted", "clips", "rejects")}
    fixed = {"shape": ClipShape(), "work": folder / "work", "sensing": {"speech": False}, "engine": {"num_workers": 1}}
    return Config.model_validate({**paths, **fixed} | options)


def outputs(config: Config) -> tuple[list[Clip], list[Reject]]:
    return files.read_records(config.clips, Clip), files.read_records(config.rejects, Reject)


@pytest.fixture(scope="module")
def two_shots(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """54 frames of a scene with a tone, then 30 of another in silence."""
    frames = np.concatenate([scene(1, 54), scene(2, 30)])
    waveform = np.concatenate([tone(54), tone(30, 0.0)], axis=1)
    return filmed(tmp_path_factory.mktemp("films") / "two shots.mp4", frames, waveform)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return filmed(tmp_path_factory.mktemp("films") / "short.mp4", scene(3, 20), None)


def test_clips_lie_within_one_shot_and_know_what_they_are_like(tmp_path: Path, two_shots: Source):
    config = config_of(tmp_path, [two_shots])
    result = run(config)
    clips, rejects = outputs(config)
    assert (result.num_clips, rejects) == (3, [])
    assert [(clip.start_s, clip.end_s, clip.boundary_reason) for clip in clips] == [
        (0.0, 0.916667, "start"),
        (0.916667, 1.833333, "stride"),
        (2.3, 3.216667, "cut"),
    ]
    assert clips[2].clip_id == f"{two_shots.source_id}-002300"
    assert [round(clip.loudness_lufs or 0) for clip in clips[:2]] == [-7, -7]  # two channels of a half-scale sine
    assert clips[2].loudness_lufs is None or clips[2].loudness_lufs < -60
    assert [clip.silent_share > 0.9 for clip in clips] == [False, False, True]
    assert all(clip.has_audio and clip.motion_p50 > 0.05 and 0.3 < clip.luma < 0.7 for clip in clips)
    assert clips[2].boundary_score > 0.1
    assert {clip.cluster for clip in clips} == {two_shots.source_id}


def test_a_source_too_short_for_a_clip_is_a_reject_with_its_longest_shot(
    tmp_path: Path, two_shots: Source, short: Source
):
    config = config_of(tmp_path, [two_shots, short])
    assert run(config).num_rejected_sources == 1
    (reject,) = outputs(config)[1]
    assert (reject.item, reject.rule) == (short.source_id, "cut.shape")
    assert reject.measured == "the only shot is 0.833 s"


def test_the_result_does_not_depend_on_the_number_of_workers_and_keeps_the_order(
    tmp_path: Path, two_shots: Source, short: Source
):
    alone = config_of(tmp_path / "1", [two_shots, short])
    run(alone)
    together = config_of(tmp_path / "2", [two_shots, short], engine={"num_workers": 2})
    run(together)
    assert files.sha256(alone.clips) == files.sha256(together.clips)
    assert files.sha256(alone.rejects) == files.sha256(together.rejects)


def test_what_is_remembered_is_not_decoded_again_and_changes_nothing(
    tmp_path: Path, two_shots: Source, monkeypatch: pytest.MonkeyPatch
):
    config = config_of(tmp_path, [two_shots])
    first = cut.cut_source(two_shots, config)
    monkeypatch.setattr(measure, "measure", lambda *_: pytest.fail("decoded again"))
    again = cut.cut_source(two_shots, config)
    assert again.clips == first.clips
    assert [one.tobytes() for one in again.signatures] == [one.tobytes() for one in first.signatures]


def test_a_run_after_a_kill_gives_the_same_bytes(tmp_path: Path, two_shots: Source, monkeypatch: pytest.MonkeyPatch):
    config = config_of(tmp_path, [two_shots])
    run(config)
    before = files.sha256(config.clips)
    config.clips.unlink()

    def die(*_: object):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cut, "second_pass", die)
        with pytest.raises(KeyboardInterrupt):
            run(config)
    run(config)
    assert files.sha256(config.clips) == before
    assert sorted(item.name for item in config.work.iterdir()) == ["measured"]


def test_references_are_never_cut(tmp_path: Path, two_shots: Source):
    twin = two_shots.model_copy(update={"source_id": "d" * 16, "use": "reference"})
    assert run(config_of(tmp_path, [two_shots, twin])).num_clips == 3


def test_sources_known_by_key_frames_alone_are_measured_in_full(tmp_path: Path, two_shots: Source):
    config = config_of(tmp_path, [two_shots], sensing={"speech": False, "decode": "keyframes"})
    assert run(config).num_clips == 3


def test_copies_share_a_cluster_and_may_be_dropped(tmp_path: Path, two_shots: Source):
    frames = np.concatenate([scene(1, 54), scene(2, 30)])
    path = tmp_path / "copy.mp4"
    media.write_mp4(path, frames, None, 24, RATE_HZ, crf=30)
    copy = two_shots.model_copy(update={"path": str(path), "source_id": "0" * 16, "sha256": "0" * 64})
    other = filmed(tmp_path / "other.mp4", scene(9, 54), None)
    kept = config_of(tmp_path, [two_shots, copy, other])
    result = run(kept)
    assert (result.num_clips, result.num_near_duplicates) == (8, 3)
    assert {clip.source_id: clip.cluster for clip in outputs(kept)[0]} == {
        two_shots.source_id: "0" * 16,
        "0" * 16: "0" * 16,
        other.source_id: other.source_id,
    }
    dropped = config_of(tmp_path, [two_shots, copy, other], near_duplicates="drop")
    assert run(dropped).num_clips == 5
    rejects = outputs(dropped)[1]
    assert {reject.rule for reject in rejects} == {"cut.near_duplicates"}
    assert all(two_shots.source_id in reject.measured or "0" * 16 in reject.measured for reject in rejects)


def talk(seed: int, num_frames: int) -> NDArray[np.float32]:
    """Stereo syllables of uneven length, loudness and pitch, with pauses, (2, T)."""
    rng, length = np.random.default_rng(seed), num_frames * RATE_HZ // 24
    parts: list[NDArray[np.float64]] = []
    while sum(map(len, parts)) < length:
        times = np.arange(round(rng.uniform(0.08, 0.3) * RATE_HZ)) / RATE_HZ
        voice = np.sign(np.sin(2 * np.pi * rng.uniform(90, 400) * times)) + rng.uniform(0, 2) * rng.normal(
            size=len(times)
        )
        parts += [rng.uniform(0.02, 0.2) * np.sin(np.pi * times / times[-1]) * voice]
        parts += [np.zeros(round(rng.uniform(0.05, 0.5) * RATE_HZ))] * int(rng.random() < 0.3)
    wave = np.concatenate(parts)[:length]
    return np.stack([wave, wave]).astype(np.float32)


def test_sources_that_sound_alike_share_a_cluster_whatever_they_show(tmp_path: Path):
    frames, other = scene(1, 144), scene(2, 144)
    cropped = np.stack([cv2.resize(frame[:, 20:44], (64, 48)) for frame in frames]).astype(np.uint8)
    sources = [
        filmed(tmp_path / "film.mp4", frames, talk(1, 144)),
        filmed(tmp_path / "mirrored.mp4", np.ascontiguousarray(frames[:, :, ::-1]), talk(2, 144)),
        filmed(tmp_path / "cropped.mp4", cropped, talk(1, 144) * 0.5),
        filmed(tmp_path / "other_talk.mp4", other, talk(3, 144)),
    ]
    result = run(config := config_of(tmp_path, sources))
    clusters = {clip.source_id: clip.cluster for clip in outputs(config)[0]}
    film, mirrored, crop, others = (clusters[source.source_id] for source in sources)
    assert film == mirrored == crop != others
    assert result.num_soundalikes == 2
    run(config := config_of(tmp_path, sources, soundalikes=False))
    apart = {clip.source_id: clip.cluster for clip in outputs(config)[0]}
    assert apart[sources[0].source_id] == apart[sources[1].source_id] != apart[sources[2].source_id]


def test_a_frozen_and_a_black_picture_are_rejected_as_clips_and_as_a_source(
    tmp_path: Path, two_shots: Source, capsys: pytest.CaptureFixture[str]
):
    still = np.repeat(scene(4, 1), 48, axis=0)
    frozen = filmed(tmp_path / "frozen.mp4", still, tone(48))
    black = filmed(tmp_path / "black.mp4", np.zeros_like(still), tone(48))
    config = config_of(tmp_path, [two_shots, frozen, black])
    assert run(config).num_rejected_sources == 2
    left = "spans left out: 2 by cut.filters.max_freeze_share"
    said = capsys.readouterr().err
    assert f"cut: 3 clips of 3 sources, 2 of which gave none; {left}; written to {config.clips}\n" in said
    found = [(reject.path, reject.rule, reject.item) for reject in outputs(config)[1]]
    assert found == [
        (source.path, rule, source.source_id + suffix)
        for source, rule in ((frozen, "cut.filters.max_freeze_share"), (black, "cut.black"))
        for suffix in (("-000000", "-000917", "") if source is frozen else ("",))
    ]


def test_motion_blur_is_no_fault(tmp_path: Path):
    frames = scene(5, 48, speed=3)
    blurred = np.stack([cv2.blur(frame, (21, 1)) for frame in frames]).astype(np.uint8)
    config = config_of(tmp_path, [filmed(tmp_path / "blurred.mp4", blurred, None)])
    assert run(config).num_clips == 2
    clips, rejects = outputs(config)
    assert (rejects, [clip.has_audio for clip in clips]) == ([], [False, False])


def test_a_broken_file_costs_only_itself(tmp_path: Path, two_shots: Source):
    broken = tmp_path / "broken.mp4"
    broken.write_text("not a video")
    fields = ({"path": str(broken), "source_id": "b" * 16}, {"path": "gone.mp4", "source_id": "c" * 16})
    others = [two_shots.model_copy(update={**item, "sha256": str(item["source_id"]) * 4}) for item in fields]
    config = config_of(tmp_path, [two_shots, *others])
    assert run(config).num_clips == 3
    rejects = outputs(config)[1]
    assert [(reject.item, reject.rule) for reject in rejects] == [
        ("b" * 16, "cut.readable"),
        ("c" * 16, "cut.readable"),
    ]
    assert rejects[1].measured == "there is no such file"


def test_a_decoder_that_crashes_or_hangs_costs_only_its_source(
    tmp_path: Path, two_shots: Source, monkeypatch: pytest.MonkeyPatch
):
    def lose_the_second(function: Callable[[Source], object], items: Iterable[Source], *_: object):
        yield function(next(iter(items)))
        yield Lost("takes longer than 1 s")

    monkeypatch.setattr(cut, "map_ordered", lose_the_second)
    config = config_of(tmp_path, [two_shots, two_shots.model_copy(update={"source_id": "b" * 16})])
    assert run(config).num_clips == 3
    (reject,) = outputs(config)[1]
    assert (reject.item, reject.rule, reject.measured) == ("b" * 16, "cut.readable", "takes longer than 1 s")


def test_a_long_source_gives_clips_from_all_over(tmp_path: Path, two_shots: Source):
    config = config_of(tmp_path, [two_shots], max_clips_per_source=2)
    assert run(config).num_clips == 2
    clips, (reject,) = outputs(config)
    assert [clip.start_s for clip in clips] == [0.0, 0.916667]
    assert (reject.rule, reject.measured) == ("cut.max_clips_per_source", "3 clips")


def test_no_clip_at_all_refuses_the_dataset_and_says_why(tmp_path: Path, short: Source):
    config = config_of(tmp_path, [short])
    config.clips.write_bytes(b"of an earlier run")
    with pytest.raises(DataRefused, match=r"none of 1 sources gives a clip of 0\.917 s: 1 by cut\.shape"):
        run(config)
    assert not config.clips.exists()
    assert config.rejects.is_file()


def test_a_clip_hears_only_where_sound_covers_half_of_it(make_source: Maker):
    late = make_source("a.mp4", audio_start_s=1.0, audio_duration_s=1.0)
    assert not hears(late, None, 0.0, 1.0, 0.5)
    assert not hears(late, None, 0.4, 1.4, 0.5)
    assert hears(late, None, 0.5, 1.5, 0.5)
    assert hears(late, None, 1.0, 2.0, 1.0)
    assert not hears(make_source("b.mp4", peak=0.0), None, 0.0, 1.0, 0.5)
    assert not hears(make_source("c.mp4", audio_codec=None), None, 0.0, 1.0, 0.0)


def test_sound_of_another_file_is_heard_where_that_file_covers_the_clip(make_source: Maker):
    power = np.full(10, 0.1, np.float32)
    source = make_source("a.mp4", sound_path="b.wav", audio_codec=None)
    assert hears(source, SoundTrack(0.0, 1.0, power, power), 0.0, 1.0, 0.5)
    assert not hears(source, SoundTrack(0.0, 1.0, power, power), 1.0, 2.0, 0.5)


@pytest.mark.parametrize(
    ("option", "limit", "column", "bad", "good"),
    [
        ("min_luma", 0.02, "luma", 0.01, 0.02),
        ("max_black_share", 0.5, "black_share", 0.6, 0.5),
        ("max_freeze_share", 0.9, "freeze_share", 0.95, 0.9),
        ("max_letterbox_share", 0.3, "letterbox_share", 0.4, 0.26),
        ("min_motion_p50", 0.01, "motion_p50", 0.001, 0.01),
        ("max_motion_p90", 1.0, "motion_p90", 1.2, 1.0),
        ("max_residual_cuts", 0, "residual_cuts", 1, 0),
        ("min_loudness_lufs", -50, "loudness_lufs", -60.0, -40.0),
        ("max_silent_share", 0.5, "silent_share", 0.6, 0.5),
        ("min_speech_share", 0.5, "speech_share", 0.4, None),
        ("min_dnsmos", 3, "dnsmos", 2.5, None),
        ("max_text_share", 0.1, "text_share", 0.2, None),
        ("min_num_faces", 1, "num_faces", 0, None),
    ],
)
def test_every_filter_has_a_limit_a_measured_value_and_an_off_switch(
    make_clip: Callable[..., Clip], option: str, limit: float, column: str, bad: float, good: float | None
):
    filters = Filters.model_validate({option: limit})
    reject = fault(make_clip("a" * 16, **{column: bad}), filters)
    assert reject is not None
    assert (reject.rule, reject.measured, reject.limit) == (
        f"cut.filters.{option}",
        f"{column} = {bad:.4g}",
        f"{limit:g}",
    )
    assert fault(make_clip("a" * 16, **{column: good}), filters) is None
    assert fault(make_clip("a" * 16, **{column: bad}), Filters.model_validate({option: None})) is None


def test_a_picture_out_of_focus_is_left_out_unless_it_moves(make_clip: Callable[..., Clip]):
    soft = make_clip("a" * 16, sharpness_p90=2.0, motion_p50=0.001)
    reject = fault(soft, Filters())
    assert reject is not None
    assert reject.rule == "cut.filters.min_sharpness_p90"
    assert fault(soft.model_copy(update={"motion_p50": 0.2}), Filters()) is None
