from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from moto.server import ThreadedMotoServer

from data import engines, remote
from data import measure as measuring
from data.engines import Engine
from data.files import num_records, read_records, sha256
from data.listing import Listed
from data.media import write_mp4
from data.records import DataRefused, Source
from data.sensing import Sensing
from data.tables import Words
from tasks import ingest
from tasks.ingest import Config, run

FAST = Sensing(speech=False)


def write_film(path: Path, seed: int) -> Path:
    """Half a second of one colour and noise."""
    random = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    frames = np.full((12, 32, 32, 3), random.integers(40, 200), np.uint8)
    write_mp4(path, frames, random.uniform(-0.1, 0.1, (2, 24000)).astype(np.float32), 24, 48000)
    return path


def write_still(path: Path) -> Path:
    import cv2

    assert cv2.imwrite(str(path), np.full((32, 32, 3), 99, np.uint8))
    return path


def write_sound(path: Path) -> Path:
    import wave

    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(np.random.default_rng(0).integers(-999, 999, 8000, np.int16).tobytes())
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two good films, a copy of one, an empty file and a text with the wrong name."""
    root = tmp_path_factory.mktemp("films")
    write_film(root / "a.mp4", 1)
    write_film(root / "kept" / "b.mp4", 2)
    shutil.copy(root / "a.mp4", root / "kept" / "a again.mp4")
    (root / "a.txt").write_text("a caption\n", encoding="utf-8")
    (root / "empty.mp4").touch()
    (root / "kept" / "notes.mp4").write_text("notes", encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One memory of measurements for all tests that do not count them."""
    return tmp_path_factory.mktemp("work")


def rows_of(source: object, tmp_path: Path, work: Path, num_workers: int = 0, **settings: object) -> list[Source]:
    """What a run writes; without workers it measures in this process, which starts faster."""
    settings = {"sensing": FAST, "engine": Engine(num_workers=num_workers or 1)} | settings
    config = Config(source=source, manifest=tmp_path / "m.parquet", work=work, **settings)
    with pytest.MonkeyPatch.context() as patch:
        if not num_workers:
            patch.setattr(engines, "map_ordered", lambda function, items, _: map(function, items))
        assert run(config) == num_records(config.manifest)
    return read_records(config.manifest, Source)


def test_the_end_says_how_many_files_there_are_and_where_their_list_is(
    tmp_path: Path, folder: Path, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "films")
    shutil.copy(folder / "a.mp4", tmp_path / "films/a.ref1.mp4")
    (tmp_path / "films/or\nphan.txt").write_text("of no film\n")
    rows_of(tmp_path / "films", tmp_path, work)
    lines = capsys.readouterr().err.splitlines()
    alone = f"{tmp_path}/films/or\nphan.txt"
    assert f"ingest: 1 caption belongs to no video (name.txt or name.json beside name.mp4): {alone!r}" in lines
    end = "5 files: 2 can be used, 3 cannot, 1 references beside them"
    assert f"ingest: {end}; written to {tmp_path / 'm.parquet'}" in lines


def test_every_file_is_one_row_with_its_reason(folder: Path, tmp_path: Path, work: Path) -> None:
    listed = rows_of(folder, tmp_path, work)
    rows = {Path(row.path).name: row for row in listed}
    assert set(rows) == {"a.mp4", "a again.mp4", "b.mp4", "empty.mp4", "notes.mp4"}
    assert [row.path for row in listed] == sorted(row.path for row in listed)
    good = rows["a.mp4"]
    assert (good.error, good.caption, good.caption_from) == (None, "a caption", "sidecar")
    assert (good.num_frames, good.num_channels, good.media_type) == (12, 2, "video/mp4")
    assert good.sha256 == sha256(folder / "a.mp4")
    assert good.source_id == good.sha256[:16]
    assert rows["b.mp4"].group == "kept"
    assert rows["a again.mp4"].error == f"same content as {good.path}"
    assert rows["empty.mp4"].error == "is empty"
    assert "not a media file" in str(rows["notes.mp4"].error)


def test_manifest_does_not_depend_on_workers_or_memory(folder: Path, tmp_path: Path) -> None:
    hashes = set[str]()
    for num_workers, work in ((0, "x"), (2, "x"), (3, "y")):
        rows_of(folder, tmp_path, tmp_path / work, num_workers)
        hashes.add(sha256(tmp_path / "m.parquet"))
    assert len(hashes) == 1


