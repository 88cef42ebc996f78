"""What is probably wrong with a run, told from its curve and its meters: measured value, limit, and what to change.

Each check is a pure function over recorded rows. What no curve can show is not looked for: a flipped velocity trains to
the same loss, and only samples tell.

Bounds on the loss, for latents of variance s² and x = (1 - σ) x₀ + σ ε, target x₀ - ε (see `models.flow_matching`):
    predicting nothing    1 + s²
    the best line in x    s² / ((1 - σ)² s² + σ²), the residual of a linear regression of the target on x
    clean estimate        x₀ = x + σ v, so its error is σ² times the loss, and no optimal estimate gets worse with less
                          noise (Guo, Shamai and Verdú 2005, arXiv cs/0412108: MMSE falls with the signal-to-noise ratio)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, cast

import torch
from torch import Tensor

from models.findings import Finding, Limits
from models.meters import Numbers, slow_ranks

Row = Mapping[str, Any]
MODALITIES = ("video", "audio")
OWN = ("gradient/picture in and out", "gradient/sound in and out")
"""Norms of the projections that serve one modality alone, by `models.families.sketches.Sketch.groups`."""
NUM_BINS = 10
"""Noise levels are judged by tenths."""
MIN_IN_BIN = 5
"""Losses of a bin below which it is not judged."""


# -- at the start ------------------------------------------------------------------------------------------------------


def embedding_shape(found: Sequence[int], num_timesteps: int, width: int) -> list[Finding]:
    """The timestep embedding that AdaLN gets: one row for every distinct timestep, as wide as its projections take."""
    rows = math.prod(found[:-1])
    if (rows, found[-1]) == (num_timesteps, width):
        return []
    return [
        Finding(
            name="AdaLN timestep embedding",
            step=0,
            measured=f"shape {tuple(found)}",
            limit=f"({num_timesteps}, {width})",
            advice="timesteps broadcast or are of another model; check the transformer's time_embed_dim and `base`",
        )
    ]


def watch_embedding(
    model: torch.nn.Module, embedder: str, width: int, tell: Callable[[list[Finding]], object]
) -> torch.utils.hooks.RemovableHandle:
    """Judge the embedding of the first forward pass, and look no further.

    Args:
        model: The transformer.
        embedder: Regular expression of the module that embeds timesteps, one row each.
        width: Features that the projections of AdaLN take.
        tell: Gets what was found.

    Raises:
        ValueError: no module has such a name.
    """
    parts: dict[str, torch.nn.Module] = dict(cast(Any, model).named_modules())
    module = next((part for name, part in parts.items() if re.fullmatch(embedder, name)), None)
    if module is None:
        raise ValueError(f"no module named {embedder} in {type(model).__name__}; its timesteps cannot be watched")

    def hook(_: torch.nn.Module, given: Any, made: Any) -> None:
        handles.pop().remove()
        result = cast(Tensor, made[0] if isinstance(made, tuple) else made)
        tell(embedding_shape(result.shape, math.prod(cast(Tensor, given[0]).shape[:-1]), width))

    handles = [module.register_forward_hook(hook)]
    return handles[0]


# -- from the curve ----------------------------------------------------------------------------------------------------


def best_line(sigma: float, variance: float) -> float:
    """Loss of the best linear prediction from the noised value alone, at a noise level."""
    return variance / ((1 - sigma) ** 2 * variance + sigma**2)


def by_level(rows: Sequence[Row], modality: str) -> dict[int, tuple[float, float]]:
    """Mean noise level and mean loss of each tenth of the noise levels that has enough of both."""
    found: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        sigma, loss = row.get(f"sigma_{modality}"), row.get(f"loss_{modality}")
        if sigma and loss:  # what is given lies at level 0 and has no loss
            found.setdefault(min(int(sigma * NUM_BINS), NUM_BINS - 1), []).append((sigma, loss))
    kept = {number: pairs for number, pairs in sorted(found.items()) if len(pairs) >= MIN_IN_BIN}
    return {number: (fmean(s for s, _ in pairs), fmean(x for _, x in pairs)) for number, pairs in kept.items()}


def noise_schedule(rows: Sequence[Row], limits: Limits) -> list[Finding]:
    """Loss by noise level against what it can be: not above guessing, not flat there, no worse estimate of less noise.

    A row holds one noise level a modality; judge as many rows as fill the bins, of nearly one state of the model.
    """
    step = int(rows[-1]["step"]) if rows else 0
    findings: list[Finding] = []
    for modality in MODALITIES:
        levels = by_level(rows, modality)
        if not levels:
            continue
        nothing = 1 + limits.variance[modality]
        sigma, worst = max(levels.values(), key=lambda pair: pair[1])
        losses = [loss for _, loss in levels.values()]
        spread = max(losses) / min(losses) - 1
        if worst > nothing * limits.bound_margin:
            measured, limit = f"{worst:.3g} at noise level {sigma:.2f}", f"{nothing:.3g}, the error of predicting 0"
            advice = (
                "the velocity's sign, the direction of time or the latents' normalisation is not the model's; check"
                " `base` and the latent store, else lower learning_rate"
            )
        elif len(levels) >= 3 and spread < limits.flat_spread and min(losses) > nothing / limits.bound_margin:
            measured = f"{min(losses):.3g} to {max(losses):.3g} at all {len(levels)} tenths of noise levels"
            limit = f"spread {limits.flat_spread:g} near {nothing:.3g}, the error of predicting 0"
            advice = "the model does not use its input; raise learning_rate, or train more than is frozen now"
        elif broken := _less_noise_is_worse(levels, limits.order_margin):
            (low, low_error), (high, high_error) = broken
            measured = (
                f"error of the clean estimate {low_error:.3g} at noise level {low:.2f}, {high_error:.3g} at {high:.2f}"
            )
            limit = f"{limits.order_margin:g} times that at more noise"
            advice = (
                "noise levels are recorded or told to the model upside down; check sigma against timestep in `base`"
            )
        else:
            continue
        findings.append(
            Finding(name=f"noise schedule, loss_{modality}", step=step, measured=measured, limit=limit, advice=advice)
        )
    return findings


def learned_line(rows: Sequence[Row], limits: Limits) -> list[Finding]:
    """A model that has learned anything of the noise schedule is better than one line for each noise level."""
    step = int(rows[-1]["step"]) if rows else 0
    findings: list[Finding] = []
    for modality in MODALITIES:
        ratios = {
            sigma: (loss, bound)
            for sigma, loss in by_level(rows, modality).values()
            if loss > limits.bound_margin * (bound := best_line(sigma, limits.variance[modality]))
        }
        if ratios:
            sigma, (loss, bound) = max(ratios.items(), key=lambda item: item[1][0] / item[1][1])
            findings.append(
                Finding(
                    name=f"below a line, loss_{modality}",
                    step=step,
                    measured=f"{loss:.3g} at noise level {sigma:.2f}",
                    limit=f"{bound:.3g}, what one factor for each noise level reaches",
                    advice="timestep and noise level may not belong together; check `base`, else raise num_steps or"
                    " learning_rate",
                )
            )
    return findings


def _less_noise_is_worse(
    levels: Mapping[int, tuple[float, float]], margin: float
) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """The worst pair of noise levels, two tenths apart, whose clean estimate has more error at the lower one."""
    errors = {number: (sigma, sigma**2 * loss) for number, (sigma, loss) in levels.items()}
    pairs = [
        (errors[low], errors[high])
        for low in errors
        for high in errors
        if high - low >= 2 and errors[low][1] > margin * errors[high][1]
    ]
    return max(pairs, key=lambda pair: pair[0][1] / pair[1][1], default=None)


def gradient_band(rows: Sequence[Row], limits: Limits) -> list[Finding]:
    """Gradient norms that vanish or explode, by themselves or against the run's own median."""
    norms = [float(row["gradient_norm"]) for row in rows if row.get("gradient_norm") is not None]
    if not norms:
        return []
    step, last = int(rows[-1]["step"]), median(norms[-limits.window :])
    usual = median(norms)
    low = max(limits.gradient_low, usual / limits.gradient_factor if len(norms) > limits.window else 0)
    high = min(limits.gradient_high, usual * limits.gradient_factor if len(norms) > limits.window else math.inf)
    if low <= last <= high:
        return []
    kind, advice = (
        ("vanishing", "raise learning_rate or lora_rank; with fp16, use bf16")
        if last < low
        else ("exploding", "lower learning_rate, or lengthen warmup_steps")
    )
    return [
        Finding(
            name=f"{kind} gradients",
            step=step,
            measured=f"norm {last:.3g}, median of the last {min(len(norms), limits.window)} rows",
            limit=f"{low:.3g} to {high:.3g} (the run's median is {usual:.3g})",
            advice=advice,
        )
    ]


