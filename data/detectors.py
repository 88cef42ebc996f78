"""Columns of clips that need networks: faces, text, quality of speech. Their weights lie in wheels; nothing is fetched.

H height, W width, C channel, T sample.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import cv2
import numpy as np
from numpy.typing import NDArray

from data.records import Clip, ClipShape, Source

Detector = Literal["faces", "text", "dnsmos"]
PACKAGES: dict[Detector, tuple[str, str]] = {
    "faces": ("facenet_pytorch", "pip install --no-deps facenet-pytorch"),
    "text": ("rapidocr_onnxruntime", "pip install --no-deps rapidocr-onnxruntime"),
    "dnsmos": ("speechmos", "pip install --no-deps speechmos"),
}
"""Where each one's weights are, and how to get them: two of the wheels pin old libraries that they do not need."""
NUM_LOOKED_AT, LOOKED_AT_PX = 3, 640
"""Frames of a clip that faces and text are looked for in, and their long side: a face 20 px high is found."""
FACE_CHANCES = (0.6, 0.7, 0.9)
"""Least chance of a face in the three stages; the last is raised from 0.7, at which foliage had faces."""
TEXT_CHANCE = 0.3
"""Least chance that a pixel is text. Source: PaddleOCR's default for this network."""
MIN_SPEECH = 0.2
"""Share of a clip that must be speech for its quality to mean anything."""
SPEECH_HZ, SPEECH_SAMPLES = 16000, 144160
"""Rate and length that the network hears: 9.01 s; a shorter clip is repeated. Source: DNS Challenge, dnsmos_local.py."""
OVERALL = (-0.06766283, 1.11546468, 0.04602535)
"""Polynomial from the network's answer to the overall score. Source: likewise, P.835 without personalisation."""


def require(names: Sequence[Detector]) -> None:
    """See that the weights of all are there.

    Raises:
        RuntimeError: one is not installed; the message says how to get it.
    """
    for name in names:
        package, remedy = PACKAGES[name]
        if importlib.util.find_spec(package) is None:
            raise RuntimeError(f"cut.detectors has {name}, whose weights are not installed; get them: {remedy}")


def columns(clip: Clip, source: Source, names: Sequence[Detector]) -> dict[str, float | int | None]:
    """The columns that the detectors fill."""
    found: dict[str, float | int | None] = {}
    if "faces" in names or "text" in names:
        pictures = looked_at(clip, source)
        if "faces" in names:
            found["num_faces"] = max(num_faces(picture) for picture in pictures)
        if "text" in names:
            found["text_share"] = round(float(np.mean([text_share(picture) for picture in pictures])), 4)
    if "dnsmos" in names and clip.has_audio and (clip.speech_share or 0) >= MIN_SPEECH:
        found["dnsmos"] = round(dnsmos(heard(clip)), 3)
    return found


def looked_at(clip: Clip, source: Source) -> NDArray[np.uint8]:
    """Frames (F, H, W, C) spread over the clip."""
    from data.media_picture import read_pictures
    from data.remote import local

    scale = min(1.0, LOOKED_AT_PX / max(source.width, source.height, 1))
    shape = ClipShape(
        num_frames=NUM_LOOKED_AT,
        frame_rate=max(1, round(NUM_LOOKED_AT / (clip.end_s - clip.start_s))),
        height=max(1, round(source.height * scale)),
        width=max(1, round(source.width * scale)),
    )
    return read_pictures(local(clip.path), clip.start_s, clip.end_s, [shape])[0][0]


def heard(clip: Clip) -> NDArray[np.float32]:
    """The clip's sound, one channel at 16 kHz, (T,)."""
    from data import media
    from data.remote import local

    length_s = clip.end_s - clip.start_s
    shape = ClipShape(num_frames=max(1, int(length_s)), frame_rate=1, height=16, width=16, sample_rate_hz=SPEECH_HZ)
    if length_s < 1:
        shape = ClipShape(num_frames=1, frame_rate=max(1, round(1 / length_s)), sample_rate_hz=SPEECH_HZ)
    sound = None if clip.sound_path is None else local(clip.sound_path)
    return media.read_clip(local(clip.path), clip.start_s, clip.end_s, shape, sound)[1].mean(axis=0)


def folder(name: Detector) -> Path:
    """Where a detector's package lies; it is not imported, since importing would ask for what it pins."""
    spec = importlib.util.find_spec(PACKAGES[name][0])
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@functools.cache
def session(path: Path) -> Any:
    """An ONNX network on one thread: workers are processes."""
    import onnxruntime

    options = cast(Any, onnxruntime).SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return cast(Any, onnxruntime).InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def text_share(picture_HWC: NDArray[np.uint8]) -> float:
    """Share of the picture that is text, by PaddleOCR's detector (differentiable binarisation, arXiv 1911.08947)."""
    height, width = (max(32, round(side / 32) * 32) for side in picture_HWC.shape[:2])
    resized = cv2.resize(picture_HWC, (width, height)).astype(np.float32)
    batch = (resized / 127.5 - 1).transpose(2, 0, 1)[None]
    chance = session(folder("text") / "models" / "ch_PP-OCRv4_det_infer.onnx").run(None, {"x": batch})[0]
    return float((chance[0, 0] > TEXT_CHANCE).mean())


@functools.cache
def face_finder() -> Any:
    """MTCNN (arXiv 1604.02878) with the weights of its wheel."""
    import torch

    torch.set_num_threads(1)
    package = importlib.import_module(PACKAGES["faces"][0])  # by name: a type checker seldom has it
    return package.MTCNN(keep_all=True, thresholds=list(FACE_CHANCES), post_process=False, device="cpu")


def num_faces(picture_HWC: NDArray[np.uint8]) -> int:
    """Faces in the picture."""
    if min(picture_HWC.shape[:2]) < 32:  # smaller ones give the first stage nothing to slide over
        return 0
    boxes = face_finder().detect(picture_HWC)[0]
    return 0 if boxes is None else len(boxes)


def dnsmos(sound_T: NDArray[np.float32]) -> float:
    """Overall quality of speech at 16 kHz, 1–5 (DNSMOS P.835, arXiv 2110.01763), mean over windows a second apart."""
    sound = np.clip(sound_T, -1, 1).astype(np.float32)
    while len(sound) < SPEECH_SAMPLES:
        sound = np.concatenate([sound, sound])
    count = int(len(sound) // SPEECH_HZ - SPEECH_SAMPLES / SPEECH_HZ) + 1
    windows = np.stack([sound[at * SPEECH_HZ :][:SPEECH_SAMPLES] for at in range(max(1, count))])
    network = session(folder("dnsmos") / "dnsmos_models" / "sig_bak_ovr.onnx")
    answers = cast(NDArray[np.float32], network.run(None, {"input_1": windows})[0])[:, 2]
    return float(np.polyval(OVERALL, answers.astype(np.float64)).mean())
