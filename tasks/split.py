"""Divide clips into train, val and test by what they look like, the same way every time, also when data is added.

Example: soundstage split seed=1 test_share=0.1
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from math import log
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field, model_validator

from data import cards, files, sorting, splits
from data.records import Clip, DataRefused, Frozen, Reject

arrow, compute, parquet = cast(Any, pa), cast(Any, pc), cast(Any, pq)
"""Compiled libraries without a single type."""
MAX_NAMED = 5
"""Files named in one message."""


class Config(Frozen):
    """How clips are divided."""

    clips: Path
    """Parquet of clips, as `cut` wrote it."""
    accepted: Path
    """Parquet of the accepted sources, for content hashes and what the data cards say about sources."""
    treatments: Path
    """Parquet of what was done to them, for the data cards."""
    splits: Path
    """Folder for train.parquet, val.parquet, test.parquet and summary.json."""
    ledger: Path
    """Parquet of every source ever drawn and its split, read and extended: an old clip never changes split. Delete it
    to draw all anew; another seed or other shares do so too."""
    cards: Annotated[Path, files.Holds(("train.json", "train.md"))]
    """Folder for the data card of each split, as JSON and as Markdown."""
    rejects: Path
    """Parquet of sources left out because they look like sources of two splits."""
    expectations: Path
    """JSON of what every expectation on the splits found."""
    docs: Annotated[Path, files.Holds(("index.html",), below="splits")]
    """Folder of the expectations' pages; those of the splits go to `splits/` in it."""
    work: Path = Path("data/store/work")
    """Scratch folder; changes no result."""
    seed: int = 0
    """Another seed is another draw."""
    val_share: float = Field(default=0.08, ge=0, lt=1)
    """Share of the sources that is watched during training; sources that look alike count as one."""
    test_share: float = Field(default=0.2, gt=0, lt=1)
    """Share of the sources that is never seen before `evaluate`; likewise."""

    @model_validator(mode="after")
    def _some_are_left_to_train(self) -> Config:
        if self.val_share + self.test_share >= 1:
            raise ValueError(f"val_share {self.val_share:g} + test_share {self.test_share:g} leave nothing to train on")
        return self


class Result(Frozen):
    """Clips in each split, and sources in none."""

    num_train: int
    num_val: int
    num_test: int
    num_left_out: int
    num_torn_clusters: int
    """Clusters with members in two splits since before they were known to be alike; their new members are left out."""