def imbalance(rows: Sequence[Row], limits: Limits) -> list[Finding]:
    """Picture and sound drifting apart: the ratio of their losses, and of gradients where rows have them.

    Each loss's own gradient of the weights that both share would take a second backward pass. What is compared is the
    gradients of the projections in and out, which serve one modality alone; adapters leave them without any.
    """
    findings: list[Finding] = []
    for quantity, names in (("loss", tuple(f"loss_{modality}" for modality in MODALITIES)), ("gradient", OWN)):
        pairs = [
            (float(row[names[0]]), float(row[names[1]])) for row in rows if row.get(names[0]) and row.get(names[1])
        ]
        if len(pairs) < 2 * limits.window:
            continue
        first, last = (_ratio(part) for part in (pairs[: limits.window], pairs[-limits.window :]))
        drift = max(last / first, first / last)
        if drift > limits.drift_factor:
            behind = "sound" if last < first else "picture"
            findings.append(
                Finding(
                    name=f"{quantity} of picture and sound",
                    step=int(rows[-1]["step"]),
                    measured=f"ratio {first:.3g} at first, {last:.3g} now: drifted {drift:.3g} times",
                    limit=f"{limits.drift_factor:g} times",
                    advice=f"the {behind} falls behind; give its loss more weight, or show more clips that have it",
                )
            )
    return findings


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Of the sums: a step's own ratio says more of its noise levels."""
    return sum(left for left, _ in pairs) / sum(right for _, right in pairs)


