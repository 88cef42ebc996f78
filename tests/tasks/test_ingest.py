from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from data.files import read_records, sha256
from data.media import write_mp4
from data.records import DataRefused, Source
from tasks import ingest
from tasks.ingest import Config, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two good films, a copy of one, an empty file and a text with the wrong name."""
    root = tmp_path_factory.mktemp("films")
    (root / "kept").mkdir()
    random = np.random.default_rng(0)
    for name in ("a.mp4", "kept/b.mp4"):
        frames = np.full((12, 32, 32, 3), random.integers(40, 200), np.uint8)
        sound = random.uniform(-0.1, 0.1, (2, 24000)).astype(np.float32)
        write_mp4(root / name, frames, sound, 24, 48000)
    shutil.copy(root / "a.mp4", root / "kept" / "a again.mp4")
    (root / "a.txt").write_text("a caption\n", encoding="utf-8")
    (root / "empty.mp4").touch()
    (root / "kept" / "notes.mp4").write_text("notes", encoding="utf-8")
    return root


def test_every_file_is_one_row_with_its_reason(folder: Path, tmp_path: Path) -> None:
    rows = {Path(row.path).name: row for row in run(Config(source=folder, manifest=tmp_path / "m.parquet"))}
    assert set(rows) == {"a.mp4", "a again.mp4", "b.mp4", "empty.mp4", "notes.mp4"}
    good = rows["a.mp4"]
    assert (good.error, good.caption, good.num_frames, good.num_channels) == (None, "a caption", 12, 2)
    assert good.sha256 == sha256(folder / "a.mp4")
    assert good.source_id == good.sha256[:16]
    assert rows["b.mp4"].group == "kept"
    assert rows["a again.mp4"].error == f"same content as {good.path}"
    assert rows["empty.mp4"].error == "is empty"
    assert "does not decode" in str(rows["notes.mp4"].error)


def test_manifest_does_not_depend_on_the_number_of_workers(folder: Path, tmp_path: Path) -> None:
    hashes = set[str]()
    for num_workers in (1, 2, 3):
        rows = run(Config(source=folder, manifest=tmp_path / "m.parquet", num_workers=num_workers))
        hashes.add(sha256(tmp_path / "m.parquet"))
        assert read_records(tmp_path / "m.parquet", Source) == rows
        assert [row.path for row in rows] == sorted(row.path for row in rows)
    assert len(hashes) == 1


def test_a_table_names_missing_and_foreign_files(folder: Path, tmp_path: Path) -> None:
    table = folder / "list.csv"
    table.write_text("video,caption\na.mp4,from the table\ngone.mp4,x\n../a.mp4,y\n", encoding="utf-8")
    try:
        rows = {row.path: row for row in run(Config(source=table, manifest=tmp_path / "m.parquet"))}
    finally:
        table.unlink()
    assert rows[str(folder / "a.mp4")].caption == "from the table"
    assert rows[str(folder / "gone.mp4")].error == "there is no such file"
    assert rows["../a.mp4"].error == "lies outside the folder of its table"


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "films").mkdir()
    (tmp_path / "films" / "a.txt").write_text("alone", encoding="utf-8")
    with pytest.raises(DataRefused, match="holds no media"):
        run(Config(source=tmp_path / "films", manifest=tmp_path / "m.parquet"))
    assert not (tmp_path / "m.parquet").exists()


def crash_on_b(given: ingest.Given) -> Source:
    """A decoder with a fault that one file triggers."""
    if given.path.endswith("b.mp4"):
        os.kill(os.getpid(), signal.SIGSEGV)
    return ingest.unmeasured(given, "not measured")


def test_a_decoder_that_crashes_costs_one_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "measure", crash_on_b)
    rows = {Path(row.path).name: row.error for row in run(Config(source=folder, manifest=tmp_path / "m.parquet"))}
    assert rows.pop("b.mp4") == "crashes the decoder (signal 11)"
    assert set(rows.values()) == {"not measured"}
