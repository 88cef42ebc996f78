"""SyncNet: lips and sound as points of one space. Its published graph, the official weights, and a quicker equal.

Source: joonson/syncnet_python (MIT, SyncNetModel.py); Chung and Zisserman 2016, "Out of time: automated lip sync in
the wild". W window, F = 5 pictures, H = W = 224 px, C = 3 colours in BGR order, M = 20 columns of cepstra.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from data.files import sha256

NUM_PICTURES, SIDE_PX, NUM_OUT = 5, 224, 1024
CPU_BATCH, GPU_BATCH = 4, 32
"""Windows at once: on a CPU what the first layer makes of four, 18 MB, stays near; eight take a tenth longer each."""
ENVIRONMENT = "SOUNDSTAGE_SYNCNET"
"""Environment variable with the path of the weights."""
SOURCE = "https://www.robots.ox.ac.uk/~vgg/software/lipsync/data/syncnet_v2.model"
ABSENT = f"the SyncNet weights are absent; get them: curl -LO {SOURCE} && export {ENVIRONMENT}=$PWD/syncnet_v2.model"
OFFICIAL_SHA256 = ("961e8696", "5442")
"""How the hash of the official file begins and ends. Source: README of nawta/SyncNet_py309_313."""


class SyncNet(nn.Module):
    """The published graph, whose state dict has the names and shapes of the official file; for training and loading."""

    def __init__(self) -> None:
        super().__init__()
        # In this order, which the hash-formula weights of the conformance test follow.
        self.netcnnaud = nn.Sequential(
            *block(nn.Conv2d(1, 64, 3, padding=1)), nn.MaxPool2d(1),
            *block(nn.Conv2d(64, 192, 3, padding=1)), nn.MaxPool2d(3, stride=(1, 2)),
            *block(nn.Conv2d(192, 384, 3, padding=1)),
            *block(nn.Conv2d(384, 256, 3, padding=1)),
            *block(nn.Conv2d(256, 256, 3, padding=1)), nn.MaxPool2d(3, stride=2),
            *block(nn.Conv2d(256, 512, (5, 4))),
        )  # fmt: skip
        self.netfcaud, self.netfclip = head(), head()
        self.netcnnlip = nn.Sequential(
            *block(nn.Conv3d(3, 96, (5, 7, 7), stride=(1, 2, 2))), nn.MaxPool3d((1, 3, 3), stride=(1, 2, 2)),
            *block(nn.Conv3d(96, 256, (1, 5, 5), stride=(1, 2, 2), padding=(0, 1, 1))),
            nn.MaxPool3d((1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1)),
            *block(nn.Conv3d(256, 256, (1, 3, 3), padding=(0, 1, 1))),
            *block(nn.Conv3d(256, 256, (1, 3, 3), padding=(0, 1, 1))),
            *block(nn.Conv3d(256, 256, (1, 3, 3), padding=(0, 1, 1))), nn.MaxPool3d((1, 3, 3), stride=(1, 2, 2)),
            *block(nn.Conv3d(256, 512, (1, 6, 6))),
        )  # fmt: skip

    def embed_lips(self, pictures_WCFHW: Tensor) -> Tensor:
        """Embeddings (W, 1024) of windows (W, 3, 5, 224, 224), BGR, 0–255 as floats, not scaled."""
        return self.netfclip(self.netcnnlip(pictures_WCFHW).flatten(1))

    def embed_sound(self, cepstra_WCM: Tensor) -> Tensor:
        """Embeddings (W, 1024) of windows (W, 13, 20) of cepstra."""
        return self.netfcaud(self.netcnnaud(cepstra_WCM[:, None]).flatten(1))


def block(convolution: nn.Conv2d | nn.Conv3d) -> tuple[nn.Module, nn.Module, nn.Module]:
    """A convolution with its normalisation and rectifier."""
    norm = nn.BatchNorm3d if isinstance(convolution, nn.Conv3d) else nn.BatchNorm2d
    return convolution, norm(convolution.out_channels), nn.ReLU(inplace=True)


def head() -> nn.Sequential:
    """From the 512 numbers of a convolutional part to the embedding, which is not normalised."""
    return nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, NUM_OUT))


@dataclass(frozen=True)
class Network:
    """Weights ready to measure with: the same function as the published graph in evaluation mode, quicker."""

    name: str
    """What a report calls it; only the official weights give an LSE."""
    weights_sha256: str
    lips: nn.Module
    sound: nn.Module
    device: str

    def embed_lips(self, pictures_NHWC: NDArray[np.uint8]) -> Tensor:
        """Embeddings (N - 4, 1024) of every five of N consecutive pictures (N, 224, 224, 3), 8-bit BGR."""
        size, num_windows = CPU_BATCH if self.device == "cpu" else GPU_BATCH, len(pictures_NHWC) - NUM_PICTURES + 1
        found = [torch.empty(0, NUM_OUT, device=self.device)]
        with torch.inference_mode():
            for start in range(0, num_windows, size):
                stop = min(start + size, num_windows)
                some = torch.from_numpy(pictures_NHWC[start : stop + NUM_PICTURES - 1]).to(self.device).float()
                stacked = torch.cat([some[t : t + stop - start] for t in range(NUM_PICTURES)], dim=3)
                found.append(self.lips(stacked.permute(0, 3, 1, 2)))  # channels last in memory, the quicker layout
        return torch.cat(found)

    def embed_sound(self, windows_WCM: NDArray[np.floating]) -> Tensor:
        """Embeddings (W, 1024) of windows (W, 13, 20) of cepstra."""
        found = [torch.empty(0, NUM_OUT, device=self.device)]
        with torch.inference_mode():
            for start in range(0, len(windows_WCM), GPU_BATCH):
                some = torch.from_numpy(windows_WCM[start : start + GPU_BATCH].astype(np.float32)).to(self.device)
                found.append(self.sound(some[:, None].contiguous(memory_format=torch.channels_last)))
        return torch.cat(found)


def network(net: SyncNet, name: str, weights_sha256: str, device: str = "cpu") -> Network:
    """The quick form of a net, whose weights are copied."""
    return Network(
        name=name,
        weights_sha256=weights_sha256,
        lips=folded(net.netcnnlip, net.netfclip).to(device),
        sound=folded(net.netcnnaud, net.netfcaud).to(device),
        device=device,
    )


def folded(body: nn.Sequential, top: nn.Sequential) -> nn.Sequential:
    """Convolutions and linear layers with their normalisation inside, all in two dimensions.

    The first picture kernel spans all five pictures, so it is one of two dimensions over 15 channels. A maximum is
    taken before the rectifier where one follows it: they commute, and a quarter of the numbers is left to rectify.
    """
    layers: list[nn.Module] = []
    parts = [*body, nn.Flatten(), *top]
    for part, after in zip(parts, [*parts[1:], nn.Identity()], strict=True):
        if isinstance(part, nn.Conv2d | nn.Conv3d | nn.Linear):
            layers.append(
                merged(part, after if isinstance(after, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) else None)
            )
        elif isinstance(part, nn.MaxPool2d | nn.MaxPool3d):
            kernel, stride, padding = (two(size) for size in (part.kernel_size, part.stride, part.padding))
            if kernel != (1, 1):
                layers.insert(len(layers) - 1, nn.MaxPool2d(kernel, stride, padding))
        elif isinstance(part, nn.ReLU):
            layers.append(nn.ReLU(inplace=True))
        elif isinstance(part, nn.Flatten):
            layers.append(part)
    return nn.Sequential(*layers).eval().requires_grad_(requires_grad=False).to(memory_format=torch.channels_last)


def merged(layer: nn.Conv2d | nn.Conv3d | nn.Linear, norm: nn.Module | None) -> nn.Conv2d | nn.Linear:
    """A layer in two dimensions that normalises too; the sums are formed in double precision."""
    weight = layer.weight.detach().double()
    bias = torch.zeros(len(weight), dtype=torch.float64) if layer.bias is None else layer.bias.detach().double()
    if isinstance(layer, nn.Conv3d):
        weight = weight.transpose(1, 2).flatten(1, 2)  # channel = picture * 3 + colour
    if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = norm.weight.detach().double() / (norm.running_var.double() + norm.eps).sqrt()
        weight = weight * scale.reshape(-1, *[1] * (weight.ndim - 1))
        bias = (bias - norm.running_mean.double()) * scale + norm.bias.detach().double()
    if isinstance(layer, nn.Linear):
        result = nn.Linear(layer.in_features, layer.out_features)
    else:
        kernel, stride, padding = (two(size) for size in (layer.kernel_size, layer.stride, layer.padding))
        result = nn.Conv2d(weight.shape[1], weight.shape[0], kernel, stride, padding)
    result.load_state_dict({"weight": weight.float(), "bias": bias.float()})
    return result


def two(size: object) -> tuple[int, int]:
    """The last two dimensions of a size, which torch gives as one number or as several."""
    if isinstance(size, int):
        return size, size
    *_, height, width = cast("tuple[int, ...]", size)
    return height, width


def find(path: Path | None = None) -> Path | None:
    """The file of weights: `path`, else what the environment variable `SOUNDSTAGE_SYNCNET` names, else None.

    Raises:
        RuntimeError: one of them is set, but there is no such file.
    """
    return find_weights(path, ENVIRONMENT, SOURCE)


def find_weights(path: Path | None, environment: str, source: str) -> Path | None:
    """A file of weights by setting or environment; None where neither is set.

    Raises:
        RuntimeError: one of them is set, but there is no such file.
    """
    named = path or (Path(os.environ[environment]) if os.environ.get(environment) else None)
    if named is not None and not named.is_file():
        raise RuntimeError(f"{named}: no such file; get it: curl -LO {source}, and set its path or {environment}")
    return named


def load(path: Path, device: str = "cpu", name: str | None = None) -> Network:
    """A network from a file of weights, the official one or one of the same architecture under its own `name`.

    Raises:
        RuntimeError: it is no state dict of SyncNet: a name is missing or not known, or a shape differs.
    """
    net, digest = SyncNet(), sha256(path)
    net.load_state_dict(read_state(path, net))
    begins, ends = OFFICIAL_SHA256
    official = digest.startswith(begins) and digest.endswith(ends)
    return network(net, name or ("SyncNet" if official else "SyncNet, not the official weights"), digest, device)


def read_state(path: Path, net: nn.Module) -> dict[str, Tensor]:
    """A state dict for `net` from a file, without running code from it; only batch counts may be left out.

    Raises:
        RuntimeError: the file is no dictionary of tensors, a name is missing or unknown, or a shape differs.
    """
    try:
        stored: object = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what torch raises depends on how far it came
        raise RuntimeError(f"{path}: no file of weights ({type(error).__name__}); give the official file") from error
    if not isinstance(stored, Mapping):
        raise RuntimeError(  # noqa: TRY004 # the file is wrong, not the call
            f"{path}: holds a {type(stored).__name__}, no state dict; give the official file"
        )
    found = cast("Mapping[str, Tensor]", stored)
    wanted = net.state_dict()
    counts = {name for name in wanted if name.endswith("num_batches_tracked")}
    absent, unknown = wanted.keys() - counts - found.keys(), found.keys() - wanted.keys()
    shapes = {name: (tuple(found[name].shape), tuple(wanted[name].shape)) for name in wanted.keys() & found.keys()}
    differing = [f"{name} {is_}, not {should}" for name, (is_, should) in shapes.items() if is_ != should]
    if absent or unknown or differing:
        raise RuntimeError(
            f"{path}: not the weights of {type(net).__name__}: {len(absent)} names are missing {sorted(absent)[:3]}, "
            f"{len(unknown)} unknown {sorted(unknown)[:3]}, {len(differing)} shapes differ {sorted(differing)[:3]}"
        )
    return {name: found.get(name, wanted[name]) for name in wanted}
