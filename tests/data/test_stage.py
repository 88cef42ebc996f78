"""Stages that contradict themselves are refused where they are written down."""

from __future__ import annotations

from typing import Any

import pytest

from data.stage import Guidance, NoiseLevels, Stage

ORDINARY = {"conditions": {"t2va": 1.0}, "num_steps": 1, "learning_rate": 1.0}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"noise": {"shift_video": 3.0}}, "noise.shift_video"),
        ({"noise": {"per_update": 0}}, "per_update"),
        ({"noise": {"distribution": "logit_normal", "logit_std": 0.0}}, "logit_std"),
        ({"noise": {"min_snr_gamma": float("inf")}}, "min_snr_gamma"),
        ({"guidance": {"form": "assistant"}}, "guidance.form assistant and guidance.adapter"),
        ({"guidance": {"form": "drift", "adapter": "a.safetensors"}}, "guidance.form assistant and guidance.adapter"),
        ({"guidance": {"form": "contrast", "scale": 0.5}}, "scale"),
        ({"guidance": {"form": "drift", "weight": 0.0}}, "weight"),
        ({"video_weight": 0.0, "audio_weight": 0.0}, "nothing would be learnt"),
        ({"method": "lora", "freeze_text_side": True}, "freeze_text_side"),
        ({"lora_alpha": 8.0}, "mean nothing for method full"),
        ({"lora_targets": ".*to_q"}, "mean nothing for method full"),
        ({"lora_modulation": True}, "mean nothing for method full"),
        ({"method": "lora", "lora_targets": "(to_q"}, "no regular expression"),
        ({"ema_decay": 1.0}, "ema_decay"),
    ],
)
def test_a_contradiction_is_refused_by_the_name_of_its_option(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Stage.model_validate({**ORDINARY, **settings})


def test_what_is_left_out_is_as_published() -> None:
    stage = Stage.model_validate(ORDINARY)
    assert (stage.noise, stage.guidance) == (NoiseLevels(), Guidance())
    assert (stage.noise.distribution, stage.noise.draws, stage.guidance.form) == ("family", "family", "family")
    assert NoiseLevels(distribution="uniform", shift_video=3.0).shift_video == 3.0
