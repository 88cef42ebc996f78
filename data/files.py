"""Files that are either whole or absent: temporary name, sync, rename. And hashes of them."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import itertools
import os
import shutil
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ValidationError

arrow = cast(Any, pa)
"""A compiled library without a single type."""
Record = TypeVar("Record", bound=BaseModel)
CLOCK_S = 2.0
"""By how much a process's start may seem to move, s: it is told from the boot, and clocks are set."""
ROW_GROUP = 10_000
"""Rows written and read at once: a few MB."""
UMASK = os.umask(0o077)
"""What the user takes from the permissions of new files; it can only be read by setting it, so once, at the start."""
os.umask(UMASK)


@contextmanager
def whole(path: Path) -> Generator[Path]:
    """A temporary path (file or folder, caller's choice) that becomes `path` only if the block succeeds.

    A link to a folder stays, and what it points to is replaced; one to a file gives way, for that may be a cache's.

    Raises:
        ValueError: what lies at `path` is of another kind, or is a folder that something else wrote.
    """
    if not path.name:
        raise ValueError(f"{path} is no name to write to")
    if path.is_symlink() and path.is_dir():
        path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{_started_s(os.getpid()):.0f}.tmp")
    remove(temporary)
    try:
        yield temporary
        open_up(temporary)
        sync(temporary)
        refuse_foreign(path, temporary)
        if temporary.is_dir():
            remove(path)  # a folder cannot be renamed over a full one
        temporary.replace(path)
        sync(path.parent, shallow=True)
    except OSError as error:
        if error.filename is None:  # write and fsync do not say which file
            error.filename = os.fspath(path)
        raise
    finally:
        remove(temporary)


def open_up(path: Path) -> None:
    """Give files that a library made for their owner alone, as safetensors does, the permissions of any new file."""
    for file in path.rglob("*") if path.is_dir() else (path,):
        if file.is_file() and not file.is_symlink() and file.stat().st_mode & 0o777 == 0o600:
            file.chmod(0o666 & ~UMASK)


def refuse_foreign(path: Path, new: Path) -> None:
    """Keep a mistyped output setting from deleting what is no earlier output.

    Raises:
        ValueError: `path` is not of `new`'s kind, or both are folders without one name in common, or it cannot be
            replaced by a folder.
    """
    if new.is_dir():
        refuse_fixed(path)
    if not path.exists():
        return
    if path.is_dir() != new.is_dir():
        raise ValueError(
            f"{path} is a {'folder, and a file' if path.is_dir() else 'file, and a folder'} is to be written"
        )
    if path.is_dir():
        refuse_others(path, {item.name for item in new.iterdir()})


@dataclass(frozen=True)
class Holds:
    """Beside a setting's type: verbs replace the folder that it names, and `names` is what such a folder always holds."""

    names: tuple[str, ...]
    below: str = ""
    """The one folder in it that is replaced, where the rest stays."""


def refuse_foreign_outputs(config: BaseModel) -> None:
    """Say before all work what `whole` would say after it.

    Raises:
        ValueError: a folder that is to be replaced is a file, or something else wrote it.
    """
    for name, field in type(config).model_fields.items():
        given = cast(Path | None, getattr(config, name))
        for kept in (item for item in field.metadata if isinstance(item, Holds) and given is not None):
            place = cast(Path, given) / kept.below
            refuse_fixed(place, f"{name}: ")
            if place.is_file():
                raise ValueError(f"{name}: {place} is a file, and a folder is to be written")
            refuse_others(place, set(kept.names), f"{name}: ")


def refuse_fixed(path: Path, setting: str = "") -> None:
    """Keep a folder from being put where none can be.

    Raises:
        ValueError: a link points to nothing, since the disk that it means may not be there; or a disk is mounted at
            `path`, which could be emptied, not replaced.
    """
    if path.is_symlink() and not path.exists():
        raise ValueError(
            f"{setting}{path} is a link to {path.readlink()}, which is not there; make that or name another"
        )
    if path.resolve().is_mount():
        raise ValueError(
            f"{setting}{path} is where a disk is mounted, and is to be replaced whole; name a folder below it"
        )


def refuse_others(folder: Path, new: set[str], setting: str = "") -> None:
    """`refuse_foreign` of two folders, the new one known by its names.

    Raises:
        ValueError: the folder holds things, and none of these names; `setting` stands in front of the message.
    """
    names = {item.name for item in folder.iterdir()} if folder.is_dir() else set[str]()
    if names and names.isdisjoint(new):
        some = ", ".join(map(ascii, sorted(names)[:3]))
        origin = f"{folder} holds {len(names)} things of another origin ({some}…)"
        raise ValueError(f"{setting}{origin}; delete it or name another")


