"""Items over a Ray cluster: each Ray worker keeps one isolated child, so the limits of one item hold there too."""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import shutil
import socket
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from data.isolation import Limits, Lost, sweep_scratch
from data.workers import Pool, Queue

if TYPE_CHECKING:
    from data.engines import RayCluster

Item = TypeVar("Item")
Result = TypeVar("Result")
MB = 10**6
LOOPBACK = "127.0.0.1"
ANSWER_S = 10.0
"""Within this, s, a head node that is there takes a connection."""


def answers(
    function: Callable[[Item], Result], items: Iterable[Item], limits: Limits, cluster: RayCluster, window: int
) -> Iterator[tuple[int, Result | Lost]]:
    """Results with their items' indices, in the order they come; a killed worker or lost node only costs time.

    Raises:
        RuntimeError: Ray is not installed, or there is no such cluster, or it has too few processors.
        Exception: whatever the function raised.
    """
    ray = library(alone=cluster.address == "local")
    queue = Queue(items, window * cluster.max_workers)
    at_work: dict[Any, tuple[int, Item]] = {}
    call = pickle.dumps((function, limits, str(Path.cwd())))
    with connected(cluster):
        remote = ray.remote(num_cpus=cluster.cpus_per_item, max_retries=cluster.max_retries)(answer)
        try:
            while True:
                while len(at_work) < cluster.max_workers and (task := queue.take()) is not None:
                    at_work[remote.remote(call, task[1])] = task
                if not at_work:
                    return
                for reference in ray.wait(list(at_work))[0]:
                    index, item = at_work.pop(reference)
                    result = outcome(reference, cluster.max_retries)
                    if not queue.wants_again(index, item, result):
                        yield index, cast("Result | Lost", result)
        finally:
            for reference in at_work:
                ray.cancel(reference, force=True)


def outcome(reference: Any, max_retries: int) -> object:
    """What a finished task returned, or `Lost` where its worker died every time.

    Raises:
        Exception: whatever the function raised.
    """
    ray = library()
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise cast(Exception, error.cause) from None
    except ray.exceptions.RayError:
        return Lost(f"crashes the decoder (and {max_retries + 1} Ray workers with it)")


_pools: dict[bytes, Pool[Any, Any]] = {}
"""The child of this Ray worker, by what it does."""


def answer(call: bytes, item: Any) -> Any:
    """One item's answer from the isolated child of this Ray worker; Ray calls this."""
    if call not in _pools:
        for pool in _pools.values():
            pool.close()
        _pools.clear()
        function, limits, folder = cast("tuple[Callable[[Any], Any], Limits, str]", pickle.loads(call))  # noqa: S301 # our own
        _pools[call] = Pool(function, 1, limits, Path(folder))
    ((_, result),) = _pools[call].answers([item])
    return result


def library(*, alone: bool = False) -> Any:
    """Ray, which reports no usage to anybody, and listens on loopback only where its cluster is to be this machine.

    Raises:
        RuntimeError: it is not installed.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if alone:  # read when Ray is imported; without it a node on loopback is moved to an address that all can reach
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns that this will be its default
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise RuntimeError(
            "engine.name = ray needs Ray: pip install -e '.[ray]', or set engine.name = local"
        ) from error


@contextmanager
def connected(cluster: RayCluster) -> Generator[None]:
    """A connection to the cluster, or a cluster of our own for as long as the block runs.

    Raises:
        RuntimeError: there is no such cluster, or none of its processors is free for us.
    """
    ray = library()
    if ray.is_initialized():  # by whoever called us
        yield
    elif cluster.address == "local":
        with _own_cluster(cluster):
            yield
    else:
        try:
            _knock(cluster.address)
            ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as error:
            remedy = "start one with `ray start --head`, or set engine.ray.address = local"
            raise RuntimeError(f"engine.ray.address = {cluster.address}: no Ray cluster answers; {remedy}") from error
        try:
            _ask_for(cluster.min_workers, cluster.cpus_per_item)
            yield
        finally:
            _ask_for(0, cluster.cpus_per_item)
            ray.shutdown()


def _knock(address: str) -> None:
    """See whether somebody answers at `host:port`: Ray itself would try for nine minutes.

    Raises:
        OSError: nobody does.
        ValueError: the address has another form.
    """
    if address != "auto":
        host, _, port = address.removeprefix("ray://").rpartition(":")
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()


@contextmanager
def _own_cluster(cluster: RayCluster) -> Generator[None]:
    """One node on this machine, on loopback, without pages; its files go with it."""
    ray = library()
    prefix = f"ray{zlib.crc32(socket.gethostname().encode()):08x}-"  # short: its sockets' paths may have 107 bytes
    sweep_scratch(prefix)
    folder = tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-")
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=cluster.object_store_mb * MB,
            _node_ip_address=LOOPBACK,
            _temp_dir=folder,
        )
        has = cast(float, ray.cluster_resources().get("CPU", 0))
        if has < cluster.cpus_per_item:
            raise RuntimeError(f"engine.ray.cpus_per_item = {cluster.cpus_per_item:g}, but this machine has {has:g}")
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _ask_for(num_workers: int, cpus_per_item: float) -> None:
    """Tell an autoscaler how much room to keep; a cluster without one takes no notice."""
    sdk = cast(Any, importlib.import_module("ray.autoscaler.sdk"))
    sdk.request_resources(bundles=[{"CPU": cpus_per_item}] * num_workers)
