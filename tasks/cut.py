"""Cut accepted sources into clips: scenes, then spans of exactly one training length, measured, filtered, compared.

Example: soundstage cut filters.max_black_share=0.2 near_duplicates=drop max_clips_per_source=20
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from data import files, rules
from data.engines import Engine, Lost, map_ordered
from data.filters import Filters, Spill, fault, rejected, spilled
from data.records import Clip, ClipShape, DataRefused, Frozen, Reject, Source
from data.sensing import Sensing

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from data.hearing import SoundTrack
    from data.measure import Measurement
    from data.shots import Window
    from data.twins import Twins


class Config(Frozen):
    """How sources become clips."""

    accepted: Path
    """Parquet of accepted sources."""
    clips: Path
    """Parquet of clips to write."""
    rejects: Path
    """Parquet of clips and sources left out."""
    expectations: Path | None = None
    """JSON to write: what the expectations on all clips found; None asks none."""
    docs: Annotated[Path | None, files.Holds(("index.html",), below="clips")] = None
    """Folder for the same as pages."""
    work: Path = Path("data/store/work")
    """Scratch folder; holds the measurements that ingest has remembered. Changes no result."""
    shape: ClipShape
    """What a clip is; spans are exactly `num_frames / frame_rate` long."""
    sensing: Sensing = Sensing()
    """How sources are measured; where it equals ingest's, nothing is decoded again. Key frames alone are too few here."""
    engine: Engine = Engine()
    """How many sources are cut at once, where, and what each may use."""
    margin_s: float = Field(default=0.05, ge=0)
    """Distance of a clip from every transition, s; one frame at 24 fps, so that rounding never shows the other shot."""
    min_shot_s: float = Field(default=0.25, ge=0)
    """Spans between transitions shorter than this are no shots, s."""
    stricter: float = Field(default=0.05, ge=0, le=1)
    """Added to the similarity that counts as one scene, when `residual_cuts` are counted."""
    min_sound_share: float = Field(default=0.5, ge=0, le=1)
    """Share of a clip that sound must cover to be learnt from; below it the clip counts as without sound."""
    filters: Filters = Filters()
    """Limits on the clips' columns; null is off."""
    detectors: tuple[Literal["faces", "text", "dnsmos"], ...] = ()
    """Columns that need networks: `num_faces`, `text_share`, `dnsmos` (`sh infra/detectors.sh`, `pip install -e '.[speech]'`)."""
    near_duplicates: Literal["keep", "drop"] = "keep"
    """Clips that look like one of another source: kept in one cluster, or only the sharpest of them kept."""
    soundalikes: bool = True
    """Whether sources that share three seconds of sound share a cluster, whatever they show. Off where films that have
    nothing else in common share their music: they would all be one cluster, and in one split."""
    max_clips_per_source: int = Field(default=200, gt=0)
    """Most clips of one source, spread evenly over it, so that one film does not outweigh a folder of clips."""


class Cut(NamedTuple):
    """What one source gave; one signature a clip."""

    clips: tuple[Clip, ...]
    rejects: tuple[Reject, ...]
    signatures: tuple[NDArray[np.int8], ...] = ()
    sound: NDArray[np.float16] | None = None
    """Its `soundalikes.levels`, where it has clips."""


class Result(Frozen):
    """How much was cut."""

    num_sources: int
    num_clips: int
    num_rejected_clips: int
    num_rejected_sources: int
    num_near_duplicates: int
    """Clips that look like one of another source."""
    num_soundalikes: int
    """Sources that sound like another one."""


def run(config: Config) -> Result:
    """Write clips and rejects in the order of the sources; every source has a clip or a reject.

    Raises:
        DataRefused: no source gives a clip, or a critical expectation fails; no clips are left then.
        RuntimeError: a detector or encoder that is asked for is not installed.
    """
    from data import detectors, hardware

    detectors.require(config.detectors)
    if config.engine.name == "local":
        hardware.hwaccel(config.sensing.decoder)  # says once, here, whether the card decodes; children are silent
    num_sources = files.num_records(config.accepted)
    files.remove(config.clips)
    with files.whole(config.work / "cut") as work:
        work.mkdir()
        counts = first_pass(config, work)
        if not counts["clips"]:
            refuse(config, work, num_sources)
        twins = second_pass(config, work)
        num_rejects = files.num_records(config.rejects)
        if config.expectations is not None:
            judge(config, work)
    files.remove(config.work / "cut")
    sys.stderr.write(said(config, counts, num_sources))
    return Result(
        num_sources=num_sources,
        num_clips=files.num_records(config.clips),
        num_rejected_clips=num_rejects - counts["lost sources"],
        num_rejected_sources=counts["lost sources"],
        num_near_duplicates=len(twins.worse),
        num_soundalikes=twins.num_soundalikes,
    )


