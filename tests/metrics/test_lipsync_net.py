"""SyncNet against the public graph's stored outputs under weights made by a formula; its cepstra; its distances."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from data.files import sha256
from metrics.lipsync import syncnet
from metrics.lipsync.distances import MAX_SHIFT, distances, median_filter, sync
from metrics.lipsync.mfcc import mfcc, sound_windows
from metrics.lipsync.syncnet import Network, SyncNet, load, network

ASSETS = Path(__file__).parents[1] / "assets/eval"
GOLDEN = json.loads((ASSETS / "syncnet_golden.json").read_text())


def speech() -> NDArray[np.int16]:
    with wave.open(str(ASSETS / "speech.wav")) as stream:
        return np.frombuffer(stream.readframes(stream.getnframes()), np.int16)


def hashed(count: int, tensor: int) -> NDArray[np.float64]:
    """Numbers in [-1, 1) by the recipe's hash."""
    with np.errstate(over="ignore"):
        bits = np.arange(count, dtype=np.uint64) + np.uint64(1) + np.uint64(tensor) * np.uint64(0x1000003)
        bits = bits * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
        bits ^= bits >> np.uint64(31)
    return (bits >> np.uint64(11)).astype(np.float64) / 2**53 * 2 - 1


def formula_net() -> SyncNet:
    """The net with the weights of the recipe stored beside the golden values."""
    net = SyncNet().eval()
    norms = {name for name, part in net.named_modules() if "BatchNorm" in type(part).__name__}
    names = [name for name in net.state_dict() if not name.endswith("num_batches_tracked")]
    state = {}
    for number, name in enumerate(names):
        tensor, (part, leaf) = net.state_dict()[name], name.rsplit(".", 1)
        base = hashed(tensor.numel(), number)
        if part in norms:
            base = {
                "weight": 1 + 0.1 * base,
                "bias": 0.1 * base,
                "running_mean": 0.1 * base,
                "running_var": 1 + 0.2 * base,
            }[leaf]
        elif leaf == "bias":
            base = 0.05 * base
        else:
            base = base * np.sqrt(6 / (tensor.numel() / len(tensor)))
            base *= {"netfcaud.3.weight": 0.006, "netfclip.3.weight": 0.0006}.get(name, 1)
        state[name] = torch.from_numpy(base.astype(np.float32)).reshape(tensor.shape)
    net.load_state_dict(state, strict=False)
    return net


@pytest.fixture(scope="module")
def golden_network() -> Network:
    return network(formula_net(), "formula", "0" * 64)


