"""How one rule of the gate is judged: its number, on how many clips and sources, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from pydantic import Field, model_validator

from data.opinions import Opinion
from data.records import Check, Frozen, MetricValue, Report
from metrics.statistics import holm, p_above

TUNED = "tuned/fl2va"
MIN_RATERS = 5
"""Fewer opinions are no panel (ITU-R BT.500 and ITU-T P.910 start at 4 to 15 observers)."""
NO_CORRECTION = "none: all such rules must pass (intersection-union test)"
NO_TEST = "none: the mean alone is judged, which claims no error rate"


class Strictness(Frozen):
    """How sure a rule must be, and on how much."""

    family_level: float = Field(default=0.025, gt=0, lt=0.5)
    """How often a model may be promoted that should not be, over all tested rules together. One-sided: the default is
    as strict as one end of a 95 % interval."""
    min_clips: int = Field(default=8, ge=1)
    """Clips a rule needs; with fewer it is not decided, which does not promote. A choice."""
    min_sources: int = Field(default=6, ge=1)
    """Sources likewise. With 5 no p-value is below 1/32, whatever is measured; with 6 it can be 1/64."""


class Limit(Frozen):
    """An absolute limit on a metric of the report; one of `minimum` and `maximum`."""

    metric: str
    """As the report names it: `psnr_db`."""
    subset: str = TUNED
    """Which generations."""
    group: str = "all"
    """Which part of the test clips."""
    minimum: float | None = None
    """Least mean, in the metric's unit."""
    maximum: float | None = None
    """Largest mean, in the metric's unit."""
    sure: bool = True
    """Whether the mean of other clips would keep the limit too, at `family_level`; false judges the mean as it is."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Limit:
        if (self.minimum is None) == (self.maximum is None):
            raise ValueError(f"the limit on {self.metric} needs either minimum or maximum")
        return self


class Evidence(NamedTuple):
    """A metric of every clip, or its difference between two models."""

    values: list[float]
    """Up is good: turned round where `sign` is -1."""
    sources: list[str]
    num_attempted: int
    sign: int
    unit: str


def single(report: Report, name: str, subset: str, group: str, sign: int) -> Evidence | str:
    """A metric clip by clip, or why there is none."""
    metric = find_metric(report, name)
    scores = scores_of(report, name, subset, group)
    if metric is None or not scores:
        return f"the report has no {name} of a clip of {subset} on {group}"
    source_of = sources_of(report)
    tried = clips_tried(report, subset, group)
    return Evidence(
        [sign * value for value in scores.values()], [source_of[clip] for clip in scores], len(tried), sign, metric.unit
    )


def paired(report: Report, name: str, right: str, group: str = "all", *, other: Report | None = None) -> Evidence | str:
    """The tuned model less `right` (of the `other` report, where given) on clips that both have, or why there is none.

    What counts as tried: clips that `right` has a value of, and that the tuned model was tried on.
    """
    metric = find_metric(report, name)
    ours, theirs = scores_of(report, name, TUNED, group), scores_of(other or report, name, right, group)
    shared = sorted(ours.keys() & theirs.keys())
    if metric is None or not shared:
        return f"the report has no clip with {name} of both"
    sign = 1 if metric.higher_is_better else -1
    source_of = sources_of(report)
    return Evidence(
        [sign * (ours[clip] - theirs[clip]) for clip in shared],
        [source_of[clip] for clip in shared],
        len(clips_tried(report, TUNED, group) & theirs.keys()),
        sign,
        metric.unit,
    )


def judge(
    title: str,
    limit: str,
    found: Evidence | str,
    strict: Strictness,
    *,
    above: float | None,
    least: float = float("-inf"),
    min_coverage: float = 0.0,
) -> Check:
    """Whether the mean is `least` or more and, where `above` is given, surely above that; both are in `found`'s sense."""
    if isinstance(found, str):
        return undecided(title, limit, found)
    p_value = None if above is None else p_above(found.values, found.sources, above)
    check = counted(title, limit, found, strict)
    mean = fmean(found.values)
    kept = mean >= least and (p_value is None or p_value <= strict.family_level)
    covered = len(found.values) >= min_coverage * found.num_attempted
    said = [check.measured]
    if p_value is not None and above is not None:
        said.append(f"p = {p_value:.4f} that it is not beyond {found.sign * above + 0.0:+g}")
    if not covered:
        said.append(f"coverage below {min_coverage:g}")
    return check.model_copy(
        update={
            "measured": ", ".join(said),
            "passed": check.decided and kept and covered,
            "p_value": p_value,
            "correction": NO_TEST if p_value is None else NO_CORRECTION,
        }
    )


