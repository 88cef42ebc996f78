"""Whole short runs of training in one process or several, as launchers start them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from data.candidates import candidates_of
from data.latents import LatentStore
from data.sampler import Sampler
from data.stage import Stage
from models import adapters, parallel
from models.families import Condition, Family, load_family
from models.families.weights import computes_on
from models.running import Running
from models.samples import undisturbed
from models.sft import PLAIN, SupervisedFineTuning
from tasks import training

PRELOADED = [
    "models.sft",
    "models.families.h3",
    "models.saving",
    "torch.distributed.fsdp",
    "tests.models.training_runs",
]


def stage_of(**changes: Any) -> Stage:
    """Short, with modes mixed and no guidance to preserve."""
    settings: dict[str, Any] = {
        "conditions": {"t2va": 0.5, "fl2va": 0.5}, "num_steps": 20, "batch_size": 3, "learning_rate": 3e-3,
        "warmup_steps": 1, "guidance": {"form": "none"},
    }  # fmt: skip
    return Stage.model_validate(settings | changes)


def run(
    base: Path,
    store_folder: Path,
    work: Path,
    stage: Stage,
    running: dict[str, Any],
    save_every: int = 5,
    kill_at: int | None = None,
    accelerator: str = "cpu",
) -> None:
    """Train in this process, alone or as one of several; the first writes `weights`, `curve` and `device` into `work`.

    The last process kills itself in the forward pass of step `kill_at`. With `sampled` in `running` the end is sampled.
    """
    torch.set_num_threads(1)
    family, store = load_family(base, mapped=running.pop("mapped", False)), LatentStore(store_folder)
    sampled = running.pop("sampled", False)
    if stage.method == "lora":
        adapters.add(family, stage.lora_rank, 0)
    if running.pop("double", True):
        family.transformer.double()
    module = SupervisedFineTuning(family, stage, 0, Running.model_validate(PLAIN.model_dump() | running))
    began = module.on_train_start

    def noting() -> None:
        began()
        if module.trainer.is_global_zero:
            (work / "device").write_text(str(computes_on(module.transformer)))
            with (work / "starts").open("a") as file:
                file.write(f"{cast(Any, module.trainer).datamodule.first_step}\n")

    module.on_train_start = noting
    if sampled:
        module.on_train_end = lambda: sample(module, family, store)
    if kill_at is not None and os.environ["RANK"] == f"{int(os.environ['WORLD_SIZE']) - 1}":
        step = module.training_step

        def killing(item: Any, batch_idx: int) -> Any:
            if item.drawn.step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(item, batch_idx)

        module.training_step = killing
    training.fit(
        module,
        Sampler(candidates_of(store.index), stage, 0),
        store,
        work / "states",
        {"stage": stage.model_dump(mode="json")},
        accelerator=accelerator,
        save_every=save_every,
        timeout_s=120,
    )
    weights = parallel.gathered(module)
    if module.trainer.is_global_zero:
        safetensors.torch.save_file(weights, work / "weights.safetensors")
        (work / "curve.json").write_text(json.dumps(module.curve))


def sample(module: SupervisedFineTuning, family: Family, store: LatentStore) -> None:
    """Generate a clip while training, and see that it is one."""
    row = store.index.row(0)
    with undisturbed(family.transformer), parallel.computing(module.running, module.device):
        made = family.generate(Condition("t2va", store.conditions(row, "t2va")), row.shape, 0, 2)
    assert [latents.device.type for latents in made] == [module.device.type] * 2
    assert all(bool(latents.isfinite().all()) for latents in made)


def result_of(work: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """What `run` wrote."""
    return safetensors.torch.load_file(work / "weights.safetensors"), json.loads((work / "curve.json").read_text())


def together(size: int, work: Callable[..., None], *given: Any) -> None:
    """Run `work` in fresh processes with the environment that torchrun gives its own."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    multiprocessing.set_forkserver_preload(PRELOADED)
    mp.start_processes(joined, (size, port, work, *given), nprocs=size, start_method="forkserver")


def joined(rank: int, size: int, port: int, work: Callable[..., None], *given: Any) -> None:
    """One of the processes."""
    os.environ |= {
        "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "GROUP_RANK": "0", "WORLD_SIZE": f"{size}",
        "LOCAL_WORLD_SIZE": f"{size}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}",
        "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    work(*given)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
