"""Score generated films or sounds against reference ones, folder against folder; nothing else of the pipeline is needed.

example: soundstage score --reference films/real --generated films/made --out scores
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import Field

from data.files import Holds, remove, sha256, whole, write_text
from data.records import DataRefused
from tasks.lips import LIP_MEASURES, Lips, watchers, weights_of

if TYPE_CHECKING:
    from tasks.pairs import Measured, Pair

RESULT, TABLE, PAGE = "score.json", "items.csv", "index.html"
VERSION = 1
"""Of the form of `score.json`, and of how scores are computed: kept ones of another are measured again."""
Scores = dict[str, dict[str, Any]]


class Config(Lips):
    """What is compared, and where the answer goes."""

    reference: Path
    """Folder of real films or sounds; files of both folders are paired by name without ending, folders below too."""
    generated: Path
    """Folder of generated ones."""
    out: Annotated[Path, Holds((RESULT,))] = Path("scores")
    """Folder that gets score.json, items.csv and index.html."""
    seed: int = 0
    """Of the bootstrap of intervals."""
    num_workers: int = Field(default=1, ge=1)
    """Processes that measure; an item that crashes or hangs one is missing with that reason, and the others go on."""
    max_item_s: float = Field(default=3600, gt=0)
    """Longest time for an item, s."""


def run(config: Config) -> Path:
    """Measure every pair and write the result; a killed run goes on where it was. Returns the result's file.

    Raises:
        ValueError: a folder is not there, or two files of one have the same name without ending.
        DataRefused: no file of one folder has its like in the other.
        RuntimeError: weights that are named are missing, or are not those they should be.
    """
    pairs = pairs_of(config)
    if not any(pair.reference and pair.generated for pair in pairs):
        raise DataRefused(
            f"no file in {config.generated} is named like one in {config.reference} (without ending), e.g."
            f" {next((pair.stem for pair in pairs), 'nothing there')}; rename them alike"
        )
    watchers(config.syncnet, config.s3fd)  # so that wrong weights are said before any work
    work = config.out.with_name(f".{config.out.name}.unfinished")
    found = measured(config, pairs, work)
    result = result_of(config, pairs, found)
    with whole(config.out) as folder:
        folder.mkdir(parents=True)
        (folder / RESULT).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        with (folder / TABLE).open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(as_rows(result))
        (folder / PAGE).write_text(render(result, config), encoding="utf-8")
    remove(work)
    sys.stdout.write(told(result, config.out))
    return config.out / RESULT


def pairs_of(config: Config) -> list[Pair]:
    """Every file of both folders with its like, in the order of their names."""
    from tasks.pairs import Pair

    left, right = files_in(config.reference, "reference"), files_in(config.generated, "generated")
    pairs: list[Pair] = []
    lips = Lips(protocol=config.protocol, syncnet=config.syncnet, s3fd=config.s3fd)
    for stem in sorted(left.keys() | right.keys()):
        absent = (
            "" if stem in left and stem in right else f"{'generated' if stem in left else 'reference'} has no {stem}"
        )
        pairs.append(Pair(stem, left.get(stem), right.get(stem), absent, lips))
    return pairs


def files_in(folder: Path, setting: str) -> dict[str, Path]:
    """Files by name without ending, relative to the folder; hidden ones are left out.

    Raises:
        ValueError: there is no such folder, or a name is there twice.
    """
    if not folder.is_dir():
        raise ValueError(f"{setting}: {folder} is no folder")
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder)
        if not path.is_file() or any(part.startswith(".") for part in inner.parts):
            continue
        stem = inner.with_suffix("").as_posix()
        if stem in found:
            raise ValueError(f"{setting}: {found[stem].name} and {path.name} in {path.parent} have one name; move one")
        found[stem] = path
    return found


def measured(config: Config, pairs: Sequence[Pair], work: Path) -> list[Measured]:
    """Scores of all pairs, in their order; each is kept in `work` as soon as it is there."""
    from tqdm import tqdm

    from data.workers import Lost, map_isolated
    from metrics.score import Score
    from tasks.pairs import Measured, measure, measures

    kept = [work / f"{key_of(pair)}.json" for pair in pairs]
    found: list[Measured | None] = [read(path) for path in kept]
    left = [place for place, item in enumerate(found) if item is None]
    bar = tqdm(total=len(pairs), initial=len(pairs) - len(left), desc="score", unit="item", disable=None)
    for number, answer in map_isolated(
        measure, [pairs[place] for place in left], config.num_workers, config.max_item_s
    ):
        place = left[number]
        if isinstance(answer, Lost):
            found[place] = Measured(dict.fromkeys(measures(), Score.missing(f"the item {answer.reason}")), "")
        else:
            found[place] = answer
            write_text(kept[place], json.dumps([answer.scores, answer.lips]))
        bar.update()
    bar.close()
    return [item for item in found if item is not None]


def key_of(pair: Pair) -> str:
    """What an item's scores depend on: the content of its files, and how it is measured."""
    files = [None if path is None else sha256(path) for path in (pair.reference, pair.generated)]
    identity = [VERSION, pair.stem, *files, pair.lips.protocol, *weights_of(pair.lips.syncnet, pair.lips.s3fd).values()]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def read(path: Path) -> Measured | None:
    """Scores that an unfinished run kept."""
    from metrics.score import Score
    from tasks.pairs import Measured

    if not path.is_file():
        return None
    scores, lips = cast("tuple[dict[str, tuple[float | None, str]], str]", json.loads(path.read_text(encoding="utf-8")))
    return Measured({name: Score(*score) for name, score in scores.items()}, lips)


