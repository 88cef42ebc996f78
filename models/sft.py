"""Supervised fine-tuning of one curriculum stage: the Lightning module. An item of its data is one optimiser update.

Letters: B clips of a batch, L noise levels of a step; see `models.families` for the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from data.stage import Stage
from models import adapters, gradients, parallel
from models.families import Family
from models.loading import Forward, Item, sliced
from models.objective import Levels, Losses, Objective, guidance_of, levels_of
from models.running import Running
from models.state_tensors import local

PLAIN = Running(strategy="ddp", precision="fp32", recompute="none", micro_batch=1024)
"""One device, nothing saved: as the mathematics says."""
NUM_BINS = 10
"""Noise levels are reported in tenths of their distribution."""
Row = dict[str, float | int | str]


class Part(NamedTuple):
    """What one forward pass gave, kept to be reported."""

    forward: Forward
    levels: Levels
    losses: Losses


def learning_rate_factor(step: int, stage: Stage) -> float:
    """Linear warm-up, then a cosine to a twentieth: short runs must end near rest."""
    warmup = min(1.0, (step + 1) / max(1, stage.warmup_steps))
    return warmup * max(0.05, 0.5 + 0.5 * math.cos(math.pi * step / stage.num_steps))


class SupervisedFineTuning(lightning.LightningModule):
    """Trains the transformer of a family on one stage; what is frozen stays so.

    Optimisation is manual, so that gradients add up over forward passes of unequal size with the exact weights of the
    global batch, and are sent once an update.
    """

    def __init__(
        self, family: Family, stage: Stage, seed: int, running: Running = PLAIN, *, compiled: bool = False
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.transformer = family.transformer
        self.stage, self.running = stage, running
        self._family, self._seed, self._compiled = family, seed, compiled
        self.guidance = guidance_of(stage.guidance, family)
        self._objective: Objective | None = None
        self.first: torch.nn.Module | None = None
        """Weights that drift is measured from."""
        self.scaler: torch.amp.GradScaler | None = None
        self.average: dict[str, Tensor] = {}
        """Moving average of this process's part of what is trained, where the stage keeps one."""
        self.groups: Mapping[str, str] = {}
        """Patterns of parameter names by group, for gradient norms by group; none measures none."""
        self.log_every = 10
        """Steps between them."""
        self.curve: list[Row] = []
        """A row a step and noise level: losses by modality. Holds no clock, so it repeats exactly."""
        self.ended = ""
        """Why the stage ended before its last step; empty where it did not."""

    @property
    def needs_bare(self) -> bool:
        """Whether batches must bring their conditions without captions too."""
        return self.guidance.form == "contrast"

    def configure_model(self) -> None:
        """Make the transformer ready for the devices, once Lightning has set them up."""
        if self._objective is not None:
            return
        mesh = self.device_mesh["data_parallel"] if self.device_mesh is not None else None
        if mesh is None:  # before weights are widened or copied, which the host need not hold
            self.transformer.to(self.trainer.strategy.root_device)
        adapter = adapters.NAME if self.stage.method == "lora" else None
        self._objective = Objective(self._family, self.guidance, adapter, shared=mesh is not None)
        self.first = self._objective.first.transformer if self._objective.first else None
        for transformer in filter(None, (self.transformer, self.first)):
            parallel.prepare(transformer, self._family.blocks, self.running, mesh=mesh, compiled=self._compiled)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over what is trainable, by default without weight decay, as the field tunes H3.

        Made with it, before a state is restored: the scaler, which has to know the device, and the moving average.
        """
        self.scaler = parallel.scaler_for(self.running, self.device)
        settings: dict[str, Any] = {
            "lr": self.stage.learning_rate,
            "betas": (0.9, 0.95),
            "weight_decay": self.stage.weight_decay,
        }
        trained = [parameter for _, parameter in self.trained()]
        if self.stage.ema_decay is not None:
            self.average = {name: parameter.detach().clone() for name, parameter in self.trained()}
        if self.stage.optimizer == "adamw8bit":
            if any(isinstance(item, DTensor) for item in trained):
                raise ValueError("optimizer adamw8bit takes no sharded weights; set strategy to ddp, or adamw")
            return eight_bit(trained, settings)
        return torch.optim.AdamW(trained, **settings)

    def trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        """What is trained, by name."""
        return [(name, item) for name, item in self.transformer.named_parameters() if item.requires_grad]

    def training_step(self, item: Item, batch_idx: int) -> dict[str, Any]:  # noqa: ARG002 # Lightning's signature
        """One update: gradients of every forward pass, clipped, then the optimiser; returns what watchers see.

        Raises:
            RuntimeError: a loss or gradient is not finite; the message names the clips.
        """
        optimiser = cast(torch.optim.Optimizer, self.optimizers(use_pl_optimizer=False))
        rate = self.stage.learning_rate * learning_rate_factor(item.drawn.step, self.stage)
        for group in optimiser.param_groups:
            group["lr"] = rate
        parts: list[Part] = []
        for number, forward in enumerate(item.forwards):
            with self._held_back(number == len(item.forwards) - 1):
                parts.append(self._pass(item, forward))
        sums, (norm, norms) = self._summed(item, parts), self._clipped(optimiser, item.drawn.step)
        rows = self._rows(item, sums, norm, rate)
        rows[-1] |= norms
        self._refuse_non_finite(item, parts, sums, norm)
        self._step(optimiser)
        self.curve += rows
        told = {"num_clips": item.num_clips, "num_rows": item.num_rows, "media_s": item.media_s}
        return {"step": item.drawn.step, "row": rows[-1], "forwards": len(item.forwards), **told}

    def _held_back(self, last: bool) -> AbstractContextManager[Any]:
        """DDP sends gradients in the last backward pass of an update only; FSDP2 in each, or it would keep them whole."""
        strategy = self.trainer.strategy
        if isinstance(strategy, DDPStrategy) and not last:
            return cast("AbstractContextManager[Any]", strategy.block_backward_sync())
        return nullcontext()

    def _pass(self, item: Item, forward: Forward) -> Part:
        """Forward and backward of some clips; their losses weigh what they weigh in the mean over the global batch."""
        kind = next(self.transformer.parameters()).dtype
        batch = sliced(item.batch, forward.first, forward.end)
        if kind == torch.float64:
            batch = batch._replace(video_BCFHW=batch.video_BCFHW.double(), audio_BSCT=batch.audio_BSCT.double())
        number = item.drawn.step * self.stage.noise.per_update + forward.level
        levels = levels_of(self._family, self.stage.noise, batch, self._seed, number)
        places = range(forward.place, forward.place + len(batch.has_audio_B))
        assert self._objective is not None
        with parallel.computing(self.running, self.device):
            losses = self._objective.losses(batch, levels, [(self._seed, item.drawn.step, place) for place in places])
        video = levels.weight_video * losses.video_B.sum() / item.num_clips
        audio = levels.weight_audio * losses.audio_B.sum() / max(1, item.num_heard)
        drift = losses.drift_video_B.sum() / item.num_clips + losses.drift_audio_B.sum() / max(1, item.num_heard)
        loss = self.stage.video_weight * video + self.stage.audio_weight * audio + self.guidance.weight * drift
        # Processes' gradients are averaged, and these are parts of a sum.
        loss = loss * (self.trainer.world_size * forward.counts)
        self.manual_backward(self.scaler.scale(loss) if self.scaler else loss)
        return Part(forward, levels, Losses(*(part.detach() for part in losses)))

    def _clipped(self, optimiser: torch.optim.Optimizer, step: int) -> tuple[float, dict[str, float]]:
        """Norm of the gradient of the update, before it was clipped; every so many steps by group of modules too."""
        if self.scaler:
            self.scaler.unscale_(optimiser)
        norms: dict[str, float] = {}
        if self.groups and (step + 1) % self.log_every == 0:
            norms = gradients.norms(self.transformer.named_parameters(), self.groups)
        norm = torch.nn.utils.clip_grad_norm_([item for _, item in self.trained()], self.stage.gradient_clip)
        whole = float(cast(Any, norm).full_tensor() if isinstance(norm, DTensor) else norm)
        return whole, {
            f"gradient/{name}": float(f"{value:.6g}")
            for name, value in norms.items()
            if name != gradients.ALL and math.isfinite(value)
        }

    def _step(self, optimiser: torch.optim.Optimizer) -> None:
        """The optimiser's step, and the moving average's."""
        if self.scaler:
            self.scaler.step(optimiser)
            self.scaler.update()
        else:
            optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if self.stage.ema_decay is not None:
            with torch.no_grad():
                for name, parameter in self.trained():
                    local(self.average[name]).lerp_(local(parameter), 1 - self.stage.ema_decay)

    def _summed(self, item: Item, parts: list[Part]) -> Tensor:
        """Of each noise level (L, 6), over all processes: summed errors and drift, of picture and sound; clips, heard."""
        sums = torch.zeros(item.num_levels, 6, dtype=torch.float64, device=self.device)
        for forward, _, losses in parts:
            if forward.counts:
                heard_B = item.batch.has_audio_B[forward.first : forward.end]
                columns = (*losses, torch.ones_like(heard_B), heard_B)
                sums[forward.level] += torch.stack([column.double().sum() for column in columns])
        if dist.is_initialized():
            dist.all_reduce(sums)
        return sums.cpu()  # the one time an update waits for the device

    def _rows(self, item: Item, sums: Tensor, norm: float, rate: float) -> list[Row]:
        """Rows of the loss curve: the mean losses at each noise level of the step."""
        rows: list[Row] = []
        found = cast("list[list[float]]", sums.tolist())
        for level, (video, audio, drift_video, drift_audio, clips, heard) in enumerate(found):
            number = item.drawn.step * self.stage.noise.per_update + level
            levels = levels_of(self._family, self.stage.noise, item.batch, self._seed, number)
            row: Row = {
                "step": item.drawn.step,
                "loss_video": round(video / max(1, clips), 6),
                "loss_audio": round(audio / max(1, heard), 6),
                "sigma_video": round(levels.sigma_video, 6),
                "sigma_audio": round(levels.sigma_audio, 6),
                "timestep_bin": min(int(levels.u * NUM_BINS), NUM_BINS - 1),
                "condition": item.drawn.mode,
                "learning_rate": rate,
            }
            if math.isfinite(norm):
                row["gradient_norm"] = float(f"{norm:.6g}")
            else:  # JSON knows no infinity
                row["skipped"] = 1
            if self.guidance.form == "drift":
                row["drift"] = round(drift_video / max(1, clips) + drift_audio / max(1, heard), 6)
            rows.append(row)
        return rows

    def _refuse_non_finite(self, item: Item, parts: list[Part], sums: Tensor, norm: float) -> None:
        """Stop before a step that would spoil the weights; the same decision in all processes."""
        losses_finite = bool(torch.isfinite(sums).all())
        if losses_finite and (math.isfinite(norm) or self.scaler):  # the scaler leaves such steps out itself
            return
        found: list[str] = []
        for forward, _, losses in parts:
            bad_B = ~torch.isfinite(torch.stack(losses)).all(0)
            found += [item.drawn.entries[forward.first + int(place)] for place in bad_B.nonzero().flatten()]
        everywhere = gather(found if not losses_finite else list(item.drawn.entries))
        what = "loss" if not losses_finite else "gradient"
        raise RuntimeError(
            f"step {item.drawn.step}: the {what} is not finite on {', '.join(dict.fromkeys(everywhere))} ({item.drawn.mode});"
            " lower learning_rate, or look at them with `soundstage verify`"
        )


def gather(names: list[str]) -> list[str]:
    """What every process found, in order."""
    if not dist.is_initialized():
        return names
    found: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(found, names)
    return [name for part in found for name in part]


def eight_bit(trained: list[torch.nn.Parameter], settings: dict[str, Any]) -> torch.optim.Optimizer:
    """AdamW with states in 8 bits.

    Raises:
        RuntimeError: bitsandbytes is not installed.
    """
    try:
        import bitsandbytes  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise RuntimeError(
            "optimizer adamw8bit needs bitsandbytes, which is not installed; install it or set adamw"
        ) from error
    return cast(Any, bitsandbytes).optim.AdamW8bit(trained, **settings)


class Bar(lightning.Callback):
    """A progress bar over the whole stage, with the mean losses of the last steps."""

    def __init__(self, title: str, num_steps: int, words: Callable[[], dict[str, str]] = dict) -> None:
        self._title, self._num_steps, self._words = title, num_steps, words
        self._bar: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 # Lightning's signature
        """Begin where the run goes on."""
        first = trainer.datamodule.first_step
        self._bar = tqdm(
            desc=self._title, initial=first, total=self._num_steps, unit="step",
            disable=None if trainer.is_global_zero else True,
        )  # fmt: skip

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 # Lightning's signature
        """Move on by one step."""
        recent = cast(SupervisedFineTuning, pl_module).curve[-50:]
        means = {name: sum(float(row[f"loss_{name}"]) for row in recent) / len(recent) for name in ("video", "audio")}
        shown = {name: f"{mean:.3f}" for name, mean in means.items()} | self._words()
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 # Lightning's signature
        """Leave the finished bar on its line."""
        self._bar.close()
