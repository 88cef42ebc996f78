"""What the experiments of `benchmarks.behaviour` are made of: a small latent store, a real run of training, measures.

Scenes are those of `data.world`, at the shape of the shipped model in `models/zoo/tiny-h3`, whose autoencoders encode and
decode them. Training is `tasks.train.run`, with everything it checks, writes and reads back.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from torch import Tensor

from data.conditions import KEYFRAMES, Variant
from data.latent_index import LatentRow
from data.latent_shards import write_shard
from data.latents import PARTS, SHARED, LatentStore, shard_name, write_index
from data.records import ClipShape
from data.references import Reference
from data.sampler import StepBatch
from data.stage import Stage
from data.world import Half, Kind, scene
from metrics.picture import psnr_db
from metrics.sound import envelope_r, lsd_db
from models import tiny_h3
from models.families import Batch, Condition, Encoders, Family, Frames, Waveform, load_family
from models.loading import read_batch
from models.objective import Losses, Objective, at, guidance_of
from tasks import train
from tasks.base import shrink

ZOO = Path(__file__).parents[1] / "models" / "zoo" / "tiny-h3"
SHAPE = ClipShape(num_frames=22, frame_rate=24, height=32, width=32, sample_rate_hz=8000)
"""Of the shipped model."""
TEXT = ("t2va", "fl2va_first", "fl2va_last", "fl2va", "ref2va.0")
VARIANTS = (*TEXT, "t2va-uncaptioned")
POINTS = 20
"""Of the schedule: 19 forward passes."""
PLACES = tuple((place + 0.5) / 8 for place in range(8))
"""Of the published noise levels, where losses are compared: an even cut through their distribution."""


class Shot(NamedTuple):
    """A scene of the sample world in a store."""

    half: Half
    seed: int
    kind: Kind | None = None
    copies: int = 1
    """Entries that hold it: one clip alone fills a batch of this many noise draws."""
    held_out: bool = False

    @property
    def name(self) -> str:
        """Of its first entry."""
        return f"{self.half}-{self.seed:05d}-0@tiny"


class Sampled(NamedTuple):
    """How near samples come to the clip as the autoencoders give it back."""

    psnr_db: float
    lsd_db: float
    envelope_r: float


def random_model(folder: Path, seed: int) -> Path:
    """The shipped model with a transformer that knows nothing."""
    shutil.copytree(ZOO, folder, ignore=shutil.ignore_patterns("diffusion_pytorch_model.safetensors"))
    for name in ("vae", "audio_vae"):
        shutil.copyfile(
            ZOO / name / "diffusion_pytorch_model.safetensors", folder / name / "diffusion_pytorch_model.safetensors"
        )
    torch.manual_seed(seed)
    tiny_h3.build_transformer().save_pretrained(folder / "transformer")
    return folder


def rendered(shot: Shot) -> tuple[str, Frames, Waveform]:
    """Caption, frames and sound of a scene, drawn as the shipped model's own clips were."""
    drawn = scene(shot.half, shot.seed, float(SHAPE.duration_s), 24, 3 * SHAPE.height, SHAPE.sample_rate_hz, shot.kind)
    return drawn.caption, shrink(drawn.frames_FHWC), drawn.waveform_CT


