from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.sources import Given, given_by, shown


def by_name(root: Path) -> dict[str, Given]:
    return {Path(item.path).relative_to(root).as_posix(): item for item in given_by(root)}


def test_folder_gives_every_file_but_sidecars_and_hidden_ones(tmp_path: Path) -> None:
    names = ["b/x.mp4", "a/y.MOV", "z.mkv", "a/notes.pdf", ".hidden.mp4", ".git/q.mp4", "a/y.txt", "README.md"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("words", encoding="utf-8")
    found = given_by(tmp_path)
    assert [Path(item.path).relative_to(tmp_path).as_posix() for item in found] == [
        "a/notes.pdf",
        "a/y.MOV",
        "b/x.mp4",
        "z.mkv",
    ]
    assert [item.group for item in found] == ["a", "a", "b", ""]


def test_captions_come_from_text_or_json_on_one_line(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d", "мяч 球 ñ"):
        (tmp_path / f"{name}.mp4").touch()
    (tmp_path / "a.txt").write_bytes("\ufeff a ball\r\n bounces \n".encode())
    (tmp_path / "b.json").write_text(json.dumps({"prompt": "a box"}), encoding="utf-8")
    (tmp_path / "c.txt").write_text(" \n", encoding="utf-8")
    (tmp_path / "мяч 球 ñ.txt").write_text("мяч\n", encoding="utf-8")
    found = by_name(tmp_path)
    assert [found[f"{name}.mp4"].caption for name in ("a", "b", "c", "d", "мяч 球 ñ")] == [
        "a ball bounces",
        "a box",
        None,
        None,
        "мяч",
    ]


def test_caption_that_is_not_utf8_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").touch()
    (tmp_path / "a.txt").write_bytes("größer".encode("latin-1"))
    assert by_name(tmp_path)["a.mp4"].error == "its caption a.txt is not UTF-8; save it as UTF-8"


def test_links_are_not_followed_out_of_the_folder(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "secret.mp4").touch()
    (root / "good.mp4").touch()
    (root / "inside.mp4").symlink_to(root / "good.mp4")
    (root / "leak.mp4").symlink_to(outside / "secret.mp4")
    (root / "folder").symlink_to(outside)
    (root / "loop.mp4").symlink_to(root / "loop.mp4")
    errors = {name: item.error for name, item in by_name(root).items()}
    assert errors["good.mp4"] is None
    assert errors["inside.mp4"] is None
    assert "leads out" in str(errors["leak.mp4"])
    assert "not followed" in str(errors["folder"])
    assert len(errors) == 5


def test_file_name_that_is_not_utf8_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.mp4")).touch()
    (item,) = given_by(tmp_path)
    assert item.error == "has a name that is not UTF-8; rename it"
    item.path.encode("utf-8")


@pytest.mark.parametrize("column", ["path", "file", "video", "media_path"])
@pytest.mark.parametrize("suffix", ["csv", "json", "jsonl"])
def test_tables_name_files_beside_them(tmp_path: Path, column: str, suffix: str) -> None:
    rows = [{column: "sub/b.mp4", "text": 'two\nlines, "quoted"'}, {column: "a.mp4", "text": ""}]
    table = tmp_path / f"table.{suffix}"
    contents = {
        "csv": f'{column},text\nsub/b.mp4,"two\nlines, ""quoted"""\na.mp4,\n',
        "json": json.dumps(rows),
        "jsonl": "\n".join(json.dumps(row) for row in rows) + "\n",
    }
    table.write_text(contents[suffix], encoding="utf-8-sig")
    first, second = given_by(table)
    assert (Path(first.file), first.caption, first.group) == (tmp_path / "a.mp4", None, "")
    assert (Path(second.file), second.group) == (tmp_path / "sub" / "b.mp4", "sub")
    assert second.caption == 'two lines, "quoted"'


@given(name=st.text(min_size=1).filter(str.strip))
@settings(max_examples=50)
def test_table_paths_never_leave_the_folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    root = tmp_path_factory.getbasetemp() / "table"
    root.mkdir(exist_ok=True)
    table = root / "table.json"
    for path in (name, f"../{name}", f"/{name}", f"a/../../{name}", "/etc/passwd"):
        table.write_text(json.dumps([{"path": path}]), encoding="utf-8")
        (item,) = given_by(table)
        assert item.error is not None or Path(item.file).resolve().is_relative_to(root.resolve())


def test_wrong_tables_say_where_they_are_wrong(tmp_path: Path) -> None:
    table = tmp_path / "t.jsonl"
    table.write_text('{"path": "a.mp4"}\n{"path": \n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"t\.jsonl is not JSON at line"):
        given_by(table)
    table.write_text('{"name": "a.mp4"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="row 1: no column of paths"):
        given_by(table)
    table.write_text("[1]\n", encoding="utf-8")
    with pytest.raises(ValueError, match="list of objects"):
        given_by(table)


def test_missing_source_says_what_to_put_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"does not exist; put a folder of videos there.*soundstage sample"):
        given_by(tmp_path / "nothing")


def test_paths_are_relative_only_below_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert shown(tmp_path / "here" / "a" / "b.mp4") == "a/b.mp4"
    assert shown(tmp_path / "b.mp4") == str(tmp_path / "b.mp4")
    assert shown(Path("a.mp4")) == "a.mp4"
