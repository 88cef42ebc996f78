"""Weights of elsewhere become a diffusers folder once, bit for bit, or are refused by name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch
from diffusers import LTX2VideoTransformer3DModel, MiniMaxH3Transformer3DModel
from torch import Tensor

from models import tiny_ltx2
from models.families import single_file
from models.families.single_file import RECORD, converted, weights_folder
from tests.models.originals import original_h3, original_ltx2, weights_in

State = dict[str, Tensor]


def same(left: State, right: State) -> bool:
    """Whether names, precisions and bits agree."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


@pytest.fixture
def state(base: Path) -> State:
    return weights_in(base / "transformer")


@pytest.fixture
def file(state: State, tmp_path: Path) -> Path:
    """An original H3 file."""
    path = tmp_path / "h3.safetensors"
    safetensors.torch.save_file(original_h3(state), path)
    return path


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_an_h3_file_converts_back_bit_for_bit_in_its_own_precision(
    base: Path, state: State, tmp_path: Path, kind: torch.dtype
) -> None:
    state = {name: tensor.to(kind) for name, tensor in state.items()}
    safetensors.torch.save_file(original_h3(state), tmp_path / "h3.safetensors")
    folder = converted(tmp_path / "h3.safetensors", base, tmp_path / "cache")
    assert same(weights_in(folder), state)
    record = json.loads((folder / RECORD).read_text())
    assert record["dtypes"] == {str(kind).removeprefix("torch."): len(state)}
    assert record["num_tensors"] == len(state)
    other = cast(Any, MiniMaxH3Transformer3DModel).from_single_file(
        str(tmp_path / "h3.safetensors"), config=str(base), subfolder="transformer", torch_dtype=kind
    )
    assert same(other.state_dict(), state)


def test_a_folder_of_released_shards_is_interleaved_and_a_merged_file_says_so(
    base: Path, state: State, tmp_path: Path
) -> None:
    tensors = sorted(original_h3(state, interleaved=True).items())
    shards = tmp_path / "FL2VA"
    shards.mkdir()
    safetensors.torch.save_file(dict(tensors[:20]), shards / "model-00001-of-00002.safetensors")
    safetensors.torch.save_file(dict(tensors[20:]), shards / "model-00002-of-00002.safetensors")
    safetensors.torch.save_file(dict(tensors), tmp_path / "merged.safetensors")
    assert same(weights_in(weights_folder(shards, base, tmp_path / "cache")), state)
    merged = converted(tmp_path / "merged.safetensors", base, tmp_path / "cache", qkv_layout="interleaved")
    assert same(weights_in(merged), state)
    stacked = weights_in(converted(tmp_path / "merged.safetensors", base, tmp_path / "cache"))
    assert stacked.keys() == state.keys()
    assert not same(stacked, state)
    (shards / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"FL2VA is not the transformer .* lacks \d+ of"):
        weights_folder(shards, base, tmp_path / "cache")


@pytest.mark.parametrize("release", ["2.0", "2.3"])
def test_an_ltx2_file_with_all_parts_gives_its_transformer(tmp_path: Path, release: tiny_ltx2.Version) -> None:
    torch.manual_seed(1)
    base = tmp_path / "ltx2"
    tiny_ltx2.build_transformer(release).save_pretrained(base / "transformer")
    (base / "model_index.json").write_text('{"_class_name": "LTX2Pipeline"}')
    state = weights_in(base / "transformer")
    safetensors.torch.save_file(original_ltx2(state), tmp_path / "ltx2.safetensors")
    folder = converted(tmp_path / "ltx2.safetensors", base, tmp_path / "cache")
    assert same(weights_in(folder), state)
    loaded = cast(Any, LTX2VideoTransformer3DModel).from_pretrained(folder)
    assert same(loaded.state_dict(), state)
    bare = {name.removeprefix("model.diffusion_model."): tensor for name, tensor in original_ltx2(state).items()}
    bare = {name: tensor for name, tensor in bare.items() if not name.startswith(("vae.", "vocoder."))}
    safetensors.torch.save_file(bare, tmp_path / "bare.safetensors")
    assert same(weights_in(converted(tmp_path / "bare.safetensors", base, tmp_path / "cache")), state)


def test_large_weights_are_written_in_shards_that_diffusers_loads(
    base: Path, state: State, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_file, "SHARD_BYTES", 300_000)
    folder = converted(file, base, tmp_path / "cache")
    assert len(list(folder.glob("*.safetensors"))) > 5
    assert same(weights_in(folder), state)
    assert same(cast(Any, MiniMaxH3Transformer3DModel).from_pretrained(folder).state_dict(), state)


