from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from data import files
from data.records import Clip, DataRefused
from tasks.split import Config, check_no_leak, run

Maker = Callable[..., Clip]


def config_of(folder: Path, clips: list[Clip], **options: object) -> Config:
    files.write_records(folder / "clips.parquet", clips, Clip)
    return Config.model_validate({"clips": folder / "clips.parquet", "splits": folder / "splits"} | options)


def outputs(config: Config) -> dict[str, list[Clip]]:
    return {name: files.read_records(config.splits / f"{name}.parquet", Clip) for name in ("train", "val", "test")}


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=3, max_size=20), seed=st.integers(0, 3))
def test_splits_are_a_partition_that_keeps_a_source_together(
    tmp_path_factory: pytest.TempPathFactory, make_clip: Maker, sizes: list[int], seed: int
):
    clips = [
        make_clip(f"{source:016x}", number, group="ab"[source % 2])
        for source, size in enumerate(sizes)
        for number in range(size)
    ]
    config = config_of(tmp_path_factory.mktemp("split"), clips[::-1], seed=seed)
    run(config)
    found = outputs(config)
    assert sorted(clip.clip_id for members in found.values() for clip in members) == [clip.clip_id for clip in clips]
    sources = [{clip.source_id for clip in members} for members in found.values()]
    assert sum(map(len, sources)) == len(set().union(*sources)) == len(sizes)
    for members in found.values():
        assert members == sorted(members, key=lambda clip: clip.clip_id)


def test_the_order_of_the_clips_changes_no_byte(tmp_path: Path, make_clip: Maker):
    clips = [make_clip(f"{source:016x}", number) for source in range(10) for number in range(3)]
    first, second = config_of(tmp_path / "1", clips), config_of(tmp_path / "2", clips[::-1])
    run(first)
    run(second)
    run(second)
    assert files.sha256(first.splits) == files.sha256(second.splits)


def test_the_summary_counts_clips_and_sources_by_split_and_group(tmp_path: Path, make_clip: Maker):
    clips = [
        make_clip(f"{source:016x}", number, group="base" if source < 10 else "new")
        for source in range(20)
        for number in range(2)
    ]
    config = config_of(tmp_path, clips, val_share=0.1, test_share=0.2)
    result = run(config)
    assert (result.num_train, result.num_val, result.num_test) == (28, 4, 8)
    summary = json.loads((config.splits / "summary.json").read_text())
    assert summary["splits"]["test"] == {
        "num_clips": 8,
        "num_sources": 4,
        "groups": {"base": {"num_clips": 4, "num_sources": 2}, "new": {"num_clips": 4, "num_sources": 2}},
    }
    assert summary["leaks"] == {"sources_and_exact_copies": 0, "near_duplicates": "not checked"}


def test_fewer_than_three_sources_are_refused_with_numbers(tmp_path: Path, make_clip: Maker):
    clips = [make_clip("a" * 16, number) for number in range(5)] + [make_clip("b" * 16)]
    with pytest.raises(DataRefused, match="holds 6 clips of 2 sources; at least 3 sources are needed"):
        run(config_of(tmp_path, clips))


def test_a_source_in_two_splits_is_a_leak(make_clip: Maker):
    with pytest.raises(DataRefused, match=f"sources in more than one split: {'a' * 16}"):
        check_no_leak({"train": [make_clip("a" * 16)], "val": [], "test": [make_clip("a" * 16, 1)]})


def test_shares_that_leave_nothing_to_train_on_are_a_contradiction(tmp_path: Path):
    with pytest.raises(ValidationError, match=r"val_share 0\.5 \+ test_share 0\.5 leave nothing to train on"):
        Config(clips=tmp_path, splits=tmp_path, val_share=0.5, test_share=0.5)
