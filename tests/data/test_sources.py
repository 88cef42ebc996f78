from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.paths import inside, shown
from data.sources import Given, Reading, given_by, given_file


def found_in(source: Path, **reading: object) -> list[Given]:
    return list(given_by(source, Reading(**reading)))


def by_name(root: Path) -> dict[str, Given]:
    return {Path(item.path).relative_to(root).as_posix(): item for item in given_by(root)}


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("words", encoding="utf-8")


def test_folder_gives_every_file_but_sidecars_and_hidden_ones(tmp_path: Path) -> None:
    names = ["b/x.mp4", "a/y.MOV", "z.mkv", "a/notes.pdf", ".hidden.mp4", ".git/q.mp4", "a/y.txt", "README.md"]
    touch(tmp_path, *names)
    found = found_in(tmp_path)
    assert [Path(item.path).relative_to(tmp_path).as_posix() for item in found] == [
        "a/notes.pdf",
        "a/y.MOV",
        "b/x.mp4",
        "z.mkv",
    ]
    assert [item.group for item in found] == ["a", "a", "b", ""]


def test_captions_that_belong_to_no_video_are_counted_and_the_first_named(tmp_path: Path) -> None:
    touch(tmp_path, "a/x.mp4", "a/x.txt", "a/y.mov", "a/y.mov.txt", "a/z.mkv", "a/z.json", "a/z.srt", "a/.hid.txt")
    reading = Reading()
    assert len(list(given_by(tmp_path, reading))) == 3
    assert (reading.alone.num, reading.alone.first) == (0, [])
    alone = ["a/x.TXT", "a/x.mp4.json", "b/c/orphan.txt", "b/d.txt", "b/e.json"]
    touch(tmp_path, *alone)
    assert len(list(given_by(tmp_path, reading))) == 3
    assert reading.alone.num == len(alone)
    assert reading.alone.first == [f"{tmp_path}/{name}" for name in ("a/x.TXT", "a/x.mp4.json", "b/d.txt")]


@given(names=st.sets(st.text("ab.-/", min_size=1, max_size=6), max_size=12))
@settings(max_examples=60)
def test_folder_is_walked_in_the_order_of_its_paths(tmp_path_factory: pytest.TempPathFactory, names: set[str]) -> None:
    root = tmp_path_factory.mktemp("walk")
    for name in sorted(names):
        path = root / (name.strip("/.") + "x.mp4")
        if not any(parent.is_file() for parent in path.parents) and not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    expected = sorted(
        str(path) for path in root.rglob("*.mp4") if not any(part.startswith(".") for part in path.parts[-5:])
    )
    assert [item.path for item in given_by(root)] == expected
    shutil.rmtree(root)


def test_a_very_deep_folder_is_walked(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1050):  # beyond Python's limit of recursion
        os.mkdir("d", dir_fd=here)
        here, outer = os.open("d", os.O_RDONLY, dir_fd=here), here
        os.close(outer)
    os.close(os.open("deep.mp4", os.O_CREAT, dir_fd=here))
    os.close(here)
    try:
        (item,) = given_by(tmp_path)
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)  # Python's own way recurses
    assert item.path == f"{tmp_path}{'/d' * 1050}/deep.mp4"


def test_litter_is_left_out_and_unfinished_downloads_say_so(tmp_path: Path) -> None:
    touch(tmp_path, "Thumbs.db", "a/desktop.ini", "._cat.mp4", "__MACOSX/x.mp4", "cat.mp4.part", "dog.mp4.CRDOWNLOAD")
    assert {name: item.error for name, item in by_name(tmp_path).items()} == {
        "cat.mp4.part": "is an unfinished download (.part); finish it or delete it",
        "dog.mp4.CRDOWNLOAD": "is an unfinished download (.crdownload); finish it or delete it",
    }
    assert given_file(f"{tmp_path}/cat.mp4.part").error == "is an unfinished download (.part); finish it or delete it"


def test_a_companion_named_alone_is_what_it_is_in_its_folder(tmp_path: Path) -> None:
    touch(tmp_path, "cat.mp4", "cat.ref1.mp4", "cat.sound.wav", "dog.ref1.png", "cat.ref2.txt")
    for name, item in by_name(tmp_path).items():
        assert given_file(f"{tmp_path}/{name}") == item
    for owned in ("cat.ref1.mp4", "cat.sound.wav"):
        alone = given_file(f"{tmp_path}/{owned}")
        assert (alone.use, alone.error) == ("reference", None)
    assert given_file(f"{tmp_path}/absent.ref1.png").use == "clip"


