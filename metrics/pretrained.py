"""Yardsticks that are networks of others: CLAP from a local folder, and why each of the rest is missing.

Nothing is fetched. Legend: C channels, T samples, N embeddings of D values.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from data.files import sha256
from metrics.score import Score
from metrics.waveforms import Waveform, downmix, resample, why_not

CLAP_FOLDER = "SOUNDSTAGE_CLAP"
"""Environment: a folder as `ClapModel.save_pretrained` writes it, with tokenizer and feature extractor."""
WINDOW_S = 10.0
"""What CLAP hears at once; longer sound is heard window by window, since the library would draw one by chance."""
WEIGHTS = "model.safetensors"

CLAP_CONVENTION = (
    "cosine of text and sound in CLAP (transformers), all channels mixed to one, mean over windows of 10 s"
)
FAD_CLAP_CONVENTION = "Fréchet distance of CLAP embeddings of windows of 10 s; not FAD, which is VGGish's"

MISSING = {
    "desync": "Synchformer is in no package; its network would be read here from its checkpoint's state dict",
    "ib_score": "ImageBind is in no package of its authors, and its weights forbid commercial use (CC BY-NC-SA 4.0)",
    "fvd": "I3D's published weights are programs (TorchScript, TensorFlow Hub), which are not run here",
    "fad": "VGGish's packages fetch their weights; see fad_clap, which is another number",
}
"""Yardsticks that nothing here can compute, whatever files there are, and why. They would be plugged in here."""


class Clap(NamedTuple):
    """The network with what prepares its inputs."""

    model: Any
    tokenizer: Any
    extractor: Any
    sha256: str
    """Of its weights, for the report."""


def clap_folder() -> Path | Score:
    """Where CLAP is, or why it is missing."""
    setting = os.environ.get(CLAP_FOLDER)
    if not setting:
        return Score.missing(f"no weights of CLAP; set {CLAP_FOLDER} to a folder with its {WEIGHTS} (such as LAION's)")
    folder = Path(setting)
    if not (folder / WEIGHTS).is_file():
        return Score.missing(f"{folder} holds no {WEIGHTS}; see {CLAP_FOLDER}")
    return folder


@functools.cache
def load_clap(folder: Path) -> Clap:
    """CLAP from a local folder; weights in safetensors alone, so nothing in them runs."""
    import transformers

    library = cast(Any, transformers)
    model = library.ClapModel.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
    tokenizer = library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    extractor = library.ClapFeatureExtractor.from_pretrained(folder, local_files_only=True)
    return Clap(model, tokenizer, extractor, sha256(folder / WEIGHTS))


def clap_score(text: str, waveform_CT: Waveform, sample_rate_hz: int, folder: Path | Score | None = None) -> Score:
    """Whether the sound is what the text says, -1 to 1 (Wu et al. 2023, arXiv 2211.06687)."""
    folder = folder or clap_folder()
    if isinstance(folder, Score):
        return folder
    if not text.strip():
        return Score.missing("no text")
    if reason := why_not(waveform_CT, waveform_CT):
        return reason
    import torch

    clap = load_clap(folder)
    with torch.inference_mode():
        tokens = clap.tokenizer([text], return_tensors="pt", truncation=True)
        said = clap.model.get_text_features(tokens["input_ids"], tokens["attention_mask"])
    heard_ND = clap_embeddings(waveform_CT, sample_rate_hz, clap)
    return Score(float((heard_ND @ unit(said.pooler_output.double().numpy())[0]).mean()))


def clap_embeddings(waveform_CT: Waveform, sample_rate_hz: int, clap: Clap) -> NDArray[np.float64]:
    """Unit vectors (N, D) of the sound's windows; a last one under a second is left out where there are others."""
    import torch

    rate_hz = int(clap.extractor.sampling_rate)
    mono_T = resample(downmix(waveform_CT), sample_rate_hz, rate_hz)[0].astype(np.float32)
    size = round(WINDOW_S * rate_hz)
    windows = [mono_T[start : start + size] for start in range(0, len(mono_T), size)]
    kept = [window for window in windows if len(window) >= rate_hz] or windows[:1]
    found: list[NDArray[np.float64]] = []
    for window in kept:
        given = clap.extractor(window, sampling_rate=rate_hz, return_tensors="pt")
        with torch.inference_mode():
            answer = clap.model.get_audio_features(given["input_features"], given.get("is_longer"))
        found.append(answer.pooler_output.double().numpy())
    return unit(np.concatenate(found))


def unit(vectors_ND: NDArray[np.float64]) -> NDArray[np.float64]:
    """The same directions at length 1."""
    return vectors_ND / np.linalg.norm(vectors_ND, axis=1, keepdims=True)


def frechet_distance(reference_ND: NDArray[np.float64], made_ND: NDArray[np.float64]) -> Score:
    """Squared Fréchet distance of the two Gaussians that have the sets' means and covariances.

    Source: Dowson and Landau 1982, "The Fréchet distance between multivariate normal distributions".
    """
    least = min(len(reference_ND), len(made_ND))
    if least <= reference_ND.shape[1]:
        needed = reference_ND.shape[1] + 1
        return Score.missing(f"{least} embeddings of {reference_ND.shape[1]} values; a covariance needs {needed}")
    first, second = (np.cov(vectors_ND, rowvar=False) for vectors_ND in (reference_ND, made_ND))
    values, vectors = np.linalg.eigh(first)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    shared = np.sqrt(np.maximum(np.linalg.eigvalsh(root @ second @ root), 0)).sum()
    apart = np.square(reference_ND.mean(axis=0) - made_ND.mean(axis=0)).sum()
    return Score(float(max(0.0, apart + np.trace(first) + np.trace(second) - 2 * shared)))