def run(config: Config) -> Result:
    """Write the ledger, the three splits with their data cards, what was left out, and a summary with the proof.

    Raises:
        DataRefused: fewer than three clusters of sources have clips, a split stays empty, the splits leak, or a
            critical expectation fails. No split is left then, neither this run's nor an earlier one's.
    """
    withdraw(config)
    columns = read_columns(config.clips)
    sources = by_source(columns, config.clips)
    draw = splits.draw_name(config.seed, config.val_share, config.test_share)
    ledger = splits.read_ledger(config.ledger, draw)
    if config.ledger.is_file() and not len(ledger):
        sys.stderr.write(f"{config.ledger} is of another draw than {draw}: all is drawn anew\n")
    try:
        drawn = splits.assign(
            sources["source_id"], sources["cluster"], config.seed, config.val_share, config.test_share, ledger
        )
    except ValueError as error:
        held = f"{config.clips} holds {len(columns)} clips of {len(sources['source_id'])} sources: {error}"
        raise DataRefused(f"{held}{alike(sources)}") from error
    splits.write_ledger(config.ledger, splits.merged(ledger, sources["source_id"], drawn), draw)
    files.write_records(config.rejects, left_out(sources, drawn), Reject)
    divide(config, columns, sources["source_id"], drawn)
    columns = columns.select(["source_id", "group"])  # the others are large
    try:
        leaks = proved(config)
    except DataRefused:
        withdraw(config)
        raise
    table = stratification(columns, sources["source_id"], drawn, config)
    write_cards(config, table)
    counts = {name: files.num_records(config.splits / f"{name}.parquet") for name in splits.SPLITS}
    torn = splits.num_torn(sources["cluster"], drawn.split)
    if torn:
        sys.stderr.write(
            f"{torn} clusters have members in two splits since before they were known to be alike; their new members"
            f" are left out; delete split.ledger ({config.ledger}) to draw all anew\n"
        )
    summary = {
        "draw": draw,
        "num_clips": counts,
        "leaks": leaks,
        "clusters_torn_since_before": torn,
        "references_in_two_splits": shared_references(config.splits),
        "mix_divergence": divergences(table),
        "stratification": table,
    }
    files.write_text(config.splits / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    num_out = int((drawn.split == splits.OUT).sum())
    return Result(
        num_left_out=num_out, num_torn_clusters=torn, **{f"num_{name}": count for name, count in counts.items()}
    )


def alike(sources: dict[str, Any]) -> str:
    """The largest cluster in words, where one holds more than one source."""
    place, _ = splits.coded(sources["cluster"])
    members = np.flatnonzero(place == np.bincount(place).argmax())
    if len(members) < 2:
        return ""
    names = ", ".join(sources["path"][row].as_py() for row in members[:MAX_NAMED].tolist())
    more = f" and {len(members) - MAX_NAMED} more" if len(members) > MAX_NAMED else ""
    return f"; the largest cluster: {names}{more}"


def withdraw(config: Config) -> None:
    """Take back the splits, so that no verb trains or shows what was refused or belongs to other clips."""
    for name in (*(f"{name}.parquet" for name in splits.SPLITS), "summary.json"):
        files.remove(config.splits / name)


def read_columns(clips: Path) -> Any:
    """Those columns of the clips that decide.

    Raises:
        RuntimeError: there is no such file. ValueError: it has other columns than clips have.
    """
    if not clips.is_file():
        raise RuntimeError(f"{clips} does not exist; run `soundstage cut` first")
    files.num_records(clips)  # names the file where it is no Parquet
    found, wanted = set(parquet.read_schema(clips).names), set(Clip.model_fields)
    if found != wanted:
        names = ", ".join(sorted(found ^ wanted))
        raise ValueError(f"{clips} is of another version: {names} missing or unknown; run `soundstage cut` again")
    return parquet.read_table(clips, columns=["clip_id", "source_id", "cluster", "group", "path"]).combine_chunks()


def by_source(columns: Any, clips: Path) -> dict[str, Any]:
    """Every source once, sorted, with its cluster (its own id where it has none), group and path.

    Raises:
        DataRefused: the clips of a source are in two clusters.
    """
    if not len(columns):
        raise DataRefused(f"{clips} holds 0 clips; at least {splits.MIN_CLUSTERS} sources are needed")
    aggregates = [("cluster", "min"), ("cluster", "max"), ("group", "min"), ("path", "min")]
    table = columns.group_by("source_id").aggregate(aggregates).sort_by("source_id").combine_chunks()
    ids, low, high = (splits.flat(table[name]) for name in ("source_id", "cluster_min", "cluster_max"))
    torn = ids.filter(compute.not_equal(low, high))
    if len(torn):
        raise DataRefused(f"{clips}: clips of source {torn[0]} are in two clusters; run `soundstage cut` again")
    cluster = compute.if_else(compute.equal(low, ""), ids, low)
    return {"source_id": ids, "cluster": cluster, "group": table["group_min"], "path": table["path_min"]}


def left_out(sources: dict[str, Any], drawn: splits.Drawn) -> Iterator[Reject]:
    """A reject of every source that no split may have."""
    for place in np.flatnonzero(drawn.split == splits.OUT).tolist():
        names = [name for code, name in enumerate(splits.SPLITS) if drawn.met[place] >> code & 1]
        yield Reject(
            item=sources["source_id"][place].as_py(),
            path=sources["path"][place].as_py(),
            verb="split",
            rule="split.cluster",
            measured=f"looks or sounds like sources of {' and '.join(names)} (cluster {sources['cluster'][place]})",
            limit="sources of one split",
        )


def divide(config: Config, columns: Any, source_id: Any, drawn: splits.Drawn) -> None:
    """Write every clip to the file of its split, sorted by id, with the cluster's lasting name."""
    row = splits.rows_in(splits.flat(columns["source_id"]), source_id)
    order = sorting.order_of(columns["clip_id"])
    schema, where = files.schema_of(Clip), files.schema_of(Clip).get_field_index("cluster")
    with files.whole(config.work / "split") as work:
        work.mkdir()
        sorting.scatter(config.clips, order, schema, work)
        for code, name in enumerate(splits.SPLITS):

            def parts(code: int = code) -> Iterator[Any]:
                for places, clips in sorting.gathered(order, work):
                    part = row[places]
                    renamed = clips.set_column(where, schema.field(where), drawn.cluster.take(arrow.array(part)))
                    yield renamed.filter(arrow.array(drawn.split[part] == code))

            with files.whole(config.splits / f"{name}.parquet") as out, parquet.ParquetWriter(out, schema) as writer:
                for group in sorting.regrouped(parts()):
                    writer.write_table(group)
    files.remove(config.work / "split")


def proved(config: Config) -> dict[str, int]:
    """The leaks, which are none.

    Raises:
        DataRefused: there are some, or a critical expectation fails.
    """
    leaks = leaks_of(config)
    if any(leaks.values()):
        raise DataRefused(f"{config.splits} leaks: {', '.join(f'{count} {name}' for name, count in leaks.items())}")
    check_expectations(config)
    return leaks


def leaks_of(config: Config) -> dict[str, int]:
    """Of the files as written: how many sources, contents and clusters are in more than one split."""
    known = cards.column(config.accepted, "source_id")
    hashes = cards.column(config.accepted, "sha256")
    kinds: dict[str, list[Any]] = {"sources": [], "exact copies": [], "near-duplicate clusters": []}
    for name in splits.SPLITS:
        path = config.splits / f"{name}.parquet"
        source_id = compute.unique(cards.column(path, "source_id"))
        content = hashes.take(arrow.array(cards.rows_of(source_id, known)))
        for kind, values in zip(kinds, (source_id, content, cards.column(path, "cluster")), strict=True):
            kinds[kind].append(compute.unique(values))
    totals = {kind: arrow.concat_arrays(parts) for kind, parts in kinds.items()}
    return {kind: len(values) - len(compute.unique(values)) for kind, values in totals.items()}


def check_expectations(config: Config) -> None:
    """Hold the clips of all splits against their expectations.

    Raises:
        DataRefused: a critical one fails.
    """
    from data import expectations
    from tasks import judging

    shares = {"train": 1.0, "val": config.val_share, "test": config.test_share}
    divided = {name: files.iter_records(config.splits / f"{name}.parquet", Clip) for name in shares if shares[name]}
    with files.whole(config.work / "split") as work:
        work.mkdir()
        with expectations.splits_frame(divided, work / "asked.sqlite") as table:
            judging.enforce(
                "splits", table, expectations.splits_suite(table, [*divided]), config.expectations, config.docs
            )
    files.remove(config.work / "split")


def stratification(columns: Any, source_id: Any, drawn: splits.Drawn, config: Config) -> list[dict[str, Any]]:
    """Of every group and split: clips, sources, clusters wanted and got, and how many standard deviations that is."""
    place, groups = splits.coded(splits.flat(columns["group"]))
    row = splits.rows_in(splits.flat(columns["source_id"]), source_id)
    cluster, _ = splits.coded(drawn.cluster)
    split, owner = drawn.split[row], cluster[row]
    shares = (1 - config.val_share - config.test_share, config.val_share, config.test_share)
    table: list[dict[str, Any]] = []
    for code, group in sorted([*enumerate(groups), (None, "all")], key=lambda pair: (pair[0] is not None, pair[1])):
        chosen = (split >= 0) & ((place == code) if code is not None else np.ones(len(row), np.bool_))
        total = len(np.unique(owner[chosen]))
        for number, name in enumerate(splits.SPLITS):
            mine = chosen & (split == number)
            got, expected = len(np.unique(owner[mine])), total * shares[number]
            spread = (expected * (1 - shares[number])) ** 0.5
            table.append(
                {
                    "group": group, "split": name, "num_clips": int(mine.sum()),
                    "num_sources": len(np.unique(row[mine])), "num_clusters": got,
                    "expected_clusters": round(expected, 3),
                    "deviations": round((got - expected) / spread, 3) if spread else 0.0,
                }
            )  # fmt: skip
    return table


def divergences(table: list[dict[str, Any]]) -> dict[str, float]:
    """Of every split, how far its mix of groups is from the whole's: Kullback-Leibler divergence over clusters, nats."""
    result: dict[str, float] = {}
    for name in splits.SPLITS:
        mine = {row["group"]: row["num_clusters"] for row in table if row["split"] == name and row["group"] != "all"}
        whole = {group: sum(row["num_clusters"] for row in table if row["group"] == group) for group in mine}
        size, total = sum(mine.values()), sum(whole.values())
        terms = [mine[group] / size * log(mine[group] / size / (whole[group] / total)) for group in mine if mine[group]]
        result[name] = round(sum(terms), 6)
    return result


def shared_references(folder: Path) -> int:
    """Reference files that clips of more than one split are conditioned on: counted, as no target leaks by them."""
    found = [
        compute.unique(compute.list_flatten(cards.column(folder / f"{n}.parquet", "references"))) for n in splits.SPLITS
    ]
    together = arrow.concat_arrays(found)
    return len(together) - len(compute.unique(together))


def write_cards(config: Config, table: list[dict[str, Any]]) -> None:
    """A data card for each split, as JSON and Markdown."""
    with files.whole(config.cards) as folder:
        folder.mkdir()
        for name in splits.SPLITS:
            card = cards.describe(name, config.splits / f"{name}.parquet", config.accepted, config.treatments)
            (folder / f"{name}.json").write_text(card.model_dump_json(indent=2) + "\n", encoding="utf-8")
            shares = {
                f"group “{cards.cell(row['group'])}”": f"{row['num_clusters']} clusters, {row['expected_clusters']:.1f} expected"
                f" ({row['deviations']:+.1f} standard deviations)"
                for row in table
                if row["split"] == name
            }
            (folder / f"{name}.md").write_text(cards.markdown(card, shares), encoding="utf-8")
