"""Let people judge films blind, on a page of their own, and conclude mean opinion scores from their votes.

example: soundstage panel make report=data/store/report
example: soundstage panel make report=null candidate=out/new champion=out/old references=films/held_out
example: soundstage panel invite num_raters=8
example: soundstage panel serve port=8765
example: soundstage panel conclude
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from data.files import Holds, sha256, whole, write_text
from data.records import DataRefused, Frozen
from tasks.panel_plan import (
    CANDIDATE,
    CHAMPION,
    LOW_ANCHOR,
    MEDIA,
    RATINGS,
    RECORD,
    REFERENCE,
    Item,
    Panel,
    num_neighbours,
    order,
    read,
)

Action = Literal["make", "invite", "serve", "conclude"]
LOOPBACK = ("127.0.0.1", "localhost", "::1")
IN_REPORT = {CANDIDATE: "after.mp4", CHAMPION: "before.mp4", REFERENCE: "reference.mp4"}
"""Files of a clip in an evaluation's folder `media`."""
MIN_SOURCES = 3
TRAINED = (REFERENCE, LOW_ANCHOR, CANDIDATE, CHAMPION)
"""What is shown for training first: the best and the worst span the scales."""


class Config(Frozen):
    """What is judged, by whom, and where the answer goes."""

    panel: Annotated[Path, Holds((RECORD, MEDIA))]
    """Folder of the panel: films, the record of what they are, and the votes (back up `ratings.sqlite*`)."""
    mos: Path
    """JSON that `conclude` writes."""
    report: Path | None = None
    """Folder that `evaluate` wrote: the fine-tuned model is the candidate, the base model the champion."""
    candidate: Path | None = None
    """Instead of `report`: folder of films by the model to judge, paired with the others by file name without ending."""
    champion: Path | None = None
    """Folder of films by the model in use; null compares with the references alone."""
    references: Path | None = None
    """Folder of real films, shown unmarked among the others; the low anchors are made from them."""
    seed: int = 0
    """Decides choice, orders and intervals."""
    max_sources: int = Field(default=12, ge=MIN_SOURCES)
    """Sources at most, one of them for training; each costs a rater up to four films, and a session should stay below 30 min."""
    num_training: int = Field(default=3, ge=1, le=4)
    """Films shown first to get used to the task, all of one source, which is not judged."""
    num_repeats: int = Field(default=2, ge=0)
    """Films that each rater meets twice, unknowingly."""
    max_duration_s: float = Field(default=10.0, gt=0)
    """Longer films are cut, s. Source: ITU-T P.910 shows about 10 s."""
    loudness_lufs: float = Field(default=-23.0, ge=-60, le=-5)
    """Loudness of every film, LUFS. Source: EBU R 128."""
    num_raters: int = Field(default=15, gt=0, le=1000)
    """Invitations that `invite` prints. Source: about 15 are typical of ITU-T P.910."""
    host: str = "127.0.0.1"
    """Address that `serve` listens at; any but loopback lets others in, unencrypted: put a proxy with TLS before it."""
    port: int = Field(default=8765, ge=0, le=65535)
    """Its port; 0 takes a free one."""
    max_gold_failures: float = Field(default=0.25, ge=0, le=1)
    """A rater is left out who rates more than this share of low anchors no worse than their references."""
    max_repeat_difference: float = Field(default=1.0, ge=0, le=4)
    """Likewise whose two votes on the same film differ by more than this on average, of the scale's 1 to 5."""

    @model_validator(mode="after")
    def _one_origin(self) -> Config:
        folders = (self.candidate, self.champion, self.references)
        if self.report is not None and any(folders):
            raise ValueError("report and folders of films both say what is judged; set report=null for the folders")
        if self.report is None and any(folders) and not (self.candidate and self.references):
            raise ValueError("candidate and references are both needed; set both, and champion where there is one")
        return self


def run(config: Config, action: Action) -> Path | list[str] | None:
    """Make a panel, invite raters, serve it until interrupted, or conclude; returns the folder, tokens, or file.

    Raises:
        ValueError: an unknown action, or a panel that holds votes would be replaced.
        RuntimeError: no panel, or no films.
        DataRefused: too few sources can be shown, or too few raters used.
    """
    if action == "make":
        return make(config)
    if action == "invite":
        return invite(config)
    if action == "serve":
        return serve(config)
    if action == "conclude":
        return conclude(config)
    raise ValueError(f"{action!r}: say what to do: make, invite, serve or conclude")