@pytest.mark.parametrize("reading", [{"root": "/films"}, {"columns": {"clip": "video"}}])
def test_what_is_about_tables_is_refused_beside_a_folder(tmp_path: Path, reading: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"ingest\.\w+ = .* is about tables, and ingest\.source = .* is a folder"):
        found_in(tmp_path, **reading)


def test_references_and_sound_lie_beside_their_clip(tmp_path: Path) -> None:
    touch(tmp_path, "cat.mp4", "cat.ref10.mp4", "cat.ref2.png", "cat.ref1.wav", "cat.sound.wav", "a.b/cat.ref1.png")
    touch(tmp_path, "cats.mp4", "dog.ref1.png", "new.york.mp4", "new.york.ref1.jpg")
    found = by_name(tmp_path)
    assert [Path(item.path).name for item in found["cat.mp4"].references] == [
        "cat.ref1.wav",
        "cat.ref2.png",
        "cat.ref10.mp4",
    ]
    sound = found["cat.mp4"].sound
    assert sound is not None
    assert (Path(sound.path).name, sound.use) == ("cat.sound.wav", "reference")
    assert [Path(item.path).name for item in found["new.york.mp4"].references] == ["new.york.ref1.jpg"]
    assert found["cats.mp4"].references == ()
    assert set(found) == {"cat.mp4", "cats.mp4", "new.york.mp4", "dog.ref1.png", "a.b/cat.ref1.png"}
    assert found["dog.ref1.png"].error == "is named as the reference of a clip that is not beside it (dog.*)"
    assert found["dog.ref1.png"].use == "reference"


def test_captions_come_from_text_or_json_on_one_line(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d", "мяч 球 ñ"):
        (tmp_path / f"{name}.mp4").touch()
    (tmp_path / "a.txt").write_bytes("\ufeff a ball\r\n bounces \n".encode())
    (tmp_path / "b.json").write_text(json.dumps({"prompt": "a box", "lang": "en", "license": "CC0"}), encoding="utf-8")
    (tmp_path / "c.txt").write_text(" \n", encoding="utf-8")
    (tmp_path / "d.mp4.txt").write_text("a dot", encoding="utf-8")
    (tmp_path / "d.json").write_text('{"caption": "not this", "licence": "MIT"}', encoding="utf-8")
    (tmp_path / "мяч 球 ñ.txt").write_text("мяч\n", encoding="utf-8")
    found = by_name(tmp_path)
    assert [found[f"{name}.mp4"].caption for name in ("a", "b", "c", "d", "мяч 球 ñ")] == [
        "a ball bounces",
        "a box",
        None,
        "a dot",
        "мяч",
    ]
    assert found["b.mp4"].words == ("a box", "sidecar", "en", "CC0")
    assert found["d.mp4"].words == ("a dot", "sidecar", None, "MIT")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", "größer".encode("latin-1"), "its caption a.txt is not UTF-8; save it as UTF-8"),
        ("a.json", b'{"caption": \n', "its caption a.json is not JSON at line 2"),
        ("a.json", b"[" * 100_000, "its caption a.json is not JSON that can be read"),
        ("a.txt", b"x" * (10**6 + 1), "its caption a.txt is larger than 1000000 bytes"),
    ],
)
def test_caption_that_cannot_be_read_is_a_reason(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / "a.mp4").touch()
    (tmp_path / name).write_bytes(content)
    assert by_name(tmp_path)["a.mp4"].error == reason


