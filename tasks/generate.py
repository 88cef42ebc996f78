"""Generate videos with their stereo sound, from text, a first or last frame or both, frames in between, or ordered references.

example: soundstage generate prompt="a pink box bounces in a teal pool and each bounce rings a warm chime"
example: soundstage generate first_frame=start.png last_frame=end.png prompt="a cat lands" output=out
example: soundstage generate last_frame=end.png prompt="a cat lands"
example: soundstage generate base=LTX-2 checkpoint=null keyframes.24=middle.png prompt="a cat lands" 'shape={num_frames: 121, frame_rate: 24, height: 512, width: 768, sample_rate_hz: 16000}'
example: soundstage generate references="[face.png, walk.mp4, voice.wav]" prompt="she walks and says hello"
example: soundstage generate weights=minimax_h3_fl2va_bf16.safetensors checkpoint=null prompt="a cat lands"
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field, model_validator
from tqdm import tqdm

from data.conditions import Mode, keyframe_at, mode_of
from data.files import read_records, sha256, whole, write_text
from data.records import Clip, ClipShape, Frozen

if TYPE_CHECKING:
    from data.references import Reference
    from models.families import Frames
    from models.generation import Generation, Generator


class Request(Frozen):
    """One video to generate."""

    name: str = Field(pattern=r"^[\w-]+$")
    """File name of the result, without ending."""
    prompt: str = Field(min_length=1)
    """What to show and to let hear."""
    first_frame: Path | None = None
    """Image that the video starts with."""
    last_frame: Path | None = None
    """Image that it ends with."""
    keyframes: dict[int, Path] = {}
    """Images by the frame that shows them, counted from 0."""
    references: tuple[Path, ...] = ()
    """Images, videos and sounds that it takes after, in an order that carries meaning; not with any keyframe."""

    @model_validator(mode="after")
    def _one_kind(self) -> Request:
        refuse_both(self)
        return self


class Config(Frozen):
    """Settings of the generate verb."""

    base: Path
    """Base model, a diffusers folder."""
    checkpoint: Path | None = None
    """Checkpoint folder that `train` wrote; null generates with the base model."""
    weights: Path | None = None
    """Transformer weights instead of those in base: a diffusers folder, an original .safetensors file (converted on
    first use) or a folder of its released shards; needs checkpoint=null."""
    qkv_layout: Literal["stacked", "interleaved"] | None = None
    """Row order of fused q/k/v in original MiniMax-H3 weights; null takes `stacked` for a file, as published ones are,
    and `interleaved` for released shards. A file merged from the shards by hand is `interleaved`."""
    converted: Path = Path("data/store/work/converted")
    """Folder that converted weights are kept in."""
    adapter: Path | None = None
    """Adapter file (.safetensors) that `train` wrote, put on top of the transformer."""
    splits: Path
    """Splits of the corpus: without a prompt, prompts and keyframes come from its first held-out clips."""
    generations: Path
    """Folder that the videos go to."""
    shape: ClipShape
    """Frames, size and rates of the result."""
    seed: int = 0
    """Decides the noise; same seed, same bytes."""
    num_inference_steps: int = Field(default=20, ge=2)
    """Points of the noise schedule; 20 points are 19 evaluations."""
    learned_group: str = "new"
    """Group whose held-out clips are demonstrated on first."""
    prompt: str | None = Field(default=None, min_length=1)
    """What to generate; null demonstrates every conditioning mode on held-out clips."""
    first_frame: Path | None = None
    """Image that the video starts with."""
    last_frame: Path | None = None
    """Image that it ends with."""
    keyframes: dict[int, Path] = {}
    """Images by the frame that shows them, counted from 0: `keyframes.24=middle.png`; of LTX-2 alone."""
    references: tuple[Path, ...] = ()
    """Images, videos and sounds that it takes after, in an order that carries meaning; not with any keyframe."""
    output: Path | None = None
    """Folder for the result of `prompt`; default `data/store/work/generate`, so that a trial never touches a tracked folder."""
    accelerator: str = "cpu"
    """`auto` (the first there is of CUDA, NPU, CPU), `cpu`, `cuda`, `npu`, or one of several: `cuda:1`."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> Config:
        names = ("first_frame", "last_frame", "keyframes", "references", "output")
        given = [name for name in names if getattr(self, name)]
        if given and self.prompt is None:
            raise ValueError(f"{' and '.join(given)} without a prompt; set prompt too")
        refuse_both(self)
        last = self.shape.num_frames - 1
        if outside := [frame for frame in self.keyframes if not 0 <= frame <= last]:
            raise ValueError(
                f"keyframes.{outside[0]}: the clip has no frame {outside[0]}; shape.num_frames = {self.shape.num_frames}"
                f" gives frames 0 to {last}"
            )
        if self.weights is not None and self.checkpoint is not None:
            raise ValueError("weights and checkpoint both say which transformer; set checkpoint=null for the weights")
        return self


