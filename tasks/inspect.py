"""Say everything about single files: verdict, treatments, rejects and facts, by the rules of ingest, validate and cut.

Example: soundstage inspect /data/my_videos/cat.mp4 --json
         soundstage inspect a.mp4 b.mov validate.min_duration_s=2

Everything is printed whatever is found; then the exit status is 0 where every file would be used, treated or not, 5
where one is rejected, and 2 where one does not exist.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from data import remote, rules
from data.engines import Lost, map_ordered
from data.records import DataRefused, Frozen, Reject, Source, Treatment
from tasks import cut, explain, ingest, validate

if TYPE_CHECKING:
    from data.listing import Listed

SAME_AS_SOURCE = {"source_id", "path", "sound_path", "references", "group", "caption", "caption_language", "licence"}
"""Columns of a clip that repeat its source's."""
MAX_WIDTH = 160
"""Characters of a value in the table; `--json` has all of it."""


class Config(Frozen):
    """The settings that the pipeline would judge the files by."""

    ingest: ingest.Config
    """How files are measured."""
    limits: validate.Config = Field(alias="validate")
    """What sources must be."""
    cut: cut.Config
    """What clips are, and must be."""
    caption: str | None = None
    """Caption to judge, instead of the one beside the file: a table's, say."""
    as_json: bool = False
    """Print JSON instead of a table: an object for one file, a list for several; `--json` does the same."""


class Rejected(Frozen):
    """One reason to leave a file out."""

    rule: str
    measured: str
    limit: str
    message: str
    """All of it in a sentence, with the option that decides."""


class Treated(Frozen):
    """One thing that would be done to the file."""

    treatment: str
    detail: str


class Findings(Frozen):
    """What the pipeline would do with one file."""

    verdict: Literal["accepted", "treated", "rejected"]
    treatments: tuple[Treated, ...]
    rejects: tuple[Rejected, ...]
    facts: dict[str, Any]
    """The manifest's row, null where nothing was measured, and under `num_clips`, `clips` and `clip_rejects` what `cut`
    makes of it."""


class Seen(NamedTuple):
    """What a child process found."""

    source: Source
    rejects: list[Reject]
    treatments: list[Treatment]
    cut: cut.Cut


def run(config: Config, *paths: str) -> list[Findings]:
    """Print what is found about every path; bad files are rejected, never an error.

    Raises:
        ValueError: no path is given.
    """
    if not paths:
        raise ValueError("no file is named; give one or more, for example `soundstage inspect cat.mp4`")
    results: list[Findings] = []
    for found in inspected(paths, config):
        results.append(found)
        if not config.as_json:
            say(("" if len(results) == 1 else "\n") + table(found))
    if config.as_json:
        records = [found.model_dump(mode="json") for found in results]
        say(json.dumps(records[0] if len(records) == 1 else records, indent=2, ensure_ascii=False))
    return results


def refuse(found: Sequence[Findings], paths: Sequence[str]) -> None:
    """Make of printed findings an exit status that scripts can read.

    Raises:
        ValueError: a file does not exist.
        DataRefused: one is rejected.
    """
    rejected = [path for path, item in zip(paths, found, strict=True) if item.verdict == "rejected"]
    absent = [path for path in rejected if not remote.is_remote(path) and not os.path.lexists(path)]
    for kind, these, what in ((ValueError, absent, "not there"), (DataRefused, rejected, "rejected")):
        if these:
            raise kind(f"{len(these)} of {len(found)} {what}: {', '.join(these[:3])}{'…' if len(these) > 3 else ''}")


def say(text: str) -> None:
    """Print a text, whatever its characters and the terminal's."""
    coding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(coding, "backslashreplace").decode(coding) + "\n")
    sys.stdout.flush()


def inspected(paths: Sequence[str], config: Config) -> Iterator[Findings]:
    """The findings, in order; each file is looked at in a child process with the limits of ingest.engine."""
    engine = config.ingest.engine.model_copy(update={"name": "local", "num_workers": 1})
    for path, answer in zip(paths, map_ordered(functools.partial(look, config=config), paths, engine), strict=True):
        yield findings(lost(path, answer.reason, config) if isinstance(answer, Lost) else answer)


def look(path: str, config: Config) -> Seen:
    """Measure, judge and cut one file; a store that does not answer costs what lies in it and nothing else."""
    try:
        return judged(path, config)
    except remote.Unreachable as error:
        return lost(path, str(error), config)


def judged(path: str, config: Config) -> Seen:
    """What the verbs make of one file that can be reached."""
    source = measured(path, config)
    if source.use == "reference":
        reject = rules.unusable(source, config.limits)
        return Seen(source, [] if reject is None else [reject], [], cut.Cut((), ()))
    rejects = rules.judge_one(source, config.limits)
    if rejects:
        return Seen(source, rejects, [], cut.Cut((), ()))
    treatments = rules.treatments(source, config.limits)
    captioned = source.model_copy(update={"caption": rules.final_caption(source, config.limits)})
    return Seen(source, rejects, treatments, cut.cut_source(captioned, config.cut))


