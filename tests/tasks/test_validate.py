from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from data import files
from data.records import DataRefused, Reject, Source, Treatment
from tasks import validate
from tasks.validate import Config, run

Maker = Callable[..., Source]


def config_of(folder: Path, sources: list[Source], **options: object) -> Config:
    """A configuration whose manifest holds `sources`."""
    files.write_records(folder / "manifest.parquet", sources, Source)
    names = ("manifest", "accepted", "rejects", "treatments")
    paths: dict[str, object] = {name: folder / f"{name}.parquet" for name in names}
    paths |= {"expectations": folder / "expectations.json", "docs": folder / "docs", "work": folder / "work"}
    return Config.model_validate(paths | options)


@pytest.fixture(scope="module")
def mixed(make_source: Maker) -> list[Source]:
    """Nine plain sources, one mono, one without caption, one broken, one short."""
    return [
        *(make_source(f"{number}.mp4") for number in range(9)),
        make_source("mono.mp4", num_channels=1),
        make_source("мяч.mp4", caption=None, frame_rate="30"),
        make_source("broken.mp4", error="is text, not a video"),
        make_source("short.mp4", video_duration_s=0.2),
    ]


def test_every_file_gets_a_verdict_and_the_same_bytes_every_time(
    tmp_path: Path, mixed: list[Source], capsys: pytest.CaptureFixture[str]
):
    config = config_of(tmp_path, mixed)
    result = run(config)
    assert (result.num_given, result.num_accepted, result.num_rejected, result.num_treated) == (13, 11, 2, 2)
    accepted = files.read_records(config.accepted, Source)
    assert {item.path: item.caption for item in accepted}["corpus/мяч.mp4"] == "a video with sound"
    assert [item.rule for item in files.read_records(config.rejects, Reject)] == [
        "validate.usable",
        "validate.min_duration_s",
    ]
    assert [item.treatment for item in files.read_records(config.treatments, Treatment)] == [
        "mono_to_stereo",
        "retime",
        "caption_by_default",
    ]
    assert all(item["success"] for item in json.loads(config.expectations.read_text())["outcomes"])
    assert (config.docs / "manifest/index.html").is_file()
    lines = capsys.readouterr().err.splitlines()
    assert lines[-3] == "13 given = 11 accepted + 2 rejected (1 with retime, 9 as they are)"
    assert lines[0].split("  ")[0] == "corpus/broken.mp4"
    assert [line for line in lines if "мяч" in line and "caption_by_default" in line]

    outputs = (config.accepted, config.rejects, config.treatments, config.expectations)
    first = [files.sha256(path) for path in outputs]
    run(config)
    assert [files.sha256(path) for path in outputs] == first


def test_too_many_missing_captions_refuse_the_dataset_by_name(tmp_path: Path, mixed: list[Source]):
    config = config_of(tmp_path, mixed, max_missing_caption_share=0.05)
    config.accepted.write_bytes(b"of an earlier run")
    with pytest.raises(
        DataRefused,
        match=r"1 of 11 sources \(9%\) have no caption, or one of no use \(1 no caption\); limit validate.max_missing_caption_share = 0.05: corpus/мяч.mp4",
    ):
        run(config)
    assert not config.accepted.exists()
    assert config.rejects.is_file()
    assert config.expectations.is_file()


def test_too_few_sources_refuse_the_dataset(tmp_path: Path, make_source: Maker):
    with pytest.raises(DataRefused, match="enough_sources: 1, expected min_value 3"):
        run(config_of(tmp_path, [make_source("a.mp4"), make_source("b.mp4", error="broken")]))


def test_captions_of_no_use_are_told_from_missing_ones(tmp_path: Path, make_source: Maker):
    captions = {
        "a": None,
        "b": "IMG_1234.mp4",
        "c": "I cannot see the video",
        "d": "DSC_7.mov",
        "e": "a red ball rolls",
    }
    sources = [make_source(f"{name}.mp4", caption=caption) for name, caption in captions.items()]
    reasons = r"\(80%\) have no caption, or one of no use \(2 file_name, 1 no caption, 1 refusal\); limit"
    with pytest.raises(DataRefused, match=reasons):
        run(config_of(tmp_path, sources))


def test_the_file_to_look_at_is_one_that_could_be_read(
    tmp_path: Path, make_source: Maker, capsys: pytest.CaptureFixture[str]
):
    refused = make_source("0", path="../../etc/passwd", error="lies outside the folder of its table")
    sources = [make_source(f"{name}.mp4", num_channels=1) for name in "abc"]
    run(config_of(tmp_path, [refused, *sources]))
    said = capsys.readouterr().err
    assert "look at one: soundstage inspect corpus/a.mp4\n" in said


def test_a_failed_warning_is_only_written_down(tmp_path: Path, make_source: Maker, capsys: pytest.CaptureFixture[str]):
    sources = [make_source(f"{number}.mp4", audio_codec=None, num_channels=0) for number in range(4)]
    config = config_of(tmp_path, sources)
    assert run(config).num_warnings == 1
    (failed,) = [item for item in json.loads(config.expectations.read_text())["outcomes"] if not item["success"]]
    assert (failed["name"], failed["critical"], failed["measured"]) == ("mostly_sound", False, "0")
    assert "37 of 38 expectations hold (1 is a warning: nothing stops); pages: " in capsys.readouterr().err


def test_no_half_written_output_is_left_when_killed_between_files(
    tmp_path: Path, mixed: list[Source], monkeypatch: pytest.MonkeyPatch
):
    config = config_of(tmp_path, mixed)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(validate.expectations, "frame", die)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    assert not config.accepted.exists()
    assert not (config.docs / "manifest").exists()
    monkeypatch.undo()
    assert run(config).num_accepted == 11
