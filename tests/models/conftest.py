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
