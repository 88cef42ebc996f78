"""Everything that can be measured of a generated film or sound beside its reference.

Legend: C channels, T samples.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from metrics.score import Measure, Score
from tasks.lips import LIP_MEASURES, Lips, lip_scores, no_lips

if TYPE_CHECKING:
    from metrics.sound import Waveform

MAX_LENGTH_DIFFERENCE = 0.1
"""Share of the longer sound that the shorter may lack; what both have is compared."""


class Pair(NamedTuple):
    """One item to measure, and how its lips are."""

    stem: str
    reference: Path | None
    generated: Path | None
    absent: str
    """Why one of them is None."""
    lips: Lips


class Measured(NamedTuple):
    """An item's scores, and the conventions that its lips were measured by."""

    scores: dict[str, Score]
    lips: str


def measures() -> dict[str, Measure]:
    """Everything that is measured, by the names of the result."""
    from metrics.alignment import AV_ALIGN_CONVENTION, EVENT_CONVENTION
    from metrics.films import FILM_MEASURES
    from metrics.pretrained import MISSING
    from metrics.sound import SOUND_METRICS

    beyond = {
        "av_align": Measure("", True, AV_ALIGN_CONVENTION),
        "flash_offset_ms": Measure("ms", None, f"clicks after flashes; {EVENT_CONVENTION}"),
        "flash_share": Measure("", True, "flashes that have a click at flash_offset_ms"),
        **dict.fromkeys(MISSING, Measure("", None, "as its authors publish it")),
    }
    return {**FILM_MEASURES, **SOUND_METRICS, **LIP_MEASURES, **beyond}


def measure(pair: Pair) -> Measured:
    """Every score of `measures`; what cannot be measured is missing with its reason, and nothing raises."""
    names = measures()
    if pair.reference is None or pair.generated is None:
        return Measured(dict.fromkeys(names, Score.missing(pair.absent)), "")
    from metrics.films import compare_films
    from metrics.pretrained import MISSING

    lips, convention = lips_of(pair.generated, pair.lips)
    found = {**compare_films(pair.reference, pair.generated), **sound_scores(pair.reference, pair.generated), **lips}
    found |= {**alignment_of(pair.generated), **{name: Score.missing(why) for name, why in MISSING.items()}}
    return Measured({name: found.get(name, Score.missing("not measured")) for name in names}, convention)


def sound_scores(reference: Path, generated: Path) -> dict[str, Score]:
    """Every score of `SOUND_METRICS`, over what both sounds have."""
    from metrics.sound import SOUND_METRICS, measure, pesq_many

    try:
        pair_CT, rate_hz = common_sounds(reference, generated)
    except Uncommon as error:
        return dict.fromkeys(SOUND_METRICS, Score.missing(str(error)))
    found = measure(*pair_CT, rate_hz)
    for mode in ("nb", "wb"):
        scores = pesq_many([pair_CT], rate_hz, mode)[0]
        found |= {f"pesq_{mode}": scores.mean, f"pesq_{mode}_worst": scores.worst}
    return found


def alignment_of(path: Path) -> dict[str, Score]:
    """Whether what is heard goes with what is seen in a film, beyond lips."""
    from data.media_open import Unreadable
    from data.media_timeline import iter_shown, stated_rate
    from metrics.alignment import av_align, flash_offset

    try:
        (sound_CT, rate_hz), rate = heard_of(path), stated_rate(path)
        aligned = av_align((shown.rgb for shown in iter_shown(path, rate)), sound_CT, rate, rate_hz)
        flashes = flash_offset((shown.rgb for shown in iter_shown(path, rate)), sound_CT, rate, rate_hz)
    except (Uncommon, Unreadable) as error:
        said = str(error) if isinstance(error, Uncommon) else f"{path.name} {error}"
        return dict.fromkeys(("av_align", "flash_offset_ms", "flash_share"), Score.missing(said))
    return {"av_align": aligned, "flash_offset_ms": flashes.offset_ms, "flash_share": flashes.share}


class Uncommon(ValueError):
    """Sounds that cannot be compared; the message says why."""


def common_sounds(reference: Path, generated: Path) -> tuple[tuple[Waveform, Waveform], int]:
    """Both sounds from when the pictures begin, with as many channels, at the lower rate, as long as the shorter.

    Raises:
        Uncommon: one is missing or does not decode, or their lengths differ by more than a tenth.
    """
    from data.media_layout import BY_COUNT, to_stereo
    from metrics.waveforms import resample

    sounds: list[Waveform] = []
    heard = [heard_of(path) for path in (reference, generated)]
    rate_hz = min(rate for _, rate in heard)
    widest = max(len(sound_CT) for sound_CT, _ in heard)
    for sound_CT, rate in heard:
        wide_CT = sound_CT if widest == 1 or len(sound_CT) == 2 else to_stereo(sound_CT, BY_COUNT[len(sound_CT)])
        sounds.append(resample(wide_CT, rate, rate_hz))
    shorter, longer = sorted(sound.shape[1] for sound in sounds)
    if longer - shorter > MAX_LENGTH_DIFFERENCE * longer:
        lengths = [f"{sound.shape[1] / rate_hz:.2f} s" for sound in sounds]
        limit = f"limit {MAX_LENGTH_DIFFERENCE:.0%} of the longer"
        raise Uncommon(f"{reference.name} sounds for {lengths[0]}, {generated.name} for {lengths[1]}; {limit}")
    return (sounds[0][:, :shorter], sounds[1][:, :shorter]), rate_hz


def heard_of(path: Path) -> tuple[Waveform, int]:
    """A file's sound from when its picture begins, and its rate, Hz.

    Raises:
        Uncommon: it has none, or does not decode.
    """
    import numpy as np

    from data.media_layout import BY_COUNT
    from data.media_open import Unreadable
    from data.media_sound import read_sound

    try:
        sound_CT, rate_hz, start_s = read_sound(path)
    except Unreadable as error:
        raise Uncommon(f"{path.name} {error}") from error
    if not sound_CT.size:
        raise Uncommon(f"{path.name} has no sound")
    if len(sound_CT) not in BY_COUNT:
        raise Uncommon(f"{path.name} has {len(sound_CT)} channels; at most {max(BY_COUNT)} are known")
    lead = round(start_s * rate_hz)
    return (np.pad(sound_CT, ((0, 0), (lead, 0))) if lead > 0 else sound_CT[:, -lead:]), rate_hz


def lips_of(path: Path, lips: Lips) -> tuple[dict[str, Score], str]:
    """The lip sync of a film, and the convention it was measured by."""
    from data.media_open import Unreadable
    from data.media_timeline import iter_shown

    try:
        return lip_scores(lambda: (shown.rgb for shown in iter_shown(path, Fraction(25))), heard_of(path), lips)
    except (Uncommon, Unreadable) as error:
        return no_lips(str(error) if isinstance(error, Uncommon) else f"{path.name} {error}"), ""
