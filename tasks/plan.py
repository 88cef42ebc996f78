"""Plan the curriculum: how difficult every training clip is, which stages may draw it, and a picture of both.

example: soundstage plan weights.motion=1 weights.tokens=0
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from data.candidates import candidates_of, eligible
from data.curriculum import Column, Mask, write_planned
from data.difficulty import (
    FEATURES,
    buckets_of,
    correlations,
    difficulty_of,
    feature_ranks,
    hardest,
    measured,
    random_order,
    standardised,
)
from data.files import sha256, write_text
from data.records import Frozen
from data.stage import Stage

if TYPE_CHECKING:
    from data.latents import LatentStore

SCHEMA_VERSION = 1
MAX_TOKEN_CORRELATION = 0.95
"""Beyond it, in size, a curriculum is one of length under another name."""
MIN_CORRELATED = 10
"""Fewest entries whose correlation is worth a warning."""


class LossDraws(Frozen):
    """The fixed set of noise that every training clip's loss is measured on, in mode t2va, each clip alone."""

    base: Path
    """Model that measures, a diffusers folder."""
    checkpoint: Path | None = None
    """Folder of an early checkpoint that `train` wrote, whose transformer takes the place of the base's; null is none.
    DVC must not know it as a dependency: a checkpoint comes after its plan."""
    num_noise: int = Field(default=4, gt=0)
    """Noise levels: the middles of so many equal parts of the noise schedule, before its shift."""
    num_draws: int = Field(default=2, gt=0)
    """Draws of noise at each level; a clip costs `num_noise` forward passes of this batch."""
    seed: int = 0
    """Decides the noise."""
    review_share: float = Field(default=0.01, ge=0, le=1)
    """Share of the entries with the highest loss that is marked for review, rounded up: hard and broken overlap there.
    They are listed and stay eligible."""
    accelerator: str = "cpu"
    """`auto` (the first there is of CUDA, NPU, CPU), `cpu`, `cuda`, `npu`, or one of several: `cuda:1`."""


class Config(Frozen):
    """Settings of the plan verb."""

    clips: Path
    """Table of clips with their measured features, from `cut`."""
    latents: Path
    """Latent store that `encode` wrote; only entries of the split `train` are planned."""
    curriculum: Path
    """Where the table of difficulties goes, a row an entry."""
    picture: Path
    """Where its picture goes, PNG."""
    summary: Path
    """Where coverage of the stages, correlations and entries to review go, JSON."""
    stages: dict[str, Stage]
    """The stages of `train`, in order: what they may draw is checked here."""
    weights: dict[str, float] = Field(
        default_factory=lambda: {
            "motion": 0.4, "tokens": 0.2, "cuts": 0.1, "caption": 0.1, "sound": 0.1, "quality": 0.1,
        }
    )  # fmt: skip
    """Share of each feature's rank in the difficulty, by judgement; unnamed ones weigh nothing, and those of features
    that an entry lacks fall to its others. Features: motion, tokens, cuts, caption, sound, sync, quality, loss."""
    loss: LossDraws | None = None
    """Measure the loss of every clip, for `weights.loss` and for review; null measures none."""
    order: Literal["curriculum", "random"] = "curriculum"
    """`random` is the control: difficulty is a random rank inside each bucket, and features are measured all the same."""
    seed: int = 0
    """Decides the random order."""
    allow_uncovered: bool = False
    """Accept training entries that no stage may ever draw."""
    work: Path = Path("data/store/work/plan")
    """Losses already measured, a file a model and set of noise: other weights ask the model nothing again."""

    @model_validator(mode="after")
    def _weighs_something(self) -> Config:
        if unknown := sorted(set(self.weights) - set(FEATURES)):
            raise ValueError(f"weights.{unknown[0]}: no such feature; there are {', '.join(FEATURES)}")
        if min(self.weights.values(), default=0) < 0 or sum(self.weights.values()) <= 0:
            raise ValueError(f"weights {self.weights}: none may be below 0, and not all 0")
        if self.weights.get("loss", 0) > 0 and self.loss is None:
            raise ValueError("weights.loss needs plan.loss, which says what measures it")
        return self


class Plan(NamedTuple):
    """What was found of the training entries, one value an entry."""

    index: Any
    """Their rows of the latent store's index, sorted by entry."""
    buckets: list[str]
    codes: NDArray[np.int64]
    ranks: dict[str, Column]
    difficulty: Column
    loss: Column
    """Mean z-score of the loss."""
    review: Mask
    rho: NDArray[np.float64]
    """Correlations of the features and, last, the difficulty."""
    weights_sha256: str | None
    """Of the transformer that measured the loss."""


