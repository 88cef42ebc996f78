"""From the latent store to the device: the batch of every step, in order, read ahead by worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import Sampler as TorchSampler

from data.latents import LatentStore
from data.sampler import Sampler, StepBatch, share
from models.families import Batch
from models.preemption import outlive_one_signal
from models.sft import read_batch

Item = tuple[StepBatch, Batch]


class Steps(Dataset[Item]):
    """One process's share of the batch of every step, read from the latent store."""

    def __init__(self, sampler: Sampler, store: LatentStore, rank: int = 0, world_size: int = 1) -> None:
        self._sampler, self._store = sampler, store
        self._rank, self._world_size = rank, world_size

    def __getitem__(self, step: int) -> Item:
        drawn = share(self._sampler.batch(step), self._rank, self._world_size)
        return drawn, read_batch(self._store, drawn)


class Remaining(TorchSampler[int]):
    """Steps from where a run continues to its end; its length is the whole run's, as Lightning counts."""

    def __init__(self, first_step: int, num_steps: int) -> None:
        self._first_step = first_step
        self._num_steps = num_steps

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._first_step, self._num_steps))

    def __len__(self) -> int:
        return self._num_steps


class LatentData(lightning.LightningDataModule):
    """What a run still has to see, one item a step: what was drawn, and its latents.

    Batches are shared out here, so a `Trainer` of several processes needs `use_distributed_sampler=False`, and its
    loss the weight of `StepBatch`. Workers keep nothing from step to step but their maps of the shards: forked ones
    share the index and the sampler's arrays with their parent, spawned ones read the index themselves.

    Args:
        store: Where the latents are.
        sampler: Decides every batch.
        first_step: Where the run continues.
        num_steps: Of the whole run.
        rank: Of this process, among those that see different clips.
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
        first_step: int,
        num_steps: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        prefetch_factor: int = 4,
        pin_memory: bool = False,
        start_method: str | None = None,
    ) -> None:
        super().__init__()
        self._steps = Steps(sampler, store, rank, world_size)
        self._remaining = Remaining(first_step, num_steps)
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
        return DataLoader(
            self._steps,
            sampler=self._remaining,
            batch_size=None,
            collate_fn=unchanged,
            pin_memory=self._pin_memory,
            **self._workers,
        )


def unchanged(item: Any) -> Any:
    """The item itself: its batch was stacked when it was read."""
    return item
