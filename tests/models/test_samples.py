"""Samples are generations of the model as it is, and training does not notice them: not in one bit."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch

from data.files import sha256
from data.latent_index import LatentRow
from data.latents import INDEX, LatentStore, write_index
from data.media import read_clip
from metrics.picture import psnr_db
from models.families import Condition, Family, load_family
from models.ranks import Ranks
from models.samples import NAME, Samples, chosen, undisturbed
from tests.models import training_runs
from tests.models.training_runs import result_of, stage_of, together


@pytest.fixture(scope="module")
def store(store_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LatentStore:
    """The common store with its last three clips, of which one is silent, in the validation split."""
    import shutil

    folder = tmp_path_factory.mktemp("split-store") / "store"
    shutil.copytree(store_folder, folder)
    rows = list(LatentStore(store_folder).index.rows())
    record = LatentStore(store_folder).record
    moved = [row.model_copy(update={"split": "val"}) if number >= 3 else row for number, row in enumerate(rows)]
    (folder / INDEX).unlink()
    write_index(folder, moved, {name: record[name] for name in ("family", "text_of")})
    return LatentStore(folder)


def measure(real: Any, sampled: Any) -> float | None:
    return psnr_db(real, sampled).mean.value


class Drawing(lightning.LightningModule):
    """Steps that draw from every generator there is, with some parts of the model in each mode."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.transformer = family.transformer
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimiser: Any = self.optimizers()
        self.drawn += [float(torch.rand(())), random.random(), float(np.random.random())]  # noqa: NPY002
        generator = torch.Generator().manual_seed(batch_idx)
        loss = torch.zeros(())
        for parameter in self.transformer.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                loss = loss + ((parameter - self.drawn[-1]) * noise).square().mean()
        self.manual_backward(loss)  # gradients are left over the step's end, where samples are taken
        optimiser.step()
        if batch_idx % 2:
            optimiser.zero_grad()
        return {"step": batch_idx, "row": {"step": batch_idx}}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.transformer.parameters() if p.requires_grad], 1e-3)


def run(base: Path, make: Any) -> tuple[Family, Drawing, list[Any]]:
    family = load_family(base)
    family.transformer.train()
    family.transformer.proj_out.eval()  # type: ignore[union-attr]
    module, callbacks = Drawing(family), make(family)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=4, logger=False, enable_checkpointing=False,
        enable_model_summary=False, enable_progress_bar=False, callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=None))
    return family, module, callbacks


