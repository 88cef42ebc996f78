"""What a stage may draw: entries and their variants as parallel arrays, so that a million take seconds.

An *item* is one variant of one entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow.compute
from numpy.typing import NDArray

from data.conditions import MODES, NEED_SOUND, Mode, Variant
from data.latent_index import LatentIndex
from data.stage import Stage

pc = cast(Any, pyarrow.compute)
"""A compiled library without a single type."""
Codes = NDArray[np.int32]
Places = NDArray[np.int64]
Flags = NDArray[np.bool_]
Reals = NDArray[np.float64]


class Candidates(NamedTuple):
    """The training entries of a store, sorted by name, and their items."""

    entries: Any
    """Arrow strings."""
    difficulty: Reals
    groups: Codes
    """Of each entry, as those below: place in `group_names`."""
    canvases: Codes
    duration_s: Reals
    rows: Codes
    """Of each item: place of its entry."""
    variants: Codes
    """Of each item, as those below: place in `variant_names`."""
    layouts: Codes
    num_tokens: Places
    group_names: tuple[str, ...]
    canvas_names: tuple[str, ...]
    variant_names: tuple[str, ...]

    @property
    def num_entries(self) -> int:
        """Training entries of the store."""
        return len(self.difficulty)


def candidates_of(index: LatentIndex, curriculum: Any = None) -> Candidates:
    """The training entries of an index.

    Args:
        index: Of the latent store.
        curriculum: Arrow table with `entry`, `group` and `difficulty`; without one all clips are equally easy.

    Raises:
        ValueError: the curriculum is one of other latents, or a difficulty in it is none.
    """
    names = ["entry", "group", "canvas", "has_audio", "num_frames", "frame_rate", "variants", "layouts", "num_tokens"]
    table = index.table.select(names).filter(pc.equal(index.table["split"], "train"))
    entries = table["entry"].combine_chunks()
    if not pc.all(pc.less(entries[:-1], entries[1:])).as_py():  # `encode` sorts it; so this is a matter of trust
        table = table.take(pc.sort_indices(entries))
        entries = table["entry"].combine_chunks()
    groups, difficulty = table["group"], np.zeros(len(entries))
    if curriculum is not None:
        places = joined(entries, curriculum["entry"])
        groups, difficulty = curriculum["group"].take(places), curriculum["difficulty"].take(places).to_numpy()
        refuse_unranked(entries, difficulty)
    lists = table["variants"].combine_chunks()
    rows = pc.list_parent_indices(lists).to_numpy().astype(np.int32)
    variants, variant_names = coded(lists.flatten())
    layouts, _ = coded(table["layouts"].combine_chunks().flatten())
    num_tokens = table["num_tokens"].combine_chunks().flatten().to_numpy()
    needs_sound = np.array([Variant.parse(name).mode in NEED_SOUND for name in variant_names], np.bool_)
    has_audio = table["has_audio"].to_numpy()
    kept = has_audio[rows] | ~needs_sound[variants]
    group_codes, group_names = coded(groups.combine_chunks())
    canvas_codes, canvas_names = coded(table["canvas"].combine_chunks())
    return Candidates(
        entries, difficulty, group_codes, canvas_codes, table["num_frames"].to_numpy() / table["frame_rate"].to_numpy(),
        rows[kept], variants[kept], layouts[kept], num_tokens[kept], group_names, canvas_names, variant_names,
    )  # fmt: skip


def joined(entries: Any, planned: Any) -> Any:
    """Place in the curriculum of each training entry.

    Raises:
        ValueError: either has an entry that the other lacks.
    """
    places = pc.index_in(entries, value_set=planned.combine_chunks())
    if places.null_count:
        first = entries.filter(pc.is_null(places))[0]
        raise ValueError(f"curriculum lacks {places.null_count} training clips, first {first}; run `soundstage plan`")
    if len(planned) != len(entries):
        absent = planned.filter(pc.is_null(pc.index_in(planned, value_set=entries)))
        first = absent[0] if len(absent) else "none, but some twice"
        raise ValueError(
            f"curriculum names {len(planned)} clips where the latent store has {len(entries)} to train on, first"
            f" without latents: {first}; run `soundstage plan`"
        )
    return places


def refuse_unranked(entries: Any, difficulty: Reals) -> None:
    """Raise ValueError where an entry has no difficulty between 0 and 1: it would be in no window, without a word."""
    wrong = np.flatnonzero(~((difficulty >= 0) & (difficulty <= 1)))
    if len(wrong):
        raise ValueError(
            f"curriculum: difficulty of {len(wrong)} of {len(difficulty)} training clips is no number between 0 and 1,"
            f" first {entries[int(wrong[0])]}: {difficulty[wrong[0]]:g}; run `soundstage plan`"
        )


def coded(column: Any) -> tuple[Codes, tuple[str, ...]]:
    """A column of names as places in the sorted list of them, and that list."""
    encoded = pc.dictionary_encode(column)
    names = cast("list[str]", encoded.dictionary.to_pylist())
    ordered = sorted(names)
    places = {name: place for place, name in enumerate(ordered)}
    ranks = np.array([places[name] for name in names], np.int32)
    return ranks[encoded.indices.to_numpy()], tuple(ordered)


class Kind(NamedTuple):
    """A conditioning mode, with or without the caption."""

    mode: Mode
    captioned: bool
    share: float
    """Of the drawn clips."""

    def __str__(self) -> str:
        return f"{self.mode}{'' if self.captioned else '-uncaptioned'}"


class Component(NamedTuple):
    """A part of the mixture."""

    name: str
    share: float
    """Of the drawn clips."""
    replay: bool = False


class Pool(NamedTuple):
    """Items that a stage may draw, ordered by component, kind, layout and difficulty: a bucket is a slice of them."""

    rows: Codes
    variants: Codes
    opens: Reals
    """Difficulty at which an item takes part; below 0 where pacing does not concern it."""
    starts: Places
    """Of each bucket, as those below: its first item."""
    capacity: Places
    """Clips that a batch may hold."""
    components: Codes
    kinds: Codes

    def sizes(self, limit: float) -> Places:
        """Items of each bucket that are open up to a difficulty."""
        return np.add.reduceat(self.opens <= limit, self.starts, dtype=np.int64)

    def num_entries(self, chosen: Flags) -> int:
        """Entries that the chosen items are of."""
        return int(np.bincount(self.rows[chosen]).astype(np.bool_).sum())


def kinds_of(stage: Stage) -> list[Kind]:
    """What a stage asks for, in a fixed order."""
    found: list[Kind] = []
    for mode in MODES:
        for captioned, part in ((True, 1 - stage.caption_dropout), (False, stage.caption_dropout)):
            share = stage.conditions.get(mode, 0) * part
            if share > 0:
                found.append(Kind(mode, captioned, share))
    return found


def components_of(stage: Stage) -> list[Component]:
    """Parts of a stage's mixture, in a fixed order, replay last."""
    weights = {group: weight for group, weight in sorted(stage.mixture.items()) if weight > 0}
    rest = 1 - stage.replay_share
    found = [Component(group, rest * weight / sum(weights.values())) for group, weight in weights.items()]
    found = found or [Component("", rest)]
    return [*found, Component("replay", stage.replay_share, replay=True)] if stage.replay_share > 0 else found


