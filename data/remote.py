"""Files that lie elsewhere (`s3://`, `oss://`, whatever fsspec speaks) as local ones: a bounded cache of copies.

Credentials and endpoints come from the environment alone: what boto3 reads for S3 (AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL…), and OSS_ACCESS_KEY_ID, OSS_ACCESS_KEY_SECRET, OSS_SESSION_TOKEN,
OSS_ENDPOINT for Alibaba OSS.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import re
import shutil
import sys
from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import unquote

from data.files import remove, whole
from data.media_open import Unreadable
from data.oss import Oss
from data.paths import authority_of

CACHE_FOLDER, CACHE_LIMIT = "SOUNDSTAGE_REMOTE_CACHE", "SOUNDSTAGE_REMOTE_CACHE_GB"
"""Environment variables: the folder of copies, and how much it may hold, GB (10⁹ bytes)."""
DEFAULT_FOLDER, DEFAULT_LIMIT_GB = "data/store/work/remote", 50.0
"""The store is where everything is that may be deleted; 50 GB hold a thousand ordinary clips for each of 16 workers."""
HELD = 8
"""Copies that one process keeps from being evicted: those it used last, a clip with its sound and references."""
STORE_ERRORS = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("aiohttp", "ClientError"),
    ("oss2.exceptions", "OssError"),
    ("requests.exceptions", "RequestException"),
)
"""Errors of the stores' libraries that are no OSError: they have no common ancestor."""


class Unreachable(RuntimeError):
    """A store does not answer: a library, credentials or the network are missing."""


class Entry(NamedTuple):
    """One name in a remote folder."""

    name: str
    is_folder: bool
    size_bytes: int


def is_remote(path: str) -> bool:
    """Whether a path names something that this machine cannot open as a file; `file://` is local."""
    scheme, colon, _ = path.partition("://")
    return bool(colon) and re.fullmatch(r"[A-Za-z][A-Za-z0-9+.:-]*", scheme) is not None and scheme.lower() != "file"


def plain(path: str) -> str:
    """A path without `file://`, its escapes undone; any other as it is."""
    return unquote(path[7:].removeprefix("localhost")) if path[:7].lower() == "file://" else path


def local(path: str) -> Path:
    """The file itself, or a local copy of a remote one.

    A copy's name comes from path, size and version (ETag), so an object that changed is fetched again. It stays until
    the cache is over its limit and it is the one that was used longest ago; copies in use are never deleted, so that
    much may lie there beyond the limit.

    Raises:
        Unreadable: the object does not exist, may not be read, or is larger than the whole cache may be.
        Unreachable: the store does not answer.
    """
    if not is_remote(path):
        return Path(plain(path))
    with _explained(path):
        system, name = _system(path)
        size_bytes, version = _identity(system, name)
    limit_gb = _limit_gb()
    if size_bytes > limit_gb * 1e9:
        raise Unreadable(f"has {size_bytes / 1e9:.3g} GB; limit {CACHE_LIMIT} = {limit_gb:g} GB")
    copy = _folder() / _name_of(path, size_bytes, version)
    if not _hold(copy):
        make_room(_folder(), limit_gb * 1e9 - size_bytes)
        with whole(copy) as temporary:
            with _explained(path):
                system.get_file(name, str(temporary))
                changed = (size_bytes, version) != _identity(system, name)
            if changed or temporary.stat().st_size != size_bytes:
                raise Unreadable("changes while it is fetched")
        _hold(copy)
    return copy


def stamp(path: str) -> str:
    """What changes whenever the content does: of a file its inode, size and times, of an object its size and ETag.

    Raises:
        OSError, Unreadable, Unreachable: as `local`.
    """
    if not is_remote(path):
        status = Path(plain(path)).stat()
        return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    with _explained(path):
        return "{} {}".format(*_identity(*_system(path)))


def entries(folder: str) -> list[Entry]:
    """Files and folders of a remote folder, by name.

    Raises:
        Unreadable, Unreachable: as `local`.
    """
    with _explained(folder):
        system, name = _system(folder)
        found: list[Entry] = []
        for item in cast(list[dict[str, Any]], system.ls(name, detail=True)):
            is_folder, child = item["type"] == "directory", str(item["name"]).rstrip("/").rpartition("/")[2]
            if str(item["name"]).strip("/") != name.strip("/"):  # a store may list the folder's own marker
                found.append(Entry(child, is_folder, int(item.get("size") or 0)))
        return sorted(found)


def is_folder(path: str) -> bool:
    """Whether a remote path is a folder.

    Raises:
        Unreadable, Unreachable: as `local`; also where there is nothing.
    """
    with _explained(path):
        system, name = _system(path)
        try:
            return bool(system.info(name)["type"] == "directory")
        except FileNotFoundError:
            if system.ls(name, detail=True):  # a store has no folders, only names with slashes in them
                return True
            raise


def read(path: str) -> bytes:
    """All of a small remote file.

    Raises:
        Unreadable, Unreachable: as `local`.
    """
    with _explained(path):
        system, name = _system(path)
        return cast(bytes, system.cat_file(name))


def send(source: Path, target: str) -> None:
    """Copy a local file to a path that may be remote; a reader sees all of it or what was there before.

    Raises:
        Unreadable, Unreachable: as `local`.
    """
    if not is_remote(target):
        with whole(Path(plain(target))) as temporary:
            shutil.copyfile(source, temporary)
        return
    with _explained(target):
        system, name = _system(target)
        system.put_file(str(source), name)


