"""Say before a cluster is booked what a stage takes of memory, time and disk, from the model's configuration alone.

example: soundstage plan-run all devices=[8,64] height=768 width=1344 duration_s=5.2
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from data.conditions import Mode
from data.files import write_text
from data.stage import Stage
from models.budget import Setup
from models.running import Running
from tasks.run_costs import GB, Clip, Cost, Machine

if TYPE_CHECKING:
    from models.budget import Parameters
    from models.families.sketches import Sketch

PEAK_TFLOPS = {"bf16": 989.0, "fp16": 989.0, "fp32": 494.0, "fp8": 1979.0}
"""Of an H100 SXM, dense; fp32 with TF32. Source: NVIDIA's H100 data sheet, whose figures with sparsity are twice these."""


class Config(Running):
    """Settings of the plan-run verb."""

    base: Path
    """Model, a diffusers folder; its configuration files are enough."""
    stages: dict[str, Stage]
    """The curriculum."""
    latents: Path
    """Latent store; where there is one, the stage is planned for the longest clip in it."""
    plan: Path
    """Gets the plan as JSON."""
    picture: Path
    """Gets memory by part as a picture, `.png` or `.svg`."""
    devices: tuple[int, ...] = Field(default=(1, 8, 64), min_length=1)
    """Numbers of devices to plan for."""
    height: int | None = Field(default=None, gt=0)
    """Of the clips, px; null takes them from `latents`."""
    width: int | None = Field(default=None, gt=0)
    """Of the clips, px."""
    duration_s: float | None = Field(default=None, gt=0)
    """Of the clips, s."""
    mode: Mode | None = None
    """Conditioning mode to plan for; null is the one of the stage with most rows."""
    text_tokens: int = Field(default=256, gt=0)
    """Rows of text of a clip that is not in `latents`."""
    method: Literal["full", "lora"] | None = None
    """Another method than the stage's."""
    lora_rank: int | None = Field(default=None, gt=0)
    """Another rank than the stage's."""
    ema: bool | None = None
    """Another choice than the stage's `ema_decay`."""
    guidance: Literal["none", "contrast", "drift"] | None = None
    """Another form of guidance preservation than the stage's."""
    device_memory_gb: float = Field(default=80, gt=0)
    """Memory of a device, GB of 10^9 bytes."""
    reserve_gb: float = Field(default=4, ge=0)
    """Set aside of it for driver, collectives and fragments, GB; an estimate."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Of a device in this precision, TFLOP/s; null is an H100's without sparsity: 989 (bf16, fp16), 494 (fp32), 1979 (fp8)."""
    utilisation: float = Field(default=0.4, gt=0, le=1)
    """Share of the peak that is reached, recomputation counted as work."""
    interconnect_gb_s: float = Field(default=100, gt=0)
    """Bus bandwidth of collectives a device, GB/s, as nccl-tests prints it; a guess until it is measured."""
    keep_states: int = Field(default=2, gt=0)
    """States to resume from that are kept, as `train` does."""

    @model_validator(mode="after")
    def _is_whole(self) -> Config:
        size = {"height": self.height, "width": self.width, "duration_s": self.duration_s}
        missing = [name for name, value in size.items() if value is None]
        if missing and len(missing) < len(size):
            raise ValueError(f"height, width and duration_s go together; {', '.join(missing)} is not set")
        if min(self.devices) < 1:
            raise ValueError(f"devices = {list(self.devices)}; each must be at least 1")
        return self


