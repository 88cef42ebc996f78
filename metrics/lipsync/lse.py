"""LSE-D, LSE-C and offset of a clip, by a published protocol: the one door to lip sync.

H height, W width, C colour, T sample at 16 kHz. A window is five pictures at 25 a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from data.detectors import PACKAGES
from metrics.lipsync import s3fd
from metrics.lipsync.crops import FPS, Cropper, Jpeg, resized, sixteen_bit, through_aac
from metrics.lipsync.distances import Reading, Sync, distances, missing, sync
from metrics.lipsync.faces import Boxes, Detector, Track, tracks
from metrics.lipsync.mfcc import RATE_HZ, mfcc, sound_windows
from metrics.lipsync.protocols import Protocol, Rule, joined
from metrics.lipsync.shots import Cuts
from metrics.lipsync.syncnet import ABSENT, NUM_PICTURES, Network
from metrics.score import Score
from metrics.waveforms import SILENT_BELOW_DB, level_db

Picture = NDArray[np.uint8]
Frames = Callable[[], Iterable[Picture]]
"""Opens the pictures (H, W, 3) of a clip anew: RGB, one size, 25 a second (`crops.at_25_fps`)."""

SAMPLES_A_PICTURE = RATE_HZ // FPS
MIN_PICTURES = NUM_PICTURES + 1
"""The published count of windows is five below that of pictures, one fewer than there are."""
PICTURES_HELD = 32
"""Of a face, before they are embedded: 5 MB."""
NO_DETECTOR = (
    f"no face detector; S3FD as published: curl -LO {s3fd.SOURCE} && export {s3fd.ENVIRONMENT}=$PWD/sfd_face.pth; "
    f"or MTCNN, under its own name: {PACKAGES['faces'][1]}"
)


@dataclass(frozen=True)
class FaceSync:
    """One face's lips against the sound."""

    first: int
    """Frame that its track begins with."""
    num_pictures: int
    sync: Sync


@dataclass(frozen=True)
class LipSync:
    """A clip's lip sync with everything that its numbers rest on."""

    protocol: str
    network: str
    """Only `SyncNet`, with the official weights, gives an LSE; another net's numbers go by its own name."""
    network_sha256: str
    detector: str
    detector_sha256: str
    jpeg: bool
    """Whether pictures took the round trip through JPEG that the published numbers contain."""
    values: dict[Rule, Reading]
    """By each of the protocol's rules, as published."""
    masked: dict[Rule, Reading]
    """By each rule, from pairs of lips and sound that exist alone."""
    tracks: tuple[FaceSync, ...] = ()
    num_frames: int = 0
    num_scored: int = 0
    """Frames within a track that was scored."""

    @property
    def headline(self) -> Reading:
        """By the protocol's first rule, as published."""
        return next(iter(self.values.values()))

    @property
    def coverage(self) -> float:
        """Share of the clip's frames within a scored track, 0–1."""
        return self.num_scored / self.num_frames if self.num_frames else 0.0

    @property
    def num_windows(self) -> int:
        """Windows of all tracks."""
        return sum(track.sync.num_windows for track in self.tracks)

    @property
    def num_at_edge(self) -> int:
        """Tracks whose best shift is the largest tried, ±15 frames: measurements that failed."""
        return sum(track.sync.at_edge for track in self.tracks)

    @property
    def convention(self) -> str:
        """What a report prints beside the numbers."""
        rounds = "JPEG round trip" if self.jpeg else "no JPEG"
        return (
            f"{self.network} {self.network_sha256[:12]}, {self.detector} {self.detector_sha256[:12]}, protocol "
            f"{self.protocol}, tracks by {' and '.join(self.values)}, {rounds}, 31 shifts at 25 fps"
        )


class Absent(Exception):  # no fault: it carries the reason why a clip has no number
    """Why a clip cannot be measured."""


