"""What is watched while a stage trains: meters, checks, samples, the plateau that ends it, and the sinks that are told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import lightning

from data.files import remove
from data.plateau import ended
from models import gradients, parallel
from models.diagnoses import judge, watch_embedding
from models.findings import Findings, Limits
from models.meters import Meters, memory_of
from models.ranks import Ranks
from models.samples import Samples, chosen
from models.saving import Saving
from models.sft import SupervisedFineTuning
from tasks.sinks import Sink, Watching, sinks_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from data.latents import LatentStore
    from models.budget import Activity, Setup
    from models.dry_run import Activities
    from models.families import Batch, Family, Frames
    from models.loading import Item

MLFLOW = Path("data/store/mlflow")
"""Tracking store that `gate` and `register` use."""


ENOUGH_CLIPS = 1000
"""Of which the latents' mean square is taken."""


class Watch(lightning.Callback):
    """Stands first among the callbacks, and its `last` behind all others, so that their work is not taken for waiting.

    Args:
        watching: The settings.
        name: Of the stage.
        base: Folder of the model.
        family: Whose transformer is trained.
        store: Of the latents.
        facts: Identity of the run.
        key: Its hash, by which sinks know the run again.
        timeout_s: How long processes wait for each other, s.
    """

    def __init__(
        self,
        watching: Watching,
        name: str,
        base: Path,
        family: Family,
        store: LatentStore,
        facts: dict[str, Any],
        key: str,
        timeout_s: float = 1800,
    ) -> None:
        self._watching, self._name, self._base, self._family, self._store = watching, name, base, family, store
        self._key, self._seed, self._timeout_s = key, int(facts["seed"]), timeout_s
        self._folder = watching.folder / name
        self.last = Last(self)
        self.meters: Meters | None = None
        self._samples: Samples | None = None
        self._sinks: list[Sink] = []
        self._findings: Findings | None = None
        self._ranks: Ranks | None = None
        self._activities: Activities | None = None
        self._item: Item | None = None
        self._squares = Squares()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002 # Lightning's signature
        """Have the module measure its gradients by groups."""
        from models.dry_run import Activities
        from models.families.sketches import sketch_of

        module, sketch = cast(SupervisedFineTuning, pl_module), sketch_of(self._base)
        module.groups = gradients.groups_of(sketch.groups, sketch.units, sketch.num_blocks)
        module.log_every = self._watching.log_every
        self._activities = Activities(sketch)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Everything that has to know the processes and where the run goes on."""
        module, watching = cast(SupervisedFineTuning, pl_module), self._watching
        self._ranks = Ranks(self._timeout_s)
        first_step = int(trainer.datamodule.first_step)
        if trainer.is_global_zero:
            if first_step == 0:
                remove(self._folder / "samples")  # of an earlier run
            self._findings = Findings(self._folder / "findings.json", continues=first_step > 0)
            self._sinks = sinks_of(watching, self._name, self._key, first_step, MLFLOW)
            watch_embedding(module.transformer, *self._family.timestep_embedding, self._findings.tell)
        self.meters = Meters(
            module.stage.num_steps,
            self._ranks,
            module.device,
            log_every=watching.log_every,
            flops=(lambda done: self._flops_of(module, done)) if watching.peak_tflops is not None else None,
            peak_tflops=watching.peak_tflops,
            memory_alert_share=watching.memory_alert_share,
            sharded=module.running.strategy == "fsdp2" and trainer.world_size > 1,
            sinks=[sink.tell for sink in self._sinks],
        )
        if watching.sample_every is not None:
            self._samples = Samples(
                self._family,
                self._store,
                chosen(self._store, watching.num_samples, self._seed, tuple(module.stage.conditions)),
                self._folder / "samples",
                watching.sample_every,
                watching.sample_steps,
                first_step=first_step,
                ranks=self._ranks,
                computing=lambda: parallel.computing(module.running, module.device),
                device=module.device,
                measure=psnr,
                tell=lambda step, numbers: self._sampled(module, step, numbers),
            )
            self._samples.on_train_start(trainer, pl_module)
        self.meters.on_train_start(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A batch has come."""
        self._item = cast("Item", batch)
        cast(Meters, self.meters).on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """What follows may wait for other processes."""
        cast(Meters, self.meters).on_before_backward(trainer, pl_module, loss)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Measure, sample, judge, and see whether the stage has learned what it can."""
        module, meters = cast(SupervisedFineTuning, pl_module), cast(Meters, self.meters)
        before = len(meters.readings)
        self._squares.add(cast("Item", batch).batch)
        meters.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._samples is not None:
            self._samples.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if len(meters.readings) == before:
            return
        if self._findings is not None:
            limits = Limits(variance=self._squares.means())
            self._findings.tell(judge(module.curve, [reading.numbers for reading in meters.readings], limits))
        if module.stage.plateau is not None:
            module.ended = cast(Ranks, self._ranks).first(lambda: self._ended(module))
            trainer.should_stop = trainer.should_stop or bool(module.ended)

    def _ended(self, module: SupervisedFineTuning) -> str:
        """Why the stage has ended by its curve; the first process has it whole."""
        plateau = module.stage.plateau
        found = ended(module.curve, plateau) if plateau is not None else None
        return found.words(plateau) if found is not None and plateau is not None else ""

    def _sampled(self, module: SupervisedFineTuning, step: int, numbers: Mapping[str, float]) -> None:
        """Keep the samples' measure in the curve, where the plateau looks, and tell the sinks."""
        if module.curve and step == int(module.curve[-1]["step"]) + 1:
            module.curve[-1] |= {name: round(value, 6) for name, value in numbers.items()}
        for sink in self._sinks:
            sink.tell(step, numbers)

    def _flops_of(self, module: SupervisedFineTuning, done: Mapping[str, Any]) -> float:
        """Operations of a step, all processes together, without what is computed again."""
        from models import budget

        setup = setup_of(module).model_copy(update={"recompute": "none", "micro_batch": 1})
        return float(budget.flops(self._activity(setup), setup) * done["num_clips"])

    def _activity(self, setup: Setup) -> Activity:
        """What a micro-batch of the last step's clips holds and computes."""
        assert self._activities is not None
        assert self._item is not None
        drawn, batch, index = self._item.drawn, self._item.batch, self._store.index
        row = index.row(index.place(drawn.entries[0]))
        layout = row.layouts[row.variants.index(drawn.variants[0])]
        sizes = {name: tuple(array.shape[1:]) for name, array in batch.conditions.items()}
        return self._activities.of(setup, layout, row.shape, batch.mode, sizes)

    def words(self) -> dict[str, str]:
        """The last reading in a few words, for the bar."""
        return self.meters.words() if self.meters is not None else {}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The last samples, the plan against what was used, and good-bye to the sinks."""
        module = cast(SupervisedFineTuning, pl_module)
        if any(isinstance(item, Saving) and item.preempted_at is not None for item in trainer.callbacks):
            self._close()  # asked to stop, there is no time for last samples
            return
        if self._samples is not None:
            self._samples.on_train_end(trainer, pl_module)
        if trainer.is_global_zero and module.device.type != "cpu" and self._item is not None:
            try:
                sys.stderr.write(self._compared(module, trainer.world_size) + "\n")
            except Exception as error:  # noqa: BLE001 # the weights are not written yet, and worth more than a comparison
                sys.stderr.write(f"train: the plan could not be compared with what was used: {error}\n")
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002 # Lightning's signature
        """Tell the sinks that nothing more comes."""
        self._close()

    def _close(self) -> None:
        for sink in self._sinks:
            sink.close()
        self._sinks = []

    def _compared(self, module: SupervisedFineTuning, world_size: int) -> str:
        """Peak memory as `plan-run` would plan it for the last clip, and as it was."""
        from models import budget
        from models.dry_run import parameters_of
        from models.families.sketches import sketch_of

        setup, sketch = setup_of(module), sketch_of(self._base)
        rank = setup.lora_rank if setup.method == "lora" else None
        parameters = parameters_of(sketch, rank, freeze_text_side=setup.freeze_text_side)
        planned = sum(budget.memory(parameters, self._activity(setup), setup, world_size).values())
        used = memory_of(module.device).peak_bytes
        ratio = budget.compare({"memory": planned}, {"memory": used})["memory"]
        return f"{self._name}: peak memory {used / 1e9:.2f} GB, planned {planned / 1e9:.2f} GB (ratio {ratio:.2f})"


class Last(lightning.Callback):
    """Behind all other callbacks."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Of a run that had all its steps, the end is all that is left, and Lightning leaves out what has no batches."""
        if trainer.datamodule.first_step >= trainer.datamodule.num_steps:
            self._watch.on_train_start(trainer, pl_module)
            self._watch.on_train_end(trainer, pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """What the others did before the first batch is not waiting."""
        cast(Meters, self._watch.meters).last.on_train_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """All others are through."""
        cast(Meters, self._watch.meters).last.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


class Squares:
    """Mean square of the latents seen so far, which says what errors a model can have that has learned nothing."""

    def __init__(self) -> None:
        self._sums = {"video": (0.0, 0.0), "audio": (0.0, 0.0)}

    def add(self, batch: Batch) -> None:
        """Take a batch in, as long as that tells more; clips without sound have none."""
        if self._sums["video"][1] >= ENOUGH_CLIPS:
            return
        heard = batch.has_audio_B > 0
        for name, latents in (("video", batch.video_BCFHW), ("audio", batch.audio_BSCT[heard])):
            if len(latents):
                total, count = self._sums[name]
                self._sums[name] = total + float(latents.square().mean()) * len(latents), count + len(latents)

    def means(self) -> dict[str, float]:
        """By modality; 1 where nothing was seen."""
        return {name: total / count if count else 1.0 for name, (total, count) in self._sums.items()}


def setup_of(module: SupervisedFineTuning) -> Setup:
    """How a stage is run, as `plan-run` names it."""
    from models.budget import Setup

    stage, guidance = module.stage, module.guidance.form
    return Setup(
        **module.running.model_dump(),
        ema=stage.ema_decay is not None,
        guidance=guidance if guidance in ("contrast", "drift") else "none",
        method=stage.method,
        lora_rank=stage.lora_rank,
        freeze_text_side=stage.freeze_text_side,
    )


def psnr(real_FHWC: Frames, made_FHWC: Frames) -> float | None:
    """Likeness of a sample to the stored clip, dB."""
    from metrics.picture import psnr_db

    return psnr_db(real_FHWC, made_FHWC).mean.value