def memberships(candidates: Candidates, stage: Stage) -> Iterator[Codes]:
    """Component of each entry, −1 for none: once for what is trained on, once for what is replayed.

    Raises:
        ValueError: a canvas that the store lacks.
    """
    unknown = set(stage.canvases) - set(candidates.canvas_names)
    if unknown:
        raise ValueError(
            f"canvases: no {min(unknown)!r} in the latent store; it has {', '.join(candidates.canvas_names)}"
        )
    low, high = stage.difficulty
    difficulty, components = candidates.difficulty, components_of(stage)
    usable = np.ones(candidates.num_entries, np.bool_)
    if stage.canvases:
        usable &= named(candidates.canvas_names, stage.canvases)[candidates.canvases]
    if stage.max_duration_s is not None:
        usable &= candidates.duration_s <= stage.max_duration_s + 5e-4  # limits are written to the millisecond
    replayed = named(candidates.group_names, stage.replay_groups)[candidates.groups]
    places = {component.name: place for place, component in enumerate(components) if not component.replay}
    if stage.mixture:
        of_group = np.array([places.get(name, -1) for name in candidates.group_names], np.int32)[candidates.groups]
    else:  # what is replayed comes as replay alone, unless the mixture names it
        of_group = np.where(replayed, -1, 0) if stage.replay_share > 0 else np.zeros(candidates.num_entries)
    yield np.where(usable & (low <= difficulty) & (difficulty <= high), of_group, -1).astype(np.int32)
    if stage.replay_share > 0:
        old = replayed if stage.replay_groups else (difficulty < low) & (of_group >= 0)
        yield np.where(usable & old, len(components) - 1, -1).astype(np.int32)


