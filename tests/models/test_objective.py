"""The objective against its closed forms, and what keeps guidance against sums by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from data.stage import Guidance, NoiseLevels, Stage
from models import adapters
from models.families import Batch, Family, Noisy, Velocities, load_family
from models.families.weights import load_transformer
from models.flow_matching import CONDITIONS, PICTURE, SOUND, logit_normal, min_snr, noise_of, positions, seed_of
from models.objective import Levels, Objective, at, guidance_of, levels_of
from tasks import training
from tests.models.trials import batch_of, distance, drawn_of, gradients_of, same, stage, trained, weights_of

VARIANTS = ["t2va", "fl2va_first", "fl2va_last", "fl2va", "ref2va.0", "a2v", "v2a"]
NONE, CONTRAST = Guidance(form="none"), Guidance(form="contrast", scale=4.0)
LEVELS = Levels(0.7, 0.4)


def seeds_of(num_clips: int, step: int = 3, first: int = 0) -> list[tuple[int, int, int]]:
    return [(0, step, first + place) for place in range(num_clips)]


def noisy_of(batch: Batch, levels: Levels, seeds: list[tuple[int, int, int]]) -> tuple[Noisy, Velocities]:
    """The point on the path, and the velocity there, by hand."""
    noise_video = noise_of([seed_of(*seed, PICTURE) for seed in seeds], batch.video_BCFHW)
    noise_audio = noise_of([seed_of(*seed, SOUND) for seed in seeds], batch.audio_BSCT)
    noisy = Noisy(
        (1 - levels.sigma_video) * batch.video_BCFHW + levels.sigma_video * noise_video,
        (1 - levels.sigma_audio) * batch.audio_BSCT + levels.sigma_audio * noise_audio,
        levels.sigma_video,
        levels.sigma_audio,
        tuple(seed_of(*seed, CONDITIONS) for seed in seeds),
    )
    return noisy, Velocities(batch.video_BCFHW - noise_video, batch.audio_BSCT - noise_audio)


def squared(left: Tensor, right: Tensor) -> Tensor:
    """Mean squared difference per clip."""
    return (left - right).square().flatten(1).mean(1)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_perfect_velocity_has_no_loss_in_any_mode(family: Family, store_folder: Path, variant: str) -> None:
    batch = batch_of(store_folder, variant, 1, 2)
    levels = at(batch, 0.7, 0.4)

    def perfect(_: Batch, noisy: Noisy) -> Velocities:
        """From the noised latents alone: noise lies (x_sigma - (1 - sigma) x) / sigma away. What is given means nothing."""
        pairs = [(batch.video_BCFHW, noisy.video_BCFHW, noisy.sigma_video)]
        pairs += [(batch.audio_BSCT, noisy.audio_BSCT, noisy.sigma_audio)]
        return Velocities(*((clean - point) / sigma if sigma else 7 + clean for clean, point, sigma in pairs))

    family.velocities = perfect
    losses = Objective(family, NONE).losses(batch, levels, seeds_of(2))
    assert float(torch.cat(losses).abs().max()) < 1e-9
    family.velocities = lambda _, noisy: Velocities(0 * noisy.video_BCFHW, 0 * noisy.audio_BSCT)
    losses = Objective(family, NONE).losses(batch, levels, seeds_of(2))
    for found, given_in in ((losses.video_B, "v2a"), (losses.audio_B, "a2v")):
        assert (found == 0).all() if variant == given_in else (found > 0.1).all()


def test_errors_are_those_of_each_clip_alone(family: Family, store_folder: Path) -> None:
    batch = batch_of(store_folder, "fl2va", 1, 2, 3)
    together = Objective(family, NONE).losses(batch, LEVELS, seeds_of(3))
    noisy, target = noisy_of(batch, LEVELS, seeds_of(3))
    predicted = family.velocities(batch, noisy)
    assert torch.equal(together.video_B, squared(predicted.video_BCFHW, target.video_BCFHW))
    assert torch.equal(together.audio_B, squared(predicted.audio_BSCT, target.audio_BSCT))
    alone = Objective(family, NONE).losses(batch_of(store_folder, "fl2va", 2), LEVELS, seeds_of(1, first=1))
    assert torch.allclose(alone.video_B[0], together.video_B[1], rtol=1e-5)
    assert torch.allclose(alone.audio_B[0], together.audio_B[1], rtol=1e-5)


def test_silence_carries_no_loss_and_neither_gives_nor_learns_sound(family: Family, store_folder: Path) -> None:
    objective = Objective(family, NONE)
    losses = objective.losses(batch_of(store_folder, "fl2va", 4, 5), LEVELS, seeds_of(2))
    assert losses.audio_B[0] > 0.1
    assert losses.audio_B[1] == 0.0
    assert losses.audio_B.requires_grad
    for mode in ("a2v", "v2a"):
        batch = batch_of(store_folder, "t2va", 4, 5)._replace(mode=cast(Any, mode))
        with pytest.raises(ValueError, match=f"without sound in mode {mode}"):
            objective.losses(batch, LEVELS, seeds_of(2))


def test_leading_frames_that_a_family_gives_clean_carry_no_loss(family: Family, store_folder: Path) -> None:
    batch = batch_of(store_folder, "t2va", 1)
    family.velocities = lambda _, noisy: Velocities(0 * noisy.video_BCFHW, 0 * noisy.audio_BSCT)
    family.num_given_frames = lambda _: 1
    _, target = noisy_of(batch, LEVELS, seeds_of(1))
    losses = Objective(family, NONE).losses(batch, LEVELS, seeds_of(1))
    assert float(losses.video_B) == pytest.approx(float(target.video_BCFHW[:, :, 1:].square().mean()), rel=1e-6)


# -- noise levels ------------------------------------------------------------------------------------------------------


def test_what_a_mode_gives_whole_lies_at_no_noise(family: Family, store_folder: Path) -> None:
    for variant in VARIANTS:
        levels = levels_of(family, NoiseLevels(), batch_of(store_folder, variant, 1), 0, 4)
        assert (levels.sigma_video == 0) == (variant == "v2a")
        assert (levels.sigma_audio == 0) == (variant == "a2v")


def test_levels_follow_the_distribution_that_is_asked_for(family: Family, store_folder: Path) -> None:
    batch = batch_of(store_folder, "t2va", 1)
    for number in range(5):
        u, other = positions(3, number, shared=True)[0], positions(3, number, shared=False)
        published = levels_of(family, NoiseLevels(), batch, 3, number)
        assert published == Levels(*family.sigmas(u, u, batch), u=u)
        separate = levels_of(family, NoiseLevels(draws="separate"), batch, 3, number)
        assert separate == Levels(*family.sigmas(*other, batch), u=other[0])
        assert levels_of(family, NoiseLevels(distribution="uniform"), batch, 3, number)[:2] == (u, u)
        noise = NoiseLevels(distribution="logit_normal", logit_mean=0.5, logit_std=2.0, shift_video=3.0)
        place = logit_normal(u, 0.5, 2.0)
        found = levels_of(family, noise, batch, 3, number)
        assert found.sigma_video == pytest.approx(3 * place / (1 + 2 * place), rel=1e-12)
        assert found.sigma_audio == pytest.approx(place, rel=1e-12)


# -- what an update weighs ---------------------------------------------------------------------------------------------


def by_hand(family: Family, plan: Stage, batch: Batch) -> Tensor:
    """The loss of step 0, group by group of noise levels."""
    noise, num_clips = plan.noise, len(batch.has_audio_B)
    loss = torch.zeros(())
    for level in range(noise.per_update):
        places = range(level * num_clips // noise.per_update, (level + 1) * num_clips // noise.per_update)
        part = slice(places.start, places.stop)
        group = batch._replace(
            video_BCFHW=batch.video_BCFHW[part],
            audio_BSCT=batch.audio_BSCT[part],
            conditions={name: array[part] for name, array in batch.conditions.items()},
        )
        u = positions(0, level, shared=True)[0]
        sigmas = family.sigmas(u, u, batch)
        weights = [min_snr(sigma, noise.min_snr_gamma) if noise.min_snr_gamma else 1.0 for sigma in sigmas]
        noisy, target = noisy_of(group, Levels(*sigmas), seeds_of(len(places), 0, places.start))
        predicted = family.velocities(group, noisy)
        video = squared(predicted.video_BCFHW, target.video_BCFHW).sum() / num_clips
        heard = squared(predicted.audio_BSCT, target.audio_BSCT) * batch.has_audio_B[part]
        loss = loss + plan.video_weight * weights[0] * video
        loss = loss + plan.audio_weight * weights[1] * heard.sum() / batch.has_audio_B.sum()
    return loss


@pytest.mark.parametrize(
    ("numbers", "settings"),
    [
        ((4, 5), {}),
        ((4, 5), {"video_weight": 0.25, "audio_weight": 3.0}),
        ((4, 5), {"video_weight": 0.0}),
        ((0, 1, 2), {"noise": {"per_update": 3, "min_snr_gamma": 5.0}}),
        ((0, 1, 2, 3), {"noise": {"per_update": 2}}),
        ((0, 1, 2), {"noise": {"per_update": 2}}),
    ],
)
def test_an_updates_gradient_is_that_of_the_weighted_mean_over_its_clips(
    base: Path, store_folder: Path, tmp_path: Path, numbers: tuple[int, ...], settings: dict[str, Any]
) -> None:
    plan = stage(num_steps=1, **settings)
    found, _ = gradients_of(base, store_folder, tmp_path, plan, drawn=[drawn_of("t2va", *numbers)])
    family = load_family(base)
    family.transformer.train()
    by_hand(family, plan, batch_of(store_folder, "t2va", *numbers)).backward()
    expected = {name: cast(Tensor, item.grad) for name, item in family.transformer.named_parameters()}
    assert distance(found[0], expected) < 1e-4


def test_rows_hold_the_mean_losses_of_each_noise_level(base: Path, store_folder: Path, tmp_path: Path) -> None:
    plan = stage(num_steps=1, noise={"per_update": 2})
    _, module = trained(base, store_folder, tmp_path, plan, drawn=[drawn_of("t2va", 0, 1, 2, 3)])
    family = load_family(base)
    assert [row["step"] for row in module.curve] == [0, 0]
    for level, row in enumerate(module.curve):
        batch = batch_of(store_folder, "t2va", 2 * level, 2 * level + 1)
        levels = levels_of(family, plan.noise, batch, 0, level)
        losses = Objective(family, NONE).losses(batch, levels, seeds_of(2, 0, 2 * level))
        assert row["loss_video"] == pytest.approx(float(losses.video_B.detach().mean()), abs=2e-6)
        assert row["loss_audio"] == pytest.approx(float(losses.audio_B.detach().mean()), abs=2e-6)
        assert row["sigma_video"] == pytest.approx(levels.sigma_video, abs=1e-6)
        assert row["timestep_bin"] == int(10 * levels.u)


# -- contrast ----------------------------------------------------------------------------------------------------------


def test_family_means_contrast_for_distilled_models_and_nothing_for_others(family: Family) -> None:
    found = guidance_of(Guidance(), family)
    assert (found.form, found.scale) == ("contrast", 4.0)
    assert guidance_of(CONTRAST.model_copy(update={"scale": 2.0}), family).scale == 2.0
    family.guidance_scale = 1.0
    assert guidance_of(Guidance(), family).form == "none"
    with pytest.raises(ValueError, match=r"not distilled.*guidance\.scale"):
        guidance_of(Guidance(form="contrast"), family)


def test_contrast_asks_the_guided_prediction_for_the_datas_velocity(family: Family, store_folder: Path) -> None:
    batch = batch_of(store_folder, "t2va", 1, 2, bare=True)
    assert batch.uncaptioned["text/rows"].shape[1] == 1 < batch.conditions["text/rows"].shape[1]
    losses = Objective(family, CONTRAST).losses(batch, LEVELS, seeds_of(2))
    noisy, target = noisy_of(batch, LEVELS, seeds_of(2))
    said = family.velocities(batch, noisy)
    bare = family.velocities(batch._replace(conditions=batch.uncaptioned), noisy)
    guided = [(with_text + 3 * without) / 4 for with_text, without in zip(said, bare, strict=True)]
    assert torch.allclose(losses.video_B, squared(guided[0], target.video_BCFHW), rtol=1e-6)
    assert torch.allclose(losses.audio_B, squared(guided[1], target.audio_BSCT), rtol=1e-6)
    assert not torch.allclose(losses.video_B, squared(said.video_BCFHW, target.video_BCFHW), rtol=1e-4)


def test_contrasts_gradient_goes_through_the_captioned_prediction_alone_at_one_over_the_scale(
    family: Family, store_folder: Path
) -> None:
    batch = batch_of(store_folder, "t2va", 1, 2, bare=True)
    trained_ones = [item for item in family.transformer.parameters() if item.requires_grad]
    loss = Objective(family, CONTRAST).losses(batch, LEVELS, seeds_of(2)).video_B.sum()
    found = torch.autograd.grad(loss, trained_ones, allow_unused=True)
    noisy, target = noisy_of(batch, LEVELS, seeds_of(2))
    said = family.velocities(batch, noisy).video_BCFHW
    with torch.no_grad():
        bare = family.velocities(batch._replace(conditions=batch.uncaptioned), noisy).video_BCFHW
        error = (said + 3 * bare) / 4 - target.video_BCFHW
    # d/dw of mean((v + 3 v0) / 4 - target)² with v0 held: 1/4 of what the same error gives a plain prediction.
    upstream = 2 * error / error[0].numel() / 4
    expected = torch.autograd.grad(said, trained_ones, grad_outputs=upstream, allow_unused=True)
    left, right = (
        {f"{place}": item for place, item in enumerate(given) if item is not None} for given in (found, expected)
    )
    assert len(left) > 50
    assert distance(left, right) < 1e-4


def test_a_clip_drawn_without_caption_has_the_plain_objective(family: Family, store_folder: Path) -> None:
    batch = batch_of(store_folder, "t2va-uncaptioned", 1, 2, bare=True)
    assert batch.uncaptioned == {}
    plain, contrast = (Objective(family, form).losses(batch, LEVELS, seeds_of(2)) for form in (NONE, CONTRAST))
    assert all(torch.equal(one, other) for one, other in zip(plain, contrast, strict=True))


def test_contrast_trains_on_what_the_store_holds(base: Path, store_folder: Path, tmp_path: Path) -> None:
    plan = stage(conditions={"t2va": 1.0}, num_steps=2, guidance={"form": "family"})
    _, module = trained(base, store_folder, tmp_path, plan)
    _, plain = trained(base, store_folder, tmp_path, stage(conditions={"t2va": 1.0}, num_steps=2))
    assert module.needs_bare
    assert not plain.needs_bare
    assert all(row["loss_video"] != other["loss_video"] for row, other in zip(module.curve, plain.curve, strict=True))


# -- drift -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["full", "lora"])
def test_drift_is_nothing_at_first_grows_and_holds_on_to_the_first_weights(
    base: Path, store_folder: Path, tmp_path: Path, method: str
) -> None:
    settings: dict[str, Any] = {"method": method, "num_steps": 4, "learning_rate": 1e-2}
    drawn = [drawn_of("fl2va", 1, 2)] * 4
    plan = stage(**settings, guidance={"form": "drift", "weight": 0.5})
    family, module = trained(base, store_folder, tmp_path / "drift", plan, drawn=drawn)
    first = load_family(base)
    drift = [row["drift"] for row in module.curve]
    assert drift[0] == 0
    assert 0 < drift[1] < drift[3]
    if method == "full":
        assert same(weights_of(first), dict(module.first.state_dict()))
        assert not any(item.requires_grad for item in module.first.parameters())
    else:
        assert module.first is None
        assert all("lora_" in name for name, _ in module.trained())
        cast(Any, family.transformer).disable_adapters()
        noisy, _ = noisy_of(batch := batch_of(store_folder, "fl2va", 1, 2), LEVELS, seeds_of(2))
        pairs = zip(family.velocities(batch, noisy), first.velocities(batch, noisy), strict=True)
        assert all(torch.equal(left, right) for left, right in pairs)
    tight = stage(**settings, guidance={"form": "drift", "weight": 1000.0})
    _, held = trained(base, store_folder, tmp_path / "tight", tight, drawn=drawn)
    assert held.curve[3]["drift"] < drift[3]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_drifts_loss_is_the_squared_distance_to_the_first_velocities(
    family: Family, base: Path, store_folder: Path, method: str
) -> None:
    if method == "lora":
        adapters.add(family, 2, 0)
    objective = Objective(family, Guidance(form="drift"), adapters.NAME if method == "lora" else None)
    with torch.no_grad():
        for item in family.transformer.parameters():
            if item.requires_grad:
                item.add_(0.01 * torch.randn(item.shape, generator=torch.Generator().manual_seed(len(item))))
    batch = batch_of(store_folder, "fl2va", 4, 5)
    losses = objective.losses(batch, LEVELS, seeds_of(2))
    noisy, _ = noisy_of(batch, LEVELS, seeds_of(2))
    now, first = family.velocities(batch, noisy), load_family(base).velocities(batch, noisy)
    assert torch.allclose(losses.drift_video_B, squared(now.video_BCFHW, first.video_BCFHW), rtol=1e-4)
    assert float(losses.drift_video_B.min()) > 1e-6
    assert torch.allclose(losses.drift_audio_B[0], squared(now.audio_BSCT, first.audio_BSCT)[0], rtol=1e-4)
    assert losses.drift_audio_B[1] == 0  # silence has nothing to drift from
    (losses.drift_video_B.sum() + losses.drift_audio_B.sum()).backward()
    assert all(item.grad is not None for item in family.transformer.parameters() if item.requires_grad)


# -- assistant ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def assistant(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that changes much."""
    family = load_family(base)
    adapters.add(family, 4, 9, alpha=8.0)
    with torch.no_grad():
        for name, item in family.transformer.named_parameters():
            if "lora_B" in name:
                item.normal_(std=0.2, generator=torch.Generator().manual_seed(len(name)))
    path = tmp_path_factory.mktemp("assistant") / "assistant.safetensors"
    adapters.save(family, path, {})
    return path


