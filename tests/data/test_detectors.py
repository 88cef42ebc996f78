from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from data import detectors, media
from data.records import Clip, Source


def written() -> np.ndarray:
    picture = np.full((180, 320, 3), 60, np.uint8)
    cv2.putText(picture, "SUBTITLES", (30, 100), cv2.FONT_HERSHEY_SIMPLEX, 1.4, (255, 255, 255), 3, cv2.LINE_AA)
    return picture


def test_text_is_measured_and_its_absence_is_zero():
    pytest.importorskip("rapidocr_onnxruntime")
    assert 0.02 < detectors.text_share(written()) < 0.3
    assert detectors.text_share(np.full((180, 320, 3), 60, np.uint8)) == 0


def test_speech_quality_is_that_of_the_reference_script():
    pytest.importorskip("speechmos")
    noise = np.random.default_rng(0).normal(0, 0.1, 16000 * 3).astype(np.float32)
    import onnxruntime

    path = detectors.folder("dnsmos") / "dnsmos_models" / "sig_bak_ovr.onnx"
    repeated = np.tile(noise, 4)  # doubled until it is long enough, then heard from each whole second on
    network = onnxruntime.InferenceSession(str(path))
    heard = [repeated[at * 16000 : int((at + 9.01) * 16000)][None] for at in range(3)]
    raw = [network.run(None, {"input_1": window})[0][0][2] for window in heard]
    expected = np.poly1d([-0.06766283, 1.11546468, 0.04602535])(np.array(raw)).mean()
    assert detectors.dnsmos(noise) == pytest.approx(expected, abs=1e-3)
    assert 1 <= detectors.dnsmos(noise[:4000]) <= 2


def test_faces_are_not_seen_where_there_are_none():
    pytest.importorskip("facenet_pytorch")
    assert detectors.num_faces(written()) == 0
    assert detectors.num_faces(np.zeros((16, 16, 3), np.uint8)) == 0


def test_a_detector_that_is_not_installed_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    detectors.require(())
    with pytest.raises(RuntimeError, match=r"cut\.detectors has text.*pip install --no-deps rapidocr"):
        detectors.require(("text",))


def test_columns_come_from_the_clip_itself(
    tmp_path: Path, make_source: Callable[..., Source], make_clip: Callable[..., Clip], monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("rapidocr_onnxruntime")
    path = tmp_path / "titles.mp4"
    plain = np.full((24, 180, 320, 3), 60, np.uint8)
    media.write_mp4(path, np.concatenate([plain, np.repeat(written()[None], 24, axis=0)]), None, 24, 48000)
    source = make_source("titles.mp4").model_copy(update={"path": str(path), "width": 320, "height": 180})
    early = make_clip("a" * 16, path=str(path), start_s=0.0, end_s=0.916667, has_audio=False)
    late = early.model_copy(update={"start_s": 1.05, "end_s": 1.966667})
    assert detectors.columns(early, source, ("text", "dnsmos")) == {"text_share": 0.0}
    assert 0.02 < (detectors.columns(late, source, ("text",))["text_share"] or 0) < 0.3


def test_quality_of_speech_is_asked_only_where_there_is_speech(
    make_source: Callable[..., Source], make_clip: Callable[..., Clip], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(detectors, "heard", lambda clip: np.zeros(16000, np.float32))
    monkeypatch.setattr(detectors, "dnsmos", lambda sound: 3.21)
    clip, source = make_clip("a" * 16), make_source("a.mp4")
    for share, expected in ((None, {}), (0.1, {}), (0.5, {"dnsmos": 3.21})):
        assert detectors.columns(clip.model_copy(update={"speech_share": share}), source, ("dnsmos",)) == expected