def counted(title: str, limit: str, found: Evidence, strict: Strictness) -> Check:
    """The mean, on how much it rests, and whether that is enough; passed is for others to say."""
    num_clips, num_sources = len(found.values), len(set(found.sources))
    value = found.sign * fmean(found.values)
    unit = f" {found.unit}" if found.unit else ""
    measured = f"{value:+.3f}{unit} on {num_clips} clips of {num_sources} sources, {found.num_attempted} tried"
    enough = num_clips >= strict.min_clips and num_sources >= strict.min_sources
    if not enough:
        measured += f": not decided below gate.min_clips = {strict.min_clips}, gate.min_sources = {strict.min_sources}"
    return Check(
        name=title, measured=measured, limit=limit, passed=False, decided=enough, value=value, num_items=num_clips,
        num_sources=num_sources, num_attempted=found.num_attempted,
    )  # fmt: skip


def undecided(title: str, limit: str, why: str) -> Check:
    """A rule that nothing can be said about, which is not passed."""
    return Check(name=title, measured=f"not decided: {why}", limit=limit, passed=False, decided=False)


def judge_limit(limit: Limit, report: Report, strict: Strictness) -> Check:
    """An absolute limit, on the clips' values or, where it is not `sure`, on the report's mean."""
    sign = 1 if limit.maximum is None else -1
    bound = limit.minimum if limit.maximum is None else limit.maximum
    assert bound is not None
    title = f"{limit.metric} of {limit.subset} on {limit.group}"
    wanted = f"gate.limits: {'at least' if sign > 0 else 'at most'} {bound:g}"
    if limit.sure:
        found = single(report, limit.metric, limit.subset, limit.group, sign)
        return judge(title, f"{wanted}, for sure", found, strict, above=sign * bound)
    metric = find_metric(report, limit.metric, limit.subset, limit.group)
    if metric is None or metric.value is None:
        return undecided(title, wanted, (metric and metric.reason) or "missing from the report")
    interval = "" if metric.low is None else f" [{metric.low:.3f}, {metric.high:.3f}]"
    enough = metric.num_items >= strict.min_clips
    few = "" if enough else f": not decided below gate.min_clips = {strict.min_clips}"
    return Check(
        name=title,
        measured=f"{metric.value:.3f} {metric.unit}{interval} on {metric.num_items} of {metric.num_attempted} tried{few}",
        limit=wanted,
        passed=enough and sign * metric.value >= sign * bound,
        decided=enough,
        value=metric.value,
        num_items=metric.num_items,
        num_attempted=metric.num_attempted,
        correction=NO_TEST,
    )


def judge_superior(
    limit: str, against: str, found: Mapping[str, Evidence | str], strict: Strictness, min_coverage: float
) -> Check:
    """Whether the model surely beats the champion in at least one metric; corrected for choosing the best of them."""
    title = f"better in one of {', '.join(found)} against {against}"
    known = {name: each for name, each in found.items() if isinstance(each, Evidence)}
    checks = {name: counted(title, limit, each, strict) for name, each in known.items()}
    usable = [
        name for name, each in known.items()
        if checks[name].decided and len(each.values) >= min_coverage * each.num_attempted
    ]  # fmt: skip
    if not usable:
        return undecided(title, limit, "; ".join(describe(name, each, strict) for name, each in found.items()))
    raw = [p_above(known[name].values, known[name].sources) if name in usable else 1.0 for name in found]
    adjusted = dict(zip(found, holm(raw), strict=True))
    best = min(usable, key=lambda name: adjusted[name])
    said = (
        f"{describe(name, each, strict)}, p = {p:.4f}, corrected {adjusted[name]:.4f}"
        for (name, each), p in zip(found.items(), raw, strict=True)
    )
    return checks[best].model_copy(
        update={
            "measured": "; ".join(said),
            "passed": adjusted[best] <= strict.family_level,
            "p_value": adjusted[best],
            "correction": f"Holm over {len(found)} metrics",
        }
    )


