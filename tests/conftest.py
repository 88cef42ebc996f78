"""Rows that many tests begin with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest

from data.records import Clip, Source


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
            "motion": 0.01,
            "luma": 0.5,
            "sharpness": 500.0,
            "loudness_db": -20.0,
        }
        return Clip.model_validate(ordinary | fields)

    return make
