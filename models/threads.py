"""How the libraries behave here: one thread, deterministic kernels, no chatter."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any, cast

import torch


def use_one_thread() -> None:
    """Pin torch to one thread and to deterministic kernels, so that same inputs give same bytes.

    Two threads are also slower at this size: they spin for each other.
    """
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    # Else every new tensor is written twice, in case somebody reads what is not there yet.
    cast(Any, torch.utils.deterministic).fill_uninitialized_memory = False
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def quiet_libraries() -> None:
    """Keep the libraries' own bars, tips and deprecations off the terminal; their errors still come through."""
    import diffusers
    import transformers

    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for pattern in (
        ".*weight_norm.*",  # the released sound autoencoder is built with it
        ".*Unexpected input.*",  # not every H3 workflow takes every argument
        ".*treespec.*",
        ".*Total length of.*",  # of a run whose last step is behind it
        ".*does not have many workers.*",  # batches are read from memory maps
        ".*checkpoint that ended before the epoch.*",  # ours restarts at the step, see `Remaining`
    ):
        warnings.filterwarnings("ignore", message=pattern)
