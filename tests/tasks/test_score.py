"""Two folders of any films or sounds: the contract of the result, published values, what is missing and why, resuming."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from data.media import write_media
from tasks import pairs
from tasks.__main__ import main

SPEECH = Path(__file__).parents[1] / "assets/eval"
CONTRACT = {"value", "unit", "n", "coverage", "ci95", "convention", "missing"}
NAMES = [
    "psnr_rgb",
    "psnr_y",
    "ssim_rgb",
    "ssim_y",
    "pesq_wb",
    "pesq_nb",
    "stoi",
    "estoi",
    "si_sdr",
    "lse_d",
    "lse_c",
    "sync_offset_frames",
    "dnsmos",
    "av_align",
    "flash_offset_ms",
    "fvd",
]
RATE_HZ = 48_000


def frames_of(number: int, noise: float, seed: int = 0) -> NDArray[np.uint8]:
    """A second of a square that moves over a gradient, and flashes once."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:64, :64]
    frames = np.repeat(np.stack([x * 2, y * 2, (x + y)], -1)[None], 24, axis=0).astype(np.float64)
    for index in range(24):
        frames[index, 10:26, 2 * (index // 2) + 3 * number : 2 * (index // 2) + 3 * number + 16] = 200
    frames[12] += 90
    return np.clip(frames + noise * rng.standard_normal(frames.shape), 0, 255).astype(np.uint8)


def sound_of(delay_s: float = 0.0) -> NDArray[np.float32]:
    """A click with the flash, on the left."""
    t = np.arange(RATE_HZ) / RATE_HZ - 0.5 - delay_s
    click = 0.5 * np.exp(-40 * np.maximum(t, 0)) * np.sin(2 * np.pi * 900 * t) * (t >= 0)
    return np.stack([click, 0.2 * click]).astype(np.float32)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three pairs of films of falling likeness, one film that nothing was generated for, and a folder below."""
    for number in range(3):
        for side, noise in (("real", 0.0), ("made", 4.0 * 3**number)):
            path = (
                tmp_path
                / side
                / ("below" if number == 2 else ".")
                / f"clip{number}.{'mp4' if side == 'real' else 'mkv'}"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            container = "mp4" if side == "real" else "matroska"
            write_media(path, frames_of(number, noise), sound_of(), frame_rate=24, sample_rate_hz=RATE_HZ, crf=4, container=container)  # fmt: skip
    shutil.copy(tmp_path / "real/clip0.mp4", tmp_path / "real/lonely.mp4")
    monkeypatch.chdir(tmp_path)
    for name in ("SOUNDSTAGE_SYNCNET", "SOUNDSTAGE_S3FD"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def scored(*more: str) -> dict[str, Any]:
    assert main(["score", "--reference", "real", "--generated", "made", "--out", "scores", *more]) == 0
    return json.loads(Path("scores/score.json").read_text())


def test_the_result_keeps_the_contract_and_says_what_is_missing(
    folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = scored()
    assert set(NAMES) <= found["metrics"].keys()
    assert list(found["items"]) == ["below/clip2", "clip0", "clip1", "lonely"]
    for score in (*found["metrics"].values(), *(one for item in found["items"].values() for one in item.values())):
        assert score.keys() >= CONTRACT
        assert (score["value"] is None) <= bool(score["missing"])
    psnr = {stem: item["psnr_rgb"]["value"] for stem, item in found["items"].items()}
    assert psnr["clip0"] > psnr["clip1"] + 5 > psnr["below/clip2"] + 10
    assert psnr["lonely"] is None
    whole = found["metrics"]["psnr_rgb"]
    assert whole["value"] == pytest.approx(np.mean([value for value in psnr.values() if value is not None]))
    assert (whole["n"], whole["coverage"]) == (3, 0.75)
    assert whole["ci95"][0] < whole["value"] < whole["ci95"][1]
    assert whole["missing"] == "generated has no lonely (1)"
    assert "SyncNet" in found["metrics"]["lse_d"]["missing"]
    assert found["items"]["clip0"]["flash_offset_ms"]["value"] == pytest.approx(0, abs=25)
    assert found["items"]["clip0"]["si_sdr"]["value"] > 10
    table = list(csv.reader(Path("scores/items.csv").read_text(encoding="utf-8").splitlines()))
    assert table[0][0] == "item"
    assert float(table[2][table[0].index("psnr_rgb")]) == psnr["clip0"]
    page = Path("scores/index.html").read_text()
    assert (folders / "made/clip0.mkv").as_uri() in page
    said = capsys.readouterr().out
    assert "psnr_rgb" in said
    assert "look at scores/index.html" in said
    assert not Path(".scores.unfinished").exists()


def test_published_values_of_speech_come_out_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for side, name in (("real", "speech.wav"), ("made", "speech_bab_0dB.wav")):
        Path(side).mkdir()
        shutil.copy(SPEECH / name, Path(side, "speech.wav"))
    found = scored()["items"]["speech"]
    assert found["pesq_wb"]["value"] == 1.0832337141036987
    assert found["pesq_nb"]["value"] == 1.6072081327438354
    assert found["stoi"]["value"] == pytest.approx(0.6739177895, abs=1e-9)
    assert found["estoi"]["value"] == pytest.approx(0.3904499910, abs=1e-9)
    assert "no picture" in found["psnr_rgb"]["missing"]


def test_what_cannot_be_compared_costs_its_item_alone(folders: Path) -> None:
    Path("made/clip0.mkv").write_bytes(b"nothing that plays")
    write_media(folders / "made/clip1.mkv", frames_of(1, 3.0)[:, :32], sound_of()[:, : RATE_HZ // 2], frame_rate=24, sample_rate_hz=RATE_HZ, container="matroska")  # fmt: skip
    found = scored("--num-workers", "2")["items"]
    assert found["clip0"]["psnr_rgb"]["value"] is None
    assert "clip0.mkv" in found["clip0"]["psnr_rgb"]["missing"]
    assert "clip0.mkv" in found["clip0"]["stoi"]["missing"]
    assert "64x32 px" in found["clip1"]["ssim_y"]["missing"]
    assert "clip1.mkv for 0.5" in found["clip1"]["stoi"]["missing"]
    assert found["below/clip2"]["psnr_rgb"]["value"] is not None


def test_a_run_that_was_interrupted_measures_the_rest_alone_and_ends_alike(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = scored()
    shutil.rmtree("scores")
    measure, asked = pairs.measure, list[str]()

    def counted(pair: pairs.Pair) -> pairs.Measured:
        asked.append(pair.stem)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return measure(pair)

    monkeypatch.setattr(pairs, "measure", counted)
    monkeypatch.setattr("data.workers.map_isolated", lambda function, items, *_: ((n, function(i)) for n, i in enumerate(items)))  # fmt: skip
    assert main(["score", "--reference", "real", "--generated", "made", "--out", "scores"]) == 130
    assert not Path("scores").exists()
    assert scored() == whole
    assert asked == ["below/clip2", "clip0", "clip1", "clip1", "lonely"]
    assert folders.is_dir()


def test_wrong_folders_are_refused_in_one_line(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", "--reference", "nowhere", "--generated", "made"]) == 2
    assert "reference: nowhere is no folder" in capsys.readouterr().err
    shutil.copy("real/clip0.mp4", "real/clip0.mov")
    assert main(["score", "--reference", "real", "--generated", "made"]) == 2
    assert "have one name" in capsys.readouterr().err
    (folders / "other").mkdir()
    (folders / "other/x.wav").write_bytes(b"x")
    Path("real/clip0.mov").unlink()
    assert main(["score", "--reference", "real", "--generated", "other"]) == 5
    assert main(["score", "--reference", "real", "--generated", "made", "--syncnet", "none.pth"]) == 3
    assert "none.pth" in capsys.readouterr().err
