"""What training does to what a model generates: overfitting, a wrong sign, conditions, forgetting, adapters, guidance.

Every experiment goes through `tasks.train.run` on the tiny H3 with the shipped autoencoders, on one thread and from
fixed seeds, and compares what is sampled, not what the loss says. Likeness is PSNR to the clip as the autoencoders give
it back; sound is compared by log-spectral distance and by the correlation of envelopes. All takes about a quarter of an
hour of one core. Example: python -m benchmarks.behaviour wrong_sign forgetting
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.behaviour_runs import (
    VARIANTS,
    ZOO,
    Shot,
    batch_of,
    ended_at,
    fixed_loss,
    random_model,
    sampled,
    stage_of,
    trained,
    tuned,
    write_store,
)
from benchmarks.guidance_runs import SCALE, distilled, kept, noisy_of
from data.conditions import Variant
from data.files import write_text
from data.stage import Stage
from models import adapters, objective
from models.families import Family, load_encoders
from models.flow_matching import velocity
from models.objective import at

RESULTS = Path(__file__).parent / "results" / "behaviour.json"
CLIP = Shot("base", 7, "bounce", copies=4)
FAST = {"learning_rate": 5e-3, "batch_size": 2}
"""For one clip and a transformer that knows nothing; toy rates do not transfer to real models."""
Found = dict[str, dict[str, float]]
"""Measures by name, of every run of an experiment by name."""


def overfit(folder: Path, variants: tuple[str, ...] = VARIANTS[:5], num_steps: int = 250) -> Found:
    """One clip, learned from nothing in each workflow."""
    model = random_model(folder / "model", 0)
    store = write_store(folder / "latents", load_encoders(model), [CLIP], VARIANTS)
    found: Found = {}
    for variant in variants:
        stage = stage_of(conditions={Variant.parse(variant).mode: 1.0}, num_steps=num_steps, **FAST)
        checkpoint = trained(model, store, folder / variant, {"one": stage})["one"]
        before, after = (sampled(tuned(model, which), store, CLIP.name, variant) for which in (None, checkpoint))
        found[variant] = {f"{name}_before": value for name, value in before._asdict().items()}
        found[variant] |= {f"{name}_after": value for name, value in after._asdict().items()}
    return found


def flipped(data: Tensor, noise: Tensor) -> Tensor:
    """The velocity from data towards noise: the wrong way."""
    return -velocity(data, noise)


def wrong_sign(folder: Path, num_steps: int = 250) -> Found:
    """One clip, with the velocity as it is and with its sign flipped: the same curve, another model."""
    model = random_model(folder / "model", 0)
    store = write_store(folder / "latents", load_encoders(model), [CLIP])
    found: Found = {"untrained": sampled(tuned(model), store, CLIP.name, "t2va")._asdict()}
    for name, target in (("right", velocity), ("flipped", flipped)):
        with mock.patch.object(objective, "velocity", target):
            checkpoint = trained(model, store, folder / name, {"one": stage_of(num_steps=num_steps, **FAST)})["one"]
        after = sampled(tuned(model, checkpoint), store, CLIP.name, "t2va")
        found[name] = {"loss_at_the_end": ended_at(checkpoint), **after._asdict()}
    return found


def conditions(folder: Path, num_clips: int = 8) -> Found:
    """The shipped model on clips that it never saw, with their own keyframes and with those of the next one."""
    shots = [Shot("base", 900 + number, "bounce", held_out=True) for number in range(num_clips)]
    store = write_store(folder / "latents", load_encoders(ZOO), shots, ("fl2va",))
    family = tuned(ZOO)
    names = [shot.name for shot in shots]
    pairs = list(zip(names, [*names[1:], names[0]], strict=True))
    own = [sampled(family, store, name, "fl2va").psnr_db for name in names]
    swapped = [sampled(family, store, name, "fl2va", given=other).psnr_db for name, other in pairs]
    gaps = [one - other for one, other in zip(own, swapped, strict=True)]
    return {
        "own keyframes": {"psnr_db": statistics.mean(own)},
        "another clip's": {"psnr_db": statistics.mean(swapped)},
        "gap": {"psnr_db": statistics.mean(gaps), "least_db": min(gaps)},
    }


def forgetting(folder: Path, num_steps: int = 150, num_clips: int = 16) -> Found:
    """A stage on new clips, with and without old ones among them, as seen on old clips that neither saw."""
    old = [Shot("base", 900 + number, "bounce", held_out=True) for number in range(6)]
    replayed = [Shot("base", 30_000 + number, "bounce") for number in range(num_clips)]
    new = [Shot("new", 100 + number, "bounce") for number in range(num_clips)]
    store = write_store(folder / "latents", load_encoders(ZOO), [*old, *replayed, *new], ("fl2va",))

    def measured(family: Family) -> dict[str, float]:
        """Of old clips held out, and of new ones trained on."""
        names = {"old": [shot.name for shot in old], "new": [shot.name for shot in new[:6]]}
        result: dict[str, float] = {}
        for name, entries in names.items():
            result[f"{name}_loss"] = fixed_loss(family, store, entries, "fl2va")
            scores = [sampled(family, store, entry, "fl2va") for entry in entries]
            result |= {f"{name}_psnr_db": statistics.mean(score.psnr_db for score in scores)}
            result |= {f"{name}_lsd_db": statistics.mean(score.lsd_db for score in scores)}
        return result

    stage = stage_of(conditions={"fl2va": 1.0}, mixture={"new": 1.0}, num_steps=num_steps)
    stages = {"alone": stage, "replay": {**stage, "replay_share": 0.4, "replay_groups": ["base"]}}
    checkpoints = trained(ZOO, store, folder, stages)
    found = {name: measured(tuned(ZOO, checkpoint)) for name, checkpoint in checkpoints.items()}
    return {"shipped": measured(tuned(ZOO)), **found}


def adapter(folder: Path, num_steps: int = 120) -> Found:
    """An adapter trained on a new clip: on, merged and off."""
    clip = Shot("new", 100, "bounce", copies=2)
    store = write_store(folder / "latents", load_encoders(ZOO), [clip])
    stage = stage_of(method="lora", num_steps=num_steps, learning_rate=1e-2, batch_size=2)
    checkpoint = trained(ZOO, store, folder, {"one": stage})["one"]
    family = tuned(ZOO)
    adapters.load(family, checkpoint / "pytorch_lora_weights.safetensors")
    family.transformer.eval()
    batch = batch_of(store, [clip.name], "t2va")
    noisy = noisy_of(batch, at(batch, 0.8, 0.6), 0)

    @torch.no_grad()
    def predicted(of: Family) -> Tensor:
        return torch.cat([part.flatten() for part in of.velocities(batch, noisy)])

    base, on, merged = predicted(tuned(ZOO)), predicted(family), predicted(tuned(ZOO, checkpoint))
    before, after = (sampled(tuned(ZOO, which), store, clip.name, "t2va") for which in (None, checkpoint))
    family.transformer.disable_adapters()  # pyright: ignore[reportCallIssue]
    off = predicted(family)
    return {
        "shipped": {"psnr_db": before.psnr_db},
        "on": {"psnr_db": after.psnr_db, "largest_difference_to_shipped": float((on - base).abs().max())},
        "merged": {"largest_difference_to_on": float((merged - on).abs().max())},
        "off": {"largest_difference_to_shipped": float((off - base).abs().max())},
    }


def two_stages(folder: Path, num_steps: int = 120) -> Found:
    """First with the text side frozen, then all of it, lightly: how much of either side changed."""
    model = random_model(folder / "model", 0)
    store = write_store(folder / "latents", load_encoders(model), [CLIP])
    first = stage_of(num_steps=num_steps, freeze_text_side=True, **FAST)
    second = stage_of(num_steps=num_steps // 2, start_from="frozen", **{**FAST, "learning_rate": 2e-3})
    checkpoints = trained(model, store, folder, {"frozen": first, "whole": second})
    found: Found = {"untrained": sampled(tuned(model), store, CLIP.name, "t2va")._asdict()}
    before = tuned(model)
    for name, checkpoint in checkpoints.items():
        after = tuned(model, checkpoint)
        found[name] = sampled(after, store, CLIP.name, "t2va")._asdict() | changed(before, after)
        before = after
    return found


def changed(before: Family, after: Family) -> dict[str, float]:
    """Share of the parameters that differ in any bit, of the text side and of the rest."""
    import re

    old = before.transformer.state_dict()
    sides: dict[str, list[bool]] = {"text_side_changed": [], "rest_changed": []}
    for name, parameter in after.transformer.named_parameters():
        side = "text_side_changed" if re.match(after.text_side, name) else "rest_changed"
        sides[side].append(not torch.equal(parameter.detach(), old[name]))
    return {side: statistics.mean(map(float, found)) for side, found in sides.items()}


def guidance(folder: Path, num_steps: int = 100) -> Found:
    """A distilled model tuned on other clips of its own world, in each form: what is left of the distillation.

    Its own world, because tuning on the other half forgets so much that on old scenes `contrast` loses the guidance
    like `none`, and only `drift` holds some.
    """
    shots = [Shot("base", 30_000 + number, "bounce") for number in range(32)]
    held_out = [Shot("base", 900 + number, "bounce", held_out=True) for number in range(4)]
    others = [Shot("base", 31_000 + number, "bounce") for number in range(16)]
    encoders = load_encoders(ZOO)
    store = write_store(folder / "latents", encoders, [*shots, *held_out])
    other = write_store(folder / "others", encoders, others)
    names = [shot.name for shot in held_out]
    plan = stage_of(num_steps=2 * num_steps, caption_dropout=0.3)
    teacher = trained(ZOO, store, folder / "teacher", {"one": plan})["one"]
    plan = stage_of(num_steps=5 * num_steps // 2)
    student = distilled(ZOO, teacher, store, Stage.model_validate(plan), folder / "student")

    def tuned_by(name: str, **changes: Any) -> Path:
        """The distilled model after a stage on the other clips."""
        stage = stage_of(**{"num_steps": num_steps, "learning_rate": 1e-3, **changes})
        return trained(ZOO, other, folder / name, {"one": stage}, weights=student / "transformer")["one"]

    undoing = tuned_by("undoing", method="lora", learning_rate=5e-3)
    forms: dict[str, dict[str, Any]] = {
        "none": {"form": "none"},
        "contrast": {"form": "contrast", "scale": SCALE},
        "drift": {"form": "drift", "weight": 1.0},
        "assistant": {"form": "assistant", "adapter": undoing / "pytorch_lora_weights.safetensors"},
    }
    found = {name: tuned_by(name, guidance=form) for name, form in forms.items()}
    found = {"teacher": teacher, "distilled": student, **found}
    return {name: kept(ZOO, teacher, which, store, names)._asdict() for name, which in found.items()}


EXPERIMENTS: dict[str, Callable[[Path], Found]] = {
    "overfit": overfit,
    "wrong_sign": wrong_sign,
    "conditions": conditions,
    "forgetting": forgetting,
    "adapter": adapter,
    "two_stages": two_stages,
    "guidance": guidance,
}


def main() -> None:
    """Run experiments, print one line a run, and write all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=", ".join(EXPERIMENTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"experiments": {}}
    for name in options.experiments or EXPERIMENTS:
        with tempfile.TemporaryDirectory() as folder:
            found = EXPERIMENTS[name](Path(folder))
        for run, measures in found.items():
            print(
                f"{name:12} {run:16} " + ", ".join(f"{key} {value:.4g}" for key, value in measures.items()), flush=True
            )
        record["experiments"][name] = found
        record["seed"] = 0
        record["versions"] = {name: version(name) for name in ("torch", "diffusers", "peft", "lightning")}
        RESULTS.parent.mkdir(exist_ok=True)
        write_text(RESULTS, json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
