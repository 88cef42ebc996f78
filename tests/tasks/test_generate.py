from __future__ import annotations

import json
import re
import shutil
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from pydantic import ValidationError

from data.files import sha256, write_records
from data.media import probe, read_clip, write_media, write_mp4
from data.records import Clip, ClipShape
from data.references import of_path, read
from data.world import scene
from models.generation import Generator
from tasks.__main__ import EXIT_CONFIGURATION, main
from tasks.generate import Config, Request, fit, read_image, run
from tests.models.originals import original_h3

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
        ({"last_frame": "b.png"}, "last_frame without a prompt"),
        ({"references": ["a.png"]}, "references without a prompt"),
        ({"references": ["a.png"], "last_frame": "b.png", "prompt": "a cat"}, "cannot be given together"),
        ({"references": "a.png", "prompt": "a cat"}, "references"),
        ({"weights": "w.safetensors", "checkpoint": "all", "prompt": "a cat"}, "checkpoint=null"),
        ({"keyframes": {9: "a.png"}}, "keyframes without a prompt"),
        ({"keyframes": {9: "a.png"}, "references": ["b.png"], "prompt": "a cat"}, "cannot be given together"),
        ({"keyframes": {22: "a.png"}, "prompt": "a cat"}, r"keyframes\.22: .*num_frames = 22 gives frames 0 to 21"),
        ({"keyframes": {-1: "a.png"}, "prompt": "a cat"}, r"keyframes\.-1: the clip has no frame -1"),
        ({"keyframes": {"mid": "a.png"}, "prompt": "a cat"}, "keyframes"),
        ({"keyframes": {0: "a.png"}, "first_frame": "b.png", "prompt": "a cat"}, "keyframes.0 are the same frame"),
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


@pytest.mark.parametrize("wrong", [{"name": "../up"}, {"prompt": ""}, {"last_frame": "b", "references": ["c"]}])
def test_a_request_stays_in_its_folder_and_says_what_it_wants(wrong: dict[str, Any]) -> None:
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
    wide = np.zeros((32, 96, 3), np.uint8)
    wide[:, 32:64] = np.indices((32, 32)).sum(0)[..., None] % 2 * 200  # a chequerboard of 0 and 200
    fitted = fit(wide, SHAPE)
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


def test_a_last_frame_alone_is_encoded_as_training_does(base: Path, tmp_path: Path) -> None:
    last = painted(tmp_path / "last.png")
    wanted = {"base": base, "prompt": "a red ball bounces", "seed": 4}
    made = {
        name: run(config_of(tmp_path, **wanted, output=tmp_path / name, **{name: last}))[0]
        for name in ("last_frame", "first_frame")
    }
    frames, waveform = Generator.load(base, None, SHAPE).generate(
        ["a red ball bounces"], last=[read_image(last)], seed=4, num_inference_steps=3
    )[0]
    write_mp4(tmp_path / "own.mp4", frames, waveform, SHAPE.frame_rate, SHAPE.sample_rate_hz)
    assert made["last_frame"].read_bytes() == (tmp_path / "own.mp4").read_bytes() != made["first_frame"].read_bytes()
    record = json.loads(made["last_frame"].with_suffix(".json").read_text())
    assert record["request"]["last_frame"] == str(last)
    assert record["request"]["first_frame"] is None


@pytest.fixture
def references(tmp_path: Path) -> list[Path]:
    """A picture, a video with sound at other rates, and a sound."""
    made = scene("new", 4, 1.5, 30, 32, 16000, "bounce")
    film, sound = tmp_path / "film.mp4", tmp_path / "voice.wav"
    write_mp4(film, made.frames_FHWC, made.waveform_CT, 30, 16000)
    write_sound(sound, made.waveform_CT)
    return [painted(tmp_path / "face.png", (40, 32)), film, sound]


