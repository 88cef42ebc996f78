"""From the latent store to the device: what every step computes, in order, read ahead by worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import lightning
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import Sampler as TorchSampler

from data.conditions import Mode, Variant
from data.latents import LatentStore
from data.sampler import Sampler, StepBatch, share
from models.families import Arrays, Batch
from models.preemption import outlive_one_signal


class Forward(NamedTuple):
    """One forward pass of one process: some clips of its share, at one noise level."""

    first: int
    """Of the clips, in the share."""
    end: int
    place: int
    """Of the first, in the global batch."""
    level: int
    """Which of the step's noise levels."""
    counts: bool = True
    """False where it is computed only because other processes have one more."""


class Item(NamedTuple):
    """What one process does in one step, and what all of them do together."""

    drawn: StepBatch
    """This process's share."""
    batch: Batch
    forwards: tuple[Forward, ...]
    """As many in every process."""
    num_levels: int
    num_clips: int
    """Of all processes."""
    num_heard: int
    """Clips with sound, of all processes."""
    num_rows: int
    """Rows of packed sequence, of all processes."""
    media_s: float
    """Length of all clips of all processes, s."""


def read_batch(store: LatentStore, drawn: StepBatch, *, bare: bool = False) -> Batch:
    """Stack the latents and conditions of the drawn entries; with `bare` their conditions without captions too."""
    rows = [store.index.find(entry) for entry in drawn.entries]
    pairs = list(zip(rows, drawn.variants, strict=True))
    video = torch.stack([store.read(row, "video") for row in rows])
    audio = torch.stack([store.read(row, "audio") for row in rows])
    bare = bare and Variant.parse(drawn.variants[0]).captioned
    return Batch(
        mode=cast(Mode, drawn.mode),
        video_BCFHW=video.float(),
        audio_BSCT=audio.float(),
        has_audio_B=torch.tensor([float(row.has_audio) for row in rows]),
        conditions=stacked([store.conditions(row, variant) for row, variant in pairs]),
        frame_rate=rows[0].frame_rate,
        uncaptioned=stacked([store.conditions(row, uncaptioned(variant)) for row, variant in pairs]) if bare else {},
    )


def uncaptioned(variant: str) -> str:
    """The variant without its caption."""
    return str(Variant.parse(variant)._replace(captioned=False))


def stacked(clips: list[Arrays]) -> Arrays:
    """Arrays of clips with a batch axis in front."""
    return {name: torch.stack([clip[name] for clip in clips]) for name in clips[0]}


def sliced(batch: Batch, first: int, end: int) -> Batch:
    """Some clips of a batch."""
    part = slice(first, end)
    return batch._replace(
        video_BCFHW=batch.video_BCFHW[part],
        audio_BSCT=batch.audio_BSCT[part],
        has_audio_B=batch.has_audio_B[part],
        conditions={name: array[part] for name, array in batch.conditions.items()},
        uncaptioned={name: array[part] for name, array in batch.uncaptioned.items()},
    )


def forwards_of(num_clips: int, num_levels: int, micro_batch: int, rank: int, world_size: int) -> tuple[Forward, ...]:
    """The forward passes of one process, as many as any other's.

    The global batch is cut into shares by process and, independently of it, into groups by noise level, so levels do
    not depend on the number of processes or the micro-batch.
    """
    mine, most = cuts(num_clips, num_levels, micro_batch, rank, world_size), 0
    for other in range(world_size):
        most = max(most, len(cuts(num_clips, num_levels, micro_batch, other, world_size)))
    idle = mine[-1]._replace(end=mine[-1].first + 1, counts=False) if mine else Forward(0, 1, 0, 0, counts=False)
    return (*mine, *[idle] * (most - len(mine)))


