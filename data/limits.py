"""What a source must be: the settings of `validate`, and with it of `inspect`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from data.captions import CaptionLimits
from data.records import ClipShape

Share = Annotated[float, Field(ge=0, le=1)]


class Limits(CaptionLimits):
    """What a source must be to be used, and the shape it is brought to; None asks nothing."""

    model_config = ConfigDict(allow_inf_nan=False)  # nothing is above or below NaN: such a limit is silently none

    shape: ClipShape = ClipShape()
    """What a training clip is; treatments are stated relative to it."""
    min_duration_s: float = Field(default=0.9, ge=0)
    """Shortest picture, s; less than one training clip yields nothing."""
    min_side_px: int = Field(default=16, gt=0)
    """Shortest side as displayed, px."""
    max_side_px: int = Field(default=8192, gt=0)
    """Longest side as displayed, px; 8K cinema is 8192 wide, and one frame of it 0.2 GB."""
    min_frame_rate: float = Field(default=8, gt=0)
    """Lowest average frame rate, frames a second; below it retiming repeats every picture three times."""
    max_frame_rate: float = Field(default=240, gt=0)
    """Highest average frame rate, frames a second; above it the timestamps are usually wrong."""
    max_frame_jitter: float | None = Field(default=None, ge=0)
    """Largest deviation of a frame interval from the median interval, as a share of it; retimed where None."""
    max_aspect: float = Field(default=4, ge=1)
    """Longest side over shortest side; the family's canvases go from 1:4 to 4:1."""
    hdr: Literal["tone_map", "reject"] = "tone_map"
    """PQ and HLG pictures are tone-mapped to BT.709 when they are read (diffuse white of 203 cd/m² to 90 % of the signal,
    1000 cd/m² and more to all of it), or left out."""
    max_interlaced_share: Share | None = None
    """Largest share of frames stored as two fields; of both the top one is shown, with half the lines, where None."""
    max_channels: int = Field(default=8, gt=0)
    """Most sound channels; up to 7.1 there is a stated downmix to two."""
    dead_side: Literal["warn", "reject"] = "warn"
    """Stereo with one silent side is marked, so that stereo measures leave it out, or rejected."""
    max_sound_gap_s: float | None = Field(default=5, ge=0)
    """Longest stretch at either end where only one of picture and sound runs, s; up to it sound is padded or trimmed.
    Trailers hold their last picture for 3 s; more is a wrong or torn file, and so is sound that lies wholly before or after
    its picture, however near. A sound file of its own may be longer."""
    max_peak: float = Field(default=4, gt=0)
    """Largest absolute sample, full scale = 1; floating-point sound may overshoot by 12 dB, integers as floats do more."""
    max_true_peak_db: float | None = None
    """Largest value between samples, dB true peak; streaming services ask for -1."""
    min_loudness_lufs: float | None = None
    """Least integrated loudness, LUFS; broadcast is at -23 (EBU R 128)."""
    max_loudness_lufs: float | None = None
    """Most integrated loudness, LUFS."""
    max_clipped_share: Share | None = None
    """Largest share of samples at full scale."""
    max_silent_share: Share | None = None
    """Largest share of the sound that is below -60 dB full scale."""
    min_speech_share: Share | None = None
    """Least share of the sound that is speech; for corpora of speakers."""
    max_speech_share: Share | None = None
    """Largest share of the sound that is speech; for corpora of sound effects."""
    max_black_share: Share | None = None
    """Largest share of black frames; `cut` judges every clip by its own."""
    max_freeze_share: Share | None = None
    """Largest share of frames that repeat the one before; likewise."""
    max_letterbox_share: Share | None = None
    """Largest share of the picture that is black bars throughout; likewise."""
    default_caption: str = Field(default="a video with sound", min_length=1)
    """Caption of a source that has none."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Limits:
        for low in type(self).model_fields:
            high = low.replace("min_", "max_", 1)
            least, most = getattr(self, low), getattr(self, high, None)
            if low.startswith("min_") and least is not None and most is not None and least > most:
                raise ValueError(f"{low} = {least:g} is above {high} = {most:g}, so nothing can pass")
        return self
