"""SyncNet against the published code's way: same distances, how much faster.

The other side is the published graph and loop, written anew from joonson/syncnet_python (MIT): three-dimensional
convolutions with separate normalisation, all pictures as floats, windows copied in batches of 20, one window's 31
distances at a time. Both sides go from pictures and sound to distances in one process on one thread, alternating;
processor seconds, since a ratio of these survives a busy machine. Weights are random: speed does not ask for them.
Example: python -m benchmarks.lipsync
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from metrics.lipsync.distances import MAX_SHIFT, NUM_SHIFTS, distances
from metrics.lipsync.mfcc import mfcc, sound_windows
from metrics.lipsync.syncnet import Network, SyncNet, network

NUM_PICTURES, ROUNDS, BATCH = 45, 7, 20


def material() -> tuple[NDArray[np.uint8], NDArray[np.int16]]:
    """Pictures (N, 224, 224, 3) and their sound at 16 kHz, of noise."""
    random = np.random.default_rng(0)
    pictures = random.integers(0, 256, (NUM_PICTURES, 224, 224, 3), dtype=np.uint8)
    return pictures, random.integers(-9000, 9000, NUM_PICTURES * 640, dtype=np.int16)


@torch.no_grad()
def theirs(net: SyncNet, pictures_NHWC: NDArray[np.uint8], sound_T: NDArray[np.int16]) -> NDArray[np.float32]:
    """The published loop; its cepstra are ours, which leaves its slower ones out of the comparison."""
    stacked = np.transpose(np.stack(list(pictures_NHWC), axis=3)[None], (0, 3, 4, 1, 2))
    pictures = torch.from_numpy(stacked.astype(float)).float()
    cepstra = torch.from_numpy(mfcc(sound_T).T[None]).float()
    num_windows, lips, sound = len(pictures_NHWC) - 5, list[torch.Tensor](), list[torch.Tensor]()
    for start in range(0, num_windows, BATCH):
        places = range(start, min(num_windows, start + BATCH))
        lips.append(net.embed_lips(torch.cat([pictures[:, :, at : at + 5] for at in places])))
        sound.append(net.embed_sound(torch.cat([cepstra[:, :, 4 * at : 4 * at + 20] for at in places])))
    padded = functional.pad(torch.cat(sound), (0, 0, MAX_SHIFT, MAX_SHIFT))
    rows = [
        functional.pairwise_distance(lip[None].repeat(NUM_SHIFTS, 1), padded[at : at + NUM_SHIFTS])
        for at, lip in enumerate(torch.cat(lips))
    ]
    return torch.stack(rows).numpy()


def ours(net: Network, pictures_NHWC: NDArray[np.uint8], sound_T: NDArray[np.int16]) -> NDArray[np.float32]:
    """The project's."""
    num_windows = len(pictures_NHWC) - 5
    sound_WD = net.embed_sound(sound_windows(mfcc(sound_T), num_windows))
    return distances(net.embed_lips(pictures_NHWC[: num_windows + 4]), sound_WD)


def main() -> None:
    """Print the largest difference and the ratio of the median times."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    published = SyncNet().eval()
    quick = network(published, "random", "")
    pictures, sound = material()
    seconds: dict[str, list[float]] = {"ours": [], "published": []}
    found: dict[str, NDArray[np.float32]] = {}
    for _ in range(ROUNDS):
        for name, function, net in (("ours", ours, quick), ("published", theirs, published)):
            start = time.process_time()
            found[name] = function(net, pictures, sound)  # pyright: ignore[reportArgumentType] # each with its own
            seconds[name].append(time.process_time() - start)
    difference = np.abs(found["ours"] - found["published"]).max() / found["published"].mean()
    ratios = sorted(a / b for a, b in zip(seconds["published"], seconds["ours"], strict=True))
    sys.stdout.write(
        f"{len(found['ours'])} windows, largest difference of a distance {difference:.1e} of their mean\n"
        f"ours {1000 * statistics.median(seconds['ours']) / len(found['ours']):.1f} ms a window, published "
        f"{1000 * statistics.median(seconds['published']) / len(found['ours']):.1f}: "
        f"{statistics.median(ratios):.2f} times as fast (of {ROUNDS} pairs: {ratios[0]:.2f} to {ratios[-1]:.2f})\n"
    )


if __name__ == "__main__":
    main()
