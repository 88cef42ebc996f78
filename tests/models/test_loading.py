"""The datamodule: batches in order, the same for any number of workers and processes, from any step on."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.candidates import candidates_of
from data.latent_index import LatentRow
from data.latent_shards import write_shard
from data.latents import PARTS, LatentStore, shard_name, write_index
from data.sampler import Sampler, StepBatch
from data.stage import Stage
from models.loading import Item, LatentData, forwards_of, read_batch, sliced

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
    data = LatentData(store, sampler_of(store), NUM_STEPS, **{"rank": 0, **options})
    data.first_step = first_step
    return list(data.train_dataloader())


def assert_same(left: list[Item], right: list[Item]) -> None:
    assert [item.drawn for item in left] == [item.drawn for item in right]
    for one, other in zip(left, right, strict=True):
        assert one._replace(batch=other.batch) == other
        assert torch.equal(one.batch.video_BCFHW, other.batch.video_BCFHW)
        assert one.batch.conditions.keys() == other.batch.conditions.keys()
        pairs = ((array, other.batch.conditions[name]) for name, array in one.batch.conditions.items())
        assert all(torch.equal(array, same) for array, same in pairs)


def test_every_step_comes_once_in_order_with_the_latents_of_what_was_drawn(store: LatentStore) -> None:
    items = loaded(store)
    assert [item.drawn for item in items] == [sampler_of(store).batch(step) for step in range(NUM_STEPS)]
    for item in items:
        drawn, batch = item.drawn, item.batch
        assert item.num_clips == len(drawn.entries)
        assert item.num_heard == sum(entry != "clip-00@small" for entry in drawn.entries)
        assert item.num_rows == len(drawn.entries) * (10 if drawn.mode == "t2va" else 11)
        assert item.media_s == pytest.approx(len(drawn.entries) * (17 * batch.video_BCFHW.shape[2] + 5) / 24)
        numbers = torch.tensor([float(entry[5:7]) for entry in drawn.entries])
        assert torch.equal(batch.video_BCFHW[:, 0, 0, 0, 0], numbers)
        assert torch.equal(batch.audio_BSCT[:, 1, 2, 3], numbers)
        assert torch.equal(batch.conditions["text/rows"][:, 0, 0], numbers)
        assert ("keyframe/first" in batch.conditions) == (drawn.mode == "fl2va_first") == (batch.mode != "t2va")
        assert torch.equal(batch.has_audio_B, (numbers > 0).float())


def test_a_resumed_run_sees_what_an_undisturbed_one_sees(store: LatentStore) -> None:
    assert_same(loaded(store, first_step=17), loaded(store)[17:])
    data = LatentData(store, sampler_of(store), NUM_STEPS, rank=0)
    data.first_step = 17
    assert len(data.train_dataloader()) == NUM_STEPS - 17


def test_workers_change_nothing(store: LatentStore) -> None:
    assert_same(loaded(store, num_workers=2, prefetch_factor=3, start_method="fork"), loaded(store))


def test_what_spawned_workers_are_sent_leaves_the_index_to_be_read_by_them(store: LatentStore) -> None:
    steps: Any = LatentData(store, sampler_of(store), NUM_STEPS, rank=0).train_dataloader().dataset
    for at in (0, 5):
        assert_same([steps[at]], [pickle.loads(pickle.dumps(steps))[at]])
    sent = pickle.dumps(store)
    assert b"clip-00@small" not in sent
    assert pickle.loads(sent).index.find("clip-00@small").shard == "00000"


def test_processes_share_each_batch_out_and_resume_by_another_number_of_them(store: LatentStore) -> None:
    whole = loaded(store)
    for world_size in (2, 3, 8):
        parts = [loaded(store, first_step=20, rank=rank, world_size=world_size) for rank in range(world_size)]
        for item, *shares in zip(whole[20:], *parts, strict=True):
            pieces = [
                (forward.place, sliced(part.batch, forward.first, forward.end).video_BCFHW)
                for part in shares
                for forward in part.forwards
                if forward.counts
            ]
            assert [place for place, _ in pieces] == list(range(item.num_clips))
            assert torch.equal(torch.cat([video for _, video in pieces]), item.batch.video_BCFHW)
            assert len({len(part.forwards) for part in shares}) == 1
            for part in shares:
                assert (part.num_clips, part.num_heard, part.num_rows) == item[4:7]


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 8), st.integers(1, 9))
def test_every_clip_is_computed_once_at_the_noise_level_of_its_place(
    num_clips: int, num_levels: int, micro_batch: int, world_size: int
) -> None:
    num_levels = min(num_levels, num_clips)
    seen: list[tuple[int, int]] = []
    lengths: set[int] = set()
    for rank in range(world_size):
        start = rank * num_clips // world_size
        size = max(1, (rank + 1) * num_clips // world_size - start)  # one without a share reads the first clip
        forwards = forwards_of(num_clips, num_levels, micro_batch, rank, world_size)
        lengths.add(len(forwards))
        for forward in forwards:
            assert 0 <= forward.first < forward.end <= size
            assert forward.end - forward.first <= micro_batch
            if forward.counts:
                assert forward.place == start + forward.first
                seen += [(forward.place + more, forward.level) for more in range(forward.end - forward.first)]
    groups = [
        level
        for level in range(num_levels)
        for _ in range(level * num_clips // num_levels, (level + 1) * num_clips // num_levels)
    ]
    assert seen == list(enumerate(groups))
    assert set(groups) == set(range(num_levels))
    assert len(lengths) == 1


def test_a_step_has_no_more_noise_levels_than_clips(store: LatentStore) -> None:
    items = loaded(store, num_levels=3)
    assert {item.num_levels for item in items} == {min(3, item.num_clips) for item in items}
    assert all({forward.level for forward in item.forwards} == set(range(item.num_levels)) for item in items)


def test_a_batch_is_what_the_store_holds_of_its_entries(store_folder: Path) -> None:
    store = LatentStore(store_folder)
    batch = read_batch(store, StepBatch(0, "fl2va", ("clip-4@small", "clip-5@small"), ("fl2va", "fl2va")))
    rows = [store.index.row(place) for place in (4, 5)]
    assert batch.mode == "fl2va"
    assert batch.frame_rate == 24
    assert batch.has_audio_B.tolist() == [1, 0]
    assert batch.uncaptioned == {}
    assert set(batch.conditions) == {"text/rows", "text/tags", "keyframe/first", "keyframe/last"}
    for index, row in enumerate(rows):
        assert torch.equal(batch.video_BCFHW[index], store.read(row, "video"))
        assert torch.equal(batch.audio_BSCT[index], store.read(row, "audio"))
        assert torch.equal(batch.conditions["keyframe/last"][index], store.read(row, "keyframe/last"))
        assert torch.equal(batch.conditions["text/rows"][index], store.read(row, "text/fl2va/rows"))
    mixed = read_batch(store, StepBatch(0, "t2va", ("clip-1@small",), ("t2va-uncaptioned",)))
    assert mixed.conditions["text/rows"].shape == (1, 1, 32)


def test_a_batch_brings_its_clips_without_their_captions_where_it_is_asked_for(store_folder: Path) -> None:
    store, entries = LatentStore(store_folder), ("clip-1@small", "clip-2@small")
    batch = read_batch(store, StepBatch(0, "t2va", entries, ("t2va",) * 2), bare=True)
    silent = read_batch(store, StepBatch(0, "t2va", entries, ("t2va-uncaptioned",) * 2), bare=True)
    assert torch.equal(batch.uncaptioned["text/rows"], silent.conditions["text/rows"])
    assert batch.conditions["text/rows"].shape[1] > 1
    assert silent.uncaptioned == {}
    last = sliced(batch, 1, 2)
    assert torch.equal(last.uncaptioned["text/rows"], batch.uncaptioned["text/rows"][1:])
    assert torch.equal(last.conditions["text/rows"], batch.conditions["text/rows"][1:])
    assert torch.equal(last.video_BCFHW, batch.video_BCFHW[1:])


def test_memory_of_workers_is_flat_over_hundreds_of_passes(store: LatentStore) -> None:
    num_steps = 2400  # some two hundred passes of each of the two decks
    data = LatentData(store, sampler_of(store, num_steps), num_steps, rank=0, num_workers=2, start_method="fork")
    before = {child.pid for child in psutil.Process().children()}
    early: dict[int, int] = {}
    for item in data.train_dataloader():
        if item.drawn.step in {400, num_steps - 20}:
            workers = [child for child in psutil.Process(os.getpid()).children() if child.pid not in before]
            found = {worker.pid: worker.memory_full_info().uss for worker in workers}
            early = early or found
            late = found
    assert len(early) == 2
    assert max(late[pid] - early[pid] for pid in early) < 2_000_000
