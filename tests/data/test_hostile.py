"""Names and words that mean harm, from the folder to the page: they stay text, and nothing outside is read."""

from __future__ import annotations

import csv
import ctypes
import html.parser
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from data import files
from data.records import Clip, ClipShape, Reject, Source
from tasks import browse, cut, ingest, split, validate

SCRIPT = "<script>alert('%s')</script>"
CANARY = "words from outside"
NAMES = {
    SCRIPT.replace("/", "\N{DIVISION SLASH}") % "name" + ".mp4": SCRIPT % "caption" + " a ball rolls",
    "\"'><img src=x onerror=alert(2)>.mp4": "</script><script>alert('json')</script> a cube turns",
    "new\nline.mp4": '=HYPERLINK("http://a.test") a bell rings',
    "tab\tand\x1b[31mred\x03rm -rf ~\n.mp4": "a red \x1b[31m light\x07 blinks",
    "\u202e4pm.exe.mp4": "a dog \u202esdrawkcab\u202c barks",
    "-rf.mp4": "-- a door closes",
    "%s%n$(touch hacked)`touch hacked`;|&.mp4": "{{ 7 * 7 }} ${HOME} a car starts",
    "'; DROP TABLE clips; --.mp4": "'; DROP TABLE clips; -- a train leaves",
    "<b onmouseover=alert(3)>x|y</b>".replace("/", "\N{DIVISION SLASH}")
    + "/[link](javascript:alert(4)).mp4": "a man [sings](javascript:x)",
    '" onmouseover=alert(5) x=".mp4': '" onmouseover=alert(6) x=" a kite flies',
    "e\u0301\u00e9 \N{SNOWMAN} \u200b.mp4": "+1 a snowman melts",
}
"""File name below the source, and its caption."""
WAYS_OUT = (
    "../outside/secret.mp4", "{outside}/secret.mp4", "file://{outside}/secret.mp4", "way/secret.mp4", "link.mp4",
    "x/../../outside/secret.mp4", "~/secret.mp4", "http://169.254.169.254/secret.mp4", "s3://me:word@bucket/secret.mp4",
    "concat:{outside}/secret.mp4|{outside}/secret.mp4", "\\\\host\\share\\secret.mp4",
)  # fmt: skip
"""What a table may name and no verb may open."""
PLAYLIST = "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile://{outside}/secret.mp4\n#EXT-X-ENDLIST\n"
CONCAT = "ffconcat version 1.0\nfile {outside}/secret.mp4\n"


class Watch:
    """What is opened in a folder, by anybody and in any language, as the kernel tells."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._queue = libc.inotify_init1(os.O_NONBLOCK)
        opened = 0x20  # IN_OPEN, inotify(7)
        assert libc.inotify_add_watch(self._queue, os.fsencode(folder), opened) >= 0

    def seen(self) -> list[str]:
        """Names opened since the last look."""
        try:
            content = os.read(self._queue, 1 << 16)
        except BlockingIOError:
            return []
        found: list[str] = []
        while content:
            size = struct.unpack("iIII", content[:16])[3]
            found.append(content[16 : 16 + size].rstrip(b"\0").decode())
            content = content[16 + size :]
        return found


class Elements(html.parser.HTMLParser):
    """Attributes of all elements, and what stands in scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, material: Any) -> Path:
    """A folder `set` of hostile films, `outside` it secrets, and a table that names both."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "outside").mkdir()
    for seed, (name, words) in enumerate(NAMES.items()):
        path = material.film(folder / "set" / name, seed=seed, silent=seed % 2 == 1, caption=None)
        path.with_suffix(".txt").write_text(words, encoding="utf-8")
    tags = dict.fromkeys(("title", "comment", "artist"), SCRIPT % "metadata" + "\x1b[31m")
    material.encoded(folder / "set/tagged.mkv", metadata=tags)
    secret = material.film(folder / "outside/secret.mp4", seed=99, caption=CANARY)
    shutil.copy(secret, folder / "outside/secret.png")
    (folder / "set/link.mp4").symlink_to(secret)
    (folder / "set/way").symlink_to(folder / "outside")
    (folder / "set/tagged.txt").unlink()
    (folder / "set/tagged.txt").symlink_to(secret.with_suffix(".txt"))
    for name, text in (("list.mp4", PLAYLIST), ("concat.mp4", CONCAT)):
        (folder / "set" / name).write_text(text.format(outside=folder / "outside"))
    with (folder / "set/table.csv").open("w", newline="", encoding="utf-8") as stream:
        rows = csv.writer(stream)
        rows.writerow(["video", "caption", "reference_image", "licence"])
        rows.writerows([name, words, "", SCRIPT % "licence"] for name, words in NAMES.items())
        rows.writerow(["tagged.mkv", "a plain one", "../outside/secret.png", ""])
        rows.writerows([way.format(outside=folder / "outside"), "way out", "", ""] for way in WAYS_OUT)
    return folder


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place as working directory; files are worked on in this process, since another takes seconds to start."""

    def in_this_process(function: Callable[[Any], Any], items: Iterator[Any], _engine: object) -> Iterator[Any]:
        return map(function, items)

    for name in ("data.engines.map_ordered", "tasks.cut.map_ordered", "tasks.browse.map_ordered"):
        monkeypatch.setattr(name, in_this_process)
    monkeypatch.chdir(place)
    return place


