"""The whole line on real files, by the real commands: nothing is done twice, and no interruption changes a result."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import le
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from data.files import sha256
from tasks import PIPELINE
from tasks.summary import JOURNAL, Journal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[1]
TRAIN = ("train@easy", "train@all")
STAGES = ("sample", *(stage for verb in PIPELINE for stage in (TRAIN if verb == "train" else (verb,))))
AFTER_TRAIN_ALL = STAGES[STAGES.index("train@all") :]
SEED = 0
"""Decides at which share of its usual time each stage is killed."""
REDUCED: dict[str, dict[str, Any]] = {
    "sample": {"num_new": 8, "num_base": 6},
    "validate": {"max_missing_caption_share": 0.5},
    "cut": {"max_clips_per_source": 1},
    "encode": {"clips_per_shard": 8},
    "train": {"save_every": 4},
    "evaluate": {"num_inference_steps": 3, "max_clips": 6, "num_shown": 2},
    "gate": {
        "require_better": [],
        "min_right_swapped_gap_db": None,
        "require_beats_crossfade": False,
        "max_forgetting_db": 1000.0,
        "max_loss_vs_champion": {},
        "min_clips": 1,
        "min_sources": 1,
    },
    "generate": {"num_inference_steps": 3},
}
"""Settings under which minutes suffice; the gate lets an untrained model pass."""
PART_WAY = {
    "encode": "encode/done/*.safetensors",
    "train@easy": "train/easy/step-*.json",
    "train@all": "train/all/step-*.json",
    "evaluate": "evaluate/*/tuned_fl2va/*.safetensors",
}
"""Of the stages that go on where they were: what the first finished part looks like in `data/store/work`."""


@dataclass
class Workspace:
    """A checkout of its own, under Git and DVC, with a random-weight model and nothing made yet."""

    folder: Path
    blocked: Path | None = None
    """A folder that goes before all others on the import path."""
    seconds: dict[str, float] = field(default_factory=dict)
    """How long each stage took undisturbed."""

    def environment(self) -> dict[str, str]:
        """What a user's shell would have, with this checkout's code, and caches of its own."""
        paths = [str(path) for path in (self.blocked, self.folder) if path]
        return os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(paths),
            "DVC_SITE_CACHE_DIR": str(self.folder.parent / f"{self.folder.name}-site"),
            "DVC_NO_ANALYTICS": "1",
            "DO_NOT_TRACK": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }

    def start(self, *command: str) -> subprocess.Popen[str]:
        """A command in a session of its own."""
        with self.log.open("a", encoding="utf-8") as log:
            return subprocess.Popen(
                command, cwd=self.folder, env=self.environment(), start_new_session=True, text=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def run(self, *command: str) -> str:
        """A command's whole output; a failed one shows it."""
        begin = self.log.stat().st_size if self.log.is_file() else 0
        status = self.start(*command).wait()
        said = self.log.read_bytes()[begin:].decode(errors="replace")
        assert status == 0, f"{' '.join(command)} ended with {status}:\n{said[-4000:]}"
        return said

    def reproduce(self) -> list[str]:
        """Bring everything up to date; which stages that ran."""
        return running(self.run("dvc", "repro"))

    def changed(self) -> set[str]:
        """Stages that DVC would run, by what it knows now."""
        return set(json.loads(self.run("dvc", "status", "--json").strip().splitlines()[-1]))

    @property
    def log(self) -> Path:
        return self.folder.parent / f"{self.folder.name}.log"

    def outputs(self, *stages: str) -> dict[str, str]:
        """Hashes in dvc.lock by path: of some stages, or of all."""
        locked = yaml.safe_load((self.folder / "dvc.lock").read_text(encoding="utf-8"))["stages"]
        return {out["path"]: out["md5"] for stage in stages or locked for out in locked[stage]["outs"]}

    def set(self, path: str, value: object) -> None:
        """Change one setting."""
        params = self.params()
        *parents, last = path.split(".")
        node = params
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
        (self.folder / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False), encoding="utf-8")

    def params(self) -> dict[str, Any]:
        return yaml.safe_load((self.folder / "params.yaml").read_text(encoding="utf-8"))

    def read(self, name: str) -> Any:
        """A JSON file of the store."""
        return json.loads((self.folder / "data/store" / name).read_text(encoding="utf-8"))

    def unfinished(self) -> list[str]:
        """Temporary files that nobody swept up."""
        return [str(path) for path in (self.folder / "data/store").rglob("*.tmp")]

    def parts(self, stage: str) -> list[Path]:
        """Finished parts of an unfinished stage."""
        return list((self.folder / "data/store/work").glob(PART_WAY[stage]))

    def processes(self) -> list[list[str]]:
        """Commands of living processes that work in this checkout."""
        found: list[list[str]] = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.cwd() == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.cmdline())
        return found


