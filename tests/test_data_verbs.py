"""The data verbs by their real commands: killed anywhere they give the same bytes, and only new films cost anything."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from data.files import num_records, sha256

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[1]
VERBS = ("ingest", "validate", "cut", "split")
REDUCED: dict[str, dict[str, Any]] = {
    "sample": {"num_new": 8, "num_base": 6},
    "validate": {"max_missing_caption_share": 0.5},
}
"""Settings under which a minute suffices."""
STORE = Path("data/store")
INPUTS = ("corpus", "work", "docs")
"""What of the store is no result: the films, the scratch folder, pages with clocks."""


@dataclass
class Workshop:
    """A folder in which the verbs run, with films and settings of its own."""

    folder: Path

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """A verb in a session of its own."""
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tasks", *words], cwd=self.folder, env=environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def run(self, *words: str) -> float:
        """A verb to its end; how long it took, s."""
        begin = time.monotonic()
        status = self.start(*words).wait()
        assert status == 0, (self.folder / "log").read_text(errors="replace")[-4000:]
        return time.monotonic() - begin

    def results(self) -> dict[str, str]:
        """Hashes of all that the verbs have written, by path."""
        paths = [path for path in (self.folder / STORE).rglob("*") if path.is_file()]
        inner = {path: path.relative_to(self.folder / STORE) for path in paths}
        return {str(name): sha256(path) for path, name in inner.items() if name.parts[0] not in INPUTS}

    def measured(self) -> dict[Path, int]:
        """Remembered measurements, and when each was written."""
        return {path: path.stat().st_mtime_ns for path in (self.folder / STORE / "work/measured").rglob("*.npz")}

    def unfinished(self) -> list[Path]:
        """Temporary files that nobody swept up."""
        return list((self.folder / STORE).rglob("*.tmp"))

    def processes(self) -> list[psutil.Process]:
        """Living processes that work here."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                if process.cwd() == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found


def workshop(folder: Path, films: Path | None = None) -> Workshop:
    """An empty workshop with reduced settings, and copies of the films."""
    folder.mkdir()
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    for verb, settings in REDUCED.items():
        params[verb] |= settings
    (folder / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False), encoding="utf-8")
    if films is not None:
        shutil.copytree(films, folder / STORE / "corpus", symlinks=True)
    return Workshop(folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workshop, dict[str, float]]:
    """All verbs run once in peace, and how long each took."""
    found = workshop(tmp_path_factory.mktemp("peace") / "workshop")
    found.run("sample")
    return found, {verb: found.run(verb) for verb in VERBS}


@pytest.fixture(scope="module")
def disturbed(undisturbed: tuple[Workshop, dict[str, float]], tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """The same films elsewhere."""
    films = undisturbed[0].folder / STORE / "corpus"
    return workshop(tmp_path_factory.mktemp("war") / "workshop", films)


def film(path: Path, seed: int) -> None:
    """Two seconds that no other film has."""
    from data.media_write import write_mp4

    frames = np.random.default_rng(seed).integers(0, 255, (48, 64, 64, 3), dtype=np.uint8)
    write_mp4(path, frames, None, 24, 48000)


def kill(place: Workshop, words: Sequence[str], after_s: float) -> None:
    """Start a verb and kill its whole session in the middle."""
    process = place.start(*words)
    time.sleep(after_s)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10
    while place.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert place.processes() == []


@pytest.mark.parametrize("verb", VERBS)
def test_killed_verb_run_again_gives_the_same_bytes(
    undisturbed: tuple[Workshop, dict[str, float]], disturbed: Workshop, verb: str
) -> None:
    peace, seconds = undisturbed
    draw = random.Random(verb)
    for _ in range(3):
        kill(disturbed, [verb], draw.uniform(0.3, 0.95) * seconds[verb])
    disturbed.run(verb)
    results = disturbed.results()
    assert results
    assert results.items() <= peace.results().items()
    assert disturbed.unfinished() == []


def test_verbs_killed_everywhere_leave_what_verbs_in_peace_leave(
    undisturbed: tuple[Workshop, dict[str, float]], disturbed: Workshop
) -> None:
    assert disturbed.results() == undisturbed[0].results()


def test_ten_percent_more_films_cost_only_themselves(
    undisturbed: tuple[Workshop, dict[str, float]], tmp_path: Path
) -> None:
    films = undisturbed[0].folder / STORE / "corpus"
    place = workshop(tmp_path / "workshop", films)
    place.run("ingest")
    before, rows = place.measured(), num_records(place.folder / STORE / "manifest.parquet")
    assert len(before) > 20
    added = max(1, len(before) // 10)
    for number in range(added):
        film(place.folder / STORE / f"corpus/new/added{number}.mp4", number)
    place.run("ingest")
    after = place.measured()
    assert {path: after[path] for path in before} == before
    assert len(after) == len(before) + added
    assert num_records(place.folder / STORE / "manifest.parquet") == rows + added
    place.run("validate")
    place.run("cut")
    assert place.measured() == after


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two Ray nodes on this machine."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    node = {"num_cpus": 1, "object_store_memory": 80_000_000}
    found = cluster_utils.Cluster(initialize_head=True, head_node_args=node)
    folder = found.head_node.get_session_dir_path()
    found.second = found.add_node(**node)
    found.wait_for_nodes()
    yield found
    found.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def test_ray_gives_the_same_bytes_although_a_node_is_lost(
    undisturbed: tuple[Workshop, dict[str, float]], tmp_path: Path, cluster: Any
) -> None:
    peace, _ = undisturbed
    place = workshop(tmp_path / "workshop", peace.folder / STORE / "corpus")
    on_ray = ("engine.name=ray", f"engine.ray.address={cluster.address}", "engine.ray.max_workers=2")
    process = place.start("ingest", *on_ray)
    while len(place.measured()) < 5:
        assert process.poll() is None, (place.folder / "log").read_text(errors="replace")[-4000:]
        time.sleep(0.05)
    cluster.remove_node(cluster.second, allow_graceful=False)
    assert process.wait() == 0, (place.folder / "log").read_text(errors="replace")[-4000:]
    place.run("validate")
    place.run("cut", *on_ray)
    results = place.results()
    for name in ("manifest.parquet", "clips.parquet", "cut_rejects.parquet"):
        assert results[name] == peace.results()[name]