def eligible(candidates: Candidates, stage: Stage) -> tuple[Flags, Flags]:
    """Entries that a stage may draw in one of its modes, and those among them that it may draw as replay.

    Raises:
        ValueError: a canvas that the store lacks.
    """
    window, *replay = (members >= 0 for members in memberships(candidates, stage))
    modes = {kind.mode for kind in kinds_of(stage)}
    wanted = np.array([Variant.parse(name).mode in modes for name in candidates.variant_names], np.bool_)
    usable = np.bincount(candidates.rows[wanted[candidates.variants]], minlength=candidates.num_entries) > 0
    replayed = usable & (replay[0] if replay else np.zeros(candidates.num_entries, np.bool_))
    return (window & usable) | replayed, replayed


def named(names: tuple[str, ...], wanted: tuple[str, ...]) -> Flags:
    """Which names are wanted."""
    return np.array([name in wanted for name in names], np.bool_)


def pool_of(candidates: Candidates, stage: Stage) -> Pool:
    """Items that a stage may draw.

    Raises:
        ValueError: a clip alone exceeds the token budget, or there is none.
    """
    wanted = kinds_of(stage)
    kinds = {(kind.mode, kind.captioned): place for place, kind in enumerate(wanted)}
    facts = [Variant.parse(name) for name in candidates.variant_names]
    of_variant = np.array([kinds.get((fact.mode, fact.captioned), -1) for fact in facts], np.int32)
    kind = of_variant[candidates.variants]
    items: list[Places] = []
    decks: list[Places] = []
    num_clips = 0
    for members in memberships(candidates, stage):
        num_clips += int((members >= 0).sum())
        component = members[candidates.rows]
        chosen = np.flatnonzero((component >= 0) & (kind >= 0))
        items.append(chosen)
        decks.append(component[chosen].astype(np.int64) * len(kinds) + kind[chosen])
    item, deck = np.concatenate(items), np.concatenate(decks)
    if not num_clips:
        raise ValueError(nothing(candidates, stage))
    refuse_kinds(wanted, np.unique(deck % len(kinds)).tolist(), num_clips, stage)
    num_layouts = int(candidates.layouts.max()) + 1
    bucket = deck * num_layouts + candidates.layouts[item]
    paced = deck // len(kinds) < sum(not component.replay for component in components_of(stage))
    opens = np.where(paced, candidates.difficulty[candidates.rows[item]], -1.0)
    if stage.pacing == "competence":
        order = np.argsort(opens, kind="stable")
        order = order[np.argsort(bucket[order], kind="stable")]
    else:
        order = np.argsort(bucket, kind="stable")
    item, bucket = item[order], bucket[order]
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    tokens = np.maximum.reduceat(candidates.num_tokens[item], starts)
    deck = bucket[starts] // num_layouts
    return Pool(
        candidates.rows[item], candidates.variants[item], opens[order], starts,
        capacities(candidates, stage, item[starts], tokens),
        (deck // len(kinds)).astype(np.int32), (deck % len(kinds)).astype(np.int32),
    )  # fmt: skip


def refuse_kinds(kinds: list[Kind], present: list[int], num_clips: int, stage: Stage) -> None:
    """Raise ValueError where a stage asks for what none of its clips was encoded for."""
    for kind in (kind for place, kind in enumerate(kinds) if place not in present):
        if kind.captioned:
            raise ValueError(
                f"conditions: none of {num_clips} clips can be drawn as {kind.mode}; set its share to 0 or add it to"
                " encode.modes"
            )
        raise ValueError(
            f"caption_dropout = {stage.caption_dropout:g} needs {kind.mode} without captions; set encode.uncaptioned"
            " or set caption_dropout to 0"
        )


def capacities(candidates: Candidates, stage: Stage, firsts: Places, tokens: Places) -> Places:
    """Clips that a batch of each bucket may hold.

    Raises:
        ValueError: not even one.
    """
    if stage.max_tokens is None:
        return np.full(len(tokens), stage.batch_size, np.int64)
    longest = int(tokens.argmax())
    if tokens[longest] > stage.max_tokens:
        item = firsts[longest]
        entry, variant = candidates.entries[int(candidates.rows[item])], candidates.variants[item]
        raise ValueError(
            f"clip {entry} as {candidates.variant_names[variant]} takes {tokens[longest]} tokens; limit max_tokens ="
            f" {stage.max_tokens}; raise it, or lower max_duration_s or canvases"
        )
    return np.minimum(stage.batch_size, stage.max_tokens // tokens)


def nothing(candidates: Candidates, stage: Stage) -> str:
    """Why there is no clip to train on."""
    narrowed = ["difficulty"] + [name for name in ("canvases", "max_duration_s", "mixture") if getattr(stage, name)]
    return f"no clip to train on (of {candidates.num_entries}); widen {', '.join(narrowed)} or add data"
