from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from data import files
from data.captioner import Written
from data.media_write import write_mp4
from data.records import Reject, Source
from tasks import validate
from tasks.caption import Config, frames_of, looks, run

Maker = Callable[..., Source]


class Chat(ThreadingHTTPServer):
    """Describes the n-th video as such; refuses or fails where it is told to."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.num_asked = 0
        self.fails_from = 10**9
        self.words = "A grey wall stands still, seen for the time {}."


class Answering(BaseHTTPRequestHandler):
    server: Chat

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.num_asked += 1
        status = 401 if self.server.num_asked >= self.server.fails_from else 200
        text = self.server.words.format(self.server.num_asked)
        data = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def chat() -> Iterator[Chat]:
    server = Chat()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def corpus(make_source: Maker, tmp_path_factory: pytest.TempPathFactory) -> list[Source]:
    """Three films without captions, one refusal, one good caption, a copy, a broken file and a reference."""
    folder = tmp_path_factory.mktemp("corpus")
    film = np.linspace(0, 255, 48).astype(np.uint8)[:, None, None, None].repeat(48, 1).repeat(64, 2).repeat(3, 3)
    write_mp4(folder / "film.mp4", film, None, 24, 8000)
    path = str(folder / "film.mp4")
    facts = {"path": path, "width": 64, "height": 48}
    bare = [make_source(f"{number}.mp4", **facts, caption=None) for number in range(3)]
    return [
        *bare,
        make_source("refusal.mp4", **facts, caption="I'm sorry, I cannot view videos."),
        make_source("good.mp4", **facts),
        bare[0],
        make_source("broken.mp4", path=str(folder / "none.mp4"), caption=None),
        make_source("unusable.mp4", caption=None, error="is text"),
        make_source("reference.png", caption=None, use="reference"),
    ]


def config_of(folder: Path, sources: list[Source], chat: Chat, **options: object) -> Config:
    files.write_records(folder / "manifest.parquet", sources, Source)
    url = f"http://127.0.0.1:{chat.server_address[1]}/v1"
    endpoint = {"url": url, "num_retries": 0, "timeout_s": 10}
    paths = {"written": folder / "captions.parquet", "rejects": folder / "rejects.parquet", "work": folder / "work"}
    fields = {"manifest": folder / "manifest.parquet", "model": "vl", "endpoint": endpoint}
    return Config.model_validate(paths | fields | {"engine": {"num_workers": 1}} | options)


def test_missing_and_useless_captions_are_written_once_a_content_and_kept_across_a_stop(
    tmp_path: Path, corpus: list[Source], chat: Chat
):
    config = config_of(tmp_path, corpus, chat)
    chat.fails_from = 3
    with pytest.raises(RuntimeError, match="refuses the key"):
        run(config)
    assert not config.written.exists()
    chat.fails_from = 10**9
    (kept,) = config.work.iterdir()
    with kept.open("a") as lines:
        lines.write('{"source_id": "torn')
    assert tuple(run(config)) == (4, 1)
    assert chat.num_asked == 5  # two answered before, one refused, two more
    rows = files.read_records(config.written, Written)
    assert [row.source_id for row in rows] == [source.source_id for source in corpus[:4]]
    assert len({row.caption for row in rows}) == 4
    assert {(row.model, len(row.prompt)) for row in rows} == {("vl", 16)}
    assert rows[3].reason.startswith("refusal: ")
    (reject,) = files.read_records(config.rejects, Reject)
    assert (reject.rule, reject.item) == ("caption.answer", corpus[6].source_id)
    before = files.sha256(config.written)
    run(config)
    assert (files.sha256(config.written), chat.num_asked) == (before, 5)


def test_another_prompt_or_model_is_asked_anew(tmp_path: Path, corpus: list[Source], chat: Chat):
    run(config_of(tmp_path, corpus[:1], chat))
    run(config_of(tmp_path, corpus[:1], chat, prompt="What is seen?"))
    run(config_of(tmp_path, corpus[:1], chat, model="other"))
    assert chat.num_asked == 3


def test_a_model_that_refuses_gives_a_reject_and_no_caption(tmp_path: Path, corpus: list[Source], chat: Chat):
    chat.words = "I'm sorry, I can't describe this."
    config = config_of(tmp_path, corpus[:1], chat)
    assert tuple(run(config)) == (0, 1)
    (reject,) = files.read_records(config.rejects, Reject)
    assert "the model's caption is at fault, refusal" in reject.measured


def test_validate_takes_the_written_captions_and_says_where_they_come_from(
    tmp_path: Path, corpus: list[Source], chat: Chat
):
    config = config_of(tmp_path, corpus[:4], chat)
    run(config)
    paths = {name: tmp_path / f"{name}.parquet" for name in ("manifest", "accepted", "treatments")}
    names = {"rejects": tmp_path / "v.parquet", "expectations": tmp_path / "e.json", "docs": tmp_path / "docs"}
    names |= {"work": tmp_path / "scratch", "captions": config.written}
    renamed = [row.model_copy(update={"path": f"{row.source_id}.mp4"}) for row in corpus[:4]]
    files.write_records(paths["manifest"], renamed, Source)
    validate.run(validate.Config.model_validate({**paths, **names, "max_missing_caption_share": 0}))
    accepted = files.read_records(paths["accepted"], Source)
    assert all((row.caption or "").startswith("A grey wall") for row in accepted)
    assert len({row.caption_from for row in accepted}) == 1
    assert (accepted[0].caption_from or "").startswith("model vl prompt ")


def test_frames_are_spread_over_the_picture_in_order_and_not_enlarged(corpus: list[Source], tmp_path: Path, chat: Chat):
    import cv2

    (look, *_) = looks(config_of(tmp_path, corpus[:1], chat))
    found = frames_of(look)
    assert isinstance(found, list)
    pictures = [cv2.imdecode(np.frombuffer(frame, np.uint8), cv2.IMREAD_COLOR) for frame in found]
    assert [picture.shape for picture in pictures] == [(48, 64, 3)] * 4
    assert np.allclose([picture.mean() for picture in pictures], [32, 96, 160, 224], atol=6)


def test_nobody_to_write_is_a_wrong_setting(tmp_path: Path):
    paths = {name: tmp_path / name for name in ("manifest", "written", "rejects")}
    with pytest.raises(ValidationError, match=r"caption\.model is not set"):
        Config.model_validate(paths)
    with pytest.raises(ValidationError, match=r"caption\.model_folder is not set"):
        Config.model_validate(paths | {"by": "local"})
    config = Config.model_validate(paths | {"by": "local", "model_folder": tmp_path / "none"})
    files.write_records(config.manifest, [], Source)
    with pytest.raises(RuntimeError, match="does not exist; download a model"):
        run(config)
