"""Rows that many tests begin with, and a tiny model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from data.conditions import KEYFRAMES, Variant
from data.records import Clip, ClipShape, Source

if TYPE_CHECKING:
    from data.world import Kind
    from models.families import Arrays, Encoders

settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")


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
def ltx2_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny LTX-2.3 with random weights."""
    from models import tiny_ltx2

    folder = tmp_path_factory.mktemp("zoo") / "tiny-ltx2"
    tiny_ltx2.save(tiny_ltx2.build(3), folder)
    return folder


@pytest.fixture(scope="session")
def store_folder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latents by `base`, at 16 px, of six clips: four of one kind (one layout), two of another; the last has no sound.

    Every clip has text in every mode; its references are a picture and a video with sound of another scene.
    """
    import torch

    from data.latent_index import LatentRow
    from data.latent_shards import write_shard
    from data.latents import PARTS, SHARED, shard_name, write_index
    from models.families import load_encoders

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("store")
    encoders = load_encoders(base)
    shape = encoders.shape(22 / 24, 16, 16)
    parts: dict[str, dict[str, Arrays]] = {part: {} for part in PARTS}
    rows: list[LatentRow] = []
    for index in range(6):
        entry, has_audio = f"clip-{index}@small", index != 5
        given = encoded(encoders, shape, index, "bounce" if index < 4 else "speak")
        for part, arrays in given.items():
            parts[part][entry] = arrays
        sizes = {name: tuple(array.shape) for arrays in given.values() for name, array in arrays.items()}
        uncaptioned = {"text/t2va-uncaptioned/rows": (1, 32)}
        variants = (*VARIANTS, *(("a2v", "v2a") if has_audio else ()))
        layouts = [layout_of(encoders, shape, variant, sizes | uncaptioned) for variant in variants]
        rows.append(
            LatentRow(
                entry=entry,
                clip_id=f"clip-{index}",
                source_id=f"clip-{index}",
                split="train",
                group="base" if index < 2 else "new",
                canvas="small",
                has_audio=has_audio,
                variants=variants,
                layouts=tuple(key for key, _ in layouts),
                num_tokens=tuple(count for _, count in layouts),
                shard="00000",
                keys=tuple(f"{part} {index}" for part in PARTS),
                **shape.model_dump(),
            )
        )
    for place, part in enumerate(PARTS):
        keys = {row.entry: row.keys[place] for row in rows}
        write_shard(folder / shard_name(part, "00000"), parts[part], keys)
    shared = {f"text/uncaptioned/{name}": array for name, array in encoders.encode_text("t2va", None).items()}
    write_shard(folder / shard_name("text", SHARED), {SHARED: shared}, {SHARED: "text of nothing"})
    text_of = {variant: encoders.text_of(variant) for variant in (*VARIANTS, "a2v", "v2a")}
    write_index(folder, rows, {"family": encoders.name, "text_of": text_of})
    return folder


VARIANTS = ("t2va", "fl2va_first", "fl2va_last", "fl2va", "ref2va.0", "t2va-uncaptioned")


def encoded(encoders: Encoders, shape: ClipShape, number: int, kind: Kind) -> dict[str, Arrays]:
    """Arrays of a scene, by part."""
    from data.world import scene
    from models.families import Reference

    seen, other = (scene("base", seed, 22 / 24, 24, 16, 8000, kind) for seed in (number, number + 10))
    ends = {"first": seen.frames_FHWC[0], "last": seen.frames_FHWC[-1]}
    references = [Reference("image", other.frames_FHWC[:1]), Reference("video", other.frames_FHWC, other.waveform_CT)]
    text: Arrays = {}
    for variant in VARIANTS[:5]:
        facts = Variant.parse(variant)
        keyframes = [ends[name] for name in KEYFRAMES.get(facts.mode, ())]
        shown = references if facts.mode == "ref2va" else []
        said = encoders.encode_text(facts.mode, seen.caption, keyframes, shown, shape)
        text |= {f"text/{variant}/{name}": array for name, array in said.items()}
    return {
        "picture": {
            "video": encoders.encode_picture(seen.frames_FHWC[None])[0],
            **{f"keyframe/{name}": encoders.encode_keyframe(frame) for name, frame in ends.items()},
        },
        "sound": {"audio": encoders.encode_sound(seen.waveform_CT[None], shape)[0]},
        "text": text,
        "references": {
            f"references/0/{name}": array for name, array in encoders.encode_references(references, shape).items()
        },
    }


def layout_of(
    encoders: Encoders, shape: ClipShape, variant: str, sizes: Mapping[str, tuple[int, ...]]
) -> tuple[str, int]:
    """Layout of a variant, from the sizes of all arrays of its clip."""
    mode, said = Variant.parse(variant).mode, "t2va" if variant in {"a2v", "v2a"} else variant
    conditions = {"text/rows": sizes[f"text/{said}/rows"]}
    if mode == "ref2va":
        names = (name for name in sizes if name.startswith("references/0/"))
        conditions |= {name.replace("references/0/", "references/"): sizes[name] for name in names}
    return encoders.layout(shape, mode, conditions)
