"""One file's facts, treatments and verdict, as the data verbs would give them."""

from __future__ import annotations

import hashlib
import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from data import remote
from data.media import write_media
from tasks.__main__ import main

ROOT = Path(__file__).parents[2]
RATE_HZ = 48000
KEYS = {"verdict", "treatments", "rejects", "facts"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the checkout's own settings and three files: good, mono, cut short."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    rng = np.random.default_rng(0)
    blocks = np.kron(rng.integers(0, 255, (8, 8, 3)), np.ones((8, 8, 1))).astype(np.uint8)
    frames = np.stack([np.roll(blocks, number, axis=1) for number in range(36)])
    stereo = (0.3 * rng.standard_normal((2, RATE_HZ * 3 // 2))).clip(-1, 1).astype(np.float32)
    rate = Fraction(24)
    write_media(tmp_path / "good.mp4", frames, stereo, frame_rate=rate, sample_rate_hz=RATE_HZ)
    write_media(tmp_path / "a=b.mp4", frames, stereo[:1], frame_rate=rate, sample_rate_hz=RATE_HZ, layout="mono")
    for name in ("good", "a=b"):
        (tmp_path / f"{name}.txt").write_text("blocks of colour\n")
    content = (tmp_path / "good.mp4").read_bytes()
    (tmp_path / "short.mp4").write_bytes(content[: len(content) // 2])
    return tmp_path


def inspected(capsys: pytest.CaptureFixture[str], *words: str) -> object:
    status = main(["inspect", *words, "--json"])
    found = json.loads(capsys.readouterr().out)
    verdicts = {item["verdict"] for item in (found if isinstance(found, list) else [found])}
    assert (status == 0) == ("rejected" not in verdicts)
    return found


def test_json_is_the_contract_and_every_file_has_its_verdict(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(capsys, "good.mp4", "a=b.mp4", "short.mp4", "absent.mp4")
    assert isinstance(found, list)
    assert all(set(item) == KEYS for item in found)
    assert [item["verdict"] for item in found] == ["accepted", "treated", "rejected", "rejected"]
    assert [item["treatment"] for item in found[1]["treatments"]] == ["mono_to_stereo"]
    assert [set(item) for item in found[2]["rejects"]] == [{"rule", "measured", "limit", "message"}]
    assert "there is no such file" in found[3]["rejects"][0]["message"]
    facts = found[0]["facts"]
    assert (facts["num_frames"], facts["frame_rate"], facts["sample_rate_hz"], facts["num_clips"]) == (
        36,
        "24",
        RATE_HZ,
        1,
    )
    assert facts["caption"] == "blocks of colour"


def test_a_store_that_does_not_answer_costs_only_its_own_finding(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> object:
        raise OSError("no route")

    monkeypatch.setattr(remote, "_connected", lambda *_: SimpleNamespace(_strip_protocol=str, info=refuse))
    monkeypatch.setattr("tasks.inspect.map_ordered", lambda function, items, _engine: map(function, items))
    found = inspected(capsys, "s3://bucket/x.mp4", "good.mp4")
    assert isinstance(found, list)
    assert [item["verdict"] for item in found] == ["rejected", "accepted"]
    assert (found[0]["facts"]["path"], found[0]["rejects"][0]["rule"]) == ("s3://bucket/x.mp4", "validate.usable")
    assert "s3://bucket cannot be reached (OSError)" in found[0]["rejects"][0]["message"]


def test_a_reference_is_known_by_its_name_and_judged_as_one(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("good.ref1.mp4", "good.sound.mp4", "gone.ref1.mp4"):
        (place / name).write_bytes((place / "good.mp4").read_bytes())
    found = inspected(capsys, "good.ref1.mp4", "good.sound.mp4", "gone.ref1.mp4", "validate.min_duration_s=9")
    assert isinstance(found, list)
    assert [item["facts"]["use"] for item in found] == ["reference"] * 3
    assert [item["verdict"] for item in found] == ["accepted", "accepted", "rejected"]
    assert "is named as the reference of a clip that is not beside it" in found[2]["rejects"][0]["message"]


def test_settings_of_the_verbs_decide(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(capsys, "good.mp4", "validate.min_duration_s=2", "validate.min_side_px=100")
    assert isinstance(found, dict)
    assert found["verdict"] == "rejected"
    assert [item["rule"] for item in found["rejects"]] == ["validate.min_duration_s", "validate.min_side_px"]
    assert found["rejects"][0]["message"] == "1.500 s; limit validate.min_duration_s = 2 s"


def test_what_was_not_read_or_measured_is_no_fact(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "empty.mp4").touch()
    (place / "folder").mkdir()
    content = (place / "good.mp4").read_bytes()
    torn = content[: content.index(b"moov") - 4] + content[content.index(b"mdat") - 4 :][:200]
    (place / "torn.mp4").write_bytes(torn)
    found = inspected(capsys, "absent.mp4", "empty.mp4", "folder", "torn.mp4")
    assert isinstance(found, list)
    for item in found[:3]:
        facts = cast("dict[str, object]", item["facts"])
        known = {name for name, value in facts.items() if value not in (None, [], "", 0)}
        assert known == {"source_id", "path", "use", "error"}
    assert found[3]["facts"]["sha256"] == hashlib.sha256(torn).hexdigest()
    assert found[3]["facts"]["num_frames"] is None
    message = found[3]["rejects"][0]["message"]
    assert message.startswith("is cut short: ")
    assert message.endswith("wanted is a video that is there, whole, and given once (validate.usable)")
    assert main(["inspect", "absent.mp4"]) == 2
    assert len(capsys.readouterr().out.splitlines()) < 8


def test_black_is_named_as_the_reason_and_spans_of_one_fault_share_a_line(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    still = np.tile(np.random.default_rng(1).integers(0, 255, (1, 64, 64, 3), np.uint8), (72, 1, 1, 1))
    for name, frames in (("black", np.zeros_like(still)), ("frozen", still)):
        write_media(place / f"{name}.mp4", frames, None, frame_rate=Fraction(24), sample_rate_hz=RATE_HZ)
    found = inspected(capsys, "black.mp4", "frozen.mp4")
    assert isinstance(found, list)
    messages = [[str(item["message"]) for item in one["rejects"]] for one in cast("list[dict[str, Any]]", found)]
    assert messages == [
        ["100.0% of the frames are black; wanted is a picture for 0.917 s on end (cut.black)"],
        ["none of 3 spans passes; the first has freeze_share = 1; limit cut.filters.max_freeze_share = 0.9"],
    ]
    assert main(["inspect", "frozen.mp4"]) == 5
    text = capsys.readouterr().out
    assert text.count("freeze_share = 1;") == 2
    assert "from 0.000, 0.917, 1.833 s: freeze_share = 1; limit cut.filters.max_freeze_share = 0.9" in text


def test_text_gives_the_verdict_first_and_hides_control_characters(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "good.txt").write_text("red \x1b[31m text")
    assert main(["inspect", "good.mp4"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("good.mp4: ")
    assert "\x1b" not in text
    assert "video_codec" in text


@pytest.mark.parametrize("words", [[], ["good.mp4", "--jsn"], ["good.mp4", "nonsense.x=1"]])
def test_misuse_has_an_exit_status(place: Path, words: list[str]) -> None:
    try:
        status = main(["inspect", *words])
    except SystemExit as left:
        status = left.code
    assert status == 2


@pytest.mark.parametrize(
    ("names", "status", "said"),
    [
        (["good.mp4", "a=b.mp4"], 0, ""),
        (["good.mp4", "short.mp4"], 5, "1 of 2 rejected: short.mp4"),
        (["absent.mp4", "short.mp4"], 2, "1 of 2 not there: absent.mp4"),
    ],
)
def test_the_exit_status_says_whether_every_file_would_be_used(
    place: Path, names: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", *names]) == status
    out, err = capsys.readouterr()
    assert [line.partition(":")[0] for line in out.splitlines() if line and line[0] != " "] == names
    assert said in err


def test_help_says_what_the_exit_status_means(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--help"]) == 0
    assert "5\nwhere one is rejected, and 2 where one does not exist" in capsys.readouterr().out
