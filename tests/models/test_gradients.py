"""Gradient norms by group: torch's own norm in one process and in two, and names that find their group."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

from models.families.sketches import sketch_of
from models.gradients import groups_of, norms

GROUPS = {"in": r"0\.", "out": r"2\."}


def a_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1))
    for parameter in model[1].parameters():
        parameter.requires_grad = False
    return model


def backward(model: nn.Module) -> None:
    batch = torch.linspace(-1, 1, 20).reshape(4, 5)
    model(batch).square().mean().backward()


def expected(model: nn.Sequential) -> dict[str, float]:
    parts = {name: [item.grad for item in model[at].parameters()] for name, at in (("in", 0), ("out", 2))}
    parts["all"] = [*parts["in"], *parts["out"]]
    return {name: float(nn.utils.get_total_norm(grads)) for name, grads in parts.items()}


def test_norms_are_torchs_and_leave_the_gradients_alone() -> None:
    model = a_model()
    backward(model)
    before = [item.grad.clone() for item in model.parameters() if item.grad is not None]
    assert norms(model.named_parameters(), GROUPS) == pytest.approx(expected(model), rel=1e-6)
    after = [item.grad for item in model.parameters() if item.grad is not None]
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))


def test_what_no_pattern_matches_is_other_and_wrappers_do_not_hide_a_name() -> None:
    model = a_model()
    backward(model)
    wanted = expected(model)
    wrapped = [
        (f"module._orig_mod.{name}".replace("0.", "0._checkpoint_wrapped_module."), item)
        for name, item in model.named_parameters()
    ]
    found = norms(wrapped, {"in": GROUPS["in"]})
    assert found == pytest.approx({"in": wanted["in"], "other": wanted["out"], "all": wanted["all"]}, rel=1e-6)


def test_a_group_without_gradients_has_norm_zero_and_one_without_parameters_is_not_there() -> None:
    model = a_model()
    assert norms(model.named_parameters(), {**GROUPS, "nothing": "no"}) == {"in": 0.0, "out": 0.0, "all": 0.0}


def _sharded(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = a_model()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    backward(model)  # the same batch in both, so the mean over them is one process's gradient
    result = norms(model.named_parameters(), GROUPS)
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def test_two_processes_that_share_the_model_find_what_one_finds(tmp_path: Path) -> None:
    mp.spawn(_sharded, (str(tmp_path),), nprocs=2)
    model = a_model()
    backward(model)
    wanted = expected(model)
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == pytest.approx(wanted, rel=1e-5)


def test_every_parameter_of_a_family_is_in_the_group_its_name_says(base: Path, ltx2_base: Path) -> None:
    for folder in (base, ltx2_base):
        sketch: Any = sketch_of(folder)
        groups = groups_of(sketch.groups, sketch.units, sketch.num_blocks, num_ranges=2)
        names = [name for name, _ in sketch.build(sketch.num_blocks).named_parameters()]
        placed = {name: next((g for g, p in groups.items() if re.match(p, name)), "other") for name in names}
        for name, group in placed.items():
            plain = next((g for g, p in sketch.groups.items() if re.match(p, name)), "other")
            assert group.partition(" ")[0] == plain.partition(" ")[0]
        half = (sketch.num_blocks + 1) // 2
        deep = {
            name for name in names if (found := re.match(r"transformer_blocks\.(\d+)", name)) and int(found[1]) >= half
        }
        attention = {group for name, group in placed.items() if name in deep and group.startswith("attention")}
        assert len(attention) == (1 if sketch.num_blocks > 1 else 0)
        assert attention != {group for name, group in placed.items() if ".0.attn" in name and name not in deep}