def run(config: Config) -> dict[str, Any]:
    """Write the difficulty of every training entry and what the stages make of it; returns the summary.

    Raises:
        ValueError: there is no training entry, or an entry that no stage may draw.
        RuntimeError: the latent store or the model is missing.
    """
    from data.latents import LatentStore
    from tasks.plan_picture import Entries, draw

    store = LatentStore(config.latents)
    plan = planned(config, store)
    candidates = candidates_of(store.index, planned_table(plan))
    may = {name: eligible(candidates, stage) for name, stage in config.stages.items()}
    stages = {name: drawn for name, (drawn, _) in may.items()}
    replayed = {name: int(np.count_nonzero(again)) for name, (_, again) in may.items()}
    uncovered = refuse_uncovered(config, plan, stages)
    texts = {name: plan.index[name] for name in ("entry", "clip_id", "source_id", "group")}
    texts["bucket"] = bucket_names(plan)
    write_planned(config.curriculum, texts, plan.ranks | {"difficulty": plan.difficulty}, plan.review)
    facts = summary(config, plan, stages, replayed, uncovered) | {"latents": store.fingerprint}
    write_text(config.summary, json.dumps(facts, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    drawn = Entries(plan.index["group"].to_pylist(), plan.ranks, plan.difficulty, plan.review)
    draw(config.picture, drawn, config.stages, stages, plan.rho)
    sys.stderr.write(said(facts))
    return facts


def planned(config: Config, store: LatentStore) -> Plan:
    """Ranks and difficulty of every training entry."""
    import pyarrow as pa
    import pyarrow.compute as pc

    arrow, compute = cast(Any, pa), cast(Any, pc)
    table = store.index.table
    table = table.append_column("place", arrow.array(np.arange(len(table))))
    index = table.filter(compute.equal(table["split"], "train")).sort_by("entry")
    if not len(index):
        raise ValueError(f"{config.latents} has no entry of the split train among {len(table)}")
    buckets, codes = buckets_of(index)
    columns = measured(index, config.clips)
    loss, broken, weights = np.full(len(index), np.nan), np.zeros(len(index), np.bool_), None
    if config.loss is not None:
        losses_NML, weights = measured_losses(config.loss, config.work, store, index["place"].to_pylist())
        loss, broken = standardised(losses_NML, codes), np.isinf(losses_NML).any((1, 2))
    ranks = feature_ranks(columns | {"loss": loss}, codes)
    ordered = config.order == "curriculum"
    difficulty = difficulty_of(ranks, config.weights, codes) if ordered else random_order(codes, config.seed)
    difficulty = np.round(difficulty, 6)
    review = broken | hardest(loss, config.loss.review_share if config.loss else 0.0)
    rho = correlations(ranks | {"difficulty": difficulty}, codes)
    return Plan(index, buckets, codes, ranks, difficulty, loss, review, rho, weights)


def measured_losses(
    draws: LossDraws, work: Path, store: LatentStore, places: list[int]
) -> tuple[NDArray[np.float64], str]:
    """Loss of every entry by modality and noise level, from the model or an earlier run, and the hash of its weights.

    Raises:
        RuntimeError: there is no such model, checkpoint or accelerator.
    """
    from data.latents import fingerprint_of
    from models.accelerators import device_of
    from models.difficulty import VERSION, losses_of_all
    from models.families import load_family
    from models.families.weights import load_transformer
    from models.threads import use_one_thread

    use_one_thread()
    device = device_of(draws.accelerator, "plan.loss.accelerator")
    family = load_family(draws.base, device=str(device))
    folder = (draws.checkpoint or draws.base) / "transformer"
    if not folder.is_dir():
        raise RuntimeError(
            f"no transformer in {folder.parent}; run `soundstage train` first, or set plan.loss.checkpoint"
        )
    if draws.checkpoint is not None:
        load_transformer(family, folder)
    counts = (draws.num_noise, draws.num_draws, draws.seed)
    weights = sha256(folder)
    identity = fingerprint_of([VERSION, weights, device.type, *counts])
    remembered = work / f"losses-{identity[:16]}.jsonl"
    return losses_of_all(family, store, places, *counts, remembered), weights


def planned_table(plan: Plan) -> Any:
    """What the sampler reads of the curriculum."""
    import pyarrow as pa

    names = ("entry", "group")
    columns = {name: plan.index[name] for name in names} | {"difficulty": plan.difficulty}
    return cast(Any, pa).table(columns)


def bucket_names(plan: Plan) -> Any:
    """Name of each entry's bucket, as an Arrow array."""
    import pyarrow as pa

    arrow = cast(Any, pa)
    return arrow.DictionaryArray.from_arrays(plan.codes, plan.buckets).cast(arrow.string())


def refuse_uncovered(config: Config, plan: Plan, stages: dict[str, Mask]) -> NDArray[np.int64]:
    """Places of entries that no stage may draw.

    Raises:
        ValueError: there is one, and `allow_uncovered` is not set.
    """
    drawn = np.any(list(stages.values()), axis=0) if stages else np.zeros(len(plan.difficulty), np.bool_)
    uncovered = np.flatnonzero(~drawn)
    if len(uncovered) and not config.allow_uncovered:
        first = plan.index.slice(int(uncovered[0]), 1).to_pylist()[0]
        raise ValueError(
            f"{len(uncovered)} of {len(drawn)} training entries can be drawn by none of the stages"
            f" {', '.join(config.stages) or '(none)'}; first {first['entry']} (difficulty"
            f" {plan.difficulty[uncovered[0]]:g}, group {first['group']!r}, canvas {first['canvas']},"
            f" {first['num_frames'] / first['frame_rate']:.3f} s, variants {', '.join(first['variants'])}); widen"
            " difficulty, mixture, canvases, max_duration_s, conditions or replay_groups of a stage, or set"
            " plan.allow_uncovered=true"
        )
    return uncovered


def summary(
    config: Config, plan: Plan, stages: dict[str, Mask], replayed: dict[str, int], uncovered: NDArray[np.int64]
) -> dict[str, Any]:
    """The facts of a plan, without paths and clocks: same inputs, same text."""
    names = [*plan.ranks, "difficulty"]
    by_tokens = rounded(float(plan.rho[names.index("difficulty"), names.index("tokens")]))
    present = {name: int(np.count_nonzero(~np.isnan(plan.ranks[name]))) for name in FEATURES}
    entries = plan.index["entry"]
    draws = config.loss and config.loss.model_dump(mode="json", exclude={"base", "checkpoint", "accelerator"})
    return {
        "schema_version": SCHEMA_VERSION,
        "num_entries": len(plan.codes),
        "buckets": by_bucket(plan, np.ones(len(plan.codes), np.bool_)),
        "order": config.order,
        "seed": config.seed if config.order == "random" else None,
        "weights": config.weights,
        "features": {
            name: {"present": present[name], "weight": config.weights.get(name, 0.0), "definition": feature.definition}
            for name, feature in FEATURES.items()
        },
        "loss": draws and {**draws, "weights_sha256": plan.weights_sha256},
        "correlations": {
            "definition": "Spearman's rho inside buckets, over the entries that have both; null below 3 of them",
            "names": names,
            "rho": [[rounded(float(value)) for value in row] for row in plan.rho],
        },
        "difficulty_against_tokens": {"rho": by_tokens, "limit": MAX_TOKEN_CORRELATION},
        "stages": {
            name: {"replayed": replayed[name], **stage_facts(plan, config.stages[name], mask)}
            for name, mask in stages.items()
        },
        "uncovered": [entries[int(place)].as_py() for place in uncovered],
        "review": [
            {"entry": entries[int(place)].as_py(), "loss_z": rounded(float(plan.loss[place]))}
            for place in sorted(
                np.flatnonzero(plan.review), key=lambda place: -np.nan_to_num(plan.loss[place], nan=np.inf)
            )
        ],
        "warnings": warnings_of(config, by_tokens, present, stages),
    }


def warnings_of(config: Config, by_tokens: float | None, present: dict[str, int], stages: dict[str, Mask]) -> list[str]:
    """What a reader should know before training by this plan."""
    found: list[str] = []
    if by_tokens is not None and abs(by_tokens) > MAX_TOKEN_CORRELATION and present["tokens"] >= MIN_CORRELATED:
        found.append(
            f"difficulty and token count correlate with rho = {by_tokens:.3f}, limit {MAX_TOKEN_CORRELATION}: this"
            " curriculum mostly rediscovers length; lower weights.tokens, or say so"
        )
    for name, weight in config.weights.items():
        if weight > 0 and not present[name]:
            found.append(f"weights.{name} = {weight:g} has no effect: no training entry has {name} measured")
    found += [f"stage {name} may draw no training entry at all" for name, mask in stages.items() if not mask.any()]
    return found


def stage_facts(plan: Plan, stage: Stage, mask: Mask) -> dict[str, Any]:
    """What one stage may draw."""
    count = int(np.count_nonzero(mask))
    return {
        "eligible": count,
        "by_bucket": by_bucket(plan, mask),
        "difficulty": list(stage.difficulty),
        "pacing": stage.pacing,
        "num_steps": stage.num_steps,
        "coverage": rounded(count / len(mask)),
        "max_draws_per_entry": rounded(stage.num_steps * stage.batch_size / count) if count else None,
    }


def by_bucket(plan: Plan, mask: Mask) -> dict[str, int]:
    """Entries of a mask in every bucket."""
    counts = np.bincount(plan.codes[mask], minlength=len(plan.buckets))
    return dict(zip(plan.buckets, counts.tolist(), strict=True))


def rounded(value: float) -> float | None:
    """Six digits; None for what is no number."""
    return round(value, 6) + 0.0 if np.isfinite(value) else None


def said(facts: dict[str, Any]) -> str:
    """What the terminal is told."""
    stages = ", ".join(f"{name} {stage['eligible']}" for name, stage in facts["stages"].items())
    first = (
        f"plan: {facts['num_entries']} training entries in {len(facts['buckets'])} buckets, {facts['order']} order;"
        f" eligible by stage: {stages}; {len(facts['uncovered'])} uncovered, {len(facts['review'])} to review"
    )
    return "\n".join([first, *(f"plan: warning: {text}" for text in facts["warnings"])]) + "\n"