def names(*all_of: str) -> dict[str, Path]:
    return {name: Path("out") / name for name in all_of}


QUICK: dict[str, Any] = {"work": Path("out/work"), "sensing": {"speech": False}}


def ingested(source: str) -> dict[str, Source]:
    config = ingest.Config.model_validate({"source": source, "manifest": "out/manifest", **QUICK})
    ingest.run(config)
    return {row.path: row for row in files.read_records(config.manifest, Source)}


def test_a_folder_leads_nowhere(here: Path) -> None:
    watch = Watch(here / "outside")
    rows = ingested("set")
    assert watch.seen() == []
    (here / "outside/secret.txt").read_bytes()
    assert watch.seen() == ["secret.txt"]  # it does watch
    good = {f"set/{name}": words for name, words in NAMES.items()}
    assert {path: " ".join(words.split()) for path, words in good.items()} == {
        path: row.caption for path, row in rows.items() if row.error is None
    }
    errors = {path.removeprefix("set/"): row.error for path, row in rows.items() if row.error}
    assert errors == {
        "concat.mp4": "is text/plain, not a media file",
        "link.mp4": "is a link that leads out of the source folder or in a circle",
        "list.mp4": "is application/vnd.apple.mpegurl, not a media file",
        "tagged.mkv": "its caption tagged.txt is a link that leads out of the source folder",
        "way": "is a linked folder; links to folders are not followed",
    }


def test_a_table_goes_all_the_way_to_the_page_and_means_nothing_but_text(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    watch = Watch(here / "outside")
    rows = ingested("set/table.csv")
    assert {f"set/{name}" for name in NAMES} == {path for path, row in rows.items() if row.error is None} - {
        "set/tagged.mkv"
    }
    judge()
    clips = files.read_records(Path("out/clips"), Clip)
    assert {clip.path for clip in clips} == {f"set/{name}" for name in NAMES}
    divide_and_show()
    assert watch.seen() == []
    assert not (here / "hacked").exists()
    said = "".join(capfd.readouterr())
    assert not {letter for letter in said if not letter.isprintable()} - {"\n", "\r"}
    for path in (*Path("out").rglob("*.html"), *Path("out").rglob("*.md")):
        harmless(path)
    page = Path("out/pages/index.html").read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    shown = {item["path"]: item["caption"] for item in json.loads(data)}
    accepted = files.read_records(Path("out/accepted"), Source)
    assert shown == {source.path: source.caption for source in accepted}  # as they are, but as text
    known = page + "".join(row.model_dump_json() for row in (*rows.values(), *accepted))
    assert CANARY not in known
    assert "('metadata')" not in known


def judge() -> None:
    """From the manifest to clips."""
    outputs = names("manifest", "accepted", "rejects", "treatments", "expectations", "docs", "work")
    validate.run(validate.Config.model_validate(outputs | {"min_duration_s": 0.916}))
    config = {
        **names("accepted", "clips", "docs"),
        "rejects": "out/cut_rejects",
        "expectations": "out/cut_expectations",
    }
    cut.run(cut.Config.model_validate({**config, "shape": ClipShape(), **QUICK}))
    left = files.read_records(Path("out/rejects"), Reject)
    assert len(left) == len(WAYS_OUT) + 2  # with the tagged film and its reference


def divide_and_show() -> None:
    """From clips to the page."""
    known = names("clips", "accepted", "treatments", "splits", "ledger", "cards", "docs")
    own = {"rejects": "out/split_rejects", "expectations": "out/split_expectations"}
    split.run(split.Config.model_validate(known | own))
    shown = names("manifest", "accepted", "treatments", "clips", "splits", "cards", "pages", "docs")
    rejects = [f"out/{name}" for name in ("rejects", "cut_rejects", "split_rejects")]
    asked = [f"out/{name}" for name in ("expectations", "cut_expectations", "split_expectations")]
    browse.run(browse.Config.model_validate(shown | {"rejects": rejects, "expectations": asked, **QUICK}))


def harmless(path: Path) -> None:
    """No piece of a name or caption became an element, a handler or a link."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = re.sub(r"\\[\\|`*_\[\]<>#!&~]", "", text)  # escaped there
    assert not [piece for piece in ("<script>alert", "<img src=x", "<b onmouseover") if piece in text], path
    found = Elements(text)
    handlers = [value for name, value in found.attributes if name.startswith("on") and "alert" in (value or "")]
    links = [value for name, value in found.attributes if name in {"href", "src"} and "javascript:" in (value or "")]
    assert (handlers, links) == ([], []), path
    assert path.suffix == ".html" or "](javascript" not in text, path
    assert "out/pages" not in path.as_posix() or len(found.tags) > 50
