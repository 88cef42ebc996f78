"""Networks of others: the adapter is tried with a tiny one of the same classes, the distance with closed forms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    ClapAudioConfig,
    ClapConfig,
    ClapFeatureExtractor,
    ClapModel,
    ClapTextConfig,
    PreTrainedTokenizerFast,
)

from data.files import sha256
from metrics.pretrained import (
    CLAP_FOLDER,
    MISSING,
    clap_embeddings,
    clap_folder,
    clap_score,
    frechet_distance,
    load_clap,
)
from tests.metrics.sounds import speech


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLAP of random weights and four words."""
    torch.manual_seed(0)
    audio = ClapAudioConfig(
        depths=[1, 1], num_attention_heads=[2, 2], num_hidden_layers=2, patch_embeds_hidden_size=8, hidden_size=16,
        num_mel_bins=64, spec_size=256, projection_dim=8,
    )  # fmt: skip
    text = ClapTextConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, projection_dim=8
    )
    path = tmp_path_factory.mktemp("clap")
    ClapModel(ClapConfig(text_config=text.to_dict(), audio_config=audio.to_dict(), projection_dim=8)).save_pretrained(
        path
    )
    words = Tokenizer(WordLevel({"<s>": 0, "<pad>": 1, "<unk>": 2, "bell": 3, "voice": 4}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>").save_pretrained(path)
    ClapFeatureExtractor(truncation="rand_trunc").save_pretrained(path)
    return path


def test_clap_is_the_cosine_that_the_library_gives(folder: Path) -> None:
    sound = np.repeat(speech(), 3, axis=1)[:, :48_000]  # one second at 48 kHz
    model = ClapModel.from_pretrained(folder).eval()
    given = ClapFeatureExtractor.from_pretrained(folder)(sound[0], sampling_rate=48_000, return_tensors="pt")
    with torch.inference_mode():
        both = model(input_ids=torch.tensor([[3]]), attention_mask=torch.ones(1, 1, dtype=torch.long), **given)
    expected = torch.nn.functional.cosine_similarity(both.text_embeds, both.audio_embeds)
    assert clap_score("bell", sound, 48_000, folder).value == pytest.approx(float(expected), abs=1e-5)
    assert clap_score("voice", sound, 48_000, folder).value != clap_score("bell", sound, 48_000, folder).value
    assert load_clap(folder).sha256 == sha256(folder / "model.safetensors")


def test_long_sound_is_heard_window_by_window_and_always_alike(folder: Path) -> None:
    sound = np.tile(speech(), 7)  # 21.7 s
    found = [clap_embeddings(sound, 16_000, load_clap(folder)) for _ in range(2)]
    assert found[0].shape == (3, 8)
    assert np.array_equal(*found)
    assert np.linalg.norm(found[0], axis=1) == pytest.approx(1)
    assert clap_embeddings(sound[:, : 16_000 * 20 + 100], 16_000, load_clap(folder)).shape == (2, 8)
    assert clap_embeddings(sound[:, :8000], 16_000, load_clap(folder)).shape == (1, 8)


def test_what_is_not_here_is_missing_and_says_what_to_set(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CLAP_FOLDER, raising=False)
    assert f"set {CLAP_FOLDER}" in clap_score("bell", speech(), 16_000).reason
    monkeypatch.setenv(CLAP_FOLDER, str(tmp_path))
    assert f"{tmp_path} holds no model.safetensors" in clap_score("bell", speech(), 16_000).reason
    monkeypatch.setenv(CLAP_FOLDER, str(folder))
    assert clap_folder() == folder
    assert clap_score(" ", speech(), 16_000).reason == "no text"
    assert "silent" in clap_score("bell", 0 * speech(), 16_000).reason
    assert set(MISSING) == {"desync", "ib_score", "fvd", "fad"}


def test_frechet_distance_has_its_closed_form() -> None:
    rng = np.random.default_rng(0)
    first = rng.standard_normal((500, 4)) @ np.diag([1, 2, 3, 4])
    assert frechet_distance(first, first).value == pytest.approx(0, abs=1e-9)
    assert frechet_distance(first, first + 2).value == pytest.approx(16)
    spread = np.trace(np.cov(first, rowvar=False))
    centred = first - first.mean(axis=0)
    assert frechet_distance(centred, 3 * centred).value == pytest.approx(4 * spread)
    one, other = rng.standard_normal((900, 3)) @ rng.standard_normal((3, 3)), rng.standard_normal((700, 3))
    covariances = np.cov(one, rowvar=False), np.cov(other, rowvar=False)
    product = np.sqrt(np.linalg.eigvals(covariances[0] @ covariances[1]).astype(complex)).real.sum()
    expected = np.square(one.mean(0) - other.mean(0)).sum() + sum(np.trace(each) for each in covariances) - 2 * product
    assert frechet_distance(one, other).value == pytest.approx(expected)
    assert "4 embeddings of 4 values; a covariance needs 5" in frechet_distance(first[:4], first).reason
