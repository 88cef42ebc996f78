"""Conclusions of a panel, from votes written by hand: the golden numbers, and who is left out and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.records import DataRefused
from tasks.panel_log import Progress, Rating
from tasks.panel_plan import LOW_ANCHOR, REFERENCE, Item, Panel, order
from tasks.panel_results import Limits, conclude

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "assets/eval/audio_mos_golden.json").read_text(encoding="utf-8")
)
ROWS = {
    ("a", LOW_ANCHOR): 0, ("a", "candidate"): 2, ("a", REFERENCE): 4,
    ("b", LOW_ANCHOR): 5, ("b", "candidate"): 1, ("b", REFERENCE): 3,
}  # fmt: skip
"""Which row of the golden matrix is which item's."""
LIMITS = Limits(max_gold_failures=0.25, max_repeat_difference=1.0)
Votes = Callable[[int, Item, bool], Sequence[int]]


def item(source: str, system: str, *, training: bool = False) -> Item:
    name = f"{source} {system}"
    return Item(name=name, source=source, system=system, sha256=name, duration_s=1, gain_db=0, training=training)


PANEL = Panel(
    seed=0, num_repeats=1, left_out={"c": "candidate: does not decode"}, quieter={},
    items=(item("t", REFERENCE, training=True), *(item(*key) for key in sorted(ROWS))),
)  # fmt: skip


def rated(panel: Panel, rater: int, votes: Votes, stop: int | None = None) -> list[Rating]:
    return [
        Rating(
            rater, place, showing.item.name, showing.item.sha256, 0, showing.item.training, showing.is_repeat,
            *votes(rater, showing.item, showing.is_repeat), 1.0, 1, 4.0, 100.0 + place,
        )
        for place, showing in enumerate(order(panel, rater)[:stop])
    ]  # fmt: skip


def golden(rater: int, item: Item, is_repeat: bool) -> Sequence[int]:
    vote = 1 if item.training else GOLDEN["mos_matrix_6_stimuli_x_5_raters"][ROWS[item.source, item.system]][rater - 1]
    return [vote] * 4


def concluded(panel: Panel, num_raters: int, votes: Votes, stops: dict[int, int] | None = None) -> dict[str, Any]:
    ratings = [
        each for rater in range(1, num_raters + 1) for each in rated(panel, rater, votes, (stops or {}).get(rater))
    ]
    counts = [sum(each.rater == rater for each in ratings) for rater in range(1, num_raters + 1)]
    progress = [Progress(rater, count, 0, 200.0) for rater, count in enumerate(counts, 1)]
    return conclude(panel, ratings, progress, LIMITS)


def test_golden_raters_give_the_golden_statistics_on_every_scale() -> None:
    found = concluded(PANEL, 5, golden)
    assert found["num_raters"] == {"invited": 5, "finished": 5, "kept": 5}
    for row in found["items"]:
        place = ROWS[row["source"], row["system"]]
        for scale in ("picture", "sound", "sync", "overall"):
            assert row[scale]["mos"] == pytest.approx(GOLDEN["mos"][place], abs=1e-4)
            assert row[scale]["ci95_half_width"] == pytest.approx(GOLDEN["ci95_t_halfwidth"][place], abs=1e-4)
            assert row[scale]["standard_error"] == pytest.approx(GOLDEN["se_raw"][place], abs=1e-4)
            assert row[scale]["standard_error_bias_removed"] == pytest.approx(
                GOLDEN["se_bias_removed"][place], abs=1e-4
            )
    for place, rater in enumerate(found["raters"]):
        assert rater["bias"]["sync"] == pytest.approx(GOLDEN["rater_bias"][place], abs=1e-4)
        assert rater["repeat_difference"] == 0
    assert found["left_out"] == {"c": "candidate: does not decode"}
    json.dumps(found, allow_nan=False)


def test_systems_are_means_over_raters_and_clips_and_differences_are_paired() -> None:
    found = concluded(PANEL, 5, golden)
    for system in ("candidate", REFERENCE, LOW_ANCHOR):
        own = [GOLDEN["mos"][place] for (_, name), place in ROWS.items() if name == system]
        score = found["systems"][system]["overall"]
        assert score["mean"] == pytest.approx(np.mean(own))
        assert (score["num_raters"], score["num_clips"]) == (5, 2)
        for low, high in ((score["low"], score["high"]), score["ci95_t"]):
            assert low < score["mean"] < high
    difference = found["differences"]["candidate - reference"]["overall"]
    candidate, reference = (found["systems"][name]["overall"]["mean"] for name in ("candidate", REFERENCE))
    assert difference["mean"] == pytest.approx(candidate - reference)
    assert difference["ci95"][1] < 0


