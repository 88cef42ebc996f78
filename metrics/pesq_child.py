"""The process PESQ runs in: its C code can end the interpreter, so ours is never the one at risk.

`python -m metrics.pesq_child FOLDER FIRST COUNT RATE_HZ MODE`: scores the pairs FIRST.npy … up to number COUNT, each
(2, T) reference and degraded, one JSON line each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray


def score(rate_hz: int, reference: NDArray[np.float32], degraded: NDArray[np.float32], mode: str) -> dict[str, Any]:
    """The score, or the library's reason in words."""
    import pesq

    refusals = cast("tuple[type[Exception], ...]", (pesq.PesqError, ValueError))  # pyright: ignore[reportUnknownMemberType]
    try:
        value = cast("float", pesq.pesq(rate_hz, reference, degraded, mode))  # pyright: ignore[reportUnknownMemberType]
    except refusals as error:
        message: object = error.args[0] if error.args else ""
        text = message.decode() if isinstance(message, bytes) else str(message)
        return {"value": None, "reason": f"PESQ refuses: {text or type(error).__name__}"}
    if not np.isfinite(value):
        return {"value": None, "reason": "PESQ gave no finite number"}
    return {"value": float(value), "reason": ""}


def main() -> None:
    """Answer line by line, so that the parent knows which pair ended us."""
    folder, first, count, rate_hz, mode = sys.argv[1:]
    for number in range(int(first), int(count)):
        reference, degraded = np.load(Path(folder) / f"{number}.npy", allow_pickle=False)
        result = score(int(rate_hz), reference, degraded, mode)
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
