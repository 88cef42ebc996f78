"""Samples while a stage trains: the same validation clips from the same noise, so that what changes is the model.

A loss curve cannot accept a run (a flipped velocity has the same one); what the model generates can. Taking samples
leaves training bitwise as it is without.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from data.conditions import NEED_SOUND, Mode, Variant
from data.files import whole
from data.latent_index import LatentRow
from data.latents import LatentStore
from data.media_write import write_mp4
from models.families import Condition, Encoders, Family, Frames, Waveform
from models.ranks import Ranks

Measure = Callable[[Frames, Frames], float | None]
"""Likeness of a sampled picture (second) to the real one; None where there is none."""
Latents = tuple[Tensor, Tensor]
NAME = "samples.json"
CPU = torch.device("cpu")


class Wanted(NamedTuple):
    """One clip to sample."""

    row: LatentRow
    variant: str
    seed: int

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.row.entry}-{self.variant}".replace("/", "_")


def chosen(store: LatentStore, num_samples: int, seed: int, modes: Sequence[Mode] = ()) -> list[Wanted]:
    """The first validation clips of the store by name, each in one of the modes in turn, with a seed of its own.

    Args:
        store: With entries of split `val`.
        num_samples: As many, or fewer where there are fewer.
        seed: Of the run.
        modes: To sample in, such as those of the stage; those that nothing is generated in are left out, and none
            means every mode a clip has.
    """
    result: list[Wanted] = []
    for row in store.index.rows():
        if row.split != "val":
            continue
        known: dict[Mode, str] = {}
        for name in row.variants:
            if Variant.parse(name).captioned:
                known.setdefault(Variant.parse(name).mode, name)
        order = [known[mode] for mode in modes or known if mode in known and mode not in NEED_SOUND]
        if order:
            result.append(Wanted(row, order[len(result) % len(order)], seed * 1_000_003 + len(result)))
        if len(result) == num_samples:
            break
    return result


@contextmanager
def undisturbed(module: torch.nn.Module) -> Generator[None]:
    """Evaluate a module, and leave it, its gradients and all generators of random numbers as they were."""
    parts = list(module.modules())
    training = [part.training for part in parts]
    known = random.getstate(), np.random.get_state()  # noqa: NPY002 # libraries draw from it
    device = torch.accelerator.current_accelerator()
    kind = "cuda" if device is None else device.type
    devices = list(range(torch.accelerator.device_count())) if device is not None else []
    module.eval()
    try:
        with torch.random.fork_rng(devices, device_type=kind), torch.no_grad():
            yield
    finally:
        for part, was in zip(parts, training, strict=True):
            part.training = was
            if isinstance(part, FSDPModule):  # without a backward pass the root stays whole, and rounded
                part.reshard()
        random.setstate(known[0])
        np.random.set_state(known[1])  # noqa: NPY002


@contextmanager
def moved(encoders: Encoders, device: torch.device) -> Generator[None]:
    """Autoencoders on a device, and where they were after; it keeps nothing of theirs."""
    before = encoders.move(str(device))
    try:
        yield
    finally:
        encoders.move(before)
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()


class Samples(lightning.Callback):
    """Samples before the first step, every `every` steps and at the end, into `FOLDER/step-000100/`.

    All processes take part in generating, since sharded weights are gathered for it; rank 0 alone decodes and writes.
    A folder holds one MP4 with sound a clip and `samples.json`: entry, variant, seed and `psnr_db` of each.

    Args:
        family: Whose transformer is trained.
        store: Has the clips' conditions, so that no text side is needed.
        wanted: The clips.
        folder: Gets a folder a time.
        every: Steps between.
        num_inference_steps: Points of the schedule.
        first_step: Where the run continues; samples before the first step are taken at 0 alone.
        ranks: The processes of the run.
        computing: The context that training computes in, of its precision; decoding is in full precision.
        device: Where training computes, and samples are decoded; the CPU once there was too little memory for it.
        measure: Likeness to the stored clip, decoded; None measures nothing.
        tell: Gets the step and the mean of the measures, on rank 0, for instance for the curve's sinks.
    """

    def __init__(
        self,
        family: Family,
        store: LatentStore,
        wanted: Sequence[Wanted],
        folder: Path,
        every: int,
        num_inference_steps: int,
        *,
        first_step: int,
        ranks: Ranks,
        computing: Callable[[], AbstractContextManager[Any]] = nullcontext,
        device: torch.device = CPU,
        measure: Measure | None = None,
        tell: Callable[[int, dict[str, float]], None] | None = None,
    ) -> None:
        self._family, self._store, self._wanted = family, store, tuple(wanted)
        self._folder, self._every, self._num_inference_steps = folder, every, num_inference_steps
        self._step, self._ranks, self._measure, self._tell = first_step, ranks, measure, tell
        self._computing, self._device = computing, device
        self._real: dict[str, Frames] = {}
        self._taken: int | None = None
        self._warned = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 # Lightning's signature
        """What the model does before it has learned anything."""
        if self._step == 0:
            self._take()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 # Lightning's signature
        """Sample after every so many steps."""
        self._step = int(outputs["step"]) + 1
        if self._step % self._every == 0:
            self._take()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 # Lightning's signature
        """What the stage has come to."""
        self._take()

    def _take(self) -> None:
        if self._taken == self._step:
            return
        self._taken = self._step
        with undisturbed(self._family.transformer):
            try:
                with self._computing():
                    latents = [self._generated(wanted) for wanted in self._wanted]
            except RuntimeError as error:  # out of memory is no reason to lose what was trained
                if self._ranks.size > 1:
                    raise  # the others may be waiting in a collective for ever
                self._warn(error)
                return
            if self._ranks.rank == 0:
                try:
                    self._write(self._decoded(latents))
                except Exception as error:  # noqa: BLE001 # whatever decoding or writing meets, training goes on
                    self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"samples of step {self._step} failed: {error}; training goes on", stacklevel=2)

    def _generated(self, wanted: Wanted) -> Latents:
        """One clip, in all processes."""
        conditions = self._store.conditions(wanted.row, wanted.variant)
        arrays = {name: array.clone() for name, array in conditions.items()}
        condition = Condition(Variant.parse(wanted.variant).mode, arrays)
        return self._family.generate(condition, wanted.row.shape, wanted.seed, self._num_inference_steps)

    def _decoded(self, latents: Sequence[Latents]) -> list[tuple[Frames, Waveform]]:
        """Pixels and sound of samples, and pixels of the clips that they are held against, which are kept."""
        encoders, measured = self._family.encoders, self._wanted if self._measure is not None else ()
        try:
            with moved(encoders, self._device):
                for wanted in measured:
                    row = wanted.row
                    if row.entry not in self._real:
                        video, audio = (self._store.read(row, name).clone() for name in ("video", "audio"))
                        self._real[row.entry] = encoders.decode(video, audio, row.shape)[0]
                pairs = zip(self._wanted, latents, strict=True)
                return [encoders.decode(*made, wanted.row.shape) for wanted, made in pairs]
        except torch.OutOfMemoryError as error:
            if self._device == CPU:
                raise
            self._device = CPU
            warnings.warn(f"samples are decoded on the CPU from here on, which takes longer: {error}", stacklevel=2)
        return self._decoded(latents)

    def _write(self, decoded: Sequence[tuple[Frames, Waveform]]) -> None:
        """Measure and write one time's folder, whole."""
        rate_hz, scores = self._family.encoders.decoded_rate_hz, list[float]()
        records: list[dict[str, Any]] = []
        with whole(self._folder / f"step-{self._step:06d}") as temporary:
            temporary.mkdir()
            for wanted, (frames_FHWC, waveform_CT) in zip(self._wanted, decoded, strict=True):
                row, path = wanted.row, temporary / f"{wanted.name}.mp4"
                write_mp4(path, frames_FHWC, waveform_CT, row.frame_rate, rate_hz)
                score = self._measure(self._real[row.entry], frames_FHWC) if self._measure is not None else None
                scores += [score] if score is not None else []
                facts = {"entry": row.entry, "variant": wanted.variant, "seed": wanted.seed, "file": path.name}
                records.append({**facts, "psnr_db": score})
            text = json.dumps({"step": self._step, "samples": records}, indent=1)
            (temporary / NAME).write_text(text + "\n", encoding="utf-8")
        if scores and self._tell is not None:
            self._tell(self._step, {"psnr_db": sum(scores) / len(scores)})
