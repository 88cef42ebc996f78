"""Every check fires on what it is for and stays silent on a run that is well; bounds are held against least squares."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models import diagnoses, gradients
from models.diagnoses import best_line, by_level, embedding_shape, judge, usual, watch_embedding
from models.families import load_family
from models.families.sketches import sketch_of
from models.findings import Finding, Findings, Limits

LIMITS = Limits()
Loss = Callable[[float, int], float]


def rows_of(
    video: Loss, audio: Loss | None = None, num: int = 500, **more: Callable[[int], float]
) -> list[dict[str, Any]]:
    """A curve whose noise levels fill [0, 1] evenly, with losses as functions of level and step, and 10 % of scatter."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for step in range(num):
        sigma = (0.3 + 0.618034 * step) % 1.0
        scatter = rng.uniform(0.9, 1.1, 2)
        row = {"step": step, "sigma_video": sigma, "sigma_audio": sigma, "gradient_norm": 0.5 * scatter[0]}
        row |= {"loss_video": video(sigma, step) * scatter[0], "loss_audio": (audio or video)(sigma, step) * scatter[1]}
        rows.append({**row, **{name: value(step) for name, value in more.items()}})
    return rows


def well(sigma: float, step: int) -> float:
    """Learning: half of what a line reaches, and falling."""
    return best_line(sigma, 1.0) * (0.4 + 0.5 * math.exp(-step / 200))


def names(found: list[Finding]) -> list[str]:
    return [finding.name for finding in found]


def test_nothing_is_said_of_a_run_that_is_well() -> None:
    readings = [{"loader_share": 0.1, "compute_s/0": 1.0, "compute_s/1": 1.1}] * 3
    assert judge(rows_of(well, num=1000), readings, LIMITS) == []
    assert judge([], [], LIMITS) == []
    assert judge(rows_of(well, num=3), [], LIMITS) == []


@pytest.mark.parametrize("sigma", [0.05, 0.4, 0.9])
@pytest.mark.parametrize("variance", [0.5, 1.0])
def test_the_bounds_are_what_least_squares_and_zero_reach(sigma: float, variance: float) -> None:
    rng = np.random.default_rng(1)
    clean, noise = math.sqrt(variance) * rng.standard_normal(400_000), rng.standard_normal(400_000)
    given, wanted = (1 - sigma) * clean + sigma * noise, clean - noise
    slope = (given @ wanted) / (given @ given)
    assert np.square(wanted - slope * given).mean() == pytest.approx(best_line(sigma, variance), rel=0.01)
    assert np.square(wanted).mean() == pytest.approx(1 + variance, rel=0.01)


def test_a_loss_above_guessing_is_a_wrong_sign_or_time() -> None:
    found = diagnoses.noise_schedule(rows_of(lambda s, n: 4 - well(s, n), well), LIMITS)
    assert names(found) == ["noise schedule, loss_video"]
    assert "predicting 0" in found[0].limit
    assert "`base`" in found[0].advice


def test_a_loss_as_high_as_guessing_at_all_levels_is_a_model_that_does_not_look() -> None:
    found = diagnoses.noise_schedule(rows_of(well, lambda s, n: 2.0), LIMITS)
    assert names(found) == ["noise schedule, loss_audio"]
    assert "does not use its input" in found[0].advice
    low = diagnoses.noise_schedule(rows_of(well, lambda s, n: 0.3), LIMITS)  # flat and low is learned by heart
    assert low == []


def test_levels_that_are_upside_down_are_found_by_the_clean_estimate() -> None:
    def steep(sigma: float, step: int) -> float:
        """All error near pure noise, as of a model that knows its few clips by heart."""
        return 1.5 * sigma**3 + 0.001

    assert diagnoses.noise_schedule(rows_of(steep), LIMITS) == []
    upside_down = rows_of(lambda s, n: steep(1 - s, n))
    assert names(diagnoses.noise_schedule(upside_down, LIMITS)) == [
        "noise schedule, loss_video",
        "noise schedule, loss_audio",
    ]
    assert "upside down" in diagnoses.noise_schedule(upside_down, LIMITS)[0].advice


def test_what_is_given_and_bins_of_few_draws_are_not_judged() -> None:
    rows = [{"step": n, "sigma_video": 0.0, "loss_video": 0.0, "sigma_audio": 0.5, "loss_audio": 9.0} for n in range(4)]
    assert by_level(rows, "video") == by_level(rows, "audio") == {}
    assert diagnoses.noise_schedule(rows, LIMITS) == []
    more = [{**row, "loss_audio": 9.0} for row in rows * 2]
    assert names(diagnoses.noise_schedule(more, LIMITS)) == ["noise schedule, loss_audio"]


def test_a_trained_model_is_better_than_a_line_and_an_untrained_one_is_given_time() -> None:
    short = rows_of(lambda s, n: 1.3 * best_line(s, 1.0), well, num=400)
    assert names(diagnoses.learned_line(short, LIMITS)) == ["below a line, loss_video"]
    assert "below a line, loss_video" not in names(judge(short, [], LIMITS, trained_after=500))
    assert "below a line, loss_video" in names(judge(short, [], LIMITS, trained_after=300))
    assert diagnoses.learned_line(rows_of(well), LIMITS) == []


