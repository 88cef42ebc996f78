"""Several processes compute what one does, and go on as if nothing had happened when one is killed."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from data.stage import Guidance, Stage
from models import adapters, parallel
from models.dry_run import Live
from models.families import load_family
from models.objective import Objective
from models.sft import PLAIN
from tests.models.originals import weights_in
from tests.models.training_runs import result_of, run, stage_of, together

LEVELS = {"noise": {"per_update": 2}}


def trained(
    base: Path, store: Path, work: Path, stage: Stage, size: int, **running: Any
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    work.mkdir()
    together(size, run, base, store, work, stage, running)
    return result_of(work)


def assert_equal_to(one: Any, other: Any, tolerance: float = 1e-5) -> None:
    (weights, curve), (expected, curve_expected) = one, other
    assert weights.keys() == expected.keys()
    for name in weights:
        scale = expected[name].abs().max()
        assert (weights[name] - expected[name]).abs().max() <= tolerance * scale, name
    assert [row["step"] for row in curve] == [row["step"] for row in curve_expected]
    for row, row_expected in zip(curve, curve_expected, strict=True):
        assert row.keys() == row_expected.keys()
        for key, value in row_expected.items():
            measured = key.startswith("loss") or key == "gradient_norm"
            assert row[key] == (pytest.approx(value, rel=tolerance, abs=1e-6) if measured else value), key


@pytest.fixture(scope="module")
def alone(base: Path, store_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trained(base, store_folder, tmp_path_factory.mktemp("alone") / "run", stage_of(**LEVELS), 1)


@pytest.mark.parametrize(
    "running",
    [
        {"strategy": "ddp", "micro_batch": 1},
        {"strategy": "fsdp2", "recompute": "blocks"},
        pytest.param({"strategy": "fsdp2", "micro_batch": 1}, marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_what_one_does(
    base: Path, store_folder: Path, tmp_path: Path, alone: Any, running: dict[str, Any]
) -> None:
    assert_equal_to(trained(base, store_folder, tmp_path / "two", stage_of(**LEVELS), 2, **running), alone)


def killed_and_continued(
    base: Path, store: Path, work: Path, stage: Stage, sizes: list[int], kills: list[int], *, double: bool = False
) -> Any:
    """Run with kill -9 in each of some steps, the n-th attempt with the n-th number of processes, until it is done."""
    work.mkdir()
    for attempt in range(len(kills) + 1):
        kill_at = kills[attempt] if attempt < len(kills) else None
        try:
            together(sizes[attempt % len(sizes)], run, base, store, work, stage, {"double": double}, 2, kill_at)
        except (ProcessExitedException, ProcessRaisedException):
            assert kill_at is not None
    starts = [int(line) for line in (work / "starts").read_text().split()]
    assert len(starts) == len(kills) + 1
    for start, kill in zip(starts[1:], kills, strict=True):  # a state every second step; the last may not be whole
        assert kill - kill % 2 - 2 <= start <= kill
    return result_of(work)


def assert_same(one: Any, other: Any) -> None:
    assert one[1] == other[1]
    assert all(torch.equal(one[0][name], tensor) for name, tensor in other[0].items())


@pytest.mark.parametrize("size", [1, 2])
def test_killed_runs_end_as_undisturbed_ones(base: Path, store_folder: Path, tmp_path: Path, size: int) -> None:
    stage = stage_of(num_steps=12, ema_decay=0.9)
    undisturbed = killed_and_continued(base, store_folder, tmp_path / "whole", stage, [size], [])
    kills = sorted(random.Random(size).sample(range(12), 2))
    assert_same(killed_and_continued(base, store_folder, tmp_path / "killed", stage, [size], kills), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_runs_killed_at_twenty_random_steps_end_as_undisturbed_ones(
    base: Path, store_folder: Path, tmp_path: Path, size: int
) -> None:
    stage = stage_of(num_steps=60, ema_decay=0.9)
    undisturbed = killed_and_continued(base, store_folder, tmp_path / "whole", stage, [size], [])
    kills = sorted(random.Random(size).sample(range(60), 20))
    assert_same(killed_and_continued(base, store_folder, tmp_path / "killed", stage, [size], kills), undisturbed)


def test_another_number_of_processes_continues_the_same_batches(base: Path, store_folder: Path, tmp_path: Path) -> None:
    stage = stage_of(num_steps=12)
    undisturbed = trained(base, store_folder, tmp_path / "whole", stage, 1)
    changed = killed_and_continued(base, store_folder, tmp_path / "changed", stage, [2, 1, 2], [5, 9], double=True)
    assert_equal_to(changed, undisturbed)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow_base(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny H3 with weights in bf16, as models are published."""
    folder = tmp_path_factory.mktemp("narrow") / "base"
    shutil.copytree(base, folder)
    state = {name: tensor.bfloat16() for name, tensor in weights_in(base / "transformer").items()}
    safetensors.torch.save_file(state, folder / "transformer" / "diffusion_pytorch_model.safetensors")
    return folder


def lies_in_a_file(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is pages of a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(edge, 16) for edge in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line.endswith(".safetensors")
    return False


def measure(base: Path, work: Path, method: str) -> None:
    """Load and shard as training does, the weights that drift is measured from too; note what this process allocates."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    family = load_family(base, mapped=True)
    assert all(lies_in_a_file(item) for item in family.transformer.parameters())
    if method == "lora":
        adapters.add(family, 2, 0)
    first = Objective(family, Guidance(form="drift"), shared=True).first if method == "drift" else None
    models = [item.transformer for item in (family, first) if item is not None]
    units: dict[str, int] = {}
    for name, item in family.transformer.named_parameters():
        unit = "adapter" if "lora_" in name else ".".join(name.split(".")[:2])
        units[unit] = units.get(unit, 0) + 4 * item.numel()
    del item  # what holds a parameter keeps it whole
    with Live([item for model in models for item in model.parameters()]) as live:
        for model in models:
            parallel.prepare(
                model, family.blocks, PLAIN.model_copy(update={"strategy": "fsdp2"}), mesh=mesh, compiled=False
            )
    found = {"now": live.now, "peak": live.peak, "models": len(models), "whole": sum(units.values())}
    (work / f"{dist.get_rank()}.json").write_text(json.dumps({**found, "units": units}))


@pytest.mark.parametrize("method", ["full", "lora", "drift"])
def test_a_process_holds_its_shards_and_one_unit_of_a_model_in_files(
    narrow_base: Path, tmp_path: Path, method: str
) -> None:
    together(2, measure, narrow_base, tmp_path, method)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        shards = found["models"] * found["whole"] / 2
        assert found["now"] == pytest.approx(shards, rel=0.03)  # rows that do not divide are padded
        assert found["peak"] <= found["now"] + max(found["units"].values())
        assert max(found["units"].values()) < found["whole"] / 2


@pytest.mark.parametrize("method", ["full", "lora"])
def test_weights_left_in_their_files_train_to_the_same_bits(
    narrow_base: Path, store_folder: Path, tmp_path: Path, method: str
) -> None:
    stage, running = stage_of(num_steps=3, method=method), {"strategy": "fsdp2", "precision": "bf16", "double": False}
    widened, mapped = (
        trained(narrow_base, store_folder, tmp_path / f"{kept}", stage, 2, **running, mapped=kept)
        for kept in (False, True)
    )
    assert_same(mapped, widened)
