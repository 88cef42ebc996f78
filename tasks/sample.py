"""Make the sample corpus: a small world of causes and sounds, real footage, and the awkward files users have.

Example: soundstage sample corpus=data/store/corpus num_new=12 num_base=4
"""

from __future__ import annotations

import json
import shutil
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field, model_validator

from data.files import sha256, whole
from data.records import Frozen

if TYPE_CHECKING:
    from data.world import Half

CHECKOUT = Path(__file__).parent.parent
FOOTAGE = CHECKOUT / "data" / "footage"
RECIPE = ".recipe.json"
"""Hidden file of a corpus that says what made it; it is also the proof that the folder is ours to replace."""
INGREDIENTS = ("data/world.py", "data/awkward.py", "data/media_write.py", "tasks/sample.py", "data/footage")
"""Whatever changes the corpus when it changes."""
FIRST_SCENE = {"new": 0, "base": 500_000, "awkward": 900_000}
"""Scene seeds of the parts start here, so that no part repeats another's scene."""
SEEDS_APART = 1_000_000
"""Scenes of different corpus seeds never meet."""


class Config(Frozen):
    """What the corpus is and where it goes."""

    corpus: Path
    """Folder that is written; an older sample there is replaced, anything else is left alone."""
    seed: int = Field(default=0, ge=0)
    """Seed of every scene, duration and file format."""
    num_new: int = Field(default=72, ge=0)
    """Scenes of the half of the world that fine-tuning moves towards, files."""
    num_base: int = Field(default=24, ge=0)
    """Scenes of the half that the base model knows, files."""
    min_duration_s: float = Field(default=2.0, gt=0)
    """Shortest scene, s."""
    max_duration_s: float = Field(default=3.2, gt=0)
    """Longest scene, s."""

    @model_validator(mode="after")
    def _shortest_first(self) -> Config:
        if self.min_duration_s > self.max_duration_s:
            raise ValueError(
                f"min_duration_s = {self.min_duration_s:g} exceeds max_duration_s = {self.max_duration_s:g}"
            )
        return self


class Format(NamedTuple):
    """How a world scene is stored."""

    suffix: str
    container: Literal["mp4", "mov", "matroska", "webm"]
    video_codec: Literal["libx264", "libvpx-vp9"]
    audio_codec: Literal["aac", "libopus"]
    frame_rate: Fraction
    side_px: int
    sample_rate_hz: int


FORMATS = (
    Format("mp4", "mp4", "libx264", "aac", Fraction(24), 96, 48000),
    Format("mov", "mov", "libx264", "aac", Fraction(25), 112, 44100),
    Format("mkv", "matroska", "libx264", "libopus", Fraction(30), 96, 48000),
    Format("webm", "webm", "libvpx-vp9", "libopus", Fraction(24), 96, 48000),
    Format("mp4", "mp4", "libx264", "aac", Fraction(30000, 1001), 112, 48000),
    Format("mkv", "matroska", "libx264", "aac", Fraction(24), 128, 32000),
    Format("mp4", "mp4", "libx264", "aac", Fraction(25), 96, 44100),
)
"""Formats take turns; seven of them and three kinds of scene meet in every pair."""


def run(config: Config) -> Path:
    """Write the corpus as one folder, whole or not at all, unless the same corpus is already there.

    Raises:
        ValueError: the folder holds something that this verb did not make.
    """
    from tqdm import tqdm

    from data.awkward import awkward

    recipe = recipe_of(config)
    if config.corpus.exists() and any(config.corpus.iterdir()):
        stamp = config.corpus / RECIPE
        if not stamp.is_file():
            raise ValueError(f"sample.corpus = {config.corpus} holds files that `sample` did not make; choose another")
        if stamp.read_text(encoding="utf-8") == recipe:
            return config.corpus
    with whole(config.corpus) as folder:
        parts: list[tuple[Half, int]] = [("new", config.num_new), ("base", config.num_base)]
        with tqdm(total=sum(count for _, count in parts), desc="sample", unit="file", disable=None) as bar:
            for half, count in parts:
                (folder / half).mkdir(parents=True)
                for index in range(count):
                    write_scene(folder / half, half, index, config)
                    bar.update()
        (folder / "awkward").mkdir()
        awkward(folder / "awkward", config.seed * SEEDS_APART + FIRST_SCENE["awkward"])
        shutil.copytree(FOOTAGE, folder / "footage", copy_function=shutil.copyfile)
        (folder / RECIPE).write_text(recipe, encoding="utf-8")
    return config.corpus


def recipe_of(config: Config) -> str:
    """Everything that decides the bytes of the corpus, as JSON."""
    settings = config.model_dump(mode="json", exclude={"corpus"})
    ingredients = {name: sha256(CHECKOUT / name) for name in INGREDIENTS}
    return json.dumps({**settings, **ingredients, "av": version("av")}, indent=1) + "\n"


def write_scene(folder: Path, half: Half, index: int, config: Config) -> Path:
    """Render and encode one scene with its caption beside it."""
    import numpy as np

    from data.media import write_media
    from data.world import KINDS, scene

    seed = config.seed * SEEDS_APART + FIRST_SCENE[half] + index
    form, kind = FORMATS[index % len(FORMATS)], KINDS[index % len(KINDS)]
    duration_s = float(np.random.default_rng(seed).uniform(config.min_duration_s, config.max_duration_s))
    made = scene(half, seed, duration_s, form.frame_rate, form.side_px, form.sample_rate_hz, kind)
    path = folder / f"{index:04d}_{made.kind}.{form.suffix}"
    write_media(
        path,
        made.frames_FHWC,
        made.waveform_CT,
        frame_rate=form.frame_rate,
        sample_rate_hz=form.sample_rate_hz,
        crf=16 if form.video_codec == "libx264" else 22,
        container=form.container,
        video_codec=form.video_codec,
        audio_codec=form.audio_codec,
    )
    path.with_suffix(".txt").write_text(made.caption + "\n", encoding="utf-8")
    return path
