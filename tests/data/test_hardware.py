from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from data import hardware

Answer = tuple[NDArray[np.uint8], bool]
honest = hardware.decoded


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """Every test asks the card anew."""
    hardware.fault.cache_clear()
    hardware._say_once.cache_clear()
    yield
    hardware.fault.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, card: Callable[[bytes], Answer]) -> None:
    """A card that answers as `card` does; the processor stays honest."""
    monkeypatch.setattr(hardware, "hwdevices_available", lambda: ["cuda"])
    monkeypatch.setattr(hardware, "decoded", lambda clip, accel: honest(clip, None) if accel is None else card(clip))


def good(clip: bytes) -> Answer:
    return honest(clip, None)[0], True


def one_pixel_off(clip: bytes) -> Answer:
    pictures = honest(clip, None)[0].copy()
    pictures[-1, 5, 5] ^= 1
    return pictures, True


def green(clip: bytes) -> Answer:
    return np.zeros_like(honest(clip, None)[0]), True


def frame_short(clip: bytes) -> Answer:
    return honest(clip, None)[0][:-1], True


def processor_in_disguise(clip: bytes) -> Answer:
    return honest(clip, None)


def no_driver(clip: bytes) -> Answer:
    raise PermissionError(1, "Operation not permitted")


LIARS: dict[Callable[[bytes], Answer], str] = {
    one_pixel_off: "decoded 1 of ",
    green: "samples of a trial clip wrongly",
    frame_short: "gave 2 of 3 frames",
    processor_in_disguise: "decoded by the processor after all",
    no_driver: "Operation not permitted",
}


def test_processor_needs_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, no_driver)
    assert hardware.hwaccel("cpu") is None


@pytest.mark.parametrize("decoder", ["auto", "cuda"])
def test_card_that_gives_the_same_pixels_is_used(monkeypatch: pytest.MonkeyPatch, decoder: Any) -> None:
    pretend(monkeypatch, good)
    assert hardware.hwaccel(decoder) is not None


@pytest.mark.parametrize("liar", LIARS, ids=lambda liar: liar.__name__)
def test_card_that_lies_is_found_out(monkeypatch: pytest.MonkeyPatch, liar: Callable[[bytes], Answer]) -> None:
    pretend(monkeypatch, liar)
    with pytest.raises(RuntimeError, match=LIARS[liar]) as raised:
        hardware.hwaccel("cuda")
    assert "set decoder = cpu" in str(raised.value)


def test_auto_falls_back_with_one_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(monkeypatch, green)
    assert [hardware.hwaccel("auto") for _ in range(3)] == [None] * 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "decoding on the processor" in said


def test_workers_leave_the_message_to_the_first_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, green)
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    assert hardware.hwaccel("auto") is None
    assert capsys.readouterr().err == ""


def test_build_without_nvdec_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "hwdevices_available", lambda: ["drm"])
    with pytest.raises(RuntimeError, match="knows no NVDEC"):
        hardware.hwaccel("cuda")


def test_trial_clip_moves_and_is_decoded_by_the_processor() -> None:
    pictures, on_card = honest(hardware.trial_clip(), None)
    assert len(pictures) == hardware.NUM_FRAMES
    assert not on_card
    assert (pictures[0] != pictures[1]).any()


@pytest.mark.gpu
@pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA card")
def test_this_card_decodes_as_the_processor_does() -> None:
    assert hardware.fault() is None
