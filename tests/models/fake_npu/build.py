"""Compile `device.cpp` unless that was done before, and print where its library is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from torch.utils.cpp_extension import load

print(cast(Any, load("soundstage_fake_npu", [str(Path(__file__).with_name("device.cpp"))], extra_cflags=["-O0"])).__file__)