def test_a_table_names_missing_foreign_and_repeated_files(folder: Path, tmp_path: Path, work: Path) -> None:
    table = folder / "list.csv"
    names = ["a.mp4", "gone.mp4", "../a.mp4", "/etc/passwd", "a.mp4", "./a.mp4", "kept", "", "x" * 300, "n\0ul.mp4"]
    table.write_text("video,caption\n" + "".join(f"{name},words of {i}\n" for i, name in enumerate(names)))
    try:
        rows = rows_of(table, tmp_path, work)
    finally:
        table.unlink()
    assert [row.error and row.error.partition(";")[0] for row in rows] == [
        None,
        "there is no such file",
        "lies outside the folder of its table",
        "lies outside the folder of its table",
        "is listed more than once",
        "is listed more than once",
        "is a folder, not a file",
        "row 8 names no file",
        "cannot be read: File name too long",
        "is a name that no file can have",
    ]
    assert [row.caption for row in rows[:5]] == [f"words of {i}" for i in range(5)]
    assert (rows[0].path, rows[0].caption_from) == (str(folder / "a.mp4"), "table")
    assert len({row.source_id for row in rows}) == len(rows)


def test_references_and_sounds_have_rows_of_their_own_after_the_clips(tmp_path: Path, work: Path) -> None:
    for number, name in enumerate(("cat.mp4", "dog.mp4", "owl.mp4")):
        write_film(tmp_path / "set" / name, number)
    for name in ("face.png", "lone.png"):
        write_still(tmp_path / "set" / name)
    for name in ("miaow.wav", "lone.wav"):
        write_sound(tmp_path / "set" / name)
    table = tmp_path / "set" / "list.jsonl"
    lines = [
        {"video": "cat.mp4", "reference_image": "face.png", "reference_video": "dog.mp4", "audio": "miaow.wav"},
        {"video": "dog.mp4", "reference_image": ["face.png", "gone.png"], "input_audio": "dog.mp4"},
        {"video": "owl.mp4", "audio": "face.png"},
        {"video": "lone.png"},
        {"video": "lone.wav"},
    ]
    table.write_text("\n".join(map(json.dumps, lines)))
    rows = {Path(row.path).name: row for row in rows_of(table, tmp_path, work, root=str(tmp_path / "set"))}
    assert list(rows) == ["cat.mp4", "dog.mp4", "owl.mp4", "lone.png", "lone.wav", "face.png", "miaow.wav", "gone.png"]
    named = [Path(path).name for path in rows["cat.mp4"].references]
    assert (named, rows["cat.mp4"].use) == (["face.png", "dog.mp4"], "clip")
    assert rows["cat.mp4"].sound_path == str(tmp_path / "set" / "miaow.wav")
    assert (rows["cat.mp4"].sample_rate_hz, rows["cat.mp4"].num_channels) == (8000, 1)
    assert (rows["dog.mp4"].sound_path, rows["dog.mp4"].sample_rate_hz, rows["dog.mp4"].use) == (None, 48000, "clip")
    assert {name: row.use for name, row in rows.items() if row.use == "reference"}.keys() == {
        "face.png",
        "miaow.wav",
        "gone.png",
    }
    assert (rows["face.png"].error, rows["face.png"].width, rows["face.png"].media_type) == (None, 32, "image/png")
    assert (rows["miaow.wav"].error, rows["miaow.wav"].audio_codec) == (None, "pcm_s16le")
    assert rows["gone.png"].error == "there is no such file"
    assert rows["lone.png"].error == "is a still picture (image/png), not a video"
    assert rows["lone.wav"].error == "holds no picture, only sound"
    assert "its sound file face.png holds no sound" in str(rows["owl.mp4"].error)


def test_two_references_of_the_same_content_both_stay_usable(tmp_path: Path, work: Path) -> None:
    write_film(tmp_path / "set" / "a.mp4", 1)
    write_still(tmp_path / "set" / "a.ref1.png")
    shutil.copy(tmp_path / "set" / "a.ref1.png", tmp_path / "set" / "a.ref2.png")
    rows = rows_of(tmp_path / "set", tmp_path, work)
    assert [row.error for row in rows] == [None, None, None]
    assert rows[0].references == (rows[1].path, rows[2].path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "films").mkdir()
    (tmp_path / "films" / "a.txt").write_text("alone", encoding="utf-8")
    (tmp_path / "m.parquet").write_text("of other films")
    with pytest.raises(DataRefused, match="holds no media"):
        run(Config(source=tmp_path / "films", manifest=tmp_path / "m.parquet", work=tmp_path / "work"))
    assert not (tmp_path / "m.parquet").exists()