def running(said: str) -> list[str]:
    """Stages that DVC says it ran."""
    lines = (line.removeprefix("Running stage '") for line in said.splitlines() if line.startswith("Running stage '"))
    return [line.partition("'")[0] for line in lines]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's files as they lie in the working tree, with reduced settings and a random-weight model."""
    from models import tiny_h3

    folder = tmp_path_factory.mktemp("project")
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    made = ("dvc.lock", "models/zoo/tiny-h3/")
    for name in names:
        if name and not name.startswith(made) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    tiny_h3.save(tiny_h3.build(0), folder / "models/zoo/tiny-h3")
    params = yaml.safe_load((folder / "params.yaml").read_text(encoding="utf-8"))
    for verb, settings in REDUCED.items():
        params[verb] |= settings
    for stage in params["train"]["stages"].values():
        stage |= {"num_steps": 12, "warmup_steps": 2, "batch_size": 2}
    (folder / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False), encoding="utf-8")
    return folder


def checkout(folder: Path, project: Path) -> Path:
    """A new repository of the project's files."""
    shutil.copytree(project, folder)
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.com"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "scratch"]):
        subprocess.run([*git, *words], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, project: Path) -> Workspace:
    """Everything made once by `dvc repro` alone, where Prefect cannot be imported."""
    root = tmp_path_factory.mktemp("undisturbed")
    blocked = root / "blocked"
    (blocked / "prefect").mkdir(parents=True)
    (blocked / "prefect" / "__init__.py").write_text("raise ImportError('Prefect is not installed here')\n")
    workspace = Workspace(checkout(root / "checkout", project), blocked)
    with pytest.raises(AssertionError, match="Prefect is not installed here"):
        workspace.run("python", "-c", "import prefect")
    for stage in STAGES:
        begin = time.monotonic()
        assert running(workspace.run("dvc", "repro", "--single-item", stage)) == [stage]
        workspace.seconds[stage] = time.monotonic() - begin
    return workspace


def test_every_source_is_accepted_or_rejected(undisturbed: Workspace) -> None:
    import pyarrow.parquet as pq

    def paths(name: str) -> list[str]:
        return pq.read_table(undisturbed.folder / f"data/store/{name}.parquet")["path"].to_pylist()

    given, accepted, rejected = (paths(name) for name in ("manifest", "accepted", "rejects"))
    assert sorted(accepted + rejected) == given
    assert {Path(path).name for path in rejected} >= {"text.mp4", "truncated.mp4"}
    assert set(paths("clips")) | set(paths("cut_rejects")) >= set(accepted)
    files = (undisturbed.folder / "data/store/corpus").rglob("*.[mw]*[4vbm]")
    assert {path.relative_to(undisturbed.folder).as_posix() for path in files} <= set(given)


def test_report_verdict_checkpoint_and_version_are_of_one_model(undisturbed: Workspace) -> None:
    weights = undisturbed.read("checkpoints/all/checkpoint.json")["weights_sha256"]
    assert weights == sha256(undisturbed.folder / "data/store/checkpoints/all/transformer")
    for name in ("report/report.json", "verdict.json", "registered.json"):
        assert undisturbed.read(name)["checkpoint_sha256"] == weights
    assert undisturbed.read("verdict.json")["passed"]
    assert undisturbed.read("registered.json")["version"] == "1"


def test_nothing_is_done_twice(undisturbed: Workspace) -> None:
    assert undisturbed.reproduce() == []
    assert undisturbed.changed() == set()
    assert "Nothing to do" in undisturbed.run("soundstage", "run")