def no_improvement(rows: Sequence[Row], limits: Limits, num_windows: int = 4) -> list[Finding]:
    """A loss whose last windows are no better than those before them, by more than their scatter.

    Losses count in parts of what a line reaches at their noise level, which takes most of the scatter out.
    """
    findings: list[Finding] = []
    for modality in MODALITIES:
        pairs = [(float(row[f"loss_{modality}"]), row.get(f"sigma_{modality}", 0.0)) for row in rows]
        losses = [loss / best_line(sigma, limits.variance[modality]) for loss, sigma in pairs if loss]
        size = num_windows * limits.window
        if len(losses) < 2 * size:
            continue
        before, after = losses[-2 * size : -size], losses[-size:]
        scatter = math.hypot(*(_standard_error(part) for part in (before, after)))
        if fmean(before) - fmean(after) < 2 * scatter:
            findings.append(
                Finding(
                    name=f"loss_{modality} does not improve",
                    step=int(rows[-1]["step"]),
                    measured=f"{fmean(before):.4g} of what a line reaches, then {fmean(after):.4g}, over {size} rows each",
                    limit=f"a fall of {2 * scatter:.2g}, twice the standard error",
                    advice="look at samples; end the stage (plateau), lower learning_rate, or add data",
                )
            )
    return findings


def _standard_error(values: Sequence[float]) -> float:
    mean = fmean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


# -- from the meters ---------------------------------------------------------------------------------------------------


def usual(readings: Sequence[Numbers], limits: Limits) -> dict[str, float]:
    """Median of each number over the last readings; nothing before there are enough."""
    last = readings[-limits.num_readings :]
    if len(last) < limits.num_readings:
        return {}
    return {name: median(reading[name] for reading in last) for name in last[-1] if all(name in one for one in last)}


def starvation(step: int, numbers: Numbers, limits: Limits) -> list[Finding]:
    """Time that goes into waiting for batches."""
    share = numbers.get("loader_share", 0.0)
    if share <= limits.loader_share:
        return []
    return [
        Finding(
            name="waiting for batches",
            step=step,
            measured=f"{share:.0%} of the time",
            limit=f"{limits.loader_share:.0%}",
            advice="raise num_readers, or bring the latent store nearer",
        )
    ]


def stragglers(step: int, numbers: Numbers, limits: Limits) -> list[Finding]:
    """Processes that all others wait for."""
    return [
        Finding(
            name=f"slow rank {rank}",
            step=step,
            measured=f"{times:.2f} times the median of all processes' own computing",
            limit=f"{limits.straggler_factor:g} times",
            advice="look at its host and device (clocks, temperature, other jobs), or leave it out of the job",
        )
        for rank, times in slow_ranks(numbers, limits.straggler_factor).items()
    ]


def judge(rows: Sequence[Row], readings: Sequence[Numbers], limits: Limits, trained_after: int = 500) -> list[Finding]:
    """All checks over the curve so far and the meters' readings.

    Args:
        rows: Of the curve, from the stage's first step.
        readings: Numbers of the meters, in order.
        limits: What is compared with.
        trained_after: Step from which a model must be better than a line.
    """
    if not rows:
        return []
    step, recent = int(rows[-1]["step"]), rows[-NUM_BINS * limits.window :]
    found = [*noise_schedule(recent, limits), *gradient_band(rows, limits)]
    found += [*imbalance(rows, limits), *no_improvement(rows, limits)]
    if step >= trained_after:
        found += learned_line(recent, limits)
    numbers = usual(readings, limits)
    return [*found, *starvation(step, numbers, limits), *stragglers(step, numbers, limits)]
