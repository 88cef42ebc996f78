"""Files are whole or absent, whatever happens while they are written."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Annotated, Any

import psutil
import pytest

from data.files import (
    Holds,
    alone,
    num_records,
    read_records,
    refuse_foreign_outputs,
    sha256,
    sweep,
    whole,
    write_records,
    write_text,
)
from data.records import Frozen, Reject, Treatment


def write_forever(path: Path) -> None:
    with whole(path) as temporary:
        temporary.mkdir()
        (temporary / "half").write_text("half")
        time.sleep(60)


def test_a_killed_writer_leaves_the_old_content_and_the_next_one_sweeps_up(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    with whole(path) as temporary:
        temporary.mkdir()
        (temporary / "old").write_text("old")
    writer = multiprocessing.get_context("spawn").Process(target=write_forever, args=(path,))
    writer.start()
    deadline = time.monotonic() + 15
    while not list(tmp_path.glob(".folder.*.tmp/half")) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    assert [item.name for item in path.iterdir()] == ["old"]
    assert list(tmp_path.glob(".folder.*.tmp"))
    with whole(path) as temporary:
        temporary.mkdir()
        (temporary / "old").write_text("new")
    assert [item.read_text() for item in path.iterdir()] == ["new"]
    assert not list(tmp_path.glob(".*.tmp"))


def test_an_exception_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def fail() -> None:
        with whole(path) as temporary:
            temporary.write_text("new")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["file"]


def test_records_come_back_equal_also_when_there_are_none(tmp_path: Path) -> None:
    path = tmp_path / "rejects.parquet"
    reject = Reject(item="ü", path="a/球.mp4", verb="cut", rule="cut.min_luma", measured="0.1", limit="0.2")
    write_records(path, [reject], Reject)
    assert read_records(path, Reject) == [reject]
    write_records(path, [], Treatment)
    assert read_records(path, Treatment) == []


def test_a_folder_hash_follows_names_and_contents_only(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "x").write_text("1")
    assert sha256(tmp_path / "a") == sha256(tmp_path / "b")
    (tmp_path / "b" / "sub" / "x").rename(tmp_path / "b" / "sub" / "y")
    assert sha256(tmp_path / "a") != sha256(tmp_path / "b")


def test_a_known_hash_is_believed_of_the_same_path_size_and_time_alone(tmp_path: Path) -> None:
    path, known = tmp_path / "folder" / "x", dict[str, str]()
    write_text(path, "1")
    first = sha256(path.parent, known)
    assert list(known.values()) == [sha256(path)]
    (seen,) = known
    assert sha256(path, {seen: "told"}) == "told"
    times_ns = path.stat().st_atime_ns, path.stat().st_mtime_ns
    for text, moved_ns in (("22", 0), ("2", 1)):  # another size, then another time
        path.write_text(text)
        os.utime(path, ns=(times_ns[0], times_ns[1] + moved_ns))
        assert sha256(path, {seen: "told"}) == sha256(path)
    assert sha256(path.parent, known) != first


def write_page(path: Path) -> None:
    with whole(path) as temporary:
        temporary.mkdir()
        (temporary / "index.html").write_text("page")


def test_a_folder_of_another_origin_is_never_replaced(tmp_path: Path) -> None:
    videos = tmp_path / "videos"
    videos.mkdir()
    (videos / "holiday.mp4").write_bytes(b"dear")
    with pytest.raises(ValueError, match="holds 1 things of another origin"):
        write_page(videos)
    with pytest.raises(ValueError, match="is a file, and a folder"):
        write_page(videos / "holiday.mp4")
    with pytest.raises(ValueError, match="is a folder, and a file"):
        write_text(videos, "text")
    assert (videos / "holiday.mp4").read_bytes() == b"dear"
    assert [item.name for item in tmp_path.iterdir()] == ["videos"]


class Places(Frozen):
    pages: Annotated[Path, Holds(("index.html",))]
    docs: Annotated[Path | None, Holds(("index.html",), below="clips")] = None
    free: Path = Path()


def test_a_folder_of_another_origin_is_refused_before_the_work_too(tmp_path: Path) -> None:
    write_page(tmp_path / "docs/clips")
    (tmp_path / "docs/mine.txt").touch()
    (tmp_path / "empty").mkdir()
    for pages in ("docs/clips", "empty", "absent"):
        refuse_foreign_outputs(Places(pages=tmp_path / pages, docs=tmp_path / "docs", free=tmp_path))
    with pytest.raises(ValueError, match=r"pages: .*docs holds 2 things of another origin \('clips', 'mine.txt'…\)"):
        refuse_foreign_outputs(Places(pages=tmp_path / "docs"))
    with pytest.raises(ValueError, match=r"pages: .*mine.txt is a file, and a folder"):
        refuse_foreign_outputs(Places(pages=tmp_path / "docs/mine.txt"))
    (tmp_path / "docs/clips/index.html").rename(tmp_path / "docs/clips/x")
    with pytest.raises(ValueError, match=r"docs: .*clips holds 1 things"):
        refuse_foreign_outputs(Places(pages=tmp_path / "empty", docs=tmp_path / "docs"))


def test_a_link_to_a_folder_stays_and_what_it_means_is_replaced(tmp_path: Path) -> None:
    disk, link = tmp_path / "disk" / "pages", tmp_path / "here" / "pages"
    disk.mkdir(parents=True)
    link.parent.mkdir()
    link.symlink_to(disk)
    for _ in range(2):
        refuse_foreign_outputs(Places(pages=link))
        write_page(link)
    assert link.is_symlink()
    assert [path.name for path in disk.iterdir()] == ["index.html"]
    assert [path.name for path in (*link.parent.iterdir(), *disk.parent.iterdir())] == ["pages", "pages"]


def test_a_link_to_a_file_gives_way_and_the_file_stays(tmp_path: Path) -> None:
    (tmp_path / "cached").write_text("of others")
    (tmp_path / "mine").symlink_to(tmp_path / "cached")
    write_text(tmp_path / "mine", "new")
    assert [(tmp_path / name).read_text() for name in ("cached", "mine")] == ["of others", "new"]


def test_a_folder_goes_neither_where_a_link_points_to_nothing_nor_over_a_disk(tmp_path: Path) -> None:
    (tmp_path / "pages").symlink_to(tmp_path / "unplugged")
    for refusing in (
        lambda: refuse_foreign_outputs(Places(pages=tmp_path / "pages")),
        lambda: write_page(tmp_path / "pages"),
    ):
        with pytest.raises(ValueError, match=r"pages is a link to .*unplugged, which is not there"):
            refusing()
    assert not (tmp_path / "unplugged").exists()
    with pytest.raises(ValueError, match="pages: / is where a disk is mounted"):
        refuse_foreign_outputs(Places(pages=Path("/")))


def work_alone(folder: Path, pipe: Any) -> None:
    with alone(folder, "encode.work"):
        pipe.send("in")
        time.sleep(60)


def test_one_process_works_in_a_folder_and_its_death_lets_the_next_one_in(tmp_path: Path) -> None:
    folder, (near, far) = tmp_path / "work", multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=work_alone, args=(folder, far))
    other.start()
    assert near.recv() == "in"
    with (
        pytest.raises(RuntimeError, match=r"encode\.work = .*work: another process works there"),
        alone(folder, "encode.work"),
    ):
        pass
    assert other.pid is not None
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    for _ in range(2):
        with alone(folder, "encode.work"):
            assert not list(folder.iterdir())


@pytest.mark.parametrize("below", ["", "a/b"])
def test_a_file_where_a_folder_is_to_be_is_named_with_its_setting(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ValueError, match=r"encode\.work = .*: \S*/file is a file"),
        alone(tmp_path / "file" / below, "encode.work"),
    ):
        pass


def test_what_is_no_table_of_ours_is_named(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text("ingest: {}")
    with pytest.raises(ValueError, match=r"params\.yaml is not Parquet"):
        read_records(path, Reject)
    with pytest.raises(ValueError, match=r"params\.yaml is not Parquet"):
        num_records(path)
    write_records(path, [Treatment(item="0", path="a", treatment="silence", detail="none")], Treatment)
    with pytest.raises(ValueError, match=r"params\.yaml, column \w+: "):
        read_records(path, Reject)


def test_leftovers_go_even_where_their_process_number_is_given_again(tmp_path: Path) -> None:
    mine = psutil.Process().create_time()
    for started_s in (mine - 1000, mine):
        (tmp_path / f".kept.{os.getpid()}-{started_s:.0f}.tmp").write_text("half")
    (tmp_path / ".kept.nonsense.tmp").write_text("half")
    sweep(tmp_path / "kept")
    assert [path.name for path in tmp_path.iterdir()] == [f".kept.{os.getpid()}-{mine:.0f}.tmp"]
