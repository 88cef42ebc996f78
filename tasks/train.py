"""Fine-tune one curriculum stage, from the base model or from the stage before it.

example: soundstage train all
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field

from data.files import remove, sha256, whole
from data.records import Frozen
from data.stage import Stage

if TYPE_CHECKING:
    from data.latents import LatentStore
    from data.sampler import Sampler
    from models.families import Family
    from models.sft import SupervisedFineTuning


class Config(Frozen):
    """Settings of the train verb."""

    seed: int
    """Decides every batch, noise draw and adapter initialisation."""
    base: Path
    """Model that the first stage starts from, a diffusers folder."""
    latents: Path
    """Latent store that `encode` wrote."""
    curriculum: Path
    """Difficulty of every training clip, from `plan`."""
    checkpoints: Path
    """Folder that gets one checkpoint folder a stage."""
    accelerator: str = "auto"
    """Lightning accelerator: `auto`, `cpu` or `cuda`."""
    stages: dict[str, Stage]
    """The curriculum, in order."""
    save_every: int = 100
    """Steps between resumable states."""
    num_readers: int = Field(default=0, ge=0)
    """Processes that read the next batches from the latent store; 0 reads between the steps, which is as fast on a CPU."""
    work: Path = Path("data/store/work/train")
    """Resumable states, one folder a stage; kept outside the checkpoint so that DVC never deletes them."""


def run(config: Config, name: str) -> Path:
    """Train stage `name`; returns its checkpoint folder. A killed run continues exactly where it was.

    Raises:
        ValueError: no such stage, nothing to train on, or conditions of two transformers in one stage.
        RuntimeError: inputs are missing, or the loss is not finite.
    """
    if name not in config.stages:
        raise ValueError(f"no stage {name!r} in train.stages; there are {', '.join(config.stages)}")
    from data.latents import LatentStore
    from models import adapters
    from models.families import load_family
    from models.families.partitions import partition_for, refuse_other
    from models.sft import SupervisedFineTuning
    from models.threads import use_one_thread

    use_one_thread()
    stage = config.stages[name]
    store = LatentStore(config.latents)
    partition = partition_for(config.base, [mode for mode, share in stage.conditions.items() if share > 0])
    family = load_family(config.base, partition=partition)
    start = config.checkpoints / stage.start_from if stage.start_from else None
    if start is not None:
        if not (start / "transformer").is_dir():
            raise RuntimeError(f"no checkpoint in {start}; run `soundstage train {stage.start_from}` first")
        refuse_other(start, partition)
        family.load_transformer(start / "transformer")
    if stage.method == "lora":
        adapters.add(family, stage.lora_rank, config.seed)
    elif stage.freeze_text_side:
        freeze(family)
    sampler = sampler_of(config.curriculum, store, stage, config.seed)
    module = SupervisedFineTuning(family, stage, config.seed)
    identity = {
        "stage": name,
        "settings": stage.model_dump(exclude={"after"}),
        "seed": config.seed,
        "latents": store.fingerprint,
        "curriculum_sha256": sha256(config.curriculum),
        "start_sha256": sha256(start / "transformer" if start else config.base / partition),
    }
    fit(module, sampler, store, config.work / name, identity, config.accelerator, config.save_every, config.num_readers)
    write_checkpoint(config.checkpoints / name, family, module, identity)
    remove(config.work / name)
    return config.checkpoints / name


def sampler_of(curriculum: Path, store: LatentStore, stage: Stage, seed: int) -> Sampler:
    """What a stage draws, and how much of it, said before the first step.

    Raises:
        ValueError: the curriculum is of other latents, or the stage asks for what they do not have.
    """
    import pyarrow.parquet as pq

    from data.candidates import candidates_of
    from data.sampler import Sampler

    if not curriculum.is_file():
        raise RuntimeError(f"no curriculum in {curriculum}; run `soundstage plan` first")
    table = cast(Any, pq).read_table(curriculum, columns=["entry", "group", "difficulty"])
    sampler = Sampler(candidates_of(store.index, table), stage, seed)
    found = sampler.coverage(stage.num_steps)
    sys.stderr.write(
        f"train: {found.drawn} of {found.clips} clips are drawn in {stage.num_steps} steps, {found.most} times at most\n"
    )
    return sampler


def freeze(family: Family) -> None:
    """Leave the parameters that take the text in as they are."""
    for name, parameter in family.transformer.named_parameters():
        if re.match(family.text_side, name):
            parameter.requires_grad = False


def fit(
    module: SupervisedFineTuning,
    sampler: Sampler,
    store: LatentStore,
    work: Path,
    identity: dict[str, Any],
    accelerator: str,
    save_every: int,
    num_readers: int = 0,
) -> None:
    """Run the remaining steps under Lightning, saving resumable states in `work`."""
    import lightning

    from models.loading import LatentData
    from models.resume import States
    from models.sft import Bar

    states = States(work, identity, every=save_every)
    state = states.latest()
    first_step = states.step_of(state) if state else 0
    trainer = lightning.Trainer(
        accelerator=accelerator,
        devices=1,
        max_steps=module.stage.num_steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[states, Bar(work.name, first_step, module.stage.num_steps)],
        deterministic="warn",
    )
    module.train()
    batches = LatentData(
        store, sampler, first_step, module.stage.num_steps, num_workers=num_readers, pin_memory=accelerator == "cuda"
    )
    trainer.fit(module, datamodule=batches, ckpt_path=str(state) if state else None, weights_only=True)


def write_checkpoint(folder: Path, family: Family, module: SupervisedFineTuning, identity: dict[str, Any]) -> None:
    """Write weights, adapter, loss curve and identity as one folder, whole or absent."""
    from models import adapters

    settings = module.stage
    with whole(folder) as temporary:
        temporary.mkdir()
        if settings.method == "lora":
            facts = {"rank": str(settings.lora_rank), "alpha": str(settings.lora_rank)}
            adapters.save(family, temporary / "pytorch_lora_weights.safetensors", facts)
            adapters.merge(family)
        family.save_transformer(temporary / "transformer")
        lines = [json.dumps(row, sort_keys=True) for row in module.curve]
        (temporary / "log.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        record = {
            **identity,
            "method": settings.method,
            "partition": family.partition,
            "num_steps": settings.num_steps,
            "weights_sha256": sha256(temporary / "transformer"),
        }
        (temporary / "checkpoint.json").write_text(
            json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )
