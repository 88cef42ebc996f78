"""On a real cluster of two nodes, each with its own raylet and object store."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from data.engines import Engine, RayCluster, map_ordered
from data.isolation import Lost

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}
ROOT = Path(__file__).parents[2]


class TwoNodes:
    """A head and a second node on this machine."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args=NODE)
        self.second = self.cluster.add_node(**NODE)
        self.cluster.wait_for_nodes()

    def engine(self, **settings: Any) -> Engine:
        return Engine(name="ray", ray=RayCluster(address=self.cluster.address, max_workers=2), **settings)

    def lose_second(self) -> None:
        """Its raylet and all its workers are gone at once."""
        self.cluster.remove_node(self.second, allow_graceful=False)

    def replace_second(self) -> None:
        self.second = self.cluster.add_node(**NODE)
        self.cluster.wait_for_nodes()


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray = pytest.importorskip("ray")
    found = TwoNodes()
    folder = found.cluster.head_node.get_session_dir_path()
    yield found
    ray.shutdown()
    found.cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def rest_then_say_where(number: int) -> tuple[int, int]:
    """The number, and which raylet this is below: child, Ray worker, raylet."""
    time.sleep(0.3)
    worker = psutil.Process().parent()
    assert worker is not None
    return number, worker.ppid()


def ray_workers() -> list[psutil.Process]:
    """Ray's processes that are busy with our items."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline()[:1] == ["ray::answer"]:
                found.append(process)
    return found


def test_both_nodes_work_and_the_order_is_kept(nodes: TwoNodes) -> None:
    answers = list(map_ordered(rest_then_say_where, range(16), nodes.engine()))
    assert [answer[0] for answer in answers if not isinstance(answer, Lost)] == list(range(16))
    assert len({answer[1] for answer in answers if not isinstance(answer, Lost)}) == 2


def interrupt_after(count: int, nodes: TwoNodes, interrupt: Callable[[], object]) -> list[int]:
    """The numbers that come back although something happens when `count` have come."""
    results = map_ordered(rest_then_say_where, range(24), nodes.engine())
    found: list[int] = []
    for answer in results:
        assert not isinstance(answer, Lost)
        found.append(answer[0])
        if len(found) == count:
            interrupt()
    return found


def test_killed_workers_lose_nothing(nodes: TwoNodes) -> None:
    def kill() -> None:
        assert [process.kill() for process in ray_workers()], "no worker was at work"

    assert interrupt_after(6, nodes, kill) == list(range(24))


def test_lost_node_loses_nothing(nodes: TwoNodes) -> None:
    assert interrupt_after(6, nodes, nodes.lose_second) == list(range(24))
    nodes.replace_second()


def misbehave(number: int) -> int:
    if number == 1:
        os.abort()
    if number == 2:
        time.sleep(60)
    if number == 3:
        kept = [bytearray(b"x" * 1_000_000) for _ in range(10_000)]
        return len(kept)
    return number


def test_limits_hold_inside_a_ray_worker(nodes: TwoNodes) -> None:
    engine = nodes.engine(max_item_s=3, max_item_gb=0.3)
    assert list(map_ordered(misbehave, range(5), engine)) == list(
        map_ordered(misbehave, range(5), Engine(max_item_s=3, max_item_gb=0.3))
    )


def complain(number: int) -> int:
    raise KeyError(f"no {number}")


def test_error_of_the_function_is_raised_as_it_is(nodes: TwoNodes) -> None:
    with pytest.raises(KeyError, match="no 0") as raised:
        list(map_ordered(complain, range(1), nodes.engine()))
    assert type(raised.value) is KeyError


def test_relative_paths_mean_what_they_mean_to_us(
    nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "film").write_text("here")
    monkeypatch.chdir(tmp_path)
    assert list(map_ordered(read, ["film"], nodes.engine())) == ["here"]


def read(name: str) -> str:
    return Path(name).read_text()


def test_cluster_that_is_not_there_is_named_with_its_remedy() -> None:
    engine = Engine(name="ray", ray=RayCluster(address="127.0.0.1:1"))
    with pytest.raises(RuntimeError, match=r"engine\.ray\.address = 127\.0\.0\.1:1: no Ray cluster answers"):
        next(map_ordered(read, ["film"], engine))


def hold(marker: str) -> None:
    Path(marker).write_text(str(os.getpid()))
    time.sleep(120)


OWN = """
from data.engines import Engine, map_ordered
from tests.data.test_ray_engine import hold
if __name__ == "__main__":
    list(map_ordered(hold, [{marker!r}], Engine(name="ray")))
"""


def test_own_cluster_goes_with_its_killed_owner_and_listens_on_loopback_alone(tmp_path: Path) -> None:
    marker, script = tmp_path / "busy", tmp_path / "owner.py"
    script.write_text(OWN.format(marker=str(marker)))
    owner = subprocess.Popen([sys.executable, script], env=os.environ | {"PYTHONPATH": str(ROOT)})
    while not marker.is_file() or not marker.read_text():
        assert owner.poll() is None
        time.sleep(0.1)
    family = psutil.Process(owner.pid).children(recursive=True)
    assert any("raylet" in process.name() for process in family)
    assert int(marker.read_text()) in {process.pid for process in family}
    open_to_all = [
        (process.name(), link.laddr)
        for process in family
        for link in process.net_connections("inet")
        if link.status == psutil.CONN_LISTEN and link.laddr.ip.removeprefix("::ffff:") not in {"127.0.0.1", "::1"}
    ]
    owner.kill()
    owner.wait()
    _, alive = psutil.wait_procs(family, timeout=150)  # its agents look for their raylet once a minute
    assert alive == []
    assert open_to_all == []