def refuse_both(given: Request | Config) -> None:
    """Raise ValueError where keyframes and references are given, or two images for the first frame."""
    if given.references and (given.first_frame or given.last_frame or given.keyframes):
        raise ValueError(
            "first_frame, last_frame or keyframes and references cannot be given together; leave one kind out"
        )
    if given.first_frame and 0 in given.keyframes:
        raise ValueError("first_frame and keyframes.0 are the same frame; leave one out")


def run(config: Config) -> list[Path]:
    """Write one mp4 a request, with a `.json` beside it that says how it was made; returns the videos.

    Raises:
        RuntimeError: no model, no transformer for what is given, or no held-out clip to demonstrate on.
        ValueError: a file that is given cannot be used, or the shape is not on the family's grid.
    """
    from data.media import write_mp4
    from models.threads import use_one_thread

    use_one_thread()
    requests = demonstrations(config) if config.prompt is None else [asked(config, config.prompt)]
    target = config.generations if config.prompt is None else config.output or Path("data/store/work/generate")
    generator, transformer = loaded(config, [given.mode for _, given in requests])
    facts: dict[str, object] = {"seed": config.seed, "num_inference_steps": config.num_inference_steps}
    facts["weights_sha256"] = sha256(transformer)
    if config.adapter is not None:
        facts["adapter_sha256"] = sha256(config.adapter)
    made: list[str] = []
    with whole(target) as temporary:
        temporary.mkdir()
        for request, given in tqdm(requests, desc="generate", unit="video", disable=None):
            frames, waveform = generated(generator, request, given, config)
            video = temporary / f"{request.name}.mp4"
            write_mp4(video, frames, waveform, config.shape.frame_rate, config.shape.sample_rate_hz)
            unused = {name for name in ("keyframes", "references") if not getattr(request, name)}
            said = request.model_dump(mode="json", exclude=unused)
            record = {"request": said, **facts}
            write_text(video.with_suffix(".json"), json.dumps(record, indent=1, sort_keys=True) + "\n")
            made.append(video.name)
    return [target / name for name in made]


def loaded(config: Config, modes: Sequence[Mode]) -> tuple[Generator, Path]:
    """The generator that serves these modes, and the folder of its transformer.

    Raises:
        RuntimeError: no model, or no transformer for one of the modes.
        ValueError: two transformers serve the modes, or checkpoint, weights or adapter are not of the one that does.
    """
    from models.accelerators import device_of
    from models.families.partitions import partition_for
    from models.families.single_file import weights_folder
    from models.generation import Generator

    partition, weights = partition_for(config.base, modes), None
    if config.weights is not None:
        weights = weights_folder(config.weights, config.base, config.converted, partition, config.qkv_layout)
    generator = Generator.load(
        config.base,
        config.checkpoint,
        config.shape,
        device=str(device_of(config.accelerator, "generate.accelerator")),
        partition=partition,
        weights=weights,
        adapter=config.adapter,
    )
    return generator, config.checkpoint / "transformer" if config.checkpoint else weights or config.base / partition