def test_columns_that_nothing_reads_are_named_once(
    tmp_path: Path, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_film(tmp_path / "a.mp4", 1)
    table = tmp_path / "t.csv"
    table.write_text("video,gpt_caption,\x1b[31mscore,video_mask\na.mp4,seen,1,m.mp4\nb.mp4,unseen,2,n.mp4\n")
    rows = rows_of(table, tmp_path, work, columns={"gpt_caption": "caption"})
    assert rows[0].caption == "seen"
    said = [line for line in capsys.readouterr().err.splitlines() if "nothing reads" in line]
    assert said == [f"ingest: nothing reads the columns '\\x1b[31mscore', video_mask of {table}"]


HOSTILE = [
    "-rf.mp4",
    "new\nline.mp4",
    "tab\tand\x1b[31m.mp4",
    "<script>alert(1)</script>.mp4".replace("/", "\u2215"),
    "=HYPERLINK(0).mp4",
    "%s%n$(id)`id`;.mp4",
    "\u202egpm.mp4",
    "e\u0301\u00e9.mp4",
    "w" * 251 + ".mp4",
]


def test_hostile_names_are_names(tmp_path: Path, work: Path) -> None:
    (tmp_path / "set").mkdir()
    film = write_film(tmp_path / "film.mp4", 1)
    for name in HOSTILE:
        shutil.copy(film, tmp_path / "set" / name)
        with (tmp_path / "set" / name).open("ab") as stream:
            stream.write(b"\0\0\0\x10free" + name.encode()[:8].ljust(8))
    (tmp_path / "set" / os.fsdecode(b"caf\xe9.mp4")).write_bytes(film.read_bytes())
    rows = rows_of(tmp_path / "set", tmp_path, work)
    assert sorted(Path(row.path).name for row in rows if row.error is None) == sorted(HOSTILE)
    (bad,) = [row for row in rows if row.error]
    assert (bad.error, Path(bad.path).name) == ("has a name that is not UTF-8; rename it", "caf\ufffd.mp4")


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without the super-user's power to read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_what_is_no_readable_file_is_a_reason_and_nothing_hangs() -> None:
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    try:
        write_film(root / "good.mp4", 1)
        write_film(root / "denied.mp4", 2).chmod(0)
        os.mkfifo(root / "pipe.mp4")
        os.mkfifo(root / "good.txt")
        (root / "zero.mp4").symlink_to("/dev/zero")
        (root / "dangling.mp4").symlink_to(root / "nothing.mp4")
        (root / "closed").mkdir(mode=0)
        (root / ".work").mkdir()
        (root / ".work").chmod(0o777)
        (root / "half.mp4.part").write_bytes(b"x")
        with as_nobody():
            listing = ingest.Listing()
            listing.add(ingest.given_by(root))
            rows = {Path(row.path).name: ingest.measure(row, FAST, root / ".work") for row in listing}
    finally:
        shutil.rmtree(root)
    errors = {name: row.error for name, row in rows.items()}
    assert errors == {
        "good.mp4": None,
        "denied.mp4": "cannot be read: Permission denied",
        "pipe.mp4": "is not a regular file",
        "zero.mp4": "is a link that leads out of the source folder or in a circle",
        "dangling.mp4": "is a link to nothing",
        "closed": "is a folder that cannot be read: Permission denied",
        "half.mp4.part": "is an unfinished download (.part); finish it or delete it",
    }


def crash_on_b(row: Listed, sensing: Sensing, work: Path) -> Source:
    """A decoder with a fault that one file triggers."""
    if row.path.endswith("b.mp4"):
        os.kill(os.getpid(), signal.SIGSEGV)
    return ingest.unmeasured(row, "not measured")


def test_a_decoder_that_crashes_costs_one_file(
    folder: Path, tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "measure", crash_on_b)
    rows = {Path(row.path).name: row.error for row in rows_of(folder, tmp_path, work, 1)}
    assert rows.pop("b.mp4") == "crashes the decoder (signal 11)"
    assert set(rows.values()) == {"not measured"}


def entries(work: Path) -> set[Path]:
    return set((work / "measured").rglob("*.npz"))


def test_a_grown_or_renamed_set_measures_only_what_is_new(tmp_path: Path) -> None:
    for number in range(10):
        write_film(tmp_path / "set" / f"{number}.mp4", number)
    work = tmp_path / "work"
    before = rows_of(tmp_path / "set", tmp_path, work)
    old = {path: path.stat().st_mtime_ns for path in entries(work)}
    assert len(old) == 10
    write_film(tmp_path / "set" / "10.mp4", 10)
    (tmp_path / "set" / "3.mp4").rename(tmp_path / "set" / "third.mp4")
    after = rows_of(tmp_path / "set", tmp_path, work)
    assert len(entries(work) - set(old)) == 1
    assert all(path.stat().st_mtime_ns == time_ns for path, time_ns in old.items())
    facts = {row.source_id: row.model_dump(exclude={"path"}) for row in before}
    assert {key: row for row in after if (key := row.source_id) in facts}.keys() == facts.keys()
    assert all(row.model_dump(exclude={"path"}) == facts[row.source_id] for row in after if row.source_id in facts)


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        write_film(tmp_path / "set" / f"{number}.mp4", number)
    monkeypatch.chdir(tmp_path)
    assert [row.error for row in rows_of("set", tmp_path, tmp_path / "other work")] == [None] * 6
    uninterrupted = sha256(tmp_path / "m.parquet")
    (tmp_path / "m.parquet").unlink()
    (tmp_path / "params.yaml").write_text(
        "ingest: {source: set, manifest: m.parquet, work: work, sensing: {speech: false}, engine: {num_workers: 1}}"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    killed = subprocess.Popen([sys.executable, "-m", "tasks", "ingest"], env=environment, stderr=subprocess.DEVNULL)
    while not entries(tmp_path / "work"):
        assert killed.poll() is None
    killed.kill()
    killed.wait()
    assert not (tmp_path / "m.parquet").exists()
    kept = {path: path.stat().st_mtime_ns for path in entries(tmp_path / "work")}
    assert 1 <= len(kept) < 6
    assert [row.error for row in rows_of("set", tmp_path, tmp_path / "work")] == [None] * 6  # goes on
    assert len(entries(tmp_path / "work")) == 6
    assert all(path.stat().st_mtime_ns == time_ns for path, time_ns in kept.items())
    assert sha256(tmp_path / "m.parquet") == uninterrupted


def test_a_remote_set_gives_the_rows_of_a_local_one_and_is_not_fetched_twice(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "hush",
            "AWS_DEFAULT_REGION": "us-east-1",
            remote.CACHE_FOLDER: str(tmp_path / "cache"),
        }.items():
            monkeypatch.setenv(name, value)
        remote._connected.cache_clear()
        import boto3

        client = boto3.client("s3")
        client.create_bucket(Bucket="films")
        for path in folder.rglob("*.*"):
            client.upload_file(str(path), "films", path.relative_to(folder).as_posix())
        rows = rows_of("s3://films", tmp_path, tmp_path / "work", 2)
        here = rows_of(folder, tmp_path, tmp_path / "work")
        assert [row.path for row in rows] == [f"s3://films/{Path(row.path).relative_to(folder)}" for row in here]
        without = {"path", "error", "sha256", "source_id"}
        assert [row.model_dump(exclude=without) for row in rows] == [row.model_dump(exclude=without) for row in here]
        assert [row.error is None for row in rows] == [row.error is None for row in here]
        shutil.rmtree(tmp_path / "cache")
        assert rows_of("s3://films", tmp_path, tmp_path / "work") == rows
        assert not (tmp_path / "cache").exists()
    finally:
        server.stop()
        remote._connected.cache_clear()


def test_a_file_that_changed_is_measured_again(tmp_path: Path) -> None:
    film = write_film(tmp_path / "set" / "a.mp4", 1)
    (first,) = rows_of(tmp_path / "set", tmp_path, tmp_path / "work")
    write_film(film, 2)
    (second,) = rows_of(tmp_path / "set", tmp_path, tmp_path / "work")
    assert second.sha256 == sha256(film) != first.sha256
    assert len(entries(tmp_path / "work")) == 2


def test_rows_know_their_words(tmp_path: Path, work: Path) -> None:
    row = Listed("/x.mp4", "x.mp4", "", "clip", Words("c", "table", "en", "CC0-1.0"), None, None, (), "is unwell")
    source = ingest.measure(row, FAST, work)
    assert (source.caption, source.caption_from, source.caption_language) == ("c", "table", "en")
    assert (source.licence, source.error) == ("CC0-1.0", "is unwell")


def test_measuring_twice_is_remembered_in_the_parent_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    film = write_film(tmp_path / "a.mp4", 1)
    row = Listed(str(film), "a.mp4", "", "clip", Words(), None, None, (), None)
    first = ingest.measure(row, FAST, tmp_path / "work")

    def refuse(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(measuring, "measure", refuse)
    assert ingest.measure(row, FAST, tmp_path / "work") == first


def no_input_output(_: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_machine_that_is_full_stops_the_run_and_blames_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    film = write_film(tmp_path / "a.mp4", 1)
    row = Listed(str(film), "a.mp4", "", "clip", Words(), None, None, (), None)
    (tmp_path / "work").write_text("a file where the folder should be")
    with pytest.raises(OSError, match="work"):
        ingest.measure(row, FAST, tmp_path / "work")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_input_output)
        with pytest.raises(OSError, match=r"Input/output error: .*worn work"):
            ingest.measure(row, FAST, tmp_path / "worn work")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(measuring, "_keep", full)
    with pytest.raises(OSError, match="No space left"):
        ingest.measure(row, FAST, tmp_path / "other work")
