"""Exactness on a CPU: one thread, deterministic kernels."""

from __future__ import annotations

import os

import torch


def use_one_thread() -> None:
    """Pin torch to one thread and to deterministic kernels, so that same inputs give same bytes.

    Two threads are also slower at this size: they spin for each other.
    """
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
