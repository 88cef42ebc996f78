"""What a run is doing with its time and memory: speed, waiting, utilisation, memory, slow processes, time left.

A *reading* is what one logging interval measured: numbers by name, and for each that is missing the reason. Nothing
here enters the loss curve, which holds no clock.
"""

from __future__ import annotations

import resource
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, cast

import lightning
import psutil
import torch

from models.ranks import Ranks

Numbers = Mapping[str, float]
Sink = Callable[[int, Numbers], None]
"""Takes the step and its numbers; called on rank 0 alone."""
TERA = 1e12


class Memory(NamedTuple):
    """Of one process on its device, or in the machine's memory where it has no device; bytes."""

    used_bytes: int
    peak_bytes: int
    unused_bytes: int
    """Reserved by the allocator and given to no tensor: what fragmentation costs, at most."""
    taken_bytes: int
    """Most that the process has kept from others."""
    total_bytes: int

    @property
    def share(self) -> float:
        """Of the whole device that has been taken."""
        return self.taken_bytes / self.total_bytes


def memory_of(device: torch.device) -> Memory:
    """Memory of this process: of its accelerator (CUDA, NPU…) by the allocator, else its resident set."""
    if device.type == "cpu":
        used = psutil.Process().memory_info().rss
        peak = max(used, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return Memory(used, peak, 0, peak, psutil.virtual_memory().total)
    known = cast(Any, torch.get_device_module(device))  # torch.accelerator knows less of NPUs
    used = known.memory_allocated(device)
    return Memory(
        used,
        known.max_memory_allocated(device),
        known.memory_reserved(device) - used,
        known.max_memory_reserved(device),
        known.mem_get_info(device)[1],
    )


def settled(device: torch.device) -> None:
    """Wait until the device has done what it was given, so that a clock tells of it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def small_work(device: torch.device) -> torch.Tensor:
    """Some products of matrices: 10¹² operations on an accelerator, 3·10⁸ on a CPU."""
    side, kind = (256, torch.float32) if device.type == "cpu" else (4096, torch.bfloat16)
    result = factor = torch.full((side, side), 1 / side, device=device, dtype=kind)
    for _ in range(8):
        result = result @ factor
    return result


class Reading(NamedTuple):
    """What one interval measured, the same in all processes."""

    step: int
    numbers: dict[str, float]
    """`clips_per_s`, `rows_per_s`, `media_s_per_s`, `step_s`, `loader_share`, `other_share`, `mfu`, `eta_s`; by rank
    `memory_used_bytes/0`, `memory_peak_bytes/0`, `memory_unused_bytes/0`, `memory_share/0`, `compute_s/0`…"""
    missing: dict[str, str]
    """Reason by name."""


class Meters(lightning.Callback):
    """Measures every step, and every `log_every` steps tells the sinks. Put it first, and its `last` last.

    Between the two lies the work of other callbacks (states, samples), which counts as `other_share` and not as
    waiting. `compute_s` finds slow processes, which the time of a step hides, since all wait for the slowest.

    Args:
        num_steps: Of the whole stage.
        ranks: The processes of the run.
        device: Of this process.
        log_every: Steps of an interval.
        flops: Floating-point operations of a step, all processes together, from what `training_step` returned, or as
            a number for each clip; None is not known.
        peak_tflops: Of one device in the precision of computing, 10¹² a second; None is not known.
        memory_alert_share: Share of the device's memory above which it warns, once.
        sharded: Whether forward passes gather weights (FSDP), so that no part of a step is a process's own: `compute_s`
            is then the time of a small computation that each does alone.
        sinks: Where readings go, with the numbers of the curve's row.
        clock: Seconds, from anywhere.
        memory: What `device` has in use.
        probe: The small computation.
    """

    def __init__(
        self,
        num_steps: int,
        ranks: Ranks,
        device: torch.device,
        *,
        log_every: int = 10,
        flops: float | Callable[[Mapping[str, Any]], float] | None = None,
        peak_tflops: float | None = None,
        memory_alert_share: float = 0.9,
        sharded: bool = False,
        sinks: Sequence[Sink] = (),
        clock: Callable[[], float] = time.perf_counter,
        memory: Callable[[torch.device], Memory] = memory_of,
        probe: Callable[[torch.device], object] | None = None,
    ) -> None:
        if log_every < 1:
            raise ValueError(f"log_every is {log_every} steps; at least 1")
        self._num_steps, self._ranks, self._device, self._every = num_steps, ranks, device, log_every
        self._flops, self._peak = flops, peak_tflops
        self._alert_share, self._alerted = memory_alert_share, False
        self._sinks, self._clock, self._memory = tuple(sinks), clock, memory
        self._sharded, self._probe = sharded, probe or small_work
        self.last = Last(self)
        self.readings: list[Reading] = []
        self._free = self._began = self._clock()
        self._compute: float | None = None
        self._logs = log_every == 1
        """Whether the step that runs now ends an interval."""
        self._reset()

    def _reset(self) -> None:
        self._steps, self._step_s, self._loader_s, self._other_s = 0, 0.0, 0.0, 0.0
        self._counts = dict.fromkeys(("num_clips", "num_rows", "media_s"), 0.0)
        self._flops_done: float | None = 0.0

    # -- what Lightning calls ------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 # Lightning's signature
        """The first wait begins when everything is set up."""
        self._free = self._clock()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 # Lightning's signature
        """A batch has come: waiting ends."""
        self._began, self._compute = self._clock(), None
        self._loader_s += self._began - self._free

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:  # noqa: ARG002 # Lightning's signature
        """Note how long this process has computed by itself: under DDP the last backward pass of a step sends first.

        Only the last step of an interval is measured, since waiting for the device slows a step down.
        """
        if self._logs and not self._sharded:
            settled(self._device)
            self._compute = self._clock() - self._began

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 # Lightning's signature
        """A step is done: note what it was, and at the end of an interval measure and tell."""
        done: Mapping[str, Any] = outputs
        step = int(done["step"])
        logs, self._logs = self._ends(step), self._ends(step + 1)
        if logs:
            settled(self._device)
        self._free = self._clock()
        self._step_s += self._free - self._began
        if logs and self._sharded:
            self._compute = self._probed()
        self._steps += 1
        for name in self._counts:
            self._counts[name] += float(done[name])
        flops = self._flops
        if flops is None or self._flops_done is None:
            self._flops_done = None
        else:
            self._flops_done += flops(done) if callable(flops) else flops * float(done["num_clips"])
        if logs:
            self._tell(done)

    def _probed(self) -> float:
        """Time of a small computation that every process does alone, s; done once before, so that all is loaded."""
        self._probe(self._device)
        settled(self._device)
        began = self._clock()
        self._probe(self._device)
        settled(self._device)
        return self._clock() - began

    def _ends(self, step: int) -> bool:
        """Whether a step is the last of an interval."""
        return (step + 1) % self._every == 0 or step + 1 == self._num_steps

    def others_done(self) -> None:
        """The other callbacks are through: what follows is waiting for the loader."""
        now = self._clock()
        self._other_s += now - self._free
        self._free = now

    # -- readings ------------------------------------------------------------------------------------------------------

    def _tell(self, done: Mapping[str, Any]) -> None:
        reading = self._read(int(done["step"]))
        self.readings.append(reading)
        self._reset()
        if self._ranks.rank == 0:
            curve = {name: float(value) for name, value in dict(done["row"]).items() if _is_number(value)}
            for sink in self._sinks:
                sink(reading.step, {**curve, **reading.numbers})

    def _read(self, step: int) -> Reading:
        """The interval's numbers; all processes come here together."""
        memory = self._memory(self._device)
        everyone = self._ranks.gather((memory, self._compute, self._loader_s, self._step_s + self._loader_s))
        elapsed = max(self._step_s + self._loader_s, 1e-9)  # a clock may stand still
        step_s = elapsed / self._steps
        numbers = {
            "clips_per_s": self._counts["num_clips"] / elapsed,
            "rows_per_s": self._counts["num_rows"] / elapsed,
            "media_s_per_s": self._counts["media_s"] / elapsed,
            "step_s": step_s,
            "loader_share": max(waited / max(of, 1e-9) for _, _, waited, of in everyone),
            "other_share": self._other_s / (elapsed + self._other_s),
            "eta_s": (elapsed + self._other_s) / self._steps * (self._num_steps - step - 1),
        }
        missing: dict[str, str] = {}
        self._add_utilisation(elapsed, numbers, missing)
        for rank, (taken, compute, _, _) in enumerate(everyone):
            for name in ("used", "peak", "unused"):
                numbers[f"memory_{name}_bytes/{rank}"] = float(getattr(taken, f"{name}_bytes"))
            numbers[f"memory_share/{rank}"] = taken.share
            if compute is None:
                missing[f"compute_s/{rank}"] = "no backward pass of the step was seen"
            else:
                numbers[f"compute_s/{rank}"] = compute
        self._alert([taken for taken, *_ in everyone])
        return Reading(step, numbers, missing)

    def _add_utilisation(self, elapsed: float, numbers: dict[str, float], missing: dict[str, str]) -> None:
        """Model FLOPs utilisation. Source: Chowdhery et al. 2022 (arXiv 2204.02311), appendix B."""
        if self._peak is None:
            missing["mfu"] = f"peak speed of {self._device.type} is not known; set peak_tflops"
        elif self._flops_done is None:
            missing["mfu"] = "operations of a step are not known"
        else:
            numbers["mfu"] = self._flops_done / (elapsed * self._peak * TERA * self._ranks.size)

    def _alert(self, everyone: Sequence[Memory]) -> None:
        worst = max(range(len(everyone)), key=lambda rank: everyone[rank].share)
        if everyone[worst].share > self._alert_share and not self._alerted:
            self._alerted = True
            if self._ranks.rank == 0:
                memory = everyone[worst]
                warnings.warn(
                    f"rank {worst} has taken {memory.taken_bytes / 2**30:.1f} of {memory.total_bytes / 2**30:.1f} GiB"
                    f" ({memory.share:.0%}); limit memory_alert_share = {self._alert_share:g}: lower max_tokens or"
                    " batch_size, or recompute blocks",
                    stacklevel=2,
                )

    def words(self) -> dict[str, str]:
        """The last reading in a few words, for the bar; nothing before the first."""
        if not self.readings:
            return {}
        numbers = self.readings[-1].numbers
        minutes, seconds = divmod(round(numbers["eta_s"]), 60)
        hours, minutes = divmod(minutes, 60)
        shown = {"clips/s": f"{numbers['clips_per_s']:.2f}", "wait": f"{numbers['loader_share']:.0%}"}
        if "mfu" in numbers:
            shown["MFU"] = f"{numbers['mfu']:.0%}"
        return {**shown, "left": f"{hours}:{minutes:02d}:{seconds:02d}"}


class Last(lightning.Callback):
    """Stands behind all other callbacks, so that their work is not taken for waiting."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """What the others did before the first batch is not waiting either."""
        self._meters.on_train_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 # Lightning's signature
        """All others are through."""
        self._meters.others_done()


def slow_ranks(numbers: Numbers, factor: float) -> dict[int, float]:
    """Ranks whose own computing takes more than `factor` times the median of all, and how many times."""
    times = {int(name.partition("/")[2]): value for name, value in numbers.items() if name.startswith("compute_s/")}
    middle = median(times.values()) if times else 0.0
    return {rank: value / middle for rank, value in sorted(times.items()) if middle > 0 and value > factor * middle}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
