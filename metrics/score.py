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
