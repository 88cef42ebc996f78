"""Shot splitting on a labelled set: found and false transitions beside PySceneDetect and TransNetV2, and the cost.

The set is made by `benchmarks/shot_material.py` from seeds; its labels are published in `benchmarks/shots/labels.json`
and checked here. Thresholds were chosen on the half called `tuning` alone; `held_out` shares no shot with it.

Measured, found (false), tuning of 39 and held out of 38; the held-out half was looked at several times:

    ours, histogram            39 (1)   37 (0)
    ours, EfficientNet-Lite0   39 (0)   38 (0)
    ours, with TransNetV2      39 (1)   37 (0)
    TransNetV2 alone           35 (17)  36 (15)
    ContentDetector            29 (24)  26 (25)
    AdaptiveDetector           30 (15)  31 (24)

The films are small, so costs beside decoding are high here; `benchmarks/curation.py` has those of real films.

Example: python -m benchmarks.shots --peers --transnet --encoder efficientnet_lite0
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import cv2
import numpy as np

from benchmarks import shot_material
from data import boundaries, media
from data.features import PictureSense
from data.sensing import Sensing

LABELS = Path(__file__).parent / "shots" / "labels.json"
NEAR_S = 0.1
"""A boundary counts as a label's that lies this near to its interval, s: two frames, the least a margin keeps off."""
FILMS = {"tuning": range(6), "held_out": range(100, 106)}
FOOTAGE = {
    "tuning": {"bbb_rabbit_wakes": (1.208,), "bbb_pests_and_pursuit": (1.125, 2.625)},
    "held_out": {"bbb_under_the_tree": (1.0, 3.542)},
}
"""Cuts that a person sees, s."""
Span = tuple[float, float]


class Item(NamedTuple):
    """A labelled film."""

    half: str
    path: Path
    labels: tuple[tuple[str, Span], ...]


def labelled(folder: Path) -> list[Item]:
    """All films, written into `folder`; published labels are compared with what was made."""
    published = json.loads(LABELS.read_text()) if LABELS.is_file() else {}
    items: list[Item] = []
    made: dict[str, Any] = {}
    for half, seeds in FILMS.items():
        for seed in seeds:
            film = shot_material.film(seed, half, 7)
            path = folder / f"film_{seed}.mp4"
            shot_material.written(path, film)
            made[path.stem] = {"half": half, **shot_material.described(film)}
            rate = shot_material.FRAME_RATE
            items.append(Item(half, path, tuple((k, (a / rate, b / rate)) for k, a, b in film.transitions)))
        for name, times in FOOTAGE[half].items():
            made[name] = {"half": half, "cuts_s": list(times)}
            items.append(Item(half, Path("data/footage") / f"{name}.mp4", tuple(("cut", (at, at)) for at in times)))
    if published and published != made:
        raise ValueError(f"{LABELS} does not describe what the seeds give; delete it to publish anew")
    LABELS.write_text(json.dumps(made, separators=(",", ": "), indent=None).replace('},"', '},\n"') + "\n")
    return items


def matched(found: Sequence[Span], labels: Sequence[tuple[str, Span]]) -> tuple[list[bool], int]:
    """Which labels were found, and how many findings belong to none."""
    left = list(found)
    hits: list[bool] = []
    for _, (start, end) in labels:
        near = [span for span in left if span[0] <= end + NEAR_S and span[1] >= start - NEAR_S]
        hits.append(bool(near))
        left = [span for span in left if span not in near]
    return hits, len(left)


def ours(semantics: str, proposer: str) -> Callable[[Path], list[Span]]:
    """This project's splitter."""

    def split(path: Path) -> list[Span]:
        sense = PictureSense(Sensing.model_validate({"semantics": semantics, "proposer": proposer}))
        for seconds, picture in media.iter_frames(path, 144, 256):
            sense.take(seconds, picture)
        return [(item.start_s, item.end_s) for item in boundaries.find(sense.finish())]

    return split


def theirs(name: str) -> Callable[[Path], list[Span]]:
    """PySceneDetect's detectors with their defaults."""
    import scenedetect

    library = cast(Any, scenedetect)

    def split(path: Path) -> list[Span]:
        scenes = library.detect(str(path), getattr(library, name)())
        return [(scene[0].seconds, scene[0].seconds) for scene in scenes[1:]]

    return split


def transnet(path: Path) -> list[Span]:
    """TransNetV2 alone, its authors' way: a transition is a run of frames whose chance is above one half."""
    from data.encoders import TransNet

    network, times = TransNet(), list[float]()
    for seconds, picture in media.iter_frames(path, 27, 48):
        network.take(picture)
        times.append(seconds)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], network.finish() > 0.5, [0]]).astype(int)))
    return [(times[first], times[min(after, len(times) - 1)]) for first, after in edges.reshape(-1, 2)]


def decode(path: Path) -> list[Span]:
    """Decoding alone, what costs are held against."""
    from data.media_open import opened, picture_stream

    with opened(path) as container:
        for _ in container.decode(picture_stream(container)):
            pass
    return []


def score(
    name: str, split: Callable[[Path], list[Span]], items: Sequence[Item], base_s: float, *, verbose: bool
) -> float:
    """Print one method's counts by half and kind; returns the CPU seconds it took."""
    taken, lines = 0.0, []
    for half in FILMS:
        hits: dict[str, list[bool]] = {}
        false = 0
        for item in (item for item in items if item.half == half):
            began = time.process_time()
            found = split(item.path)
            taken += time.process_time() - began
            got, wrong = matched(found, item.labels)
            for (kind, _), hit in zip(item.labels, got, strict=True):
                hits.setdefault(kind, []).append(hit)
            false += wrong
            if verbose:
                missed = [label for label, hit in zip(item.labels, got, strict=True) if not hit]
                sys.stdout.write(f"  {item.path.stem}: missed {missed}, {wrong} false of {found}\n")
        total = [hit for kind in hits.values() for hit in kind]
        kinds = ", ".join(f"{kind} {sum(values)}/{len(values)}" for kind, values in sorted(hits.items()))
        lines.append(f"{half}: {sum(total)}/{len(total)} found ({kinds}), {false} false")
    cost = f"{taken / base_s:.2f} x decoding" if base_s else f"{taken:.1f} CPU s"
    sys.stdout.write(f"{name}: {cost}\n" + "".join(f"    {line}\n" for line in lines))
    return taken


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="store_true", help="also PySceneDetect's detectors")
    parser.add_argument("--encoder", action="append", default=[], help="also ours with this encoder")
    parser.add_argument("--transnet", action="store_true", help="also TransNetV2, alone and as our second proposer")
    parser.add_argument("--verbose", action="store_true", help="each film's misses")
    arguments = parser.parse_args()
    cv2.setNumThreads(1)
    with tempfile.TemporaryDirectory() as folder:
        items = labelled(Path(folder))
        base_s = score("decoding", decode, items, 0.0, verbose=False)
        for encoder in ["histogram", *cast(list[str], arguments.encoder)]:
            score(f"ours, {encoder}", ours(encoder, "content"), items, base_s, verbose=arguments.verbose)
        if arguments.transnet:
            score("ours, histogram and TransNetV2", ours("histogram", "transnetv2"), items, base_s, verbose=False)
            score("TransNetV2", transnet, items, base_s, verbose=arguments.verbose)
        for name in ("ContentDetector", "AdaptiveDetector") if arguments.peers else ():
            score(f"PySceneDetect {name}", theirs(name), items, base_s, verbose=False)


if __name__ == "__main__":
    main()