def first_pass(config: Config, work: Path) -> Counter[str]:
    """Cut every source; clips, rejects and signatures go to files of `work` as they come."""
    import numpy as np

    counts: Counter[str] = Counter()
    lengths: list[int] = []
    with (work / "signatures").open("wb") as stream, (work / "sounds").open("wb") as sounds:

        def clips() -> Iterator[Clip]:
            for cut in cut_all(config):
                held.extend(cut.rejects)
                counts.update({"clips": len(cut.clips), "lost sources": int(not cut.clips)})
                if cut.sound is not None:
                    sounds.write(cut.sound.tobytes())
                    lengths.append(len(cut.sound))
                counts.update(reject.rule for reject in cut.rejects if "-" in reject.item)
                for clip, signature in zip(cut.clips, cut.signatures, strict=True):
                    stream.write(signature.tobytes())
                    counts["bytes"] = signature.nbytes
                    yield clip

        held = Spill(work / "rejects.parquet")
        files.write_records(work / "clips.parquet", clips(), Clip)
        held.close()
    np.save(work / "sounds.npy", np.array(lengths, np.int64))
    return counts


def said(config: Config, counts: Counter[str], num_sources: int) -> str:
    """One line about what was cut and what was left out, by rule."""
    num_clips = files.num_records(config.clips)
    rules_broken = Counter({rule: count for rule, count in counts.items() if rule.startswith("cut.")})
    rules_broken["cut.near_duplicates"] = counts["clips"] - num_clips
    broken = [f"{count} by {rule}" for rule, count in rules_broken.most_common() if count]
    left = f"; spans left out: {', '.join(broken)}" if broken else ""
    gave = f"{num_clips} clips of {num_sources} sources, {counts['lost sources']} of which gave none"
    return f"cut: {gave}{left}; written to {config.clips}\n"


def refuse(config: Config, work: Path, num_sources: int) -> None:
    """Write why there is no clip, and say so."""
    files.write_records(config.rejects, spilled(work), Reject)
    rules_broken = Counter(reject.rule for reject in spilled(work))
    counts = ", ".join(f"{count} by {rule}" for rule, count in rules_broken.most_common())
    length = float(config.shape.duration_s)
    raise DataRefused(f"none of {num_sources} sources gives a clip of {length:.3f} s: {counts}")


def second_pass(config: Config, work: Path) -> Twins:
    """Give every clip its cluster, leave out near duplicates where asked; returns what is alike."""
    from data import twins

    sounds = work / "sounds" if config.soundalikes else None
    found = twins.find(work / "clips.parquet", work / "signatures", sounds)
    drop = config.near_duplicates == "drop"

    def clips() -> Iterator[Clip]:
        for number, clip in enumerate(files.iter_records(work / "clips.parquet", Clip)):
            if not drop or number not in found.worse:
                cluster = found.clusters.get(clip.source_id, clip.source_id)
                yield clip.model_copy(update={"cluster": cluster})

    def rejects() -> Iterator[Reject]:
        yield from spilled(work)
        for clip, twin, likeness in found.named(work / "clips.parquet") if drop else ():
            yield rejected(clip, "near_duplicates", f"likeness {likeness:.3f} to {twin}", "one of each")

    files.write_records(config.clips, clips(), Clip)
    files.write_records(config.rejects, rejects(), Reject)
    return found


def judge(config: Config, work: Path) -> None:
    """Hold all clips against their expectations.

    Raises:
        DataRefused: a critical one fails.
    """
    from data import expectations
    from tasks import judging

    assert config.expectations is not None
    docs = config.docs or config.work / "docs"
    suite = expectations.clips_suite(config.shape)
    try:
        with expectations.clips_frame(
            files.iter_records(config.clips, Clip), work / "asked.sqlite", config.shape
        ) as table:
            judging.enforce("clips", table, suite, config.expectations, docs)
    except DataRefused:
        files.remove(config.clips)
        raise


def cut_all(config: Config) -> Iterator[Cut]:
    """What every source gives, in order; one whose decoder crashes or hangs gives a reject."""
    from tqdm import tqdm

    def sources() -> Iterator[Source]:
        rows = files.iter_records(config.accepted, Source)
        return (source for source in rows if source.use == "clip")

    work = functools.partial(cut_source, config=config)
    answers = map_ordered(work, sources(), config.engine)
    bar = tqdm(total=files.num_records(config.accepted), desc="cut", unit="source", disable=None)
    with bar:
        for source, answer in zip(sources(), answers, strict=True):
            bar.update()
            yield unreadable(source, answer.reason) if isinstance(answer, Lost) else answer


def unreadable(source: Source, reason: str) -> Cut:
    """What a source gives that does not decode."""
    return Cut((), (rejected(source, "readable", reason, "a file that decodes"),))