class Given(NamedTuple):
    """What a request names, read."""

    first: Frames | None = None
    last: Frames | None = None
    references: Sequence[Reference] = ()
    keyframes: Mapping[int, Frames] = {}  # a NamedTuple's default, never written to

    @property
    def mode(self) -> Mode:
        """Of conditioning."""
        placed = [(keyframe_at(frame), image) for frame, image in sorted(self.keyframes.items())]
        named = [("first", self.first), *placed, ("last", self.last)]
        names = tuple(name for name, image in named if image is not None)
        return mode_of(names, references=bool(self.references))


def asked(config: Config, prompt: str) -> tuple[Request, Given]:
    """The request of the settings, and the files that it names.

    Raises:
        ValueError: a file cannot be read; the message names it.
    """
    name = re.sub(r"\W+", "-", prompt)[:60].strip("-") or "generation"
    paths = {name: getattr(config, name) for name in ("first_frame", "last_frame", "keyframes", "references")}
    first, last = (None if path is None else read_image(path) for path in (config.first_frame, config.last_frame))
    references = [read_reference(path, config.shape) for path in config.references]
    keyframes = {frame: read_image(path) for frame, path in config.keyframes.items()}
    return Request.model_validate({"name": name, "prompt": prompt, **paths}), Given(first, last, references, keyframes)


def generated(generator: Generator, request: Request, given: Given, config: Config) -> Generation:
    """One generation.

    Raises:
        ValueError: the family does not take these references or keyframes.
    """
    try:
        return generator.generate(
            [request.prompt],
            first=[None if given.first is None else fit(given.first, config.shape)],
            last=[None if given.last is None else fit(given.last, config.shape)],
            references=[given.references],
            keyframes=[{frame: fit(image, config.shape) for frame, image in given.keyframes.items()}],
            seed=config.seed,
            num_inference_steps=config.num_inference_steps,
        )[0]
    except ValueError as error:
        if not request.references:
            raise
        raise ValueError(f"references {', '.join(map(str, request.references))}: {error}") from error


def demonstrations(config: Config) -> list[tuple[Request, Given]]:
    """One request a mode on the first held-out clips, with keyframes from the real thing."""
    from data.clips import read

    clips = sorted(
        read_records(config.splits / "test.parquet", Clip),
        key=lambda clip: (clip.group != config.learned_group, clip.clip_id),
    )
    if not clips:
        raise RuntimeError(f"no clip in {config.splits / 'test.parquet'}; pass prompt=… or run `soundstage split`")
    chosen = [clips[index % len(clips)] for index in (0, 1, 2)]
    result: list[tuple[Request, Given]] = []
    for clip, (name, num_keyframes) in zip(
        chosen, (("text", 0), ("first-frame", 1), ("first-and-last-frame", 2)), strict=True
    ):
        frames, _ = read(clip, config.shape)
        ends = Given(frames[0] if num_keyframes > 0 else None, frames[-1] if num_keyframes > 1 else None)
        result.append((Request(name=name, prompt=clip.caption), ends))
    return result


def read_image(path: Path) -> Frames:
    """An image file as (H, W, 3), upright.

    Raises:
        ValueError: the file is missing, cut short or no image.
    """
    import numpy as np
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            return np.array(ImageOps.exif_transpose(image).convert("RGB"))
    except OSError as error:
        raise ValueError(f"keyframe {path}: not a readable image ({error})") from error


def read_reference(path: Path, shape: ClipShape) -> Reference:
    """A picture, video or sound file as a reference, at the rates of `shape` and as long as it at most.

    Raises:
        ValueError: the file is missing or does not decode.
    """
    from data.media import Unreadable
    from data.references import of_path, read

    try:
        return read(of_path(str(path)), shape)
    except (Unreadable, OSError) as error:
        raise ValueError(f"reference {path}: {error}") from error


def fit(frame: Frames, shape: ClipShape) -> Frames:
    """Crop to the clip's aspect around the centre and resize by area."""
    import numpy as np
    from PIL import Image, ImageOps

    return np.array(ImageOps.fit(Image.fromarray(frame), (shape.width, shape.height), Image.Resampling.BOX))