def make_room(folder: Path, budget_bytes: float) -> None:
    """Delete copies, those first that were used longest ago and by nobody now, until the rest fits the budget."""
    if not folder.is_dir():
        return
    copies: list[tuple[float, int, Path]] = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process evicts too
            if not path.name.startswith("."):
                status = path.stat()
                copies.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in copies)
    for _, size, path in sorted(copies):
        if total <= budget_bytes:
            return
        if _evict(path):
            total -= size


def _evict(path: Path) -> bool:
    """Delete a copy that no process holds."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        remove(path)
        return True
    finally:
        os.close(descriptor)


_held: OrderedDict[Path, int] = OrderedDict()
"""Open descriptors, each with a shared lock, of the copies this process used last; a process that dies lets go."""


def _hold(copy: Path) -> bool:
    """Keep a copy from being evicted and note its use; whether it is there."""
    descriptor = _held.pop(copy, None)
    try:
        os.utime(copy)
        if descriptor is None:
            descriptor = os.open(copy, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            os.stat(copy)  # noqa: PTH116  # it may have been evicted between the two
    except FileNotFoundError:
        if descriptor is not None:
            os.close(descriptor)
        return False
    _held[copy] = descriptor
    while len(_held) > HELD:
        os.close(_held.popitem(last=False)[1])
    return True


def _folder() -> Path:
    return Path(os.environ.get(CACHE_FOLDER) or DEFAULT_FOLDER)


def _limit_gb() -> float:
    text = os.environ.get(CACHE_LIMIT) or str(DEFAULT_LIMIT_GB)
    try:
        limit_gb = float(text)
    except ValueError:
        limit_gb = 0.0
    if not limit_gb > 0:
        raise ValueError(f"environment: {CACHE_LIMIT} = {text!r} is not a number of GB above 0")
    return limit_gb


def _name_of(path: str, size_bytes: int, version: str) -> str:
    """A safe file name that keeps the suffix, since some demuxers look at it."""
    suffix = re.sub(r"[^.A-Za-z0-9]", "", Path(path).suffix)[:16]
    return hashlib.sha256(f"{path}\n{size_bytes}\n{version}".encode()).hexdigest()[:40] + suffix


def _identity(system: Any, name: str) -> tuple[int, str]:
    """Size and version of an object, asked of the store anew.

    Raises:
        Unreadable: it is a folder.
    """
    facts = cast(dict[str, Any], system.info(name))
    if facts["type"] == "directory":
        raise Unreadable("is a folder, not a file")
    keys = ("ETag", "etag", "VersionId", "LastModified", "mtime", "created")
    return int(facts.get("size") or 0), " ".join(str(facts[key]) for key in keys if facts.get(key) is not None)


def _system(path: str) -> tuple[Any, str]:
    """The file system that a path belongs to, and the path's name in it.

    Raises:
        ValueError: the path holds credentials or chains protocols.
        Unreachable: the library for its protocol is not installed.
    """
    scheme = path.partition("://")[0].lower()
    if "::" in path or "@" in authority_of(path):
        raise ValueError(f"{scheme}://…: credentials belong in the environment, and protocols cannot be chained")
    system = _connected(scheme, os.getpid())
    if scheme == "oss":
        return system, path.partition("://")[2]
    return system, str(system._strip_protocol(path))  # noqa: SLF001  # fsspec's own way; open() does the same


@functools.lru_cache(maxsize=8)
def _connected(scheme: str, _process: int) -> Any:
    """A file system without a cache of listings: objects change under us. A forked process gets its own."""
    import fsspec  # pyright: ignore[reportMissingTypeStubs]

    try:
        if scheme == "oss":
            return Oss()
        return cast(Any, fsspec).filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        extra = {"s3": "s3", "s3a": "s3", "oss": "oss"}.get(scheme)
        remedy = f"pip install -e '.[{extra}]'" if extra else f"install fsspec's library for {scheme}"
        raise Unreachable(f"{scheme}:// cannot be read: {remedy}") from error
    except RuntimeError as error:  # its credentials are not set
        raise Unreachable(str(error)) from error
    except ValueError as error:
        raise ValueError(f"{scheme}:// is no protocol that fsspec knows") from error


@contextmanager
def _explained(path: str) -> Generator[None]:
    """Errors of any store as ours: what is wrong with one object is `Unreadable`, the rest stops the run.

    No message repeats what a library says, which might hold a signed address.
    """
    try:
        yield
    except (Unreadable, ValueError, RuntimeError):
        raise
    except FileNotFoundError as error:
        raise Unreadable("there is no such file") from error
    except (OSError, *_store_errors()) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise  # our disk's fault
        if isinstance(error, PermissionError):
            raise Unreadable("cannot be read: access denied") from error
        place = f"{path.partition('://')[0]}://{authority_of(path)}"
        raise Unreachable(
            f"{place} cannot be reached ({type(error).__name__}); set its credentials and endpoint in the environment"
            " (AWS_… for s3, OSS_… for oss) and check the network"
        ) from error


def _store_errors() -> tuple[type[Exception], ...]:
    """The errors of those libraries that have been loaded."""
    return tuple(getattr(sys.modules[module], name) for module, name in STORE_ERRORS if module in sys.modules)
