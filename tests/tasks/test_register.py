from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import yaml

from data.media import read_clip
from data.records import ClipShape, GateFailed, Report
from tasks import gate, tracking
from tasks.champion import find_opponent
from tasks.register import Config, copy_rooms, judged, requirements, run

Maker = Callable[..., Report]
ROOT = Path(__file__).parents[2]
HALF_MADE_BYTES = 100_000
"""A new database of MLflow has its first tables by then, and not all: at this point a kill was fatal."""


class House:
    """The files that gate and register meet, in one folder."""

    def __init__(self, root: Path, make_report: Maker) -> None:
        self.root, self.make_report = root, make_report
        (root / "splits").mkdir()
        for split in ("train", "val", "test"):
            pd.DataFrame({"clip_id": [f"{split}-000000"], "caption": ["a ball"]}).to_parquet(
                root / f"splits/{split}.parquet"
            )
        (root / "params.yaml").write_text(yaml.safe_dump({"train": {"seed": 0, "stages": {"all": {"num_steps": 2}}}}))
        lock = {"split": {"outs": [{"path": (root / "splits/test.parquet").as_posix(), "md5": "5" * 32}]}}
        (root / "dvc.lock").write_text(yaml.safe_dump({"schema": "2.0", "stages": lock}))
        (root / "base").mkdir()
        (root / "base/weights.bin").write_bytes(b"base")

    def model(self, weights: str, gain_db: float = 0.0) -> None:
        """A trained and evaluated model, in place of the one before."""
        checkpoint = self.root / "checkpoints/all"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "checkpoint.json").write_text(json.dumps({"weights_sha256": weights, "stage": "all"}))
        lines = [
            {"step": n, "loss_video": 1 / (n + 1), "loss_audio": None if n else 0.5, "learning_rate": 0.1}
            for n in range(3)
        ]
        (checkpoint / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (self.root / "report/media").mkdir(parents=True, exist_ok=True)
        (self.root / "report/report.html").write_text("<!doctype html><title>report</title>")
        report = self.make_report(weights=weights, gain_db=gain_db)
        (self.root / "report/report.json").write_text(report.model_dump_json())

    def judge(self) -> None:
        names = ("verdict", "checkpoints", "splits", "mlflow")
        paths = {name: self.root / name for name in names} | {
            "params": self.root / "params.yaml",
            "lock": self.root / "dvc.lock",
        }
        gate.run(gate.Config.model_validate(paths | {"report": self.root / "report/report.json"}))

    def config(self) -> Config:
        names = ("base", "report", "verdict", "registered", "checkpoints", "splits", "mlflow")
        paths = {name: self.root / name for name in names}
        paths |= {"checkpoint": self.root / "checkpoints/all", "params": self.root / "params.yaml"}
        return Config.model_validate(paths | {"lock": self.root / "dvc.lock"})


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with its tables and no content: making one takes seconds."""
    folder = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        tracking.connect(folder).search_experiments()
    return folder


def test_a_store_whose_making_was_cut_short_is_made_again(tmp_path: Path) -> None:
    program = "from pathlib import Path; from tasks import tracking; tracking.connect(Path(sys.argv[1]))"
    command = [sys.executable, "-c", f"import sys; {program}", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != tracking.SERVER}
    drafts = {"TMPDIR": str(tmp_path / "drafts")}
    (tmp_path / "drafts").mkdir()
    process = subprocess.Popen(command, cwd=ROOT, env=environment | drafts, start_new_session=True)
    while process.poll() is None and not half_made(tmp_path / "drafts"):
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert half_made(tmp_path / "drafts")
    assert not tracking.has_store(tmp_path)
    assert tracking.connect(tmp_path).search_experiments()


def half_made(folder: Path) -> bool:
    """Whether a database below `folder` has its first tables."""
    return any(path.stat().st_size > HALF_MADE_BYTES for path in folder.glob("*/mlflow.db"))


@pytest.fixture
def house(tmp_path: Path, make_report: Maker, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copytree(empty_store, tmp_path / "mlflow")
    return House(tmp_path, make_report)


def test_without_a_passed_verdict_on_this_very_report_nothing_is_registered(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "available", lambda: False)
    house.model("a" * 64)
    with pytest.raises(GateFailed, match="run `soundstage gate` first"):
        judged(house.config())
    house.judge()
    judged(house.config())
    house.model("a" * 64, gain_db=0.5)
    with pytest.raises(GateFailed, match="judges another report"):
        run(house.config())
    house.model("a" * 64)
    (house.root / "checkpoints/all/checkpoint.json").write_text(json.dumps({"weights_sha256": "c" * 64}))
    with pytest.raises(GateFailed, match="has weights cccccccccccc, the report is on aaaaaaaaaaaa"):
        run(house.config())
    house.model("a" * 64, gain_db=-9.0)
    with pytest.raises(GateFailed):
        house.judge()
    with pytest.raises(GateFailed, match="did not pass the gate"):
        run(house.config())
    assert not house.config().registered.exists()


def test_the_life_of_a_champion(house: House) -> None:
    house.model("a" * 64)
    house.judge()
    first = run(house.config())
    assert (first.version, first.alias) == ("1", "champion")
    bytes_before = house.config().registered.read_bytes()

    # the same model again: no new version, no new run, same bytes, same verdict; a card that a kill left out is there
    client = tracking.connect(house.root / "mlflow")
    client.update_model_version(first.name, first.version, "")
    house.judge()
    assert run(house.config()) == first
    assert house.config().registered.read_bytes() == bytes_before
    assert client.get_model_version(first.name, first.version).description
    experiment = client.get_experiment_by_name(tracking.EXPERIMENT)
    assert experiment is not None
    assert len(client.search_runs([experiment.experiment_id])) == 1
    assert json.loads((house.root / "verdict").read_text())["champion"] is None

    # a worse one fails against it, is visible as a run, and gets no version
    house.model("d" * 64, gain_db=-1.0)
    with pytest.raises(GateFailed, match=r"psnr_db against soundstage-tiny-h3 version 1"):
        house.judge()
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(each.data.tags["soundstage.verdict"] for each in runs) == ["failed", "passed"]

    # a better one takes the place, and is judged against the old one however often it is judged
    house.model("e" * 64, gain_db=1.0)
    house.judge()
    verdict = (house.root / "verdict").read_bytes()
    assert run(house.config()).version == "2"
    house.judge()
    assert (house.root / "verdict").read_bytes() == verdict
    opponent = find_opponent(house.root / "mlflow", "soundstage-tiny-h3", "e" * 64)
    assert opponent is not None
    assert opponent.label == "soundstage-tiny-h3 version 1"

    # everything lies in the store's own folder
    assert (
        client.get_experiment(experiment.experiment_id).artifact_location == (house.root / "mlflow/artifacts").as_uri()
    )
    assert tracking.SERVER not in os.environ

    # lineage and what the run shows
    version = client.get_model_version_by_alias("soundstage-tiny-h3", "champion")
    assert version.tags["previous_champion"] == "1"
    assert version.tags[f"dvc {(house.root / 'splits/test.parquet').as_posix()}"] == "5" * 32
    assert version.tags["promoted_at"]
    assert "| psnr_db: tuned/fl2va − base/fl2va (new) |" in version.description
    logged = client.get_run(str(version.run_id))
    assert logged.data.params["train.stages.all.num_steps"] == "2"
    history = client.get_metric_history(str(version.run_id), "train/all/loss_video")
    assert [(point.step, point.value) for point in history] == [(0, 1.0), (1, 0.5), (2, pytest.approx(1 / 3))]
    shown = {each.dataset.name: {tag.key: tag.value for tag in each.tags} for each in logged.inputs.dataset_inputs}
    assert set(shown) == {"train", "val", "test"}
    assert shown["test"]["dvc.md5"] == "5" * 32
    assert {each.path for each in client.list_artifacts(str(version.run_id), "report")} >= {
        "report/report.html",
        "report/report.json",
    }


def test_a_run_that_was_cut_short_is_made_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.model("a" * 64)
    evidence = tracking.Evidence(
        report=house.root / "report/report.json",
        checkpoints=house.root / "checkpoints",
        splits=house.root / "splits",
        params=house.root / "params.yaml",
        lock=house.root / "absent",
    )

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tracking, "log_losses", killed)
        with pytest.raises(KeyboardInterrupt):
            tracking.ensure_run(house.root / "mlflow", evidence)
    first = tracking.ensure_run(house.root / "mlflow", evidence)
    assert tracking.ensure_run(house.root / "mlflow", evidence) == first
    client = tracking.connect(house.root / "mlflow")
    runs = client.search_runs([str(client.get_run(first).info.experiment_id)])
    assert [each.info.run_id for each in runs] == [first]


def test_only_code_is_stored_beside_the_weights(tmp_path: Path) -> None:
    copy_rooms(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".py"}
    assert (tmp_path / "data/records.py") in files
    assert not (tmp_path / "data/store").exists()


def test_a_served_models_requirements_are_pinned() -> None:
    pins = requirements()
    assert any(pin.startswith("diffusers==") for pin in pins)
    assert all(pin.count("==") == 1 and "+" not in pin for pin in pins)


@pytest.mark.timeout(240)
def test_the_registered_model_loads_from_the_registry_and_generates(house: House, tmp_path: Path) -> None:
    """In a process and folder of its own, so that the version's own code and weights are what runs."""
    from models import tiny_h3

    shutil.rmtree(house.root / "base")
    tiny_h3.save(tiny_h3.build(0), house.root / "base")
    house.model("a" * 64)
    shutil.copytree(house.root / "base/transformer", house.root / "checkpoints/all/transformer")
    house.judge()
    run(house.config())
    shutil.rmtree(house.root / "base")
    shutil.rmtree(house.root / "checkpoints")
    away = tmp_path / "away"
    away.mkdir()
    environment = os.environ | {"STORE": str(house.root / "mlflow"), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", SERVED], cwd=away, env=environment, check=True)
    made = {path.stem: path.read_bytes() for path in away.glob("*.mp4")}
    assert made["text"] == made["again"]
    assert made["text"] != made["frame"]
    frames, waveform = read_clip(away / "text.mp4", 0.0, None, ClipShape())
    assert frames.shape == (22, 32, 32, 3)
    assert waveform.shape == (2, 7333)


SERVED = """
import os
from pathlib import Path

import cv2, mlflow, numpy, pandas

store = os.environ["STORE"]
mlflow.set_tracking_uri(f"sqlite:///{store}/mlflow.db")
model = mlflow.pyfunc.load_model("models:/soundstage-tiny-h3@champion")
import data.records
assert "artifacts" in data.records.__file__, data.records.__file__
png = cv2.imencode(".png", numpy.full((64, 64, 3), 200, numpy.uint8))[1].tobytes()
rows = pandas.DataFrame({"prompt": ["a ball", "a ball", "a ball"], "first_frame": [None, None, png]})
videos = model.predict(rows, params={"seed": 3, "num_inference_steps": 2})["video"]
for name, video in zip(("text", "again", "frame"), videos, strict=True):
    Path(f"{name}.mp4").write_bytes(video)
try:
    model.predict(pandas.DataFrame({"caption": ["a ball"]}))
except mlflow.exceptions.MlflowException as error:
    assert "prompt" in str(error)
else:
    raise AssertionError("a call without a prompt was accepted")
"""
