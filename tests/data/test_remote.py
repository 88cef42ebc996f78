from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, unquote

import pytest
from moto.server import ThreadedMotoServer

from data import remote
from data.media_open import Unreadable
from data.sources import Given, Reading, given_by

KEYS = {"AWS_ACCESS_KEY_ID": "AKIATESTTESTTEST", "AWS_SECRET_ACCESS_KEY": "a-secret-that-nobody-may-see"}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A real S3 server on loopback."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Bucket:
    """An empty bucket, and an empty cache of 1 kB."""
    for name, value in (KEYS | {"AWS_ENDPOINT_URL": server, "AWS_DEFAULT_REGION": "us-east-1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv(remote.CACHE_FOLDER, str(tmp_path / "cache"))
    monkeypatch.setenv(remote.CACHE_LIMIT, "0.000001")
    remote._connected.cache_clear()
    release()
    return Bucket(f"b{abs(hash(request.node.name)) % 10**12}", tmp_path / "cache")


class Bucket:
    """Objects put and counted through the stores' own client."""

    def __init__(self, name: str, cache: Path) -> None:
        import boto3

        self.name, self.cache = name, cache
        self.client = boto3.client("s3")
        self.client.create_bucket(Bucket=name)

    def put(self, key: str, content: bytes) -> str:
        self.client.put_object(Bucket=self.name, Key=key, Body=content)
        return f"s3://{self.name}/{key}"

    def copies(self) -> list[bytes]:
        return sorted(path.read_bytes() for path in self.cache.iterdir())


def release() -> None:
    """Let go of every copy, as a process that ends does."""
    while remote._held:
        os.close(remote._held.popitem()[1])


def test_local_files_stay_where_they_are(tmp_path: Path) -> None:
    assert remote.local("a/b c.mp4") == Path("a/b c.mp4")
    assert remote.local(f"file://{tmp_path}/b%20c.mp4") == tmp_path / "b c.mp4"
    assert [remote.is_remote(path) for path in ("s3://b/k", "C:/x", "a://b", "file:///x", "/s3://b", "FILE:///x")] == [
        True,
        False,
        True,
        False,
        False,
        False,
    ]


def test_an_object_is_fetched_once_and_again_when_it_changed(bucket: Bucket) -> None:
    url = bucket.put("folder/cat.mp4", b"one")
    first = remote.local(url)
    assert (first.read_bytes(), first.suffix) == (b"one", ".mp4")
    before = first.stat().st_ino
    assert remote.local(url).stat().st_ino == before
    bucket.put("folder/cat.mp4", b"two")  # the same length
    assert remote.local(url).read_bytes() == b"two"
    assert remote.local(url) != first


def test_cache_keeps_what_was_used_last_within_its_limit(bucket: Bucket) -> None:
    urls = [bucket.put(f"{number}", bytes([number]) * 300) for number in range(5)]
    for number, url in enumerate(urls[:3]):
        os.utime(remote.local(url), (number, number))
    release()
    os.utime(remote.local(urls[0]))
    release()
    remote.local(urls[3])
    assert [content[0] for content in bucket.copies()] == [0, 2, 3]
    release()
    remote.local(urls[4])
    assert len(bucket.copies()) == 3
    assert sum(map(len, bucket.copies())) <= 1000


def test_a_copy_in_use_by_another_process_is_not_evicted(bucket: Bucket) -> None:
    urls = [bucket.put(f"{number}", bytes([number]) * 600) for number in range(2)]
    code = f"from data import remote; print(remote.local({urls[0]!r}), flush=True); input()"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        held = Path(other.stdout.readline().strip())
        remote.local(urls[1])
        assert held.read_bytes() == bytes([0]) * 600
    finally:
        other.communicate("\n")
    release()
    bucket.put("1", bytes([9]) * 600)
    remote.local(urls[1])
    assert not held.exists()


def test_what_is_wrong_with_an_object_is_its_own_affair(bucket: Bucket) -> None:
    bucket.put("folder/x", b"")
    for url, reason in (
        (f"s3://{bucket.name}/nothing.mp4", "there is no such file"),
        (f"s3://no-such-bucket-{bucket.name}/x.mp4", "there is no such file"),
        (f"s3://{bucket.name}/folder", "is a folder, not a file"),
        (bucket.put("big", bytes(2000)), r"has 2e-06 GB; limit SOUNDSTAGE_REMOTE_CACHE_GB = 1e-06 GB"),
    ):
        with pytest.raises(Unreadable, match=reason):
            remote.local(url)
    assert remote.local(f"s3://{bucket.name}/folder/x").read_bytes() == b""


def test_a_fetch_that_breaks_off_leaves_nothing(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    url = bucket.put("a.mp4", b"whole")
    system = remote._connected("s3", os.getpid())

    def half(_name: str, target: str) -> None:
        Path(target).write_bytes(b"wh")

    monkeypatch.setattr(system, "get_file", half)
    with pytest.raises(Unreadable, match="changes while it is fetched"):
        remote.local(url)
    assert list(bucket.cache.iterdir()) == []
    monkeypatch.undo()


def test_a_store_that_cannot_be_reached_stops_the_run_with_a_remedy(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    remote._connected.cache_clear()
    with pytest.raises(RuntimeError, match=r"s3://b cannot be reached .*credentials and endpoint") as caught:
        remote.local("s3://b/k?X-Amz-Signature=abc")
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)
    assert "Signature" not in str(caught.value)


def test_missing_credentials_are_named_and_never_shown(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    remote._connected.cache_clear()
    with pytest.raises(remote.Unreachable, match=r"NoCredentialsError.*in the environment"):
        remote.local(f"s3://{bucket.name}/k")
    with pytest.raises(ValueError, match=r"^s3://…: credentials belong in the environment") as caught:
        remote.local("s3://key:hunter2@bucket/k")
    assert "hunter2" not in str(caught.value)


def test_a_cache_that_cannot_be_written_is_not_the_objects_fault(bucket: Bucket) -> None:
    bucket.cache.write_text("a file where the folder should be")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        remote.local(bucket.put("a", b"x"))


def test_a_wrong_limit_is_named(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    url = bucket.put("a", b"x")
    for text in ("lots", "0", "-1", "nan"):
        monkeypatch.setenv(remote.CACHE_LIMIT, text)
        with pytest.raises(ValueError, match="SOUNDSTAGE_REMOTE_CACHE_GB = '"):
            remote.local(url)


def test_a_protocol_without_its_library_says_what_to_install() -> None:
    with pytest.raises(ValueError, match="nosuch:// is no protocol that fsspec knows"):
        remote.local("nosuch://a/b")


def found_in(source: str, **reading: object) -> list[Given]:
    return list(given_by(source, Reading(**reading)))


def test_a_remote_folder_is_read_like_a_local_one(bucket: Bucket) -> None:
    for key, content in {
        "set/a/cat.mp4": b"1",
        "set/a/cat.txt": b"a cat\n miaows",
        "set/a/cat.ref1.png": b"2",
        "set/a/cat.sound.wav": b"3",
        "set/b.mp4": b"4",
        "set/b.json": b'{"caption": "bee", "license": "CC0-1.0", "language": "en"}',
        "set/.hidden.mp4": b"5",
        "set/empty.mp4": b"",
        "set/empty.txt": b"",
        "other/c.mp4": b"6",
    }.items():
        bucket.put(key, content)
    root = f"s3://{bucket.name}/set"
    for source in (root, f"{root}/"):
        cat, bee, empty = found_in(source)
        assert (cat.path, cat.group, cat.caption) == (f"{root}/a/cat.mp4", "a", "a cat miaows")
        assert [item.path for item in cat.references] == [f"{root}/a/cat.ref1.png"]
        assert cat.sound is not None
        assert remote.local(cat.sound.file).read_bytes() == b"3"
        assert (bee.caption, bee.words.licence, bee.words.language) == ("bee", "CC0-1.0", "en")
        assert (empty.caption, empty.error) == (None, None)


def test_rows_of_a_remote_table_stay_in_its_folder(bucket: Bucket) -> None:
    lines = ['{"video": "a.mp4", "caption": "x"}', '{"video": "../b.mp4"}', '{"video": "/etc/passwd"}']
    lines += [f'{{"video": "s3://{bucket.name}/else/c.mp4"}}', '{"video": "file:///etc/passwd"}']
    table = bucket.put("set/list.jsonl", "\n".join(lines).encode())
    a, b, c, d, e = found_in(table)
    assert (a.file, a.caption, a.error) == (f"s3://{bucket.name}/set/a.mp4", "x", None)
    assert {str(item.error) for item in (b, c, e)} == {"lies outside the folder of its table"}
    assert (d.path, d.error) == (f"s3://{bucket.name}/else/c.mp4", None)


def test_only_wanted_protocols_are_opened(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("video\nhttp://169.254.169.254/latest\ns3://key:secret@b/k.mp4\nzip::s3://b/k.mp4\n")
    http, keyed, chained = found_in(str(table))
    assert "ingest.protocols = s3, oss" in str(http.error)
    assert "credentials belong in the environment" in str(keyed.error)
    assert (keyed.path, "secret" in keyed.path) == ("s3://b/k.mp4", False)
    assert chained.error is not None
    with pytest.raises(ValueError, match="names ftp://"):
        found_in("ftp://host/folder")


def test_a_remote_source_that_is_not_there_is_named(bucket: Bucket) -> None:
    with pytest.raises(ValueError, match=rf"ingest.source = s3://{bucket.name}/none: there is no such file"):
        found_in(f"s3://{bucket.name}/none")


class FakeOss(BaseHTTPRequestHandler):
    """As much of the OSS protocol as listing and reading need; objects by `/bucket/key`."""

    objects: ClassVar[dict[str, bytes]] = {}
    signed: ClassVar[set[str]] = set()

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        place, _, query = self.path.partition("?")
        self.signed.add(self.headers.get("Authorization", "").partition(":")[0])
        content = self.objects.get(unquote(place))
        if "list-type=2" in query:
            content = self.listing(unquote(place).strip("/"), parse_qs(query).get("prefix", [""])[0])
        status = 403 if "denied" in place else 404 if content is None else 200
        body = content if status == 200 else b"<Error><Code>NoSuchKey</Code></Error>"
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.md5(body).hexdigest()}"')
        self.send_header("Last-Modified", "Mon, 30 Nov 2026 00:00:00 GMT")
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def listing(self, bucket: str, prefix: str) -> bytes:
        keys = [
            key.removeprefix(f"/{bucket}/") for key in sorted(self.objects) if key.startswith(f"/{bucket}/{prefix}")
        ]
        folders = {prefix + key.removeprefix(prefix).partition("/")[0] for key in keys if "/" in key[len(prefix) :]}
        files = [key for key in keys if "/" not in key[len(prefix) :]]
        found = "".join(
            f"<Contents><Key>{key}</Key><LastModified>2026-11-30T00:00:00.000Z</LastModified><ETag>x</ETag>"
            f"<Type>Normal</Type><Size>1</Size><StorageClass>Standard</StorageClass></Contents>"
            for key in files
        )
        found += "".join(f"<CommonPrefixes><Prefix>{folder}/</Prefix></CommonPrefixes>" for folder in sorted(folders))
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode()

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def oss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeOss]]:
    """A server that speaks OSS on loopback; no real one could be tried."""
    pytest.importorskip("oss2")
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeOss)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OSS_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OSS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", "hush")
    monkeypatch.delenv("OSS_SESSION_TOKEN", raising=False)
    monkeypatch.setenv(remote.CACHE_FOLDER, str(tmp_path / "cache"))
    remote._connected.cache_clear()
    FakeOss.objects, FakeOss.signed = {}, set()
    yield FakeOss
    server.shutdown()
    server.server_close()
    remote._connected.cache_clear()


def test_oss_is_read_like_any_other_store(oss: type[FakeOss]) -> None:
    oss.objects |= {
        "/films/set/a/cat.mp4": b"film",
        "/films/set/a/cat.txt": b"a cat",
        "/films/set/b.mp4": b"",
        "/films/other.mp4": b"x",
        "/films/list.csv": b"video,prompt\nset/b.mp4,bee\noss://films/set/a/cat.mp4,cat\n../x.mp4,no\n",
    }
    cat, bee = found_in("oss://films/set")
    assert (cat.path, cat.caption, cat.group) == ("oss://films/set/a/cat.mp4", "a cat", "a")
    assert [remote.local(item.file).read_bytes() for item in (cat, bee)] == [b"film", b""]
    oss.objects["/films/set/a/cat.mp4"] = b"cold"
    assert remote.local(cat.file).read_bytes() == b"cold"
    first, second, third = found_in("oss://films/list.csv")
    assert (first.file, second.file) == (bee.file, cat.file)
    assert third.error == "lies outside the folder of its table"
    assert [Path(item.path).name for item in given_by("oss://films")] == ["other.mp4", "cat.mp4", "b.mp4"]
    assert oss.signed == {"OSS somebody"}


def test_what_oss_refuses_is_an_objects_own_affair(oss: type[FakeOss], monkeypatch: pytest.MonkeyPatch) -> None:
    for url, reason in (
        ("oss://films/nothing.mp4", "there is no such file"),
        ("oss://denied/x.mp4", "cannot be read: access denied"),
        ("oss://films", "is a folder, not a file"),
    ):
        with pytest.raises(Unreadable, match=reason):
            remote.local(url)
    with pytest.raises(ValueError, match="oss://denied: cannot be read: access denied"):
        found_in("oss://denied/")
    with pytest.raises(ValueError, match="oss://films/none: there is no such file"):
        found_in("oss://films/none")
    for name, value in (
        ("OSS_ACCESS_KEY_SECRET", None),
        ("OSS_ENDPOINT", None),
        ("OSS_ENDPOINT", "http://127.0.0.1:9"),
    ):
        monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", "hush")
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
        remote._connected.cache_clear()
        with pytest.raises(remote.Unreachable, match=r"OSS_.* in the environment|environment .*OSS_") as caught:
            remote.local("oss://films/a.mp4")
        assert "hush" not in str(caught.value)
