"""Rows that many tests begin with, and a tiny model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from data.records import Clip, Source

if TYPE_CHECKING:
    from data.latents import Arrays


@pytest.fixture(scope="session")
def make_source() -> Callable[..., Source]:
    """An ordinary two-second source called `name`; every field can be overridden."""

    def make(name: str, **fields: object) -> Source:
        digest = hashlib.sha256(name.encode()).hexdigest()
        ordinary = {
            "source_id": digest[:16],
            "sha256": digest,
            "path": f"corpus/{name}",
            "group": "",
            "size_bytes": 1000,
            "caption": f"a caption of {name.partition('.')[0]}",
            "container": "mov,mp4,m4a,3gp,3g2,mj2",
            "video_codec": "h264",
            "pixel_format": "yuv420p",
            "color_transfer": "bt709",
            "width": 64,
            "height": 64,
            "frame_rate": "24",
            "num_frames": 48,
            "video_duration_s": 2.0,
            "audio_codec": "aac",
            "num_channels": 2,
            "channel_layout": "stereo",
            "sample_rate_hz": 48000,
            "audio_duration_s": 2.0,
            "peak": 0.5,
            "true_peak_db": -6.0,
            "loudness_lufs": -20.0,
            "media_type": "video/mp4",
            "num_video_streams": 1,
            "num_audio_streams": 1,
            "video_stream": 0,
            "audio_stream": 1,
            "time_base": "1/12288",
            "header_num_frames": 48,
            "header_duration_s": 2.0,
        }
        return Source.model_validate(ordinary | fields)

    return make


@pytest.fixture(scope="session")
def make_clip() -> Callable[..., Clip]:
    """An ordinary clip of source `source_id`; every field can be overridden."""

    def make(source_id: str, number: int = 0, **fields: object) -> Clip:
        ordinary = {
            "clip_id": f"{source_id}-{number * 1000:06d}",
            "source_id": source_id,
            "path": f"corpus/{source_id}.mp4",
            "group": "",
            "caption": "a caption",
            "start_s": float(number),
            "end_s": number + 0.916667,
            "boundary_reason": "stride" if number else "start",
            "has_audio": True,
            "motion_p50": 0.1,
            "motion_p90": 0.3,
            "luma": 0.5,
            "sharpness_p90": 500.0,
            "loudness_lufs": -20.0,
            "cluster": source_id,
        }
        return Clip.model_validate(ordinary | fields)

    return make


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny H3 with random weights."""
    import torch

    from models import tiny_h3

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("zoo") / "tiny-h3"
    tiny_h3.save(tiny_h3.build(3), folder)
    return folder


@pytest.fixture(scope="session")
def store_folder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latents by `base`, at 16 px, of six clips: four of one kind (one layout), two of another; the last has no sound."""
    from data.latents import LatentRow, write_index, write_shard
    from data.world import scene
    from models.families import load_family
    from tasks.encode import conditions_of

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
