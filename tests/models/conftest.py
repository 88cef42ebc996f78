"""The tiny H3, loaded, and a tiny LTX-2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.families import Family, load_family


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def family(base: Path) -> Family:
    return load_family(base)


@pytest.fixture(scope="session")
def ltx2_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny LTX-2.3 with random weights."""
    from models import tiny_ltx2

    folder = tmp_path_factory.mktemp("zoo") / "tiny-ltx2"
    tiny_ltx2.save(tiny_ltx2.build(3), folder)
    return folder
