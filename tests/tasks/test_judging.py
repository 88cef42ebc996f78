from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from data.asking import Expectation, Outcome, Table, should
from data.expectations import (
    VERSION,
    LatentFacts,
    clips_frame,
    clips_suite,
    frame,
    latents_frame,
    latents_suite,
    splits_frame,
    splits_suite,
    suite,
)
from data.latent_index import LatentRow
from data.limits import Limits
from data.records import Clip, ClipShape, DataRefused, Source
from tasks.judging import enforce, judge

Maker = Callable[..., Source]


@pytest.fixture(scope="module")
def good(make_source: Maker) -> list[Source]:
    return [make_source(f"{name}.mp4") for name in "abcdef"]


HDR_REFUSED = Limits(hdr="reject")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where the table is; the folder's name has what means something in an address."""
    return tmp_path / "a b?mode=x#%41$HOME" / "asked.sqlite"


def failed(sources: list[Source], place: Path) -> dict[str, Outcome]:
    """Expectations of the suite that the sources fail, by name."""
    outcomes = judge(frame(sources, place, HDR_REFUSED), suite(HDR_REFUSED, 3))
    return {item.name: item for item in outcomes if not item.success}


EVIL = """a & b<img src=x onerror=alert(1)>'" onclick=alert(2) x=\""""


def test_pages_print_hostile_texts_as_text_and_the_answers_have_them_as_they_are(tmp_path: Path, place: Path):
    texts = [(EVIL, EVIL, EVIL), ("b", "b", EVIL), ("c", "&lt;", "x")]
    columns = ("source_id", "path", "group")
    table = Table(place, columns, (dict(zip(columns, row, strict=True)) for row in texts))
    assert table.values("path") == [EVIL, "b", "&lt;"]
    assert table.counts("group") == {EVIL: 2, "x": 1}
    asked = (
        should("short", "ColumnValueLengthsToBeBetween", "", column="path", max_value=9),
        should("known", "ColumnValuesToBeInSet", "", column="group", value_set=["x", EVIL[1:]]),
        should("most", "ColumnMostCommonValueToBeInSet", "", column="group", value_set=[EVIL[1:]]),
    )
    found = {item.name: item for item in judge(table, asked, tmp_path / "docs")}
    assert [item.unexpected for item in found.values()] == [(f"{EVIL} {EVIL}",), (f"{EVIL} {EVIL}", "b b"), ()]
    assert EVIL[:20] in found["most"].measured
    pages = [path.read_text(encoding="utf-8") for path in (tmp_path / "docs").rglob("*.html")]
    assert sum("onerror=alert(1)" in page for page in pages) >= 2  # they do print them
    for page in pages:
        assert "<img src=x" not in page
        elements = Elements(page)
        assert not [
            value for name, value in elements.attributes if name in {"onclick", "onerror"} and "alert" in str(value)
        ]