def lip_sync(
    frames: Frames,
    waveform_T: NDArray[np.floating],
    protocol: Protocol,
    detector: Detector | None,
    network: Network | None,
    *,
    jpeg: bool = True,
) -> LipSync:
    """Measure one clip, or say why it cannot be measured.

    Pictures stream: the clip is opened once to find faces, once to look at them, or once in all where the protocol
    takes whole frames. Held are 32 pictures a face on screen and 8 kB a frame of embeddings.

    Args:
        frames: opens the clip's pictures at 25 a second; who calls retimes them (`crops.at_25_fps`).
        waveform_T: the sound, or the voice alone where the protocol says so, one channel at 16 kHz in [-1, 1].
        protocol: how to measure; one of `protocols.PROTOCOLS`.
        detector: what finds faces; not asked where the protocol takes whole frames.
        network: None where there are no weights.
        jpeg: with the losses that published numbers contain.

    Raises:
        ValueError: pictures are not 8-bit RGB of one size, or the sound is not one channel.
    """
    if waveform_T.ndim != 1:
        raise ValueError(f"sound is {waveform_T.shape}; it must be (samples,), one channel at {RATE_HZ} Hz")
    seen, scored, reason = Seen(), list[FaceSync](), ""
    try:
        scored = measure(seen.watched(frames), waveform_T, protocol, detector, network, jpeg=jpeg)
    except Absent as absent:
        reason = str(absent)
    covered = {frame for face in scored for frame in range(face.first, face.first + face.num_pictures)}
    used = None if protocol.whole_frame else detector
    return LipSync(
        protocol=protocol.name,
        network=network.name if network else "none",
        network_sha256=network.weights_sha256 if network else "",
        detector=used.name if used else "whole frame" if protocol.whole_frame else "none",
        detector_sha256=used.weights_sha256 if used else "",
        jpeg=jpeg,
        values=by_rule([face.sync.compatible for face in scored], protocol, reason),
        masked=by_rule([face.sync.masked for face in scored], protocol, reason),
        tracks=tuple(scored),
        num_frames=seen.num_frames,
        num_scored=len(covered),
    )


def by_rule(readings: Sequence[Reading], protocol: Protocol, reason: str) -> dict[Rule, Reading]:
    """What the protocol tells by each of its rules, or the reason why it tells nothing."""
    result: dict[Rule, Reading] = {}
    for rule in protocol.rules:
        result[rule] = missing(reason) if reason else joined(readings, rule)
        if protocol.confidence_only and not reason:
            nothing = Score.missing(f"protocol {protocol.name} tells the confidence alone")
            result[rule] = result[rule]._replace(lse_d=nothing)
    return result


@dataclass
class Seen:
    """Checks pictures as they pass, and counts those of the last pass."""

    num_frames: int = 0
    shape: tuple[int, ...] | None = None

    def watched(self, frames: Frames) -> Frames:
        """The same pictures.

        Raises:
            ValueError: one of them is not 8-bit RGB, or of another size than those before.
        """

        def opened() -> Iterable[Picture]:
            self.num_frames = 0
            for picture_HWC in frames():
                self.shape = self.shape or picture_HWC.shape
                if picture_HWC.dtype != np.uint8 or picture_HWC.ndim != 3 or picture_HWC.shape[2] != 3:
                    raise ValueError(
                        f"frame {self.num_frames} is {picture_HWC.dtype} {picture_HWC.shape}; not 8-bit RGB"
                    )
                if picture_HWC.shape != self.shape:
                    raise ValueError(f"frame {self.num_frames} is {picture_HWC.shape}, those before are {self.shape}")
                self.num_frames += 1
                yield picture_HWC

        return opened


def measure(
    frames: Frames,
    waveform_T: NDArray[np.floating],
    protocol: Protocol,
    detector: Detector | None,
    network: Network | None,
    *,
    jpeg: bool,
) -> list[FaceSync]:
    """Every face that the protocol counts.

    Raises:
        Absent: there is none, or what it takes is not there.
    """
    if network is None:
        raise Absent(ABSENT)
    if not protocol.whole_frame and detector is None:
        raise Absent(NO_DETECTOR)
    if not waveform_T.size:
        raise Absent("the clip has no sound")
    if not np.isfinite(waveform_T).all():
        raise Absent("the sound holds values that are not finite")
    if (level := level_db(waveform_T)) < SILENT_BELOW_DB:
        raise Absent(f"the sound is silent: {level:.0f} dB full scale, below {SILENT_BELOW_DB:g} dB")
    sound_T = sixteen_bit(waveform_T)
    if protocol.whole_frame or detector is None:
        lips = Lips(network, Jpeg() if jpeg else None)
        for picture_HWC in frames():
            lips.take_whole(picture_HWC)
        found = [(0, lips)]
    else:
        found = watch(frames, find_tracks(frames, protocol, detector), network, jpeg=jpeg)
    return score_faces(found, sound_T, protocol, network)