@pytest.mark.parametrize("method", ["full", "lora"])
def test_an_assistant_is_there_in_training_and_gone_from_what_is_written(
    base: Path, store_folder: Path, tmp_path: Path, assistant: Path, method: str
) -> None:
    drawn = [drawn_of("t2va", 1, 2)]
    settings: dict[str, Any] = {"method": method, "num_steps": 1}
    plan = stage(**settings, guidance={"form": "assistant", "adapter": assistant})
    family, module = trained(base, store_folder, tmp_path / "with", plan, drawn=drawn)
    _, alone = trained(base, store_folder, tmp_path / "alone", stage(**settings), drawn=drawn)
    loaded = load_family(base)
    cast(Any, loaded.transformer).load_lora_adapter(str(assistant), prefix="transformer")
    batch = batch_of(store_folder, "t2va", 1, 2)
    levels = levels_of(loaded, plan.noise, batch, 0, 0)
    expected = Objective(loaded, NONE).losses(batch, levels, seeds_of(2, 0))
    assert module.curve[0]["loss_video"] == pytest.approx(float(expected.video_B.detach().mean()), abs=2e-6)
    assert abs(module.curve[0]["loss_video"] - alone.curve[0]["loss_video"]) > 1e-3

    names = [name for name, _ in module.trained()]
    assert names
    assert not [name for name in names if adapters.ASSISTANT in name]
    held = {name: item for name, item in family.transformer.named_parameters() if adapters.ASSISTANT in name}
    before = {name: item for name, item in loaded.transformer.named_parameters() if "lora_" in name}
    assert len(held) == len(before) > 0
    for name, item in held.items():
        assert torch.equal(item, before[name.replace(adapters.ASSISTANT, "default_0")])

    training.write_checkpoint(tmp_path / "checkpoint", family, module, {})
    written, first = load_family(base), load_family(base)
    load_transformer(written, tmp_path / "checkpoint" / "transformer")
    config = json.loads((tmp_path / "checkpoint" / "transformer" / "config.json").read_text())
    assert config["_class_name"] == "MiniMaxH3Transformer3DModel"
    # One step of 3e-3 moves no weight further; the assistant would by far.
    far = max(
        float((item - first.transformer.state_dict()[name]).abs().max())
        for name, item in written.transformer.state_dict().items()
    )
    assert 0 < far < 0.01
    noisy, _ = noisy_of(batch, LEVELS, seeds_of(2))
    pairs = zip(written.velocities(batch, noisy), family.velocities(batch, noisy), strict=True)
    assert all(torch.allclose(left, right, atol=1e-6) for left, right in pairs)


def test_a_file_that_is_no_assistant_of_this_model_is_refused_by_name(family: Family, tmp_path: Path) -> None:
    path = tmp_path / "gone.safetensors"
    with pytest.raises(RuntimeError, match=r"guidance\.adapter .*gone\.safetensors"):
        adapters.assist(family, path)
    import safetensors.torch

    safetensors.torch.save_file({"unet.to_q.lora_A.weight": torch.zeros(2, 2)}, path)
    with pytest.raises(RuntimeError, match=r"gone\.safetensors"):
        adapters.assist(family, path)