def describe(name: str, found: Evidence | str, strict: Strictness) -> str:
    """A metric and what was found of it."""
    return f"{name} {found if isinstance(found, str) else counted('', '', found, strict).measured}"


def judge_coverage(report: Report, name: str, minimum: float) -> Check:
    """Whether enough of the clips that were tried have a value."""
    value = find_metric(report, name, TUNED, "all")
    tried, scored = (value.num_attempted, value.num_items) if value else (0, 0)
    return Check(
        name=f"coverage of {name} of {TUNED}",
        measured=f"{scored} of {tried} clips" + (f": {value.reason}" if value and value.reason else ""),
        limit=f"gate.min_coverage.{name} = {minimum:g}",
        passed=tried > 0 and scored >= minimum * tried,
        num_items=scored,
        num_attempted=tried,
    )


def judge_opinion(scale: str, opinion: Opinion | None, minimum: float) -> Check:
    """Whether people's opinion of the model is good enough for sure."""
    title, limit = f"mean opinion of {scale}", f"gate.min_mos.{scale} = {minimum:g}, the whole 95 % interval"
    if opinion is None:
        return undecided(title, limit, "the panel's file has no such system and scale")
    enough = opinion.num_raters >= MIN_RATERS
    few = "" if enough else f": not decided below {MIN_RATERS} raters"
    return Check(
        name=title,
        measured=f"{opinion.mean:.2f} [{opinion.low:.2f}, {opinion.high:.2f}] by {opinion.num_raters} raters on"
        f" {opinion.num_clips} clips{few}",
        limit=limit,
        passed=enough and opinion.low >= minimum,
        decided=enough,
        value=opinion.mean,
        num_items=opinion.num_clips,
        correction=NO_CORRECTION,
    )


def statement(checks: Iterable[Check], level: float) -> str:
    """What the verdict promises about its own errors.

    Source: Berger 1982, "Multiparameter hypothesis testing and acceptance sampling", on tests that must all pass.
    """
    loose = [check.name for check in checks if check.decided and check.correction in ("", NO_TEST)]
    return (
        f"A model that falls short of any tested rule is promoted with probability {level:g} at most: every rule is"
        " tested one-sided at that level and all must pass, so that nothing is gained by having many (an"
        " intersection-union test) and no correction is needed. Where one of several gains suffices, the best of them"
        f" would be picked: Holm's correction keeps the probability of any false claim at {level:g}. The tests"
        " keep their level where deviations are symmetric; rare disasters among few sources can exceed it."
        + (f" No probability is claimed for: {'; '.join(loose)}." if loose else "")
    )


def find_metric(report: Report, name: str, subset: str | None = None, group: str | None = None) -> MetricValue | None:
    """The report's value of a metric; any where no subset is given."""
    return next(
        (
            value
            for value in report.metrics
            if value.name == name and subset in (None, value.subset) and group in (None, value.group)
        ),
        None,
    )


def rows_of(report: Report, subset: str, group: str) -> Sequence[dict[str, str | float | None]]:
    """The report's rows of some generations."""
    return [row for row in report.per_clip if row["subset"] == subset and group in ("all", row["group"])]


def scores_of(report: Report, name: str, subset: str, group: str) -> dict[str, float]:
    """The score of every clip that has one."""
    rows = rows_of(report, subset, group)
    return {str(row["clip_id"]): value for row in rows if isinstance(value := row.get(name), float)}


def clips_tried(report: Report, subset: str, group: str) -> set[str]:
    """The clips that a generation was asked of."""
    return {str(row["clip_id"]) for row in rows_of(report, subset, group)}


def sources_of(report: Report) -> dict[str, str]:
    """The source of every clip."""
    return {str(row["clip_id"]): str(row["source_id"]) for row in report.per_clip}
