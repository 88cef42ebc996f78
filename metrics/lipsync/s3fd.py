"""S3FD, the face detector of the published lip-sync pipelines: its graph, its official weights, its boxes.

Source: Zhang et al. 2017, "S3FD: single shot scale-invariant face detector" (arXiv 1708.05237), as
joonson/syncnet_python runs it (MIT, detectors/s3fd). B picture, C channel, H height, W width, P prior, N face.
"""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torchvision.ops import nms

from data.files import sha256
from metrics.lipsync.syncnet import find_weights, read_state

ENVIRONMENT = "SOUNDSTAGE_S3FD"
"""Environment variable with the path of the weights."""
SOURCE = "https://www.robots.ox.ac.uk/~vgg/software/lipsync/data/sfd_face.pth"
MEAN_RGB = (123.0, 117.0, 104.0)
STRIDES_PX, SIZES_PX = (4, 8, 16, 32, 64, 128), (16, 32, 64, 128, 256, 512)
"""Distance and side of the square priors of each of the six maps."""
CENTRE_VARIANCE, SIZE_VARIANCE = 0.1, 0.2
"""Scales of the predicted moves of a prior's centre and of the logarithm of its side."""
LEAST_CONFIDENCE, MOST_BEFORE, MOST_AFTER = 0.05, 5000, 750
"""Faces below that confidence are never looked at; how many are kept before and after overlaps are thinned."""
OVERLAP, LAST_OVERLAP = 0.3, 0.1
"""Above which the less sure of two boxes goes, inside the network and once more after the confident ones are chosen."""
LEAST_SIDE_PX = 32
"""A smaller picture leaves the fifth maximum nothing to look at."""
VGG = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
"""Channels of the convolutions; 0 is a maximum that halves the picture, the third rounding up."""


class L2Norm(nn.Module):
    """Each place's channels brought to unit length, then scaled by a learnt weight each."""

    def __init__(self, num_channels: int, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((num_channels,), scale))

    def forward(self, map_BCHW: Tensor) -> Tensor:
        """The same shape."""
        norm = map_BCHW.pow(2).sum(dim=1, keepdim=True).sqrt() + 1e-10
        return map_BCHW / norm * self.weight[:, None, None]


