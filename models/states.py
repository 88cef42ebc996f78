"""Resumable training states: sharded, checksummed, written beside the training, tied to the settings they belong to.

FOLDER/latest                              names the newest whole state; for people, never read
FOLDER/step-00000100/shard-*.safetensors   what every process held of the tensors
FOLDER/step-00000100/state.json            a Record, written last: without it the state was interrupted
FOLDER/refused-step-00000100/              the last state that was not as recorded, for who looks into it
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch.distributed.checkpoint as dcp
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from data.files import remove, sync, write_text
from models.ranks import Ranks
from models.state_tensors import Staging, files_of, mismatch, refuse_strange, size_bytes

RECORD = "state.json"


class Written(BaseModel):
    """One file of a state."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size_bytes: int
    xxh3_128: str
    """Hash of the content: against accidents, at memory speed."""


class Record(BaseModel):
    """What `state.json` says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    identity: dict[str, Any]
    facts: dict[str, Any]
    world_size: int
    files: dict[str, Written]


@dataclass(frozen=True)
class State:
    """A state that was found whole."""

    folder: Path
    record: Record

    @property
    def step(self) -> int:
        """Optimiser updates behind it."""
        return self.record.step

    @property
    def facts(self) -> dict[str, Any]:
        """What was saved beside the tensors."""
        return self.record.facts


class States:
    """Saves the state of a run and finds the newest one that is whole and belongs to it.

    All processes construct it and call its methods in the same order; the folder is one that all of them see.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], keep: int = 2, timeout_s: float = 1800) -> None:
        """`identity` holds JSON values: the settings that a state must share. `keep` whole states stay.

        Raises:
            ValueError: `keep` is below 1.
        """
        if keep < 1:
            raise ValueError(f"keep = {keep}: at least 1 state has to stay")
        self._folder = folder
        self._identity = cast(dict[str, Any], json.loads(json.dumps(identity)))
        self._keep = keep
        self._ranks = Ranks(timeout_s)
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._deciding = threading.Lock()
        self._recorded = False
        self._abandoned = False

    def latest(self) -> State | None:
        """The newest state that is whole and of this identity.

        Those of another identity and interrupted ones are removed, damaged ones moved aside; stderr says which and why.
        """
        self.finish()
        for state in self._ranks.first(self._candidates):
            found = [line for lines in self._ranks.gather(list(self._findings(state))) for line in lines]
            if not found:
                return state
            self._ranks.first(lambda state=state, found=found: self._refuse(state.folder, found[0]))
        return None

    def names(self, state: State) -> set[str]:
        """Names of the tensors in a state."""
        return set(dcp.HuggingFaceStorageReader(str(state.folder)).read_metadata().state_dict_metadata)

    def load(self, state: State, tensors: Mapping[str, Tensor]) -> None:
        """Read a state into `tensors`, in place, however they are sharded now.

        Raises:
            RuntimeError: names, shapes or types are not those of the state, or it cannot be read.
        """
        self.finish()
        reader = dcp.HuggingFaceStorageReader(str(state.folder))
        wrong = mismatch(reader.read_metadata().state_dict_metadata, tensors)
        for line in filter(None, self._ranks.gather(wrong)):
            raise RuntimeError(f"state {state.folder}: {line}")
        try:
            dcp.load(
                {name: tensor.detach() for name, tensor in tensors.items()},
                storage_reader=reader,
                process_group=self._ranks.group,
                no_dist=self._ranks.group is None,
            )
        except CheckpointException as error:
            raise RuntimeError(f"state {state.folder} cannot be read: {first_failure(error)}") from error

    def save(self, step: int, tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        """Copy the tensors and write the copy in the background, once what was being written before is whole.

        A step that was saved already is not saved again. The copy stays in memory, for the next one.

        Args:
            step: Optimiser updates so far.
            tensors: Under the same names in all processes. Plain ones hold the same values in all of them.
            facts: JSON values that are wanted back.

        Raises:
            RuntimeError: the disk has too little space, the folder cannot be written, or the save before failed.
        """
        self.finish()
        refuse_strange(tensors)
        facts = json.loads(json.dumps(facts))
        folder, needed = self._folder / f"step-{step:08d}", size_bytes(tensors)
        if not self._ranks.first(lambda: self._prepare(folder, needed)):
            return
        record = Record(step=step, identity=self._identity, facts=facts, world_size=self._ranks.size, files={})
        work = (folder, self._staging.copy(tensors), record, needed)
        self._recorded = False
        # A daemon, so that an abandoned one does not keep a pre-empted process alive.
        self._thread = threading.Thread(target=self._run, args=work, name=f"save {folder.name}", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for what is being written.

        Raises:
            RuntimeError: it could not be written, or was abandoned.
        """
        if self._abandoned:
            raise RuntimeError(f"{self._folder}: a state was abandoned, and nothing can be saved after that")
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise RuntimeError(str(error)) from error

    def close(self, timeout_s: float) -> bool:
        """Wait for what is being written, but no longer; whether it is whole. The process has to end after a False.

        A True holds for all processes. Where only some waited long enough, some may say False of a whole state.
        """
        if self._thread is None:
            return not self._abandoned and self._error is None
        self._thread.join(timeout_s)
        with self._deciding:
            self._abandoned = not self._recorded
        if self._abandoned:
            reason = f"{self._error}" if self._error else f"not whole after {timeout_s} s"
            sys.stderr.write(f"{self._folder}: {self._thread.name} abandoned: {reason}\n")
        return self._recorded

    def _candidates(self) -> list[State]:
        """Whole states of this identity by their records, newest first; removes and moves the others."""
        states: list[State] = []
        for folder in sorted(self._folder.glob("step-*"), reverse=True):
            if not (folder / RECORD).exists():
                sys.stderr.write(f"{folder} was interrupted: removed\n")
                remove(folder)
                continue
            try:
                record = Record.model_validate_json((folder / RECORD).read_bytes())
            except (OSError, ValidationError) as error:
                self._refuse(folder, f"{folder / RECORD} is no record: {' '.join(str(error).split())}")
                continue
            if other := list(differences(self._identity, record.identity)):
                sys.stderr.write(f"{folder} belongs to other settings: {'; '.join(other)}: removed\n")
                forget(folder)
            else:
                states.append(State(folder, record))
        return states

    def _findings(self, state: State) -> Iterator[str]:
        """What is not as recorded of this process's share of the files."""
        names = sorted(state.record.files)
        strays = {path.name for path in state.folder.glob("*.safetensors")} - set(names)
        if self._ranks.rank == 0 and strays:
            yield f"{state.folder / min(strays)} is not in its record"
        for name in names[self._ranks.rank :: self._ranks.size]:
            path, expected = state.folder / name, state.record.files[name]
            try:
                held = path.stat().st_size
                if held != expected.size_bytes:
                    yield f"{path} holds {held} bytes, {expected.size_bytes} were written"
                elif (found := xxh3_128(path)) != expected.xxh3_128:
                    yield f"{path} has xxh3_128 {found}, {expected.xxh3_128} was written"
            except OSError as error:
                yield f"{path} cannot be read: {error.strerror}"

    def _refuse(self, folder: Path, reason: str) -> None:
        """Move a damaged state aside, one at most: a person may want to see it, and the disk is finite."""
        aside = folder.with_name(f"refused-{folder.name}")
        for earlier in self._folder.glob("refused-*"):
            remove(earlier)
        folder.rename(aside)
        sys.stderr.write(f"state refused: {reason}; moved to {aside}\n")

    def _prepare(self, folder: Path, needed: int) -> bool:
        """Make room and a folder for a state; False where it is there already."""
        try:
            if (folder / RECORD).is_file():
                record = Record.model_validate_json((folder / RECORD).read_bytes())
                if record.identity == self._identity:
                    return False
            forget(folder)
            self._folder.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self._folder).free < needed:
                raise OSError("too little space")
            folder.mkdir()
            sync(self._folder, shallow=True)
        except (OSError, ValidationError) as error:
            raise self._unwritten(folder, needed, error) from error
        return True

    def _run(self, folder: Path, tensors: dict[str, Tensor], record: Record, needed: int) -> None:
        """`_write` in the background; `finish` raises what it raised."""
        try:
            self._write(folder, tensors, record, needed)
        except BaseException as error:  # noqa: BLE001 # torch's CheckpointException is no Exception
            self._error = error

    def _write(self, folder: Path, tensors: dict[str, Tensor], record: Record, needed: int) -> None:
        """All of a state, the record once every process has written."""
        try:
            dcp.save(
                tensors,
                storage_writer=dcp.HuggingFaceStorageWriter(
                    str(folder), fqn_to_index_mapping=files_of(tensors), save_distributed=True
                ),
                process_group=self._ranks.group,
                no_dist=self._ranks.group is None,
            )
            mine, wrong = written_by(folder, self._ranks.rank)
            shares = self._ranks.gather((mine, wrong))
            for error in (error for _, error in shares if error):
                raise OSError(error)
            files = {name: file for share, _ in shares for name, file in share.items()}
            self._ranks.first(lambda: self._close_record(folder, record.model_copy(update={"files": files})))
        except (CheckpointException, OSError, RuntimeError) as error:
            if self._recorded:
                raise
            unwritten = self._unwritten(folder, needed, error)
            if self._ranks.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)  # what is left of it fills the disk
            raise unwritten from error
        self._recorded = True

    def _close_record(self, folder: Path, record: Record) -> None:
        """Make a state whole, unless it was abandoned; then point to it and forget the oldest."""
        sync(folder, shallow=True)
        with self._deciding:
            if self._abandoned:
                raise RuntimeError(f"{folder} was abandoned")
            write_text(folder / RECORD, json.dumps(record.model_dump(), indent=1) + "\n")
            self._recorded = True
        write_text(self._folder / "latest", folder.name + "\n")
        whole = sorted(path.parent for path in self._folder.glob(f"step-*/{RECORD}"))
        for old in whole[: -self._keep]:
            forget(old)

    def _unwritten(self, folder: Path, needed: int, error: BaseException) -> RuntimeError:
        """The one error that a failed save raises."""
        existing = next(path for path in (folder, *folder.parents) if path.is_dir())
        reason = first_failure(error) if isinstance(error, CheckpointException) else error
        free = shutil.disk_usage(existing).free
        return RuntimeError(f"state {folder} cannot be written: {reason}; it needs {needed} bytes, {free} are free")