def test_links_are_not_followed_out_of_the_folder(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "secret.mp4").touch()
    (outside / "secret.txt").write_text("secret")
    (root / "good.mp4").touch()
    (root / "good.txt").symlink_to(outside / "secret.txt")
    (root / "inside.mp4").symlink_to(root / "good.mp4")
    (root / "leak.mp4").symlink_to(outside / "secret.mp4")
    (root / "folder").symlink_to(outside)
    (root / "loop.mp4").symlink_to(root / "loop.mp4")
    errors = {name: item.error for name, item in by_name(root).items()}
    assert errors["good.mp4"] == "its caption good.txt is a link that leads out of the source folder"
    assert errors["inside.mp4"] is None
    assert "leads out" in str(errors["leak.mp4"])
    assert "in a circle" in str(errors["loop.mp4"])
    assert "not followed" in str(errors["folder"])
    assert len(errors) == 5
    table = root / "t.csv"
    table.write_text("video\nfolder/secret.mp4\nleak.mp4\ninside.mp4\n")
    outer, leak, good = found_in(table)
    assert ("outside" in str(outer.error), "outside" in str(leak.error), good.error) == (True, True, None)


def test_file_name_that_is_not_utf8_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.mp4")).touch()
    (item,) = found_in(tmp_path)
    assert item.error == "has a name that is not UTF-8; rename it"
    item.path.encode("utf-8")


@given(name=st.text(st.characters(exclude_categories=()), min_size=1).filter(str.strip))
@settings(max_examples=80)
def test_table_paths_never_leave_the_folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    root = tmp_path_factory.getbasetemp() / "table"
    root.mkdir(exist_ok=True)
    table = root / "table.json"
    for path in (name, f"../{name}", f"/{name}", f"a/../../{name}", f"file:///{name}", f"file://{root}/../{name}"):
        table.write_text(json.dumps([{"path": path, "caption": name}]), encoding="utf-8")
        (item,) = found_in(table)
        assert item.error is not None or Path(item.file).resolve().is_relative_to(root.resolve())
        item.path.encode("utf-8")
        (item.caption or "").encode("utf-8")


def test_a_wider_root_lets_a_table_name_its_files(tmp_path: Path) -> None:
    touch(tmp_path, "media/a/x.mp4", "lists/t.csv")
    table = tmp_path / "lists" / "t.csv"
    table.write_text(f"video\n{tmp_path}/media/a/x.mp4\nfile://{tmp_path}/media/a/x.mp4\n")
    assert [item.error for item in given_by(table)] == [
        "lies outside the folder of its table; ingest.root widens it"
    ] * 2
    first, second = found_in(table, root=str(tmp_path / "media"))
    assert (first.error, first.path, first.group) == (None, f"{tmp_path}/media/a/x.mp4", "a")
    assert second == first


def test_a_table_without_captions_takes_those_beside_its_files(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4", "a.txt", "b.mp4")
    table = tmp_path / "t.csv"
    table.write_text("video,caption\na.mp4,\nb.mp4,here\n")
    first, second = found_in(table)
    assert (first.words[:2], second.words[:2]) == (("words", "sidecar"), ("here", "table"))


def test_table_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "set/sub/a.mp4")
    monkeypatch.chdir(tmp_path / "set")
    Path("t.csv").write_text("video\nsub/a.mp4\n")
    (item,) = given_by("t.csv")
    assert (item.path, item.group, item.error) == ("sub/a.mp4", "sub", None)
    assert [entry.path for entry in given_by(".")] == ["sub/a.mp4"]
    assert [entry.group for entry in given_by(".")] == ["sub"]


def test_missing_source_says_what_to_put_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"does not exist; put a folder of videos there.*soundstage sample"):
        found_in(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe.csv")
    touch(tmp_path, "film.mp4")
    for name in ("pipe.csv", "film.mp4"):
        with pytest.raises(ValueError, match="neither a folder nor a table"):
            found_in(tmp_path / name)


def test_paths_are_relative_only_below_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert shown(tmp_path / "here" / "a" / "b.mp4") == "a/b.mp4"
    assert shown(tmp_path / "b.mp4") == str(tmp_path / "b.mp4")
    assert shown(Path("a.mp4")) == "a.mp4"


def test_inside_is_about_places_not_spelling(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "rooted").mkdir()
    assert inside(f"{tmp_path}/root/../root/a", f"{tmp_path}/root")
    assert not inside(f"{tmp_path}/rooted/a", f"{tmp_path}/root")
    assert not inside(f"{tmp_path}/root/../a", f"{tmp_path}/root")


def test_a_relative_root_means_the_folder_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "there"):
        (tmp_path / name / "set").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / name)
        assert inside("set/a.mp4", "set")
