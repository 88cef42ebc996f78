"""Limits on the columns of clips: which are worth training on; and the rejects of those that are not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import ConfigDict, Field

from data import files
from data.records import Clip, Frozen, Reject, Source

Share = float | None


class Filters(Frozen):
    """Each field is `min_` or `max_` and a column of `Clip`; None is off, and what was not measured passes.

    The defaults leave out what holds nothing to learn from; what is merely less beautiful is a matter of taste.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    min_luma: float | None = Field(default=0.02, ge=0, le=1)
    """Least mean luma, 0–1; below it the picture is black."""
    max_black_share: float | None = Field(default=0.5, ge=0, le=1)
    """Largest share of black frames."""
    max_freeze_share: float | None = Field(default=0.9, ge=0, le=1)
    """Largest share of frames that repeat what was shown; animation on threes has 0.67, a slide show 0.95 and more."""
    max_letterbox_share: float | None = Field(default=0.5, ge=0, le=1)
    """Largest share of the picture that is black bars; wide cinema in 16:9 has 0.26, upright video in 16:9 0.68."""
    min_motion_p50: float | None = Field(default=None, ge=0)
    """Least motion, picture diagonals a second; a talking head has 0.005, a slow pan 0.05."""
    max_motion_p90: float | None = Field(default=None, ge=0)
    """Most motion, likewise; a whip pan has 1 and more."""
    min_sharpness_p90: float | None = Field(default=4.0, ge=0)
    """Least sharpness, variance of the Laplacian at 256 px: a picture out of focus has 1 to 5, an ordinary one 100 and
    more. It rejects only together with little motion: fast things blur, and are worth the more for it."""
    blur_motion: float = Field(default=0.02, ge=0)
    """Motion from which on blur is no fault, picture diagonals a second (`motion_p50`)."""
    max_residual_cuts: int | None = Field(default=None, ge=0)
    """Most transitions that a stricter look still sees inside; it sees some where there are none."""
    min_loudness_lufs: float | None = None
    """Least loudness of clips with sound, LUFS."""
    max_silent_share: float | None = Field(default=None, ge=0, le=1)
    """Largest silent share; clips without sound have 1."""
    min_speech_share: float | None = Field(default=None, ge=0, le=1)
    """Least share of speech."""
    min_dnsmos: float | None = Field(default=None, ge=1, le=5)
    """Least speech quality where there is speech (needs the detector `dnsmos`)."""
    max_text_share: float | None = Field(default=None, ge=0, le=1)
    """Largest share of the picture covered by text (needs the detector `text`)."""
    min_num_faces: int | None = Field(default=None, ge=0)
    """Least faces (needs the detector `faces`)."""


def fault(clip: Clip, filters: Filters) -> Reject | None:
    """The first limit that a clip breaks."""
    for name in Filters.model_fields:
        bound, _, column = name.partition("_")
        limit, measured = getattr(filters, name), getattr(clip, column, None)
        if name == "blur_motion" or limit is None or measured is None:
            continue
        if column == "sharpness_p90" and clip.motion_p50 >= filters.blur_motion:
            continue
        if measured < limit if bound == "min" else measured > limit:
            return rejected(clip, f"filters.{name}", f"{column} = {measured:.4g}", f"{limit:g}")
    return None


def rejected(item: Source | Clip, rule: str, measured: str, limit: str) -> Reject:
    """The reject of a source or clip by one option of `cut`."""
    name = item.clip_id if isinstance(item, Clip) else item.source_id
    return Reject(item=name, path=item.path, verb="cut", rule=f"cut.{rule}", measured=measured, limit=limit)


class Spill:
    """Rejects written beside the clips, a row group at a time."""

    def __init__(self, path: Path) -> None:
        self._path, self._number, self._rows = path, 0, list[Reject]()

    def extend(self, rows: Iterable[Reject]) -> None:
        """More rows."""
        self._rows += rows
        if len(self._rows) >= files.ROW_GROUP:
            self.close()

    def close(self) -> None:
        """Write what is held."""
        files.write_records(self._path.with_name(f"rejects-{self._number:06d}.parquet"), self._rows, Reject)
        self._number, self._rows = self._number + 1, []


def spilled(work: Path) -> Iterator[Reject]:
    """All rejects of the first pass, in order."""
    for path in sorted(work.glob("rejects-*.parquet")):
        yield from files.iter_records(path, Reject)
