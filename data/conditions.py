"""What a generation is given beside its caption: the modes, and the variants of a clip that are encoded for them."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast, get_args

Mode = Literal["t2va", "fl2va_first", "fl2va_last", "fl2va", "ref2va", "a2v", "v2a", "kf2va"]
"""Text alone; first, last or both keyframes; ordered references; the sound is given; the picture is given; frames
anywhere in the clip are given."""
MODES = cast("tuple[Mode, ...]", get_args(Mode))
KEYFRAMES: dict[str, tuple[str, ...]] = {
    "fl2va_first": ("first",),
    "fl2va_last": ("last",),
    "fl2va": ("first", "last"),
}
"""Keyframes of each mode that always has the same, in packed order; those of `kf2va` are `keyframes_of`'s."""
NEED_SOUND = ("a2v", "v2a")
"""Modes that mean nothing for a silent clip: one has nothing to give, the other nothing to learn."""
_VARIANT = re.compile(r"(?P<mode>[a-z0-9_]+?)(?:\.(?P<references>\d+))?(?P<silent>-uncaptioned)?")


def keyframes_of(mode: Mode, places: Sequence[float], num_frames: int) -> tuple[str, ...]:
    """Names of the keyframes that a clip of so many frames has in a mode: `first`, `last` or the frame, counted from 0.

    Args:
        mode: Conditioning mode.
        places: Where `kf2va` has them, as fractions of the clip: 0 is its first frame, 1 its last.
        num_frames: Of the clip.
    """
    if mode != "kf2va":
        return KEYFRAMES.get(mode, ())
    return tuple(keyframe_at(frame) for frame in sorted({round(place * (num_frames - 1)) for place in places}))


def keyframe_at(frame: int) -> str:
    """Name of the keyframe at a frame: the one at 0 is `first`, as families treat it apart from the others."""
    return str(frame) if frame else "first"


def frame_of(keyframe: str) -> int:
    """Frame that a keyframe lies at, by its name; -1 is the last."""
    named = {"first": 0, "last": -1}
    return named[keyframe] if keyframe in named else int(keyframe)


def mode_of(keyframes: tuple[str, ...], *, references: bool) -> Mode:
    """The mode of a generation that is given these keyframes, or references.

    Raises:
        ValueError: both are given, which no mode takes.
    """
    if keyframes and references:
        raise ValueError("keyframes and references cannot be given together")
    if keyframes:
        return cast(Mode, next((mode for mode, names in KEYFRAMES.items() if names == keyframes), "kf2va"))
    return "ref2va" if references else "t2va"


class Variant(NamedTuple):
    """One way in which a clip is presented to the model, as encoded: `fl2va`, `ref2va.1`, `t2va-uncaptioned`."""

    mode: Mode
    references: int = 0
    """Which of the clip's sets of references; 0 for modes without."""
    captioned: bool = True
    """Whether the caption is said; without, the model learns to follow the other conditions alone."""

    def __str__(self) -> str:
        number = f".{self.references}" if self.mode == "ref2va" else ""
        return f"{self.mode}{number}{'' if self.captioned else '-uncaptioned'}"

    @classmethod
    @functools.lru_cache(maxsize=256)
    def parse(cls, text: str) -> Variant:
        """The variant that `str` gave this name.

        Raises:
            ValueError: it is no such name.
        """
        found = _VARIANT.fullmatch(text)
        if found is None or found["mode"] not in MODES:
            raise ValueError(f"{text!r} is no variant; modes are {', '.join(MODES)}")
        return cls(cast(Mode, found["mode"]), int(found["references"] or 0), found["silent"] is None)
