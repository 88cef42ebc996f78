"""Generate videos with their stereo sound, from text, a first frame, or a first and a last frame.

example: soundstage generate prompt="a pink box bounces in a teal pool and each bounce rings a warm chime"
example: soundstage generate first_frame=start.png last_frame=end.png prompt="a cat lands" output=out
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, model_validator
from tqdm import tqdm

from data.files import read_records, sha256, whole, write_text
from data.records import Clip, ClipShape, Frozen

if TYPE_CHECKING:
    from models.families import Frames


class Request(Frozen):
    """One video to generate."""

    name: str = Field(pattern=r"^[\w-]+$")
    """File name of the result, without ending."""
    prompt: str = Field(min_length=1)
    """What to show and to let hear."""
    first_frame: Path | None = None
    """Image that the video starts with."""
    last_frame: Path | None = None
    """Image that it ends with; needs a first frame."""

    @model_validator(mode="after")
    def _last_needs_first(self) -> Request:
        if self.last_frame is not None and self.first_frame is None:
            raise ValueError("last_frame needs first_frame")
        return self


class Config(Frozen):
    """Settings of the generate verb."""

    base: Path
    """Base model, a diffusers folder."""
    checkpoint: Path | None = None
    """Checkpoint folder that `train` wrote; null generates with the base model."""
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
    """Image that it ends with; needs a first frame."""
    output: Path | None = None
    """Folder for the result of `prompt`; default `data/store/work/generate`, so that a trial never touches a tracked folder."""
    accelerator: str = "cpu"
    """Torch device, e.g. `cuda`."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> Config:
        given = [name for name in ("first_frame", "last_frame", "output") if getattr(self, name) is not None]
        if given and self.prompt is None:
            raise ValueError(f"{' and '.join(given)} without a prompt; set prompt too")
        if self.last_frame is not None and self.first_frame is None:
            raise ValueError("last_frame needs first_frame")
        return self


def run(config: Config) -> list[Path]:
    """Write one mp4 a request, with a `.json` beside it that says how it was made; returns the videos.

    Raises:
        RuntimeError: no model, or no held-out clip to demonstrate on.
        ValueError: an image cannot be read, or the shape is not on the family's grid.
    """
    from data.media import write_mp4
    from models.generation import Generator
    from models.threads import use_one_thread

    use_one_thread()
    if config.prompt is None:
        requests = demonstrations(config)
        target = config.generations
    else:
        name = re.sub(r"\W+", "-", config.prompt)[:60].strip("-") or "generation"
        keyframes = [None if path is None else read_image(path) for path in (config.first_frame, config.last_frame)]
        requests = [
            (
                Request(name=name, prompt=config.prompt, first_frame=config.first_frame, last_frame=config.last_frame),
                keyframes,
            )
        ]
        target = config.output or Path("data/store/work/generate")
    generator = Generator.load(config.base, config.checkpoint, config.shape, device=config.accelerator)
    made: list[str] = []
    with whole(target) as temporary:
        temporary.mkdir()
        for request, (first, last) in tqdm(requests, desc="generate", unit="video", disable=None):
            frames, waveform = generator.generate(
                [request.prompt],
                first=[fit(first, config.shape)],
                last=[fit(last, config.shape)],
                seed=config.seed,
                num_inference_steps=config.num_inference_steps,
            )[0]
            video = temporary / f"{request.name}.mp4"
            write_mp4(video, frames, waveform, config.shape.frame_rate, config.shape.sample_rate_hz)
            record = {
                "request": request.model_dump(mode="json"),
                "seed": config.seed,
                "num_inference_steps": config.num_inference_steps,
                "weights_sha256": sha256(
                    config.checkpoint / "transformer" if config.checkpoint else config.base / "transformer"
                ),
            }
            write_text(video.with_suffix(".json"), json.dumps(record, indent=1, sort_keys=True) + "\n")
            made.append(video.name)
    return [target / name for name in made]


def demonstrations(config: Config) -> list[tuple[Request, list[Frames | None]]]:
    """One request a mode on the first held-out clips, with keyframes from the real thing."""
    from data.clips import read

    clips = sorted(
        read_records(config.splits / "test.parquet", Clip),
        key=lambda clip: (clip.group != config.learned_group, clip.clip_id),
    )
    if not clips:
        raise RuntimeError(f"no clip in {config.splits / 'test.parquet'}; pass prompt=… or run `soundstage split`")
    chosen = [clips[index % len(clips)] for index in (0, 1, 2)]
    result: list[tuple[Request, list[Frames | None]]] = []
    for clip, (name, num_keyframes) in zip(
        chosen, (("text", 0), ("first-frame", 1), ("first-and-last-frame", 2)), strict=True
    ):
        frames, _ = read(clip, config.shape)
        ends: list[Frames | None] = [
            frames[0] if num_keyframes > 0 else None,
            frames[-1] if num_keyframes > 1 else None,
        ]
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


def fit(frame: Frames | None, shape: ClipShape) -> Frames | None:
    """Crop to the clip's aspect around the centre and resize by area."""
    import numpy as np
    from PIL import Image, ImageOps

    if frame is None:
        return None
    return np.array(ImageOps.fit(Image.fromarray(frame), (shape.width, shape.height), Image.Resampling.BOX))
