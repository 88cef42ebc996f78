"""Lip sync as the verbs report it: by SyncNet's official weights as LSE, by any other's under a name of its own."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from data.records import Frozen
from metrics.score import Measure, Score

if TYPE_CHECKING:
    from metrics.lipsync.faces import Detector
    from metrics.lipsync.lse import Frames
    from metrics.lipsync.syncnet import Network
    from metrics.sound import Waveform

ProtocolName = Literal["wav2lip_lrs", "wav2lip_real", "latentsync", "mochabench", "mova"]
_DISTANCE = Measure("", False, "SyncNet distance at the best of 31 shifts, as published")
_CONFIDENCE = Measure("", True, "SyncNet confidence: median less smallest distance over 31 shifts, as published")
_OFFSET = Measure("frames at 25/s", None, "by SyncNet; above 0 the sound comes first")
_PUBLISHED = {"lse_d": _DISTANCE, "lse_c": _CONFIDENCE, "sync_offset_frames": _OFFSET}
_OWN = " by a net that is not SyncNet's official weights"
LIP_MEASURES = {
    **_PUBLISHED,
    **{
        f"{name}_masked": kind._replace(convention=f"{kind.convention}; pairs beyond the ends left out")
        for name, kind in _PUBLISHED.items()
    },
    "sync_own_d": _DISTANCE._replace(convention=f"as lse_d,{_OWN}"),
    "sync_own_c": _CONFIDENCE._replace(convention=f"as lse_c,{_OWN}"),
    "lse_windows": Measure("windows", None, "windows of five pictures of all tracks"),
    "lse_coverage": Measure("", True, "share of frames within a face's track that was scored"),
}
"""What `lip_scores` gives, by name."""


class Lips(Frozen):
    """How lips are measured."""

    protocol: ProtocolName = "wav2lip_real"
    """Published way to measure lip sync, see metrics/lipsync/protocols.py; numbers of two are not comparable."""
    syncnet: Path | None = None
    """Weights of SyncNet; null takes those that SOUNDSTAGE_SYNCNET names, and LSE is missing without."""
    s3fd: Path | None = None
    """Weights of the face detector S3FD; null takes those that SOUNDSTAGE_S3FD names, else MTCNN where installed."""


def no_lips(why: str) -> dict[str, Score]:
    """Every score missing for one reason."""
    return dict.fromkeys(LIP_MEASURES, Score.missing(why))


def lip_scores(frames: Frames, sound: tuple[Waveform, int], lips: Lips) -> tuple[dict[str, Score], str]:
    """The lip sync of a film, and the convention it was measured by; empty where there are no weights.

    Args:
        frames: Opens its pictures, RGB, 25 a second.
        sound: Samples (C, T) from the first picture on, and their rate, Hz.
        lips: How.
    """
    from metrics.lipsync import syncnet
    from metrics.lipsync.lse import lip_sync
    from metrics.lipsync.mfcc import RATE_HZ
    from metrics.lipsync.protocols import PROTOCOLS
    from metrics.waveforms import downmix, resample

    detector, network = watchers(lips.syncnet, lips.s3fd)
    if network is None:
        return no_lips(syncnet.ABSENT), ""
    voice_T = resample(downmix(sound[0]), sound[1], RATE_HZ)[0]
    found = lip_sync(frames, voice_T, PROTOCOLS[lips.protocol], detector, network)
    scores: dict[str, Score] = {}
    for suffix, reading in (("", found.headline), ("_masked", next(iter(found.masked.values())))):
        scores |= dict(zip((f"{name}{suffix}" for name in _PUBLISHED), reading, strict=True))
    scores |= {"lse_windows": Score(float(found.num_windows)), "lse_coverage": Score(found.coverage)}
    official = found.network == "SyncNet"
    why = "the weights are SyncNet's official ones, see lse_d" if official else f"measured by {found.network}"
    for name in ("d", "c"):
        scores[f"sync_own_{name}"] = Score.missing(why) if official else scores[f"lse_{name}"]
        if not official:
            named = Score.missing(f"{why}, see sync_own_{name}")
            scores |= {f"lse_{name}": named, f"lse_{name}_masked": named}
    return scores, found.convention


@functools.cache
def watchers(syncnet_path: Path | None, s3fd_path: Path | None) -> tuple[Detector | None, Network | None]:
    """The face detector and the network, loaded once a process: S3FD, else MTCNN where it is installed.

    Raises:
        RuntimeError: weights are missing, or not those they should be.
    """
    from metrics.lipsync import s3fd, syncnet
    from metrics.lipsync.faces import MTCNN

    weights, faces = syncnet.find(syncnet_path), s3fd.find(s3fd_path)
    if weights is None:
        return None, None
    detector: Detector | None = s3fd.S3FD(faces) if faces is not None else None
    if detector is None:
        with contextlib.suppress(RuntimeError):
            detector = MTCNN()
    return detector, syncnet.load(weights)


def weights_of(syncnet_path: Path | None, s3fd_path: Path | None) -> dict[str, str | None]:
    """SHA-256 of the weights that are used."""
    from data.files import sha256
    from metrics.lipsync import s3fd, syncnet

    paths = {"syncnet": syncnet.find(syncnet_path), "s3fd": s3fd.find(s3fd_path)}
    return {name: None if path is None else sha256(path) for name, path in paths.items()}
