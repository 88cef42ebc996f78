"""The datamodule: batches in order, the same for any number of workers and processes, from any step on."""

from __future__ import annotations

import os
import pickle
from typing import Any

import psutil
import pytest
import torch

from data.candidates import candidates_of
from data.latent_index import LatentRow
from data.latent_shards import write_shard
from data.latents import PARTS, LatentStore, shard_name, write_index
from data.sampler import Sampler
from data.stage import Stage
from models.loading import Item, LatentData

NUM_CLIPS, NUM_STEPS = 24, 40


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LatentStore:
    """Clips of two layouts in two shards; every array holds the number of its clip."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("store")
    rows: list[LatentRow] = []
    for shard in range(2):
        parts: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
        for number in range(shard, NUM_CLIPS, 2):
            entry, frames = f"clip-{number:02d}@small", 2 + number % 3 // 2
            given = {
                "picture": {"video": (4, frames, 2, 2), "keyframe/first": (4, 2, 2)},
                "sound": {"audio": (2, 4, 8)},
                "text": {"text/t2va/rows": (3, 5), "text/fl2va_first/rows": (4, 5)},
            }
            for part, arrays in given.items():
                parts[part][entry] = {name: torch.full(sizes, float(number)) for name, sizes in arrays.items()}
            rows.append(
                LatentRow(
                    entry=entry, clip_id=entry[:7], source_id=entry[:7], split="train", group="", canvas="small",
                    has_audio=number != 0, num_frames=17 * frames + 5, frame_rate=24, height=32, width=32,
                    sample_rate_hz=8000, variants=("t2va", "fl2va_first"), layouts=(f"t {frames}", f"f {frames}"),
                    num_tokens=(10, 11), shard=f"{shard:05d}", keys=("key",) * 3 + ("",),
                )
            )  # fmt: skip
        for part in PARTS[:3]:
            write_shard(folder / shard_name(part, f"{shard:05d}"), parts[part], dict.fromkeys(parts[part], "key"))
    write_index(folder, rows, {"family": "none", "text_of": {name: name for name in ("t2va", "fl2va_first")}})
    return LatentStore(folder)


def sampler_of(store: LatentStore, num_steps: int = NUM_STEPS) -> Sampler:
    settings = {"conditions": {"t2va": 0.5, "fl2va_first": 0.5}, "num_steps": num_steps, "learning_rate": 1.0}
    return Sampler(candidates_of(store.index), Stage.model_validate(settings), 0)


def loaded(store: LatentStore, first_step: int = 0, **options: Any) -> list[Item]:
    data = LatentData(store, sampler_of(store), first_step, NUM_STEPS, **options)
    return list(data.train_dataloader())


def assert_same(left: list[Item], right: list[Item]) -> None:
    assert [drawn for drawn, _ in left] == [drawn for drawn, _ in right]
    for (_, one), (_, other) in zip(left, right, strict=True):
        assert torch.equal(one.video_BCFHW, other.video_BCFHW)
        assert one.conditions.keys() == other.conditions.keys()
        assert all(torch.equal(array, other.conditions[name]) for name, array in one.conditions.items())


def test_every_step_comes_once_in_order_with_the_latents_of_what_was_drawn(store: LatentStore) -> None:
    items = loaded(store)
    assert [drawn for drawn, _ in items] == [sampler_of(store).batch(step) for step in range(NUM_STEPS)]
    for drawn, batch in items:
        numbers = torch.tensor([float(entry[5:7]) for entry in drawn.entries])
        assert torch.equal(batch.video_BCFHW[:, 0, 0, 0, 0], numbers)
        assert torch.equal(batch.audio_BSCT[:, 1, 2, 3], numbers)
        assert torch.equal(batch.conditions["text/rows"][:, 0, 0], numbers)
        assert ("keyframe/first" in batch.conditions) == (drawn.mode == "fl2va_first") == (batch.mode != "t2va")
        assert torch.equal(batch.has_audio_B, (numbers > 0).float())


def test_a_resumed_run_sees_what_an_undisturbed_one_sees(store: LatentStore) -> None:
    assert_same(loaded(store, first_step=17), loaded(store)[17:])
    assert len(LatentData(store, sampler_of(store), 17, NUM_STEPS).train_dataloader()) == NUM_STEPS


def test_workers_change_nothing(store: LatentStore) -> None:
    assert_same(loaded(store, num_workers=2, prefetch_factor=3, start_method="fork"), loaded(store))


def test_what_spawned_workers_are_sent_leaves_the_index_to_be_read_by_them(store: LatentStore) -> None:
    steps = LatentData(store, sampler_of(store), 0, NUM_STEPS).train_dataloader().dataset
    for at in (0, 5):
        assert_same([steps[at]], [pickle.loads(pickle.dumps(steps))[at]])
    sent = pickle.dumps(store)
    assert b"clip-00@small" not in sent
    assert pickle.loads(sent).index.find("clip-00@small").shard == "00000"


def test_processes_share_each_batch_out_and_resume_by_another_number_of_them(store: LatentStore) -> None:
    whole = loaded(store)
    for world_size in (2, 3, 8):
        parts = [loaded(store, first_step=20, rank=rank, world_size=world_size) for rank in range(world_size)]
        for (drawn, batch), *shares in zip(whole[20:], *parts, strict=True):
            mine = [(part, own) for part, own in shares if part.weight]
            assert sum((part.entries for part, _ in mine), ()) == drawn.entries
            assert torch.equal(torch.cat([own.video_BCFHW for _, own in mine]), batch.video_BCFHW)
            mean = sum(part.weight * own.video_BCFHW.mean() for part, own in shares) / world_size
            assert float(mean) == pytest.approx(float(batch.video_BCFHW.mean()), rel=1e-5)


def test_memory_of_workers_is_flat_over_hundreds_of_passes(store: LatentStore) -> None:
    num_steps = 2400  # some two hundred passes of each of the two decks
    data = LatentData(store, sampler_of(store, num_steps), 0, num_steps, num_workers=2, start_method="fork")
    before = {child.pid for child in psutil.Process().children()}
    early: dict[int, int] = {}
    for drawn, _ in data.train_dataloader():
        if drawn.step in {400, num_steps - 20}:
            workers = [child for child in psutil.Process(os.getpid()).children() if child.pid not in before]
            found = {worker.pid: worker.memory_full_info().uss for worker in workers}
            early = early or found
            late = found
    assert len(early) == 2
    assert max(late[pid] - early[pid] for pid in early) < 2_000_000
