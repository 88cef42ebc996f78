"""What a stage may draw, and the table it draws by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data.curriculum import Columns, Planned, eligible, replayed, write_planned
from data.difficulty import FEATURES
from data.files import read_records, schema_of, write_records
from data.stage import Stage

DIFFICULTY = np.array([0.0, 0.2, 0.5, 0.8, 1.0])


def stage(**settings: Any) -> Stage:
    return Stage.model_validate({"conditions": {"t2va": 1.0}, "num_steps": 1, "learning_rate": 1.0} | settings)


def columns(**given: Any) -> Columns:
    ordinary = {
        "difficulty": DIFFICULTY,
        "group": ["old", "new", "new", "new", "odd"],
        "canvas": ["small", "small", "large", "large", "large"],
        "duration_s": np.array([22 / 24, 22 / 24, 2.0, 4.0, 8.0]),
    }
    return Columns(**{**ordinary, **given})


@pytest.mark.parametrize(
    ("settings", "places"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"difficulty": [0.2, 0.8]}, [1, 2, 3]),
        ({"difficulty": [0.2, 0.8], "pacing": "competence"}, [1, 2, 3]),
        ({"canvases": ["large"]}, [2, 3, 4]),
        ({"max_duration_s": 0.917}, [0, 1]),
        ({"max_duration_s": 0.916}, []),
        ({"mixture": {"new": 1.0, "odd": 0.0}}, [1, 2, 3]),
        ({"difficulty": [0.5, 1.0], "replay_share": 0.1}, [0, 1, 2, 3, 4]),
        ({"difficulty": [0.5, 1.0], "replay_share": 0.1, "mixture": {"new": 1.0}}, [1, 2, 3]),
        ({"difficulty": [0.5, 0.8], "replay_share": 0.1, "replay_groups": ["old"]}, [0, 2, 3]),
        ({"mixture": {"new": 1.0}, "replay_share": 0.1, "replay_groups": ["old"]}, [0, 1, 2, 3]),
        ({"replay_share": 0.1, "replay_groups": ["old"], "canvases": ["large"]}, [2, 3, 4]),
    ],
)
def test_a_stage_draws_its_window_and_what_it_replays(settings: dict[str, Any], places: list[int]) -> None:
    assert np.flatnonzero(eligible(stage(**settings), columns())).tolist() == places
    in_arrow = columns(group=pa.chunked_array([["old", "new", "new"], ["new", "odd"]]))
    assert np.flatnonzero(eligible(stage(**settings), in_arrow)).tolist() == places


def test_an_entry_without_a_variant_of_the_stages_modes_is_not_drawn() -> None:
    variants = pa.array([["t2va"], ["a2v", "t2va"], [], ["fl2va", "a2v-uncaptioned"], ["ref2va.1"]])
    chosen = eligible(stage(conditions={"a2v": 0.5, "ref2va": 0.5, "t2va": 0.0}), columns(variants=variants))
    assert np.flatnonzero(chosen).tolist() == [1, 3, 4]
    listed = columns(variants=variants.to_pylist())
    assert eligible(stage(conditions={"fl2va": 1.0}), listed).tolist() == [False, False, False, True, False]


def test_replay_is_told_from_the_window() -> None:
    assert np.flatnonzero(replayed(stage(difficulty=[0.5, 1], replay_share=0.1), columns())).tolist() == [0, 1]
    assert not replayed(stage(difficulty=[0.5, 1]), columns()).any()


def test_the_table_is_what_records_written_one_by_one_would_be(tmp_path: Path) -> None:
    ranks = {name: np.array([0.0, np.nan, 1 / 3]) for name in FEATURES}
    texts = {name: pa.array(["a", "b", "c"]) for name in ("entry", "clip_id", "source_id", "group", "bucket")}
    review = np.array([False, True, False])
    write_planned(tmp_path / "fast", texts, ranks | {"difficulty": np.array([0.0, 0.5, 1.0])}, review)
    rows = read_records(tmp_path / "fast", Planned)
    assert [row.motion for row in rows] == [0.0, None, 0.333333]
    assert [row.review for row in rows] == review.tolist()
    write_records(tmp_path / "slow", rows, Planned)
    fast, slow = (pa.parquet.read_table(tmp_path / name) for name in ("fast", "slow"))
    assert fast.equals(slow)
    assert fast.schema.equals(schema_of(Planned), check_metadata=True)