def result_of(config: Config, pairs: Sequence[Pair], found: Sequence[Measured]) -> dict[str, Any]:
    """The contract: `metrics.NAME` and `items.STEM.NAME` with value, unit, n, coverage, ci95, convention, missing."""
    from metrics.statistics import bootstrap_mean
    from tasks.pairs import measures

    names = measures()
    metrics: Scores = {}
    items: dict[str, Scores] = {pair.stem: {} for pair in pairs}
    lips = Counter(item.lips for item in found if item.lips)
    for name, kind in names.items():
        convention = kind.convention
        if lips and name in LIP_MEASURES:
            convention += "; " + " or ".join(lips)
        scores = [item.scores[name] for item in found]
        for pair, score in zip(pairs, scores, strict=True):
            items[pair.stem][name] = entry(
                score.value, kind.unit, score.value is not None, 1, None, convention, score.reason
            )
        values = {pair.stem: score.value for pair, score in zip(pairs, scores, strict=True) if score.value is not None}
        interval = bootstrap_mean(list(values.values()), list(values), seed=config.seed)
        ends = None if interval is None or interval.low is None else [interval.low, interval.high]
        why = "; ".join(
            f"{reason} ({count})" for reason, count in Counter(s.reason for s in scores if s.reason).most_common()
        )
        metrics[name] = entry(
            None if interval is None else interval.mean, kind.unit, len(values), len(pairs), ends, convention, why
        )
        metrics[name]["higher_is_better"] = kind.higher_is_better
    return {
        "version": VERSION,
        "reference": str(config.reference),
        "generated": str(config.generated),
        "num_items": len(pairs),
        "weights_sha256": weights_of(config.syncnet, config.s3fd),
        "protocol": config.protocol,
        "seed": config.seed,
        "ci95": "percentile bootstrap over items",
        "metrics": metrics,
        "items": items,
    }


def entry(
    value: float | None,
    unit: str,
    scored: int,
    tried: int,
    ends: Sequence[float | None] | None,
    convention: str,
    why: str,
) -> dict[str, Any]:
    """One number as the result holds it."""
    return {
        "value": value, "unit": unit, "n": int(scored), "coverage": scored / tried,
        "ci95": None if ends is None else list(ends), "convention": convention, "missing": why or None,
    }  # fmt: skip


def as_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Items by scores as a table, names first."""
    names = list(result["metrics"])
    rows = [["item", *names]]
    for stem, scores in result["items"].items():
        cells = [scores[name]["value"] for name in names]
        rows.append([stem, *("" if cell is None else repr(cell) for cell in cells)])
    return rows


def told(result: Mapping[str, Any], out: Path) -> str:
    """The result in a few lines for the terminal."""
    lines: list[str] = []
    for name, found in result["metrics"].items():
        if found["value"] is not None:
            ends = "" if found["ci95"] is None else f" [{found['ci95'][0]:.4g}, {found['ci95'][1]:.4g}]"
            unit = f" {found['unit']}" if found["unit"] else ""
            lines.append(f"{name:>22}  {found['value']:.4f}{unit}{ends}  {found['n']} of {result['num_items']}")
    missing = [name for name, found in result["metrics"].items() if found["value"] is None]
    if missing:
        lines.append(f"{len(missing)} are missing, each with its reason in {out / RESULT}: {', '.join(missing)}")
    return "\n".join([*lines, f"look at {out / PAGE}"]) + "\n"


def render(result: Mapping[str, Any], config: Config) -> str:
    """The page's HTML; films are played from where they lie."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_name("score.html.j2").read_text(encoding="utf-8"))
    films = {
        pair.stem: [path.resolve().as_uri() for path in (pair.reference, pair.generated) if path is not None]
        for pair in pairs_of(config)
    }
    return template.render(result=result, films=films)
