from __future__ import annotations

import av
import numpy as np
import pytest

from data.media_layout import BY_COUNT, Orientation, channel_names, downmix, to_stereo


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("mirrored", [False, True])
def test_orientation_turns_clockwise_after_mirroring(turns: int, mirrored: bool) -> None:
    picture = np.arange(6, dtype=np.uint8).reshape(2, 3, 1).repeat(3, axis=2)
    expected = np.fliplr(picture) if mirrored else picture
    for _ in range(turns):
        expected = expected[::-1].transpose(1, 0, 2)  # one quarter turn clockwise, by hand
    assert np.array_equal(Orientation(turns, mirrored).apply(picture), expected)


@pytest.mark.parametrize("name", ["mono", "stereo", "2.1", "4.0", "5.1", "5.1(side)", "7.1"])
def test_named_layouts_keep_their_names(name: str) -> None:
    layout = av.AudioLayout(name)
    assert channel_names(layout) == tuple(channel.name for channel in layout.channels)


def test_nameless_channels_get_the_usual_places() -> None:
    assert channel_names(av.AudioLayout("6 channels")) == BY_COUNT[6]


def test_mirrored_layouts_mix_to_mirrored_sides() -> None:
    for names in BY_COUNT.values():
        swapped = tuple(name[:-1] + {"L": "R", "R": "L"}.get(name[-1], name[-1]) for name in names)
        assert np.array_equal(downmix(names)[::-1], downmix(swapped))


def test_low_frequency_channel_is_left_out_and_mono_is_whole() -> None:
    assert not downmix(("FL", "FR", "LFE"))[:, 2].any()
    assert (downmix(("FC",)) == 1).all()


def test_loud_mix_is_turned_down_and_stereo_is_not() -> None:
    loud = np.ones((6, 10), np.float32)
    assert np.abs(to_stereo(loud, BY_COUNT[6])).max() == pytest.approx(1)
    assert np.array_equal(to_stereo(1.5 * loud[:2], BY_COUNT[2]), 1.5 * loud[:2])
