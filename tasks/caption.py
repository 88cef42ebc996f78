"""Let a model write captions for sources that have none, or one that says nothing; `validate.captions` then reads them.

Example: soundstage caption model=Qwen2.5-VL-7B-Instruct endpoint.url=http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field, ValidationError, model_validator

from data import captioner, captions, files
from data.captioner import Captioner, Endpoint, Unanswered, Written
from data.captions import CaptionLimits
from data.engines import Engine, map_ordered
from data.records import Reject, Source
from data.workers import Lost

JPEG_QUALITY = 90
"""Of the frames that are shown; beyond it files grow and nothing is seen better."""
PROMPT = (
    "These are frames of one video, in order. Describe in one or two plain sentences what is seen, who does what, and"
    " how the camera moves. Name no file, add no comment, and do not mention that these are frames."
)


class Config(CaptionLimits):
    """Which captions to write, who writes them, and where they go. The limits say which captions are at fault."""

    manifest: Path
    """Parquet of sources, as `ingest` wrote it."""
    written: Path
    """Parquet of captions to write, in the manifest's order: source, caption, model, hash of what was asked, reason."""
    rejects: Path
    """Parquet of sources that got no caption, each with the reason."""
    by: Literal["endpoint", "local"] = "endpoint"
    """A server that speaks the chat protocol of OpenAI, or a model in a folder (`pip install -e '.[captions]'`)."""
    endpoint: Endpoint = Endpoint()
    """The server."""
    model: str | None = None
    """Name of the model that the server is asked for."""
    model_folder: Path | None = None
    """Folder of a vision-language model in the transformers layout, with safetensors."""
    accelerator: str = "cpu"
    """Of a local model: `auto` (the first there is of CUDA, NPU, CPU), `cpu`, `cuda`, `npu`, or one of several: `cuda:1`."""
    prompt: str = Field(default=PROMPT, min_length=1)
    """What the model is asked, after the frames."""
    num_frames: int = Field(default=4, gt=0)
    """Frames shown, spread evenly over the picture."""
    long_side_px: int = Field(default=512, ge=32)
    """Longest side of a frame shown, px; smaller pictures are not enlarged."""
    max_answer_tokens: int = Field(default=200, gt=0)
    """Longest answer, tokens; two sentences take 60."""
    work: Path = Path("data/store/work/caption")
    """Captions of an interrupted run, which are kept; changes no result."""
    engine: Engine = Engine()
    """How frames are decoded: in child processes with limits."""

    @model_validator(mode="after")
    def _somebody_writes(self) -> Config:
        if self.by == "endpoint" and not self.model:
            raise ValueError("caption.model is not set; name the model that caption.endpoint.url serves")
        if self.by == "local" and self.model_folder is None:
            raise ValueError("caption.model_folder is not set; name a folder with a vision-language model")
        return self


class Look(NamedTuple):
    """One source to be shown."""

    source: Source
    reason: str
    num_frames: int
    long_side_px: int


class Result(NamedTuple):
    """How many captions were written, and how many are still missing."""

    num_written: int
    num_rejected: int


def run(config: Config) -> Result:
    """Write the captions; what was finished before a kill is not asked again.

    Raises:
        RuntimeError: no manifest, no server, no model, a refused key; captions so far are kept.
    """
    if not config.manifest.is_file():
        raise RuntimeError(f"{config.manifest} does not exist; run `soundstage ingest` first")
    name = model_name(config)
    asked = captioner.hash_of(
        config.prompt, config.num_frames, config.long_side_px, JPEG_QUALITY, config.max_answer_tokens
    )
    kept = config.work / f"{captioner.hash_of(name, asked)}.jsonl"
    done = finished(kept)
    rejects = list(write_missing(config, name, asked, kept, done))
    rows = (done[item.source.source_id] for item in looks(config) if item.source.source_id in done)
    num_written = files.write_records(config.written, rows, Written)
    files.write_records(config.rejects, rejects, Reject)
    sys.stderr.write(
        f"{num_written} captions by {name}, {len(rejects)} without; use them: soundstage validate captions={config.written}\n"
    )
    return Result(num_written, len(rejects))


