"""Train the tiny base model from nothing, on the base half of the sample world only.

example: soundstage base transformer.num_steps=200 picture_steps=[50,50] sound_steps=[50,50] output=/tmp/tiny-h3
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field

from data.files import remove, sha256, whole, write_text
from data.records import ClipShape, Frozen
from data.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Generator, Tensor

    from data.conditions import Mode
    from data.latents import Arrays
    from models.families import Encoders, Frames, Waveform

HELD_OUT_SEED, AUTOENCODER_SEED, TRANSFORMER_SEED = 900, 1000, 20_000
"""First scene seeds of disjoint ranges: measured on, autoencoders trained on, transformer trained on."""


class Config(Frozen):
    """Settings of the base verb."""

    output: Path
    """Where the model goes, a diffusers folder."""
    shape: ClipShape
    """What one clip is."""
    seed: int = 0
    """Decides initial weights, batches and noise."""
    num_scenes: int = Field(default=256, gt=0)
    """Scenes the autoencoders are trained on, rendered in memory."""
    picture_steps: tuple[int, int] = (1800, 1400)
    """Optimiser updates of the picture autoencoder, 4 clips each, in two cosine cycles."""
    sound_steps: tuple[int, int] = (1700, 1100)
    """Optimiser updates of the sound autoencoder, 12 quarter-seconds each: sounds as they are, then other chords."""
    num_clips: int = Field(default=512, gt=0)
    """Clips the transformer is trained on."""
    transformer: Stage
    """How the transformer is trained, as a curriculum stage."""
    work: Path = Path("data/store/work/base")
    """Finished parts of an interrupted run."""


def run(config: Config) -> Path:
    """Train picture autoencoder, sound autoencoder and transformer; returns the model's folder.

    About an hour on one core; a killed run continues at the last finished part or saved state.
    """
    from models import tiny_h3
    from models.threads import use_one_thread

    use_one_thread()
    work = config.work / str(config.seed)
    model = work / "model"
    if not (model / "recipe.json").is_file():
        autoencoders = train_autoencoders(config, work)
        with whole(model) as temporary:
            tiny_h3.save(autoencoders["parts"], temporary)
            recipe = {
                "settings": config.model_dump(mode="json", exclude={"output", "work"}),
                **autoencoders["measured"],
            }
            write_text(temporary / "recipe.json", json.dumps(recipe, indent=1, sort_keys=True) + "\n")
    latents = work / "latents"
    if not (latents / "fingerprint.json").is_file():
        encode_world(config, model, latents)
    train_transformer(config, model, latents, work)
    with whole(config.output) as temporary:
        copy_tree(model, temporary, without="transformer")
        copy_tree(work / "transformer" / "transformer", temporary / "transformer")
    remove(work)
    return config.output


def train_autoencoders(config: Config, work: Path) -> dict[str, Any]:
    """All parts, with trained autoencoders, and what they reach on clips never seen."""
    import torch

    from data.world import LAWFUL
    from models import autoencoder_training as training
    from models import tiny_h3

    parts = tiny_h3.build(config.seed)
    shape = config.shape
    pool = training.make_pool(config.num_scenes, AUTOENCODER_SEED, shape.num_frames, shape.height, shape.sample_rate_hz)
    chords = training.make_sounds(2 * config.num_scenes, AUTOENCODER_SEED, shape.num_frames, shape.sample_rate_hz)

    def picture(generator: Generator) -> Tensor:
        return training.picture_loss(parts["vae"], pool, generator, 4)

    def sounds_as_they_are(generator: Generator) -> Tensor:
        return training.sound_loss(parts["audio_vae"], pool.audio_NCT, generator, 6)

    def other_chords(generator: Generator) -> Tensor:
        return training.sound_loss(parts["audio_vae"], chords, generator, 6)

    plan: dict[str, list[tuple[Callable[[Generator], Tensor], int, float]]] = {
        "vae": list(zip((picture, picture), config.picture_steps, (2e-3, 1.5e-3), strict=True)),
        "audio_vae": list(zip((sounds_as_they_are, other_chords), config.sound_steps, (3e-3, 3e-3), strict=True)),
    }
    for name, cycles in plan.items():
        done = [name]
        for cycle, (loss_of, num_steps, learning_rate) in enumerate(cycles):
            done.append(str(num_steps))
            folder = work / "-".join(done)
            if folder.is_dir():
                parts[name] = cast(Any, type(parts[name])).from_pretrained(folder).eval()
                continue
            training.train(parts[name], loss_of, num_steps, learning_rate, config.seed + 1 + cycle)
            with whole(folder) as temporary:
                parts[name].save_pretrained(temporary)
        with torch.no_grad():
            sounds = chords[:64].flatten(0, 1)[:, None]
            pixels = training.normalise_pixels(pool.video_NCFHW[:32])
            encoded = parts[name].encode(pixels if name == "vae" else sounds).latent_dist.mode()
        training.set_latent_statistics(parts[name], [encoded])
    halves = {
        f"reconstruction_{half}": training.measure(
            parts["vae"],
            parts["audio_vae"],
            training.make_pool(16, HELD_OUT_SEED, shape.num_frames, shape.height, shape.sample_rate_hz, half, LAWFUL),
        )
        for half in ("base", "new")
    }
    return {"parts": parts, "measured": halves}


def encode_world(config: Config, model: Path, latents: Path) -> None:
    """Encode base scenes into a latent store, as `encode` does with files."""
    from tqdm import tqdm

    from data.latent_index import LatentRow
    from data.latent_shards import write_shard
    from data.latents import PARTS, shard_name, write_index
    from models.families import load_encoders

    modes: tuple[Mode, ...] = ("t2va", "fl2va_first", "fl2va")
    encoders = load_encoders(model)
    encoders.check(config.shape)
    parts: dict[str, dict[str, Arrays]] = {part: {} for part in PARTS[:3]}
    rows: list[LatentRow] = []
    for index in tqdm(range(config.num_clips), desc="encode", unit="clip", disable=None):
        caption, frames, waveform = base_clip(config.shape, index)
        entry = f"base-{index:05d}@tiny"
        latents_of, text = encoded(encoders, config.shape, caption, frames, waveform, modes)
        for part, arrays in latents_of.items():
            parts[part][entry] = arrays
        laid = [
            encoders.layout(config.shape, mode, {name: array.shape for name, array in text[mode].items()})
            for mode in modes
        ]
        rows.append(
            LatentRow(
                entry=entry, clip_id=entry[:-5], source_id=entry[:-5], split="train", group="base", canvas="tiny",
                has_audio=True, **config.shape.model_dump(), variants=modes, layouts=tuple(key for key, _ in laid),
                num_tokens=tuple(num for _, num in laid), shard="00000", keys=("", "", "", ""),
            )
        )  # fmt: skip
    with whole(latents) as temporary:
        temporary.mkdir()
        for part, entries in parts.items():
            write_shard(temporary / shard_name(part, "00000"), entries, dict.fromkeys(entries, ""))
        record = {"model": sha256(model), "num_clips": config.num_clips, "text_of": {mode: mode for mode in modes}}
        write_index(temporary, rows, record)


def base_clip(shape: ClipShape, index: int) -> tuple[str, Frames, Waveform]:
    """Caption, frames and sound of a base scene.

    Clips are cut from longer sources, so two thirds start in the middle of things, with earlier sounds still ringing.
    """
    from data.world import scene

    length_s = float(shape.duration_s * (index % 3 + 1))
    seen = scene("base", TRANSFORMER_SEED + index, length_s, shape.frame_rate, 3 * shape.height, shape.sample_rate_hz)
    return seen.caption, shrink(seen.frames_FHWC[-shape.num_frames :]), seen.waveform_CT[:, -shape.num_samples :]


def encoded(
    encoders: Encoders,
    shape: ClipShape,
    caption: str,
    frames_FHWC: Frames,
    waveform_CT: Waveform,
    modes: Sequence[Mode],
) -> tuple[dict[str, Arrays], dict[str, Arrays]]:
    """Arrays of a clip by part of the store, and what the model is given of it by mode."""
    from data.conditions import KEYFRAMES

    ends = {"first": frames_FHWC[0], "last": frames_FHWC[-1]}
    keyframes = {f"keyframe/{name}": encoders.encode_keyframe(frame) for name, frame in ends.items()}
    parts: dict[str, Arrays] = {
        "picture": {"video": encoders.encode_picture(frames_FHWC[None])[0], **keyframes},
        "sound": {"audio": encoders.encode_sound(waveform_CT[None], shape)[0]},
        "text": {},
    }
    given: dict[str, Arrays] = {}
    for mode in modes:
        names = KEYFRAMES.get(mode, ())
        text = encoders.encode_text(mode, caption, [ends[name] for name in names])
        parts["text"] |= {f"text/{mode}/{name}": array for name, array in text.items()}
        own = {f"keyframe/{name}": keyframes[f"keyframe/{name}"] for name in names}
        given[mode] = {f"text/{name}": array for name, array in text.items()} | own
    return parts, given


def shrink(frames_FHWC: Frames) -> Frames:
    """Frames at a third of their size, by area, as files are resized."""
    import cv2
    import numpy as np

    size = frames_FHWC.shape[1] // 3
    resize = cast("Callable[..., Frames]", cv2.resize)
    return np.stack([resize(frame, (size, size), interpolation=cv2.INTER_AREA) for frame in frames_FHWC])


def train_transformer(config: Config, model: Path, latents: Path, work: Path) -> None:
    """Train the transformer from random weights with the code that fine-tunes it."""
    from data.candidates import candidates_of
    from data.latents import LatentStore
    from data.sampler import Sampler
    from models.families import load_family
    from models.sft import SupervisedFineTuning
    from tasks import training

    if (work / "transformer" / "checkpoint.json").is_file():
        return
    stage, store = config.transformer, LatentStore(latents)
    family = load_family(model)
    sampler = Sampler(candidates_of(store.index), stage, config.seed)
    module = SupervisedFineTuning(family, stage, config.seed)
    identity = {"stage": stage.model_dump(mode="json"), "seed": config.seed, "latents": store.fingerprint}
    training.fit(module, sampler, store, work / "states", identity, save_every=250)
    training.write_checkpoint(work / "transformer", family, module, identity)


def copy_tree(source: Path, target: Path, *, without: str = "") -> None:
    """Copy a folder, except one of its parts."""
    import shutil

    shutil.copytree(source, target, ignore=shutil.ignore_patterns(without) if without else None, dirs_exist_ok=True)