def cuts(num_clips: int, num_levels: int, micro_batch: int, rank: int, world_size: int) -> list[Forward]:
    """The clips of a process by noise level, at most `micro_batch` at once."""
    start, stop = rank * num_clips // world_size, (rank + 1) * num_clips // world_size
    found: list[Forward] = []
    for level in range(num_levels):
        first = max(start, level * num_clips // num_levels)
        end = min(stop, (level + 1) * num_clips // num_levels)
        found += [
            Forward(place - start, min(place + micro_batch, end) - start, place, level)
            for place in range(first, end, micro_batch)
        ]
    return found


class Steps(Dataset[Item]):
    """One process's part of every step, read from the latent store."""

    def __init__(
        self, sampler: Sampler, store: LatentStore, *, num_levels: int, micro_batch: int, bare: bool,
        rank: int, world_size: int,
    ) -> None:  # fmt: skip
        self._sampler, self._store = sampler, store
        self._num_levels, self._micro_batch, self._bare = num_levels, micro_batch, bare
        self._rank, self._world_size = rank, world_size

    def __getitem__(self, step: int) -> Item:
        drawn, index = self._sampler.batch(step), self._store.index
        num_clips = len(drawn.entries)
        num_levels = min(self._num_levels, num_clips)
        row = index.row(index.place(drawn.entries[0]))  # the others have the same shape and layout
        mine = share(drawn, self._rank, self._world_size)
        return Item(
            drawn=mine,
            batch=read_batch(self._store, mine, bare=self._bare),
            forwards=forwards_of(num_clips, num_levels, self._micro_batch, self._rank, self._world_size),
            num_levels=num_levels,
            num_clips=num_clips,
            num_heard=sum(index.find(entry).has_audio for entry in drawn.entries),
            num_rows=num_clips * row.num_tokens[row.variants.index(drawn.variants[0])],
            media_s=float(num_clips * row.shape.duration_s),
        )


class Remaining(TorchSampler[int]):
    """Steps from where a run continues to its end."""

    def __init__(self, first_step: int, num_steps: int) -> None:
        self._first_step, self._num_steps = first_step, num_steps

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._first_step, self._num_steps))

    def __len__(self) -> int:
        return self._num_steps - self._first_step


class LatentData(lightning.LightningDataModule):
    """What a run still has to see, one item a step: what was drawn, and its latents.

    Batches are shared out here, so a `Trainer` of several processes needs `use_distributed_sampler=False`. Workers keep
    nothing from step to step but their maps of the shards: forked ones share the index and the sampler's arrays with
    their parent, spawned ones read the index themselves.

    Args:
        store: Where the latents are.
        sampler: Decides every batch.
        num_steps: Of the whole run.
        num_levels: Noise levels of a step.
        micro_batch: Clips of one forward pass, at most.
        bare: Read conditions without captions too.
        rank: Of this process, among those that see different clips; None asks the trainer.
        world_size: Number of those.
        num_workers: Processes that read ahead; 0 reads between the steps.
        prefetch_factor: Batches that each reads ahead.
        pin_memory: Put them where a CUDA device fetches them without waiting.
        start_method: Of the workers, `fork` or `spawn`; None is the system's own.
    """

    def __init__(
        self,
        store: LatentStore,
        sampler: Sampler,
        num_steps: int,
        *,
        num_levels: int = 1,
        micro_batch: int = 1,
        bare: bool = False,
        rank: int | None = None,
        world_size: int = 1,
        num_workers: int = 0,
        prefetch_factor: int = 4,
        pin_memory: bool = False,
        start_method: str | None = None,
    ) -> None:
        super().__init__()
        self.first_step = 0
        """Where the run continues; set before the loader is made."""
        self.num_steps = num_steps
        """Where it ends."""
        self._place = (rank, world_size)
        self._made = {"sampler": sampler, "store": store, "num_levels": num_levels, "micro_batch": micro_batch}
        self._made |= {"bare": bare}
        self._pin_memory = pin_memory
        ahead = {
            "prefetch_factor": prefetch_factor,
            "persistent_workers": True,
            "multiprocessing_context": start_method,
            "worker_init_fn": outlive_one_signal,
        }
        self._workers: dict[str, Any] = {"num_workers": num_workers, **(ahead if num_workers else {})}

    def train_dataloader(self) -> DataLoader[Item]:
        """Items from `first_step` on."""
        rank, world_size = self._place
        if rank is None:
            trainer = cast(Any, self.trainer)
            rank, world_size = trainer.global_rank, trainer.world_size
        return DataLoader(
            Steps(**cast(Any, self._made), rank=rank, world_size=world_size),
            sampler=Remaining(self.first_step, self.num_steps),
            batch_size=None,
            collate_fn=unchanged,
            pin_memory=self._pin_memory,
            **self._workers,
        )


def unchanged(item: Any) -> Any:
    """The item itself: its batch was stacked when it was read."""
    return item