def run(config: Config, name: str) -> Path:
    """Plan stage `name`; prints the plan and returns its file.

    Raises:
        ValueError: no such stage, or no size to plan for.
        RuntimeError: there is no model.
    """
    if name not in config.stages:
        raise ValueError(f"no stage {name!r} in plan-run.stages; there are {', '.join(config.stages)}")
    from models.budget import disk
    from models.families.sketches import sketch_of
    from tasks.plan_run_picture import draw
    from tasks.run_costs import Planner

    stage, sketch = config.stages[name], sketch_of(config.base)
    clip, setup = clip_for(config, sketch, stage), setup_for(config, stage, sketch)
    machine = machine_for(config, stage)
    planner = Planner(sketch, clip, machine)
    parameters = planner.parameters(setup)
    costs = [planner.cost(setup, devices) for devices in config.devices]
    written = disk(parameters, setup)
    written["states kept"] = config.keep_states * written["state"]
    if config.latents.is_dir():
        written["latents"] = sum(path.stat().st_size for path in config.latents.rglob("*") if path.is_file())
    facts = {"stage": name, "family": sketch.name, "clip": clip_record(clip), "setup": setup.model_dump()}
    numbers = {
        "total": parameters.count(),
        "trainable": parameters.count(trainable=True),
        "groups": parameters.by_group(),
    }
    rest = {"machine": machine.model_dump(), "parameters": numbers, "disk_bytes": written}
    record = {**facts, **rest, "costs": [cost.model_dump() for cost in costs]}
    write_text(config.plan, json.dumps(record, indent=1) + "\n")
    draw(config.picture, f"{name}: {sketch.name}, {words(setup)}", costs, config.device_memory_gb)
    sys.stdout.write(described(name, sketch.name, clip, setup, parameters, costs, written, config))
    return config.plan


def clip_for(config: Config, sketch: Sketch, stage: Stage) -> Clip:
    """The clip to plan for: of the size that is set, or the longest that the stage may draw.

    Raises:
        ValueError: neither is there.
    """
    from data.latents import RECORD
    from tasks.run_costs import clip_of_size, largest_clip

    modes: list[Mode] = [mode for mode, share in stage.conditions.items() if share > 0]
    modes = [config.mode] if config.mode else modes
    if config.height and config.width and config.duration_s:
        return clip_of_size(sketch, (config.duration_s, config.height, config.width), modes, config.text_tokens)
    if not (config.latents / RECORD).is_file():
        raise ValueError(f"there are no latents in {config.latents} to take a size from; set height, width, duration_s")
    only = stage.model_copy(update={"conditions": dict.fromkeys(modes, 1 / len(modes))})
    return largest_clip(sketch, config.latents, only)


def setup_for(config: Config, stage: Stage, sketch: Sketch) -> Setup:
    """How the stage is run: its own method, unless another is asked for."""
    method = config.method or stage.method
    options = {name: getattr(config, name) for name in Running.model_fields}
    form = stage.guidance.form
    if form == "family":
        form = "contrast" if sketch.guidance_scale > 1 else "none"
    return Setup(
        **options,
        ema=config.ema if config.ema is not None else stage.ema_decay is not None,
        guidance=config.guidance or ("none" if form == "assistant" else form),
        method=method,
        lora_rank=config.lora_rank or stage.lora_rank,
        freeze_text_side=stage.freeze_text_side and method == "full",
    )


def machine_for(config: Config, stage: Stage) -> Machine:
    """The devices, and the stage's share of work."""
    return Machine(
        memory_gb=config.device_memory_gb,
        reserve_gb=config.reserve_gb,
        peak_tflops=config.peak_tflops or PEAK_TFLOPS[config.precision],
        utilisation=config.utilisation,
        interconnect_gb_s=config.interconnect_gb_s,
        batch_size=stage.batch_size,
        num_steps=stage.num_steps,
    )


def clip_record(clip: Clip) -> dict[str, Any]:
    """A clip as JSON."""
    named = {name: list(size) for name, size in clip.sizes.items()}
    return {**clip._asdict(), "shape": clip.shape.model_dump(), "sizes": named}


