"""One stage of training in this process, alone or as one of several: what it starts from, the loop, the checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from data.conditions import Mode
from data.files import remove, sha256, whole
from data.stage import Stage
from models.running import Running

if TYPE_CHECKING:
    from data.latents import LatentStore
    from data.sampler import Sampler
    from models.families import Family
    from models.saving import Saving
    from models.sft import SupervisedFineTuning
    from tasks.train import Config
    from tasks.watching import Watch

UNUSED = ("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar")
"""What Lightning has and we have of our own."""


def train(config: Config, name: str, known: dict[str, str]) -> None:
    """Train a stage and write its checkpoint; raises as `tasks.train.run`, and when memory runs out.

    Args:
        config: Of the verb.
        name: Of the stage.
        known: Hashes, as `data.files.sha256` has them.
    """
    import torch

    from data.latents import LatentStore
    from models import parallel
    from models.families.tensor_files import widen
    from models.sft import SupervisedFineTuning
    from tasks.watching import Watch

    stage, store = config.stages[name], LatentStore(config.latents)
    start = start_of(config, stage)
    family = family_of(config, stage, start)
    sampler = sampler_of(config.curriculum, store, stage, config.seed)
    running = Running(**{key: getattr(config, key) for key in Running.model_fields})
    module = SupervisedFineTuning(family, stage, config.seed, running, compiled=config.compile_blocks)
    refuse_missing_text(module, store, stage)
    facts = identity(config, name, store, start, known)
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    watch = Watch(config.watch, name, config.base, family, store, facts, key, config.timeout_s)
    work = config.work / name / key[:16]
    if os.environ.get("RANK", "0") == "0":
        keep_last(work)
    fit(
        module,
        sampler,
        store,
        work,
        facts,
        title=name,
        accelerator=config.accelerator,
        save_every=config.save_every,
        keep_states=config.keep_states,
        num_readers=config.num_readers,
        timeout_s=config.timeout_s,
        watch=watch,
    )
    trained = parallel.gathered(module)
    if torch.distributed.is_initialized():  # what follows takes long, and nobody else is needed for it
        torch.distributed.destroy_process_group()
    if module.trainer.is_global_zero:
        family = family_of(config, stage, start)
        found = family.transformer.load_state_dict(trained, strict=False, assign=True)
        if found.unexpected_keys:
            raise RuntimeError(f"{found.unexpected_keys[0]} was trained, and the model has no such weights")
        widen(family.transformer)
        write_checkpoint(config.checkpoints / name, family, module, facts)
        remove(config.work / name)


def start_of(config: Config, stage: Stage) -> Path:
    """Folder of the transformer weights that a stage begins with, in the layout of diffusers.

    Raises:
        ValueError: the stage asks for conditions of two transformers, or continues one of the other.
        RuntimeError: the weights are not there, or the file is not what can be converted.
    """
    from models.families.partitions import partition_for, refuse_other
    from models.families.single_file import weights_folder

    partition = partition_for(config.base, modes_of(stage))
    if stage.start_from is None and config.weights is None:
        return config.base / partition
    if stage.start_from is None:
        return weights_folder(cast(Path, config.weights), config.base, config.converted, partition, config.qkv_layout)
    start = config.checkpoints / stage.start_from
    if not (start / "transformer").is_dir():
        raise RuntimeError(f"no checkpoint in {start}; run `soundstage train {stage.start_from}` first")
    refuse_other(start, partition)
    return start / "transformer"


def family_of(config: Config, stage: Stage, start: Path) -> Family:
    """The model with the weights in `start`, and what the stage trains marked."""
    from models import adapters
    from models.families import load_family
    from models.families.partitions import partition_for

    family = load_family(config.base, partition=partition_for(config.base, modes_of(stage)), weights=start, mapped=True)
    if stage.method == "lora":
        options = {"alpha": stage.lora_alpha, "targets": stage.lora_targets, "modulation": stage.lora_modulation}
        adapters.add(family, stage.lora_rank, config.seed, **cast(Any, options))
    elif stage.freeze_text_side:
        freeze(family)
    if stage.guidance.adapter is not None:
        adapters.assist(family, stage.guidance.adapter)
    return family


def heavy(config: Config, stage: Stage) -> list[Path]:
    """What takes long to hash of all that decides a stage's weights; raises as `start_of`."""
    adapter = stage.guidance.adapter
    return [start_of(config, stage), *([adapter] if adapter and adapter.is_file() else [])]


