"""How long sound is cut, and how its pieces become one number."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from metrics.pieces import PAUSE, pieces, pooled
from metrics.score import Score

HZ = 100


@given(st.integers(1, 40_000), st.integers(0, 9))
def test_pieces_cover_the_sound_once_and_none_is_longer_than_what_is_whole(length: int, seed: int) -> None:
    sound = np.random.default_rng(seed).standard_normal(length)
    cuts = pieces(sound, HZ, 12)
    assert [cut.start for cut in cuts] == [0, *(cut.stop for cut in cuts[:-1])]
    assert cuts[-1].stop == length
    assert max(cut.stop - cut.start for cut in cuts) <= 15 * HZ
    assert len(cuts) == 1 or min(cut.stop - cut.start for cut in cuts) >= 4 * HZ


def test_a_cut_lies_in_the_pause_that_is_near() -> None:
    sound = np.ones(20 * HZ)
    sound[900:930] = 0
    assert 900 <= pieces(sound, HZ, 12)[0].stop <= 930


def test_a_missing_piece_makes_the_whole_missing_and_a_pause_does_not() -> None:
    cuts = [slice(0, 100), slice(100, 400), slice(400, 500)]
    assert pooled(cuts, [Score(1), Score(3), PAUSE], HZ) == Score(2.5)
    assert pooled(cuts, [Score(1), Score.missing("no"), PAUSE], HZ).reason == "from 1.0 to 4.0 s: no"
    assert pooled(cuts, [PAUSE] * 3, HZ).reason == pooled(cuts[:1], [PAUSE], HZ).reason == PAUSE.reason
