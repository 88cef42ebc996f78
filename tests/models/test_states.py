"""Training states: bitwise resumption, resharding, and what becomes of states that are not as written."""

from __future__ import annotations

import errno
import json
import multiprocessing
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from models import state_tensors, states
from models.state_tensors import materialise, restore, tensors_of
from models.states import RECORD, States

IDENTITY = {"seed": 1, "lora": {"rank": 8}}
ROOT = Path(__file__).parents[2]


class Net(nn.Module):
    """A frozen layer, a buffer, a layer that gets no gradients, and a bias with fewer rows than processes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.frozen = nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 5)
        self.last, self.unused = nn.Linear(5, 1), nn.Linear(3, 3)
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, batch: Tensor) -> Tensor:
        return self.last(self.frozen(self.norm(self.first(batch)))).square().mean()


class Coded(torch.optim.Optimizer):
    """Keeps bytes and Python numbers, as 8-bit optimisers do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state.update(step=0, scale=1.0, codes=torch.zeros(parameter.shape, dtype=torch.uint8), none=None)
            state["step"] += 1
            state["scale"] *= 0.9 + float(parameter.grad.abs().mean()) / 3
            state["codes"].add_((parameter.grad * 50).to(torch.int64).to(torch.uint8))
            parameter.sub_(self.param_groups[0]["lr"] * state["scale"] * state["codes"].float() / state["step"])


def a_run(
    seed: int, *, sharded: bool = False, optimiser: Callable[..., Any] = torch.optim.AdamW
) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(seed)
    if sharded:
        for layer in (model.first, model.last, model):
            fully_shard(layer)
    return model, optimiser([item for item in model.parameters() if item.requires_grad], lr=0.01)


def train(model: Net, optimiser: torch.optim.Optimizer, steps: range) -> None:
    """The same batch in every process, so that replicas stay equal."""
    for step in steps:
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).backward()
        optimiser.step()
        optimiser.zero_grad()


def entire(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: (item.detach().full_tensor() if isinstance(item, DTensor) else item.detach()).clone()
        for name, item in tensors.items()
    }


def raw(item: Tensor) -> bytes:
    """To the bit, signs of zeros included."""
    return item.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(raw(one[name]) == raw(other[name]) for name in one)


def together(size: int, work: Callable[..., None], tmp_path: Path, *given: Any) -> None:
    """Run `work` in fresh processes that form a group, forked from one that has imported what they need."""
    multiprocessing.set_forkserver_preload(["models.states", "torch.distributed.fsdp", "pytest"])
    store = tmp_path / f"store-{len(list(tmp_path.glob('store-*')))}"
    mp.start_processes(joined, (size, str(store), work, *given), nprocs=size, start_method="forkserver")


def joined(rank: int, size: int, store: str, work: Callable[..., None], *given: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    work(rank, *given)
    dist.destroy_process_group()


def refilled(folder: Path, **tensors: Tensor) -> dict[str, Tensor]:
    """What `load` puts into tensors of these shapes."""
    found = States(folder, IDENTITY)
    state = found.latest()
    assert state is not None
    into = {name: torch.full_like(tensor, 99) for name, tensor in tensors.items()}
    found.load(state, into)
    return into


def saved(folder: Path, *steps: int, keep: int = 2) -> States:
    kept = States(folder, IDENTITY, keep)
    for step in steps:
        kept.save(step, {"a": torch.full((1000,), float(step))}, {"step": step})
    kept.finish()
    return kept


def shard(folder: Path, step: int) -> Path:
    return next((folder / f"step-{step:08d}").glob("*.safetensors"))


@pytest.mark.parametrize("optimiser", [torch.optim.AdamW, Coded])
def test_a_resumed_run_ends_in_the_bytes_of_the_undisturbed_one(tmp_path: Path, optimiser: Any) -> None:
    model, adam = a_run(1, optimiser=optimiser)
    train(model, adam, range(5))
    kept = States(tmp_path, IDENTITY)
    kept.save(5, tensors_of(model, adam, {"ema": torch.arange(3)}), {"scaler": 0.1, "curve": 5})
    train(model, adam, range(5, 10))  # while it is written
    kept.finish()

    other, fresh = a_run(2, optimiser=optimiser)
    extra = {"ema": torch.zeros(3, dtype=torch.int64)}
    again = States(tmp_path, IDENTITY)
    state = again.latest()
    assert state is not None
    assert (state.step, state.facts) == (5, {"scaler": 0.1, "curve": 5})
    other.frozen.load_state_dict(model.frozen.state_dict())  # not in a state: it is the base model's
    restore(again, state, other, fresh, extra)
    train(other, fresh, range(5, 10))
    assert same(entire(tensors_of(other, fresh)), entire(tensors_of(model, adam)))
    assert extra["ema"].tolist() == [0, 1, 2]
    assert [type(value) for value in fresh.state[other.first.weight].values()] == [
        type(value) for value in adam.state[model.first.weight].values()
    ]


def first_half(rank: int, folder: Path) -> None:
    for sharded in (False, True):
        model, adam = a_run(1, sharded=sharded)
        train(model, adam, range(5))
        with torch.no_grad():
            model.eval()(torch.zeros(1, 6))  # leaves FSDP's parameters unsharded
            model.train()
        kept = States(folder / f"{sharded}", IDENTITY)
        tensors = tensors_of(model, adam)
        assert isinstance(tensors["model.first.weight"], DTensor) == sharded
        at_5 = entire(tensors)
        kept.save(5, tensors, {})
        train(model, adam, range(5, 10))
        kept.finish()
        ended = entire(tensors_of(model, adam))
        if rank == 0:
            torch.save([at_5, ended, model.frozen.state_dict() if not sharded else {}], folder / f"{sharded}.pt")


def second_half(rank: int, folder: Path) -> None:
    for sharded in (False, True):
        model, adam = a_run(1, sharded=sharded)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 if not parameter.requires_grad else 3.0)
        kept = States(folder / f"{sharded}", IDENTITY)
        state = kept.latest()
        assert state is not None
        restore(kept, state, model, adam)
        train(model, adam, range(5, 10))
        assert same(entire(tensors_of(model, adam)), torch.load(folder / f"{sharded}.pt")[1])


