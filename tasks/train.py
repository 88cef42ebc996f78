"""Fine-tune one curriculum stage, from the base model or from the stage before it.

example: soundstage train all
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field

from data.files import remove, sha256, whole, write_text
from data.stage import Stage
from models.running import Running

if TYPE_CHECKING:
    from data.latents import LatentStore
    from data.sampler import Sampler
    from models.families import Family
    from models.sft import SupervisedFineTuning

MICRO_BATCH = "micro_batch"
"""File of a stage's work that holds the micro-batch that memory turned out to allow."""


class Config(Running):
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
    """Lightning accelerator: `auto`, `cpu`, `cuda` or `npu`."""
    stages: dict[str, Stage]
    """The curriculum, in order."""
    save_every: int = Field(default=100, gt=0)
    """Steps between resumable states."""
    keep_states: int = Field(default=2, gt=0)
    """Whole states that stay."""
    num_readers: int = Field(default=0, ge=0)
    """Processes that read the next batches from the latent store; 0 reads between the steps, which is as fast on a CPU."""
    compile_blocks: bool = False
    """Compile the transformer's repeated blocks with torch.compile."""
    timeout_s: float = Field(default=1800, gt=0)
    """How long processes wait for each other before they give up, s."""
    work: Path = Path("data/store/work/train")
    """Resumable states, one folder a stage; kept outside the checkpoint so that DVC never deletes them."""


def run(config: Config, name: str) -> Path:
    """Train stage `name`; returns its checkpoint folder. A killed run continues exactly where it was.

    Out of memory, it goes on from the last state with half the micro-batch and the same global batch.

    Raises:
        ValueError: no such stage, or nothing to train on.
        RuntimeError: inputs are missing, the loss is not finite, or one clip is too much for the device.
    """
    if name not in config.stages:
        raise ValueError(f"no stage {name!r} in train.stages; there are {', '.join(config.stages)}")
    from models.threads import use_one_thread

    use_one_thread()
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # clips of many sizes leave holes
    while True:
        micro_batch = min(config.micro_batch, config.stages[name].batch_size, allowed(config.work / name))
        try:
            return train(config.model_copy(update={"micro_batch": micro_batch}), name)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            halve(config.work / name, micro_batch, error)
        gc.collect()


def train(config: Config, name: str) -> Path:
    """`run` with a micro-batch that need not fit."""
    import torch

    from data.latents import LatentStore
    from models import parallel
    from models.sft import SupervisedFineTuning

    stage, store = config.stages[name], LatentStore(config.latents)
    family = family_of(config, stage)
    sampler = sampler_of(config.curriculum, store, stage, config.seed)
    running = Running(**{key: getattr(config, key) for key in Running.model_fields})
    module = SupervisedFineTuning(family, stage, config.seed, running, compiled=config.compile_blocks)
    refuse_missing_text(module, store, stage)
    facts = identity(config, name, store)
    fit(
        module,
        sampler,
        store,
        config.work / name,
        facts,
        accelerator=config.accelerator,
        save_every=config.save_every,
        keep_states=config.keep_states,
        num_readers=config.num_readers,
        timeout_s=config.timeout_s,
    )
    trained = parallel.gathered(module)
    if module.trainer.is_global_zero:
        family = family_of(config, stage)
        family.transformer.load_state_dict(trained, strict=False)
        write_checkpoint(config.checkpoints / name, family, module, facts)
        remove(config.work / name)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return config.checkpoints / name


def family_of(config: Config, stage: Stage) -> Family:
    """The model that a stage starts from, with what it trains marked.

    Raises:
        RuntimeError: there is no such model.
    """
    from models import adapters
    from models.families import load_family

    family = load_family(config.base)
    if stage.start_from:
        start = config.checkpoints / stage.start_from
        if not (start / "transformer").is_dir():
            raise RuntimeError(f"no checkpoint in {start}; run `soundstage train {stage.start_from}` first")
        family.load_transformer(start / "transformer")
    if stage.method == "lora":
        options = {"alpha": stage.lora_alpha, "targets": stage.lora_targets, "modulation": stage.lora_modulation}
        adapters.add(family, stage.lora_rank, config.seed, **cast(Any, options))
    elif stage.freeze_text_side:
        freeze(family)
    if stage.guidance.adapter is not None:
        adapters.assist(family, stage.guidance.adapter)
    return family


