"""What every yardstick answers: a number, or the reason why there is none."""

from __future__ import annotations

from typing import NamedTuple


class Score(NamedTuple):
    """One item's score. Where `value` is None, `reason` says why; otherwise `reason` is empty."""

    value: float | None
    reason: str = ""

    @classmethod
    def missing(cls, reason: str) -> Score:
        """No number, and why."""
        return cls(None, reason)


class Measure(NamedTuple):
    """How a score is read."""

    unit: str
    """Empty where it has none."""
    higher_is_better: bool | None
    """None where it is neither: a count, or a ratio that is best at 1."""
    convention: str
