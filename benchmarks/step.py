"""A training step of ours against a bare one of diffusers: forward, backward, clipping and AdamW at the same shapes.

Ours is `tasks.training.fit` as `soundstage train` runs it, from latent store to loss curve. The bare step is a loop over
inputs that lie ready, those of our first step. They take turns, step by step, in one process on one thread; a round's
ratio is of its sums, and the median over rounds is told, with the least and the most. On a CPU it is processor time
that is compared, so that what else the machine does is not in it. The memory is what a step holds for backward and at
its peak, over that of a plain step in fp32. Results go to benchmarks/results/step.json.
Example: python -m benchmarks.step; python -m benchmarks.step --device cuda --sizes h3-0.5b h3-2b
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from data.candidates import candidates_of
from data.files import write_text
from data.latent_index import LatentRow
from data.latent_shards import write_shard
from data.latents import PARTS, LatentStore, shard_name, write_index
from data.sampler import Sampler
from data.stage import Stage
from models import dry_run, loading, objective, parallel, tiny_h3, tiny_ltx2
from models.families import load_encoders, load_family
from models.running import Running
from models.sft import SupervisedFineTuning
from models.threads import use_one_thread
from tasks import training

NUM_CLIPS = 8
WARM = 2
"""First steps of a round, which are not counted."""
RESULTS = Path(__file__).parent / "results" / "step.json"


class Size(NamedTuple):
    """A model and its clips."""

    family: str
    width: int = 0
    """Of the transformer; 0 is the tiny model's own."""
    num_blocks: int = 0
    side_px: int = 32
    duration_s: float = 22 / 24
    batch: int = 2
    steps: int = 10
    rounds: int = 5


SIZES = {
    "tiny-h3": Size("h3", steps=30),
    "tiny-ltx2": Size("ltx2", side_px=64, steps=30),
    "h3-512": Size("h3", 512, 8, 48, 39 / 24, 1, steps=6, rounds=5),
    "h3-0.5b": Size("h3", 1536, 14, 320, 73 / 24, 1, steps=20),
    "h3-2b": Size("h3", 2560, 20, 480, 73 / 24, 1, steps=20),
}
"""The last two are for a GPU."""


class Clock:
    """Time by part, each second in the innermost part that is open."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.parts, self._open, self._since = device, dict[str, float](), ["loop"], 0.0

    def now(self) -> float:
        """Processor seconds; on an accelerator seconds, when all it was given is done."""
        if self._device.type == "cpu":
            return time.process_time()
        torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def turn(self) -> None:
        """Give the time since the last turn to the part that is open."""
        at = self.now()
        self.parts[self._open[-1]] = self.parts.get(self._open[-1], 0.0) + at - self._since
        self._since = at

    @contextlib.contextmanager
    def part(self, name: str) -> Generator[None]:
        """Time spent inside belongs to `name`."""
        self.turn()
        self._open.append(name)
        try:
            yield
        finally:
            self.turn()
            self._open.pop()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time under a name."""

        def call(*given: Any, **named: Any) -> Any:
            with self.part(name):
                return function(*given, **named)

        return call

    def restart(self) -> None:
        """Begin at zero."""
        self.parts.clear()
        self._since = self.now()

    def total(self) -> float:
        """Seconds so far."""
        self.turn()
        return sum(self.parts.values())


