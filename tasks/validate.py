"""Judge every source by rules and the whole by expectations: accepted, treated or rejected, and why.

Example: soundstage validate min_duration_s=2 max_missing_caption_share=0
"""

from __future__ import annotations

import itertools
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from data import captioner, expectations, files
from data.captions import CaptionFault
from data.limits import Limits
from data.records import Frozen, Reject, Source, Treatment
from data.verdicts import Verdicts, judged, total
from tasks import explain, judging

COUNTED_ONLY = ("resize", "retime")
"""Treatments so common that the table only counts them."""
MAX_LINES = 200
"""Rows of the table on the terminal; the files have them all."""
NO_CAPTION = "no caption"
"""How the detail of a default caption begins where there was none."""
MAX_NAMED = 10
"""Files named in one message."""


class Config(Limits):
    """What to judge, by which limits, and where the verdicts go."""

    manifest: Path
    """Parquet of sources, as `ingest` wrote it."""
    captions: Path | None = None
    """Parquet of captions that `soundstage caption` wrote; they take the place of missing and faulty ones."""
    accepted: Path
    """Parquet of the sources to use, captions filled."""
    rejects: Path
    """Parquet of the sources left out, each with its rule."""
    treatments: Path
    """Parquet of what is done to accepted sources."""
    caption_faults: Path | None = None
    """Parquet of every caption at fault, with what was measured and done; None writes none."""
    expectations: Path
    """JSON of what every expectation found."""
    docs: Annotated[Path, files.Holds(("index.html",), below="manifest")]
    """Folder of Great Expectations' pages, one folder a suite; start at manifest/index.html."""
    work: Path = Path("data/store/work")
    """Scratch folder; changes no result."""
    min_sources: int = Field(default=3, ge=1)
    """Fewest accepted sources, one for each of train, val and test."""
    max_missing_caption_share: float = Field(default=0.2, ge=0, le=1)
    """Largest share of accepted sources that may take the default caption; above it the dataset is refused."""
    previous: Path | None = None
    """An earlier table of accepted sources to compare with; None compares with none."""
    max_lost_share: float = Field(default=0.1, ge=0, le=1)
    """Largest share of the previous sources that may be gone; more is an accident more often than a wish."""


class Result(Frozen):
    """How many sources met which fate."""

    num_given: int
    num_accepted: int
    num_rejected: int
    num_treated: int
    num_references: int
    num_warnings: int


def run(config: Config) -> Result:
    """Write accepted sources, rejects, treatments and expectations.

    Raises:
        DataRefused: too many captions are missing or a critical expectation failed; the evidence is written then,
            the accepted sources are not.
        RuntimeError: there is no manifest.
    """
    if not config.manifest.is_file():
        raise RuntimeError(f"{config.manifest} does not exist; run `soundstage ingest` first")
    files.remove(config.accepted)
    with files.whole(config.work / "validate") as work:
        work.mkdir()
        verdicts = Verdicts(work / "verdicts.sqlite", config)
        try:
            decide(config, verdicts, work / "accepted.parquet")
            sys.stderr.write(summary(verdicts))
            outcomes = enforce(config, verdicts, work / "accepted.parquet")
        finally:
            verdicts.close()
        with files.whole(config.accepted) as temporary:
            shutil.copyfile(work / "accepted.parquet", temporary)
    files.remove(config.work / "validate")
    counts = verdicts.counts
    return Result(
        num_given=total(counts),
        num_accepted=counts.get("accepted", 0),
        num_rejected=counts.get("rejected", 0),
        num_treated=counts.get("treated", 0),
        num_references=counts.get("reference", 0),
        num_warnings=sum(not outcome.success for outcome in outcomes),
    )


def decide(config: Config, verdicts: Verdicts, accepted: Path) -> None:
    """Give every row its fate and write down who is accepted, who is not, and what is done.

    Raises:
        RuntimeError: a row was lost or judged twice, which is a fault of the rules.
    """
    for source in given(config):
        verdicts.learn(source)
    files.write_records(accepted, judged(given(config), verdicts), Source)
    num_given, num_judged = files.num_records(config.manifest), total(verdicts.counts)
    if num_judged != num_given:
        raise RuntimeError(f"{num_judged} verdicts on {num_given} rows of {config.manifest}")
    files.write_records(config.rejects, verdicts.read(Reject), Reject)
    files.write_records(config.treatments, verdicts.read(Treatment), Treatment)
    if config.caption_faults is not None:
        files.write_records(config.caption_faults, verdicts.read(CaptionFault), CaptionFault)


