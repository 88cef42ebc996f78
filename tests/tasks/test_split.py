from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from data import files
from data.records import Clip, DataRefused, Reject, Source, Treatment
from tasks.split import Config, leaks_of, run

Maker = Callable[..., Clip]
NAMES = ("train", "val", "test")


def config_of(folder: Path, clips: list[Clip], **options: object) -> Config:
    files.write_records(folder / "clips.parquet", clips, Clip)
    sources = {clip.source_id: clip for clip in clips}
    rows = [
        Source(
            source_id=name, sha256=name * 4, path=clip.path, group=clip.group, size_bytes=1, width=64, height=48,
            frame_rate="24000/1001", caption_from="model big|one prompt ab12",
        )
        for name, clip in sorted(sources.items())
    ]  # fmt: skip
    files.write_records(folder / "accepted.parquet", rows, Source)
    treated = [Treatment(item=row.source_id, path=row.path, treatment="retime", detail="") for row in rows]
    files.write_records(folder / "treatments.parquet", treated, Treatment)
    places = {
        "clips": "clips.parquet", "accepted": "accepted.parquet", "treatments": "treatments.parquet",
        "splits": "splits", "ledger": "ledger.parquet", "cards": "cards", "rejects": "rejects.parquet",
        "expectations": "expectations.json", "docs": "docs", "work": "work",
    }  # fmt: skip
    paths = {key: folder / name for key, name in places.items() if key in Config.model_fields}
    return Config.model_validate(paths | options)


def outputs(config: Config) -> dict[str, list[Clip]]:
    return {name: files.read_records(config.splits / f"{name}.parquet", Clip) for name in NAMES}


def some(make_clip: Maker, num_sources: int, num_clips: int = 2, **fields: object) -> list[Clip]:
    return [
        make_clip(f"{s:016x}", n, group="ab"[s % 2], **fields) for s in range(num_sources) for n in range(num_clips)
    ]


@pytest.fixture(autouse=True)
def _without_great_expectations(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """It takes seconds a run; one test below asks it."""
    if "asks" not in request.node.name:
        monkeypatch.setattr("tasks.split.check_expectations", lambda *_: None)


@settings(max_examples=12, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=3, max_size=20), seed=st.integers(0, 3))
def test_splits_are_a_partition_that_keeps_a_source_together(
    tmp_path_factory: pytest.TempPathFactory, make_clip: Maker, sizes: list[int], seed: int
):
    clips = [make_clip(f"{source:016x}", number) for source, size in enumerate(sizes) for number in range(size)]
    config = config_of(tmp_path_factory.mktemp("split"), clips[::-1], seed=seed)
    run(config)
    found = outputs(config)
    assert sorted((clip for members in found.values() for clip in members), key=lambda clip: clip.clip_id) == clips
    sources = [{clip.source_id for clip in members} for members in found.values()]
    assert sum(map(len, sources)) == len(set().union(*sources)) == len(sizes)
    for members in found.values():
        assert members == sorted(members, key=lambda clip: clip.clip_id)


