from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from data.captioner import (
    Endpoint,
    EndpointCaptioner,
    LocalCaptioner,
    Unanswered,
    Written,
    hash_of,
    merged,
    needs_caption,
    said_in,
)
from data.captions import CaptionLimits
from data.records import Source

Maker = Callable[..., Source]


class Server:
    """A chat server on loopback that answers from a script and keeps what it was sent."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.script: list[tuple[int, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append((self.path, dict(self.headers), body))
                status, answer = outer.script.pop(0) if outer.script else (200, said("a cat"))
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                if status in (301, 302, 307):
                    self.send_header("Location", "http://192.0.2.1/v1/chat/completions")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def said(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.stop()


def jpeg(level: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((32, 48, 3), level, np.uint8)).save(buffer, "JPEG")
    return buffer.getvalue()


def asking(server: Server, **options: object) -> tuple[EndpointCaptioner, list[float]]:
    pauses: list[float] = []
    endpoint = Endpoint.model_validate({"url": server.url, "timeout_s": 5} | options)
    return EndpointCaptioner(endpoint, "vl-7b", 60, pause=pauses.append), pauses


def test_frames_travel_in_order_inside_one_request_with_the_prompt_after_them(server: Server):
    ask, _ = asking(server)
    server.script = [(200, said("  A cat\n purrs. "))]
    assert ask([jpeg(0), jpeg(200)], "Describe.") == "A cat purrs."
    ((path, headers, body),) = server.requests
    assert path == "/v1/chat/completions"
    assert "Authorization" not in headers
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("vl-7b", 60, 0)
    *pictures, words = body["messages"][0]["content"]
    assert words == {"type": "text", "text": "Describe."}
    urls = [picture["image_url"]["url"] for picture in pictures]
    assert [base64.b64decode(url.removeprefix("data:image/jpeg;base64,")) for url in urls] == [jpeg(0), jpeg(200)]


def test_the_key_comes_from_the_named_variable_and_is_never_told(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("MY_KEY", "sk-secret")
    caplog.set_level("DEBUG")
    ask, _ = asking(server, key_variable="MY_KEY", num_retries=0)
    server.script = [(401, {"error": "no"})]
    with pytest.raises(RuntimeError, match=r"refuses the key .*set MY_KEY") as raised:
        ask([jpeg(0)], "?")
    assert server.requests[0][1]["Authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in caplog.text + str(raised.value)


def test_a_busy_server_is_asked_again_ever_later(server: Server):
    ask, pauses = asking(server, wait_s=2)
    server.script = [(503, {}), (429, {}), (500, {})]
    assert ask([jpeg(0)], "?") == "a cat"
    assert pauses == [2, 4, 8]
    assert len({json.dumps(body) for _, _, body in server.requests}) == 1


def test_a_server_that_stays_down_ends_the_run_with_the_remedy(server: Server):
    ask, pauses = asking(server, num_retries=2)
    server.stop()
    with pytest.raises(RuntimeError, match=r"no answer from http://127.* in 3 tries: .*endpoint.url"):
        ask([jpeg(0)], "?")
    assert len(pauses) == 2


@pytest.mark.parametrize(
    ("status", "answer", "error", "words"),
    [
        (400, {"error": "too long"}, Unanswered, "status 400.*too long"),
        (200, b"<html>", Unanswered, "no JSON"),
        (200, {"choices": []}, Unanswered, "no choices"),
        (200, said(" "), Unanswered, "empty"),
        (200, {"choices": [{"message": {"content": None}}]}, Unanswered, "empty"),
        (404, {}, RuntimeError, "serves no model vl-7b"),
        (307, {}, Unanswered, "status 307"),
    ],
)
def test_what_is_no_caption_is_told_by_kind(
    server: Server, status: int, answer: Any, error: type[Exception], words: str
):
    ask, _ = asking(server)
    server.script = [(status, answer)]
    with pytest.raises(error, match=words):
        ask([jpeg(0)], "?")
    assert len(server.requests) == 1


@pytest.mark.parametrize("url", ["http://example.org/v1", "http://127.0.0.1.example.org/v1", "http://10.0.0.8/v1"])
def test_other_machines_are_refused_unless_allowed(url: str):
    with pytest.raises(ValidationError, match="allow_remote"):
        Endpoint(url=url)
    assert Endpoint(url=url, allow_remote=True).url == url


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "127.0.0.1:8000", "http://me:pass@127.0.0.1/v1", "ftp://127.0.0.1"]
)
def test_addresses_that_are_none_or_hold_passwords_are_refused(url: str):
    with pytest.raises(ValidationError, match=r"no http address|holds a password"):
        Endpoint(url=url, allow_remote=True)


def test_a_proxy_of_the_environment_never_sees_what_is_meant_for_loopback(
    server: Server, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    ask, _ = asking(server, num_retries=0)
    assert ask([jpeg(0)], "?") == "a cat"


def test_control_characters_of_an_answer_are_taken_out():
    assert said_in(said("a\x1b[31m cat\u202e")) == "a[31m cat"


def test_only_missing_and_useless_captions_give_way_to_the_models(make_source: Maker):
    row = Written(source_id="", path="", caption="A cat purrs.", model="vl", prompt="0" * 16, reason="empty")
    limits = CaptionLimits()
    bare, good = make_source("a.mp4", caption=None), make_source("b.mp4")
    refusal = make_source("c.mp4", caption="I'm sorry, I can't.")
    written = {source.source_id: row for source in (bare, good, refusal)}
    assert needs_caption(bare, limits) == "empty: no text"
    assert merged(bare, written, limits).caption_from == "model vl prompt 0000000000000000"
    assert merged(refusal, written, limits).caption == "A cat purrs."
    assert merged(good, written, limits) == good
    assert merged(bare, {}, limits) == bare


def test_the_hash_tells_what_was_asked_apart():
    assert hash_of("a", 1) != hash_of("a", 2)
    assert hash_of("a", 1) == hash_of("a", 1)


def test_a_model_that_is_not_there_is_named_before_anything_is_loaded(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"model_folder = .* holds no config.json"):
        LocalCaptioner(tmp_path, 8)
