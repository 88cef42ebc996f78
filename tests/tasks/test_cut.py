from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from data import files, media, workers
from data.records import Clip, ClipShape, DataRefused, Reject, Source
from data.workers import Lost
from tasks.cut import Config, analysis_size, hears, run

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
    return Config.model_validate({**paths, "shape": ClipShape(), "num_workers": 1} | options)


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
    assert [round(clip.loudness_db) for clip in clips[:2]] == [-9, -9]  # a sine of half of full scale
    assert clips[2].loudness_db < -60
    assert all(clip.has_audio and clip.motion > 0.005 and 0.3 < clip.luma < 0.7 for clip in clips)


def test_a_source_too_short_for_a_clip_is_a_reject_with_its_longest_shot(
    tmp_path: Path, two_shots: Source, short: Source
):
    config = config_of(tmp_path, [two_shots, short])
    assert run(config).num_rejected_sources == 1
    (reject,) = outputs(config)[1]
    assert (reject.item, reject.rule) == (short.source_id, "cut.shape")
    assert reject.measured == "longest of 1 shots is 0.833 s"


def test_the_result_does_not_depend_on_the_number_of_workers_nor_on_the_order(
    tmp_path: Path, two_shots: Source, short: Source
):
    alone = config_of(tmp_path / "1", [two_shots, short])
    run(alone)
    together = config_of(tmp_path / "2", [short, two_shots], num_workers=2)
    run(together)
    assert files.sha256(alone.clips) == files.sha256(together.clips)
    assert files.sha256(alone.rejects) == files.sha256(together.rejects)


def test_a_frozen_and_a_black_picture_are_rejected_as_clips_and_as_a_source(tmp_path: Path, two_shots: Source):
    still = np.repeat(scene(4, 1), 48, axis=0)
    frozen = filmed(tmp_path / "frozen.mp4", still, tone(48))
    black = filmed(tmp_path / "black.mp4", np.zeros_like(still), tone(48))
    config = config_of(tmp_path, [two_shots, frozen, black])
    assert run(config).num_rejected_sources == 2
    found = [(reject.path, reject.rule, reject.item) for reject in outputs(config)[1]]
    assert found == [
        (source.path, rule, source.source_id + suffix)
        for source, rule in ((black, "cut.min_luma"), (frozen, "cut.min_motion"))
        for suffix in ("", "-000000", "-000917")
    ]


def test_motion_blur_is_no_fault(tmp_path: Path):
    frames = scene(5, 48, speed=9)
    blurred = np.stack([cv2.blur(frame, (21, 1)) for frame in frames]).astype(np.uint8)
    config = config_of(tmp_path, [filmed(tmp_path / "blurred.mp4", blurred, None)])
    assert run(config).num_clips == 2
    clips, rejects = outputs(config)
    assert (rejects, [clip.has_audio for clip in clips]) == ([], [False, False])


def test_a_broken_file_costs_only_itself(tmp_path: Path, two_shots: Source):
    broken = tmp_path / "broken.mp4"
    broken.write_text("not a video")
    rows = [two_shots, two_shots.model_copy(update={"path": str(broken), "source_id": "b" * 16})]
    config = config_of(tmp_path, [*rows, two_shots.model_copy(update={"path": "gone.mp4", "source_id": "c" * 16})])
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
    def lose_the_second(function: Callable[[Source], object], items: list[Source], *_: object):
        yield 1, Lost("takes longer than 1 s")
        yield 0, function(items[0])

    monkeypatch.setattr(workers, "map_isolated", lose_the_second)
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
    assert not hears(late, 0.0, 1.0, 0.5)
    assert not hears(late, 0.4, 1.4, 0.5)
    assert hears(late, 0.5, 1.5, 0.5)
    assert hears(late, 1.0, 2.0, 1.0)
    assert not hears(make_source("b.mp4", peak=0.0), 0.0, 1.0, 0.5)
    assert not hears(make_source("c.mp4", audio_codec=None), 0.0, 1.0, 0.0)


def test_the_analysed_picture_has_the_models_aspect_and_is_never_enlarged(tmp_path: Path, make_source: Maker):
    wide = config_of(tmp_path, [], shape=ClipShape(height=32, width=64))
    assert analysis_size(make_source("a.mp4", width=1920, height=1080), wide) == (96, 192)
    assert analysis_size(make_source("b.mp4", width=64, height=48), wide) == (48, 96)