def golden_pictures() -> NDArray[np.uint8]:
    t, y, x, c = np.meshgrid(np.arange(30), np.arange(224), np.arange(224), np.arange(3), indexing="ij")
    return ((3 * x + 5 * y + 17 * t * (1 + c) + x * y // (7 + t)) % 256).astype(np.uint8)


def test_cepstra_equal_the_stored_ones() -> None:
    assert np.abs(mfcc(speech()) - np.load(ASSETS / "speech_mfcc.npy")).max() < 1e-6


def test_cepstra_of_silence_are_finite_and_short_sound_is_one_frame() -> None:
    quiet = mfcc(np.zeros(401, np.int16))
    assert quiet.shape == (2, 13)
    assert quiet[0, 0] == pytest.approx(np.log(np.finfo(float).eps))
    assert mfcc(np.ones(1, np.int16)).shape == (1, 13)
    with pytest.raises(ValueError, match="0 samples"):
        mfcc(np.zeros(0, np.int16))


def test_distances_under_formula_weights_equal_the_public_graphs(golden_network: Network) -> None:
    num_windows = GOLDEN["windows"]
    lips = golden_network.embed_lips(golden_pictures())[:num_windows]
    sound = golden_network.embed_sound(sound_windows(mfcc(speech()), num_windows))
    assert lips[0, :4].tolist() == pytest.approx(GOLDEN["lip_head"], abs=1e-4)
    assert sound[0, :4].tolist() == pytest.approx(GOLDEN["aud_head"], abs=1e-4)
    assert float(lips[0].norm()) == pytest.approx(GOLDEN["lip_norm0"], abs=1e-4)
    found = distances(lips, sound)
    assert found.mean(axis=0).tolist() == pytest.approx(GOLDEN["mean_dist"], abs=1e-4)
    result = sync(found)
    assert result.compatible.lse_d.value == pytest.approx(GOLDEN["lse_d"], abs=1e-4)
    assert result.compatible.lse_c.value == pytest.approx(GOLDEN["lse_c"], abs=1e-4)
    assert result.compatible.offset_frames.value == GOLDEN["offset"] == MAX_SHIFT
    assert result.at_edge  # zeros beyond the ends alone make this offset, and this confidence
    assert result.masked.lse_c.value is not None
    assert result.masked.lse_c.value < 0.3


def test_quick_form_equals_the_graph_it_was_made_from() -> None:
    torch.manual_seed(1)
    net = SyncNet().eval()
    pictures = np.random.default_rng(0).integers(0, 256, (7, 224, 224, 3), dtype=np.uint8)
    windows = torch.from_numpy(np.stack([pictures[i : i + 5] for i in range(3)])).permute(0, 4, 1, 2, 3).float()
    cepstra = np.random.default_rng(1).standard_normal((3, 13, 20))
    quick = network(net, "random", "")
    with torch.no_grad():
        torch.testing.assert_close(quick.embed_lips(pictures), net.embed_lips(windows), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            quick.embed_sound(cepstra), net.embed_sound(torch.from_numpy(cepstra).float()), rtol=1e-4, atol=1e-5
        )


def embeddings(num: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((num, 1024)).astype(np.float32))


@pytest.mark.parametrize("delay", range(-14, 15))
def test_injected_delay_is_recovered_exactly(delay: int) -> None:
    """Sound moved by `delay` windows: the lips of window i meet the sound of window i - delay."""
    track = embeddings(80)
    lips, sound = track[15:65], track[15 + delay : 65 + delay]
    result = sync(distances(lips, sound))
    assert result.compatible.offset_frames.value == result.masked.offset_frames.value == delay
    assert not result.at_edge
    assert result.masked.lse_d.value == pytest.approx(0, abs=1e-3)  # each pair differs by 1e-6 in 1024 numbers


def test_positive_offset_is_sound_that_leads() -> None:
    """Window i of the lips says what window i - 3 of the sound says: the sound is early."""
    track = embeddings(60)
    assert sync(distances(track[10:50], track[13:53])).compatible.offset_frames.value == 3


def test_noise_on_the_sound_raises_the_distance_and_lowers_the_confidence() -> None:
    lips = embeddings(40)
    found = [sync(distances(lips, lips + level * embeddings(40, 1))).masked for level in (0.1, 0.3, 0.6)]
    values = [(reading.lse_d.value or 0, reading.lse_c.value or 0) for reading in found]
    assert values == sorted(values)
    assert [c for _, c in values] == sorted((c for _, c in values), reverse=True)


def test_masked_values_are_those_of_pairs_that_exist() -> None:
    lips, sound = embeddings(20), embeddings(20, 1)
    found, result = distances(lips, sound), sync(distances(lips, sound))
    means = []
    for shift in range(-15, 16):
        pairs = [(i, i + shift) for i in range(20) if 0 <= i + shift < 20]
        means.append(np.mean([float((lips[i] - sound[j] + 1e-6).norm()) for i, j in pairs]))
    assert result.masked.lse_d.value == pytest.approx(min(means), rel=1e-5)
    assert result.masked.lse_c.value == pytest.approx(np.median(means) - min(means), abs=1e-4)
    assert found[0, 0] == pytest.approx(float((lips[0] + 1e-6).norm()), rel=1e-6)


def test_masked_values_are_missing_below_16_windows() -> None:
    result = sync(distances(embeddings(15), embeddings(15, 1)))
    assert result.masked.lse_d.value is None
    assert "15 windows" in result.masked.lse_d.reason
    assert result.compatible.lse_d.value is not None
    assert sync(distances(embeddings(16), embeddings(16, 1))).masked.lse_d.value is not None


def test_median_filter_takes_zeros_beyond_the_ends() -> None:
    rising = np.arange(1.0, 30.0)
    assert median_filter(rising, 13)[0] == 1  # six zeros, then 1 to 7: the middle one is the smallest
    assert median_filter(rising, 13)[10] == 11


def test_official_layout_is_told_from_others(tmp_path: Path) -> None:
    state = formula_net().state_dict()
    assert len(state) == 102
    assert sum(tensor.numel() for tensor in SyncNet().parameters()) == 13_631_616
    path = tmp_path / "net.pth"
    old = {name: tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")}
    assert len(old) == 88
    torch.save(old, path)
    loaded = load(path)
    assert loaded.weights_sha256 == sha256(path)
    assert loaded.name == "SyncNet, not the official weights"
    assert load(path, name="sync_sample").name == "sync_sample"


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "code", "list"])
def test_other_weights_are_refused_with_what_differs(fault: str, tmp_path: Path) -> None:
    state: dict[str, object] = dict(SyncNet().state_dict())
    if fault == "missing":
        del state["netfclip.3.bias"]
    elif fault == "unknown":
        state["netfclip.4.bias"] = torch.zeros(1)
    elif fault == "shape":
        state["netfclip.3.bias"] = torch.zeros(512)
    elif fault == "code":
        state["netfclip.3.bias"] = Path("run")  # anything that is no tensor would run code when read
    path = tmp_path / "net.pth"
    torch.save([1] if fault == "list" else state, path)
    words = {"missing": "netfclip.3.bias", "unknown": "netfclip.4.bias", "shape": r"\(512,\), not \(1024,\)"}
    with pytest.raises(RuntimeError, match=words.get(fault, "no file of weights|no state dict")):
        load(path)


def test_weights_are_found_by_setting_before_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(syncnet.ENVIRONMENT, raising=False)
    assert syncnet.find() is None
    one, other = tmp_path / "one", tmp_path / "other"
    one.touch()
    other.touch()
    monkeypatch.setenv(syncnet.ENVIRONMENT, str(other))
    assert syncnet.find() == other
    assert syncnet.find(one) == one
    with pytest.raises(RuntimeError, match="curl"):
        syncnet.find(tmp_path / "absent")