def kill(
    workspace: Workspace, stage: str, due: Callable[[float], bool], *, verb_alone: bool = False
) -> list[list[str]]:
    """Start a stage, kill it when it is `due`, its whole process group or the verb's first process; who outlives that.

    `due` is asked again and again with the seconds since the start.
    """
    shutil.rmtree(workspace.folder / "data/store/work/encode", ignore_errors=True)  # or nothing is left to encode
    process = workspace.start("dvc", "repro", "--single-item", "--force", stage)
    begin = time.monotonic()
    while process.poll() is None and not due(time.monotonic() - begin):
        time.sleep(0.02)
    verb = verb_of(process) if verb_alone else None
    if verb is not None:
        with suppress(psutil.NoSuchProcess):
            verb.kill()
        process.wait(60)
    elif process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 10
    while (survivors := workspace.processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return survivors


def verb_of(process: subprocess.Popen[str]) -> psutil.Process | None:
    """The verb's first process below DVC's, if it is there."""
    with suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if any(Path(word).name == "soundstage" for word in child.cmdline()[:2]):
                    return child
    return None


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, project: Path) -> Workspace:
    """A checkout where every stage is killed before it may finish; it has no cache to answer from."""
    return Workspace(checkout(tmp_path_factory.mktemp("interrupted") / "checkout", project))


@pytest.mark.parametrize("stage", STAGES)
def test_killed_stage_run_again_gives_what_an_undisturbed_one_gives(
    undisturbed: Workspace, interrupted: Workspace, stage: str
) -> None:
    for before in STAGES[: STAGES.index(stage)]:
        interrupted.run("dvc", "repro", "--single-item", before)
    draw = random.Random(f"{SEED} {stage}")
    for verb_alone in (False, True):
        after_s = draw.uniform(0.1, 0.9) * undisturbed.seconds[stage]
        assert kill(interrupted, stage, partial(le, after_s), verb_alone=verb_alone) == []
    if stage in PART_WAY:
        assert kill(interrupted, stage, lambda _: bool(interrupted.parts(stage))) == []
        assert interrupted.parts(stage)
    # By force: on a machine that got faster an earlier try may have ended before its kill, and DVC would answer from it.
    interrupted.run("dvc", "repro", "--single-item", "--force", stage)
    assert interrupted.outputs(stage) == undisturbed.outputs(stage)
    assert interrupted.unfinished() == []


def test_line_killed_everywhere_ends_like_one_killed_nowhere(undisturbed: Workspace, interrupted: Workspace) -> None:
    interrupted.reproduce()
    assert interrupted.outputs() == undisturbed.outputs()
    for name in ("report/report.json", "checkpoints/all/checkpoint.json", "registered.json"):
        assert interrupted.read(name) == undisturbed.read(name)
    assert interrupted.reproduce() == []
    assert interrupted.changed() == set()
    assert interrupted.unfinished() == []
    assert interrupted.processes() == []


def test_flow_gives_what_dvc_gives_without_prefect(
    undisturbed: Workspace, project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    flow = Workspace(checkout(tmp_path_factory.mktemp("flow") / "checkout", project))
    said = flow.run("soundstage", "run")
    outcomes = Journal.model_validate_json((flow.folder / JOURNAL).read_bytes()).outcomes
    assert [(outcome.stage, outcome.ran) for outcome in outcomes] == [(stage, True) for stage in STAGES], said
    assert flow.outputs() == undisturbed.outputs()
    assert flow.changed() == set()
    assert flow.processes() == []
    assert flow.unfinished() == []


@pytest.fixture
def changing(undisturbed: Workspace) -> Iterator[Workspace]:
    """The finished workspace, whose settings are put back; what they gave is then found in DVC's cache."""
    before = (undisturbed.folder / "params.yaml").read_bytes()
    yield undisturbed
    (undisturbed.folder / "params.yaml").write_bytes(before)
    assert undisturbed.reproduce() == []
    assert undisturbed.changed() == set()


def test_changed_plan_runs_no_stage_before_it(changing: Workspace) -> None:
    changing.set("plan.weights", {"motion": 0.0, "tokens": 1.0})
    assert changing.changed() == {"plan"}
    assert running(changing.run("dvc", "repro", "plan")) == ["plan"]
    assert changing.changed() == {"train@easy", "train@all", "evaluate"}


def test_changed_curriculum_stage_runs_itself_and_what_follows(changing: Workspace) -> None:
    before = changing.outputs()
    changing.set("train.stages.all.learning_rate", 0.004)
    assert changing.changed() == {"train@all"}
    assert changing.reproduce() == list(AFTER_TRAIN_ALL)
    after = changing.outputs()
    differ = {path for path in after if after[path] != before[path]}
    assert differ == set(changing.outputs(*AFTER_TRAIN_ALL))
