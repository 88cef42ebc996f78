from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from data import files, twins
from data.duplicates import Groups, likeness, near_duplicates, signature
from data.features import PictureSense
from data.records import Clip
from data.sensing import Sensing

Pictures = NDArray[np.uint8]


def film(seed: int, ground: int = 0, count: int = 24) -> Pictures:
    """Things that move over a patchwork, (F, 90, 160, 3); equal grounds differ in what moves alone."""
    rng = np.random.default_rng(seed)
    back = np.random.default_rng(10_000 + ground).integers(0, 256, (4, 6, 3), np.uint8)
    still = cv2.resize(back, (160, 90), interpolation=cv2.INTER_CUBIC).astype(np.uint8)
    start, way, colour = rng.uniform(20, 70, 2), rng.uniform(-2.5, 2.5, 2), [int(v) for v in rng.integers(0, 256, 3)]
    frames = np.repeat(still[None], count, axis=0)
    for index, frame in enumerate(frames):
        x, y = start + way * index
        cv2.circle(frame, (int(x * 1.7), int(y)), 14, colour, -1, cv2.LINE_AA)
    return frames


def signed(frames: Pictures) -> NDArray[np.int8]:
    sense = PictureSense(Sensing())
    for index, frame in enumerate(frames):
        sense.take(index / 24, frame)
    return signature(sense.finish(), 0.0, len(frames) / 24)


def noisy(frames: Pictures) -> Pictures:
    noise = np.random.default_rng(1).normal(0, 6, frames.shape)
    return np.clip(frames + noise, 0, 255).astype(np.uint8)


def cropped(frames: Pictures) -> Pictures:
    return np.stack([cv2.resize(frame[2:-2, 4:-4], (160, 90)) for frame in frames]).astype(np.uint8)


def graded(frames: Pictures) -> Pictures:
    return np.clip(frames * 0.8 + 20, 0, 255).astype(np.uint8)


def halved(frames: Pictures) -> Pictures:
    return np.stack([cv2.resize(frame, (80, 45), interpolation=cv2.INTER_AREA) for frame in frames]).astype(np.uint8)


@pytest.mark.parametrize("copy", [noisy, cropped, graded, halved])
def test_copies_are_found_among_others(copy: Callable[[Pictures], Pictures]):
    films = [film(seed, ground=seed % 3) for seed in range(24)]
    table = np.stack([signed(item) for item in films] + [signed(copy(item)) for item in films])
    pairs = {tuple(sorted((pair.left, pair.right))) for pair in near_duplicates(table, np.arange(48))}
    wanted = {(number, number + 24) for number in range(24)}
    assert len(wanted & pairs) >= 23
    assert all(left % 24 == right % 24 for left, right in pairs)


def test_one_place_with_other_events_is_no_copy():
    table = np.stack([signed(film(seed)) for seed in range(16)])
    assert list(near_duplicates(table, np.arange(16))) == []


def test_stills_are_compared_by_what_they_show():
    still = np.repeat(film(1)[:1], 24, axis=0)
    other = np.repeat(film(2, ground=5)[:1], 24, axis=0)
    table = np.stack([signed(still), signed(noisy(still)), signed(other)])
    assert {(pair.left, pair.right) for pair in near_duplicates(table, np.arange(3))} == {(0, 1)}


def test_clips_of_one_source_are_never_paired():
    table = np.stack([signed(film(1))] * 3)
    assert list(near_duplicates(table, np.zeros(3, np.int64))) == []


def test_many_alike_in_one_bucket_cost_a_bounded_number_of_comparisons():
    table = np.repeat(signed(film(1))[None], 600, axis=0)
    pairs = list(near_duplicates(table, np.arange(600)))
    assert len(pairs) <= 600 * 16 * (12 + 4)
    groups = Groups(600)
    for pair in pairs:
        groups.join(pair.left, pair.right)
    assert {groups.find(item) for item in range(600)} == {0}


def test_likeness_is_symmetric_and_one_for_the_same():
    left, right = signed(film(1))[None], signed(noisy(film(1)))[None]
    assert likeness(left, left) == pytest.approx([1])
    assert likeness(left, right) == pytest.approx(likeness(right, left))


def test_groups_are_what_links_them_and_the_smallest_stands_for_them():
    groups = Groups(6)
    for left, right in ((4, 5), (2, 4), (3, 2)):
        groups.join(left, right)
    assert [groups.find(item) for item in range(6)] == [0, 1, 2, 2, 2, 2]


def test_twins_share_the_smallest_source_and_the_sharpest_is_kept(tmp_path: Path, make_clip: Callable[..., Clip]):
    names = ["c" * 16, "a" * 16, "b" * 16]
    clips = [make_clip(name, sharpness_p90=sharp) for name, sharp in zip(names, (300.0, 900.0, 500.0), strict=True)]
    table = np.stack([signed(film(1)), signed(noisy(film(1))), signed(film(2, ground=4))])
    files.write_records(tmp_path / "clips.parquet", clips, Clip)
    (tmp_path / "signatures").write_bytes(table.tobytes())
    found = twins.find(tmp_path / "clips.parquet", tmp_path / "signatures")
    assert found.clusters == {"a" * 16: "a" * 16, "c" * 16: "a" * 16}
    ((clip, twin, alike),) = found.named(tmp_path / "clips.parquet")
    assert (clip.source_id, twin) == ("c" * 16, clips[1].clip_id)
    assert alike > 0.9
