"""Where a running stage's numbers go while it runs: TensorBoard, MLflow, a text file for Prometheus.

A sink that fails warns once and never ends a training.
"""

from __future__ import annotations

import math
import re
import threading
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from pydantic import Field

from data.files import remove, write_text
from data.records import Frozen

if TYPE_CHECKING:
    from mlflow import MlflowClient

Numbers = Mapping[str, float]
HELP = {
    "step": "Optimiser steps done in this stage.",
    "loss_video": "Loss of the picture at the last logged step.",
    "loss_audio": "Loss of the sound at the last logged step.",
    "gradient_norm": "Norm of all gradients before clipping.",
    "learning_rate": "Learning rate of the last logged step.",
    "clips_per_s": "Clips trained on a second, all processes together.",
    "rows_per_s": "Rows of packed sequence a second, all processes together.",
    "media_s_per_s": "Seconds of film trained on a second, all processes together.",
    "step_s": "Seconds a step, waiting included.",
    "loader_share": "Share of the time spent waiting for batches, of the process that waits most.",
    "other_share": "Share of the time spent on saving and sampling.",
    "mfu": "Model FLOPs utilisation, of all devices' peak.",
    "eta_s": "Seconds left of this stage.",
    "memory_used_bytes": "Device memory in tensors, or resident memory without a device.",
    "memory_peak_bytes": "Most of it so far.",
    "memory_unused_bytes": "Reserved by the allocator and in no tensor.",
    "memory_share": "Share of the whole device that has been taken.",
    "compute_s": "Seconds that each process computed by itself: to its first collective, or of a fixed small work under FSDP.",
}
"""What Prometheus says of each number; others are explained by their names."""
CLOSING_S = 30.0
"""How long the end of a stage waits for a tracking server that does not answer."""


class Watching(Frozen):
    """What is watched of a running stage, and where it is told."""

    folder: Path = Path("data/store/work/watch")
    """Gets findings and samples, in a folder a stage."""
    log_every: int = Field(default=10, gt=0)
    """Steps between two readings of the meters."""
    tensorboard: Path | None = None
    """Folder of TensorBoard events, one folder a stage in it; needs the extra `tensorboard`. None writes none."""
    mlflow: bool | str = False
    """True tells the tracking store that `gate` and `register` use, a URI another one."""
    prometheus: Path | None = None
    """Folder of the node exporter's text files: one file a stage, while it runs. None writes none."""
    memory_alert_share: float = Field(default=0.9, gt=0, le=1)
    """Share of a device's memory above which training warns, once."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Of one device in the precision of computing, 10¹² operations a second (H100, dense bf16: 989); None leaves
    utilisation unmeasured."""
    sample_every: int | None = Field(default=None, gt=0)
    """Steps between samples from fixed validation clips; None takes none."""
    num_samples: int = Field(default=2, gt=0)
    """Clips sampled each time."""
    sample_steps: int = Field(default=20, gt=0)
    """Points of the schedule of a sample."""


class Sink(Protocol):
    """Takes numbers on rank 0."""

    def tell(self, step: int, numbers: Numbers) -> None:
        """Take the numbers of a step."""
        ...

    def close(self) -> None:
        """The stage is over."""
        ...


