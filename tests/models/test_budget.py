"""Plans of a run against real steps on a CPU, closed forms, and the released sizes on the meta device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    LTX2VideoTransformer3DModel,
    MiniMaxH3Transformer3DModel,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from models import adapters
from models.budget import (
    FULL,
    Activity,
    Parameters,
    Setup,
    Weight,
    changes,
    communication,
    compare,
    disk,
    flops,
    memory,
    on_host,
    resident,
)
from models.dry_run import Recompute, activity_of, parameters_of, prepared, step
from models.families import Family, load_family
from models.families.sketches import Sketch, sketch_of

FULL_SIZE: dict[str, tuple[str, str, dict[str, tuple[Any, dict[str, int]]]]] = {
    "h3": (
        "modular_model_index.json",
        "MiniMaxH3ModularPipeline",
        {
            "vae": (AutoencoderKLMiniMaxH3, {}),
            "audio_vae": (AutoencoderKLMiniMaxH3Audio, {}),
            "transformer": (MiniMaxH3Transformer3DModel, {}),
        },
    ),
    "ltx2": (
        "model_index.json",
        "LTX2Pipeline",
        {
            "vae": (AutoencoderKLLTX2Video, {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}),
            "audio_vae": (AutoencoderKLLTX2Audio, {}),
            "transformer": (LTX2VideoTransformer3DModel, {}),
        },
    ),
}
"""Index file, pipeline class and parts; diffusers' defaults are the released models, but for a ratio."""
RELEASED = {"h3": 33_122_992_896, "ltx2": 18_876_174_592}


def write_full_size(family: str, folder: Path) -> Path:
    index, pipeline, parts = FULL_SIZE[family]
    folder.mkdir()
    (folder / index).write_text(f'{{"_class_name": "{pipeline}"}}')
    for name, (kind, sizes) in parts.items():
        with torch.device("meta"):
            kind(**sizes).save_config(folder / name)
    return folder


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sketch]:
    folder = tmp_path_factory.mktemp("full")
    return {family: sketch_of(write_full_size(family, folder / family)) for family in FULL_SIZE}


@pytest.fixture(scope="module")
def counted(full: dict[str, Sketch]) -> Callable[[str, int | None], Parameters]:
    """Parameters of a released model, with adapters of a rank or without; each counted once."""
    return functools.cache(lambda family, rank: parameters_of(full[family], rank))


@pytest.fixture(scope="module")
def tiny(base: Path, ltx2_base: Path) -> dict[str, Sketch]:
    return {"h3": sketch_of(base), "ltx2": sketch_of(ltx2_base)}


def clip_of(sketch: Sketch, size: tuple[float, int, int], mode: Any = "t2va", num_text: int = 16) -> tuple[Any, ...]:
    shape = sketch.shape(*size)
    return shape, mode, sketch.sizes(shape, mode, num_text)


SIZE = {"h3": (22 / 24, 32, 32), "ltx2": (17 / 24, 64, 96)}
MODES = ("t2va", "fl2va", "ref2va")


# -- against real steps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["h3", "ltx2"])
def test_bytes_saved_for_backward_are_those_of_a_real_step(
    tiny: dict[str, Sketch], family: str, dtype: torch.dtype, mode: str
) -> None:
    sketch = tiny[family]
    clip = clip_of(sketch, SIZE[family], mode)
    steps = {}
    for device in ("meta", "cpu"):
        model = sketch.build(sketch.num_blocks, device).to(dtype).train()
        steps[device] = step(model, sketch.inputs(*clip, 2, dtype, device), kernels="cpu")
    within = {"h3": 1e-5, "ltx2": 4e-3}[family]  # states of dropout's generator; row sums that CUDA's kernel pads to 32
    for name in ("saved_bytes", "held_bytes", "peak_bytes"):
        assert getattr(steps["meta"], name) == pytest.approx(getattr(steps["cpu"], name), rel=within)
    assert steps["cpu"].held_bytes == pytest.approx(steps["cpu"].saved_bytes, rel=1e-4)  # and what is returned