def make(config: Config) -> Path:
    """Write the films, equal in all but what they show, and the record of what they are; returns the folder."""
    from tqdm import tqdm

    from data.media_open import Unreadable

    if (config.panel / RATINGS).exists():
        raise ValueError(f"{config.panel} holds votes; name another folder (panel.panel) or delete it yourself")
    sources, left_out = drawn_sources(config)
    items: list[Item] = []
    quieter: dict[str, float] = {}
    with whole(config.panel) as temporary:
        (temporary / MEDIA).mkdir(parents=True)
        for source, paths in tqdm(sources.items(), desc="films", unit="source", disable=None):
            try:
                added = films(config, temporary / MEDIA, source, paths, quieter, is_first=not items)
            except Unreadable as error:
                left_out[source] = str(error)
                continue
            items += added
            if len({item.source for item in items}) == config.max_sources:
                break
        if (num := len({item.source for item in items})) < MIN_SOURCES:
            raise DataRefused(few(num, left_out))
        panel = Panel(seed=config.seed, num_repeats=config.num_repeats, items=tuple(items), left_out=left_out, quieter=quieter)  # fmt: skip
        (temporary / RECORD).write_text(panel.model_dump_json(indent=1) + "\n", encoding="utf-8")
    sys.stderr.write(described(config.panel, panel))
    return config.panel


def few(num_sources: int, left_out: Mapping[str, str]) -> str:
    """Why there is no panel."""
    reasons = "".join(f"; {source}: {why}" for source, why in list(left_out.items())[:3])
    return f"{num_sources} sources can be shown; {MIN_SOURCES} are needed, one to practise on and two to tell apart{reasons}"


def drawn_sources(config: Config) -> tuple[dict[str, dict[str, Path]], dict[str, str]]:
    """Files of each source by system, in an order drawn by the seed, and why others are left out."""
    found = in_report(config.report) if config.report is not None else in_folders(config)
    wanted = {REFERENCE, CANDIDATE} | ({CHAMPION} if config.report is not None or config.champion else set[str]())
    missing = {source: sorted(wanted - paths.keys()) for source, paths in found.items() if wanted - paths.keys()}
    left_out = {source: f"no {' and no '.join(names)}" for source, names in sorted(missing.items())}
    drawn = sorted(
        found.keys() - missing.keys(), key=lambda name: hashlib.sha256(f"{config.seed} {name}".encode()).digest()
    )
    if not drawn:
        raise RuntimeError(f"no source has a film of every system{few(0, left_out)[len('0 sources can be shown') :]}")
    return {source: found[source] for source in drawn}, left_out


def in_report(report: Path) -> dict[str, dict[str, Path]]:
    """Films of an evaluation, by source and system."""
    if not (report / "media").is_dir():
        raise RuntimeError(f"{report / 'media'} does not exist; run `soundstage evaluate` first")
    clips = sorted(path for path in (report / "media").iterdir() if path.is_dir())
    return {
        clip.name: {system: clip / name for system, name in IN_REPORT.items() if (clip / name).is_file()}
        for clip in clips
    }