def find_tracks(frames: Frames, protocol: Protocol, detector: Detector) -> list[Track]:
    """The faces of the clip that are long and large enough.

    Raises:
        Absent: there is none; the reason tells how near the nearest came.
    """
    cuts, faces = Cuts(), list[Boxes]()
    for picture_HWC in frames():
        cuts.take(picture_HWC)
        faces.append(detector.faces(picture_HWC, protocol.scale, protocol.min_confidence))
    if not faces:
        raise Absent("the clip has no frames")
    if not any(len(found) for found in faces):
        raise Absent(f"no face in {len(faces)} frames by {detector.name}, confidence above {protocol.min_confidence:g}")
    shots = [shot for shot in cuts.shots() if shot[1] - shot[0] >= protocol.min_track]
    if not shots:
        longest = max(stop - start for start, stop in cuts.shots())
        raise Absent(f"shot too short: the longest is {longest} frames; {protocol.name} needs {protocol.min_track}")
    every = [track for a, b in shots for track in tracks(faces[a:b], a, protocol.max_gap, protocol.min_overlap)]
    long = [track for track in every if track.num_found > protocol.min_track]
    if not long:
        most = max((track.num_found for track in every), default=0)
        limit = f"{protocol.name} needs more than {protocol.min_track}"
        raise Absent(f"track too short: the longest has the face found in {most} frames; {limit}")
    large = [track for track in long if track.side_px > protocol.min_face_px]
    if not large:
        side_px = max(track.side_px for track in long)
        raise Absent(
            f"face too small: the largest is {side_px:.0f} px; {protocol.name} needs more than {protocol.min_face_px:g}"
        )
    return large


@dataclass
class Lips:
    """Embeds the pictures of one face as they come."""

    network: Network
    jpeg: Jpeg | None
    num_pictures: int = 0
    _held: list[Picture] = field(default_factory=list)
    _embedded: list[torch.Tensor] = field(default_factory=list)

    def take_whole(self, picture_HWC: Picture) -> None:
        """The next picture as a whole, RGB: through JPEG at its own size, then squeezed."""
        bgr = picture_HWC[..., ::-1]
        self._hold(resized(self.jpeg.through(bgr) if self.jpeg else bgr))

    def take_face(self, face_HWC: Picture) -> None:
        """The next cropped face, BGR, 224 px square."""
        self._hold(self.jpeg.through(face_HWC) if self.jpeg else face_HWC)

    def _hold(self, picture_HWC: Picture) -> None:
        self.num_pictures += 1
        self._held.append(picture_HWC)
        if len(self._held) == PICTURES_HELD:
            self._embed()

    def _embed(self) -> None:
        if len(self._held) >= NUM_PICTURES:
            self._embedded.append(self.network.embed_lips(np.stack(self._held)))
            self._held = self._held[1 - NUM_PICTURES :]

    def embeddings(self, num_windows: int) -> torch.Tensor:
        """Those (W, 1024) of the first windows."""
        self._embed()
        return torch.cat(self._embedded)[:num_windows]


def watch(frames: Frames, found: Sequence[Track], network: Network, *, jpeg: bool) -> list[tuple[int, Lips]]:
    """The lips of every track, and the frame it begins with, in one pass."""
    faces = [(track, Cropper(track), Lips(network, Jpeg() if jpeg else None)) for track in found]
    for number, picture_HWC in enumerate(frames()):
        for track, cropper, lips in faces:
            if track.first <= number <= track.last:
                lips.take_face(cropper.crop(picture_HWC, number - track.first))
    return [(track.first, lips) for track, _, lips in faces]


def score_faces(
    found: Sequence[tuple[int, Lips]], sound_T: NDArray[np.int16], protocol: Protocol, network: Network
) -> list[FaceSync]:
    """Each face against the sound beside it; a face beside which there is next to no sound is left out.

    Raises:
        Absent: that holds for all.
    """
    scored: list[FaceSync] = []
    longest = 0
    for first, lips in found:
        beside_T = sound_T[first * SAMPLES_A_PICTURE :][: lips.num_pictures * SAMPLES_A_PICTURE]
        if protocol.whole_frame:
            beside_T = sound_T
        num_pictures = min(lips.num_pictures, len(beside_T) // SAMPLES_A_PICTURE)
        longest = max(longest, num_pictures)
        if num_pictures < MIN_PICTURES:
            continue
        cepstra = mfcc(through_aac(beside_T) if protocol.aac else beside_T)
        windows = sound_windows(cepstra, num_pictures - NUM_PICTURES)
        lips_WD, sound_WD = lips.embeddings(len(windows)), network.embed_sound(windows)
        scored.append(FaceSync(first, lips.num_pictures, sync(distances(lips_WD, sound_WD))))
    if not scored:
        raise Absent(f"too short: {longest} frames have picture and sound; a window takes {MIN_PICTURES}")
    return scored