class Elements(HTMLParser):
    """Attributes of all elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs


def test_good_sources_meet_every_expectation_in_the_order_of_the_table(good: list[Source], place: Path):
    table = suite(Limits(), 3)
    outcomes = judge(frame(good, place), table)
    assert [item.name for item in outcomes] == [item.name for item in table]
    assert [item.name for item in outcomes if not item.success] == []


BAD: dict[str, list[dict[str, object]]] = {
    "content_hash": [{"sha256": "x" * 64}],
    "id_of_content": [{"source_id": "3f2a"}],
    "caption_known": [{"caption": None}],
    "long_enough": [{"video_duration_s": 0.1, "audio_duration_s": 0.1}],
    "not_fast": [{"frame_rate": "1000"}],
    "not_slow": [{"frame_rate": "1"}],
    "tall_enough": [{"height": 8}],
    "wide_enough": [{"width": 8}],
    "quarter_turns": [{"rotation_deg": 45}],
    "known_layouts": [{"num_channels": 16}],
    "full_scale": [{"peak": 32768.0}],
    "not_empty": [{"size_bytes": 0}],
    "moves": [{"num_frames": 1, "header_num_frames": 1}],
    "fits_memory": [{"width": 9000}],
    "hdr_is_settled": [{"color_transfer": "smpte2084"}],
    "rate_known": [{"sample_rate_hz": 12345}],
    "starts_together": [{"audio_start_s": 1.5}],
    "ends_together": [{"audio_duration_s": 0.5}, {"audio_duration_s": 0.9}],
    "caption_length": [{"caption": "x"}],
    "captions_describe": [{"caption": "I'm sorry, but as an AI I cannot see videos."}, {"caption": "IMG_0042.mp4"}],
}
"""Expectation → rows that break it and no other."""


def test_bad_rows_fail_their_expectation_and_no_other_and_are_named(
    good: list[Source], make_source: Maker, place: Path
):
    rows = {
        name: [make_source(f"{name}{number}", **fields) for number, fields in enumerate(bad)]
        for name, bad in BAD.items()
    }
    found = failed([*good, *(source for bad in rows.values() for source in bad)], place)
    expected = {name: tuple(sorted(f"{item.source_id} {item.path}" for item in bad)) for name, bad in rows.items()}
    assert {name: outcome.unexpected for name, outcome in found.items()} == expected
    assert {name: outcome.num_unexpected for name, outcome in found.items()} == {k: len(v) for k, v in BAD.items()}


def test_dataset_wide_faults_are_measured(good: list[Source], place: Path):
    silent = [item.model_copy(update={"audio_codec": None, "caption": "same"}) for item in good]
    found = failed([*silent, *silent], place)
    assert found["mostly_sound"].measured == "0"
    assert found["captions_differ"].measured == "0.0833333"
    assert found["one_row_a_content"].num_unexpected == found["one_row_a_file"].num_unexpected == 12


def test_an_empty_dataset_fails_instead_of_raising(place: Path):
    assert failed([], place)["enough_sources"].measured == "0"


def test_an_expectation_that_cannot_be_computed_has_failed_and_says_why(good: list[Source], place: Path):
    unknown = Expectation(name="x", kind="ColumnValuesToBeUnique", options={"column": "nowhere"}, why="")
    (found,) = judge(frame(good, place), [unknown])
    assert not found.success
    assert "nowhere" in found.measured


def test_an_unknown_kind_is_a_fault_of_the_table(good: list[Source], place: Path):
    with pytest.raises(ValueError, match="expectation x: Great Expectations has no ExpectMiracles"):
        judge(frame(good, place), [Expectation(name="x", kind="Miracles", options={}, why="")])


def test_pages_are_written_and_logging_is_left_as_it_was(good: list[Source], tmp_path: Path, place: Path):
    before = logging.root.manager.disable
    judge(frame(good, place), suite(Limits(), 3)[:2], tmp_path / "docs")
    assert "manifest" in (tmp_path / "docs/index.html").read_text()
    assert logging.root.manager.disable == before


def by_name(outcomes: list[Outcome]) -> dict[str, Outcome]:
    return {item.name: item for item in outcomes if not item.success}


CLIP = ClipShape()
BAD_CLIPS: dict[str, dict[str, object]] = {
    "id_of_source": {"clip_id": "ffffffffffffffff-000000"},
    "id_of_place": {"clip_id": "a-000000"},
    "ends_after_start": {"start_s": 2.0, "end_s": 2.0},
    "starts_in_picture": {"start_s": -1.0, "end_s": -1.0 + 22 / 24},
    "length_of_shape": {"end_s": 3.0},
    "clip_caption_known": {"caption": ""},
    "boundary_score_share": {"boundary_score": 1.5},
    "luma_share": {"luma": 300.0},
    "flow_rises": {"motion_p50": 0.9},
    "sharpness_positive": {"sharpness_p90": -1.0},
    "blur_share": {"motion_blur_index": 2.0},
    "black_is_share": {"black_share": 2.0},
    "freeze_is_share": {"freeze_share": 2.0},
    "bars_are_share": {"letterbox_share": 2.0},
    "silence_is_share": {"silent_share": 2.0},
    "speech_is_share": {"speech_share": 2.0},
    "text_is_share": {"text_share": 2.0},
    "dnsmos_scale": {"dnsmos": 7.0},
    "no_cut_inside": {"residual_cuts": 2},
}
"""Expectation → fields of a clip that break it."""


def test_each_bad_clip_breaks_its_expectation_and_is_named(make_clip: Callable[..., Clip], place: Path):
    ids = [f"{number:016x}" for number in range(40)]
    good = [make_clip(source_id, caption=f"clip {source_id}") for source_id in ids]
    outcomes = judge(clips_frame(good, place, CLIP), clips_suite(CLIP), name="clips")
    assert by_name(outcomes) == {}
    bad = {
        name: make_clip(f"{number + 100:016x}", **({"caption": name} | fields))
        for number, (name, fields) in enumerate(BAD_CLIPS.items())
    }
    found = by_name(judge(clips_frame([*good, *bad.values()], place, CLIP), clips_suite(CLIP), name="clips"))
    assert set(bad) <= set(found)
    rows = {name: clip for name, clip in bad.items() if name != "no_cut_inside"}
    assert all(f"{clip.clip_id} {clip.path}" in found[name].unexpected for name, clip in rows.items())
    assert set(found) - set(bad) <= {"length_of_shape"}


def test_clips_of_the_same_span_are_named(make_clip: Callable[..., Clip], place: Path):
    clips = [make_clip(f"{number:016x}") for number in range(4)]
    twins = [clips[1].model_copy(update={"clip_id": f"{clips[1].source_id}-0000{number}"}) for number in range(2)]
    found = by_name(judge(clips_frame([*clips, *twins], place, CLIP), clips_suite(CLIP), name="clips"))
    assert found["one_row_a_span"].measured == "3 of 6 rows at fault"
    named = sorted(f"{clip.clip_id} {clip.source_id} {clip.path}" for clip in (clips[1], *twins))
    assert list(found["one_row_a_span"].unexpected) == named


def test_a_leak_of_source_cluster_or_file_is_named_and_a_clean_split_is_not(
    make_clip: Callable[..., Clip], place: Path
):
    clips = {name: [make_clip(f"{place}{number:015x}", group="g", licence="CC0-1.0") for number in range(size)]
             for place, (name, size) in enumerate((("train", 8), ("val", 2), ("test", 2)))}  # fmt: skip
    clean = splits_frame(clips, place)
    assert by_name(judge(clean, splits_suite(clean), name="splits")) == {}
    train, test = clips["train"][0], clips["test"][0]
    twin = make_clip("f" * 16, 3, cluster=train.cluster, path=test.path)
    again = make_clip(train.source_id, 9, path="elsewhere.mp4")
    leaky = splits_frame(clips | {"val": [*clips["val"], twin, again]}, place)
    found = by_name(judge(leaky, splits_suite(leaky), name="splits"))
    assert f"{again.clip_id} {again.path}" in found["source_in_one_split"].unexpected
    assert f"{twin.clip_id} {twin.path}" in found["lookalikes_in_one_split"].unexpected
    assert f"{test.clip_id} {test.path}" in found["file_in_one_split"].unexpected
    missing = splits_frame({"train": clips["train"], "val": clips["val"], "test": []}, place)
    assert "splits_there" in by_name(judge(missing, splits_suite(missing), name="splits"))


def test_a_split_of_another_mix_than_the_whole_is_told_with_its_divergence(make_clip: Callable[..., Clip], place: Path):
    groups = {"train": ["a"] * 45 + ["b"] * 45, "val": ["a"] * 5 + ["b"] * 5, "test": ["b"] * 10}
    clips = {name: [make_clip(f"{name[:2]}{number}", group=group) for number, group in enumerate(members)]
             for name, members in groups.items()}  # fmt: skip
    table = splits_frame(clips, place)
    found = by_name(judge(table, splits_suite(table), name="splits"))
    assert "group_train_as_whole" not in found
    assert math.isclose(float(found["group_test_as_whole"].measured), math.log(110 / 60), rel_tol=1e-4)
    assert not found["group_test_as_whole"].critical
    assert found["group_test_as_whole"].limit == "mix by group within 0.1 nats of the whole"


def test_latents_that_are_missing_broken_or_of_other_clips_are_named(make_clip: Callable[..., Clip], place: Path):
    clips = [make_clip(f"{number:016x}") for number in range(6)]
    rows = [
        LatentRow(
            entry=f"{clip.clip_id}@a", clip_id=clip.clip_id, source_id=clip.source_id, split="train", group="",
            canvas="a", has_audio=True, **ClipShape().model_dump(), variants=("t2va",), layouts=("1",), num_tokens=(9,),
            shard="00000", keys=("", "", "", ""),
        )
        for clip in clips
    ]  # fmt: skip
    facts = {row.entry: LatentFacts(finite=True, as_planned=True, dtype="float32", has_audio=True) for row in rows}
    good = judge(latents_frame(rows, clips, facts, place), latents_suite(), name="latents")
    assert by_name(good) == {}
    changed = {0: {"finite": False}, 1: {"as_planned": False}, 2: {"dtype": "int8"}, 3: {"has_audio": False}}
    broken = facts | {
        rows[number].entry: facts[rows[number].entry]._replace(**change) for number, change in changed.items()
    }
    stranger = rows[0].model_copy(update={"entry": "stranger@a", "clip_id": "stranger"})
    found = by_name(judge(latents_frame([*rows[:5], stranger], clips, broken, place), latents_suite(), name="latents"))
    assert {name: [row.split()[0] for row in item.unexpected] for name, item in found.items()} == {
        "all_encoded": [clips[5].clip_id],
        "no_strangers": ["stranger"],
        "latent_finite": [clips[0].clip_id],
        "latent_shape": [clips[1].clip_id],
        "latent_dtype": [clips[2].clip_id],
        "sound_agrees": [clips[3].clip_id],
    }


def test_enforce_writes_answers_and_pages_and_refuses_with_the_rows(good: list[Source], tmp_path: Path, place: Path):
    answers, docs = tmp_path / "answers.json", tmp_path / "docs"
    table, asked = frame(good, place), suite(Limits(), 3)
    assert len(enforce("manifest", table, asked, answers, docs)) == len(asked)
    first = json.loads(answers.read_text())
    assert (first["suite"], first["version"], first["num_rows"], len(first["outcomes"])) == (
        "manifest",
        VERSION,
        6,
        len(asked),
    )
    assert (docs / "manifest/index.html").is_file()
    small = [*good[:5], good[5].model_copy(update={"height": 4})]
    with pytest.raises(
        DataRefused, match=rf"manifest: .*tall_enough \(height\): 1 of 6 rows.*{good[5].source_id} corpus/f"
    ):
        enforce("manifest", frame(small, place.with_name("small")), asked, answers, docs)
    assert [item["name"] for item in json.loads(answers.read_text())["outcomes"] if not item["success"]] == [
        "tall_enough"
    ]
    with pytest.raises(DataRefused, match="manifest: too few captions"):
        enforce("manifest", table, asked, answers, docs, also=["too few captions"])


def test_losing_more_sources_than_allowed_since_last_time_is_refused(good: list[Source], place: Path):
    asked = suite(Limits(), 3, previous=7, max_lost=0.1)
    assert by_name(judge(frame(good, place), asked))["few_are_lost"].limit == "min_value 7"
    assert by_name(judge(frame(good, place), suite(Limits(), 3, previous=6, max_lost=0.1))) == {}