def make_base(size: Size, folder: Path) -> None:
    """Write a model with random weights."""
    parts = tiny_h3.build(0) if size.family == "h3" else tiny_ltx2.build(0)
    if size.width:
        config = {**parts["transformer"].config, "hidden_size": size.width, "num_layers": size.num_blocks}
        config |= {"num_attention_heads": size.width // 64, "attention_head_dim": 64, "ffn_dim": 4 * size.width}
        config |= {"rope_freq_dim": 8, "freq_dim": 256}
        config |= {"time_embed_hidden_dim": size.width, "time_embed_dim": size.width // 2}
        parts["transformer"] = type(parts["transformer"]).from_config(config)
    (tiny_h3 if size.family == "h3" else tiny_ltx2).save(parts, folder)


def make_store(base: Path, size: Size, folder: Path) -> None:
    """Write latents of noise, of the sizes that the clips would have, with text."""
    encoders = load_encoders(base)
    shape = encoders.shape(size.duration_s, size.side_px, size.side_px)
    video, audio = encoders.latent_shapes(shape)
    text = {f"text/t2va/{name}": array for name, array in encoders.encode_text("t2va", "a dog barks").items()}
    sizes = {name.replace("/t2va", ""): tuple(array.shape) for name, array in text.items()}
    key, num_tokens = encoders.layout(shape, "t2va", sizes)
    random = torch.Generator().manual_seed(0)
    parts: dict[str, dict[str, dict[str, torch.Tensor]]] = {part: {} for part in PARTS}
    rows: list[LatentRow] = []
    for number in range(NUM_CLIPS):
        entry = f"{number}@full"
        parts["picture"][entry] = {"video": torch.randn(video, generator=random)}
        parts["sound"][entry] = {"audio": torch.randn(audio, generator=random)}
        parts["text"][entry] = {name: array.clone() for name, array in text.items()}
        rows.append(
            LatentRow(
                entry=entry, clip_id=f"{number}", source_id=f"{number}", split="train", group="", canvas="full",
                has_audio=True, variants=("t2va",), layouts=(key,), num_tokens=(num_tokens,), shard="00000",
                keys=("k",) * len(PARTS), **shape.model_dump(),
            )
        )  # fmt: skip
    for part, entries in parts.items():
        write_shard(folder / shard_name(part, "00000"), entries, dict.fromkeys(entries, "k"))
    write_index(folder, rows, {"family": encoders.name, "text_of": {"t2va": "t2va"}})


class Bare:
    """What anyone would write first: the model, its inputs ready, and AdamW."""

    def __init__(self, model: torch.nn.Module, inputs: dict[str, Any], running: Running, clock: Clock) -> None:
        self._model, self._inputs, self._running, self._clock = model, inputs, running, clock
        self._parameters, self._device = list(model.parameters()), next(model.parameters()).device
        self._optimiser = torch.optim.AdamW(self._parameters, lr=1e-5, betas=(0.9, 0.95), weight_decay=0)
        self._targets: list[torch.Tensor] = []

    def step(self) -> None:
        """One update."""
        with self._clock.part("forward"), parallel.computing(self._running, self._device):
            found = self._model(**self._inputs)[:2]
            self._targets = self._targets or [torch.randn_like(part) for part in found]
            errors = [(part - target).square().mean() for part, target in zip(found, self._targets, strict=True)]
        with self._clock.part("backward"):
            (errors[0] + errors[1]).backward()
        with self._clock.part("clip"):
            torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        with self._clock.part("optimiser"):
            self._optimiser.step()
            self._optimiser.zero_grad(set_to_none=True)


class Turns:
    """Lets a bare step follow every step of ours, and keeps what both took."""

    def __init__(
        self, module: SupervisedFineTuning, blocks: str, running: Running, device: torch.device, *, compiled: bool
    ) -> None:
        self.ours, self.theirs = Clock(device), Clock(device)
        self.pairs: list[tuple[dict[str, float], dict[str, float]]] = []
        self._bare: Bare | None = None
        self.inputs: dict[str, Any] = {}
        """Of the transformer in our first step."""
        self._module, self._running, self._compiled = module, running, compiled
        self._blocks = blocks
        self._copy = copy.deepcopy(module.transformer)
        self._hook = module.transformer.register_forward_pre_hook(self._keep, with_kwargs=True)
        cast(Any, module).on_train_batch_end = self._turn
        clock = self.ours
        for owner, name, part in (
            (module, "_clipped", "clip"), (module, "_step", "optimiser"), (module, "manual_backward", "backward"),
            (module, "_summed", "numbers"), (module, "_rows", "numbers"), (module, "_refuse_non_finite", "numbers"),
            (module.transformer, "forward", "forward"), (module, "_pass", "inputs"), (module, "training_step", "step"),
        ):  # fmt: skip
            setattr(owner, name, clock.timed(part, getattr(owner, name)))

    def _keep(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Our first step's inputs become the bare step's."""
        assert not args
        self.inputs = {name: copy.deepcopy(value) for name, value in kwargs.items()}
        self._hook.remove()

    def _turn(self, *_: Any) -> None:
        self.ours.total()
        self.theirs.restart()
        if self._bare is None:
            model = self._copy.to(self._module.device).train()
            parallel.prepare(model, self._blocks, self._running, mesh=None, compiled=self._compiled)
            self._bare = Bare(model, self.inputs, self._running, self.theirs)
        torch.use_deterministic_algorithms(mode=False)  # ours are, and that is its own cost
        self._bare.step()
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        self.theirs.total()
        self.pairs.append((dict(self.ours.parts), dict(self.theirs.parts)))
        self.ours.restart()


def one_round(base: Path, store: Path, size: Size, device: torch.device, number: int) -> Turns:
    """Train for some steps, in turns."""
    on_gpu = device.type != "cpu"
    running = Running(strategy="ddp", precision="bf16" if on_gpu else "fp32", recompute="none", micro_batch=size.batch)
    stage = Stage.model_validate(
        {
            "conditions": {"t2va": 1.0}, "num_steps": size.steps + WARM, "batch_size": size.batch, "warmup_steps": 1,
            "learning_rate": 1e-5, "guidance": {"form": "none"},
        }
    )  # fmt: skip
    latents = LatentStore(store)
    family = load_family(base)
    module = SupervisedFineTuning(family, stage, 0, running, compiled=on_gpu)
    turns = Turns(module, family.blocks, running, device, compiled=on_gpu)
    sampler = Sampler(candidates_of(latents.index), stage, 0)
    known = loading.Steps.__getitem__, objective.noise_of
    loading.Steps.__getitem__ = turns.ours.timed("reading", known[0])
    objective.noise_of = turns.ours.timed("noise", known[1])
    try:
        with (
            tempfile.TemporaryDirectory() as work,
            Path(os.devnull).open("w") as nowhere,
            contextlib.redirect_stderr(nowhere),
        ):
            training.fit(
                module, sampler, latents, Path(work) / f"{number}", {}, accelerator=str(device), save_every=10**6
            )
    finally:
        loading.Steps.__getitem__, objective.noise_of = known
    return turns


def compared(size: Size, device: torch.device) -> dict[str, Any]:
    """Ratio of a step, and by part what ours and the bare one take, of a bare step."""
    ratios: list[float] = []
    parts: list[tuple[dict[str, float], dict[str, float]]] = []
    bare_s: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        base, store = Path(place) / "base", Path(place) / "store"
        make_base(size, base)
        make_store(base, size, store)
        for number in range(size.rounds):
            pairs = one_round(base, store, size, device, number).pairs[WARM:]
            ours, theirs = (sum(sum(pair[side].values()) for pair in pairs) for side in (0, 1))
            ratios.append(ours / theirs)
            bare_s.append(theirs / len(pairs))
            parts += pairs
        family = load_family(base)
        num_parameters = sum(item.numel() for item in family.transformer.parameters())
        num_rows = LatentStore(store).index.row(0).num_tokens[0]
    whole = sum(sum(theirs.values()) for _, theirs in parts)
    names = sorted({name for pair in parts for side in pair for name in side})
    shares = {
        name: [round(sum(pair[side].get(name, 0.0) for pair in parts) / whole, 4) for side in (0, 1)] for name in names
    }
    return {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_least": round(min(ratios), 4),
        "ratio_most": round(max(ratios), 4),
        "bare_step_s": round(statistics.median(bare_s), 5),
        "parameters": num_parameters,
        "rows": num_rows,
        "batch": size.batch,
        "rounds": size.rounds,
        "steps_a_round": size.steps,
        "parts_ours_and_bare": shares,
    }


def held(size: Size, device: torch.device) -> dict[str, Any]:
    """What a step holds for backward and at its peak, gradients apart, over that of a plain one in fp32."""
    found: dict[str, dry_run.Step] = {}
    with tempfile.TemporaryDirectory() as place:
        base, store = Path(place) / "base", Path(place) / "store"
        make_base(size, base)
        make_store(base, size, store)
        turns = one_round(base, store, size._replace(steps=0, batch=1), device, 0)
        for precision in ("fp32", "bf16"):
            for recompute in ("none", "selective", "blocks"):
                family = load_family(base)
                model = family.transformer.to(device).train()
                running = Running(strategy="ddp", precision=precision, recompute="none")
                parallel.prepare(model, family.blocks, running, mesh=None, compiled=False)
                with parallel.computing(running, device):
                    found[f"{precision}, {recompute}"] = dry_run.step(model, turns.inputs, recompute)
    plain = found["fp32, none"]
    return {
        name: {
            "held": round(step.held_bytes / plain.held_bytes, 4),
            "peak": round(step.peak_bytes / plain.peak_bytes, 4),
            "held_bytes": step.held_bytes,
            "peak_bytes": step.peak_bytes,
        }
        for name, step in found.items()
    }


def main() -> None:
    """Print and keep the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sizes", nargs="*", choices=list(SIZES), default=["tiny-h3", "tiny-ltx2", "h3-512"])
    parser.add_argument("--parts", nargs="*", default=["step", "memory_over_plain_fp32"])
    options = parser.parse_args()
    use_one_thread()
    device = torch.device(options.device)
    report = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    packages = {name: version(name) for name in ("torch", "lightning", "diffusers")}
    for name in options.sizes:
        for what, measure in (("step", compared), ("memory_over_plain_fp32", held)):
            if what in options.parts:
                found = measure(SIZES[name], device)
                print(name, what, json.dumps(found, indent=1), flush=True)
                report.setdefault(f"{name}, {device.type}", {})[what] = {**packages, **found}
                write_text(RESULTS, json.dumps(report, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