def test_neither_the_order_of_the_clips_nor_a_second_run_changes_a_byte(
    tmp_path: Path, make_clip: Maker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(files, "ROW_GROUP", 7)
    clips = some(make_clip, 30, 3)
    first, second = config_of(tmp_path / "1", clips), config_of(tmp_path / "2", clips[::-1])
    run(first)
    run(second)
    assert pq.ParquetFile(first.splits / "train.parquet").metadata.num_row_groups > 3
    run(second)
    for name in ("splits", "ledger", "cards", "rejects"):
        assert files.sha256(getattr(first, name)) == files.sha256(getattr(second, name)), name


def test_added_data_moves_no_old_clip(tmp_path: Path, make_clip: Maker):
    run(config_of(tmp_path, some(make_clip, 4)))
    before = outputs(config_of(tmp_path, some(make_clip, 4)))
    config = config_of(tmp_path, some(make_clip, 40))
    run(config)
    after = outputs(config)
    for name, members in before.items():
        assert {clip.clip_id for clip in members} <= {clip.clip_id for clip in after[name]}


def test_summary_proves_and_compares(tmp_path: Path, make_clip: Maker):
    config = config_of(tmp_path, some(make_clip, 200), val_share=0.1, test_share=0.2)
    result = run(config)
    summary = json.loads((config.splits / "summary.json").read_text())
    assert summary["num_clips"] == {"train": result.num_train, "val": result.num_val, "test": result.num_test}
    assert summary["leaks"] == {"sources": 0, "exact copies": 0, "near-duplicate clusters": 0}
    assert summary["clusters_torn_since_before"] == 0
    rows = {(row["group"], row["split"]): row for row in summary["stratification"]}
    assert rows["a", "test"]["expected_clusters"] == 20
    assert (
        sum(rows[group, "test"]["num_clips"] for group in "ab") == rows["all", "test"]["num_clips"] == result.num_test
    )
    row = rows["all", "test"]
    assert row["deviations"] == pytest.approx((row["num_clusters"] - 40) / (200 * 0.2 * 0.8) ** 0.5, abs=0.01)
    assert all(abs(row["deviations"]) < 4 for row in rows.values())


def test_sources_of_one_cluster_stay_together_and_those_that_bridge_are_rejects(tmp_path: Path, make_clip: Maker):
    clips = some(make_clip, 30)
    run(config_of(tmp_path, clips))
    found = outputs(config_of(tmp_path, clips))
    left, right = found["train"][0].source_id, found["test"][0].source_id
    renamed = [
        clip.model_copy(update={"cluster": "joined"}) if clip.source_id in (left, right) else clip for clip in clips
    ]
    config = config_of(tmp_path, [*renamed, make_clip("f" * 16, cluster="joined")])
    result = run(config)
    assert (result.num_left_out, result.num_torn_clusters) == (1, 1)
    assert json.loads((config.splits / "summary.json").read_text())["clusters_torn_since_before"] == 1
    (reject,) = files.read_records(config.rejects, Reject)
    assert (reject.item, reject.rule) == ("f" * 16, "split.cluster")
    assert reject.measured == "looks or sounds like sources of train and test (cluster joined)"
    assert {name: len(members) for name, members in outputs(config).items()} == {n: len(m) for n, m in found.items()}


def test_the_draw_starts_anew_under_another_seed(tmp_path: Path, make_clip: Maker, capsys: pytest.CaptureFixture[str]):
    clips = some(make_clip, 30)
    run(config_of(tmp_path, clips))
    fresh = config_of(tmp_path / "fresh", clips, seed=1)
    run(fresh)
    again = config_of(tmp_path, clips, seed=1)
    run(again)
    assert "all is drawn anew" in capsys.readouterr().err
    assert files.sha256(again.splits) == files.sha256(fresh.splits)


def test_cards_count_what_is_in_a_split(tmp_path: Path, make_clip: Maker):
    config = config_of(tmp_path, some(make_clip, 30, licence="CC-BY | *4.0*", caption_language="en"))
    result = run(config)
    card = json.loads((config.cards / "test.json").read_text())
    assert card["num_clips"] == result.num_test == card["counts"]["licence"]["CC-BY | *4.0*"]
    assert card["sha256"] == files.sha256(config.splits / "test.parquet")
    assert card["hours"] == pytest.approx(result.num_test * 0.916667 / 3600, abs=1e-6)
    assert card["counts"]["treatment"] == {"retime": card["num_sources"]}
    assert {sum(item["counts"]) + item["num_missing"] for item in card["histograms"]} == {result.num_test}
    text = (config.cards / "test.md").read_text()
    assert f"{result.num_test} clips of" in text
    assert r"CC-BY \| \*4.0\*" in text


def test_fewer_than_three_clusters_are_refused_with_numbers(tmp_path: Path, make_clip: Maker):
    clips = [make_clip("a" * 16, number) for number in range(5)] + [make_clip("b" * 16)]
    with pytest.raises(
        DataRefused, match=r"holds 6 clips of 2 sources: 2 clusters of sources, since .*; train, val and test need"
    ):
        run(config_of(tmp_path, clips))
    clips = [make_clip(letter * 16, cluster="c" if letter > "a" else "") for letter in "abcdefghi"]
    with pytest.raises(DataRefused, match=r"largest cluster: (\S+, ){4}\S+ and 3 more$"):
        run(config_of(tmp_path, clips))


def test_a_split_whose_only_source_is_deleted_is_named_with_the_remedy(tmp_path: Path, make_clip: Maker):
    clips = some(make_clip, 30)
    config = config_of(tmp_path, clips)
    run(config)
    for name, members in outputs(config).items():
        gone = {clip.source_id for clip in members}
        with pytest.raises(
            DataRefused, match=f"{name} is empty and every source was drawn before; .*delete split.ledger"
        ):
            run(config_of(tmp_path, [clip for clip in clips if clip.source_id not in gone]))


def test_a_set_without_val_is_wanted_so(tmp_path: Path, make_clip: Maker):
    config = config_of(tmp_path, some(make_clip, 30), val_share=0.0)
    assert run(config).num_val == 0
    assert {name for name, members in outputs(config).items() if members} == {"train", "test"}


def test_a_refused_run_leaves_no_split_of_an_earlier_one(
    tmp_path: Path, make_clip: Maker, monkeypatch: pytest.MonkeyPatch
):
    config = config_of(tmp_path, some(make_clip, 30))
    run(config)
    before = config.ledger.read_bytes()
    few = config_of(tmp_path, some(make_clip, 2))
    with pytest.raises(DataRefused, match="holds 4 clips of 2 sources"):
        run(few)
    assert not list(config.splits.iterdir())
    assert config.ledger.read_bytes() == before
    run(config_of(tmp_path, some(make_clip, 30)))
    monkeypatch.setattr("tasks.split.leaks_of", lambda _: {"sources": 1})
    with pytest.raises(DataRefused, match="leaks: 1 sources"):
        run(config)
    assert not list(config.splits.iterdir())


def test_a_leak_between_written_files_is_found(tmp_path: Path, make_clip: Maker):
    config = config_of(tmp_path, some(make_clip, 30))
    run(config)
    members = outputs(config)
    files.write_records(config.splits / "val.parquet", [*members["val"], members["test"][0]], Clip)
    assert leaks_of(config) == {"sources": 1, "exact copies": 1, "near-duplicate clusters": 1}


def test_missing_and_old_clips_say_which_verb_writes_them(tmp_path: Path, make_clip: Maker):
    config = config_of(tmp_path, some(make_clip, 3))
    pq.write_table(pq.read_table(config.clips).drop_columns(["cluster"]), config.clips)
    with pytest.raises(ValueError, match="cluster missing or unknown; run `soundstage cut` again"):
        run(config)
    config.clips.write_text("clips")
    with pytest.raises(ValueError, match=r"/clips\S* is not Parquet that can be read"):
        run(config)
    config.clips.unlink()
    with pytest.raises(RuntimeError, match="does not exist; run `soundstage cut` first"):
        run(config)


def test_shares_that_leave_nothing_to_train_on_are_a_contradiction(tmp_path: Path, make_clip: Maker):
    with pytest.raises(ValidationError, match=r"val_share 0\.5 \+ test_share 0\.5 leave nothing to train on"):
        config_of(tmp_path, some(make_clip, 3), val_share=0.5, test_share=0.5)


def test_a_run_asks_the_expectations_and_writes_their_answers_and_pages(tmp_path: Path, make_clip: Maker):
    config = config_of(tmp_path, some(make_clip, 40, 1))
    run(config)
    found = json.loads(config.expectations.read_text())
    names = {item["name"]: item["success"] for item in found["outcomes"]}
    assert names["lookalikes_in_one_split"]
    assert (config.docs / "splits" / "index.html").is_file()
    assert not [*config.work.iterdir()]
    files.refuse_foreign_outputs(config)
