"""A small project of its own, under Git and DVC, whose verbs are shell one-liners."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Make a project of the given stages (name to command, each writing the file NAME) and work in it."""

    def make(stages: dict[str, str], params: dict[str, object] | None = None) -> Path:
        body = {name: {"cmd": command, "outs": [name.replace("@", "_")]} for name, command in stages.items()}
        (tmp_path / "dvc.yaml").write_text(yaml.safe_dump({"stages": body}))
        (tmp_path / "params.yaml").write_text(yaml.safe_dump(params or {}))
        subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
        (tmp_path / ".dvc").mkdir()
        (tmp_path / ".dvc" / "config").write_text("[core]\n    analytics = false\n    check_update = false\n")
        return tmp_path

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    return make