def given(config: Config) -> Iterator[Source]:
    """The rows of the manifest, with the captions that a model wrote where theirs are missing or at fault."""
    from tqdm import tqdm

    written = captioner.read_captions(config.captions) if config.captions is not None else {}
    rows = files.iter_records(config.manifest, Source)
    for source in tqdm(rows, total=files.num_records(config.manifest), desc="validate", unit="file", disable=None):
        yield captioner.merged(source, written, config)


def enforce(config: Config, verdicts: Verdicts, accepted: Path) -> list[judging.Outcome]:
    """Ask the expectations on the accepted sources; refuse where a critical one, or too many captions, are missing."""
    previous = None if config.previous is None else files.num_records(config.previous)
    suite = expectations.suite(config, config.min_sources, previous=previous, max_lost=config.max_lost_share)
    missing = missing_captions(verdicts, config.max_missing_caption_share)
    with expectations.frame(files.iter_records(accepted, Source), accepted.with_suffix(".sqlite"), config) as table:
        outcomes = judging.enforce("manifest", table, suite, config.expectations, config.docs, also=missing)
    held, page = sum(outcome.success for outcome in outcomes), config.docs / "manifest/index.html"
    broken = len(outcomes) - held
    warned = f" ({broken} {'is a warning' if broken == 1 else 'are warnings'}: nothing stops)" if broken else ""
    sys.stderr.write(f"{held} of {len(outcomes)} expectations hold{warned}; pages: {page}\n")
    return outcomes


def missing_captions(verdicts: Verdicts, max_share: float) -> list[str]:
    """The complaint about too many captions that are missing or of no use, or nothing."""
    accepted, missing = verdicts.counts.get("accepted", 0), verdicts.counts.get("caption_by_default", 0)
    if not missing or missing / accepted <= max_share:
        return []
    why: Counter[str] = Counter()
    paths: list[str] = []
    for item in (item for item in verdicts.read(Treatment) if item.treatment == "caption_by_default"):
        why[item.detail.partition(":" if not item.detail.startswith(NO_CAPTION) else ";")[0]] += 1
        paths += [item.path] if len(paths) < MAX_NAMED else []
    names = ", ".join(paths) + more(missing - MAX_NAMED)
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(why.items()))
    share = f"{missing} of {accepted} sources ({missing / accepted:.0%})"
    limit = f"validate.max_missing_caption_share = {max_share:g}"
    remedy = "write them, or let a model: soundstage caption, then validate.captions"
    return [f"{share} have no caption, or one of no use ({reasons}); limit {limit}: {names}; {remedy}"]


def more(count: int) -> str:
    """Words for what is not listed."""
    return f" and {count} more" if count > 0 else ""


def reason(item: Reject) -> str:
    """Why a file is left out; a rule that is no setting has no limit to change."""
    limit = "limit" if item.rule.partition(".")[2].partition(".")[0] in Config.model_fields else "wanted:"
    return f"{item.rule}: {item.measured} ({limit} {item.limit})"


def summary(verdicts: Verdicts) -> str:
    """A table file, verdict, reason of everything uncommon, counts of the rest, and how to look at one file."""
    rejects = ((item.path, "rejected", reason(item)) for item in verdicts.read(Reject))
    uncommon = (item for item in verdicts.read(Treatment) if item.treatment not in COUNTED_ONLY)
    treated = ((item.path, str(item.treatment), item.detail) for item in uncommon)
    found = sorted([*itertools.islice(rejects, MAX_LINES), *itertools.islice(treated, MAX_LINES)])
    rows = [tuple(map(explain.printable, row)) for row in found]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    lines = [f"{path:<{widths[0]}}  {verdict:<{widths[1]}}  {why}" for path, verdict, why in rows]
    counts, names = verdicts.counts, [name for name in COUNTED_ONLY if name in verdicts.counts]
    parts = [f"{counts[name]} with {name}" for name in sorted(names)]
    parts.append(f"{counts.get('accepted', 0) - counts.get('treated', 0)} as they are")
    references = f" + {counts['reference']} references" if counts.get("reference") else ""
    totals = f"{total(counts)} given = {counts.get('accepted', 0)} accepted + {counts.get('rejected', 0)} rejected"
    lines.append(f"{totals}{references} ({', '.join(parts)})")
    if opened := [path for path, _, why in found if not why.startswith("validate.usable:")]:
        lines.append(f"look at one: {explain.inspect_command(opened[0])}")
    return "\n".join([*lines, ""])