@pytest.fixture(scope="module")
def sampled(base: Path, store: LatentStore, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run with samples, and where they are."""
    folder, told = tmp_path_factory.mktemp("samples"), list[Any]()
    family, module, _ = run(
        base,
        lambda family: [
            Samples(
                family, store, chosen(store, 2, 7, ("t2va", "fl2va")), folder, 3, 3, first_step=0, ranks=Ranks(),
                measure=measure, tell=lambda *item: told.append(item),
            )
        ],
    )  # fmt: skip
    return family, module, folder, told


def test_training_with_samples_is_bitwise_training_without(base: Path, sampled: Any) -> None:
    with_samples, module, folder, _ = sampled
    without, plain, _ = run(base, lambda family: [])
    assert len(list(folder.iterdir())) == 3
    assert module.drawn == plain.drawn
    left, right = with_samples.transformer.state_dict(), without.transformer.state_dict()
    assert all(torch.equal(left[key], right[key]) for key in left)
    assert [part.training for part in with_samples.transformer.modules()] == [
        part.training for part in without.transformer.modules()
    ]
    pairs = zip(with_samples.transformer.parameters(), without.transformer.parameters(), strict=True)
    assert all(
        (a.grad is None) == (b.grad is None) and (a.grad is None or torch.equal(a.grad, b.grad)) for a, b in pairs
    )


def test_samples_come_at_the_start_at_intervals_and_at_the_end(sampled: Any) -> None:
    _, _, folder, told = sampled
    assert sorted(path.name for path in folder.iterdir()) == ["step-000000", "step-000003", "step-000004"]
    assert [step for step, _ in told] == [0, 3, 4]
    for step, numbers in told:
        record = json.loads((folder / f"step-{step:06d}" / NAME).read_text())
        assert record["step"] == step
        scores = [sample["psnr_db"] for sample in record["samples"]]
        assert numbers["psnr_db"] == pytest.approx(sum(scores) / 2)
        assert all(0 < score < 100 for score in scores)
    assert told[0][1] != told[2][1]  # the model has changed


def test_a_sample_is_the_familys_generation_from_stored_conditions_with_stereo_sound(
    base: Path, store: LatentStore, sampled: Any
) -> None:
    folder = sampled[2] / "step-000000"
    first, second = json.loads((folder / NAME).read_text())["samples"]
    assert (first["entry"], first["variant"]) == ("clip-3@small", "t2va")
    assert (second["entry"], second["variant"]) == ("clip-4@small", "fl2va")
    family = load_family(base)
    row: LatentRow = next(row for row in store.index.rows() if row.entry == second["entry"])
    latents = family.generate(Condition("fl2va", store.conditions(row, "fl2va")), row.shape, second["seed"], 3)
    frames, waveform = family.encoders.decode(*latents, row.shape)
    real, _ = family.encoders.decode(store.read(row, "video"), store.read(row, "audio"), row.shape)
    assert second["psnr_db"] == measure(real, frames)
    seen, heard = read_clip(folder / second["file"], 0.0, float(row.shape.duration_s), row.shape)
    assert seen.shape == frames.shape
    assert heard.shape[0] == waveform.shape[0] == 2
    brightness = [(picture @ (0.2126, 0.7152, 0.0722)).ravel() for picture in (frames, seen)]  # colour is 4:2:0
    assert np.corrcoef(*brightness)[0, 1] > 0.95
    assert np.corrcoef(heard.ravel(), waveform[:, : heard.shape[1]].ravel())[0, 1] > 0.9


def test_a_run_that_continues_takes_no_first_samples_and_a_step_is_sampled_once(
    base: Path, store: LatentStore, tmp_path: Path, sampled: Any
) -> None:
    family = load_family(base)
    again = Samples(family, store, chosen(store, 1, 7, ("t2va",)), tmp_path, 2, 3, first_step=6, ranks=Ranks())
    nothing: Any = None
    again.on_train_start(nothing, nothing)
    assert not list(tmp_path.iterdir())
    again.on_train_batch_end(nothing, nothing, {"step": 7}, None, 0)
    digest = sha256(tmp_path / "step-000008")
    (tmp_path / "step-000008" / NAME).unlink()
    again.on_train_end(nothing, nothing)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000008"]
    assert not (tmp_path / "step-000008" / NAME).exists()  # it was not taken again
    fresh = Samples(family, store, chosen(store, 1, 7, ("t2va",)), tmp_path, 2, 3, first_step=6, ranks=Ranks())
    fresh.on_train_batch_end(nothing, nothing, {"step": 7}, None, 0)
    assert sha256(tmp_path / "step-000008") == digest
    assert json.loads((tmp_path / "step-000008" / NAME).read_text())["samples"][0]["psnr_db"] is None


def test_clips_are_those_of_the_validation_split_in_modes_that_generate(store: LatentStore) -> None:
    found = chosen(store, 9, 1)
    assert [wanted.row.entry for wanted in found] == ["clip-3@small", "clip-4@small", "clip-5@small"]
    assert [wanted.variant for wanted in found] == ["t2va", "fl2va_first", "fl2va_last"]
    assert len({wanted.seed for wanted in found}) == 3
    assert chosen(store, 2, 1) == found[:2]
    assert chosen(store, 9, 1, ("v2a", "a2v")) == []
    references = chosen(store, 1, 1, ("v2a", "ref2va"))
    assert [wanted.variant for wanted in references] == ["ref2va.0"]


def test_a_failing_sample_warns_and_training_goes_on(base: Path, store: LatentStore, tmp_path: Path) -> None:
    family = load_family(base)
    family.transformer.train()

    def broken(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    family.generate = broken  # type: ignore[method-assign]
    callback = Samples(family, store, chosen(store, 1, 0), tmp_path, 1, 3, first_step=0, ranks=Ranks())
    nothing: Any = None
    with pytest.warns(UserWarning, match="samples of step 0 failed: no room"):
        callback.on_train_start(nothing, nothing)
    assert family.transformer.training
    assert not list(tmp_path.iterdir())


def test_sharded_weights_are_after_samples_what_they_are_without(
    base: Path, store_folder: Path, tmp_path: Path
) -> None:
    results: list[Any] = []
    for sampled in (False, True):
        running = {"strategy": "fsdp2", "precision": "bf16", "double": False, "sampled": sampled}
        (work := tmp_path / f"{sampled}").mkdir()
        together(2, training_runs.run, base, store_folder, work, stage_of(num_steps=2), running)
        results.append(result_of(work)[0])
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())
    assert any((tensor != tensor.bfloat16()).any() for tensor in results[1].values())


class Recording:
    """Encoders on a device without memory, or on one that has as much as the CPU."""

    def __init__(self, encoders: Any, *, too_small: bool) -> None:
        self._encoders, self._too_small = encoders, too_small
        self.decoded_rate_hz, self.device, self.calls = encoders.decoded_rate_hz, "cpu", list[str]()

    def move(self, device: str) -> str:
        before, self.device = self.device, device
        return before

    def decode(self, *given: Any) -> Any:
        self.calls.append(self.device)
        if self._too_small and self.device != "cpu":
            raise torch.OutOfMemoryError("no room")
        return self._encoders.decode(*given)


@pytest.mark.parametrize("too_small", [False, True])
def test_decoding_is_where_training_is_or_on_the_cpu_and_real_clips_are_decoded_once(
    base: Path, store: LatentStore, tmp_path: Path, sampled: Any, too_small: bool
) -> None:
    family: Any = load_family(base)
    family._encoders = encoders = Recording(family.encoders, too_small=too_small)
    callback = Samples(
        family, store, chosen(store, 2, 7, ("t2va", "fl2va")), tmp_path, 1, 3, first_step=0, ranks=Ranks(),
        device=torch.device("cuda"), measure=measure,
    )  # fmt: skip
    nothing: Any = None
    with pytest.warns(UserWarning, match="decoded on the CPU.*no room") if too_small else nullcontext():
        callback.on_train_start(nothing, nothing)
    callback.on_train_batch_end(nothing, nothing, {"step": 0}, None, 0)
    there = ["cuda", *["cpu"] * 6] if too_small else ["cuda"] * 6
    assert (encoders.calls, encoders.device) == (there, "cpu")  # two real clips, two samples, two samples
    for name in (NAME, "clip-3@small-t2va.mp4"):
        assert sha256(tmp_path / "step-000000" / name) == sha256(sampled[2] / "step-000000" / name)


def test_what_is_evaluated_comes_out_as_it_went_in_also_after_an_error() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(1, 1))
    model[0].eval()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)

    def failing() -> None:
        with undisturbed(model):
            assert not any(part.training for part in model.modules())
            assert not torch.is_grad_enabled()
            torch.rand(9)
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert torch.equal(torch.rand(3), expected)
    assert [part.training for part in model.modules()] == [True, False, True]
    assert torch.is_grad_enabled()
