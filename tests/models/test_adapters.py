"""An adapter file is the same every time it is written."""

from __future__ import annotations

from pathlib import Path

from models import adapters
from models.families import load_family


def test_same_adapter_gives_the_same_bytes_and_says_what_it_is(base: Path, tmp_path: Path) -> None:
    family = load_family(base)
    adapters.add(family, 4, 0)
    contents: set[bytes] = set()
    for _ in range(8):
        adapters.save(family, tmp_path / "adapter.safetensors", {"rank": "4", "alpha": "4", "partition": "transformer"})
        contents.add((tmp_path / "adapter.safetensors").read_bytes())
    assert len(contents) == 1
    assert rb"{\"alpha\": \"4\"" in contents.pop()
