"""The sampler's promises, as properties."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.candidates import Candidates, candidates_of, eligible
from data.sampler import NUM_SEGMENTS, Sampler, StepBatch, opened, share
from data.stage import Stage

ALL = ("t2va", "fl2va", "ref2va.0", "ref2va.1")


def clip(number: int, **fields: Any) -> dict[str, Any]:
    """A row of the index, with the difficulty that the curriculum gives it."""
    ordinary = {
        "entry": f"clip-{number:04d}@small", "split": "train", "group": "new", "canvas": "small", "has_audio": True,
        "num_frames": 24, "frame_rate": 24, "variants": ALL, "layout": number % 2, "tokens": 100, "difficulty": 0.5,
    }  # fmt: skip
    return {**ordinary, **fields}


def clips(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [clip(number, **fields) for number in range(count)]


def candidates(rows: list[dict[str, Any]], planned: list[dict[str, Any]] | None = None) -> Candidates:
    names = ("entry", "split", "group", "canvas", "has_audio", "num_frames", "frame_rate", "variants")
    columns = {name: [row[name] for row in rows] for name in names}
    columns["layouts"] = [[f"{variant[:4]} {row['layout']}" for variant in row["variants"]] for row in rows]
    columns["num_tokens"] = [[row["tokens"]] * len(row["variants"]) for row in rows]
    shown = [row for row in rows if row["split"] == "train"] if planned is None else planned
    types = {"entry": pa.string(), "group": pa.string(), "difficulty": pa.float64()}
    curriculum = pa.table({name: pa.array([row[name] for row in shown], kind) for name, kind in types.items()})
    return candidates_of(SimpleNamespace(table=pa.table(columns)), curriculum)  # type: ignore[arg-type]


def stage(**changes: Any) -> Stage:
    ordinary = {"conditions": {"t2va": 1.0}, "num_steps": 100, "batch_size": 3, "learning_rate": 1e-3}
    return Stage.model_validate({**ordinary, **changes})


def dealt(sampler: Sampler, num_steps: int) -> list[StepBatch]:
    return [sampler.batch(step) for step in range(num_steps)]


rows_of_many_kinds = st.lists(
    st.tuples(st.sampled_from(["a", "b", "old"]), st.integers(0, 3), st.integers(0, 10)), min_size=8, max_size=40
).map(
    lambda items: [
        clip(number, group=group, layout=layout, difficulty=tenths / 10, tokens=100 * (1 + layout))
        for number, (group, layout, tenths) in enumerate(items)
    ]
)
MIXED = {"t2va": 0.3, "fl2va": 0.5, "ref2va": 0.2}


@settings(deadline=None, max_examples=50)
@given(rows_of_many_kinds, st.integers(1, 6), st.integers(0, 3), st.sampled_from([None, 450, 1000]))
def test_every_pass_of_a_deck_deals_each_item_once_in_batches_of_one_bucket_and_near_equal_size(
    rows: list[dict[str, Any]], batch_size: int, seed: int, max_tokens: int | None
) -> None:
    plan = stage(conditions=MIXED, batch_size=batch_size, max_tokens=max_tokens)
    sampler = Sampler(candidates(rows), plan, seed)
    of = {row["entry"]: row for row in rows}
    by_mode: dict[str, list[StepBatch]] = defaultdict(list)
    for batch in dealt(sampler, 300):
        assert {variant.split(".")[0] for variant in batch.variants} == {batch.mode}
        assert len({of[entry]["layout"] for entry in batch.entries}) == 1
        assert len(batch.entries) <= batch_size
        assert sum(of[entry]["tokens"] for entry in batch.entries) <= (max_tokens or 10**9)
        by_mode[batch.mode].append(batch)
    for facts in sampler.summary():
        mode, length = facts.deck.split("/")[-1], facts.pass_length
        wanted = sorted((row["entry"], name) for row in rows for name in ALL if name.split(".")[0] == mode)
        assert (facts.clips, facts.items) == (len(rows), len(wanted))
        for start in range(0, len(by_mode[mode]) - length + 1, length):
            full = by_mode[mode][start : start + length]
            assert sorted(item for batch in full for item in zip(batch.entries, batch.variants, strict=True)) == wanted
            sizes: dict[int, set[int]] = defaultdict(set)
            for batch in full:
                sizes[of[batch.entries[0]]["layout"]].add(len(batch.entries))
            assert all(max(found) - min(found) <= 1 for found in sizes.values())


def test_passes_are_shuffled_within_and_across_buckets() -> None:
    sampler = Sampler(candidates(clips(40)), stage(batch_size=4), 0)
    first, second = ([sampler.batch(step) for step in range(start, start + 10)] for start in (0, 10))
    assert [batch.entries for batch in first] != [batch.entries for batch in second]
    assert {frozenset(batch.entries) for batch in first} != {frozenset(batch.entries) for batch in second}
    assert len({int(batch.entries[0][8]) % 2 for batch in first[:5]}) == 2
    assert Sampler(candidates(clips(40)), stage(batch_size=4), 1).batch(0).entries != first[0].entries


def test_mixture_replay_conditions_and_captions_get_their_shares_of_the_drawn_clips() -> None:
    names = tuple(f"{mode}{said}" for mode in ("t2va", "fl2va") for said in ("", "-uncaptioned"))
    groups = ["a"] * 16 + ["b"] * 32 + ["old"] * 8
    rows = [clip(number, group=group, variants=names) for number, group in enumerate(groups)]
    plan = stage(
        conditions={"t2va": 0.25, "fl2va": 0.75}, caption_dropout=0.1, batch_size=4, replay_share=0.2,
        replay_groups=["old"], mixture={"a": 3, "b": 1},
    )  # fmt: skip
    sampler, num_steps = Sampler(candidates(rows), plan, 0), 1777
    drawn: Counter[tuple[str, str]] = Counter()
    for batch in dealt(sampler, num_steps):
        numbers = [int(entry[5:9]) for entry in batch.entries]
        drawn.update((groups[number], name) for number, name in zip(numbers, batch.variants, strict=True))
    for group, weight in (("a", 0.6), ("b", 0.2), ("old", 0.2)):
        for mode, part in (("t2va", 0.25), ("fl2va", 0.75)):
            for said, half in (("", 0.9), ("-uncaptioned", 0.1)):
                exact = 4 * num_steps * weight * part * half  # every batch is full here
                assert abs(drawn[group, mode + said] - exact) <= 2 * 4


def test_shares_are_of_clips_even_where_one_part_has_smaller_batches() -> None:
    rows = [
        clip(number, group="long" if number < 10 else "short", tokens=400 if number < 10 else 100)
        for number in range(40)
    ]
    rows = [{**row, "layout": row["group"]} for row in rows]
    plan = stage(batch_size=8, max_tokens=800, mixture={"long": 1, "short": 1})
    drawn = Counter(
        int(entry[5:9]) < 10 for batch in dealt(Sampler(candidates(rows), plan, 0), 1000) for entry in batch.entries
    )
    assert abs(drawn[True] / drawn.total() - 0.5) < 0.005


@settings(deadline=None, max_examples=40)
@given(rows_of_many_kinds, st.integers(0, 500), st.integers(0, 2), st.randoms(use_true_random=False))
def test_a_batch_depends_on_seed_and_step_alone(rows: list[dict[str, Any]], step: int, seed: int, random: Any) -> None:
    plan = stage(
        conditions=MIXED, batch_size=1, pacing="competence", competence_start=1, replay_share=0.3, replay_groups=["old"]
    )
    rows = [*rows, clip(900, group="old"), clip(901, group="a")]
    warm = Sampler(candidates(rows), plan, seed)
    for other in (step + 3, step, 0, step + 1):
        warm.batch(other)
    planned = random.sample(rows, len(rows))
    cold = Sampler(candidates(random.sample(rows, len(rows)), planned), plan, seed)
    assert warm.batch(step) == cold.batch(step)


def test_other_processes_draw_the_same_whatever_their_hash_seed(tmp_path: Path) -> None:
    script = tmp_path / "draw.py"
    here = Path(__file__)
    script.write_text(
        f"import sys; sys.path.insert(0, {str(here.parents[2])!r}); sys.path.insert(0, {str(here.parent)!r})\n"
        "from test_sampler import *\n"
        "sampler = Sampler(candidates(clips(300)), stage(conditions=MIXED), 5)\n"
        "print([sampler.batch(step) for step in (0, 7, 99, 3)])\n"
    )
    said = [
        subprocess.run(
            [sys.executable, str(script)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    sampler = Sampler(candidates(clips(300)), stage(conditions=MIXED), 5)
    assert said[0] == said[1] == f"{[sampler.batch(step) for step in (0, 7, 99, 3)]}\n"


@given(st.integers(1, 20), st.sampled_from([1, 2, 3, 4, 8]))
def test_any_number_of_processes_shares_the_same_batch_out(num_clips: int, world_size: int) -> None:
    entries = tuple(f"c{number}" for number in range(num_clips))
    whole = StepBatch(7, "t2va", entries, ("t2va",) * num_clips)
    parts = [share(whole, rank, world_size) for rank in range(world_size)]
    assert tuple(joined(parts, num_clips)) == entries
    assert all(part.entries and len(part.variants) == len(part.entries) for part in parts)


def joined(parts: list[StepBatch], num_clips: int) -> list[str]:
    """The clips of all processes that got any."""
    ends = [rank * num_clips // len(parts) for rank in range(len(parts) + 1)]
    return [
        entry for part, first, end in zip(parts, ends, ends[1:], strict=False) if end > first for entry in part.entries
    ]


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_process_that_there_is_not_gets_no_share(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of {world_size} processes"):
        share(StepBatch(0, "t2va", ("a", "b", "c"), ("t2va",) * 3), rank, world_size)


def test_a_run_resumed_by_another_number_of_processes_sees_the_same_global_batches() -> None:
    undisturbed = Sampler(candidates(clips(50)), stage(conditions=MIXED, batch_size=5), 3)
    resumed = Sampler(candidates(clips(50)), stage(conditions=MIXED, batch_size=5), 3)
    for step, world_size in ((0, 2), (41, 3), (42, 8), (99, 1)):
        parts = [share(resumed.batch(step), rank, world_size) for rank in range(world_size)]
        wanted = undisturbed.batch(step).entries
        assert tuple(joined(parts, len(wanted))) == wanted


@settings(deadline=None, max_examples=30)
@given(rows_of_many_kinds, st.integers(1, 4), st.integers(0, 250), st.sampled_from(["window", "competence"]))
def test_draws_and_coverage_equal_what_counting_the_batches_gives(
    rows: list[dict[str, Any]], batch_size: int, num_steps: int, pacing: str
) -> None:
    rows = [*rows, *(clip(900 + number, difficulty=0.0) for number in range(4)), clip(950, split="val")]
    sampler = Sampler(candidates(rows), stage(conditions=MIXED, batch_size=batch_size, pacing=pacing), 0)
    counted = Counter(entry for batch in dealt(sampler, num_steps) for entry in batch.entries)
    trained = sorted(row["entry"] for row in rows if row["split"] == "train")
    assert sampler.draws(num_steps).tolist() == [counted[entry] for entry in trained]
    most = max(counted.values(), default=0)
    assert sampler.coverage(num_steps) == (len(trained), len(counted), most)
    assert sum(facts.num_steps for facts in sampler.summary()) == 100


def test_competence_opens_the_window_from_its_easy_end_and_all_of_it_at_last() -> None:
    rows = [clip(number, difficulty=number / 100) for number in range(101)]
    plan = stage(pacing="competence", difficulty=(0.2, 0.8), competence_start=0.25, num_steps=500)
    limits = opened(plan)
    assert [step for step, _ in limits] == list(range(0, 500, 500 // NUM_SEGMENTS))
    assert limits[0][1] == pytest.approx(0.2 + 0.25 * 0.6)
    assert limits[3][1] == pytest.approx(0.2 + 0.6 * (3 / 9 * (1 - 0.25**2) + 0.25**2) ** 0.5)
    assert [limit for _, limit in limits] == sorted(limit for _, limit in limits)
    assert limits[-1][1] == 0.8
    sampler, hardest = Sampler(candidates(rows), plan, 0), []
    for batch in dealt(sampler, 500):
        numbers = [int(entry[5:9]) for entry in batch.entries]
        limit = [limit for step, limit in limits if step <= batch.step][-1]
        assert all(20 <= number <= 100 * limit + 1e-9 for number in numbers)
        hardest.append(max(numbers))
    assert max(hardest[:50]) == 35
    assert max(hardest[-50:]) == 80
    assert opened(stage(pacing="competence", num_steps=1)) == [(0, 1.0)]


def test_both_ends_of_the_difficulty_window_take_part() -> None:
    rows = [clip(number, difficulty=number / 10) for number in range(11)]
    drawn = {
        entry
        for batch in dealt(Sampler(candidates(rows), stage(difficulty=(0.3, 0.7)), 0), 20)
        for entry in batch.entries
    }
    assert drawn == {row["entry"] for row in rows[3:8]}


def test_only_clips_of_the_stage_take_part() -> None:
    rows = [
        clip(0, split="val"), clip(1, split="test"), clip(2, canvas="large"), clip(3, num_frames=25),
        clip(4, group="other"), *(clip(number) for number in range(5, 9)),
    ]  # fmt: skip
    plan = stage(canvases=["small"], max_duration_s=1.0, mixture={"new": 1, "other": 0})
    drawn = {entry for batch in dealt(Sampler(candidates(rows), plan, 0), 20) for entry in batch.entries}
    assert drawn == {row["entry"] for row in rows[5:]}


def test_silent_clips_are_never_drawn_with_given_sound_and_their_part_keeps_its_weight() -> None:
    rows = [
        clip(number, group="silent" if number < 6 else "new", has_audio=number >= 6, variants=("t2va", "a2v"))
        for number in range(12)
    ]
    plan = stage(conditions={"t2va": 0.5, "a2v": 0.5}, mixture={"silent": 1, "new": 1})
    drawn = Counter(
        (batch.mode, int(entry[5:9]) < 6)
        for batch in dealt(Sampler(candidates(rows), plan, 0), 400)
        for entry in batch.entries
    )
    assert drawn["a2v", True] == 0
    assert drawn["t2va", True] == pytest.approx(drawn.total() / 2, abs=6)


def test_replay_is_what_is_easier_than_the_window_where_no_group_is_named() -> None:
    rows = [clip(number, difficulty=number / 10) for number in range(10)]
    sampler = Sampler(candidates(rows), stage(difficulty=(0.5, 1), replay_share=0.25), 0)
    drawn = Counter(int(entry[5:9]) >= 5 for batch in dealt(sampler, 400) for entry in batch.entries)
    assert drawn[False] / drawn.total() == pytest.approx(0.25, abs=0.01)
    assert sampler.coverage(400).drawn == 10


def test_replayed_groups_come_as_replay_alone_unless_the_mixture_names_them() -> None:
    rows = [clip(number, group="old" if number < 4 else "new") for number in range(12)]
    plain = Sampler(candidates(rows), stage(replay_share=0.25, replay_groups=["old"]), 0)
    assert [(facts.clips, round(facts.share, 6)) for facts in plain.summary()] == [(8, 0.75), (4, 0.25)]
    plan = stage(replay_share=0.25, replay_groups=["old"], mixture={"old": 1, "new": 2})
    assert [facts.clips for facts in Sampler(candidates(rows), plan, 0).summary()] == [8, 4, 4]


FIVE = [
    clip(number, difficulty=difficulty, group=group, canvas=canvas, num_frames=num_frames)
    for number, (difficulty, group, canvas, num_frames) in enumerate(
        zip(
            (0.0, 0.2, 0.5, 0.8, 1.0), ("old", "new", "new", "new", "odd"), ("small", "small", "large", "large", "large"),
            (22, 22, 48, 96, 192), strict=True,
        )
    )
]  # fmt: skip
"""Of every kind, at 24 frames a second."""


@pytest.mark.parametrize(
    ("settings", "places", "again"),
    [
        ({}, [0, 1, 2, 3, 4], []),
        ({"difficulty": [0.2, 0.8]}, [1, 2, 3], []),
        ({"difficulty": [0.2, 0.8], "pacing": "competence", "competence_start": 1.0}, [1, 2, 3], []),
        ({"canvases": ["large"]}, [2, 3, 4], []),
        ({"max_duration_s": 0.9166}, [0, 1], []),
        ({"mixture": {"new": 1.0, "odd": 0.0}}, [1, 2, 3], []),
        ({"difficulty": [0.5, 1.0], "replay_share": 0.1}, [0, 1, 2, 3, 4], [0, 1]),
        ({"difficulty": [0.5, 1.0], "replay_share": 0.1, "mixture": {"new": 1.0}}, [1, 2, 3], [1]),
        ({"difficulty": [0.5, 0.8], "replay_share": 0.1, "replay_groups": ["old"]}, [0, 2, 3], [0]),
        ({"mixture": {"new": 1.0}, "replay_share": 0.1, "replay_groups": ["old"]}, [0, 1, 2, 3], [0]),
    ],
)
def test_what_a_stage_may_draw_is_what_its_sampler_draws(
    settings: dict[str, Any], places: list[int], again: list[int]
) -> None:
    rows, plan = candidates(FIVE), stage(**{"batch_size": 1, **settings})
    drawn, replayed = eligible(rows, plan)
    assert (drawn.nonzero()[0].tolist(), replayed.nonzero()[0].tolist()) == (places, again)
    assert (Sampler(rows, plan, 0).draws(300) > 0).nonzero()[0].tolist() == places


def test_what_no_stage_may_draw_is_told_by_duration_canvas_and_mode() -> None:
    variants = [("t2va",), ("a2v", "t2va"), (), ("fl2va", "a2v-uncaptioned"), ("ref2va.1",)]
    rows = candidates([{**row, "variants": items} for row, items in zip(FIVE, variants, strict=True)])
    given_sound = stage(conditions={"a2v": 0.5, "ref2va": 0.5, "t2va": 0.0})
    assert eligible(rows, given_sound)[0].tolist() == [False, True, False, True, True]
    assert not eligible(candidates(FIVE), stage(max_duration_s=0.916))[0].any()
    with pytest.raises(ValueError, match=r"canvases: no 'huge' .* it has large, small"):
        eligible(candidates(FIVE), stage(canvases=["huge"]))


def test_fewer_clips_than_a_batch_are_refused_with_both_numbers() -> None:
    rows = [*clips(3), *(clip(number, difficulty=0.9) for number in range(3, 8))]
    with pytest.raises(
        ValueError,
        match=r"3 clips to train on \(of 8\) do not fill one batch of batch_size = 4; lower batch_size, widen difficulty or add",
    ):
        Sampler(candidates(rows), stage(batch_size=4, difficulty=(0, 0.6)), 0)
    with pytest.raises(ValueError, match=r"3 clips .* raise competence_start"):
        Sampler(candidates(rows), stage(batch_size=4, pacing="competence", competence_start=0.6), 0)
    assert Sampler(candidates(rows), stage(batch_size=3, difficulty=(0, 0.6)), 0).coverage(2).drawn == 3


def test_nothing_to_draw_is_refused_with_the_option_to_change() -> None:
    with pytest.raises(ValueError, match=r"no clip to train on \(of 4\); widen difficulty, max_duration_s or add data"):
        Sampler(candidates(clips(4)), stage(max_duration_s=0.5), 0)
    with pytest.raises(ValueError, match=r"no clip of old to replay .* replay_share"):
        Sampler(candidates(clips(4)), stage(replay_share=0.2, replay_groups=["old"]), 0)
    with pytest.raises(ValueError, match=r"no clip below 0\.4 to replay"):
        Sampler(candidates(clips(4)), stage(replay_share=0.2, difficulty=(0.4, 1)), 0)
    with pytest.raises(ValueError, match="no clip to train on"):
        Sampler(candidates(clips(4, group="old")), stage(replay_share=0.2, replay_groups=["old"]), 0)
    with pytest.raises(ValueError, match="no clip to train on"):
        Sampler(candidates(clips(2, split="val")), stage(), 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conditions": {"t2va": 0.5, "v2a": 0.5}}, "conditions: none of 4 clips can be drawn as v2a; .* encode.modes"),
        ({"conditions": {"a2v": 1.0}}, "none of 4 clips can be drawn as a2v"),
        ({"caption_dropout": 0.1}, "caption_dropout = 0.1 needs t2va without captions; set encode.uncaptioned"),
        ({"max_tokens": 99}, "clip clip-0000@small as t2va takes 100 tokens; limit max_tokens = 99"),
        ({"canvases": ["huge"]}, "canvases: no 'huge' in the latent store; it has small"),
        ({"mixture": {"new": 1, "neu": 1}}, "mixture: no clip of group 'neu' to train on; there are 'new'"),
    ],
)
def test_what_the_store_does_not_hold_is_refused_with_its_option(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(candidates(clips(4)), stage(**changes), 0)


def test_a_curriculum_of_other_latents_is_refused() -> None:
    rows = clips(4)
    for planned, message in (
        ([*rows, clip(9)], "names 5 clips where the latent store has 4 .* clip-0009@small; run `soundstage plan`"),
        (rows[1:], "lacks 1 training clips, first clip-0000@small; run `soundstage plan`"),
        ([*rows, rows[0]], "some twice; run `soundstage plan`"),
    ):
        with pytest.raises(ValueError, match=message):
            candidates(rows, planned)


@pytest.mark.parametrize("difficulty", [float("nan"), None, float("inf"), -0.1])
def test_a_clip_whose_difficulty_is_none_is_named_and_not_left_out(difficulty: float | None) -> None:
    planned = [*clips(3), clip(3, difficulty=difficulty)]
    with pytest.raises(ValueError, match=r"difficulty of 1 of 4 .* no number .*clip-0003@small.*`soundstage plan`"):
        candidates(clips(4), planned)
