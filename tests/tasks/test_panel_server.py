"""The panel over HTTP: no vote lost or doubled, whatever dies or is sent twice; nobody sees or sends what is not theirs."""

from __future__ import annotations

import http.client
import json
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from data.files import sha256
from tasks.panel_log import TABLES, Log, Rating
from tasks.panel_plan import RATINGS, RECORD, film_of, order, read
from tasks.panel_server import PAGE, Server

LENGTH = 8
"""Films that a rater of the small panel meets: one for training, six that count, one of them again."""


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


class Rater(NamedTuple):
    """One who rates without a page."""

    port: int
    token: str

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, content, {"Authorization": f"Bearer {self.token}", **headers})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def session(self) -> dict[str, Any]:
        status, body = self.ask("GET", "/api/session")
        assert status == 200
        return json.loads(body)

    def rate(self, position: int, votes: tuple[int, ...] = (3, 3, 3, 3), **other: Any) -> tuple[int, dict[str, Any]]:
        picture, sound, sync, overall = votes
        given = {"position": position, "picture": picture, "sound": sound, "sync": sync, "overall": overall}
        status, body = self.ask("POST", "/api/rating", given | {"played_s": 0.5, "num_plays": 1} | other)
        return status, json.loads(body)


class Place(NamedTuple):
    """A panel that is served by this process."""

    folder: Path
    log: Log
    clock: Clock
    port: int

    def invite(self, count: int = 1) -> list[Rater]:
        return [Rater(self.port, token) for token in self.log.invite(count, self.clock())]


@pytest.fixture
def place(panel_folder: Path) -> Iterator[Place]:
    clock = Clock()
    with Server(panel_folder, "127.0.0.1", 0, now=clock) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield Place(panel_folder, server.log, clock, int(server.server_address[1]))
        server.shutdown()
        thread.join()


def votes_at(rater: int, position: int) -> tuple[int, ...]:
    """Votes that differ between raters and places."""
    return tuple((rater * 7 + position * 3 + scale) % 5 + 1 for scale in range(4))


def test_a_session_goes_through_the_raters_own_order_and_says_nothing_of_it(place: Place) -> None:
    (rater,) = place.invite()
    panel = read(place.folder)
    for position, (item, is_repeat) in enumerate(order(panel, 1)):
        state = rater.session()
        expected = {
            "position": position,
            "total": LENGTH,
            "is_done": False,
            "duration_s": 0.5,
            "is_training": item.training,
        }
        assert state == expected
        assert rater.ask("GET", f"/api/film/{position}") == (200, film_of(place.folder, item).read_bytes())
        place.clock.now_s += 2
        assert rater.rate(position, votes_at(1, position))[0] == 200
        kept = place.log.ratings()[-1]
        assert (kept.item, kept.item_sha256, kept.seed, kept.is_repeat) == (item.name, item.sha256, 0, is_repeat)
        assert kept.votes == votes_at(1, position)
        assert (kept.latency_s, kept.at_s, kept.played_s) == (2.0, place.clock(), 0.5)
    assert rater.session() == {"position": LENGTH, "total": LENGTH, "is_done": True}
    assert rater.rate(LENGTH)[0] == 409


def test_a_vote_sent_again_is_the_same_vote_and_another_one_changes_nothing(place: Place) -> None:
    (rater,) = place.invite()
    rater.session()
    place.clock.now_s += 1
    assert [rater.rate(0, (1, 2, 3, 4))[0] for _ in range(3)] == [200, 200, 200]
    assert rater.rate(0, (1, 2, 3, 5)) == (409, {"error": "rated before"})
    assert rater.rate(3) == (409, {"error": "not yet"})
    assert [each.votes for each in place.log.ratings()] == [(1, 2, 3, 4)]
    assert rater.session()["position"] == 1


def test_a_film_that_was_not_played_whole_or_not_in_real_time_is_not_rated(place: Place) -> None:
    (rater,) = place.invite()
    assert rater.rate(0) == (409, {"error": "not yet"})  # never shown
    rater.session()
    place.clock.now_s += 30
    assert rater.rate(0, played_s=0.3)[0] == 422
    assert rater.rate(0, played_s=1e6)[0] == 422
    for wrong in (
        {"picture": 6},
        {"sound": 0},
        {"sync": 2.5},
        {"overall": "5"},
        {"played_s": -1},
        {"num_plays": 0},
        {"more": 1},
    ):
        assert rater.rate(0, **wrong)[0] == 400
    assert rater.ask("POST", "/api/rating", b"{")[0] == 400
    assert rater.ask("POST", "/api/rating", b'{"played_s": NaN}')[0] == 400
    assert not place.log.ratings()
    assert rater.rate(0)[0] == 200