def identity(config: Config, name: str, store: LatentStore, start: Path, known: dict[str, str]) -> dict[str, Any]:
    """What decides a stage's weights: states and checkpoints of another are of another run."""
    stage = config.stages[name]
    facts: dict[str, Any] = {
        "stage": name,
        "settings": stage.model_dump(mode="json", exclude={"after"}),
        "seed": config.seed,
        "precision": config.precision,
        "latents": store.fingerprint,
        "curriculum_sha256": sha256(config.curriculum),
        "start_sha256": sha256(start, known),
        "schedulers_sha256": [sha256(folder) for folder in sorted(config.base.glob("*scheduler"))],
    }
    if stage.guidance.adapter is not None:
        facts["assistant_sha256"] = sha256(stage.guidance.adapter, known)
    if stage.method == "lora" or stage.freeze_text_side:
        facts["frozen_weights"] = config.frozen_weights
    if stage.plateau is not None:  # which is looked for at readings, and may look at samples
        facts["watched"] = [config.watch.log_every, config.watch.sample_every, config.watch.sample_steps]
    return facts


def keep_last(work: Path) -> None:
    """Leave the states of one other run of the stage beside those in `work`: settings may be changed back."""
    others = [path for path in work.parent.iterdir() if path.is_dir() and path != work] if work.parent.is_dir() else []
    others.sort(key=lambda path: path.stat().st_mtime)
    for old in others[:-1]:
        remove(old)
    if others and not work.is_dir():
        sys.stderr.write(f"train: begins anew with other settings; the states of the run before stay in {others[-1]}\n")


def modes_of(stage: Stage) -> list[Mode]:
    """Conditioning modes that a stage draws."""
    return [mode for mode, share in stage.conditions.items() if share > 0]


def refuse_missing_text(module: SupervisedFineTuning, store: LatentStore, stage: Stage) -> None:
    """See that clips have the text without caption that the objective asks for, in every mode of the stage.

    Raises:
        ValueError: they do not.
    """
    from data.conditions import Variant

    modes = modes_of(stage) if module.needs_bare else []
    for bare in [str(Variant(mode, captioned=False)) for mode in modes]:
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
    if os.environ.get("RANK", "0") == "0":
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
    title: str = "train",
    accelerator: str = "cpu",
    save_every: int = 100,
    keep_states: int = 2,
    num_readers: int = 0,
    timeout_s: float = 2000,
    told: Callable[[], bool] | None = None,
    watch: Watch | None = None,
) -> None:
    """Run the remaining steps under Lightning, saving resumable states in `work`. See `Config` for the options.

    Raises:
        Preempted: it was asked to stop, by a signal or `told`.
        ValueError, RuntimeError: as `models.accelerators.able`.
    """
    import lightning

    from models import parallel
    from models.accelerators import able, number_of
    from models.loading import LatentData
    from models.saving import Saving
    from models.sft import Bar

    local_size, world_size = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    bar, device = (
        Bar(title, module.stage.num_steps, watch.words if watch else dict),
        able(accelerator, module.running),
    )
    saving = Saving(work, facts, save_every, keep_states, told, timeout_s)
    trainer = lightning.Trainer(
        strategy=parallel.strategy_for(module.running, world_size, timeout_s, device),
        accelerator=device.type,
        devices=local_size if (number := number_of(device)) is None else [number],
        num_nodes=world_size // local_size,
        max_epochs=1,
        use_distributed_sampler=False,
        **cast(Any, dict.fromkeys(UNUSED, False)),
        callbacks=[watch, saving, bar, watch.last] if watch else [saving, bar],
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
        pin_memory=device.type != "cpu",
    )
    trainer.fit(module, datamodule=batches)
    raise_if_preempted(saving, title)


def raise_if_preempted(saving: Saving, name: str) -> None:
    """End a run that was asked to stop, and say what it leaves."""
    from models.preemption import Preempted

    if saving.preempted_at is not None:
        state = "its state is saved" if saving.whole else "its state could not be saved in time, the one before holds"
        raise Preempted(f"{name}: asked to stop after step {saving.preempted_at}; {state}; run it again to go on")


def write_checkpoint(folder: Path, family: Family, module: SupervisedFineTuning, facts: dict[str, Any]) -> None:
    """Write weights, adapter, loss curve and identity as one folder, whole or absent.

    Args:
        folder: Of the checkpoint.
        family: Holds what was trained.
        module: Has the loss curve, and why the stage ended before its last step.
        facts: The identity.
    """
    from models import adapters
    from models.families.weights import save_transformer

    stage = module.stage
    adapters.dismiss(family)
    with whole(folder) as temporary:
        temporary.mkdir()
        if stage.method == "lora":
            adapters.save(family, temporary / "pytorch_lora_weights.safetensors", {})
            adapters.merge(family)
        save_transformer(family, temporary / "transformer")
        lines = [json.dumps(row, sort_keys=True) for row in module.curve]
        (temporary / "log.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        record = {
            **facts,
            "method": stage.method,
            "partition": family.partition,
            "num_steps": int(module.curve[-1]["step"]) + 1 if module.curve else 0,
            **({"ended": module.ended} if module.ended else {}),
            "weights_sha256": sha256(temporary / "transformer"),
        }
        (temporary / "checkpoint.json").write_text(
            json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )
