"""What looks wrong with a run: how a finding reads, how far is too far, and where findings are kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from data.files import write_text
from data.records import Frozen


class Limits(Frozen):
    """How far a run may go before something is said."""

    window: int = 50
    """Rows of the curve that are judged together: one a step and noise level."""
    variance: dict[str, float] = {"video": 1.0, "audio": 1.0}
    """Mean square of the latents of each modality: 1 where they are normalised over the whole dataset."""
    bound_margin: float = 1.15
    """How far above a bound a bin's mean loss may lie: means of few draws scatter."""
    order_margin: float = 1.5
    """How much worse a clean estimate of less noise may look than one of more, two tenths away."""
    flat_spread: float = 0.05
    """Highest over lowest bin less 1, below which a loss is the same at all noise levels."""
    gradient_low: float = 1e-6
    gradient_high: float = 1e3
    """Norms outside are vanishing or exploding, whatever the run's own."""
    gradient_factor: float = 20.0
    """How far the last window's median may be from the whole run's, either way."""
    drift_factor: float = 4.0
    """How far the ratio of picture to sound may move from where it was at first."""
    num_readings: int = 3
    """Readings of the meters whose median is judged: a first one, or one hiccup, says little."""
    loader_share: float = 0.2
    """Share of the time that may go into waiting for batches."""
    straggler_factor: float = 1.3
    """Own computing time of a process, over the median of all."""


class Finding(Frozen):
    """One thing that looks wrong."""

    name: str
    step: int
    measured: str
    limit: str
    advice: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.name}: {self.measured}; limit {self.limit}: {self.advice}"


class Findings:
    """What has been found so far: said once each, and kept in a file beside the curve.

    Args:
        path: JSON file, rewritten whole with each new one; None writes none.
        continues: Whether the run goes on from a state, so that the file is its own.
    """

    def __init__(self, path: Path | None, *, continues: bool = True) -> None:
        self._path = path
        self.known: dict[str, Finding] = {}
        if path is not None and path.is_file() and continues:  # a run that continues has said these
            try:
                written = cast(list[Any], json.loads(path.read_text(encoding="utf-8")))
                self.known = {item.name: item for item in map(Finding.model_validate, written)}
            except ValueError:  # said again, at worst
                self.known = {}

    def tell(self, found: Iterable[Finding]) -> list[Finding]:
        """Say what has not been said, on stderr, write it down, and return it."""
        new = [finding for finding in found if finding.name not in self.known]
        for finding in new:
            self.known[finding.name] = finding
            sys.stderr.write(f"train: {finding}\n")
        if new and self._path is not None:
            content = [finding.model_dump() for finding in self.known.values()]
            try:
                write_text(self._path, json.dumps(content, indent=1) + "\n")
            except OSError as error:  # a full disk is no reason to stop training
                sys.stderr.write(f"train: {self._path} cannot be written: {error}\n")
        return new
