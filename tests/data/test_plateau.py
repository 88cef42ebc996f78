"""Plateaus: where a curve stands still the stage ends, at the same step whoever asks and however often it stopped."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.plateau import Ended, Plateau, ended, value_of


def falling(num: int, still_from: int) -> list[dict[str, Any]]:
    """A loss that falls by 0.01 a step until it stands still."""
    return [{"step": n, "loss_video": 5 - 0.01 * min(n, still_from), "loss_audio": 1.0} for n in range(num)]


def test_a_stage_ends_patience_steps_after_the_last_improvement() -> None:
    plateau = Plateau(quantity="loss_video", window=1, patience=50)
    assert ended(falling(400, 100), plateau) == Ended(150, pytest.approx(4.0), 100)
    assert ended(falling(150, 100), plateau) is None
    assert ended(falling(400, 400), plateau) is None
    assert ended([], plateau) is None


def test_smoothing_moves_the_end_by_the_window_and_takes_scatter_out() -> None:
    rows = falling(400, 100)
    for row in rows:
        row["loss_video"] += 0.3 if row["step"] % 2 else -0.3
    nervous = Plateau(quantity="loss_video", window=1, patience=50)
    assert ended(rows, nervous) == Ended(150, pytest.approx(3.7), 100)
    calm = Plateau(quantity="loss_video", window=20, min_delta=1e-9, patience=50)
    found = ended(rows, calm)
    assert found is not None
    # windows of even length hold as many high as low values, and the last that falls ends 19 steps after step 100
    assert (found.best_step, found.step) == (119, 169)
    assert found.best == pytest.approx(4.0)


def test_improvements_below_the_least_that_counts_do_not() -> None:
    rows = [{"step": n, "loss_video": 1 - 1e-5 * n} for n in range(300)]
    strict = Plateau(quantity="loss_video", window=1, patience=100, min_delta=0.01)
    assert ended(rows, strict) == Ended(100, 1.0, 0)
    assert ended(rows, strict.model_copy(update={"min_delta": 0.0})) is None
    assert ended(rows, strict.model_copy(update={"min_steps": 201})) == Ended(200, 1.0, 0)


def test_a_higher_psnr_is_better_and_steps_without_it_are_passed_over() -> None:
    rows: list[dict[str, Any]] = [{"step": n, "loss_video": 1.0} for n in range(500)]
    for place, value in enumerate([10.0, 14.0, 16.0, 15.0, 16.0, 15.5]):
        rows[place * 50]["psnr_db"] = value
    plateau = Plateau(quantity="psnr_db", better="higher", window=1, patience=100)
    found = ended(rows, plateau)
    assert found == Ended(200, 16.0, 100)
    assert found is not None
    assert found.words(plateau) == "plateau at step 200: psnr_db no better than 16 of step 100 by 0 in 100 steps"
    assert ended(rows, plateau.model_copy(update={"better": "lower"})) == Ended(100, 10.0, 0)


def test_a_loss_of_both_counts_where_both_are_there() -> None:
    assert value_of({"loss_video": 1.0, "loss_audio": 0.5}, "loss") == 1.5
    assert value_of({"loss_video": 1.0, "loss_audio": 0.0}, "loss") is None  # a silent step is no good one
    assert value_of({"loss_video": 0.0}, "loss_video") is None
    assert value_of({"psnr_db": 0.0}, "psnr_db") == 0.0
    assert value_of({}, "psnr_db") is None


@given(
    st.lists(st.floats(0.1, 10), max_size=120),
    st.integers(1, 8),
    st.integers(1, 30),
    st.sampled_from(["lower", "higher"]),
)
def test_the_first_plateau_does_not_depend_on_what_comes_after(
    values: list[float], window: int, patience: int, better: Any
) -> None:
    rows = [{"step": n, "loss_video": value} for n, value in enumerate(values)]
    plateau = Plateau(quantity="loss_video", window=window, patience=patience, better=better)
    found = ended(rows, plateau)
    asked_each_step = next((end for n in range(len(rows)) if (end := ended(rows[: n + 1], plateau))), None)
    assert asked_each_step == found
    if found is not None:
        assert found.step - found.best_step >= patience
        means = [sum(values[n + 1 - window : n + 1]) / window for n in range(window - 1, found.step + 1)]
        assert found.best == pytest.approx(min(means) if better == "lower" else max(means))