def reshard(rank: int, source: Path, target: Path, expected: Path) -> None:
    """Load what another number of processes saved, check it whole, save it from here."""
    model, adam = a_run(3, sharded=True)
    kept = States(source, IDENTITY)
    state = kept.latest()
    assert state is not None
    restore(kept, state, model, adam)
    assert same(entire(tensors_of(model, adam)), torch.load(expected)[0])
    again = States(target, IDENTITY)
    again.save(5, tensors_of(model, adam), {})
    again.finish()


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two processes, replicated and sharded, saved at step 5."""
    folder = tmp_path_factory.mktemp("halfway")
    together(2, first_half, folder, folder)
    return folder


def test_two_processes_resume_to_the_bit_replicated_and_sharded(halfway: Path, tmp_path: Path) -> None:
    assert {path.suffix for path in halfway.glob("*/step-*/*")} == {".safetensors", ".json"}
    assert len(list((halfway / "True").rglob("*.safetensors"))) == 2
    together(2, second_half, tmp_path, halfway)


def test_a_state_is_read_by_other_numbers_of_processes(halfway: Path, tmp_path: Path) -> None:
    at_5 = torch.load(halfway / "True.pt")[0]
    model, adam = a_run(4)
    kept = States(halfway / "True", IDENTITY)
    state = kept.latest()
    assert state is not None
    assert state.record.world_size == 2
    restore(kept, state, model, adam)  # 2 -> 1
    assert same(entire(tensors_of(model, adam)), at_5)
    one = States(tmp_path / "one", IDENTITY)
    one.save(5, tensors_of(model, adam), {})
    one.finish()
    together(2, reshard, tmp_path, tmp_path / "one", tmp_path / "two", halfway / "True.pt")  # 1 -> 2
    together(3, reshard, tmp_path, tmp_path / "two", tmp_path / "three", halfway / "True.pt")  # 2 -> 3
    assert same(refilled(tmp_path / "three", **at_5), at_5)  # 3 -> 1


def agree(rank: int, folder: Path) -> None:
    sys.stderr = (folder.parent / f"stderr-{rank}").open("w", encoding="utf-8")
    kept = States(folder, IDENTITY)
    ours = {f"of_all_{name}": torch.full((1000,), float(name)) for name in range(4)}
    for step in (1, 2):
        kept.save(step, ours, {})
    kept.finish()
    dist.barrier()
    if rank == 0:
        flip(next((folder / "step-00000002").glob("shard-00002-*")))
    dist.barrier()
    state = kept.latest()
    assert state is not None
    assert state.step == 1
    with pytest.raises(RuntimeError, match="step-00000001: it has no strange"):
        kept.load(state, ours | ({"strange": torch.zeros(1)} if rank else {}))
    if rank == 1:
        states.written_by = lambda *_: ({}, "shard: Input/output error")
    kept.save(3, ours, {})
    with pytest.raises(RuntimeError, match="Input/output error"):
        kept.finish()
    assert kept.latest() == state


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_all_processes_take_the_same_state_and_fail_together(tmp_path: Path) -> None:
    together(2, agree, tmp_path, tmp_path / "states")
    refused = "step-00000002/shard-00002-model-00001-of-00001.safetensors has xxh3_128"
    assert (tmp_path / "stderr-0").read_text().count(refused) == 1
    assert (tmp_path / "stderr-1").read_text() == ""


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), r"holds \d+ bytes, \d+ were written"),
        (flip, "has xxh3_128 [0-9a-f]{32}, [0-9a-f]{32} was written"),
        (lambda path: path.unlink(), "cannot be read: No such file"),
        (lambda path: path.with_name("more.safetensors").write_bytes(b""), "is not in its record"),
        (lambda path: (path.parent / RECORD).write_text("{"), "state.json is no record: .*EOF"),
    ],
)
def test_a_damaged_state_is_refused_by_name_and_the_one_before_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], Any], said: str
) -> None:
    kept = saved(tmp_path, 1, 2)
    damage(shard(tmp_path, 2))
    state = kept.latest()
    assert state is not None
    assert state.step == 1
    err = capsys.readouterr().err
    assert err.startswith(f"state refused: {tmp_path / 'step-00000002'}/")
    assert re.search(said, err)
    assert (tmp_path / "refused-step-00000002").is_dir()
    assert refilled(tmp_path, a=torch.zeros(1000))["a"].eq(1).all()
    kept.save(2, {"a": torch.ones(3)}, {})  # its place is free again
    kept.finish()
    assert kept.latest() != state


def test_a_state_of_another_identity_is_named_with_what_differs_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, 1)
    assert States(tmp_path, {"seed": 1, "lora": {"rank": 16}, "new": True}).latest() is None
    err = capsys.readouterr().err
    assert "step-00000001 belongs to other settings: lora.rank is 16 here and 8 there; new is True here and None" in err
    assert not list(tmp_path.glob("step-*"))


def test_the_newest_whole_states_are_kept(tmp_path: Path) -> None:
    kept = saved(tmp_path, 1, 2, 3, 4, keep=2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]
    assert (tmp_path / "latest").read_text() == "step-00000004\n"
    before = shard(tmp_path, 4).stat().st_mtime_ns
    kept.save(4, {"a": torch.zeros(1)}, {})
    kept.finish()
    assert shard(tmp_path, 4).stat().st_mtime_ns == before, "a state that is whole must not be put at risk"
    with pytest.raises(ValueError, match="at least 1"):
        States(tmp_path, IDENTITY, keep=0)


def test_what_is_in_flight_does_not_count_and_does_not_see_later_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = saved(tmp_path, 1, 2, keep=1)
    go, save = threading.Event(), states.dcp.save
    monkeypatch.setattr(states.dcp, "save", lambda *given, **named: go.wait(30) and save(*given, **named))
    tensors = {"a": torch.zeros(4, 3).t(), "b": torch.tensor(5)}  # one not contiguous, one without dimensions
    kept.save(3, tensors, facts := {"curve": [1]})
    tensors["a"].fill_(7)
    tensors["b"].fill_(7)
    facts["curve"].append(2)
    assert [path.parent.name for path in tmp_path.glob(f"*/{RECORD}")] == ["step-00000002"]
    go.set()
    kept.finish()
    assert [path.parent.name for path in tmp_path.glob(f"*/{RECORD}")] == ["step-00000003"]
    into = refilled(tmp_path, **tensors)
    assert into["a"].eq(0).all()
    assert into["b"].item() == 5
    assert json.loads((tmp_path / "step-00000003" / RECORD).read_text())["facts"] == {"curve": [1]}


@pytest.mark.parametrize(
    ("into", "said"),
    [
        ({}, "it has a, and there is none here"),
        ({"a": torch.zeros(1000), "b": torch.zeros(1)}, "it has no b"),
        ({"a": torch.zeros(10, 100)}, r"a has shape \[1000\] in it and \[10, 100\] here"),
        ({"a": torch.zeros(1000).bfloat16()}, "a is torch.float32 in it and torch.bfloat16 here"),
    ],
)
def test_tensors_that_are_not_those_of_the_state_are_named(tmp_path: Path, into: dict[str, Tensor], said: str) -> None:
    kept = saved(tmp_path, 1)
    state = kept.latest()
    assert state is not None
    with pytest.raises(RuntimeError, match=f"state {state.folder}: {said}"):
        kept.load(state, into)


def test_a_disk_too_small_is_told_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = saved(tmp_path, 1)
    usage = namedtuple("usage", "total used free")  # noqa: PYI024
    monkeypatch.setattr(states.shutil, "disk_usage", lambda _: usage(0, 0, 3999))
    with pytest.raises(RuntimeError, match=r"step-00000002 cannot .*too little space.*needs 4000 bytes, 3999 are free"):
        kept.save(2, {"a": torch.zeros(1000)}, {})
    monkeypatch.undo()
    kept.save(2, {"a": torch.zeros(1000)}, {})
    kept.finish()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"file/step-00000001 cannot be written: .*Not a directory.*needs 4 bytes"):
        States(tmp_path / "file", IDENTITY).save(1, {"a": torch.zeros(1)}, {})


def child(tmp_path: Path, code: str) -> subprocess.Popen[str]:
    """A process with one whole state, at step 1, that then runs `code`."""
    start = f"""
        import sys, time, resource, torch
        from pathlib import Path
        from models import states
        torch.set_num_threads(1)
        kept = states.States(Path({str(tmp_path)!r}), {IDENTITY!r})
        kept.save(1, {{"a": torch.ones(1000)}}, {{}})
        kept.finish()
    """
    text = textwrap.dedent(start) + textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", text], cwd=ROOT, stdout=subprocess.PIPE, text=True)


SLOW = """
    def slow(path):
        print("written", flush=True)
        time.sleep(60)
    states.xxh3_128 = slow
    kept.save(2, {"a": torch.zeros(1000)}, {})
