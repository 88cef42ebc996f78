"""What a panel shows: its items with their secret origin, and the order in which each rater meets them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.files import sha256
from data.records import Frozen

CANDIDATE, CHAMPION, REFERENCE, LOW_ANCHOR = "candidate", "champion", "reference", "low_anchor"
SCALES = ("picture", "sound", "sync", "overall")
RECORD, MEDIA, RATINGS = "panel.json", "media", "ratings.sqlite"
"""What lies in a panel's folder."""


class Item(Frozen):
    """One film of the panel."""

    name: str
    """Says nothing of where it comes from; its file is `media/NAME.mp4`."""
    source: str
    """Stem of the files it was made from."""
    system: str
    sha256: str
    """Of the film as shown."""
    duration_s: float
    gain_db: float | None
    """Put on its sound; None where it is silent."""
    training: bool
    """Shown first to get used to the task; its ratings count for nothing."""


class Panel(Frozen):
    """All that is kept of a panel beside films and ratings. Who rates must not see it."""

    version: int = 1
    seed: int
    num_repeats: int
    """Items that a rater meets twice."""
    items: tuple[Item, ...]
    left_out: dict[str, str]
    """Sources that could not be shown, with the reason."""
    quieter: dict[str, float]
    """Sources whose films are all quieter than asked for, so that none clips, with their loudness, LUFS."""

    @property
    def shown(self) -> list[Item]:
        """Items whose ratings count."""
        return [item for item in self.items if not item.training]

    @property
    def sources(self) -> list[str]:
        """Sources whose ratings count, in order of name."""
        return sorted({item.source for item in self.shown})

    @property
    def systems(self) -> list[str]:
        """Names of what is compared, as in the record."""
        return list(dict.fromkeys(item.system for item in self.shown))


class Showing(NamedTuple):
    """One item in a rater's order."""

    item: Item
    is_repeat: bool


def read(folder: Path) -> Panel:
    """The panel in a folder.

    Raises:
        RuntimeError: there is none, or a film is missing or not the one that was made.
    """
    record = folder / RECORD
    if not record.is_file():
        raise RuntimeError(f"{record} does not exist; run `soundstage panel make` first")
    panel = Panel.model_validate_json(record.read_bytes())
    for item in panel.items:
        film = film_of(folder, item)
        if not film.is_file() or sha256(film) != item.sha256:
            raise RuntimeError(f"{film} is missing or not the film that was made; run `soundstage panel make` again")
    return panel


def film_of(folder: Path, item: Item) -> Path:
    """Where an item's film lies."""
    return folder / MEDIA / f"{item.name}.mp4"


def order(panel: Panel, rater: int) -> list[Showing]:
    """What a rater meets, in order: training, then all items with some of them twice. A pure function of seed and rater."""
    rng = np.random.default_rng([panel.seed, rater])
    training = [item for item in panel.items if item.training]
    items = panel.shown
    twice = [int(place) for place in rng.permutation(len(items))[: panel.num_repeats]]
    result = [Showing(training[int(place)], is_repeat=False) for place in rng.permutation(len(training))]
    seen: set[str] = set()
    for item in arranged([*items, *(items[place] for place in twice)], rng):
        result.append(Showing(item, is_repeat=item.name in seen))
        seen.add(item.name)
    return result


def arranged(items: Sequence[Item], rng: np.random.Generator) -> list[Item]:
    """The items in random order, the same source never twice in a row as far as that can be."""
    waiting: defaultdict[str, list[Item]] = defaultdict(list)
    for place in rng.permutation(len(items)):
        item = items[int(place)]
        waiting[item.source].append(item)
    left = Counter({source: len(members) for source, members in sorted(waiting.items())})
    result: list[Item] = []
    last = ""
    for _ in items:
        last = chosen(left, last, rng)
        left[last] -= 1
        result.append(waiting[last].pop())
    return result


def chosen(left: Counter[str], last: str, rng: np.random.Generator) -> str:
    """Whose turn it is: drawn by how much is left, among those after which the rest can still be arranged."""
    others = [source for source, count in left.items() if count and source != last]
    fitting = [source for source in others if can_follow(left, source)]
    if not fitting:  # one source has more than half of the rest: the fewest neighbours come of spending it
        return max(others, key=lambda source: left[source], default=last)
    weights = np.array([left[source] for source in fitting], dtype=np.float64)
    return fitting[int(rng.choice(len(fitting), p=weights / weights.sum()))]


def can_follow(left: Mapping[str, int], source: str) -> bool:
    """Whether what is left after `source` can be arranged without neighbours of one source."""
    rest = sum(left.values()) - 1
    return left[source] - 1 <= rest // 2 and all(
        count <= (rest + 1) // 2 for other, count in left.items() if other != source
    )


def num_neighbours(showings: Sequence[Showing]) -> int:
    """How often the same source comes twice in a row among those that count."""
    sources = [showing.item.source for showing in showings if not showing.item.training]
    return sum(left == right for left, right in pairwise(sources))