@contextmanager
def alone(folder: Path, setting: str) -> Generator[None]:
    """Work in a folder, which is made where it is not there, as the only process that does; one that dies lets go.

    Args:
        folder: Where to work.
        setting: What names it.

    Raises:
        ValueError: a file lies there.
        RuntimeError: another process works there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next(place for place in (folder, *folder.parents) if place.exists())
        raise ValueError(f"{setting} = {folder}: {file} is a file, and a folder is to be worked in") from error
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise RuntimeError(
            f"{setting} = {folder}: another process works there; run this when it has ended, or name another folder"
        ) from error
    try:
        yield
    finally:
        os.close(descriptor)


def sweep(path: Path) -> None:
    """Delete what killed processes left unfinished of `path`; what a live process is writing stays."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        process, _, started_s = left.name.split(".")[-2].partition("-")
        try:
            alive = abs(_started_s(int(process)) - float(started_s)) <= CLOCK_S
        except (psutil.Error, ValueError):
            alive = False
        if not alive:
            remove(left)


def _started_s(process: int) -> float:
    """When a process began, s since 1970: numbers are given again, so a number alone does not tell who lives.

    Raises:
        psutil.Error: there is no such process, or it has ended and nobody has asked how: it writes no more.
    """
    found = psutil.Process(process)
    if found.status() == psutil.STATUS_ZOMBIE:
        raise psutil.ZombieProcess(process)
    return found.create_time()


def link_or_copy(source: Path, target: Path) -> None:
    """The same bytes at a second name, without a copy where the file system can."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def sync(path: Path, *, shallow: bool = False) -> None:
    """Flush a file, or a folder and all below it, to the disk."""
    if path.is_dir() and not shallow:
        for child in path.iterdir():
            sync(child)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a file or a folder; nothing happens where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sha256(path: Path, known: dict[str, str] | None = None) -> str:
    """Content hash of a file; of a folder, the hash over its relative names and their hashes.

    Args:
        path: Of file or folder.
        known: Hashes of files by path, size and time of change: those there are believed, the others added.
    """
    if path.is_dir():
        digest = hashlib.sha256()
        for child in sorted(item for item in path.rglob("*") if item.is_file()):
            digest.update(f"{child.relative_to(path).as_posix()} {sha256(child, known)}\n".encode())
        return digest.hexdigest()
    found = path.stat()
    seen = f"{path.resolve()} {found.st_size} {found.st_mtime_ns}"
    if known is not None and seen in known:
        return known[seen]
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if known is not None:
        known[seen] = digest
    return digest


def write_records(path: Path, records: Iterable[BaseModel], kind: type[BaseModel]) -> int:
    """Write records as Parquet, columns in the order of `kind`, also when there are none; returns how many.

    Holds one row group at a time, so records may be streamed by the million.
    """
    schema, count, stream = schema_of(kind), 0, iter(records)
    with whole(path) as temporary, cast(Any, pq.ParquetWriter(temporary, schema)) as writer:
        while rows := [record.model_dump() for record in itertools.islice(stream, ROW_GROUP)]:
            writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
            count += len(rows)
    return count


def iter_records(path: Path, kind: type[Record]) -> Iterator[Record]:
    """Stream what `write_records` wrote, one row group at a time.

    Raises:
        ValueError: it is no Parquet, or a column is missing or unknown; the message names file and column.
    """
    with _parquet(path), cast(Any, pq.ParquetFile(path)) as file:
        for batch in file.iter_batches(ROW_GROUP):
            yield from (kind.model_validate(row) for row in cast(list[dict[str, Any]], batch.to_pylist()))


@contextmanager
def _parquet(path: Path) -> Generator[None]:
    """Arrow's errors with the name of the file that they are about."""
    try:
        yield
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not Parquet that can be read: {str(error).splitlines()[0]}") from error
    except ValidationError as error:
        first = error.errors()[0]
        column = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"{path}, column {column}: {first['msg']}; is it of another version? Write it again"
        ) from error


def read_records(path: Path, kind: type[Record]) -> list[Record]:
    """All of what `iter_records` streams."""
    return list(iter_records(path, kind))


def num_records(path: Path) -> int:
    """Rows of a Parquet file, from its footer.

    Raises:
        ValueError: it is no Parquet.
    """
    with _parquet(path):
        return cast(int, cast(Any, pq.read_metadata(path)).num_rows)


def schema_of(kind: type[BaseModel]) -> Any:
    """Arrow schema of a flat record: str, int, float and bool fields, optional or not, and tuples of str."""
    columns = {"str": arrow.string(), "int": arrow.int64(), "float": arrow.float64(), "bool": arrow.bool_()}
    fields: list[Any] = []
    for name, field in kind.model_fields.items():
        text = str(field.annotation)
        known = next((value for key, value in columns.items() if key in text and "Literal" not in text), arrow.string())
        fields.append(arrow.field(name, arrow.list_(known) if text.startswith("tuple[") else known))
    return arrow.schema(fields, metadata={"record": kind.__name__, "version": "2"})
