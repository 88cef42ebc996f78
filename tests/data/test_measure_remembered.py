from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data import measure as measuring
from data.files import sha256
from data.measure import Measurement, Sensing, recall, remembered
from data.media import write_mp4
from tests.data.small_films import film, sound

QUICK = Sensing(speech=False)


def test_a_remembered_file_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mp4(tmp_path / "f.mp4", film(), sound(), 24, 48000)
    content, work = sha256(tmp_path / "f.mp4"), tmp_path / "work"
    first = remembered(tmp_path / "f.mp4", content, Sensing(), work)
    (tmp_path / "f.mp4").rename(tmp_path / "moved.mp4")
    calls: list[Path] = []
    monkeypatch.setattr(
        measuring, "measure", lambda path, *_: calls.append(path) or Measurement({"error": "x"}, None, None)
    )
    again = remembered(tmp_path / "moved.mp4", content, Sensing(), work)
    assert calls == []
    assert again.facts == first.facts
    for before, after in ((first.picture, again.picture), (first.sound, again.sound)):
        assert before is not None
        assert after is not None
        assert all(array.tobytes() == after.to_arrays()[name].tobytes() for name, array in before.to_arrays().items())
    remembered(tmp_path / "moved.mp4", content, QUICK, work)  # other settings are another measurement
    remembered(tmp_path / "moved.mp4", "0" * 64, Sensing(), work)
    remembered(tmp_path / "moved.mp4", content, Sensing(), work, tmp_path / "other.wav")
    assert len(calls) == 3


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04", b"\x00" * 300, None])
def test_a_damaged_entry_is_measured_again(tmp_path: Path, damage: bytes | None) -> None:
    write_mp4(tmp_path / "f.mp4", film(12), sound(0.5), 24, 48000)
    content = sha256(tmp_path / "f.mp4")
    first = remembered(tmp_path / "f.mp4", content, QUICK, tmp_path / "work")
    (entry,) = (tmp_path / "work").rglob("*.npz")
    whole = entry.read_bytes()
    entry.write_bytes(whole[: len(whole) // 2] + whole[len(whole) // 2 + 7 :] if damage is None else damage)
    assert remembered(tmp_path / "f.mp4", content, QUICK, tmp_path / "work").facts == first.facts
    assert entry.read_bytes() == whole


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_byte_of_an_entry_is_noticed_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    film_path, content = tmp_path / "f.mp4", "1" * 64
    if not film_path.exists():
        write_mp4(film_path, film(6), sound(0.2), 24, 48000)
    work = tmp_path / "work"
    first = remembered(film_path, content, QUICK, work)
    (entry,) = work.rglob("*.npz")
    whole = bytearray(entry.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=4)):
        whole[place] ^= data.draw(st.integers(1, 255))
    entry.write_bytes(bytes(whole))
    found = recall(content, QUICK, work)
    assert found is None or found.facts == first.facts
    entry.unlink()


def test_recall_never_looks_at_the_file(tmp_path: Path) -> None:
    write_mp4(tmp_path / "f.mp4", film(6), None, 24, 48000)
    assert recall("2" * 64, QUICK, tmp_path) is None
    first = remembered(tmp_path / "f.mp4", "2" * 64, QUICK, tmp_path)
    (tmp_path / "f.mp4").unlink()
    found = recall("2" * 64, QUICK, tmp_path)
    assert found is not None
    assert found.facts == first.facts


def test_name_of_a_measurement_follows_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    before = measuring.key("0" * 64, QUICK)
    assert measuring.key("0" * 64, QUICK) == before
    monkeypatch.setattr(measuring, "BESIDE_THE_POINT", (*measuring.BESIDE_THE_POINT, "loudness"))
    measuring.code_hash.cache_clear()
    assert measuring.key("0" * 64, QUICK) != before
    measuring.code_hash.cache_clear()


def test_imports_are_followed_at_the_top_and_within_functions() -> None:
    code = (
        "from data.one import x\nfrom data import two, three as third\ndef f():\n    from data import four\nimport os\n"
    )
    assert sorted(measuring.imported(code)) == ["four", "one", "three", "two"]


def test_a_folder_that_is_no_model_is_not_read_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "films").mkdir()
    (tmp_path / "films" / "long.mp4").write_bytes(b"x")
    measuring.code_hash()  # it is remembered, and by the true hashes
    read: list[Path] = []
    monkeypatch.setattr("data.files.sha256", lambda path: read.append(path) or "0")
    measuring.key("0" * 64, Sensing(semantics="clip", semantics_weights=tmp_path / "films"))
    assert not read
