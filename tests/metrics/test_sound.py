"""Sound yardsticks together: closed forms, independent implementations, and which way each moves."""

from __future__ import annotations

import numpy as np
import pytest

from metrics.sound import envelope_r
from tests.metrics.sounds import RATE_HZ


def test_envelope_correlation_falls_when_the_click_moves() -> None:
    click = np.zeros((2, RATE_HZ))
    click[:, 2000:2200] = 0.5
    assert envelope_r(click, 0.1 * click, RATE_HZ).value == pytest.approx(1)
    moved = envelope_r(click, np.roll(click, 3000, axis=1), RATE_HZ).value
    assert moved is not None
    assert moved < 0
    assert "constant" in envelope_r(click, np.full_like(click, 0.1), RATE_HZ).reason
