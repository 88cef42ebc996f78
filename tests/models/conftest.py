"""A tiny H3 with random weights, and a latent store of the sample world encoded by it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data.latents import Arrays, LatentRow, write_index, write_shard
from data.records import ClipShape
from data.world import scene
from models import tiny_h3
from models.families import Family, load_family
from tasks.encode import conditions_of

SHAPE = ClipShape(num_frames=22, frame_rate=24, height=16, width=16, sample_rate_hz=8000)
"""Small enough that one forward pass takes milliseconds."""


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zoo") / "tiny-h3"
    tiny_h3.save(tiny_h3.build(3), folder)
    return folder


@pytest.fixture
def family(base: Path) -> Family:
    return load_family(base)


@pytest.fixture(scope="session")
def store_folder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six clips: four of one kind (one layout), two of another; the last has no sound."""
    folder = tmp_path_factory.mktemp("store")
    family = load_family(base)
    clips: dict[str, Arrays] = {}
    rows: list[LatentRow] = []
    for index in range(6):
        kind = "bounce" if index < 4 else "speak"
        seen = scene("base", index, 22 / 24, 24, 16, 8000, kind)
        video, audio = family.encode_clip(seen.frames_FHWC, seen.waveform_CT)
        clip_id = f"clip-{index}"
        conditions = conditions_of(family, seen.caption, seen.frames_FHWC)
        clips[clip_id] = {"video": video.numpy(), "audio": audio.numpy(), **conditions}
        rows.append(
            LatentRow(
                clip_id=clip_id,
                source_id=clip_id,
                split="train",
                group="base" if index < 2 else "new",
                has_audio=index != 5,
                shard="shard.safetensors",
                modes="fl2va,fl2va_first,t2va",
                layout=str(len(conditions["text.t2va"])),
                num_tokens=len(conditions["text.fl2va"]),
            )
        )
    write_shard(folder / "shard.safetensors", clips)
    write_index(folder, rows, "f" * 64, {"test": True})
    return folder
