"""Which source goes to which split: by hash of the source, by exact shares of every group, and all clips of it together."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Literal

SplitName = Literal["train", "val", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "val", "test")
MIN_STRATUM = 3
"""Groups with fewer sources cannot give to every split and are shared out together."""


def assign(groups: Mapping[str, str], seed: int, val_share: float, test_share: float) -> dict[str, SplitName]:
    """The split of every source.

    The sources of a group stand in the order of their hashes: the first go to test, the next to val, the rest to
    train, each share rounded to the nearest source. If that leaves val empty, the largest group gives it one. What holds
    when a source is added: other groups of three or more sources do not change (unless val was or becomes empty); in
    its own group at most one source crosses each border, so none moves between test and train while the group has
    a val source.

    Args:
        groups: group by source id.
        seed: Another seed is another draw.
        val_share: Of the sources of a group.
        test_share: Of the sources of a group; groups of three and more give at least one.

    Raises:
        ValueError: fewer than three sources in all.
    """
    if len(groups) < MIN_STRATUM:
        raise ValueError(f"{len(groups)} sources; train, val and test need at least {MIN_STRATUM}")
    result: dict[str, SplitName] = {}
    ranked = {name: sorted(members, key=lambda item: rank(seed, item)) for name, members in strata(groups).items()}
    for members in ranked.values():
        num_test, num_val = counts(len(members), val_share, test_share)
        for position, source_id in enumerate(members):
            result[source_id] = "test" if position < num_test else "val" if position < num_test + num_val else "train"
    if val_share > 0 and "val" not in result.values():
        largest = max(ranked.values(), key=len)
        trained = [source_id for source_id in largest if result[source_id] == "train"]
        tested = [source_id for source_id in largest if result[source_id] == "test"]
        result[trained[0] if len(trained) > 1 else tested[-1]] = "val"
    return result


def strata(groups: Mapping[str, str]) -> dict[str | None, list[str]]:
    """Sources by group, sorted; groups too small to be split are pooled under None."""
    members: defaultdict[str, list[str]] = defaultdict(list)
    for source_id in sorted(groups):
        members[groups[source_id]].append(source_id)
    large: dict[str | None, list[str]] = {k: members[k] for k in sorted(members) if len(members[k]) >= MIN_STRATUM}
    pooled = sorted(source_id for group in members.values() if len(group) < MIN_STRATUM for source_id in group)
    return large | ({None: pooled} if pooled else {})


def counts(num_sources: int, val_share: float, test_share: float) -> tuple[int, int]:
    """Test and val sources of a stratum: nearest to the shares, test and train at least one each from three on."""
    if num_sources < MIN_STRATUM:
        return 0, 0
    num_test = min(max(1, int(num_sources * test_share + 0.5)), num_sources - 1)
    return num_test, min(int(num_sources * val_share + 0.5), num_sources - num_test - 1)


def rank(seed: int, source_id: str) -> str:
    """A place in an order that looks random and that no other source changes."""
    return hashlib.sha256(f"{seed} {source_id}".encode()).hexdigest()