def identity(config: Config, name: str, store: LatentStore) -> dict[str, Any]:
    """What decides a stage's weights: states and checkpoints of another are of another run."""
    stage = config.stages[name]
    start = config.checkpoints / stage.start_from if stage.start_from else config.base
    facts = {
        "stage": name,
        "settings": stage.model_dump(mode="json", exclude={"after"}),
        "seed": config.seed,
        "precision": config.precision,
        "latents": store.fingerprint,
        "curriculum_sha256": sha256(config.curriculum),
        "start_sha256": sha256(start / "transformer"),
    }
    if stage.guidance.adapter is not None:
        facts["assistant_sha256"] = sha256(stage.guidance.adapter)
    return facts


def refuse_missing_text(module: SupervisedFineTuning, store: LatentStore, stage: Stage) -> None:
    """See that clips have the text without caption that the objective asks for, in every mode of the stage.

    Raises:
        ValueError: they do not.
    """
    from data.conditions import Variant

    shares = stage.conditions if module.needs_bare else {}
    for bare in [str(Variant(mode, captioned=False)) for mode, share in shares.items() if share > 0]:
        if bare not in store.text_of:
            raise ValueError(
                f"guidance.form {stage.guidance.form} needs every clip's text without its caption too, and"
                f" {store.folder} does not hold {bare}; set encode.uncaptioned to true, or guidance.form to drift or none"
            )


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
    facts: dict[str, Any],
    *,
    accelerator: str = "cpu",
    save_every: int = 100,
    keep_states: int = 2,
    num_readers: int = 0,
    timeout_s: float = 1800,
) -> None:
    """Run the remaining steps under Lightning, saving resumable states in `work`. See `Config` for the options."""
    import lightning

    from models import parallel
    from models.loading import LatentData
    from models.saving import Saving
    from models.sft import Bar

    local_size, world_size = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    trainer = lightning.Trainer(
        accelerator=accelerator,
        devices=local_size,
        num_nodes=world_size // local_size,
        strategy=parallel.strategy_for(module.running, world_size, timeout_s),
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[Saving(work, facts, save_every, keep_states), Bar(work.name, module.stage.num_steps)],
        deterministic="warn",
    )
    module.train()
    batches = LatentData(
        store,
        sampler,
        module.stage.num_steps,
        num_levels=module.stage.noise.per_update,
        micro_batch=module.running.micro_batch,
        bare=module.needs_bare,
        num_workers=num_readers,
        pin_memory=accelerator == "cuda",
    )
    trainer.fit(module, datamodule=batches)


def write_checkpoint(folder: Path, family: Family, module: SupervisedFineTuning, facts: dict[str, Any]) -> None:
    """Write weights, adapter, loss curve and identity as one folder, whole or absent.

    Args:
        folder: Of the checkpoint.
        family: Holds what was trained.
        module: Has the loss curve.
        facts: The identity.
    """
    from models import adapters

    stage = module.stage
    adapters.dismiss(family)
    with whole(folder) as temporary:
        temporary.mkdir()
        if stage.method == "lora":
            alpha = stage.lora_alpha or stage.lora_rank
            about = {"rank": f"{stage.lora_rank}", "alpha": f"{alpha:g}", "partition": "transformer"}
            adapters.save(family, temporary / "pytorch_lora_weights.safetensors", about)
            adapters.merge(family)
        family.save_transformer(temporary / "transformer")
        lines = [json.dumps(row, sort_keys=True) for row in module.curve]
        (temporary / "log.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        record = {
            **facts,
            "method": stage.method,
            "num_steps": stage.num_steps,
            "weights_sha256": sha256(temporary / "transformer"),
        }
        (temporary / "checkpoint.json").write_text(
            json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )


# -- out of memory -----------------------------------------------------------------------------------------------------


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device, or the host, had no memory left."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def allowed(work: Path) -> int:
    """The micro-batch that an earlier attempt found memory for; a large number where there was none."""
    path = work / MICRO_BATCH
    return int(path.read_text()) if path.is_file() else sys.maxsize


def halve(work: Path, micro_batch: int, error: RuntimeError) -> None:
    """Note half the micro-batch for the next attempt.

    Raises:
        RuntimeError: it is one clip already.
    """
    if micro_batch == 1:
        raise RuntimeError(
            f"out of memory with one clip a device ({str(error).splitlines()[0]}); see `soundstage plan-run` for what"
            " would fit: recompute, strategy fsdp2, offload, shorter or smaller clips"
        ) from error
    write_text(work / MICRO_BATCH, f"{micro_batch // 2}\n")
    sys.stderr.write(f"train: out of memory; micro_batch {micro_batch} -> {micro_batch // 2}, the same global batch\n")