"""


def test_a_save_that_fails_midway_names_the_disk_and_leaves_the_state_before(tmp_path: Path) -> None:
    process = child(
        tmp_path,
        """
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        kept.save(2, {"a": torch.zeros(1_000_000)}, {})
        try:
            kept.finish()
        except RuntimeError as error:
            print(error)
        kept.save(3, {"a": torch.ones(1000)}, {})
        kept.finish()
        """,
    )
    said, _ = process.communicate(timeout=25)
    assert "step-00000002 cannot be written: " in said
    assert f"[Errno {errno.EFBIG}]" in said
    assert "needs 4000000 bytes" in said
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000003"]


def test_kill_during_a_save_leaves_the_state_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = child(tmp_path, SLOW + "    kept.finish()\n")
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    assert shard(tmp_path, 2).is_file()
    assert refilled(tmp_path, a=torch.zeros(1000))["a"].eq(1).all()
    assert capsys.readouterr().err == f"{tmp_path / 'step-00000002'} was interrupted: removed\n"
    assert not (tmp_path / "step-00000002").exists()


def test_a_pre_empted_process_abandons_what_takes_too_long_and_ends(tmp_path: Path) -> None:
    process = child(
        tmp_path,
        SLOW
        + """
    print(kept.close(0.5), flush=True)
    try:
        kept.finish()
    except RuntimeError as error:
        print(error)
    """,
    )
    said, _ = process.communicate(timeout=25)
    assert process.returncode == 0
    assert said.startswith("written\nFalse\n")
    assert "abandoned" in said
    assert not (tmp_path / "step-00000002" / RECORD).exists()


def test_closing_waits_for_what_can_be_finished(tmp_path: Path) -> None:
    kept = saved(tmp_path, 1)
    assert kept.close(0)
    kept.save(2, {"a": torch.zeros(1000)}, {})
    assert kept.close(20)
    assert (tmp_path / "step-00000002" / RECORD).is_file()


def test_materialising_changes_neither_parameters_nor_settings_nor_gradients() -> None:
    model, adam = a_run(1)
    model.first.weight.grad = torch.ones_like(model.first.weight)
    before, groups = entire(dict(model.named_parameters())), [dict(group) for group in adam.param_groups]
    materialise(adam)
    assert same(entire(dict(model.named_parameters())), before)
    assert [dict(group) for group in adam.param_groups] == groups
    assert model.first.weight.grad.eq(1).all()
    assert model.first.bias.grad is None
    assert set(adam.state[model.first.bias]) == {"step", "exp_avg", "exp_avg_sq"}
    held = adam.state[model.first.bias]["exp_avg"]
    materialise(adam)
    assert adam.state[model.first.bias]["exp_avg"] is held


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    model, adam = a_run(1)
    materialise(adam)
    adam.state[model.first.weight]["odd"] = "text"
    with pytest.raises(RuntimeError, match=r"optimiser.first.weight.odd is a str"):
        tensors_of(model, adam)
    with pytest.raises(RuntimeError, match=r"of shape \[7, 6\] of no module"):
        tensors_of(model.last, adam)
    with pytest.raises(RuntimeError, match=r"a cannot be saved .*sparse"):
        States(tmp_path, IDENTITY).save(1, {"a": torch.zeros(2, 2).to_sparse()}, {})


def test_wrappers_leave_no_trace_in_names() -> None:
    model, adam = a_run(1)
    names = tensors_of(model, adam).keys()
    model.first = torch.compile(model.first)  # pyright: ignore[reportAttributeAccessIssue]
    assert tensors_of(model, adam).keys() == names


def test_large_shards_become_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_tensors, "FILE_BYTES", 4000)
    tensors = {f"a{number}": torch.full((1000,), float(number)) for number in range(3)}
    kept = States(tmp_path, IDENTITY)
    kept.save(1, tensors, {})
    kept.finish()
    assert len(list(tmp_path.rglob("*.safetensors"))) == 3
    assert same(refilled(tmp_path, **tensors), tensors)
