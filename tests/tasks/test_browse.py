from __future__ import annotations

import html.parser
import json
import re
import subprocess
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from data import files, splits
from data.captions import CaptionFault
from data.cards import column
from data.media import write_media
from data.records import Clip, Reject, Source, Treatment
from tasks import split
from tasks.browse import Config, address, run
from tasks.explain import inspect_command

EVIL = "\u202e\u2066</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class Reading(html.parser.HTMLParser):
    """Elements by name, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data


@pytest.fixture
def place(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_clip: Callable[..., Clip],
    make_source: Callable[..., Source],
) -> Path:
    """What the verbs before leave behind: one real video, eleven that are gone, a reject of each verb."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(split, "check_expectations", lambda *_: None)
    rows = np.random.default_rng(0).integers(0, 255, (48, 48, 3), np.uint8)
    frames = np.stack([np.roll(rows, number, axis=1) for number in range(48)])
    sound = np.zeros((2, 16000), np.float32)
    write_media(tmp_path / "a & b.mp4", frames, sound, frame_rate=Fraction(24), sample_rate_hz=8000)
    content = files.sha256(tmp_path / "a & b.mp4")
    sources = [make_source("real", source_id=content[:16], sha256=content, path="a & b.mp4", caption=EVIL)]
    sources += [make_source(f"gone {number}.mp4", group="new") for number in range(11)]
    broken = make_source("broken", path=f"{EVIL}.mp4", error="is empty")
    still = make_source("still", path="still.png", use="reference")
    clips = [
        make_clip(s.source_id, n, path=s.path, caption=s.caption, group=s.group) for s in sources for n in range(2)
    ]
    files.write_records(tmp_path / "manifest", [*sources, broken, still], Source)
    files.write_records(tmp_path / "accepted", sources, Source)
    files.write_records(tmp_path / "clips", sorted(clips, key=lambda clip: clip.clip_id), Clip)
    treated = [Treatment(item=sources[0].source_id, path="", treatment="retime", detail=EVIL)]
    files.write_records(tmp_path / "treatments", treated, Treatment)

    def reject(verb: str, item: str, path: str) -> Reject:
        return Reject(item=item, path=path, verb=verb, rule=f"{verb}.limit", measured=EVIL, limit="1")

    files.write_records(tmp_path / "rejects", [reject("validate", broken.source_id, broken.path)], Reject)
    spans = [reject("cut", f"{sources[0].source_id}-001500", "a & b.mp4")]
    files.write_records(tmp_path / "cut_rejects", spans, Reject)
    names = ("clips", "accepted", "treatments", "splits", "ledger", "cards", "expectations", "docs")
    settings = {name: tmp_path / name for name in names} | {"rejects": tmp_path / "split_rejects"}
    split.run(split.Config.model_validate(settings))
    return tmp_path


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A child process takes seconds to start; one test below has them."""
    if "jpeg" not in request.node.name:
        monkeypatch.setattr("tasks.browse.map_ordered", lambda function, items, _engine: map(function, items))


def config_of(place: Path, **options: object) -> Config:
    names = ("manifest", "accepted", "treatments", "clips", "splits", "cards", "pages", "work")
    settings: dict[str, object] = {name: place / name for name in names}
    rejects = [place / "rejects", place / "cut_rejects", place / "split_rejects"]
    return Config.model_validate(settings | {"rejects": rejects, "docs": place / "docs"} | options)


def items_of(place: Path) -> list[dict[str, object]]:
    return json.loads(Reading((place / "pages/index.html").read_text()).scripts[0])


def test_every_clip_and_span_is_there_with_its_verdict_and_the_counts_add_up(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(config_of(place))
    assert f"browse: 25 clips and spans are shown; open {place / 'pages/index.html'}\n" in capsys.readouterr().err
    assert (result.num_clips, result.num_shown, result.num_thumbnails) == (24, 25, 3)
    items = items_of(place)
    wanted = column(place / "clips", "clip_id").to_pylist()
    assert sorted(item["id"] for item in items if item["split"] in splits.SPLITS) == wanted
    (span,) = [item for item in items if item["split"] == "left out"]
    assert (span["rule"], span["start"]) == ("cut.limit", 1.5)
    text = (place / "pages/index.html").read_text()
    assert "13 given = 12 used + 0 that gave no clip + 1 left out; 1 references beside them." in text
    assert "25 spans of the files = 24 clips + 1 filtered" in text
    assert "1 files and 1 spans of files." in text
    assert "do not add up" not in text


def test_files_that_give_no_clip_are_neither_used_nor_treated(place: Path) -> None:
    clips = files.read_records(place / "clips", Clip)
    lost = files.sha256(place / "a & b.mp4")[:16]
    files.write_records(place / "clips", [clip for clip in clips if clip.source_id != lost], Clip)
    files.remove(place / "ledger")
    names = ("clips", "accepted", "treatments", "splits", "ledger", "cards", "expectations", "docs")
    settings = {name: place / name for name in names} | {"rejects": place / "split_rejects"}
    split.run(split.Config.model_validate(settings))
    run(config_of(place))
    text = (place / "pages/index.html").read_text()
    assert "13 given = 11 used + 1 that gave no clip + 1 left out" in text
    assert '<tspan class="n">0</tspan> used, treated' in text


def test_clips_come_by_path_then_start_and_groups_bear_one_name(place: Path) -> None:
    run(config_of(place))
    places = [(item["path"], item["start"]) for item in items_of(place)]
    assert places == sorted(places)
    (own, *_) = [item["split"] for item in items_of(place) if item["path"] == "a & b.mp4"]
    assert "| (root) |" in (place / f"cards/{own}.md").read_text()
    assert '<td class="name">(root)</td>' in (place / "pages/index.html").read_text()


def test_caption_faults_stand_beside_their_file_and_in_a_table(place: Path) -> None:
    (real, *_) = [item for item in files.read_records(place / "accepted", Source) if item.path == "a & b.mp4"]
    about = {"limit": "plain text", "action": "list", "fault": "markup", "measured": "<img>"}
    faults = [
        CaptionFault(item=real.source_id, path=path, caption=EVIL, **about) for path in (real.path, "its copy.mp4")
    ]
    files.write_records(place / "faults", faults, CaptionFault)
    run(config_of(place, caption_faults=place / "faults"))
    found = {str(item["path"]): item["faults"] for item in items_of(place)}
    assert found["a & b.mp4"] == [["markup", "<img>", "only listed"]]
    assert [] in found.values()
    text = (place / "pages/index.html").read_text()
    assert "2 markup. What is done" in text
    assert "its copy.mp4" in text
    assert "<script>alert" not in text


def test_commands_name_the_settings_file_in_use_and_no_path_that_was_refused(place: Path) -> None:
    refused = Reject(
        item="f" * 16, path="../../etc/passwd", verb="validate", rule="validate.usable",
        measured="lies outside the folder of its table", limit="a video",
    )  # fmt: skip
    files.write_records(place / "rejects", [*files.read_records(place / "rejects", Reject), refused], Reject)
    run(config_of(place, settings_file="my own.yaml"))
    assert all(str(item["command"]).endswith(" --params 'my own.yaml'") for item in items_of(place))
    commands = [
        found["data-copy"]
        for tag, found in Reading((place / "pages/index.html").read_text()).found
        if "data-copy" in found
    ]
    assert commands
    assert not any("passwd" in str(command) for command in commands)


def test_a_copy_that_was_left_out_hides_no_picture_of_its_original(
    place: Path, make_source: Callable[..., Source]
) -> None:
    manifest = files.read_records(place / "manifest", Source)
    copy = manifest[0].model_copy(update={"path": "copy.mp4", "error": "same content as a & b.mp4"})
    files.write_records(place / "manifest", [*manifest, copy], Source)
    assert run(config_of(place)).num_thumbnails == 3


def test_thumbnails_are_jpeg_files_of_the_measurement_and_videos_are_linked_at_the_span(place: Path) -> None:
    run(config_of(place))
    (real, *_) = [item for item in items_of(place) if item["path"] == "a & b.mp4"]
    assert (place / f"pages/thumbs/{real['id']}.jpg").read_bytes().startswith(b"\xff\xd8")
    assert (place / "pages" / unquote(str(real["url"]))).resolve() == place / "a & b.mp4"
    assert real["command"] == "soundstage inspect 'a & b.mp4'"


def test_the_same_inputs_give_the_same_bytes_whether_measurements_are_remembered_or_not(place: Path) -> None:
    run(config_of(place))
    before = files.sha256(place / "pages")
    files.refuse_foreign_outputs(config_of(place))
    run(config_of(place))
    assert files.sha256(place / "pages") == before
    files.remove(place / "work")
    run(config_of(place))
    assert files.sha256(place / "pages") == before


def test_markup_in_captions_names_and_details_is_only_text(place: Path) -> None:
    run(config_of(place))
    text = (place / "pages/index.html").read_text()
    page = Reading(text)
    assert len(page.scripts) == 2
    assert not any("onerror" in attributes for _, attributes in page.found)
    assert EVIL in {item["caption"] for item in items_of(place)}
    assert "<script>alert" not in text
    assert not re.search("[\u202e\u2066]", text.replace(page.scripts[0], ""))
    assert "\\u202e\\u2066&lt;/script&gt;" in text
    script = page.scripts[1]
    assert "innerHTML" not in script
    assert "document.write" not in script


def test_no_request_leaves_the_page(place: Path) -> None:
    run(config_of(place))
    text = (place / "pages/index.html").read_text()
    assert not re.findall(r"(?:src|href)=\"?(?:https?:)?//", text)
    assert "@import" not in text


def test_more_clips_than_wanted_are_sampled_evenly_and_counted_in_whole(place: Path) -> None:
    result = run(config_of(place, max_clips=8))
    assert result.num_clips == 24
    kept = [item for item in items_of(place) if item["split"] in splits.SPLITS]
    assert 8 <= len(kept) <= 11
    assert "const total = 25" in (place / "pages/index.html").read_text()


def test_failed_expectations_are_shown_with_their_pages(place: Path) -> None:
    failed = {"name": "enough", "success": False, "measured": "3 < 4", "limit": "min_value 4", "why": "few"}
    (place / "e.json").write_text(json.dumps({"suite": "clips", "outcomes": [failed, failed | {"success": True}]}))
    run(config_of(place, expectations=[place / "e.json"]))
    text = (place / "pages/index.html").read_text()
    assert "1 of 2" in text
    assert "3 &lt; 4, expected min_value 4" in text
    assert 'href="../e.json">JSON</a>' in text
    assert 'href="../docs/clips/index.html"' in text


@pytest.mark.parametrize("path", ["javascript:alert(1)", "a\"b'c<d>.mp4", "/etc/x y.mp4", "мяч 球.mp4"])
def test_an_address_is_a_relative_one_whatever_the_name(path: str) -> None:
    found = address(path, Path("data/store/data"))
    assert found is not None
    assert re.fullmatch(r"(\.\./)+[\w%./~-]+", found)
    assert address("s3://bucket/a.mp4", Path("data")) is None


@pytest.mark.parametrize(
    "name", ["a'; rm -rf .mp4", "-x.mp4", "new\nline.mp4", "\x1b[2J\\'\u2028e\u0301 $(id).mp4", "\x7f0"]
)
def test_a_command_is_safe_to_paste(name: str) -> None:
    said = inspect_command(name)
    assert said.isprintable()
    bash = subprocess.run(["bash", "-c", said.replace("soundstage inspect", "printf %s", 1)], capture_output=True)
    assert bash.stdout.decode().removeprefix("./") == name
