"""PESQ against its own stored values, in pieces, and what it cannot judge."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from metrics.pesq_runs import pesq_many, pesq_nb, pesq_wb, run_pesq
from metrics.pieces import pieces
from metrics.waveforms import resample
from tests.metrics.sounds import GOLDEN, RATE_HZ, speech


def test_pesq_equals_the_stored_values_both_bands() -> None:
    clean, noisy = speech(), speech("speech_bab_0dB.wav")
    assert pesq_nb(clean, noisy, 16_000).mean.value == GOLDEN["pesq_nb"]
    both = pesq_many([(clean, noisy), (clean, clean)], 16_000, "wb")
    assert both[0].mean.value == GOLDEN["pesq_wb"]
    assert both[1].mean.value == GOLDEN["pesq_wb_self"]


def test_stereo_pesq_gives_the_mean_and_the_worst_channel() -> None:
    clean, noisy = speech(), speech("speech_bab_0dB.wav")
    scores = pesq_wb(np.concatenate([clean, clean]), np.concatenate([clean, noisy]), 16_000)
    assert scores.worst.value == pytest.approx(GOLDEN["pesq_wb"], abs=1e-6)
    assert scores.mean.value == pytest.approx((GOLDEN["pesq_wb"] + GOLDEN["pesq_wb_self"]) / 2, abs=1e-6)


def test_wide_band_at_eight_kilohertz_is_missing_and_narrow_band_is_not() -> None:
    clean, noisy = (resample(speech(name), 16_000, RATE_HZ) for name in ("speech.wav", "speech_bab_0dB.wav"))
    assert "8000 Hz" in pesq_wb(clean, noisy, RATE_HZ).mean.reason
    assert pesq_nb(clean, noisy, RATE_HZ).mean.value == pytest.approx(1.6657, abs=0.002)


def test_what_pesq_cannot_judge_is_missing_with_the_reason() -> None:
    clean = resample(speech(), 16_000, RATE_HZ)
    silent, broken = np.zeros_like(clean), clean.copy()
    broken[0, 5] = np.nan
    pairs = [(clean, silent), (silent, clean), (clean[:, :1600], clean[:, :1600]), (clean, broken), (clean, clean)]
    reasons = [scores.mean.reason for scores in pesq_many(pairs, RATE_HZ, "nb")]
    expected = ["generated sound is silent", "reference is silent", "1/4 of a second", "not finite", ""]
    assert all(part in reason for part, reason in zip(expected, reasons, strict=True))
    assert reasons[-1] == ""


def test_a_silent_channel_is_named_and_not_averaged_away() -> None:
    clean = resample(speech(), 16_000, RATE_HZ)
    scores = pesq_nb(np.concatenate([clean, clean]), np.concatenate([clean, 0 * clean]), RATE_HZ)
    assert scores.mean.value is None
    assert scores.mean.reason.startswith("channel 1: generated sound is silent")


def bursts(count: int, on_s: float, off_s: float, hz: int = RATE_HZ) -> np.ndarray:
    """Noise that comes and goes, (1, T): each burst is an utterance."""
    rng = np.random.default_rng(0)
    one = np.concatenate([0.3 * rng.standard_normal(round(on_s * hz)), np.zeros(round(off_s * hz))])
    return np.tile(one, count)[None]


def test_a_crash_in_pesqs_c_code_costs_one_piece_and_no_process(tmp_path: Path) -> None:
    """Over about 55 separate utterances overrun a table of 50 in the reference code; a piece never has as many."""
    clean, long = resample(speech(), 16_000, RATE_HZ)[0], bursts(80, 1, 0.5)[0]
    for number, sound in enumerate((clean, long, clean)):
        np.save(tmp_path / f"{number}.npy", np.stack([sound, sound]).astype(np.float32))
    before, crashed, after = run_pesq(tmp_path, 3, RATE_HZ, "nb", 60)
    assert crashed.value is None
    assert "crashed with signal" in crashed.reason
    assert before.value == after.value == pytest.approx(4.5486, abs=1e-3)


@pytest.mark.parametrize(("count", "on_s", "off_s"), [(60, 1, 0.5), (80, 0.22, 0.22), (200, 0.3, 0.25)])
def test_any_number_of_bursts_has_a_score(count: int, on_s: float, off_s: float) -> None:
    clean = bursts(count, on_s, off_s)
    noisy = clean + 0.1 * np.random.default_rng(1).standard_normal(clean.shape)
    same, worse = pesq_many([(clean, clean), (clean, noisy)], RATE_HZ, "nb")
    assert same.mean.value == pytest.approx(4.5486, abs=1e-3)
    assert worse.mean.value is not None
    assert worse.mean.value < 4


def test_a_long_sound_has_the_mean_of_its_pieces_by_duration() -> None:
    clean, noisy = (np.tile(speech(name), 6) for name in ("speech.wav", "speech_bab_0dB.wav"))
    cuts = pieces(clean[0], 16_000, 12)
    assert len(cuts) == 2
    parts = [pesq_wb(clean[:, cut], noisy[:, cut], 16_000).mean.value for cut in cuts]
    expected = np.average(parts, weights=[cut.stop - cut.start for cut in cuts])
    assert pesq_wb(clean, noisy, 16_000).mean.value == pytest.approx(expected, abs=1e-9)


def test_a_pause_of_the_reference_is_left_out_and_one_of_the_generated_sound_is_not() -> None:
    clean = np.tile(resample(speech(), 16_000, RATE_HZ), 12)
    broken = clean.copy()
    broken[:, : 14 * RATE_HZ] = 0
    assert pesq_nb(broken, clean, RATE_HZ).mean.value is not None
    reason = pesq_nb(clean, broken, RATE_HZ).mean.reason
    assert reason.startswith("from 0.0 to ")
    assert "generated sound is silent" in reason


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the memory of a process")
def test_memory_of_a_long_sound_is_that_of_a_piece(tmp_path: Path) -> None:
    """What is held at most beside the sound itself, by us and by the child that scores, does not grow with it."""
    held = "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
    child = f"from metrics import pesq_child; pesq_child.main(); {held}"
    parent = (
        "import numpy, sys; from metrics.pesq_runs import pesq_nb;"
        "sound = numpy.load(sys.argv[1], mmap_mode='r');"
        f"assert pesq_nb(sound, sound, 8000).mean.value > 4.5; {held}"
    )
    peaks: dict[str, list[int]] = {"parent": [], "child": []}
    for count in (1, 8):
        sound = bursts(15 * count, 0.7, 0.3).astype(np.float32)
        np.save(tmp_path / "sound.npy", sound)
        for number in range(count):
            np.save(tmp_path / f"{number}.npy", np.tile(sound[:, : 15 * RATE_HZ], (2, 1)))
        runs = {
            "parent": (parent, [str(tmp_path / "sound.npy")]),
            "child": (child, [str(tmp_path), "0", str(count), "8000", "nb"]),
        }
        for name, (code, arguments) in runs.items():
            ended = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
            peaks[name].append(int(ended.stdout.splitlines()[-1]) - (sound.nbytes // 1024 if name == "parent" else 0))
    assert peaks["parent"][1] < 1.1 * peaks["parent"][0]
    assert peaks["child"][1] < 1.1 * peaks["child"][0]


def test_pesq_that_takes_too_long_is_stopped_and_missing() -> None:
    clean = np.tile(resample(speech(), 16_000, RATE_HZ), 4)  # longer than a busy machine keeps us waiting
    assert pesq_many([(clean, clean)], RATE_HZ, "nb", limit_s=0.001)[0].mean.reason == "PESQ took over 0.001 s"