def test_long_films_cannot_be_rated_at_once(panel_folder: Path) -> None:
    record = json.loads((panel_folder / RECORD).read_text())
    for item in record["items"]:
        item["duration_s"] = 8.0
    (panel_folder / RECORD).write_text(json.dumps(record))
    clock = Clock()
    with Server(panel_folder, "127.0.0.1", 0, now=clock) as server:
        (token,) = server.log.invite(1, clock())
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
        rater = Rater(int(server.server_address[1]), token)
        rater.session()
        clock.now_s += 4
        status, answer = rater.rate(0, played_s=8.0)
        assert (status, answer) == (422, {"error": "4.00 s since it was shown; it takes 8.00 s"})
        clock.now_s += 4
        assert rater.rate(0, played_s=8.0)[0] == 200
        server.shutdown()


def test_only_films_whose_turn_it_is_are_shown(place: Place) -> None:
    (rater,) = place.invite()
    rater.session()
    assert [rater.ask("GET", f"/api/film/{position}")[0] for position in range(LENGTH + 1)] == [200, 200] + [404] * (
        LENGTH - 1
    )
    place.clock.now_s += 1
    rater.rate(0)
    assert [rater.ask("GET", f"/api/film/{position}")[0] for position in range(4)] == [404, 200, 200, 404]


@pytest.mark.parametrize(
    "path",
    [
        "/panel.json", "/../panel.json", "/media/", "/api/film/../../panel.json", "/api/film/..%2f..%2fpanel.json", "/api/film/-1",
        "/api/film/0/../../ratings.sqlite", "//etc/passwd", "/api/film/0?x", "/api/film/%D9%A0", "/api/film/%00", "/ratings.sqlite", "/api/",
    ],
)  # fmt: skip
def test_no_address_leads_to_a_file(place: Place, path: str) -> None:
    (rater,) = place.invite()
    for method in ("GET", "POST"):
        status, body = rater.ask(method, path, None if method == "GET" else {})
        assert status == 404
        assert b"candidate" not in body


@pytest.mark.parametrize("token", ["", "x", "0" * 32, "' OR 1=1 --"])
def test_without_a_token_there_is_nothing_but_the_page(place: Place, token: str) -> None:
    place.invite()
    stranger = Rater(place.port, token)
    for path in ("/api/session", "/api/film/0", "/panel.json"):
        assert stranger.ask("GET", path) == (401, b'{"error": "unknown invitation"}')
    assert stranger.rate(0)[0] == 401
    assert stranger.ask("GET", "/api/session", Authorization="Basic x")[0] == 401
    assert stranger.ask("GET", "/") == (200, PAGE.read_bytes())


def test_large_and_lengthless_bodies_are_refused_unread(place: Place) -> None:
    (rater,) = place.invite()
    assert rater.ask("POST", "/api/rating", b" " * 5000)[0] == 413
    assert rater.ask("POST", "/api/rating", b"", **{"Content-Length": "1e3"})[0] == 413
    assert rater.ask("POST", "/api/rating", b"", **{"Content-Length": "-1"})[0] == 413


def test_page_may_only_run_itself_and_talk_to_its_server(place: Place) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=60)
    connection.request("GET", "/")
    answer = connection.getresponse()
    answer.read()
    policy = answer.headers["Content-Security-Policy"]
    connection.close()
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert re.search(r"script-src 'sha256-[\w+/]{43}='", policy)
    assert not re.search(r"https?://|src=\"", PAGE.read_text(encoding="utf-8"))


def test_what_raters_do_beside_voting_is_kept_and_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (rater,) = place.invite()
    rater.session()
    for kind in ("hidden", "hidden", "left", "played"):
        assert rater.ask("POST", "/api/event", {"position": 0, "kind": kind})[0] == 200
    assert rater.ask("POST", "/api/event", {"position": 0, "kind": "shown"})[0] == 400
    (found,) = place.log.progress()
    assert (found.num_rated, found.num_hidden, found.last_s) == (0, 3, place.clock())
    monkeypatch.setattr("tasks.panel_log.MAX_EVENTS", 6)
    for _ in range(5):
        rater.ask("POST", "/api/event", {"position": 0, "kind": "hidden"})
    assert place.log.progress()[0].num_hidden == 4


