"""The process PESQ runs in: its C code can end the interpreter, so ours is never the one at risk.

`python -m metrics.pesq_child PAIRS.npz FIRST`: scores the pairs from number FIRST on, one JSON line each.
"""

from __future__ import annotations

import json
import sys
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray


def score(rate_hz: int, reference: NDArray[np.float64], degraded: NDArray[np.float64], mode: str) -> dict[str, Any]:
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
    path, first = sys.argv[1], int(sys.argv[2])
    with np.load(path, allow_pickle=False) as pairs:
        for number in range(first, int(pairs["num_pairs"])):
            result = score(
                int(pairs["rate_hz"]), pairs[f"reference_{number}"], pairs[f"degraded_{number}"], str(pairs["mode"])
            )
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
