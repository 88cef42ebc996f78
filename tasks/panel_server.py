"""The panel over HTTP: one page, and for the rater whose token comes with a request the films and votes whose turn it is.

No address names a file: a film is asked for by its place in the rater's own order.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, ValidationError

from data.files import sha256
from data.records import Frozen
from tasks.panel_log import Log, Rating
from tasks.panel_plan import RATINGS, RECORD, Showing, film_of, order, read

PAGE = Path(__file__).parent / "panel.html"
MAX_BODY_BYTES = 4096
PLAYED_TOLERANCE_S = 0.15
"""By how much the played length may fall short: browsers round to frames and codec blocks."""
CLOCK_TOLERANCE_S = 0.5
"""By how much more than the time gone by a page may say it played: the first request may be late."""

Vote = Annotated[int, Field(strict=True, ge=1, le=5)]


class Answer(Frozen):
    """A vote as the page sends it."""

    position: int = Field(strict=True, ge=0)
    """Place in the rater's order."""
    picture: Vote
    """1 to 5, as the others."""
    sound: Vote
    """Likewise."""
    sync: Vote
    """Whether both belong together."""
    overall: Vote
    """All in all."""
    played_s: float = Field(ge=0, allow_inf_nan=False)
    """How much of the film was played, s."""
    num_plays: int = Field(strict=True, ge=1, le=1000)
    """How often it was played to the end."""


class Happening(Frozen):
    """What else the page tells."""

    position: int = Field(strict=True, ge=0)
    """Place in the rater's order."""
    kind: Literal["played", "hidden", "left", "seeked", "failed"]
    """The film ended; the page was put behind another; closed; someone tried to skip; the film did not play."""


class Server(ThreadingHTTPServer):
    """Serves one panel to many raters at once."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, folder: Path, host: str, port: int, now: Callable[[], float] = time.time) -> None:
        """Listen at `host:port`; port 0 takes a free one.

        Raises:
            RuntimeError: no panel is there, or not a whole one.
            OSError: the address cannot be listened at.
        """
        self.folder, self.now = folder, now
        self.panel = read(folder)
        self.log = Log(folder / RATINGS, sha256(folder / RECORD))
        self._orders: dict[int, list[Showing]] = {}
        self.page = PAGE.read_bytes()
        super().__init__((host, port), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing where a page was closed before its answer came."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def order(self, rater: int) -> list[Showing]:
        """What a rater meets, worked out once."""
        if rater not in self._orders:
            self._orders[rater] = order(self.panel, rater)
        return self._orders[rater]

    def state(self, rater: int) -> dict[str, Any]:
        """Where a rater is; that the next item is shown goes into the log."""
        showings, position = self.order(rater), self.log.num_rated(rater)
        answer: dict[str, Any] = {"position": position, "total": len(showings), "is_done": position >= len(showings)}
        if position < len(showings):
            self.log.note(rater, "shown", position, self.now())
            item = showings[position].item
            answer |= {"duration_s": item.duration_s, "is_training": item.training}
        return answer

    def film(self, rater: int, position: int) -> bytes | None:
        """The film whose turn it is, or the one after, so that nobody waits; others are not to be seen."""
        showings = self.order(rater)
        ahead = position - self.log.num_rated(rater)
        if ahead not in (0, 1) or position >= len(showings):
            return None
        return film_of(self.folder, showings[position].item).read_bytes()

    def rate(self, rater: int, answer: Answer) -> tuple[int, dict[str, Any]]:
        """Keep a vote of a film that was played whole; status and answer."""
        showings, at_s = self.order(rater), self.now()
        shown = self.log.shown_s(rater, answer.position)
        if answer.position >= len(showings) or shown is None:
            return 409, {"error": "not yet"}
        item, is_repeat = showings[answer.position]
        if answer.played_s < item.duration_s - PLAYED_TOLERANCE_S:
            return 422, {"error": f"played {answer.played_s:.2f} s of {item.duration_s:.2f} s"}
        if answer.played_s > at_s - shown[0] + CLOCK_TOLERANCE_S:
            return 422, {"error": f"{at_s - shown[0]:.2f} s since it was shown; it takes {item.duration_s:.2f} s"}
        votes = answer.model_dump(include={"picture", "sound", "sync", "overall", "played_s", "num_plays"})
        kept = self.log.rate(
            Rating(
                rater=rater, position=answer.position, item=item.name, item_sha256=item.sha256, seed=self.panel.seed,
                is_training=item.training, is_repeat=is_repeat, latency_s=at_s - shown[1], at_s=at_s, **votes,
            )
        )  # fmt: skip
        if kept in ("other", "not yet"):
            return 409, {"error": "rated before" if kept == "other" else "not yet"}
        return 200, self.state(rater)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "Soundstage", ""
    timeout = 60
    """Of a connection on which nothing comes, s."""

    @property
    def _owner(self) -> Server:
        return cast(Server, self.server)

    def do_GET(self) -> None:
        """The page, where a rater is, and films."""
        if self.path == "/":
            self._send(200, self._owner.page, "text/html; charset=utf-8")
        elif (rater := self._rater()) is not None:
            if self.path == "/api/session":
                self._json(200, self._owner.state(rater))
            elif found := re.fullmatch(r"/api/film/([0-9]{1,6})", self.path):
                film = self._owner.film(rater, int(found[1]))
                self._json(404, {"error": "not its turn"}) if film is None else self._send(200, film, "video/mp4")
            else:
                self._json(404, {"error": "no such address"})

    def do_POST(self) -> None:
        """Votes and happenings."""
        size = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,6}", size) or int(size) > MAX_BODY_BYTES:
            self._json(413, {"error": f"body of {size or '?'} bytes; at most {MAX_BODY_BYTES}"}, close=True)
            return
        body = self.rfile.read(int(size))
        if (rater := self._rater()) is None:
            return
        try:
            if self.path == "/api/rating":
                self._json(*self._owner.rate(rater, Answer.model_validate_json(body)))
            elif self.path == "/api/event":
                event = Happening.model_validate_json(body)
                self._owner.log.note(rater, event.kind, event.position, self._owner.now())
                self._json(200, {})
            else:
                self._json(404, {"error": "no such address"})
        except ValidationError as error:
            self._json(400, {"error": "; ".join(f"{item['loc']}: {item['msg']}" for item in error.errors())})

    def _rater(self) -> int | None:
        """Whose request it is; None after a refusal was sent."""
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        rater = self._owner.log.rater_of(token) if kind == "Bearer" else None
        if rater is None:
            self._json(401, {"error": "unknown invitation"})
        return rater

    def _json(self, status: int, answer: dict[str, Any], *, close: bool = False) -> None:
        self._send(status, json.dumps(answer).encode(), "application/json", close=close)

    def _send(self, status: int, content: bytes, kind: str, *, close: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Content-Security-Policy", policy(self._owner.page))
        if close:
            self.close_connection = True
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # the library's name
        """Say nothing: a terminal full of requests hides the address."""


@lru_cache(maxsize=4)
def policy(page: bytes) -> str:
    """What a browser lets the page do: run its own script and style, and talk to this server."""

    def hashes(element: bytes) -> str:
        found = re.findall(b"<%b>(.*?)</%b>" % (element, element), page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in found)

    return (
        f"default-src 'none'; script-src {hashes(b'script')}; style-src {hashes(b'style')}; connect-src 'self';"
        " media-src blob:; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
