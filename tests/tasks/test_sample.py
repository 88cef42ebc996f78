from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data import awkward
from data.files import read_records, sha256
from data.media import probe, read_clip
from data.records import ClipShape, Source
from tasks.ingest import Config as IngestConfig
from tasks.ingest import run as ingest
from tasks.sample import FORMATS, RECIPE, Config, run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One scene of every format, and the awkward files."""
    return run(Config(corpus=tmp_path_factory.mktemp("sample") / "corpus", num_new=len(FORMATS), num_base=1))


def test_same_seed_gives_the_same_folder_and_another_seed_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {"num_new": 2, "num_base": 1, "max_duration_s": 2.1}
    first = run(Config(corpus=tmp_path / "a", **short))
    assert sha256(first) == sha256(run(Config(corpus=tmp_path / "b", **short)))
    monkeypatch.setattr(awkward, "MAKERS", {})
    other = run(Config(corpus=tmp_path / "c", seed=1, **short))
    pictures = [sha256(next((folder / "new").glob("0000*.mp4"))) for folder in (first, other)]
    assert pictures[0] != pictures[1]


def test_world_files_are_what_their_format_says(corpus: Path) -> None:
    for index, form in enumerate(FORMATS):
        (path,) = (corpus / "new").glob(f"{index:04d}_*.{form.suffix}")
        facts = probe(path)
        assert facts.get("error") is None
        assert (facts["width"], facts["height"]) == (form.side_px, form.side_px)
        assert facts["frame_rate"] == str(form.frame_rate)
        assert (facts["num_channels"], facts["frame_jitter"]) == (2, 0)
        assert 1.9 < float(facts["video_duration_s"] or 0) < 3.3
        assert path.with_suffix(".txt").read_text(encoding="utf-8").strip()
        seen, heard = read_clip(path, 0.2, None, ClipShape())
        assert seen.std() > 5
        assert np.abs(heard).max() > 0.01


def test_awkward_files_are_awkward_in_their_own_way(corpus: Path, tmp_path: Path) -> None:
    manifest, work = tmp_path / "m.parquet", tmp_path / "work"
    ingest(IngestConfig(source=str(corpus / "awkward"), manifest=manifest, work=work))
    by_name = {Path(row.path).name: row for row in read_records(manifest, Source)}
    assert len(by_name) == 12
    assert {name for name, row in by_name.items() if row.error} == {"text.mp4", "truncated.mp4"}
    assert {name for name, row in by_name.items() if row.caption is None} == {"no_caption.mp4"}
    assert by_name["no_sound.mp4"].audio_codec is None
    assert by_name["mono.mp4"].num_channels == 1
    assert (by_name["surround_5_1.mp4"].num_channels, by_name["surround_5_1.mp4"].channel_layout) == (6, "5.1")
    assert by_name["variable_rate.mp4"].frame_jitter > 0.5
    phone = by_name["phone_upright.mov"]
    assert (phone.rotation_deg, phone.width, phone.height) == (90, 96, 128)
    assert by_name["late_sound.mp4"].audio_start_s == 0.4
    assert (by_name["odd_size.webm"].width, by_name["odd_size.webm"].height) == (127, 93)
    assert by_name["ten_bit.mkv"].pixel_format == "yuv420p10le"
    assert by_name["мяч 球 ñ.mp4"].error is None


def test_footage_comes_with_its_attribution_and_captions(corpus: Path) -> None:
    films = sorted((corpus / "footage").glob("*.mp4"))
    assert len(films) == 3
    assert sum(film.stat().st_size for film in films) <= 400_000
    text = (corpus / "footage" / "ATTRIBUTION.md").read_text(encoding="utf-8")
    assert "Blender Foundation" in text
    for film in films:
        assert film.name in text
        assert film.with_suffix(".txt").is_file()
        assert probe(film).get("error") is None


def test_a_finished_corpus_is_kept_and_a_changed_wish_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awkward, "MAKERS", {})
    wish = {"corpus": tmp_path / "c", "num_base": 0, "max_duration_s": 2.1}
    run(Config(num_new=1, **wish))
    before = (tmp_path / "c" / RECIPE).stat().st_mtime_ns
    run(Config(num_new=1, **wish))
    assert (tmp_path / "c" / RECIPE).stat().st_mtime_ns == before
    run(Config(num_new=2, **wish))
    assert len(list((tmp_path / "c" / "new").glob("*.txt"))) == 2


def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "holiday.mp4").write_bytes(b"precious")
    with pytest.raises(ValueError, match="did not make; choose another"):
        run(Config(corpus=tmp_path))
    assert (tmp_path / "holiday.mp4").read_bytes() == b"precious"


def test_durations_that_contradict_are_refused() -> None:
    with pytest.raises(ValueError, match="min_duration_s"):
        Config(corpus=Path("c"), min_duration_s=3, max_duration_s=2)
