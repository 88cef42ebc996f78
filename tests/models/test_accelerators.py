"""A device is what its setting says, or an error that says why not; an NPU trains what a CPU does.

The NPU is PyTorch's own extension point with the CPU's operators (`fake_npu`), under the name, the modules and the
process-group backend that torch_npu gives a real one. It lives in processes of its own, as it can never be taken away.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from models import accelerators
from models.accelerators import able, device_of
from models.families import load_encoders
from models.running import Running
from models.samples import moved
from tests.models.test_parallel import LEVELS, assert_equal_to
from tests.models.training_runs import result_of, run, stage_of, together

FAKE = Path(__file__).parent / "fake_npu"


@pytest.mark.parametrize("there", [["cuda", "npu", "cpu"], ["npu", "cpu"], ["cpu"]])
def test_auto_takes_the_first_there_is(there: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "missing", lambda kind: None if kind in there else "not there")
    monkeypatch.setattr(torch, "device", str)
    assert device_of("auto") == there[0]


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cpu:0", "CUDA", "", "mps", "cuda:-1"])
def test_a_name_that_is_none_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(ValueError, match=r"train\.accelerator = .*auto, cpu, cuda, npu"):
        device_of(name, "train.accelerator")


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_what_is_named_and_not_there_never_becomes_a_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(
        RuntimeError, match=rf"encode\.accelerator = {name}: no such device.*set encode\.accelerator to cpu"
    ):
        device_of(name, "encode.accelerator")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    if name == "cuda:1":
        with pytest.raises(RuntimeError, match="there are 1, counted from 0"):
            device_of(name)
    else:
        assert device_of(name) == torch.device("cuda")


@pytest.mark.parametrize(
    ("package", "said"),
    [
        (None, "torch_npu, which drives Ascend NPUs, is not installed"),
        ("raise ImportError('libhccl.so: cannot open shared object file')", "libhccl.so: cannot open"),
    ],
)
def test_an_npu_without_its_package_says_so_in_one_line(
    package: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.delenv("PYTORCH_NPU_ALLOC_CONF", raising=False)
    if package is None:
        monkeypatch.setattr(accelerators.importlib.util, "find_spec", lambda name: None)
    else:
        (tmp_path / "torch_npu.py").write_text(package)
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match=said) as error:
        device_of("npu", "train.accelerator")
    assert "\n" not in str(error.value)
    assert "set train.accelerator to cpu" in str(error.value)


def test_eight_bit_products_are_refused_on_an_npu_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    npu = SimpleNamespace(type="npu")
    monkeypatch.setattr(accelerators, "device_of", lambda *_: npu)
    with pytest.raises(RuntimeError, match=r"train\.precision fp8 has no kernels on npu; set it to bf16"):
        able("npu", Running(precision="fp8"))
    assert able("npu", Running(precision="bf16")) is npu


@pytest.fixture(scope="session")
def library() -> str:
    """The fake device, compiled."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    made = subprocess.run([sys.executable, FAKE / "build.py"], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout.splitlines()[-1]


def with_npu(library: str, run_it: Any, *given: Any) -> None:
    """In a fresh process: the fake where the real package would be."""
    sys.path.insert(0, str(FAKE))
    os.environ["FAKE_NPU"] = library
    run_it(*given)


def trained(
    base: Path, store: Path, work: Path, size: int, running: dict[str, Any], accelerator: str, library: str
) -> Any:
    work.mkdir()
    given = (base, store, work, stage_of(**LEVELS, num_steps=6), running, 5, None, accelerator)
    together(size, with_npu, library, run, *given)
    assert (work / "device").read_text().partition(":")[0] == ("cpu" if accelerator == "cpu" else "npu")
    return result_of(work)


def moving(bases: list[Path]) -> None:
    """To an NPU, which here has no convolutions, and back."""
    assert device_of("npu").type == "npu"
    for base in bases:
        encoders = load_encoders(base)
        shape = encoders.shape(22 / 24, 64, 64)
        latents = [torch.randn(size) for size in encoders.latent_shapes(shape)]
        before = encoders.decode(*latents, shape)
        parts = (
            list[torch.nn.Module](encoders._media.values())
            if encoders.name == "h3"
            else [getattr(encoders, name) for name in ("_vae", "_audio_vae", "_vocoder")]
        )
        with moved(encoders, torch.device("npu:1")):
            assert {weight.device for part in parts for weight in part.parameters()} == {torch.device("npu:1")}
        after = encoders.decode(*latents, shape)
        assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))


def test_autoencoders_go_to_a_device_and_come_back(base: Path, ltx2_base: Path, library: str) -> None:
    together(1, with_npu, library, moving, [base, ltx2_base])


@pytest.fixture(scope="module")
def on_cpu(base: Path, store_folder: Path, tmp_path_factory: pytest.TempPathFactory, library: str) -> Any:
    return trained(base, store_folder, tmp_path_factory.mktemp("alone") / "cpu", 1, {}, "cpu", library)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("size", "accelerator", "running", "tolerance"),
    [
        (1, "npu:1", {}, 1e-5),
        pytest.param(1, "auto", {"precision": "bf16", "double": False}, 0.5, marks=pytest.mark.slow),
        (1, "npu", {"precision": "fp16", "double": False}, 0.5),
        pytest.param(2, "npu", {"strategy": "ddp", "micro_batch": 1}, 1e-5, marks=pytest.mark.slow),
        (2, "npu", {"strategy": "fsdp2", "recompute": "blocks"}, 1e-5),
        (2, "npu", {"strategy": "fsdp2", "offload": True}, 1e-5),
        (2, "npu", {"strategy": "fsdp2", "offload": True, "double": False, "sampled": True}, 0.1),
    ],
)
def test_an_npu_trains_what_a_cpu_does(
    base: Path, store_folder: Path, tmp_path: Path, library: str, on_cpu: Any,
    size: int, accelerator: str, running: dict[str, Any], tolerance: float,
) -> None:  # fmt: skip
    on_npu = trained(base, store_folder, tmp_path / "npu", size, running, accelerator, library)
    assert_equal_to(on_npu, on_cpu, tolerance)