@pytest.mark.parametrize(
    ("norm", "kind"),
    [
        (lambda n: 1e-8, "vanishing"),
        (lambda n: 1e5, "exploding"),
        (lambda n: 1.0 if n < 450 else 0.01, "vanishing"),
        (lambda n: 1.0 if n < 450 else 50.0, "exploding"),
        (lambda n: 1.0 if n < 450 else 5.0, ""),
        (lambda n: 1e9 if n == 300 else 1.0, ""),
    ],
)
def test_gradients_have_a_band_of_their_own_and_an_absolute_one(norm: Callable[[int], float], kind: str) -> None:
    found = names(diagnoses.gradient_band(rows_of(well, gradient_norm=norm), LIMITS))
    assert found == ([f"{kind} gradients"] if kind else [])


def test_picture_and_sound_that_drift_apart_are_told_and_which_falls_behind() -> None:
    assert diagnoses.imbalance(rows_of(well), LIMITS) == []
    far = diagnoses.imbalance(rows_of(lambda s, n: 0.3, lambda s, n: 5.0), LIMITS)
    assert far == []  # a ratio of its own is no drift
    found = diagnoses.imbalance(rows_of(lambda s, n: 1.0 if n < 250 else 0.1, lambda s, n: 1.0), LIMITS)
    assert names(found) == ["loss of picture and sound"]
    assert "the sound falls behind" in found[0].advice
    norms = dict(zip(diagnoses.OWN, (lambda n: 1.0 + n / 50, lambda n: 1.0), strict=True))
    assert names(diagnoses.imbalance(rows_of(well, **norms), LIMITS)) == ["gradient of picture and sound"]


def test_the_gradients_of_either_modality_are_those_that_training_writes_down(base: Path, ltx2_base: Path) -> None:
    for folder in (base, ltx2_base):
        sketch = sketch_of(folder)
        groups = gradients.groups_of(sketch.groups, sketch.units, sketch.num_blocks)
        model = sketch.build(1, "cpu")
        for name, parameter in model.named_parameters():
            parameter.grad = torch.full_like(parameter, 2.0 if name.startswith("audio_proj") else 1.0)
        norms = gradients.norms(model.named_parameters(), groups)
        for own, prefix, grad in zip(diagnoses.OWN, ("proj_", "audio_proj_"), (1, 2), strict=True):
            size = sum(item.numel() for name, item in model.named_parameters() if name.startswith(prefix))
            assert norms[own.removeprefix("gradient/")] == pytest.approx(grad * math.sqrt(size))


def test_a_loss_that_stands_still_is_told_from_one_that_falls() -> None:
    still = rows_of(lambda s, n: best_line(s, 1.0) * 0.5, well, num=400)
    assert names(diagnoses.no_improvement(still, LIMITS)) == ["loss_video does not improve"]
    assert diagnoses.no_improvement(still[:399], LIMITS) == []


def test_waiting_and_slow_ranks_are_judged_by_the_median_of_readings() -> None:
    hungry, slow = (
        {"loader_share": 0.5},
        {"loader_share": 0.0, "compute_s/0": 1.0, "compute_s/1": 1.0, "compute_s/2": 2.0},
    )
    rows = rows_of(well, num=20)
    assert names(judge(rows, [hungry] * 3, LIMITS)) == ["waiting for batches"]
    assert names(judge(rows, [slow] * 3, LIMITS)) == ["slow rank 2"]
    even = {**slow, "compute_s/2": 1.2}
    assert judge(rows, [even, slow, even], LIMITS) == []
    assert judge(rows, [hungry] * 2, LIMITS) == []
    assert usual([slow, even, even], LIMITS)["compute_s/2"] == 1.2


def test_the_timestep_embedding_has_a_row_for_each_level_and_the_width_of_adaln(base: Path) -> None:
    assert embedding_shape((3, 48), 3, 48) == []
    for wrong in ((1, 48), (3, 96), (3, 1, 96)):
        (finding,) = embedding_shape(wrong, 3, 48)
        assert str(tuple(wrong)) in finding.measured
        assert finding.limit == "(3, 48)"
    transformer: Any = load_family(base).transformer
    found: list[list[Finding]] = []
    watch_embedding(transformer, "time_embedder", transformer.config.time_embed_dim, found.append)
    watch_embedding(transformer, "time_embedder", 2 * transformer.config.time_embed_dim, found.append)
    levels = torch.zeros(4, transformer.config.freq_dim)
    transformer.time_embedder(levels)
    transformer.time_embedder(levels)
    assert [names(item) for item in found] == [[], ["AdaLN timestep embedding"]]  # once each
    with pytest.raises(ValueError, match="no module named time_proj_x"):
        watch_embedding(nn.Linear(1, 1), "time_proj_x", 1, found.append)


def test_each_finding_is_said_once_and_kept_beside_the_curve_also_by_a_run_that_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "findings.json"
    one = Finding(name="a", step=3, measured="1", limit="2", advice="raise x")
    kept = Findings(path)
    assert kept.tell([one]) == [one]
    assert "step 3: a: 1; limit 2: raise x" in capsys.readouterr().err
    assert kept.tell([one.model_copy(update={"step": 9})]) == []
    assert Findings(path).tell([one]) == []
    assert capsys.readouterr().err == ""
    other = one.model_copy(update={"name": "b"})
    Findings(path).tell([one, other])
    assert "step 3: b" in capsys.readouterr().err
    assert [item["name"] for item in json.loads(path.read_text())] == ["a", "b"]