def cut_source(source: Source, config: Config) -> Cut:
    """All clips of one source, from its remembered measurement or one pass over it; errors become a reject."""
    from data import boundaries, measure, shots
    from data.media_open import Unreadable
    from data.remote import local

    sensing = config.sensing.model_copy(update={"decode": "all"})
    try:
        other = None if source.sound_path is None else local(source.sound_path)
        found = measure.remembered(local(source.path), source.sha256, sensing, config.work, other)
    except (Unreadable, OSError) as error:
        return unreadable(source, str(error))
    error, track = found.facts.get("error"), found.picture
    if error is not None or track is None:
        return unreadable(source, str(error or "holds no moving picture"))
    transitions = boundaries.find(track)
    scenes = shots.shots(transitions, source.video_duration_s, config.min_shot_s)
    spans = [span for shot in scenes for span in shots.windows(shot, config.shape.duration_s, config.margin_s)]
    if not spans:
        black, length = float(track.black.mean()), float(config.shape.duration_s)
        rule, measured = shots.no_room(transitions, source.video_duration_s, config.min_shot_s, black)
        limit = f"one clip of {length:.3f} s, margin_s = {config.margin_s:g} from cuts"
        limit = f"a picture for {length:.3f} s on end" if rule == "black" else limit
        return Cut((), (rejected(source, rule, measured, limit),))
    strict = [item.end_s for item in boundaries.find(track, config.stricter)]
    clips = [described(source, span, found, strict, config) for span in spans]
    return chosen(source, clips, found, config)


def described(source: Source, span: Window, found: Measurement, strict: Sequence[float], config: Config) -> Clip:
    """A span with all its columns; `strict` are the transitions that the stricter look sees."""
    from data import detectors, features, hearing

    assert found.picture is not None
    heard = hears(source, found.sound, span.start_s, span.end_s, config.min_sound_share)
    sound, start_s, end_s = found.sound if heard else None, span.start_s, span.end_s
    speech = None if sound is None else hearing.speech_share(sound, start_s, end_s)
    loudness = None if sound is None else hearing.loudness_lufs(sound, start_s, end_s)
    look = features.look(found.picture, start_s, end_s)
    clip = Clip(
        clip_id=f"{source.source_id}-{round(start_s * 1000):06d}",
        source_id=source.source_id,
        path=source.path,
        sound_path=source.sound_path,
        references=source.references,
        group=source.group,
        caption=source.caption or "",
        caption_language=source.caption_language,
        licence=source.licence,
        start_s=start_s,
        end_s=end_s,
        width=source.width,
        height=source.height,
        boundary_reason=span.reason,
        boundary_score=span.score,
        residual_cuts=sum(start_s + config.margin_s < at < end_s - config.margin_s for at in strict),
        has_audio=heard,
        **look._asdict(),
        loudness_lufs=loudness,
        silent_share=1.0 if sound is None else hearing.silent_share(sound, start_s, end_s),
        speech_share=speech,
        cluster=source.source_id,
    )
    return clip.model_copy(update=detectors.columns(clip, source, config.detectors)) if config.detectors else clip


def chosen(source: Source, clips: Sequence[Clip], found: Measurement, config: Config) -> Cut:
    """The clips that pass the filters, and the rejects; a source that keeps none is a reject as well."""
    from data import duplicates, soundalikes

    faults = [(clip, fault(clip, config.filters)) for clip in clips]
    rejects = [reject for _, reject in faults if reject is not None]
    good = [clip for clip, reject in faults if reject is None]
    limit = config.max_clips_per_source
    picked = {number * len(good) // limit for number in range(limit)} if len(good) > limit else set(range(len(good)))
    kept = [clip for number, clip in enumerate(good) if number in picked]
    surplus = [clip for number, clip in enumerate(good) if number not in picked]
    measured = f"{len(good)} clips"
    rejects += [rejected(clip, "max_clips_per_source", measured, f"{limit} clips, spread evenly") for clip in surplus]
    if not kept:
        ((rule, _),) = Counter(reject.rule.removeprefix("cut.") for reject in rejects).most_common(1)
        first = next(reject for reject in rejects if reject.rule == f"cut.{rule}")
        rejects.append(
            rejected(source, rule, f"none of {len(clips)} spans passes; the first has {first.measured}", first.limit)
        )
    assert found.picture is not None
    signatures = tuple(duplicates.signature(found.picture, clip.start_s, clip.end_s) for clip in kept)
    return Cut(tuple(kept), tuple(rejects), signatures, soundalikes.levels(found.sound) if kept else None)


def hears(source: Source, sound: SoundTrack | None, start_s: float, end_s: float, min_share: float) -> bool:
    """Whether the source's sound covers enough of a span."""
    start, end = rules.sound_span(source)
    if source.sound_path is not None and sound is not None:
        start, end = sound.start_s, sound.start_s + sound.duration_s
    covered = min(end, end_s) - max(start, start_s)
    return covered > 0 and covered >= min_share * (end_s - start_s)
