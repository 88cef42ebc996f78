from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.listing import Listing
from data.sources import Given
from data.tables import Row, Words, paths_in, roles_of, rows_of

SUFFIXES = ("csv", "tsv", "json", "jsonl", "parquet")


def written(table: Path, rows: list[dict[str, str | None]]) -> Path:
    """A table of the kind that its suffix says."""
    match table.suffix:
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), table)
        case ".json":
            table.write_text(json.dumps(rows), encoding="utf-8-sig")
        case ".jsonl":
            table.write_text("\n\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8-sig")
        case _:
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, list(rows[0]), delimiter="\t" if table.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
            table.write_text(text.getvalue(), encoding="utf-8-sig", newline="")
    return table


def read(table: Path, **columns: str) -> list[Row]:
    return list(rows_of(table, table.name, columns, set()))


@pytest.mark.parametrize("column", ["path", "file", "video", "media_path", "video_path", "file_name", "url", "Video"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_tables_of_every_kind_say_the_same(tmp_path: Path, column: str, suffix: str) -> None:
    rows = [{column: "sub/b.mp4", "text": 'two\nlines, "quoted"'}, {column: " a.mp4 ", "text": ""}]
    first, second = read(written(tmp_path / f"table.{suffix}", rows))
    assert (first.number, first.path, first.words.caption) == (1, "sub/b.mp4", 'two lines, "quoted"')
    assert (second.number, second.path, second.words) == (2, "a.mp4", Words())


TRAINERS = {
    "ltx-2": (
        {"caption": "c", "video": "v.mp4", "reference_video_1": "r1", "audio": "s.wav", "reference_video": "r0",
         "reference_audio": "r2", "video_mask": "m"},
        ("v.mp4", "s.wav", ("r0", "r1", "r2")), {"video_mask"},
    ),
    "ltx-2 legacy": (
        {"media_path": "v.mp4", "caption": "c", "ref_media_path": "r"}, ("v.mp4", None, ("r",)), set[str]()
    ),
    "ltx-2 sound only": ({"audio": "song.wav", "caption": "c"}, ("song.wav", None, ()), set[str]()),
    "diffsynth": (
        {"video": "v.mp4", "prompt": "c", "input_audio": "s.wav", "vace_reference_image": "r", "control_video": "x"},
        ("v.mp4", "s.wav", ("r",)), {"control_video"},
    ),
    "diffsynth references": (
        {"prompt": "c", "video": "v.mp4", "references": ["r0", {"type": "image", "path": "r1"}],
         "in_context_videos": ["r2"], "frame_rate": 24},
        ("v.mp4", None, ("r0", "r1", "r2")), {"frame_rate"},
    ),
    "diffsynth stills": ({"image": "i.png", "prompt": "c"}, ("i.png", None, ()), set[str]()),
    "simpletuner csv": ({"url": "s3://b/v.mp4", "caption": "c"}, ("s3://b/v.mp4", None, ()), set[str]()),
    "ours": (
        {"path": "v.mp4", "sound_path": "s", "references": "r", "caption": "c"}, ("v.mp4", "s", ("r",)), set[str]()
    ),
}  # fmt: skip


@pytest.mark.parametrize("trainer", TRAINERS)
def test_tables_of_other_trainers_are_understood(tmp_path: Path, trainer: str) -> None:
    fields, wanted, unread = TRAINERS[trainer]
    table = tmp_path / "metadata.jsonl"
    table.write_text(json.dumps(fields))
    seen = set[str]()
    (row,) = rows_of(table, table.name, {}, seen)
    assert (row.path, row.sound, row.references) == wanted
    assert (row.words.caption, row.words.caption_from, seen) == ("c", "table", unread)


def test_references_keep_their_order() -> None:
    names = ("ref_image_10", "reference_audio", "ref_image_2", "ref_image", "reference_video_1", "reference_video_0")
    assert roles_of(names).references == (
        "ref_image",
        "ref_image_2",
        "ref_image_10",
        "reference_audio",
        "reference_video_0",
        "reference_video_1",
    )


def test_a_cell_of_paths_is_one_a_list_or_json() -> None:
    assert paths_in("a.png") == ["a.png"]
    assert paths_in('["a.png", "b.png"]') == paths_in(["a.png", ["b.png"]]) == ["a.png", "b.png"]
    assert paths_in([{"image": "a.png"}, None, "", {"weight": 3}]) == ["a.png"]
    assert paths_in("[a].png") == ["[a].png"]
    with pytest.raises(ValueError, match="a path is text, not int"):
        paths_in([3])


def test_own_column_names_are_mapped(tmp_path: Path) -> None:
    table = written(tmp_path / "t.csv", [{"id": "a.mp4", "gpt_caption": "said", "caption": "unsaid", "rights": "MIT"}])
    (row,) = read(table, id="path", gpt_caption="caption", caption="old", rights="licence")
    assert (row.path, row.words.caption, row.words.licence) == ("a.mp4", "said", "MIT")


def test_what_is_said_about_a_file_is_kept(tmp_path: Path) -> None:
    fields = {"path": "a.mp4", "caption": "x", "caption_from": "model M", "language": "de", "license": "CC-BY-4.0"}
    (row,) = read(written(tmp_path / "t.jsonl", [fields]))
    assert row.words == Words("x", "model M", "de", "CC-BY-4.0")


def test_a_wrong_row_costs_itself_alone(tmp_path: Path) -> None:
    table = tmp_path / "t.jsonl"
    lines = [
        b'{"path": "a.mp4"}', b'{"path": ', b"[1]", b'{"path": 3}', b'{"caption": "x"}', b'{"path": "caf\xe9"}',
        b'{"path": "z", "references": [1]}', b"[" * 100_000, b'{"path": "b", "n": ' + b"9" * 5000 + b"}",
        b'{"path": "d", "caption": ["a", "b"]}', b'{"path": "c.mp4", "caption": 7}',
    ]  # fmt: skip
    table.write_bytes(b"\n".join(lines))
    rows = read(table)
    assert [row.number for row in rows] == list(range(1, 12))
    assert [row.path for row in rows if row.error is None] == ["a.mp4", "c.mp4"]
    reasons = " | ".join(str(row.error) for row in rows if row.error)
    for part in (
        "line 2 is not JSON: ",
        "is no object",
        "a path is text, not int",
        "no column of paths",
        "not UTF-8",
        "caption is text",
    ):
        assert part in reasons
    table = tmp_path / "t.csv"
    table.write_bytes(b"path,caption\na.mp4,x\nb.mp4,one, two\nc\xe9.mp4,y\n,z\nd.mp4\n\ne.mp4,\n")
    rows = read(table)
    assert [row.path for row in rows if row.error is None] == ["a.mp4", "d.mp4", "e.mp4"]
    assert [str(row.error) for row in rows if row.error] == [
        "has 3 cells under 2 columns; quote text that holds the separator",
        "is not UTF-8; save the table as UTF-8",
        "names no file",
    ]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("t.jsonl", b'{"path": \n', r"t.jsonl, row 1: line 1 is not JSON"),
        ("t.jsonl", b'{"name": "a.mp4"}\n', "row 1: no column of paths among 'name'; name one path or video or"),
        ("t.jsonl", b"[1]\n", "list of objects"),
        ("t.jsonl", b'{"path": "' + b"x" * 2**22, "line 1 is longer than 4194304 characters"),
        ("t.json", b'[{"path": "a"},\n', "t.json is not JSON at line 2"),
        ("t.json", b'{"path": "a"}', "must be a list of objects"),
        ("t.json", b"[" * 100_000, "is not JSON that can be read"),
        ("t.csv", "path\na\n".encode("utf-16"), "t.csv is not UTF-8; save it as UTF-8"),
        ("t.csv", b"path,path\na,b\n", "more than one column called 'path'"),
        ("t.csv", b'path\n"' + b"x" * 200_000, "is a quote left open"),
        ("t.csv", b'path,caption\na.mp4,"two\nlines"\nb.mp4,"open\nc.mp4,lost', "line 4: a quote is opened and never"),
        ("t.csv", b'path,"caption\na.mp4,x\n', "line 1: a quote is opened and never"),
        ("t.csv", b"path;caption\na.mp4;x\n", "no column of paths among 'path;caption'; name one path"),
        ("t.csv", b"clip_file,caption\na.mp4,x\n", "or say which it is: ingest.columns='{clip_file: path}'"),
        ("t.parquet", b"PAR1 not", "t.parquet is not Parquet"),
    ],
)
def test_a_wrong_table_is_refused_and_says_where(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        read(tmp_path / name)


@given(content=st.binary(max_size=300), suffix=st.sampled_from(SUFFIXES))
@settings(max_examples=150)
def test_no_bytes_make_a_table_crash(tmp_path_factory: pytest.TempPathFactory, content: bytes, suffix: str) -> None:
    table = tmp_path_factory.getbasetemp() / f"bytes.{suffix}"
    table.write_bytes(content)
    try:
        for row in read(table):
            (row.words.caption or "").encode("utf-8")
    except ValueError as error:
        assert table.name in str(error)  # noqa: PT017


@given(st.lists(st.dictionaries(st.sampled_from(["path", "caption", "x"]), st.none() | st.text()), max_size=4))
@settings(max_examples=100)
def test_json_and_csv_agree(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str | None]]) -> None:
    rows = [{"path": "p", "caption": "", "x": None}, *({"path": None, "caption": None, "x": None} | r for r in rows)]
    rows = [{key: (value or "").replace("\r", " ").replace("\n", " ") for key, value in row.items()} for row in rows]
    root = tmp_path_factory.getbasetemp()
    found = [read(written(root / f"agree.{suffix}", rows)) for suffix in ("csv", "jsonl", "json")]
    assert found[0] == found[1] == found[2]