def differences(ours: Any, theirs: Any, name: str = "") -> Iterator[str]:
    """Where two identities differ: name, both values."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        left, right = cast(dict[str, Any], ours), cast(dict[str, Any], theirs)
        for key in sorted(left.keys() | right.keys()):
            yield from differences(left.get(key), right.get(key), f"{name}.{key}" if name else key)
    elif ours != theirs:
        yield f"{name} is {ours!r} here and {theirs!r} there"


def written_by(folder: Path, rank: int) -> tuple[dict[str, Written], str]:
    """A process's files, and what went wrong in reading them: it has to be told to the others, not raised."""
    files: dict[str, Written] = {}
    try:
        for path in sorted(folder.glob(f"shard-{rank + 1:05d}-*.safetensors")):
            files[path.name] = Written(size_bytes=path.stat().st_size, xxh3_128=xxh3_128(path))
    except OSError as error:
        return files, str(error)
    return files, ""


def first_failure(error: CheckpointException) -> str:
    """What the first process that failed ran into."""
    rank, (failure, _) = min(error.failures.items(), key=lambda item: item[0])
    return f"{failure} (process {rank})"


def xxh3_128(path: Path) -> str:
    """Hash of a file's content."""
    import hashlib

    import xxhash

    with path.open("rb") as stream:
        return cast(Any, hashlib.file_digest)(stream, xxhash.xxh3_128).hexdigest()


def forget(folder: Path) -> None:
    """Delete a state, its record first: cut short, it was interrupted and not damaged."""
    remove(folder / RECORD)
    remove(folder)