class TensorBoard:
    """Events for TensorBoard.

    Args:
        folder: Of this stage.
        first_step: Where the run continues: what an earlier try wrote from there on is taken back.

    Raises:
        RuntimeError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        if find_spec("tensorboard") is None:
            raise RuntimeError(
                "watch.tensorboard is set and TensorBoard is not installed; run pip install -e '.[tensorboard]', or"
                " leave it unset"
            )
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step)

    def tell(self, step: int, numbers: Numbers) -> None:
        """Write scalars, and have them on the disk."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class Mlflow:
    """Metrics of one run, sent by a thread of its own: a server that is slow or gone costs training nothing.

    What could not be sent is tried again with the next numbers.

    Args:
        client: Of the tracking store.
        run_id: Run that gets the metrics.
        prefix: In front of every name.
    """

    def __init__(self, client: MlflowClient, run_id: str, prefix: str) -> None:
        self._client, self._run_id, self._prefix = client, run_id, prefix
        self._waiting: list[tuple[str, float, int]] = []
        self._news, self._closed, self._warned = threading.Condition(), False, False
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def tell(self, step: int, numbers: Numbers) -> None:
        """Leave the numbers for the thread."""
        with self._news:
            self._waiting += [(self._prefix + name, value, step) for name, value in numbers.items()]
            self._news.notify()

    def close(self) -> None:
        """Send what is left and end the run, for at most `CLOSING_S`."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join(CLOSING_S)
        if self._thread.is_alive() or self._waiting:
            self._warn(f"{len(self._waiting)} numbers were not taken")

    def _send(self) -> None:
        from tasks.tracking import log_numbers

        done = False
        while not done:
            with self._news:
                self._news.wait_for(lambda: self._waiting or self._closed)
                batch, self._waiting, done = self._waiting, [], self._closed
            try:
                log_numbers(self._client, self._run_id, [item for item in batch if math.isfinite(item[1])])
                if done:
                    self._client.set_terminated(self._run_id)
            except Exception as error:  # noqa: BLE001 # whatever a client raises, training goes on
                with self._news:
                    self._waiting = [*batch, *self._waiting]
                    known = len(self._waiting)
                    self._news.wait_for(lambda known=known: len(self._waiting) > known or self._closed)
                self._warn(str(error))

    def _warn(self, words: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"MLflow: {words}; training goes on without it", stacklevel=2)


class Prometheus:
    """The last numbers as a text file that a node exporter reads; it goes with the end of the stage.

    Source: the exposition format 0.0.4, as `prometheus_client` writes it.
    """

    def __init__(self, path: Path, stage: str) -> None:
        self._path, self._stage = path, stage

    def tell(self, step: int, numbers: Numbers) -> None:
        """Replace the file, whole."""
        from prometheus_client import CollectorRegistry, Gauge, generate_latest

        registry = CollectorRegistry()
        gauges: dict[str, Gauge] = {}
        for key, value in {"step": float(step + 1), **{k: v for k, v in numbers.items() if k != "step"}}.items():
            name, _, rank = key.partition("/")
            plain = re.sub(r"[^a-zA-Z0-9_]", "_", name if rank.isdigit() else key)
            words = HELP.get(name, f"{key.replace('_', ' ')} of the last logged step.")
            if plain not in gauges:
                gauges[plain] = Gauge(f"soundstage_{plain}", words, ["stage", "rank"], registry=registry)
            gauges[plain].labels(self._stage, rank if rank.isdigit() else "all").set(value)
        write_text(self._path, generate_latest(registry).decode())

    def close(self) -> None:
        """Take the file away: what it says is no longer so."""
        remove(self._path)


class Guarded:
    """A sink whose errors are warned of once, and go no further."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._warned = sink, False

    def tell(self, step: int, numbers: Numbers) -> None:
        """Pass on."""
        self._try(lambda: self._sink.tell(step, numbers))

    def close(self) -> None:
        """Pass on."""
        self._try(self._sink.close)

    def _try(self, work: Any) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 # a full disk in a folder of plots is no reason to stop training
            if not self._warned:
                self._warned = True
                warnings.warn(f"{type(self._sink).__name__}: {error}; training goes on without it", stacklevel=2)


def sinks_of(watching: Watching, stage: str, key: str, first_step: int, store: Path) -> list[Sink]:
    """The sinks that are asked for; call it on rank 0 alone.

    Args:
        watching: The settings.
        stage: Name of the stage.
        key: Tells this run from others of the stage, such as the hash of its identity: a run that continues is found
            again by it.
        first_step: Where the run continues.
        store: Folder of the tracking store, for `mlflow: true`.

    Raises:
        RuntimeError: a library that was asked for is not installed.
    """
    result: list[Sink] = []
    if watching.tensorboard is not None:
        result.append(TensorBoard(watching.tensorboard / stage, first_step))
    if watching.prometheus is not None:
        result.append(Prometheus(watching.prometheus / f"soundstage-{stage}.prom", stage))
    if watching.mlflow:
        try:
            result.append(_mlflow(watching.mlflow, stage, key, store))
        except Exception as error:  # noqa: BLE001 # a server that is not there now is no reason not to train
            warnings.warn(f"MLflow: {error}; training goes on without it", stacklevel=2)
    return [Guarded(sink) for sink in result]


def _mlflow(where: bool | str, stage: str, key: str, store: Path) -> Mlflow:
    """A run of the stage in progress, the same one for the same key."""
    import mlflow

    from tasks import tracking

    client = tracking.connect(store) if where is True else mlflow.MlflowClient(cast(str, where))
    experiment = tracking.ensure_experiment(client, store)
    known: Sequence[Any] = client.search_runs([experiment], f"tags.`soundstage.training` = '{key}'", max_results=1)
    run_id = known[0].info.run_id if known else None
    if run_id is None:
        tags = {"soundstage.training": key, "soundstage.stage": stage}
        run_id = client.create_run(experiment, run_name=f"train {stage} {key[:8]}", tags=tags).info.run_id
    else:
        client.update_run(run_id, status="RUNNING")
    return Mlflow(client, run_id, f"train/{stage}/")