class S3FDNet(nn.Module):
    """The graph, whose state dict has the 65 names and shapes of the official file."""

    def __init__(self) -> None:
        super().__init__()
        self.vgg = nn.ModuleList(vgg())
        self.L2Norm3_3, self.L2Norm4_3, self.L2Norm5_3 = L2Norm(256, 10.0), L2Norm(512, 8.0), L2Norm(512, 5.0)
        self.extras = nn.ModuleList(
            [
                nn.Conv2d(1024, 256, 1),
                nn.Conv2d(256, 512, 3, stride=2, padding=1),
                nn.Conv2d(512, 128, 1),
                nn.Conv2d(128, 256, 3, stride=2, padding=1),
            ]
        )
        channels = (256, 512, 512, 1024, 512, 256)
        self.loc = nn.ModuleList([nn.Conv2d(count, 4, 3, padding=1) for count in channels])
        self.conf = nn.ModuleList([nn.Conv2d(count, 2 if i else 4, 3, padding=1) for i, count in enumerate(channels)])

    def forward(self, picture_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes (B, P, 4) as shares of the picture, and their confidence (B, P), from RGB less its mean.

        A box is left, top, right, bottom.
        """
        maps = self.maps(picture_BCHW)
        moves = [loc(features) for loc, features in zip(self.loc, maps, strict=True)]
        scores = [conf(features) for conf, features in zip(self.conf, maps, strict=True)]
        background, face = scores[0][:, :3].amax(dim=1, keepdim=True), scores[0][:, 3:]
        scores[0] = torch.cat([background, face], dim=1)  # the smallest faces have three kinds of background
        confidence = functional.softmax(flat(scores, 2), dim=-1)[..., 1]
        where = priors(picture_BCHW.shape[2:], [features.shape[2:] for features in maps]).to(picture_BCHW)
        return boxes_of(flat(moves, 4), where), confidence

    def maps(self, picture_BCHW: Tensor) -> list[Tensor]:
        """The six maps of features that faces of 16 to 512 px are found in."""
        found: list[Tensor] = []
        norms = {15: self.L2Norm3_3, 22: self.L2Norm4_3, 29: self.L2Norm5_3}
        features = picture_BCHW
        for number, layer in enumerate(self.vgg):
            features = layer(features)
            if number in norms:
                found.append(norms[number](features))
        found.append(features)
        for number, layer in enumerate(self.extras):
            features = functional.relu(layer(features))
            if number % 2:
                found.append(features)
        return found


def vgg() -> list[nn.Module]:
    """VGG-16 up to its fifth maximum, and its two fully connected layers as convolutions."""
    layers: list[nn.Module] = []
    before, maxima = 3, 0
    for width in VGG:
        if width:
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
            before = width
        else:
            maxima += 1
            layers.append(nn.MaxPool2d(2, ceil_mode=maxima == 3))
    return [*layers, nn.Conv2d(512, 1024, 3, padding=6, dilation=6), nn.ReLU(), nn.Conv2d(1024, 1024, 1), nn.ReLU()]


def flat(maps_BCHW: list[Tensor], size: int) -> Tensor:
    """Maps as one list (B, P, size), row by row."""
    return torch.cat([features.permute(0, 2, 3, 1).reshape(len(features), -1, size) for features in maps_BCHW], dim=1)


def priors(picture_HW: torch.Size, maps_HW: list[torch.Size]) -> Tensor:
    """Centre x, centre y, width and height (P, 4) of the priors of maps of the given sizes, as shares of the picture."""
    height, width = picture_HW
    found: list[Tensor] = []
    for (rows, columns), stride, side in zip(maps_HW, STRIDES_PX, SIZES_PX, strict=True):
        y, x = torch.meshgrid(torch.arange(rows) + 0.5, torch.arange(columns) + 0.5, indexing="ij")
        w, h = torch.full_like(x, side / width), torch.full_like(x, side / height)
        found.append(torch.stack([x * stride / width, y * stride / height, w, h], dim=-1).reshape(-1, 4))
    return torch.cat(found)


def boxes_of(moves_BP4: Tensor, priors_P4: Tensor) -> Tensor:
    """Left, top, right, bottom (B, P, 4) of moved priors, as shares of the picture."""
    centre = priors_P4[:, :2] + moves_BP4[..., :2] * CENTRE_VARIANCE * priors_P4[:, 2:]
    size = priors_P4[:, 2:] * torch.exp(moves_BP4[..., 2:] * SIZE_VARIANCE)
    return torch.cat([centre - size / 2, centre + size / 2], dim=-1)


class S3FD:
    """The detector of the published pipelines with its official weights."""

    name = "S3FD"

    def __init__(self, path: Path, device: str = "cpu") -> None:
        """Load the official weights.

        Raises:
            RuntimeError: they are not those of S3FD: a name is missing or not known, or a shape differs.
        """
        self._net = S3FDNet()
        self._net.load_state_dict(read_state(path, self._net))
        self._net.eval().requires_grad_(requires_grad=False).to(device)
        self._device = device
        self.weights_sha256 = sha256(path)

    def faces(self, picture_HWC: NDArray[np.uint8], scale: float, min_confidence: float) -> NDArray[np.float64]:
        """Left, top, right, bottom in px and confidence (N, 5) of the faces of an RGB picture, the surest first.

        Args:
            picture_HWC: the picture.
            scale: by how much it is scaled before it is looked at.
            min_confidence: faces above it are told.
        """
        scaled = cv2.resize(picture_HWC, (0, 0), fx=scale, fy=scale, interpolation=cv2.INTER_LINEAR)
        if min(scaled.shape[:2]) < LEAST_SIDE_PX:
            return np.empty((0, 5))
        picture = torch.from_numpy(scaled.astype(np.float32) - np.array(MEAN_RGB, np.float32)).permute(2, 0, 1)
        with torch.inference_mode():
            boxes, confidence = (found[0] for found in self._net(picture[None].to(self._device)))
        sure = confidence > LEAST_CONFIDENCE
        boxes, confidence = boxes[sure], confidence[sure]
        first = confidence.argsort(descending=True)[:MOST_BEFORE]
        kept = first[nms(boxes[first], confidence[first], OVERLAP)[:MOST_AFTER]]
        kept = kept[confidence[kept] > min_confidence]
        kept = kept[nms(boxes[kept], confidence[kept], LAST_OVERLAP)]
        full_px = torch.tensor([picture_HWC.shape[1], picture_HWC.shape[0]] * 2, device=self._device)
        return torch.cat([boxes[kept] * full_px, confidence[kept, None]], dim=1).double().cpu().numpy()


def find(path: Path | None = None) -> Path | None:
    """The file of weights: `path`, else what the environment variable `SOUNDSTAGE_S3FD` names, else None.

    Raises:
        RuntimeError: one of them is set, but there is no such file.
    """
    return find_weights(path, ENVIRONMENT, SOURCE)
