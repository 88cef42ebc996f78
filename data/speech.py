"""How likely sound is speech, by silero-vad's network (MIT), read from its wheel without importing it: that loads torch."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any, cast

import numpy as np
import soxr
from numpy.typing import NDArray

RATE_HZ = 16_000
WINDOW, CONTEXT = 512, 64
"""Samples of one probability (32 ms), and of what came before. Source: silero-vad 6."""
BATCH = 256
"""Windows given to the network at once: 8 s."""
SILENT_PEAK = 1e-3
"""A batch that stays below this, -60 dB, is not speech."""
MODEL = "silero_vad_16k_sequence.onnx"


@functools.cache
def network() -> Any:
    """The network as a session of one thread.

    Raises:
        RuntimeError: the package or onnxruntime is not installed.
    """
    found = importlib.util.find_spec("silero_vad")
    path = Path(found.origin).parent / "data" / MODEL if found is not None and found.origin else None
    if path is None or not path.is_file() or importlib.util.find_spec("onnxruntime") is None:
        raise RuntimeError(
            f"speech needs {MODEL} of silero-vad >= 6.2.3 and onnxruntime; install them, or set speech: false"
        )
    import onnxruntime

    runtime = cast(Any, onnxruntime)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class Ear:
    """Takes mono sound in pieces and gives the probability of speech."""

    def __init__(self, rate_hz: int) -> None:
        self._session = network()
        resamples = rate_hz != RATE_HZ
        self._resampler = soxr.ResampleStream(rate_hz, RATE_HZ, 1, dtype="float32", quality="MQ") if resamples else None
        self._pending = np.zeros(0, np.float32)
        self._probabilities: list[NDArray[np.float32]] = []
        self._forget()

    def take(self, samples_T: NDArray[np.float32], *, last: bool = False) -> None:
        """The next samples at the rate given."""
        heard = samples_T
        if self._resampler is not None:
            heard = cast(NDArray[np.float32], self._resampler.resample_chunk(samples_T, last=last)).reshape(-1)
        self._pending = np.concatenate([self._pending, heard])
        while len(self._pending) >= BATCH * WINDOW:
            self._judge(self._pending[: BATCH * WINDOW])
            self._pending = self._pending[BATCH * WINDOW :]

    def finish(self, num_blocks: int, block_s: float) -> NDArray[np.float32]:
        """Mean probability (B,) of the windows whose middle is in each block."""
        self.take(np.zeros(0, np.float32), last=True)
        if len(self._pending):
            padded = np.zeros(-(-len(self._pending) // WINDOW) * WINDOW, np.float32)
            padded[: len(self._pending)] = self._pending
            self._judge(padded)
        windows = np.concatenate([np.zeros(0, np.float32), *self._probabilities])
        block = ((np.arange(len(windows)) + 0.5) * WINDOW / RATE_HZ / block_s).astype(np.int64)
        block = np.minimum(block, max(0, num_blocks - 1))
        counts = np.maximum(np.bincount(block, minlength=num_blocks), 1)
        return (np.bincount(block, weights=windows, minlength=num_blocks) / counts).astype(np.float32)[:num_blocks]

    def _forget(self) -> None:
        self._context = np.zeros((1, CONTEXT), np.float32)
        self._state = {"h": np.zeros((1, 1, 128), np.float32), "c": np.zeros((1, 1, 128), np.float32)}

    def _judge(self, samples_T: NDArray[np.float32]) -> None:
        """One call of the network for all windows of a batch; silence needs none."""
        windows = samples_T.reshape(-1, WINDOW)
        if np.abs(samples_T).max() < SILENT_PEAK:
            self._probabilities.append(np.zeros(len(windows), np.float32))
            self._forget()
            return
        contexts = np.concatenate([self._context, windows[:-1, -CONTEXT:]])
        given = {"input": np.concatenate([contexts, windows], axis=1), **self._state}
        values, hidden, cell = self._session.run(["speech_probs", "hn", "cn"], given)
        self._probabilities.append(cast(NDArray[np.float32], values).reshape(-1))
        self._state, self._context = {"h": hidden, "c": cell}, windows[-1:, -CONTEXT:]
