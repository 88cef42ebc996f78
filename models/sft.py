"""Supervised fine-tuning of one curriculum stage: the Lightning module, its optimiser and its data.

Letters: B clips of a batch; see `models.families` for the others.
"""

from __future__ import annotations

import math
from typing import Any, cast

import lightning
import torch
from torch import Tensor
from tqdm import tqdm

from data.conditions import Mode
from data.latents import LatentStore
from data.sampler import StepBatch
from data.stage import Stage
from models.families import Arrays, Batch, Family
from models.flow_matching import draw

NUM_BINS = 10
"""Noise levels are reported in tenths of the uniform draw."""


def read_batch(store: LatentStore, drawn: StepBatch) -> Batch:
    """Stack the latents and conditions of the drawn entries."""
    rows = [store.index.find(entry) for entry in drawn.entries]
    clips = [
        {"video": store.read(row, "video"), "audio": store.read(row, "audio"), **store.conditions(row, variant)}
        for row, variant in zip(rows, drawn.variants, strict=True)
    ]
    arrays: Arrays = {name: torch.stack([clip[name] for clip in clips]) for name in clips[0]}
    return Batch(
        mode=cast(Mode, drawn.mode),
        video_BCFHW=arrays.pop("video"),
        audio_BSCT=arrays.pop("audio"),
        has_audio_B=torch.tensor([float(row.has_audio) for row in rows]),
        conditions=arrays,
        frame_rate=rows[0].frame_rate,
    )


def learning_rate_factor(step: int, stage: Stage) -> float:
    """Linear warm-up, then a cosine to a twentieth: short runs must end near rest."""
    warmup = min(1.0, (step + 1) / max(1, stage.warmup_steps))
    return warmup * max(0.05, 0.5 + 0.5 * math.cos(math.pi * step / stage.num_steps))


class SupervisedFineTuning(lightning.LightningModule):
    """Trains the transformer of a family on one stage; everything else is frozen."""

    def __init__(self, family: Family, stage: Stage, seed: int) -> None:
        super().__init__()
        self.transformer = family.transformer
        self._family = family
        self.stage = stage
        self._seed = seed
        self.curve: list[dict[str, float | int | str]] = []
        """One row a step: losses by modality and noise level. Holds no clock, so it repeats exactly."""

    def training_step(self, item: tuple[StepBatch, Batch], batch_idx: int) -> Tensor:  # noqa: ARG002 # Lightning's signature
        """Loss of both modalities in equal weight, averaged over the clips that have each."""
        drawn, batch = item
        randomness = draw(self._seed, drawn.step)
        losses = self._family.losses(batch, randomness)
        video = losses.video_B.mean()
        audio = losses.audio_B.sum() / batch.has_audio_B.sum().clamp_min(1).to(losses.audio_B)
        loss = video + audio
        if not bool(torch.isfinite(loss)):
            raise RuntimeError(
                f"step {drawn.step}: loss is {loss.item()} on clips {', '.join(drawn.entries)}; lower learning_rate"
            )
        self.curve.append(
            {
                "step": drawn.step,
                "loss_video": round(video.item(), 6),
                "loss_audio": round(audio.item(), 6),
                "timestep_bin": min(int(randomness.u * NUM_BINS), NUM_BINS - 1),
                "condition": drawn.mode,
                "learning_rate": self.stage.learning_rate * learning_rate_factor(drawn.step, self.stage),
            }
        )
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW over what is trainable, by default without weight decay, as the field tunes H3."""
        trainable = [parameter for parameter in self.transformer.parameters() if parameter.requires_grad]
        optimiser = torch.optim.AdamW(
            trainable, self.stage.learning_rate, betas=(0.9, 0.95), weight_decay=self.stage.weight_decay
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: learning_rate_factor(step, self.stage))
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the loss curve with the state it belongs to."""
        checkpoint["curve"] = self.curve

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the loss curve up where the state was saved."""
        self.curve = list(checkpoint["curve"])


class Bar(lightning.Callback):
    """A progress bar over the whole stage, with the mean losses of the last steps."""

    def __init__(self, title: str, first_step: int, num_steps: int) -> None:
        self._bar = tqdm(desc=title, initial=first_step, total=num_steps, unit="step", disable=None)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 # Lightning's signature
        """Move on by one step."""
        recent = cast(SupervisedFineTuning, pl_module).curve[-50:]
        means = {name: sum(float(row[f"loss_{name}"]) for row in recent) / len(recent) for name in ("video", "audio")}
        self._bar.set_postfix({name: f"{mean:.3f}" for name, mean in means.items()}, refresh=False)
        self._bar.update()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 # Lightning's signature
        """Leave the finished bar on its line."""
        self._bar.close()
