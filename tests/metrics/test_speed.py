from __future__ import annotations

import numpy as np
import pytest

from metrics.speed import speed, speed_up


def test_throughput_and_price_follow_from_the_times() -> None:
    found = speed([60.0, 2.0, 4.0, 3.0, 3.0], 6.0, price_per_hour=36.0)
    assert found.num_items == 4
    assert found.p50_s.value == 3
    assert found.p95_s.value == pytest.approx(3.85)  # between the two largest of four: 3 + 0.85 * (4 - 3)
    assert found.items_per_s.value == pytest.approx(1 / 3)
    assert found.media_s_per_s.value == pytest.approx(2)
    # A second costs 0.01 and makes 2 s of media: a minute of media costs 0.3.
    assert found.price_per_media_minute.value == pytest.approx(0.3)


def test_what_cannot_be_said_is_missing_with_the_reason() -> None:
    assert speed([5.0, 1.0], 1.0).price_per_media_minute.reason == "no price an hour is set"
    nothing = speed([5.0], 1.0, price_per_hour=1.0)
    assert nothing.num_items == 0
    assert all(score.value is None for score in nothing[1:])
    assert nothing.p50_s.reason == "1 items were timed, and the first 1 are warm-up"


def test_a_speed_up_is_the_ratio_of_medians_and_its_interval_covers_the_truth() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for trial in range(200):
        before, after = rng.lognormal(np.log(3.0), 0.2, 25), rng.lognormal(np.log(2.0), 0.2, 25)
        ratio, low, high = speed_up(before.tolist(), after.tolist(), seed=trial)
        assert ratio == pytest.approx(np.median(before) / np.median(after))
        held += low <= 1.5 <= high
    assert 180 <= held <= 200  # 95 % of 200 is 190, give or take 3 standard deviations of 3.1


@pytest.mark.parametrize("times", [[1.0], [], [1.0, 0.0]])
def test_too_few_times_are_refused(times: list[float]) -> None:
    with pytest.raises(ValueError, match="at least two"):
        speed_up(times, [1.0, 2.0])