def test_a_list_gives_each_path_once_and_references_last() -> None:
    ref = Given("/r.png", "r.png", "", use="reference")
    b_as_reference = Given("/b", "b", "", use="reference")
    listing = Listing()
    listing.add([Given("/a", "a", "", references=(ref, b_as_reference)), Given("/b", "b", "", sound=ref)])
    listing.add([Given("/a", "a", ""), Given("/a", "a", "")])
    rows = list(listing)
    assert len(listing) == len(rows) == 5
    assert [row.path for row in rows] == ["a", "b", "a", "a", "r.png"]
    assert [row.again for row in rows] == [0, 0, 1, 2, 0]
    assert [row.error is None for row in rows] == [True, True, False, False, True]
    assert (rows[0].references, rows[1].sound, rows[1].sound_path) == (("r.png", "b"), "/r.png", "r.png")
    assert (rows[4].use, rows[0].words) == ("reference", Words())
    assert [listing.first_with(*pair) for pair in (("h", "a"), ("h", "b"), ("i", "b"))] == ["a", "a", "b"]


def test_a_full_disk_is_named_with_a_remedy() -> None:
    listing = Listing()
    listing._database.execute("PRAGMA max_page_count = 20")
    with pytest.raises(RuntimeError, match=r"cannot be written: database or disk is full; make room .* TMPDIR"):
        listing.add(Given(f"/{number}", "x" * 100 + str(number), "") for number in range(10_000))


