"""Training is judged by what is sampled after it: the experiments of `benchmarks.behaviour`, at the smallest size."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import behaviour
from benchmarks.behaviour import Found

pytestmark = pytest.mark.timeout(600)  # half a minute of one core; busy machines take far longer


@pytest.fixture(scope="module")
def signs(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return behaviour.wrong_sign(tmp_path_factory.mktemp("signs"), num_steps=160)


def test_one_clip_is_learned_from_nothing(signs: Found) -> None:
    assert signs["right"]["psnr_db"] > signs["untrained"]["psnr_db"] + 7
    assert signs["right"]["lsd_db"] < signs["untrained"]["lsd_db"] - 1
    assert signs["right"]["envelope_r"] > 0.6


def test_a_flipped_velocity_has_the_same_loss_and_fails_by_its_samples(signs: Found) -> None:
    assert signs["flipped"]["loss_at_the_end"] == pytest.approx(signs["right"]["loss_at_the_end"], rel=0.15)
    assert signs["flipped"]["psnr_db"] < signs["untrained"]["psnr_db"] + 2
    assert signs["flipped"]["psnr_db"] < signs["right"]["psnr_db"] - 7


def test_keyframes_decide_what_the_shipped_model_generates(tmp_path: Path) -> None:
    found = behaviour.conditions(tmp_path, num_clips=3)
    assert found["gap"]["psnr_db"] > 3
    assert found["gap"]["least_db"] > 0


def test_an_adapter_switched_off_gives_the_base_back_and_merged_is_the_same(tmp_path: Path) -> None:
    found = behaviour.adapter(tmp_path, num_steps=20)
    assert found["on"]["largest_difference_to_shipped"] > 0.1
    assert found["off"]["largest_difference_to_shipped"] == 0
    assert found["merged"]["largest_difference_to_on"] < 1e-4


def test_a_frozen_text_side_stays_bit_for_bit_until_the_second_stage(tmp_path: Path) -> None:
    found = behaviour.two_stages(tmp_path, num_steps=16)
    assert found["frozen"]["text_side_changed"] == 0
    assert found["frozen"]["rest_changed"] > 0.9
    assert found["whole"]["text_side_changed"] > 0.9


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_clip_is_learned_in_every_workflow(tmp_path: Path) -> None:
    for variant, found in behaviour.overfit(tmp_path).items():
        assert found["psnr_db_after"] > found["psnr_db_before"] + 7, variant
        assert found["lsd_db_after"] < found["lsd_db_before"] - 1, variant
        assert found["envelope_r_after"] > 0.6, variant


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_replay_keeps_old_clips(tmp_path: Path) -> None:
    found = behaviour.forgetting(tmp_path)
    lost = {name: found[name]["old_loss"] - found["shipped"]["old_loss"] for name in ("alone", "replay")}
    assert lost["replay"] < 0.5 * lost["alone"]
    assert found["replay"]["old_psnr_db"] > found["alone"]["old_psnr_db"] + 1
    for name in lost:
        assert found[name]["new_loss"] < found["shipped"]["new_loss"]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_guidance_preservation_keeps_what_plain_tuning_wears_off(tmp_path: Path) -> None:
    found = behaviour.guidance(tmp_path)
    had = found["distilled"]["scale"] - 1
    assert had > 0.7
    assert found["none"]["scale"] - 1 < 0.4 * had
    for form in ("contrast", "drift", "assistant"):
        assert found[form]["scale"] - 1 > 0.4 * had, form
        assert found[form]["distance"] < 0.9 * found["none"]["distance"], form
