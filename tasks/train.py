"""Fine-tune one curriculum stage, from the base model or from the stage before it.

example: soundstage train all
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Literal

from pydantic import Field

from data.files import sha256, write_text
from data.stage import Stage
from models.running import Running
from tasks.launching import Launch, LocalLauncher, inside, needs_launcher
from tasks.sinks import Watching

MICRO_BATCH = "micro_batch"
"""File of a stage's work that holds the micro-batch that memory turned out to allow."""
HASHES = "SOUNDSTAGE_HASHES"
"""Environment variable that tells processes where to find the hashes that who started them knows."""


class Config(Running):
    """Settings of the train verb."""

    seed: int
    """Decides every batch, noise draw and adapter initialisation."""
    base: Path
    """Model that the first stage starts from, a diffusers folder."""
    weights: Path | None = None
    """Transformer weights instead of those in base: a diffusers folder, an original .safetensors file (converted on
    first use) or a folder of its released shards."""
    qkv_layout: Literal["stacked", "interleaved"] | None = None
    """Row order of fused q/k/v in original MiniMax-H3 weights; null takes `stacked` for a file, as published ones are,
    and `interleaved` for released shards."""
    converted: Path = Path("data/store/work/converted")
    """Folder that converted weights are kept in."""
    latents: Path
    """Latent store that `encode` wrote."""
    curriculum: Path
    """Difficulty of every training clip, from `plan`."""
    checkpoints: Path
    """Folder that gets one checkpoint folder a stage."""
    accelerator: str = "auto"
    """`auto` (the first there is of CUDA, NPU, CPU), `cpu`, `cuda`, `npu`, or one of several: `cuda:1`."""
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
    launch: Launch = Launch()
    """Processes and machines."""
    watch: Watching = Watching()
    """What is watched of a running stage."""
    timeout_s: float = Field(default=2000, gt=0)
    """How long processes wait for each other before they give up, s; on NPUs above HCCL_EXEC_TIMEOUT, 1836."""
    work: Path = Path("data/store/work/train")
    """Resumable states, one folder a stage; kept outside the checkpoint so that DVC never deletes them."""


def run(config: Config, name: str) -> Path:
    """Train stage `name`; returns its checkpoint folder. A killed run continues exactly where it was.

    Out of memory, it goes on from the last state with half the micro-batch and the same global batch.

    Raises:
        ValueError: no such stage, nothing to train on, or conditions of two transformers in one stage.
        RuntimeError: inputs are missing, the loss is not finite, or one clip is too much for the device.
        Preempted: it was asked to stop; run again, it goes on.
    """
    if name not in config.stages:
        raise ValueError(f"no stage {name!r} in train.stages; there are {', '.join(config.stages)}")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # clips of many sizes leave holes
    work = config.work / name
    config = config.model_copy(update={"launch": on_devices(config)})
    if config.weights is not None:  # converted once for all attempts and processes
        from tasks.training import start_of

        config = config.model_copy(update={"weights": start_of(config, config.stages[name])})
    known: dict[str, str] = json.loads(Path(os.environ[HASHES]).read_text()) if HASHES in os.environ else {}
    while True:
        micro_batch = min(config.micro_batch, config.stages[name].batch_size, allowed(work))
        attempt = config.model_copy(update={"micro_batch": micro_batch})
        try:
            if needs_launcher(config.launch):
                start_processes(attempt, name, known)
            else:
                train_here(attempt, name, known)
            return config.checkpoints / name
        except RuntimeError as error:
            if allowed(work) >= micro_batch or inside():  # not for lack of memory, or the launcher's to repeat
                raise
            sys.stderr.write(
                f"train: out of memory; micro_batch {micro_batch} -> {allowed(work)}, the same global batch\n"
            )
            del error
        gc.collect()


def on_devices(config: Config) -> Launch:
    """The launch with `auto` as a number: a process for each device of the accelerator, one on a CPU.

    Raises:
        ValueError, RuntimeError: there is no such accelerator.
    """
    from models.accelerators import count, device_of, number_of

    device = device_of(config.accelerator, "train.accelerator")
    if config.launch.processes_per_node != "auto":
        return config.launch
    return config.launch.model_copy(
        update={"processes_per_node": count(device.type) if number_of(device) is None else 1}
    )


def train_here(config: Config, name: str, known: dict[str, str]) -> None:
    """Train in this process; when memory runs out, note that half the micro-batch is to be tried."""
    from models.threads import use_one_thread
    from tasks.training import train

    use_one_thread()
    try:
        train(config, name, known)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        first = str(error).splitlines()[0]
        if config.micro_batch == 1:
            raise RuntimeError(
                f"out of memory with one clip a device ({first}); see `soundstage plan-run` for what would fit:"
                " recompute, strategy fsdp2, offload, shorter or smaller clips"
            ) from error
        write_text(config.work / name / MICRO_BATCH, f"{config.micro_batch // 2}\n")
        raise RuntimeError(f"out of memory with micro_batch {config.micro_batch}: {first}") from error


def start_processes(config: Config, name: str, known: dict[str, str]) -> None:
    """Train in processes of their own, each with exactly these settings; weights are hashed once for all."""
    from tasks.training import heavy

    for place in heavy(config, config.stages[name]):
        sha256(place, known)
    settings, hashes = (config.work / name / file for file in ("params.json", "hashes.json"))  # YAML too
    write_text(hashes, json.dumps(known))
    write_text(settings, json.dumps({"train": config.model_dump(mode="json")}, indent=1) + "\n")
    command = [sys.executable, "-m", "tasks", "train", name, "--params", str(settings)]
    LocalLauncher().run(command, config.launch, {**os.environ, HASHES: str(hashes)})


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device, or the host, had no memory left."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def allowed(work: Path) -> int:
    """The micro-batch that an earlier attempt found memory for; a large number where there was none."""
    path = work / MICRO_BATCH
    return int(path.read_text()) if path.is_file() else sys.maxsize
