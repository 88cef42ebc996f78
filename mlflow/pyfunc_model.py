"""The served model: prompts and keyframes in, MP4 files with stereo sound out. Stored in the registry as this code."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import cv2
import mlflow
import numpy as np
import pandas as pd
from mlflow.pyfunc import PythonModel, PythonModelContext
from numpy.typing import NDArray


class JointGenerator(PythonModel):
    """Loads base and checkpoint from the version's own files; the shape comes with it too."""

    def load_context(self, context: PythonModelContext) -> None:
        """Load the weights once."""
        from data.records import ClipShape
        from models.generation import Generator

        self.shape = ClipShape.model_validate(context.model_config["shape"])
        base, checkpoint = (Path(context.artifacts[name]) for name in ("base", "checkpoint"))
        self.generator = Generator.load(base, checkpoint, self.shape)

    def predict(self, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """One MP4 file a row, as bytes in the column `video`; rows are made one by one, so each has its own result."""
        settings = {"seed": 0, "num_inference_steps": 20} | (params or {})
        videos = [self.one(row, **settings) for row in model_input.to_dict("records")]
        return pd.DataFrame({"video": videos}, index=model_input.index)

    def one(self, row: dict[str, Any], seed: int, num_inference_steps: int) -> bytes:
        """The MP4 file for one row."""
        from data.media import write_mp4

        first, last = (
            keyframe(row.get(name), self.shape.height, self.shape.width) for name in ("first_frame", "last_frame")
        )
        generation = self.generator.generate(
            [row["prompt"]],
            first=None if first is None else [first],
            last=None if last is None else [last],
            seed=int(seed),
            num_inference_steps=int(num_inference_steps),
        )[0]
        with tempfile.TemporaryDirectory(prefix="soundstage-") as folder:
            path = Path(folder) / "generation.mp4"
            write_mp4(
                path, generation.frames_FHWC, generation.waveform_CT, self.shape.frame_rate, self.shape.sample_rate_hz
            )
            return path.read_bytes()


def keyframe(png: object, height: int, width: int) -> NDArray[np.uint8] | None:
    """A picture file as RGB at the model's size; None where the row has none."""
    if not isinstance(png, bytes | bytearray) or not png:
        return None
    image = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR)
    if image is None:
        raise ValueError(f"first_frame or last_frame of {len(png)} bytes is no picture file; send PNG or JPEG")
    resized = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)
    return np.ascontiguousarray(resized[:, :, ::-1])


mlflow.models.set_model(JointGenerator())