def write_missing(config: Config, name: str, asked: str, kept: Path, done: dict[str, Written]) -> Iterator[Reject]:
    """Ask for every caption that is not in `done`, add it there and to the file `kept`; yields what failed."""
    from tqdm import tqdm

    def missing() -> Iterator[Look]:
        return (item for item in looks(config) if item.source.source_id not in done)

    total = sum(1 for _ in missing())
    if not total:
        return
    ask = writer(config)
    kept.parent.mkdir(parents=True, exist_ok=True)
    shown = map_ordered(frames_of, missing(), config.engine)
    with kept.open("a", encoding="utf-8") as lines:
        pairs = zip(list(missing()), shown, strict=True)
        for look, pictures in tqdm(pairs, total=total, desc="caption", unit="video", disable=None):
            try:
                text = answer(ask, pictures, config)
            except Unanswered as error:
                yield rejected(look.source, str(error))
                continue
            row = Written(
                source_id=look.source.source_id, path=look.source.path, caption=text, model=name, prompt=asked, reason=look.reason
            )  # fmt: skip
            lines.write(row.model_dump_json() + "\n")
            lines.flush()
            done[row.source_id] = row


def looks(config: Config) -> Iterator[Look]:
    """The sources that need a caption, each content once, in the manifest's order."""
    seen: set[str] = set()
    for source in files.iter_records(config.manifest, Source):
        reason = captioner.needs_caption(source, config)
        if source.use != "clip" or source.error is not None or reason is None or source.source_id in seen:
            continue
        seen.add(source.source_id)
        yield Look(source, reason, config.num_frames, config.long_side_px)


def answer(ask: Captioner, pictures: list[bytes] | str | Lost, config: Config) -> str:
    """The caption of some frames.

    Raises:
        Unanswered: there are no frames, no words, or words that say nothing.
    """
    if isinstance(pictures, Lost):
        raise Unanswered(pictures.reason)
    if isinstance(pictures, str):
        raise Unanswered(pictures)
    text = ask(pictures, config.prompt)
    faulty = [item for item in captions.faults(text, config) if config.action(item.fault) in ("default", "reject")]
    if faulty:
        raise Unanswered(f"the model's caption is at fault, {faulty[0].fault}: {faulty[0].measured}")
    return text


def frames_of(look: Look) -> list[bytes] | str:
    """JPEG frames spread over the picture, or why there are none; runs in a child process."""
    import cv2

    from data.media import iter_frames
    from data.media_open import Unreadable
    from data.remote import local

    source = look.source
    scale = min(1.0, look.long_side_px / max(source.width, source.height, 1))
    height, width = (max(round(side * scale), 1) for side in (source.height, source.width))
    times = [(number + 0.5) * source.video_duration_s / look.num_frames for number in range(look.num_frames)]
    found: list[bytes] = []
    try:
        for seconds, picture_HWC in iter_frames(local(source.path), height, width):
            while len(found) < len(times) and seconds >= times[len(found)]:
                bgr = cv2.cvtColor(picture_HWC, cv2.COLOR_RGB2BGR)
                found.append(cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1].tobytes())
            if len(found) == len(times):
                break
    except (Unreadable, OSError, ValueError) as error:
        return str(error)
    return found or "no frame was decoded"


def writer(config: Config) -> Captioner:
    """Whoever writes."""
    if config.by == "endpoint":
        return captioner.EndpointCaptioner(config.endpoint, config.model or "", config.max_answer_tokens)
    assert config.model_folder is not None
    from models.accelerators import device_of

    device = device_of(config.accelerator, "caption.accelerator")
    return captioner.LocalCaptioner(config.model_folder, config.max_answer_tokens, str(device))


@functools.cache
def weights_of(folder: Path) -> str:
    """First 12 hex digits of the hash over a model's folder."""
    return files.sha256(folder)[:12]


def model_name(config: Config) -> str:
    """What is recorded beside every caption: the server's name for the model, or folder and hash of its content."""
    if config.by == "endpoint" or config.model_folder is None:
        return config.model or ""
    if not config.model_folder.is_dir():
        raise RuntimeError(f"caption.model_folder = {config.model_folder} does not exist; download a model there first")
    return f"{config.model_folder.name}@{weights_of(config.model_folder)}"


def finished(kept: Path) -> dict[str, Written]:
    """Captions of an interrupted run; a line that a kill has torn is written anew."""
    if not kept.is_file():
        return {}
    done: dict[str, Written] = {}
    whole: list[str] = []
    for line in kept.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = Written.model_validate(json.loads(line))
        except (json.JSONDecodeError, ValidationError):
            continue
        done[row.source_id] = row
        whole.append(line)
    files.write_text(kept, "".join(line + "\n" for line in whole))
    return done


def rejected(source: Source, reason: str) -> Reject:
    """A source that got no caption."""
    return Reject(
        item=source.source_id,
        path=source.path,
        verb="caption",
        rule="caption.answer",
        measured=reason,
        limit="a caption",
    )