def test_unfinished_sessions_and_training_count_for_nothing_but_are_told() -> None:
    def votes(rater: int, item: Item, is_repeat: bool) -> Sequence[int]:
        return golden(min(rater, 5), item, is_repeat)

    found = concluded(PANEL, 7, votes, {6: 4, 7: 0})
    assert found["items"] == concluded(PANEL, 5, golden)["items"]
    assert [(each["rater"], each["num_rated"]) for each in found["dropouts"]] == [(6, 4), (7, 0)]


def test_four_raters_are_refused() -> None:
    with pytest.raises(
        DataRefused, match=r"4 raters can be used; at least 5 are needed \(1 have not finished, 0 rejected\)"
    ):
        concluded(PANEL, 5, golden, {5: 3})


def careless(wrong: Callable[[Item, bool], int | None]) -> Votes:
    """Votes of good raters, but of the sixth what `wrong` says."""

    def votes(rater: int, item: Item, is_repeat: bool) -> Sequence[int]:
        vote = wrong(item, is_repeat) if rater == 6 else None
        return golden(min(rater, 5), item, is_repeat) if vote is None else [vote] * 4

    return votes


@pytest.mark.parametrize(
    ("wrong", "rule", "measured"),
    [
        (lambda item, _: 4 if item.system == LOW_ANCHOR and item.source == "a" else None, "low anchor", 0.5),
        (lambda _, __: 3, "low anchor", 1.0),
        (lambda item, is_repeat: (1 if item.system == REFERENCE else 5) if is_repeat else None, "repeated item", None),
    ],
)
def test_who_fails_gold_or_contradicts_themselves_is_rejected(
    wrong: Callable[[Item, bool], int | None], rule: str, measured: float | None
) -> None:
    found = concluded(PANEL, 6, careless(wrong))
    (rejected,) = found["rejected"]
    assert rejected["rater"] == 6
    assert rule in rejected["rule"]
    assert rejected["measured"] > rejected["limit"]
    assert measured is None or rejected["measured"] == measured
    assert found["items"] == concluded(PANEL, 5, golden)["items"]


def test_rejection_down_to_four_is_refused_with_the_reasons() -> None:
    def votes(rater: int, item: Item, is_repeat: bool) -> Sequence[int]:
        return [3] * 4 if rater == 5 else golden(rater, item, is_repeat)

    with pytest.raises(
        DataRefused, match=r"rater 5: low anchor rated no worse than the reference, share of clips 1\.00"
    ):
        concluded(PANEL, 5, votes)


def large_panel() -> Panel:
    systems = ("candidate", "champion", REFERENCE, LOW_ANCHOR)
    shown = [item(f"s{number}", system) for number in range(8) for system in systems]
    return Panel(seed=1, num_repeats=0, items=(item("t", REFERENCE, training=True), *shown), left_out={}, quieter={})


QUALITY = {LOW_ANCHOR: 1.4, "champion": 2.8, "candidate": 3.5, REFERENCE: 4.6}


def ordinary(odd: int, shuffled: Callable[[np.random.Generator, Item], int]) -> Votes:
    """Votes with noise; rater `odd` votes as `shuffled` says."""

    def votes(rater: int, item: Item, is_repeat: bool) -> Sequence[int]:
        rng = np.random.default_rng([rater, *item.name.encode()])
        if rater == odd:
            return [shuffled(rng, item)] * 4
        return [int(np.clip(np.rint(QUALITY[item.system] + rng.normal(0, 0.5)), 1, 5)) for _ in range(4)]

    return votes


def blind(rng: np.random.Generator, item: Item) -> int:
    """Passes the gold check, guesses the rest."""
    return {REFERENCE: 2, LOW_ANCHOR: 1}.get(item.system) or int(rng.integers(1, 6))


def test_below_eight_raters_who_disagrees_is_found_by_correlation() -> None:
    found = concluded(large_panel(), 7, ordinary(3, blind))
    assert found["screening"] == "leave-one-out correlation"
    assert [(each["rater"], each["limit"]) for each in found["rejected"]] == [(3, 0.75)]
    assert min(each["correlation"] for each in found["raters"]) > 0.75


def test_from_eight_raters_on_bt500_screens() -> None:
    found = concluded(large_panel(), 16, ordinary(3, blind))
    assert found["screening"] == "ITU-R BT.500"
    assert [each["rater"] for each in found["rejected"]] == [3]
    assert found["differences"]["candidate - champion"]["overall"]["ci95"][0] > 0


def test_votes_of_another_panels_films_are_refused() -> None:
    ratings = rated(PANEL, 1, golden)
    with pytest.raises(DataRefused, match="1 votes are of films that this panel does not hold, such as a"):
        conclude(PANEL, [ratings[0]._replace(item_sha256="other", item="a candidate")], [], LIMITS)
