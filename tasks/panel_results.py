"""What a panel found: opinion scores of every system and scale, and who was left out of them and why.

Legend: S stimuli, R raters, C clips (sources), Y systems, K scales.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from data.records import DataRefused
from metrics import opinion
from tasks.panel_log import Progress, Rating
from tasks.panel_plan import LOW_ANCHOR, REFERENCE, SCALES, Panel, order

CONVENTION = (
    "absolute category rating, 1 to 5 (ITU-T P.800, P.910); only finished sessions; of a repeated item the first vote; "
    f"ci95: percentile bootstrap over raters and clips, {opinion.NUM_DRAWS} draws; ci95_t: Student's t over the raters' "
    "means; per item: Student's t over raters, also after removal of each rater's bias (ITU-T P.913)"
)


class Limits(NamedTuple):
    """When a rater is left out."""

    max_gold_failures: float
    """Share of clips whose low anchor was rated no worse than the hidden reference."""
    max_repeat_difference: float
    """Mean difference between the two votes on a repeated item."""


class Rejected(NamedTuple):
    """A rater left out, and by which rule."""

    rater: int
    rule: str
    measured: float
    limit: float


Session = Sequence[Rating]
Sessions = Mapping[int, Session]
"""Ratings of every finished rater, in order, training left out."""


def conclude(panel: Panel, ratings: Sequence[Rating], progress: Sequence[Progress], limits: Limits) -> dict[str, Any]:
    """The whole answer, as `mos.json` holds it.

    Raises:
        DataRefused: fewer than five raters are left; the message says what became of the others.
    """
    sessions, dropouts = finished(panel, ratings, progress)
    careless = [found for rater in sessions if (found := carelessness(sessions[rater], panel, limits))]
    kept = {rater: sessions[rater] for rater in sessions if rater not in {each.rater for each in careless}}
    refuse_few(len(kept), len(dropouts), careless)
    odd = outliers(panel, kept)
    rejected = [*careless, *odd]
    kept = {rater: kept[rater] for rater in kept if rater not in {each.rater for each in odd}}
    refuse_few(len(kept), len(dropouts), rejected)
    return {
        "convention": CONVENTION,
        "seed": panel.seed,
        "screening": "ITU-R BT.500"
        if len(kept) + len(odd) >= opinion.MIN_RATERS_BT500
        else "leave-one-out correlation",
        "num_raters": {"invited": len(progress), "finished": len(sessions), "kept": len(kept)},
        "num_clips": len(panel.sources),
        "rejected": [each._asdict() for each in rejected],
        "dropouts": [each._asdict() for each in dropouts],
        "left_out": panel.left_out,
        "systems": systems(panel, kept),
        "differences": differences(panel, kept),
        "items": items(panel, kept),
        "raters": raters(panel, kept),
    }


def finished(panel: Panel, ratings: Sequence[Rating], progress: Sequence[Progress]) -> tuple[Sessions, list[Progress]]:
    """Sessions that were rated to the end, without their training, and how far the others came.

    Raises:
        DataRefused: a vote is of a film that the panel does not hold.
    """
    known = {item.name: item.sha256 for item in panel.items}
    foreign = [each for each in ratings if known.get(each.item) != each.item_sha256]
    if foreign:
        raise DataRefused(f"{len(foreign)} votes are of films that this panel does not hold, such as {foreign[0].item}")
    of: defaultdict[int, list[Rating]] = defaultdict(list)
    for rating in ratings:
        of[rating.rater].append(rating)
    whole = {each.rater for each in progress if len(of[each.rater]) == len(order(panel, each.rater))}
    sessions = {rater: [each for each in of[rater] if not each.is_training] for rater in sorted(whole)}
    return sessions, [each for each in progress if each.rater not in whole]


def refuse_few(num_kept: int, num_dropouts: int, rejected: Sequence[Rejected]) -> None:
    """Refuse to make a number of too few opinions."""
    if num_kept < opinion.MIN_RATERS:
        reasons = "".join(
            f"; rater {each.rater}: {each.rule} {each.measured:.2f}, limit {each.limit:g}" for each in rejected
        )
        raise DataRefused(
            f"{num_kept} raters can be used; at least {opinion.MIN_RATERS} are needed ({num_dropouts} have not finished"
            f", {len(rejected)} rejected{reasons}); invite more: soundstage panel invite"
        )


def carelessness(session: Session, panel: Panel, limits: Limits) -> Rejected | None:
    """Whether a rater cannot tell the reference from the low anchor, or contradicts themselves."""
    first = first_votes(session, "overall")
    names = {(item.source, item.system): item.name for item in panel.shown}
    failures = [first[names[s, LOW_ANCHOR]] >= first[names[s, REFERENCE]] for s in panel.sources]
    share = sum(failures) / len(failures)
    if share > limits.max_gold_failures:
        return Rejected(session[0].rater, "low anchor rated no worse than the reference, share of clips", share, limits.max_gold_failures)  # fmt: skip
    difference = repeat_difference(session)
    if difference is not None and difference > limits.max_repeat_difference:
        return Rejected(session[0].rater, "mean difference between votes on a repeated item", difference, limits.max_repeat_difference)  # fmt: skip
    return None


def first_votes(session: Session, scale: str) -> dict[str, int]:
    """A rater's first vote on each item."""
    return {each.item: int(getattr(each, scale)) for each in session if not each.is_repeat}


def repeat_difference(session: Session) -> float | None:
    """Mean absolute difference of the votes on repeated items over all scales; None without such."""
    first = {each.item: each.votes for each in session if not each.is_repeat}
    pairs = [(first[each.item], each.votes) for each in session if each.is_repeat]
    found = [abs(left - right) for early, late in pairs for left, right in zip(early, late, strict=True)]
    return statistics.fmean(found) if found else None