def write_sound(path: Path, waveform_CT: np.ndarray) -> None:
    """A WAV of 16-bit stereo at 16 kHz."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes((waveform_CT.T * 32767).round().astype("<i2").tobytes())


@pytest.fixture
def twofold(base: Path, tmp_path: Path) -> Path:
    """The tiny H3 with a second transformer of other weights, for references."""
    folder = shutil.copytree(base, tmp_path / "twofold")
    path = shutil.copytree(folder / "transformer", folder / "transformer_ref") / "diffusion_pytorch_model.safetensors"
    torch.manual_seed(7)
    safetensors.torch.save_file(
        {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in safetensors.torch.load_file(path).items()},
        path,
    )
    return folder


def test_references_are_used_in_order_by_the_transformer_that_serves_them(
    base: Path, twofold: Path, references: list[Path], tmp_path: Path
) -> None:
    wanted = {"prompt": "she says hello", "references": references}
    made = run(config_of(tmp_path, base=twofold, **wanted, output=tmp_path / "out"))[0]
    given = [read(of_path(str(path)), SHAPE) for path in references]
    assert [reference.kind for reference in given] == ["image", "video", "audio"]
    frames, waveform = Generator.load(twofold, None, SHAPE, partition="transformer_ref").generate(
        ["she says hello"], references=[given], seed=0, num_inference_steps=3
    )[0]
    write_mp4(tmp_path / "own.mp4", frames, waveform, SHAPE.frame_rate, SHAPE.sample_rate_hz)
    assert made.read_bytes() == (tmp_path / "own.mp4").read_bytes()
    record = json.loads(made.with_suffix(".json").read_text())
    assert record["request"]["references"] == [str(path) for path in references]
    assert record["weights_sha256"] == sha256(twofold / "transformer_ref")
    facts = probe(made)
    assert (facts["num_frames"], facts["num_channels"]) == (22, 2)
    others = {
        "one transformer": config_of(tmp_path, base=base, **wanted, output=tmp_path / "one"),
        "another order": config_of(
            tmp_path, base=twofold, prompt="she says hello", references=references[::-1], output=tmp_path / "back"
        ),
        "none": config_of(tmp_path, base=twofold, prompt="she says hello", output=tmp_path / "none"),
    }
    contents = {name: run(config)[0].read_bytes() for name, config in others.items()}
    assert len({made.read_bytes(), *contents.values()}) == 4


def test_weights_of_an_original_file_generate_what_they_do_in_the_diffusers_layout(
    base: Path, twofold: Path, tmp_path: Path
) -> None:
    file = tmp_path / "h3.safetensors"
    safetensors.torch.save_file(
        original_h3(safetensors.torch.load_file(twofold / "transformer_ref" / "diffusion_pytorch_model.safetensors")),
        file,
    )
    wanted = {"base": base, "prompt": "a red ball", "converted": tmp_path / "converted"}
    made = {
        name: run(config_of(tmp_path, **wanted, weights=weights, output=tmp_path / name))[0].read_bytes()
        for name, weights in (("file", file), ("folder", twofold / "transformer_ref"), ("base", None))
    }
    assert made["file"] == made["folder"] != made["base"]
    (kept,) = (path for path in (tmp_path / "converted").iterdir() if path.is_dir())
    record = json.loads((tmp_path / "file" / "a-red-ball.json").read_text())
    assert record["weights_sha256"] == sha256(kept)
    assert record["request"].keys() == {"name", "prompt", "first_frame", "last_frame"}


HOSTILE = {
    "missing": (["gone.png"], r"reference gone.png: there is no such file"),
    "text": (["face.png", "text.png"], r"reference text.png: is text/plain, not a media file"),
    "cut": (["cut.mp4"], r"reference cut.mp4: "),
    "empty": (["empty.wav"], r"reference empty.wav: is empty"),
    "folder": (["."], r"reference \.: "),
    "sound alone": (["voice.wav"], r"references voice.wav: .*cannot be used on its own"),
    "too many": (["face.png"] * 10, r"references face.png, .*at most 9 image references, got 10"),
    "too short": (["face.png", "short.mp4"], r"references face.png, short.mp4: .*at least \d+ frames"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_bad_reference_is_one_line_that_names_it(
    base: Path, references: list[Path], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    names, words = HOSTILE[kind]
    Path("text.png").write_text("not an image at all")
    Path("cut.mp4").write_bytes(references[1].read_bytes()[:400])
    Path("empty.wav").touch()
    film = scene("new", 4, 1.5, 24, 32, 16000, "bounce")
    write_media(
        Path("short.mp4"), film.frames_FHWC[:6], film.waveform_CT[:, :4000], frame_rate=24, sample_rate_hz=16000
    )
    Path("params.yaml").write_text(config_of(tmp_path, base=base).model_dump_json().join(("generate: ", "\n")))
    given = [f"references=[{', '.join(names)}]", "prompt=a cat", "output=out"]
    assert main(["generate", *given]) == EXIT_CONFIGURATION
    said = capsys.readouterr().err.strip().splitlines()[-1]

    assert re.search(words, said), said
    assert said.startswith("soundstage generate: ")
    assert "Traceback" not in said
    assert not Path("out").exists()


def test_wrong_weights_and_adapters_are_one_line_too(
    base: Path, references: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params = tmp_path / "params.yaml"
    settings = config_of(tmp_path, base=base, converted=tmp_path / "converted").model_dump_json()
    params.write_text(f"generate: {settings}\n")
    for setting, words in (
        (f"weights={references[0]}", f"{references[0]} is no safetensors file"),
        (f"weights={tmp_path / 'gone.safetensors'}", "there is no such file or folder"),
        (f"adapter={references[0]}", f"{references[0]} is no safetensors file"),
        (f"adapter={base / 'transformer' / 'diffusion_pytorch_model.safetensors'}", "does not say which transformer"),
    ):
        arguments = ["generate", setting, "prompt=a cat", f"output={tmp_path / 'out'}", "--params", str(params)]
        assert main(arguments) == EXIT_CONFIGURATION
        assert words in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
