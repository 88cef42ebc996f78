"""The table of difficulties."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data.curriculum import Planned, write_planned
from data.difficulty import FEATURES
from data.files import read_records, schema_of, write_records
from data.stage import Stage


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


@pytest.mark.parametrize("name", ["conditions", "mixture"])
@pytest.mark.parametrize("share", [float("nan"), float("inf")])
def test_a_share_that_is_no_number_is_refused(name: str, share: float) -> None:
    settings = {"conditions": {"t2va": 1.0}, "num_steps": 1, "learning_rate": 1.0, name: {"t2va": share}}
    with pytest.raises(ValueError, match=rf"{name}[\s\S]*finite"):
        Stage.model_validate(settings)


@pytest.mark.parametrize("window", [(float("nan"), 1), (0, float("nan")), (0, float("inf")), (-0.1, 1), (0.6, 0.5)])
def test_a_window_that_is_none_is_refused(window: tuple[float, float]) -> None:
    settings = {"conditions": {"t2va": 1.0}, "num_steps": 1, "learning_rate": 1.0, "difficulty": window}
    with pytest.raises(ValueError, match=r"difficulty .* is no window between 0 and 1"):
        Stage.model_validate(settings)


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "max_duration_s", "competence_start"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_setting_that_is_no_number_is_refused(name: str, value: float) -> None:
    settings = {"conditions": {"t2va": 1.0}, "num_steps": 1, "learning_rate": 1.0, name: value}
    with pytest.raises(ValueError, match=name):
        Stage.model_validate(settings)