@pytest.mark.parametrize("recompute", ["none", "blocks"])
@pytest.mark.parametrize("family", ["h3", "ltx2"])
def test_any_depth_follows_from_one_and_two_blocks(full: dict[str, Sketch], family: str, recompute: Recompute) -> None:
    sketch = full[family]
    inputs = sketch.inputs(*clip_of(sketch, (124 / 24, 256, 256)), 1, torch.bfloat16)
    sketch.num_blocks, depth = 4, sketch.num_blocks
    planned = activity_of(sketch, inputs, torch.bfloat16, recompute)
    found = step(prepared(sketch, 4, None, freeze_text_side=False).to(torch.bfloat16), inputs, recompute)
    sketch.num_blocks = depth
    assert planned.kept_bytes == found.held_bytes
    assert planned.kept_bytes + planned.live_bytes + planned.working_bytes == pytest.approx(found.peak_bytes, rel=0.02)
    assert (planned.forward_flops, planned.backward_flops) == (found.forward_flops, found.backward_flops)


def test_gradients_and_optimiser_are_those_of_a_real_step_of_the_tiny_h3_to_the_byte(base: Path) -> None:
    family = load_family(base)
    check_optimiser(family, parameters_of(sketch_of(base)), Setup())


def test_gradients_and_optimiser_of_adapters_are_too(base: Path) -> None:
    family = load_family(base)
    adapters.add(family, 4, 0)
    check_optimiser(family, parameters_of(sketch_of(base), 4), Setup(method="lora", lora_rank=4))


def check_optimiser(family: Family, parameters: Parameters, setup: Setup) -> None:
    trained = [parameter for parameter in family.transformer.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained)
    torch.stack([parameter.square().mean() for parameter in trained]).sum().backward()
    optimiser.step()
    parts = resident(parameters, setup, 1)
    assert parts["gradients"] == sum(cast(torch.Tensor, parameter.grad).nbytes for parameter in trained)
    states = [value for state in optimiser.state.values() for value in state.values()]
    assert parts["optimiser"] == sum(value.nbytes for value in states)
    assert parts["weights"] == sum(parameter.nbytes for parameter in family.transformer.parameters())


def test_a_frozen_text_side_needs_no_gradients(base: Path) -> None:
    family, parameters = load_family(base), parameters_of(sketch_of(base), freeze_text_side=True)
    text = sum(
        parameter.numel()
        for name, parameter in family.transformer.named_parameters()
        if name.startswith(("context_embedder", "token_refiner"))
    )
    assert parameters.count(trainable=False) == text > 0
    assert parameters.by_group()["text"] == text


def test_recomputing_holds_less_and_computes_more(full: dict[str, Sketch]) -> None:
    sketch = full["h3"]
    inputs = sketch.inputs(*clip_of(sketch, (124 / 24, 768, 1344)), 1, torch.bfloat16)
    none, selective, blocks = (
        activity_of(sketch, inputs, torch.bfloat16, how) for how in ("none", "selective", "blocks")
    )
    assert none.kept_bytes > 5 * selective.kept_bytes > 5 * blocks.kept_bytes
    assert none.backward_flops < selective.backward_flops < blocks.backward_flops
    again = blocks.backward_flops - none.backward_flops
    assert again == pytest.approx(none.forward_flops, rel=0.01)
    width, rows = 5376, 37966 - 240
    assert blocks.kept_bytes == pytest.approx(50 * 2 * width * rows, rel=0.15)  # blocks' inputs, and ends of the model