def words(setup: Setup) -> str:
    """How a stage is run, in words."""
    what = f"LoRA rank {setup.lora_rank}" if setup.method == "lora" else "full tuning"
    extras = {
        "frozen text side": setup.freeze_text_side,
        "offload": setup.offload,
        "EMA": setup.ema,
        f"guidance {setup.guidance}": setup.guidance != "none",
        "frozen weights in fp32": setup.method == "lora" and setup.frozen_weights == "fp32",
    }
    chosen = [text for text, used in extras.items() if used]
    plain = f"{what}, {setup.strategy}, {setup.precision}, recompute {setup.recompute}, micro-batch {setup.micro_batch}"
    return ", ".join([plain, *chosen])


def described(
    name: str,
    family: str,
    clip: Clip,
    setup: Setup,
    parameters: Parameters,
    costs: Sequence[Cost],
    written: Mapping[str, int],
    config: Config,
) -> str:
    """The plan as text: who and what, a table with a column a number of devices, what to change."""
    shape, whole = clip.shape, parameters.count()
    groups = ", ".join(f"{group} {size / whole:.1%}" for group, size in parameters.by_group().items())
    lines = [
        f"stage {name}: {family}, {words(setup)}",
        f"clip: {shape.width}x{shape.height} px, {shape.num_frames} frames, {clip.mode}, {clip.num_rows:,} rows: {clip.origin}",
        f"parameters: {whole:,}, trained {parameters.count(trainable=True):,}; {groups}",
        "",
        *table(costs, config),
        "",
    ]
    lines += [
        f"devices={cost.devices}: would fit with {cost.remedy or 'no setting that is known here'}"
        for cost in costs
        if not cost.fits
    ]
    listed = ", ".join(f"{what} {gigabytes(size)} GB" for what, size in written.items())
    lines += [f"disk: {listed} ({config.keep_states} states, one more while one is written)"]
    return "\n".join([*lines, f"written: {config.plan}, {config.picture}"]) + "\n"


def gigabytes(size: int) -> str:
    """Bytes as GB, small ones to two digits."""
    return f"{size / GB:,.2f}" if size >= GB / 10 or size == 0 else f"{size / GB:.2g}"


def table(costs: Sequence[Cost], config: Config) -> list[str]:
    """Lines of the table, right-aligned."""
    rows = [("devices", [str(cost.devices) for cost in costs])]
    rows += [
        (f"{part}, GB", [gigabytes(cost.memory_bytes[part]) for cost in costs])
        for part in costs[0].memory_bytes
        if any(cost.memory_bytes[part] for cost in costs)
    ]
    rows += [
        ("total, GB", [gigabytes(cost.total_bytes) for cost in costs]),
        (f"fits {config.device_memory_gb:g} GB", ["yes" if cost.fits else "NO" for cost in costs]),
    ]
    if any(cost.host_bytes for cost in costs):
        rows.append(("host memory a device, GB", [gigabytes(cost.host_bytes) for cost in costs]))
    rows += [
        ("clips a step", [str(cost.clips_per_step) for cost in costs]),
        ("TFLOP a step and device", [f"{cost.flops_per_step / 1e12:,.3f}" for cost in costs]),
        ("computing, s", [f"{cost.compute_s:,.4g}" for cost in costs]),
        ("sent a step and device, GB", [gigabytes(sum(cost.communication_bytes.values())) for cost in costs]),
        ("communication, s", [f"{cost.communication_s:,.4g}" for cost in costs]),
        ("of computing", [f"{cost.communication_s / cost.compute_s:.1%}" for cost in costs]),
        ("step, s", [f"{cost.step_s:,.4g}" for cost in costs]),
        ("clips a second", [f"{cost.clips_per_s:,.4g}" for cost in costs]),
        ("hours", [f"{cost.hours:,.2f}" for cost in costs]),
        ("device hours", [f"{cost.device_hours:,.2f}" for cost in costs]),
    ]
    widths = [max(len(cells[place]) for _, cells in rows) for place in range(len(costs))]
    left = max(len(title) for title, _ in rows)
    return [
        f"{title:<{left}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for title, cells in rows
    ]
