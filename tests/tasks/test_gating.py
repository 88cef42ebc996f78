"""How often the gate errs, on 1,000 simulated tables of champion and candidate each, through its own checks.

Three metrics of 24 sources with 1 to 4 clips. The paired difference of psnr_db has a standard deviation of 0.6 dB
between sources and of 0.6 dB between clips of one, against a margin of 0.5 dB; the other metrics likewise.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.records import MetricValue, Report
from tasks.champion import Champion
from tasks.gate import Config, champion_checks

NUM_DRAWS = 1000
Gain = tuple[float, float, float]
SCALES = {"psnr_db": 1.0, "ssim": 0.02, "lsd_db": -1.0}
"""What a unit of the simulated quality is worth in each metric."""
CONFIG = Config(
    report=Path("report.json"),
    verdict=Path("verdict.json"),
    superior_in_one_of=("psnr_db", "ssim", "lsd_db"),
    min_coverage_vs_champion=0.7,
)
METRICS = tuple(
    MetricValue(
        name=name, subset="tuned/fl2va", group="all", unit="", value=0.0, num_items=1, num_attempted=1,
        higher_is_better=scale > 0, convention="simulated",
    )
    for name, scale in SCALES.items()
)  # fmt: skip


def noise(rng: np.random.Generator, kind: str, size: int | tuple[int, int]) -> np.ndarray:
    """Of standard deviation 0.42, so that a difference of two has 0.6."""
    if kind == "skewed":
        return 0.42 * (1 - rng.exponential(size=size))  # most a little good, a few very bad
    return rng.normal(0, 0.42, size)


def draw(rng: np.random.Generator, gain: Gain, kind: str, missing: float) -> tuple[Report, Champion]:
    """A candidate that is `gain` better in the quality that each metric sees, and a champion, on the same clips."""
    source_of = np.repeat(np.arange(24), rng.integers(1, 5, 24))
    hard = rng.normal(0, 3, 24)[source_of]
    tables: list[Report] = []
    for shift in (np.array(gain)[:, None], 0.0):
        quality = hard + shift + noise(rng, kind, (3, 24))[:, source_of] + noise(rng, kind, (3, len(source_of)))
        gone = rng.random(quality.shape) < missing
        rows = tuple(
            {"clip_id": f"c{clip}", "source_id": f"s{source}", "group": "new", "subset": "tuned/fl2va"}
            | {
                name: None if gone[place, clip] else scale * float(quality[place, clip])
                for place, (name, scale) in enumerate(SCALES.items())
            }
            for clip, source in enumerate(source_of)
        )
        tables.append(Report.model_construct(metrics=METRICS, per_clip=rows))
    return tables[0], Champion("champion", tables[1])


def share(gain: Gain, kind: str, missing: float, *, config: Config = CONFIG, superior: bool = False) -> float:
    """Share of draws in which all checks pass, or the claim of superiority alone."""
    rng = np.random.default_rng(6)
    promoted = 0
    for _ in range(NUM_DRAWS):
        checks = list(champion_checks(config, *draw(rng, gain, kind, missing)))
        promoted += checks[-1].passed if superior else all(check.passed for check in checks)
    return promoted / NUM_DRAWS


CASES = pytest.mark.parametrize(("kind", "missing"), [("normal", 0.0), ("skewed", 0.1)])


@CASES
def test_a_regression_as_large_as_the_margin_in_one_metric_is_refused(kind: str, missing: float) -> None:
    """0.5 dB lost, all else much better: the case in which rules that must all pass help each other least.

    Seen: 2.2 and 2.3 % promoted.
    """
    config = CONFIG.model_copy(update={"superior_in_one_of": ()})
    assert share((-0.5, 2.0, 2.0), kind, missing, config=config) <= 0.03  # 0.025 and what 1,000 draws leave open


@CASES
def test_a_true_improvement_of_one_margin_passes(kind: str, missing: float) -> None:
    """Power, also of the claim of a gain. Seen: 97 and 92 %."""
    assert share((0.5, 0.5, 0.5), kind, missing) >= 0.9


@CASES
def test_no_difference_is_called_a_gain_no_more_often_than_stated(kind: str, missing: float) -> None:
    """Any of three metrics would do; uncorrected that would be 7 %. Seen: 2.0 and 2.5 %."""
    assert share((0.0, 0.0, 0.0), kind, missing, superior=True) <= CONFIG.family_level