def measured(path: str, config: Config) -> Source:
    """The row that `ingest` would write."""
    from data.listing import listed
    from data.sources import given_file
    from data.tables import Words

    try:
        row = listed(given_file(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        row = unlisted(path)._replace(error=f"cannot be read: {reason}")
    if config.caption is not None:
        row = row._replace(words=Words(config.caption, "given"))
    return ingest.measure(row, config.ingest.sensing, config.ingest.work)


def lost(path: str, reason: str, config: Config) -> Seen:
    """What is known of a file whose child process did not answer."""
    source = ingest.unmeasured(unlisted(path), reason)
    return Seen(source, rules.judge_one(source, config.limits), [], cut.Cut((), ()))


def unlisted(path: str) -> Listed:
    """The row of a file of which only the name is known."""
    from data.listing import Listed
    from data.paths import as_text, shown, without_secrets
    from data.tables import Words

    name = without_secrets(path) if remote.is_remote(path) else shown(path)
    return Listed(path, as_text(name), "", "clip", Words(), None, None, (), None)


def findings(seen: Seen) -> Findings:
    """The verdict; a file that gives no clip is rejected by what `cut` says."""
    whole = seen.source.source_id
    refused = [reject for reject in seen.cut.rejects if reject.item != whole]
    rejects = [*seen.rejects, *(reject for reject in seen.cut.rejects if reject.item == whole)]
    facts = measured_only(seen.source) | {
        "num_clips": len(seen.cut.clips),
        "clips": [clip.model_dump(exclude=SAME_AS_SOURCE) for clip in seen.cut.clips],
        "clip_rejects": [{"clip_id": item.item} | worded(item).model_dump() for item in refused],
    }
    return Findings(
        verdict="rejected" if rejects else "treated" if seen.treatments else "accepted",
        treatments=tuple(Treated(treatment=item.treatment, detail=item.detail) for item in seen.treatments),
        rejects=tuple(worded(reject) for reject in rejects),
        facts=facts,
    )


def measured_only(source: Source) -> dict[str, Any]:
    """The fields of the row; None for those that say no more than that nothing was measured, as their defaults do."""
    facts = source.model_dump()
    unknown = facts.keys() - source.model_fields_set
    if not source.size_bytes:  # the content was not read: what stands for its hash is that of the path
        unknown |= {"sha256", "size_bytes"}
    return facts | dict.fromkeys(unknown)


def worded(reject: Reject) -> Rejected:
    """A reject with a sentence."""
    verb, _, option = reject.rule.partition(".")
    wanted = f"limit {reject.rule} = {reject.limit}"
    if not is_option(verb, option):
        wanted = f"wanted is {reject.limit} ({reject.rule})"
    message = f"{reject.measured}; {wanted}"
    return Rejected(rule=reject.rule, measured=reject.measured, limit=reject.limit, message=message)


def is_option(verb: str, option: str) -> bool:
    """Whether a rule bears the name of a setting."""
    kinds = {"validate": validate.Config, "cut": cut.Config}
    return verb in kinds and option.partition(".")[0] in kinds[verb].model_fields


def table(found: Findings) -> str:
    """The findings as lines for a reader, verdict first."""
    facts, refused = found.facts, found.facts["clip_rejects"]
    role = ", a reference or the sound of a clip" if facts["use"] == "reference" else ""
    lines = [f"{words(facts['path'])}: {found.verdict}{role}"]
    lines += [f"  rejected  {words(item.message)}{remedy(item)}" for item in found.rejects]
    lines += [f"  treated   {item.treatment}: {words(item.detail)}" for item in found.treatments]
    if facts["num_clips"] or refused:
        lines.append(f"  clips     {facts['num_clips']} of {facts['num_clips'] + len(refused)} spans are kept")
    lines += [
        f"    {item['start_s']:.3f} – {item['end_s']:.3f} s ({item['boundary_reason']})" for item in facts["clips"]
    ]
    for message in dict.fromkeys(item["message"] for item in refused):
        starts = [clip_start(item["clip_id"]) for item in refused if item["message"] == message]
        lines.append(f"    from {words(', '.join(starts))} s: {words(message)}")
    plain = {
        name: value for name, value in facts.items() if name in Source.model_fields and name not in ("path", "error")
    }
    known = {name: value for name, value in plain.items() if value not in (None, (), "")}
    width = max(map(len, known))
    lines += ["  facts", *(f"    {name:<{width}}  {words(value)}" for name, value in known.items())]
    if facts["num_frames"] or facts["num_channels"]:
        lines.append(f"    {'(none)':<{width}}  {', '.join(name for name in plain if name not in known)}")
    return "\n".join(lines)


def remedy(item: Rejected) -> str:
    """Which option to change, where one decides."""
    verb, _, option = item.rule.partition(".")
    return f"; to use the file, change {option} in section {verb} of params.yaml" if is_option(verb, option) else ""


def clip_start(clip_id: str) -> str:
    """Where a span starts, s, as its id has it in milliseconds."""
    return f"{int(clip_id.rpartition('-')[2]) / 1000:.3f}"


def words(value: object) -> str:
    """A value on one line, of bounded length."""
    text = f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
    plain = explain.printable(text)
    return plain if len(plain) <= MAX_WIDTH else f"{plain[: MAX_WIDTH - 1]}…"