# -- closed forms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(39 / 24, 480, 480), (124 / 24, 480, 832), (124 / 24, 768, 1344)])
def test_flops_of_h3_follow_the_closed_form(
    full: dict[str, Sketch], counted: Callable[[str, int | None], Parameters], size: tuple[float, int, int]
) -> None:
    sketch = full["h3"]
    clip = clip_of(sketch, size, num_text=256)
    rows = sketch.layout(*clip)[1]
    found = activity_of(sketch, sketch.inputs(*clip, 1, torch.bfloat16), torch.bfloat16, "none")
    groups = counted("h3", None).by_group()
    products, scores = 2 * (groups["attention"] + groups["feed-forward"]) * rows, 50 * 4 * rows**2 * 56 * 128
    assert found.forward_flops == pytest.approx(products + scores, rel=0.02)
    assert found.backward_flops == pytest.approx(
        2 * products + 2.5 * scores, rel=0.02
    )  # a fused one computes scores again


def test_flops_of_ltx2_follow_the_closed_form(full: dict[str, Sketch]) -> None:
    sketch = full["ltx2"]
    clip = clip_of(sketch, (121 / 24, 768, 1344), num_text=256)
    picture, sound, text = 16 * 24 * 42, 126, 256
    assert sketch.layout(*clip)[1] == picture + sound
    wide, narrow = 4096, 2048
    own = (4 + 8) * wide**2 * picture + (4 + 8) * narrow**2 * sound  # attention and feed-forward of each stream
    beside = (2 * wide**2) * (picture + text) + (2 * narrow**2) * (sound + text)
    across = 4 * wide * narrow * picture + 4 * narrow**2 * sound  # queries, keys, values and outputs, both directions
    scores = wide * (picture**2 + picture * text) + narrow * (sound**2 + sound * text + 2 * picture * sound)
    found = activity_of(sketch, sketch.inputs(*clip, 1, torch.bfloat16), torch.bfloat16, "none")
    assert found.forward_flops == pytest.approx(48 * (2 * (own + beside + across) + 4 * scores), rel=0.02)


def test_cost_of_h3_is_what_was_derived_by_hand(full: dict[str, Sketch]) -> None:
    """1344x768x124: 14.3 PFLOP a step with recomputation, at four forwards; fused attention adds half of its own."""
    sketch = full["h3"]
    clip = clip_of(sketch, (124 / 24, 768, 1344), num_text=512)
    found = activity_of(sketch, sketch.inputs(*clip, 1, torch.bfloat16), torch.bfloat16, "blocks")
    scores = 50 * 4 * sketch.layout(*clip)[1] ** 2 * 56 * 128
    assert (flops(found, Setup()) - 0.5 * scores) / 1e15 == pytest.approx(14.3, rel=0.02)