GROWTH = """
import resource, sys
from data.listing import Listing
from data.sources import given_by
listing = Listing()
listing.add(given_by(sys.argv[1]))
count = sum(1 for _ in listing)
print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak_kb(tmp_path: Path, num_rows: int, suffix: str) -> int:
    """Resident memory of a process that lists a table and reads the list, kB."""
    table = tmp_path / f"{num_rows}.{suffix}"
    with table.open("w", encoding="utf-8") as stream:
        if suffix == "csv":
            stream.write("video,caption,reference_image\n")
            stream.writelines(f"clips/{i:08d}.mp4,a caption of {i},faces/{i % 999}.png\n" for i in range(num_rows))
        else:
            line = '{"video": "clips/%08d.mp4", "caption": "a caption of %d", "reference_image": "faces/%d.png"}\n'
            stream.writelines(line % (i, i, i % 999) for i in range(num_rows))
    answer = subprocess.run([sys.executable, "-c", GROWTH, table], capture_output=True, text=True, check=True)
    count, peak = map(int, answer.stdout.split())
    assert count == num_rows + min(num_rows, 999)
    return peak


def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    small, large = (peak_kb(tmp_path, num_rows, "jsonl") for num_rows in (1_000, 25_000))
    assert large - small < 25_000


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_million_rows_take_no_more_memory_than_some(tmp_path: Path, suffix: str) -> None:
    small, large = (peak_kb(tmp_path, num_rows, suffix) for num_rows in (25_000, 1_000_000))
    assert large - small < 25_000
