"""Judge every source by rules and the whole by expectations: accepted, treated or rejected, and why.

Example: soundstage validate min_duration_s=2 max_missing_caption_share=0
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from data import expectations, files, rules
from data.records import DataRefused, Frozen, Reject, Source, Treatment
from tasks import judging

log = logging.getLogger(__name__)
COUNTED_ONLY = ("resize", "retime")
"""Treatments so common that the table only counts them."""


class Config(rules.Limits):
    """What to judge, by which limits, and where the verdicts go."""

    manifest: Path
    """Parquet of sources, as `ingest` wrote it."""
    accepted: Path
    """Parquet of the sources to use, captions filled."""
    rejects: Path
    """Parquet of the sources left out, each with its rule."""
    treatments: Path
    """Parquet of what is done to accepted sources."""
    expectations: Path
    """JSON of what every expectation found."""
    docs: Path
    """Folder of Great Expectations' pages; start at index.html."""
    min_sources: int = Field(default=3, ge=1)
    """Fewest accepted sources, one for each of train, val and test."""
    max_missing_caption_share: float = Field(default=0.2, ge=0, le=1)
    """Largest share of accepted sources that may take the default caption; above it the dataset is refused."""


class Result(Frozen):
    """How many sources met which fate."""

    num_given: int
    num_accepted: int
    num_rejected: int
    num_treated: int
    num_warnings: int


def run(config: Config) -> Result:
    """Write accepted sources, rejects, treatments and expectations.

    Raises:
        DataRefused: too many captions are missing or a critical expectation failed; the evidence is written then,
            the accepted sources are not.
    """
    given = files.read_records(config.manifest, Source)
    accepted, rejects = rules.judge(given, config)
    treatments = [treatment for source in accepted for treatment in rules.treatments(source, config)]
    check_nothing_vanished(given, accepted, rejects)
    files.write_records(config.rejects, rejects, Reject)
    files.write_records(config.treatments, treatments, Treatment)
    captioned = [with_caption(source, config.default_caption) for source in accepted]
    outcomes = judge_all(captioned, config)
    num_held = sum(outcome.success for outcome in outcomes)
    sys.stderr.write(summary(given, rejects, treatments))
    sys.stderr.write(f"{num_held} of {len(outcomes)} expectations hold; pages: {config.docs / 'index.html'}\n")
    problems = [*missing_captions(accepted, config.max_missing_caption_share), *expectations.failures(outcomes)]
    if problems:
        files.remove(config.accepted)
        raise DataRefused(f"{config.manifest}: " + "; ".join(problems) + f". Pages: {config.docs / 'index.html'}")
    files.write_records(config.accepted, captioned, Source)
    return Result(
        num_given=len(given),
        num_accepted=len(accepted),
        num_rejected=len(rejects),
        num_treated=len({treatment.item for treatment in treatments}),
        num_warnings=sum(not outcome.success for outcome in outcomes),
    )


def judge_all(accepted: Sequence[Source], config: Config) -> list[expectations.Outcome]:
    """Ask the expectations, and write their answers and pages."""
    suite = expectations.suite(config, config.min_sources)
    with files.whole(config.docs) as docs:
        outcomes = judging.judge(expectations.frame(accepted), suite, docs)
    text = json.dumps([outcome.model_dump() for outcome in outcomes], indent=2, ensure_ascii=False)
    files.write_text(config.expectations, text + "\n")
    for outcome in outcomes:
        if not outcome.success and not outcome.critical:
            log.warning(
                "expectation %s: %s, expected %s (%s)", outcome.name, outcome.measured, outcome.limit, outcome.why
            )
    return outcomes


def check_nothing_vanished(given: Sequence[Source], accepted: Sequence[Source], rejects: Sequence[Reject]) -> None:
    """Every given file is accepted or rejected, and none is both.

    Raises:
        RuntimeError: a source was lost or judged twice, which is a fault of the rules.
    """
    judged = Counter([source.path for source in accepted] + [reject.path for reject in rejects])
    if judged != Counter(source.path for source in given):
        raise RuntimeError(f"{len(accepted)} accepted + {len(rejects)} rejected is not {len(given)} given")


def with_caption(source: Source, default: str) -> Source:
    """The source with its caption, stripped, or the default one."""
    caption = (source.caption or "").strip() or default
    return source if caption == source.caption else source.model_copy(update={"caption": caption})


def missing_captions(accepted: Sequence[Source], max_share: float) -> list[str]:
    """The complaint about too many missing captions, or nothing."""
    missing = [source.path for source in accepted if not rules.is_captioned(source)]
    if not missing or len(missing) / len(accepted) <= max_share:
        return []
    names = ", ".join(missing[:10]) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
    share = f"{len(missing)} of {len(accepted)} sources ({len(missing) / len(accepted):.0%})"
    limit = f"validate.max_missing_caption_share = {max_share:g}"
    return [f"{share} have no caption; limit {limit}: {names}"]


def summary(given: Sequence[Source], rejects: Sequence[Reject], treatments: Sequence[Treatment]) -> str:
    """A table file, verdict, reason of everything uncommon, and counts of the rest."""
    rows = [(reject.path, "rejected", f"{reject.rule}: {reject.measured} (limit {reject.limit})") for reject in rejects]
    rows += [(item.path, item.treatment, item.detail) for item in treatments if item.treatment not in COUNTED_ONLY]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    lines = [f"{path:<{widths[0]}}  {verdict:<{widths[1]}}  {reason}" for path, verdict, reason in sorted(rows)]
    common = Counter(item.treatment for item in treatments if item.treatment in COUNTED_ONLY)
    counts = [f"{count} with {name}" for name, count in sorted(common.items())]
    named = {reject.path for reject in rejects} | {item.path for item in treatments}
    counts.append(f"{len(given) - len(named)} as they are")
    total = f"{len(given)} given = {len(given) - len(rejects)} accepted + {len(rejects)} rejected"
    return "\n".join([*lines, f"{total} ({', '.join(counts)})", ""])
