from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
    with pytest.raises(RuntimeError, match=r"NoCredentialsError.*in the environment"):
        remote.local(f"s3://{bucket.name}/k")
    with pytest.raises(ValueError, match=r"^s3://…: credentials belong in the environment") as caught:
        remote.local("s3://key:hunter2@bucket/k")
    assert "hunter2" not in str(caught.value)


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


def test_oss_takes_its_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ossfs")
    monkeypatch.setenv("OSS_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OSS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", "hush")
    remote._connected.cache_clear()
    system, name = remote._system("oss://bucket/a/b.mp4")
    keys = system._auth.credentials_provider.get_credentials()
    assert (system._endpoint, name.strip("/")) == ("http://127.0.0.1:9", "bucket/a/b.mp4")
    assert (keys.access_key_id, keys.access_key_secret) == ("somebody", "hush")
    with pytest.raises(RuntimeError, match=r"oss://bucket cannot be reached .*OSS_") as caught:
        remote.local("oss://bucket/a/b.mp4")
    assert "hush" not in str(caught.value)