def test_the_second_use_converts_nothing_and_other_content_or_sizes_have_another_place(
    base: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = converted(file, base, tmp_path / "cache")
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}
    moved = file.rename(tmp_path / "elsewhere.safetensors")
    again = converted(moved.rename(file), base, tmp_path / "cache")
    assert again == folder
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in again.iterdir()} == before
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert converted(file, base, tmp_path / "cache") != folder
    other = shutil.copytree(base, tmp_path / "other")
    config = json.loads((other / "transformer" / "config.json").read_text())
    (other / "transformer" / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    places = {converted(file, place, tmp_path / "cache") for place in (base, other)}
    monkeypatch.setattr(single_file, "version", Mock(return_value="0.42.99"))
    assert len({*places, folder, converted(file, base, tmp_path / "cache")}) == 4


def test_a_damaged_conversion_is_made_again(base: Path, state: State, file: Path, tmp_path: Path) -> None:
    folder = converted(file, base, tmp_path / "cache")
    path = next(folder.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-9] ^= 64
    path.write_bytes(content)
    assert not same(weights_in(folder), state)
    assert converted(file, base, tmp_path / "cache") == folder
    assert same(weights_in(folder), state)
    (folder / RECORD).write_text("{")
    assert same(weights_in(converted(file, base, tmp_path / "cache")), state)


def test_of_many_processes_one_converts(
    base: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []
    write = single_file.write

    def counted(folder: Path, *rest: Any) -> None:
        calls.append(folder)
        write(folder, *rest)

    monkeypatch.setattr(single_file, "write", counted)
    with ThreadPoolExecutor(4) as pool:
        places = {task.result() for task in [pool.submit(converted, file, base, tmp_path / "cache") for _ in range(4)]}
    assert len(calls) == len(places) == 1


def test_a_kept_conversion_is_verified_outside_of_the_lock_and_not_again_by_who_waited(
    base: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = single_file.alone
    verified: list[Path] = []
    intact = single_file.intact

    def noted(folder: Path) -> bool:
        verified.append(folder)
        return intact(folder)

    monkeypatch.setattr(single_file, "intact", noted)

    @contextmanager
    def taken_before(path: Path) -> Generator[None]:
        """Another process converts first, while this one waits."""
        monkeypatch.setattr(single_file, "alone", alone)
        converted(file, base, tmp_path / "cache")
        monkeypatch.setattr(single_file, "write", Mock(side_effect=AssertionError("it is there")))
        with alone(path):
            yield

    monkeypatch.setattr(single_file, "alone", taken_before)
    folder = converted(file, base, tmp_path / "cache")
    assert len(verified) == 2  # once by each, both before the lock
    monkeypatch.setattr(single_file, "alone", Mock(side_effect=AssertionError("no lock is needed")))
    assert converted(file, base, tmp_path / "cache") == folder


def test_what_changes_while_it_is_read_is_not_kept(
    base: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = single_file.write

    def disturbed(folder: Path, *rest: Any) -> None:
        write(folder, *rest)
        os.utime(file, (1, 1))

    monkeypatch.setattr(single_file, "write", disturbed)
    with pytest.raises(RuntimeError, match=r"h3\.safetensors changed while it was read"):
        converted(file, base, tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_what_does_not_read_back_is_not_kept(
    base: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = safetensors.torch.save_file

    def torn(tensors: State, path: Path, metadata: dict[str, str]) -> None:
        name = min(tensors)
        save({**tensors, name: tensors[name] + 1}, path, metadata)

    monkeypatch.setattr(single_file.safetensors.torch, "save_file", torn)
    with pytest.raises(RuntimeError, match="does not read back"):
        converted(file, base, tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def without(state: State, words: str) -> State:
    return {name: tensor for name, tensor in state.items() if words not in name}


REFUSED: dict[str, tuple[Callable[[State], State], str]] = {
    "fp8": (
        lambda state: state | {"blocks.1.mlp.fc2.weight": state["blocks.1.mlp.fc2.weight"].to(torch.float8_e4m3fn)},
        r"blocks\.1\.mlp\.fc2\.weight is F8_E4M3 \(and 0 more\): quantised .* bf16 or fp32",
    ),
    "int8": (
        lambda state: {name: tensor.to(torch.int8) if tensor.ndim > 1 else tensor for name, tensor in state.items()},
        r"is I8 \(and \d+ more\): quantised",
    ),
    "nf4": (
        lambda state: state | {"condition_proj.weight": torch.zeros(8, 1, dtype=torch.uint8)},
        r"condition_proj\.weight is U8 .*quantised",
    ),
    "pruned by table": (
        lambda state: without(state, "time_embedder") | {"adaln_t_table": torch.ones(3, 4)},
        r"is pruned: adaln_t_table stands for .* whole model",
    ),
    "pruned of AdaLN": (
        lambda state: without(state, "adaln_proj"),
        r"is pruned: it lacks \d+ AdaLN tensors, e\.g\. norm_out",
    ),
    "adapter": (
        lambda state: {"blocks.0.attn.qkv_proj.lora_A.weight": torch.ones(4, 96)},
        r"is an adapter \(LoRA\)",
    ),
    "incomplete": (
        lambda state: without(state, "blocks.2.mlp"),
        r"lacks 2 of \d+ tensors, e\.g\. transformer_blocks\.2\.ff",
    ),
    "more": (
        lambda state: state | {"blocks.9.norm1.weight": torch.ones(96)},
        r"has 1 that are none of the model's, e\.g\. transformer_blocks\.9\.norm1\.weight",
    ),
    "twice": (
        lambda state: state | {"transformer_blocks.0.norm1.weight": torch.ones(96)},
        r"both are transformer_blocks\.0\.norm1\.weight",
    ),
    "other size": (
        lambda state: state | {"condition_proj.weight": torch.ones(96, 31)},
        r"context_embedder\.weight has size \(96, 31\).*describes \(96, 32\)",
    ),
    "odd": (
        lambda state: state | {"blocks.0.attn.qkv_proj.weight": torch.ones(1, 96)},
        r"blocks\.0\.attn\.qkv_proj\.weight of size \(1, 96\) does not convert",
    ),
    "not finite": (
        lambda state: state | {"condition_proj.bias": torch.full((96,), torch.nan)},
        r"condition_proj\.bias holds values that are not finite",
    ),
    "another family": (
        lambda state: {"model.diffusion_model.patchify_proj.weight": torch.ones(8, 8)},
        r"is not the transformer that .*transformer describes: it lacks",
    ),
    "empty": (lambda state: {}, r"lacks (\d+) of \1 tensors"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_trained_from_is_refused_by_name(base: Path, state: State, tmp_path: Path, kind: str) -> None:
    change, words = REFUSED[kind]
    path = tmp_path / "given.safetensors"
    safetensors.torch.save_file(change(original_h3(state)), path)
    with pytest.raises(ValueError, match=words) as caught:
        weights_folder(path, base, tmp_path / "cache")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("[!.]*"))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.bin", b"\x80\x02}q\x00.", "is a pickle file, which can run code"),
        ("model.pt", b"PK\x03\x04", "is a pickle file"),
        ("model.ckpt", b"", "is a pickle file"),
        ("hidden.safetensors", b"\x80\x04}q\x00.", "is a pickle file"),
        ("zipped.safetensors", b"PK\x03\x04rest", "is a pickle file"),
        ("model.gguf", b"GGUF\x03\x00", "is a GGUF file, which is quantised"),
        ("notes.safetensors", b"not weights at all", "is no safetensors file"),
        ("nothing.safetensors", b"", "is no safetensors file"),
        ("header.safetensors", (500).to_bytes(8, "little") + b'{"a": ', "is cut short: 14 bytes, and .* needs 508"),
        ("garbled.safetensors", (9).to_bytes(8, "little") + b'{"a": [1]', "has a damaged header"),
    ],
)
def test_what_is_no_whole_safetensors_file_is_refused(
    base: Path, tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words) as caught:
        weights_folder(tmp_path / name, base, tmp_path / "cache")
    assert name in str(caught.value)


def test_a_file_cut_short_says_how_much_is_there(base: Path, file: Path, tmp_path: Path) -> None:
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=rf"h3\.safetensors is cut short: {size - 1000} of {size} bytes"):
        weights_folder(file, base, tmp_path / "cache")


def test_missing_weights_and_a_folder_of_pickles_are_named(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: there is no such file or folder"):
        weights_folder(tmp_path / "nowhere", base, tmp_path / "cache")
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles" / "model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(ValueError, match=r"pickles holds no \.safetensors file; model\.bin is a pickle"):
        weights_folder(tmp_path / "pickles", base, tmp_path / "cache")
    with pytest.raises(RuntimeError, match=r"no .*config\.json; set `base`"):
        weights_folder(base / "transformer" / "diffusion_pytorch_model.safetensors", tmp_path, tmp_path / "cache")


def test_a_diffusers_folder_is_taken_as_it_is_where_it_fits(base: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert weights_folder(base / "transformer", base, cache) == base / "transformer"
    assert weights_folder(base, base, cache) == base / "transformer"
    assert not cache.exists()
    other = shutil.copytree(base / "transformer", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_layers": 7}))
    with pytest.raises(ValueError, match=r"other has num_layers = 7, and .*transformer 4"):
        weights_folder(other, base, cache)
    (other / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        weights_folder(other, base, cache)
    shutil.copy(base / "transformer" / "config.json", other)
    (other / "more.safetensors").write_bytes((other / "diffusion_pytorch_model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"more\.safetensors: .* is in diffusion_pytorch_model\.safetensors too"):
        weights_folder(other, base, cache)