def arrays_of(encoders: Encoders, shot: Shot, variants: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Arrays of a clip by part; its references are a picture and a video with sound of the next scene."""
    caption, frames_FHWC, waveform_CT = rendered(shot)
    ends = {"first": frames_FHWC[0], "last": frames_FHWC[-1]}
    references: list[Reference] = []
    if "ref2va.0" in variants:
        _, other_FHWC, other_CT = rendered(shot._replace(seed=shot.seed + 1))
        references = [Reference("image", other_FHWC[:1]), Reference("video", other_FHWC, other_CT)]
    text: dict[str, Tensor] = {}
    for variant in (name for name in TEXT if name in variants):
        mode = Variant.parse(variant).mode
        keyframes = [ends[name] for name in KEYFRAMES.get(mode, ())]
        said = encoders.encode_text(mode, caption, keyframes, references if mode == "ref2va" else [], SHAPE)
        text |= {f"text/{variant}/{name}": array for name, array in said.items()}
    seen = encoders.encode_references(references, SHAPE) if references else {}
    return {
        "picture": {
            "video": encoders.encode_picture(frames_FHWC[None])[0],
            **{f"keyframe/{name}": encoders.encode_keyframe(frame) for name, frame in ends.items()},
        },
        "sound": {"audio": encoders.encode_sound(waveform_CT[None], SHAPE)[0]},
        "text": text,
        "references": {f"references/0/{name}": array for name, array in seen.items()},
    }


def write_store(
    folder: Path, encoders: Encoders, shots: Sequence[Shot], variants: Sequence[str] = ("t2va", "t2va-uncaptioned")
) -> LatentStore:
    """Encode scenes into a latent store with its curriculum beside it; groups are the halves of the world."""
    folder.mkdir(parents=True)
    blank = encoders.encode_text("t2va", None)
    parts: dict[str, dict[str, dict[str, Tensor]]] = {part: {} for part in PARTS}
    rows: list[LatentRow] = []
    for shot in shots:
        given = arrays_of(encoders, shot, variants)
        sizes = {name: tuple(array.shape) for arrays in given.values() for name, array in arrays.items()}
        sizes |= {f"text/t2va-uncaptioned/{name}": tuple(array.shape) for name, array in blank.items()}
        layouts = [layout_of(encoders, variant, sizes) for variant in variants]
        for copy in range(shot.copies):
            entry = f"{shot.half}-{shot.seed:05d}-{copy}@tiny"
            for part, arrays in given.items():
                parts[part][entry] = {name: array.clone() for name, array in arrays.items()}
            rows.append(
                LatentRow(
                    entry=entry, clip_id=entry[:-5], source_id=entry[:-5], split="val" if shot.held_out else "train",
                    group=shot.half, canvas="tiny", has_audio=True, variants=tuple(variants), shard="00000",
                    layouts=tuple(key for key, _ in layouts), num_tokens=tuple(count for _, count in layouts),
                    keys=("", "", "", ""), **SHAPE.model_dump(),
                )
            )  # fmt: skip
    for part, entries in parts.items():
        write_shard(folder / shard_name(part, "00000"), entries, dict.fromkeys(entries, ""))
    shared = {f"text/uncaptioned/{name}": array for name, array in blank.items()}
    write_shard(folder / shard_name("text", SHARED), {SHARED: shared}, {SHARED: ""})
    text_of = {variant: encoders.text_of(variant) for variant in variants}
    write_index(folder, rows, {"family": encoders.name, "text_of": text_of})
    trained = [row for row in rows if row.split == "train"]
    columns = {"entry": [row.entry for row in trained], "group": [row.group for row in trained]}
    table = cast(Any, pa).table({**columns, "difficulty": [0.0] * len(trained)})
    cast(Any, parquet).write_table(table, folder / "curriculum.parquet")
    return LatentStore(folder)


def layout_of(encoders: Encoders, variant: str, sizes: Mapping[str, tuple[int, ...]]) -> tuple[str, int]:
    """Layout of a variant, from the sizes of all arrays of its clip."""
    mode = Variant.parse(variant).mode
    conditions = {"text/rows": sizes[f"text/{variant}/rows"]}
    conditions |= {f"keyframe/{name}": sizes[f"keyframe/{name}"] for name in KEYFRAMES.get(mode, ())}
    if mode == "ref2va":
        names = (name for name in sizes if name.startswith("references/0/"))
        conditions |= {name.replace("references/0/", "references/"): sizes[name] for name in names}
    return encoders.layout(SHAPE, mode, conditions)


def stage_of(**changes: Any) -> dict[str, Any]:
    """Settings of a stage: text to picture and sound, nothing of guidance preserved."""
    return {
        "conditions": {"t2va": 1.0}, "num_steps": 250, "batch_size": 4, "learning_rate": 2e-3, "warmup_steps": 10,
        "guidance": {"form": "none"}, **changes,
    }  # fmt: skip


def trained(
    model: Path,
    store: LatentStore,
    folder: Path,
    stages: Mapping[str, Mapping[str, Any]],
    *,
    weights: Path | None = None,
    seed: int = 0,
) -> dict[str, Path]:
    """Train stages in order through the verb; checkpoint folders by name.

    Args:
        model: A diffusers folder.
        store: As `write_store` gives it.
        folder: Gets checkpoints and what runs leave behind.
        stages: Settings by name, in order.
        weights: Of the transformer the first stage starts from, instead of the model's.
        seed: Of the runs.
    """
    config = train.Config(
        seed=seed, base=model, weights=weights, latents=Path(store.folder), checkpoints=folder / "checkpoints",
        curriculum=Path(store.folder) / "curriculum.parquet", work=folder / "work", converted=folder / "converted",
        accelerator="cpu", stages={name: Stage.model_validate(settings) for name, settings in stages.items()},
        strategy="ddp", precision="fp32", recompute="none", micro_batch=64, save_every=100_000,
    )  # fmt: skip
    return {name: train.run(config, name) for name in stages}


def tuned(model: Path, checkpoint: Path | None = None) -> Family:
    """The model with the transformer of a checkpoint."""
    family = load_family(model, weights=checkpoint / "transformer" if checkpoint else None)
    family.transformer.eval()
    return family


def sampled(
    family: Family, store: LatentStore, entry: str, variant: str, seed: int = 1, given: str | None = None
) -> Sampled:
    """Generate an entry and compare; `given` takes the keyframes and references of another one."""
    row, encoders = store.index.find(entry), family.encoders
    arrays = {name: array.clone() for name, array in store.conditions(row, variant).items()}
    if given is not None:
        other = store.conditions(store.index.find(given), variant)
        arrays |= {name: array.clone() for name, array in other.items() if not name.startswith("text/")}
    made = family.generate(Condition(Variant.parse(variant).mode, arrays), SHAPE, seed, POINTS)
    frames_FHWC, waveform_CT = encoders.decode(*made, SHAPE)
    real = encoders.decode(store.read(row, "video").clone(), store.read(row, "audio").clone(), SHAPE)
    pair = real[1], waveform_CT
    rate = encoders.decoded_rate_hz
    scores = psnr_db(real[0], frames_FHWC).mean.value, lsd_db(*pair, rate).value, envelope_r(*pair, rate).value
    return Sampled(*(round(float("nan" if value is None else value), 3) for value in scores))


def batch_of(store: LatentStore, entries: Sequence[str], variant: str, *, bare: bool = False) -> Batch:
    """Some entries of one layout, as training reads them."""
    drawn = StepBatch(0, Variant.parse(variant).mode, tuple(entries), (variant,) * len(entries))
    return read_batch(store, drawn, bare=bare)


@torch.no_grad()
def fixed_loss(family: Family, store: LatentStore, entries: Sequence[str], variant: str) -> float:
    """Loss of picture and sound over the same noise at the same levels, a mean over entries."""
    objective = Objective(family, guidance_of(Stage.model_validate(stage_of()).guidance, family))
    total = 0.0
    for entry in entries:
        batch = batch_of(store, [entry], variant)
        for number, place in enumerate(PLACES):
            levels = at(batch, *family.sigmas(place, place, batch))
            losses: Losses = objective.losses(batch, levels, [(99, number, 0)])
            total += float(losses.video_B + losses.audio_B)
    return total / len(entries) / len(PLACES)


def ended_at(checkpoint: Path, num_rows: int = 40) -> float:
    """Mean training loss of the last steps."""
    import json

    rows = [json.loads(line) for line in (checkpoint / "log.jsonl").read_text().splitlines()][-num_rows:]
    return float(np.mean([row["loss_video"] + row["loss_audio"] for row in rows]))