def test_sharding_is_that_of_fsdp2_and_communication_that_of_rings() -> None:
    weights = (
        Weight("a", "block.0", 10, 100, True),
        Weight("a", "block.1", 10, 100, True),
        Weight("b", "", 3, 7, False),
    )
    parameters = Parameters(weights)
    assert [parameters.count(devices) for devices in (1, 4, 64)] == [2021, 607, 207]
    setup = Setup(recompute="none", frozen_weights="compute")
    sent = communication(parameters, setup, 4)
    assert sent == {"all-gather": 2 * (2 * 2000 + 21) * 3 // 4, "reduce-scatter": 4 * 2000 * 3 // 4}
    ddp = Setup(strategy="ddp")
    assert communication(parameters, ddp, 4, 8) == {"all-reduce": 2 * 4 * 2000 * 3 // 4}
    assert communication(parameters, ddp, 1) == {"all-reduce": 0}
    parts = memory(parameters, Activity(1, 2, 3, 4, 5), setup, 4)
    assert parts["weights"] == 4 * 600 + 2 * 7
    assert parts["gradients"] == 4 * 600 + (2 + 4) * 1000
    assert parts["optimiser"] == 8 * 600 + 4 * 2
    assert parts["compute copies"] == 2 * (2 * 1000 + 21)
    assert (parts["activations"], parts["working memory"]) == (3, 3)


SETUPS = st.builds(
    lambda offload, **rest: Setup(offload=offload and rest["strategy"] == "fsdp2", **rest),
    offload=st.booleans(),
    strategy=st.sampled_from(["ddp", "fsdp2"]),
    precision=st.sampled_from(["bf16", "fp16", "fp32"]),
    method=st.sampled_from(["full", "lora"]),
    frozen_weights=st.sampled_from(["fp32", "compute"]),
    ema=st.booleans(),
    guidance=st.sampled_from(["none", "contrast", "drift"]),
    micro_batch=st.integers(1, 4),
)


@settings(max_examples=200, deadline=None)
@given(setup=SETUPS, devices=st.sampled_from([1, 2, 8, 64]))
def test_more_devices_never_take_more_memory_each_and_less_precision_neither(setup: Setup, devices: int) -> None:
    weights = tuple(
        Weight("a", f"block.{place}", 512, 64, setup.method == "full" or place % 2 == 0) for place in range(8)
    )
    parameters, activity = Parameters(weights), Activity(100, 20, 3, 5, 10)
    parts = memory(parameters, activity, setup, devices)
    assert min(parts.values()) >= 0
    if setup.strategy == "fsdp2":
        assert sum(memory(parameters, activity, setup, 2 * devices).values()) <= sum(parts.values())
    if setup.offload:
        kept = setup.model_copy(update={"offload": False})
        on_device = sum(memory(parameters, activity, kept, devices).values())
        assert on_device - sum(parts.values()) == on_host(parameters, setup, devices) > 0
    tried = [name for name, changed, count in changes(setup, devices) if (changed, count) == (setup, devices)]
    assert not tried


def test_offload_under_ddp_is_refused() -> None:
    with pytest.raises(ValueError, match="offload needs strategy fsdp2"):
        Setup(offload=True, strategy="ddp")


def test_what_a_run_used_is_compared_with_its_plan() -> None:
    assert compare({"total_bytes": 40.0, "step_s": 2.0, "hours": 0.0}, {"total_bytes": 50.0, "step_s": 1.0}) == {
        "total_bytes": 1.25,
        "step_s": 0.5,
    }


# -- the released sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", ["h3", "ltx2"])
def test_a_released_model_is_planned_to_the_parameter(
    full: dict[str, Sketch], counted: Callable[[str, int | None], Parameters], family: str, method: Any
) -> None:
    sketch, setup = full[family], Setup(method=method)
    rank = 16 if method == "lora" else None
    parameters = counted(family, rank)
    clip = clip_of(sketch, (124 / 24, 768, 1344), num_text=256)
    activity = activity_of(sketch, sketch.inputs(*clip, 1, torch.bfloat16), torch.bfloat16, "blocks", rank)
    totals = {devices: memory(parameters, activity, setup, devices) for devices in (8, 64)}
    added = parameters.count(trainable=True) if rank else 0
    assert parameters.count() - added == RELEASED[family]
    assert sum(parameters.by_group().values()) == parameters.count()
    assert "other" not in parameters.by_group()
    assert disk(parameters, setup)["checkpoint"] == FULL * parameters.count()
    if family == "h3":
        assert added in (0, 83_148_800)  # rank 16 on attention and feed-forward, counted by hand from the widths
        states = 16 * parameters.count(trainable=True) + 4 * parameters.count(trainable=False)
        held = sum(totals[8][part] for part in ("weights", "optimiser")) + FULL * parameters.count(8, trainable=True)
        assert held * 8 == pytest.approx(states, rel=0.01)
    assert sum(totals[64].values()) < sum(totals[8].values())


@pytest.mark.parametrize("family", ["h3", "ltx2"])
def test_adapters_land_on_the_blocks_alone(counted: Callable[[str, int | None], Parameters], family: str) -> None:
    trained = {weight.group for weight in counted(family, 16).weights if weight.trainable}
    assert trained == {"attention", "feed-forward"}
