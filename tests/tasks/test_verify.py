"""Verifying and copying a latent store, to a folder and to an S3 server, and reading the copy from there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from moto.server import ThreadedMotoServer

from data import remote
from data.latent_shards import Broken
from data.latents import LatentStore
from tasks.__main__ import main
from tasks.verify import Config, run


@pytest.fixture
def store(store_folder: Path, tmp_path: Path) -> Path:
    """A store of one's own."""
    return Path(shutil.copytree(store_folder, tmp_path / "latents"))


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder of an S3 server on loopback, with an empty local cache; `tests/data/test_remote.py` has its limit and eviction."""
    import boto3

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    settings = {"AWS_ENDPOINT_URL": "http://{}:{}".format(*server.get_host_and_port())}
    settings |= {"AWS_ACCESS_KEY_ID": "AKIATEST", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    settings |= {remote.CACHE_FOLDER: str(tmp_path / "cache"), remote.CACHE_LIMIT: "0.1"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    remote._connected.cache_clear()
    boto3.client("s3").create_bucket(Bucket="bucket")
    yield "s3://bucket/latents"
    server.stop()
    remote._connected.cache_clear()


def verified(latents: Path | str, **settings: Any) -> str:
    return run(Config(latents=str(latents), **settings))


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_a_whole_store_is_described(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verified(store) == LatentStore(store).fingerprint
    assert "is whole: 6 entries in 5 shards, h3" in capsys.readouterr().err


@pytest.mark.parametrize("nothing", ["latents=", "latents=''", "latents=null"])
def test_no_store_is_answered_by_the_name_of_the_setting(nothing: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", nothing]) == 2
    assert capsys.readouterr().err.startswith("soundstage verify: latents: is empty; name the folder of a latent store")


def test_every_altered_file_is_named(store: Path) -> None:
    for name in ("picture-00000.safetensors", "text-00000.safetensors"):
        spoil(store / name)
    with pytest.raises(Broken, match=r"2 of 6 files: .*picture-00000.*text-00000") as broken:
        verified(store)
    assert "sound-00000" not in str(broken.value)


def test_a_copy_is_the_same_and_only_what_changed_is_sent_again(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verified(store, copy_to=str(tmp_path / "copy"))
    assert "5 of 5 shards copied" in capsys.readouterr().err
    LatentStore(tmp_path / "copy").verify()
    verified(store, copy_to=str(tmp_path / "copy"))
    assert "0 of 5 shards copied" in capsys.readouterr().err


def test_a_damaged_copy_is_mended(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "copy"
    verified(store, copy_to=str(place))
    spoil(place / "sound-00000.safetensors")
    verified(store, copy_to=str(place))
    assert "1 of 5 shards copied" in capsys.readouterr().err
    LatentStore(place).verify()


@pytest.mark.parametrize("target", ["", "/", "s3:/bucket/x", "http://host/x", "{file}", "{store}", "{theirs}"])
def test_a_copy_goes_nowhere_else(store: Path, tmp_path: Path, target: str) -> None:
    (tmp_path / "file").touch()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "index.arrow").write_text("mine")
    given = target.format(file=tmp_path / "file", store=store, theirs=theirs)
    with pytest.raises(ValueError, match="copy_to: "):
        verified(store, copy_to=given)
    assert [(path.name, path.read_text()) for path in theirs.iterdir()] == [("index.arrow", "mine")]


def test_a_copy_that_was_cut_short_is_no_store(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(source: Path, target: str) -> None:
        if source.name == "index.arrow":
            raise KeyboardInterrupt
        send(source, target)

    send = remote.send
    monkeypatch.setattr(remote, "send", cut)
    with pytest.raises(KeyboardInterrupt):
        verified(store, copy_to=str(tmp_path / "copy"))
    with pytest.raises(Broken, match="no latent store"):
        LatentStore(tmp_path / "copy")


def test_a_store_on_s3_is_read_through_the_local_cache_and_checked(store: Path, far: str, tmp_path: Path) -> None:
    verified(store, copy_to=far)
    there, near = LatentStore(far), LatentStore(store)
    row = near.index.row(0)
    assert torch.equal(there.read(row, "video"), near.read(row, "video"))
    assert there.conditions(row, "fl2va").keys() == near.conditions(row, "fl2va").keys()
    spoil(store / "sound-00000.safetensors")
    remote.send(store / "sound-00000.safetensors", f"{far}/sound-00000.safetensors")
    with pytest.raises(Broken, match=r"s3://.*sound-00000\.safetensors is altered"):
        LatentStore(far).read(row, "audio")