def in_folders(config: Config) -> dict[str, dict[str, Path]]:
    """Films of folders, by stem and system.

    Raises:
        ValueError: nothing says what is judged, a folder is none, or two of its films share a stem.
    """
    if config.candidate is None or config.references is None:
        raise ValueError("nothing to judge; set panel.report, or panel.candidate and panel.references")
    result: dict[str, dict[str, Path]] = {}
    folders = {CANDIDATE: config.candidate, CHAMPION: config.champion, REFERENCE: config.references}
    for system, folder in folders.items():
        if folder is None:
            continue
        if not folder.is_dir():
            raise ValueError(
                f"panel.{'references' if system == REFERENCE else system} = {folder}: there is no such folder"
            )
        files = (path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
        for path in sorted(each for each in files if each.suffix not in (".json", ".txt", ".csv")):
            other = result.setdefault(path.stem, {}).setdefault(system, path)
            if other != path:
                raise ValueError(f"{other} and {path.name} share the stem {path.stem}; leave one of them out")
    return result


def films(
    config: Config, folder: Path, source: str, paths: Mapping[str, Path], quieter: dict[str, float], *, is_first: bool
) -> list[Item]:
    """Write the films of one source; the first source is for training. Names are drawn, so that nobody can work them out."""
    from data.media_open import Unreadable
    from tasks import panel_media

    shape = panel_media.shape_of(paths, config.max_duration_s)
    sounds = panel_media.sounds_of(paths, shape)
    gains, loudness = panel_media.gains_of(sounds, config.loudness_lufs)
    if gains[REFERENCE] is None:
        raise Unreadable(f"reference: {paths[REFERENCE]} is silent, so that neither sound nor sync can be judged")
    if loudness < config.loudness_lufs:
        quieter[source] = round(loudness, 2)
    items: list[Item] = []
    for system in [name for name in TRAINED if name in sounds][: config.num_training] if is_first else sounds:
        name, is_low_anchor = secrets.token_hex(8), system == LOW_ANCHOR
        film, origin = folder / f"{name}.mp4", paths[REFERENCE if is_low_anchor else system]
        waveform_CT = panel_media.amplified(sounds[system], gains[system])
        panel_media.write(film, origin, shape, waveform_CT, is_low_anchor=is_low_anchor)
        items.append(
            Item(
                name=name, source=source, system=system, sha256=sha256(film), duration_s=float(shape.duration_s),
                gain_db=gains[system], training=is_first,
            )
        )  # fmt: skip
    return items


def described(folder: Path, panel: Panel) -> str:
    """What a panel holds, in lines."""
    showings = order(panel, 1)
    length_s = sum(showing.item.duration_s for showing in showings)
    lines = [
        f"panel: {folder}: {', '.join(panel.systems)} of {len(panel.sources)} sources",
        f"panel: a rater watches {len(showings)} films, {length_s / 60:.1f} min without voting",
    ]
    if neighbours := num_neighbours(showings):
        lines.append(f"panel: the same source comes twice in a row {neighbours} times: {len(panel.sources)} sources allow no other order")  # fmt: skip
    lines += [f"panel: {source} left out: {reason}" for source, reason in panel.left_out.items()]
    lines += [
        f"panel: films of {source} are at {level:g} LUFS, louder ones would clip"
        for source, level in panel.quieter.items()
    ]
    return "\n".join(lines) + "\n"


def invite(config: Config) -> list[str]:
    """Print a link for each new rater, the only time that it can be seen; returns the tokens."""
    from tasks.panel_log import Log

    read(config.panel)
    tokens = Log(config.panel / RATINGS, sha256(config.panel / RECORD)).invite(config.num_raters, time.time())
    for token in tokens:
        sys.stdout.write(f"http://{address(config.host, config.port)}/#{token}\n")
    sys.stderr.write(f"panel: {len(tokens)} links; only their hashes are kept, so send them now\n")
    return tokens


def address(host: str, port: int) -> str:
    """Host and port as they stand in a link."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def serve(config: Config) -> None:
    """Serve the panel until interrupted; what was acknowledged is kept whatever happens."""
    from tasks.panel_server import Server

    try:
        server = Server(config.panel, config.host, config.port)
    except OSError as error:
        raise RuntimeError(f"panel.host = {config.host}, port = {config.port}: {error.strerror or error}; choose others") from error  # fmt: skip
    with server:
        host, port = str(server.server_address[0]), int(server.server_address[1])
        sys.stderr.write(f"panel: open for raters at http://{address(host, port)}/ (Ctrl-C ends it)\n")
        if host not in LOOPBACK:
            sys.stderr.write(f"panel: {host} can be reached from other machines, unencrypted\n")
        sys.stderr.flush()
        server.serve_forever()


def conclude(config: Config) -> Path:
    """Write what the raters found; returns the file."""
    from tasks import panel_results
    from tasks.panel_log import Log

    panel = read(config.panel)
    log = Log(config.panel / RATINGS, sha256(config.panel / RECORD))
    limits = panel_results.Limits(config.max_gold_failures, config.max_repeat_difference)
    found: dict[str, Any] = panel_results.conclude(panel, log.ratings(), log.progress(), limits)
    write_text(config.mos, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    for system, scales in found["systems"].items():
        said = ", ".join(
            f"{scale} {each['mos']:.2f} [{each['ci95'][0]:.2f}, {each['ci95'][1]:.2f}]"
            for scale, each in scales.items()
        )
        sys.stderr.write(f"panel: {system}: {said}\n")
    return config.mos