def outliers(panel: Panel, sessions: Sessions) -> list[Rejected]:
    """Raters who see something else than the others: by BT.500 from eight raters on, below by correlation.

    The least agreeing rater goes first, since one bad rater spoils the mean that the good ones are held against.
    """
    if len(sessions) >= opinion.MIN_RATERS_BT500:
        everything = np.concatenate([table(panel, sessions, scale) for scale in SCALES])
        screened = zip(sessions, opinion.screen_bt500(everything), strict=True)
        rule = "ITU-R BT.500, share of votes far off on both sides"
        return [
            Rejected(r, rule, each.outlying_share, opinion.MAX_OUTLYING) for r, each in screened if each.is_rejected
        ]
    left, found = dict(sessions), list[Rejected]()
    while len(left) >= opinion.MIN_RATERS:
        agreed = dict(zip(left, correlations(panel, left), strict=True))
        worst = min(left, key=lambda rater: 1.0 if (value := agreed[rater]) is None else value)
        value = agreed[worst]
        if value is None or value >= opinion.MIN_CORRELATION:
            break
        found.append(Rejected(worst, "correlation with the mean of the others", value, opinion.MIN_CORRELATION))
        del left[worst]
    return found


def correlations(panel: Panel, sessions: Sessions) -> list[float | None]:
    """Each rater's correlation with the others, mean over scales."""
    return opinion.mean_agreement([table(panel, sessions, scale) for scale in SCALES])


def table(panel: Panel, sessions: Sessions, scale: str) -> opinion.Votes:
    """Votes (S, R): rows in the order of `panel.shown`, columns in that of `sessions`."""
    columns = [first_votes(session, scale) for session in sessions.values()]
    return opinion.checked(np.array([[column[item.name] for column in columns] for item in panel.shown], np.float64))


def cube(panel: Panel, sessions: Sessions, scale: str) -> opinion.Votes:
    """The same votes as (R, C, Y)."""
    votes_SR = table(panel, sessions, scale)
    place = {(item.source, item.system): index for index, item in enumerate(panel.shown)}
    index_CY = np.array([[place[source, system] for system in panel.systems] for source in panel.sources])
    return np.moveaxis(votes_SR[index_CY], 2, 0)


def systems(panel: Panel, sessions: Sessions) -> dict[str, dict[str, dict[str, Any]]]:
    """Of every system and scale the mean opinion score with both intervals."""
    result: dict[str, dict[str, dict[str, Any]]] = {system: {} for system in panel.systems}
    for scale in SCALES:
        votes_RCY = cube(panel, sessions, scale)
        draws_DY = opinion.cluster_bootstrap(votes_RCY, seed=panel.seed)
        by_rater = opinion.opinion(votes_RCY.mean(axis=1).T)
        for place, system in enumerate(panel.systems):
            mean, half = float(by_rater.mos_S[place]), float(by_rater.half_width_S[place])
            found = opinion.estimate(mean, draws_DY[:, place])
            result[system][scale] = {
                "mean": mean, "low": found.low, "high": found.high, "ci95_t": [mean - half, mean + half],
                "num_raters": votes_RCY.shape[0], "num_clips": votes_RCY.shape[1],
            }  # fmt: skip
    return result


def differences(panel: Panel, sessions: Sessions) -> dict[str, dict[str, dict[str, Any]]]:
    """Of every two systems, the first less the second on each scale, paired by rater and clip."""
    result: defaultdict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for scale in SCALES:
        votes_RCY = cube(panel, sessions, scale)
        draws_DY = opinion.cluster_bootstrap(votes_RCY, seed=panel.seed)
        for left, right in combinations(range(len(panel.systems)), 2):
            mean = float((votes_RCY[:, :, left] - votes_RCY[:, :, right]).mean())
            found = opinion.estimate(mean, draws_DY[:, left] - draws_DY[:, right])
            name = f"{panel.systems[left]} - {panel.systems[right]}"
            result[name][scale] = {"mean": mean, "ci95": [found.low, found.high]}
    return dict(result)


def items(panel: Panel, sessions: Sessions) -> list[dict[str, Any]]:
    """Of every item and scale the mean opinion score, before and after removal of raters' biases."""
    rows = [{"source": item.source, "system": item.system, "name": item.name} for item in panel.shown]
    result: list[dict[str, Any]] = [dict(row) for row in rows]
    for scale in SCALES:
        votes_SR = table(panel, sessions, scale)
        raw, freed = opinion.opinion(votes_SR), opinion.opinion(opinion.without_bias(votes_SR))
        for place, row in enumerate(result):
            row[scale] = {
                "mos": float(raw.mos_S[place]),
                "ci95_half_width": float(raw.half_width_S[place]),
                "standard_error": float(raw.standard_error_S[place]),
                "standard_error_bias_removed": float(freed.standard_error_S[place]),
            }
    return result


def raters(panel: Panel, sessions: Sessions) -> list[dict[str, Any]]:
    """Of every rater who counts: severity on each scale, agreement, steadiness and pace."""
    found = {scale: opinion.biases(table(panel, sessions, scale)) for scale in SCALES}
    agreed = correlations(panel, sessions)
    return [
        {
            "rater": rater,
            "bias": {scale: float(found[scale][place]) for scale in SCALES},
            "correlation": agreed[place],
            "repeat_difference": repeat_difference(session),
            "median_latency_s": statistics.median(each.latency_s for each in session),
        }
        for place, (rater, session) in enumerate(sessions.items())
    ]
