from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from data.files import sha256, write_records
from data.media import probe, read_clip
from data.records import Clip, ClipShape
from tasks.generate import Config, Request, fit, read_image, run

SHAPE = ClipShape(num_frames=22, frame_rate=24, height=16, width=16, sample_rate_hz=8000)


def config_of(folder: Path, **changes: Any) -> Config:
    """Few steps at 16 px, everything below `folder`."""
    settings = {"base": folder / "base", "splits": folder / "splits", "generations": folder / "generations"}
    return Config.model_validate({**settings, "shape": SHAPE, "num_inference_steps": 3, **changes})


def painted(path: Path, size: tuple[int, int] = (16, 16), **options: Any) -> Path:
    """An image file, left half dark."""
    pixels = np.full((size[1], size[0], 3), 200, np.uint8)
    pixels[:, : size[0] // 2] = 20
    Image.fromarray(pixels).save(path, **options)
    return path


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"last_frame": "b.png", "prompt": "a cat"}, "needs first_frame"),
        ({"first_frame": "a.png"}, "first_frame without a prompt"),
        ({"output": "out"}, "output without a prompt"),
        ({"prompt": ""}, "at least 1 character"),
        ({"num_inference_steps": 1}, "num_inference_steps"),
        ({"promt": "a cat"}, "promt"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path: Path, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        config_of(tmp_path, **wrong)


@pytest.mark.parametrize("wrong", [{"name": "../up"}, {"prompt": ""}, {"last_frame": "b.png"}])
def test_a_request_stays_in_its_folder_and_says_what_it_wants(wrong: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        Request.model_validate({"name": "one", "prompt": "a cat", **wrong})


def test_an_unreadable_keyframe_is_refused_by_name(tmp_path: Path) -> None:
    text = tmp_path / "text.png"
    text.write_text("not an image")
    short = painted(tmp_path / "short.jpg", (256, 256))
    short.write_bytes(short.read_bytes()[:-300])
    for path in (tmp_path / "missing.png", text, short):
        with pytest.raises(ValueError, match=path.name):
            read_image(path)


def test_keyframes_are_upright_rgb(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a clockwise quarter turn
    turned = read_image(painted(tmp_path / "phone.jpg", (32, 16), exif=exif))
    assert turned.shape == (32, 16, 3)
    assert turned[:12].max() < 60
    assert turned[20:].min() > 160
    Image.new("LA", (4, 2), (90, 255)).save(tmp_path / "grey.png")
    assert np.array_equal(read_image(tmp_path / "grey.png"), np.full((2, 4, 3), 90))


def test_fit_keeps_the_middle_and_averages_areas() -> None:
    assert fit(None, SHAPE) is None
    wide = np.zeros((32, 96, 3), np.uint8)
    wide[:, 32:64] = np.indices((32, 32)).sum(0)[..., None] % 2 * 200  # a chequerboard of 0 and 200
    fitted = fit(wide, SHAPE)
    assert fitted is not None
    assert np.array_equal(fitted, np.full((16, 16, 3), 100))


def test_a_corpus_without_held_out_clips_asks_for_a_prompt(tmp_path: Path) -> None:
    write_records(tmp_path / "splits" / "test.parquet", [], Clip)
    with pytest.raises(RuntimeError, match="prompt"):
        run(config_of(tmp_path))


def test_same_seed_gives_the_same_bytes_of_exact_length_with_two_channels(base: Path, tmp_path: Path) -> None:
    first, last = painted(tmp_path / "first.png", (40, 16)), painted(tmp_path / "last.png", (16, 40))
    wanted = {"base": base, "prompt": "a red ball bounces!", "first_frame": first, "last_frame": last}
    once, again, other = (
        run(config_of(tmp_path, **wanted, output=tmp_path / name, seed=seed))
        for name, seed in (("once", 1), ("again", 1), ("other", 2))
    )
    assert [path.name for path in once] == ["a-red-ball-bounces.mp4"]
    assert once[0].read_bytes() == again[0].read_bytes() != other[0].read_bytes()
    assert sha256(tmp_path / "once") == sha256(tmp_path / "again")
    facts = probe(once[0])
    assert (facts["num_frames"], facts["frame_rate"], facts["num_channels"]) == (22, "24", 2)
    assert facts["audio_duration_s"] == pytest.approx(22 / 24, abs=1e-3)
    frames, _ = read_clip(once[0], 0.0, None, SHAPE)
    assert frames.shape == (22, 16, 16, 3)
    assert not (tmp_path / "generations").exists()