@pytest.mark.parametrize("table", TABLES)
def test_the_log_only_grows(place: Place, table: str) -> None:
    (rater,) = place.invite()
    rater.session()
    place.clock.now_s += 1
    rater.rate(0)
    connection = sqlite3.connect(place.folder / RATINGS)
    column = connection.execute(f"SELECT * FROM {table}").description[0][0]
    for statement in (f"DELETE FROM {table}", f"UPDATE {table} SET {column} = {column}"):
        with pytest.raises(sqlite3.IntegrityError, match="only grows"):
            connection.execute(statement)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_the_log_takes_votes_in_order_alone(place: Place) -> None:
    place.invite()
    votes = {"picture": 1, "sound": 2, "sync": 3, "overall": 4}
    rating = Rating(
        rater=1, position=1, item="i", item_sha256="h", seed=0, is_training=False, is_repeat=False,
        played_s=1.0, num_plays=1, latency_s=1.0, at_s=1.0, **votes,
    )  # fmt: skip
    assert place.log.rate(rating) == "not yet"
    assert not place.log.ratings()
    assert [place.log.rate(rating._replace(position=number)) for number in (0, 1, 1)] == ["kept", "kept", "same"]
    assert place.log.rate(rating._replace(sync=4)) == "other"
    assert [(each.position, each.votes) for each in place.log.ratings()] == [(0, (1, 2, 3, 4)), (1, (1, 2, 3, 4))]


def test_fifty_raters_at_once_lose_and_double_nothing(place: Place) -> None:
    raters = place.invite(50)
    barrier = threading.Barrier(50)

    def whole_session(number: int) -> None:
        rater = raters[number - 1]
        barrier.wait()
        for position in range(LENGTH):
            assert rater.session()["position"] == position
            place.clock.now_s += 1
            with ThreadPoolExecutor(2) as twice:  # a double click, or two tabs
                answers = list(twice.map(lambda place: rater.rate(place, votes_at(number, place))[0], [position] * 2))
            assert answers == [200, 200]

    with ThreadPoolExecutor(50) as pool:
        list(pool.map(whole_session, range(1, 51)))
    kept = place.log.ratings()
    expected = {(number, position): votes_at(number, position) for number in range(1, 51) for position in range(LENGTH)}
    assert {(each.rater, each.position): each.votes for each in kept} == expected
    assert len(kept) == 50 * LENGTH
    panel = read(place.folder)
    orders = {number: [showing.item.name for showing in order(panel, number)] for number in range(1, 51)}
    assert all(each.item == orders[each.rater][each.position] for each in kept)


class Process:
    """The verb's server in a process of its own."""

    def __init__(self, folder: Path) -> None:
        params = folder.parent / "params.yaml"
        params.write_text(yaml.safe_dump({"panel": {"panel": str(folder), "mos": "mos.json", "port": 0}}))
        command = [sys.executable, "-m", "tasks", "panel", "serve", "--params", str(params)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
        assert found, line
        self.port = int(found[1])

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()


def test_a_killed_server_loses_no_vote_that_it_acknowledged(panel_folder: Path) -> None:
    log = Log(panel_folder / RATINGS, sha256(panel_folder / RECORD))
    tokens = log.invite(6, 0.0)
    acknowledged: dict[tuple[int, int], tuple[int, ...]] = {}
    enough = threading.Event()

    def go_on(port: int, number: int) -> None:
        """Rate on, from wherever the server says, until it is gone or all is done."""
        rater = Rater(port, tokens[number - 1])
        try:
            while not (state := rater.session())["is_done"]:
                position = state["position"]
                status, _ = rater.rate(position, votes_at(number, position))
                assert status in (200, 422)  # 422: the film cannot have been played yet
                if status == 200:
                    acknowledged[number, position] = votes_at(number, position)
                if len(acknowledged) >= limit:
                    enough.set()
        except (OSError, http.client.HTTPException):
            return

    for limit in (7, 19, 10**6):
        enough.clear()
        server = Process(panel_folder)
        threads = [threading.Thread(target=go_on, args=(server.port, number)) for number in range(1, 7)]
        for thread in threads:
            thread.start()
        if limit < 10**6:
            assert enough.wait(60)
            server.kill()
        for thread in threads:
            thread.join()
        server.kill()
        kept = {(each.rater, each.position): each.votes for each in log.ratings()}
        assert acknowledged.items() <= kept.items()
    assert kept == {(number, place): votes_at(number, place) for number in range(1, 7) for place in range(LENGTH)}
