"""Sinks write what they were told, where another program reads it; one that fails says so once and stops nothing."""

from __future__ import annotations

import re
import threading
import warnings
from pathlib import Path
from typing import Any

import mlflow
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from tasks import sinks, tracking
from tasks.sinks import Guarded, Mlflow, Prometheus, TensorBoard, Watching, sinks_of

NUMBERS = {
    "loss_video": 0.5,
    "step_s": 2.0,
    "memory_share/0": 0.25,
    "memory_share/1": 0.75,
    "gradient/attention 0-1": 3.0,
}
LINE = re.compile(
    r"# HELP [a-z_][a-z0-9_]* \S.*|# TYPE [a-z_][a-z0-9_]* gauge"
    r'|[a-z_][a-z0-9_]*\{rank="(?:\d+|all)",stage="(?:[^"\\\n]|\\.)*"\} -?\d+(?:\.\d+)?(?:e[+-]?\d+)?'
)


def test_prometheus_reads_the_file_and_finds_each_number_under_stage_and_rank(tmp_path: Path) -> None:
    sink = Prometheus(tmp_path / "x.prom", 'a "stage"')
    sink.tell(9, {"loss_video": 9.0})
    sink.tell(19, NUMBERS)
    text = (tmp_path / "x.prom").read_text()
    assert text.endswith("\n")
    assert all(LINE.fullmatch(line) for line in text.splitlines())
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert all(family.type == "gauge" and family.documentation for family in families.values())
    found = {
        (item.name, item.labels["stage"], item.labels["rank"]): item.value
        for f in families.values()
        for item in f.samples
    }
    stage = 'a "stage"'
    assert found == {
        ("soundstage_step", stage, "all"): 20,
        ("soundstage_loss_video", stage, "all"): 0.5,
        ("soundstage_step_s", stage, "all"): 2.0,
        ("soundstage_memory_share", stage, "0"): 0.25,
        ("soundstage_memory_share", stage, "1"): 0.75,
        ("soundstage_gradient_attention_0_1", stage, "all"): 3.0,
    }
    assert families["soundstage_step_s"].documentation == "Seconds a step, waiting included."
    assert [path.name for path in tmp_path.iterdir()] == ["x.prom"]
    sink.close()
    assert not list(tmp_path.iterdir())


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return {tag: [(item.step, item.value) for item in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_tensorboard_shows_every_number_once_also_of_a_run_that_continued(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    first = TensorBoard(tmp_path, 0)
    for step, loss in ((9, 3.0), (19, 2.0), (29, 99.0)):
        first.tell(step, {"loss_video": loss})
    assert events(tmp_path)["loss_video"][-1] == (29, 99.0)  # on the disk before it is closed
    first.close()
    again = TensorBoard(tmp_path, 20)
    again.tell(29, {"loss_video": 1.0, "mfu": 0.5})
    again.close()
    assert events(tmp_path) == {"loss_video": [(9, 3.0), (19, 2.0), (29, 1.0)], "mfu": [(29, 0.5)]}


def test_without_tensorboard_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"\[tensorboard\]"):
        sinks_of(Watching(tensorboard=tmp_path), "easy", "k", 0, tmp_path)


def test_mlflow_gets_the_numbers_of_the_running_stage_and_a_continued_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(tracking.SERVER, raising=False)
    store = tmp_path / "mlflow"
    for first_step, steps in ((0, (9, 19)), (20, (29,))):
        (sink,) = sinks_of(Watching(mlflow=True), "easy", "abc", first_step, store)
        for step in steps:
            sink.tell(step, {"loss_video": 30.0 - step, "mfu": float("nan")})
        sink.close()
    (other,) = sinks_of(Watching(mlflow=tracking.sqlite_uri(store / tracking.DATABASE)), "easy", "xyz", 0, store)
    other.close()
    client = tracking.connect(store)
    runs = client.search_runs([tracking.ensure_experiment(client, store)])
    assert sorted(run.data.tags["soundstage.training"] for run in runs) == ["abc", "xyz"]
    (run,) = (run for run in runs if run.data.tags["soundstage.training"] == "abc")
    history = client.get_metric_history(run.info.run_id, "train/easy/loss_video")
    assert [(item.step, item.value) for item in history] == [(9, 21.0), (19, 11.0), (29, 1.0)]
    assert run.info.status == "FINISHED"
    assert "train/easy/mfu" not in run.data.metrics


class Flaky:
    """A client whose server comes back after some calls."""

    def __init__(self, num_failures: int) -> None:
        self.left, self.taken, self.called = num_failures, list[tuple[str, float, int]](), threading.Event()

    def log_batch(self, run_id: str, metrics: Any = ()) -> None:
        self.called.set()
        if self.left > 0:
            self.left -= 1
            raise mlflow.MlflowException("no server")
        self.taken += [(item.key, item.value, item.step) for item in metrics]

    def set_terminated(self, run_id: str) -> None:
        self.taken.append(("end", 0.0, 0))


def test_numbers_that_mlflow_did_not_take_are_sent_again_and_said_once() -> None:
    client: Any = Flaky(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sink = Mlflow(client, "run", "")
        sink.tell(0, {"a": 1.0})
        assert client.called.wait(30)
        sink.tell(1, {"a": 2.0})
        sink.close()
    assert client.taken == [("a", 1.0, 0), ("a", 2.0, 1), ("end", 0.0, 0)]
    assert [str(item.message) for item in caught] == ["MLflow: no server; training goes on without it"]


def test_a_server_that_never_comes_ends_neither_training_nor_waits_for_ever() -> None:
    client: Any = Flaky(10**9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sink = Mlflow(client, "run", "")
        for step in range(5):
            sink.tell(step, {"a": 1.0})
        sink.close()
    assert client.taken == []
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="MLflow: .*goes on without it"):
        assert sinks_of(Watching(mlflow="nowhere://x"), "easy", "k", 0, Path("none")) == []


def test_a_failing_sink_warns_once_and_a_file_in_the_way_is_no_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    sink = Guarded(Prometheus(tmp_path / "file" / "x.prom", "easy"))
    with pytest.warns(UserWarning, match="Prometheus: .*goes on without it"):
        sink.tell(0, NUMBERS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sink.tell(1, NUMBERS)


def test_settings_that_mean_nothing_are_refused_and_nothing_is_asked_for_by_default(tmp_path: Path) -> None:
    assert sinks_of(Watching(), "easy", "k", 0, tmp_path) == []
    for wrong in (
        {"memory_alert_share": 1.5},
        {"peak_tflops": 0},
        {"log_every": 0},
        {"sample_every": 0},
        {"wandb": True},
    ):
        with pytest.raises(ValidationError):
            Watching.model_validate(wrong)
