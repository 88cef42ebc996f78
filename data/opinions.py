"""What people thought of the films: the part of a panel's `mos.json` that the gate reads."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Opinion(BaseModel):
    """A system's mean opinion score on one scale; what else the file says is left to others."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    mean: float = Field(ge=1, le=5)
    low: float
    """Lower end of the 95 % interval over raters and clips."""
    high: float
    num_raters: int = Field(ge=0)
    """Raters whose votes count."""
    num_clips: int = Field(ge=0)


class Opinions(BaseModel):
    """`mos.json`: systems, and of each its scales (`picture`, `sound`, `sync`, `overall`)."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    systems: dict[str, dict[str, Opinion]]
