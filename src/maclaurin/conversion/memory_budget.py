"""Read memory budgets (`25%` of the original's bytes, `64MB`, a size that never grows); count bytes used."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import cast

import torch

from maclaurin.conversion.conversion_record import Memory, MemoryBudget
from maclaurin.errors import InputError
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.models.cache import growing_bytes, key_value_bytes, state_bytes

#: bytes are counted for keys and values in this dtype, the one models are served in
COUNTED_IN = torch.bfloat16
_UNITS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30,
}  # fmt: skip


def read_budget(
    config: MaclaurinConfig, *, memory: str | None, constant: str | None, at: int
) -> MemoryBudget:
    """Parse one of two options: `memory` grows with the text, `constant` does not."""
    if (memory is None) == (constant is None):
        raise InputError("give one of `memory` (25%, 64MB) and `constant` (32MB).")
    if at < 2:
        raise InputError(f"a budget is for a text of at least two tokens; got {at}.")
    original = key_value_bytes(config, 1, at, COUNTED_IN)
    text = memory if memory is not None else constant
    assert text is not None
    parameter = "memory" if memory is not None else "constant"
    found = MemoryBudget(_bytes(text, original, parameter), at, constant is not None, original)
    if found.bytes > original:
        raise InputError(
            f"`{parameter}`: {text} limits nothing: all keys and values of {at:,} tokens take "
            f"{original:,} bytes. Give less, or a longer `at`."
        )
    return found


def _bytes(text: str, original: int, parameter: str) -> int:
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]+|%)\s*", text)
    unit = found[2].lower() if found else ""
    if found is None or (unit != "%" and unit not in _UNITS):
        raise InputError(
            f"`{parameter}` is a share of the original's bytes or a number of bytes with a unit, such as 25% "
            f"or 64MB (kB, MB, GB, KiB, MiB, GiB); got {text!r}."
        )
    number = float(found[1])
    total = int(number / 100 * original) if unit == "%" else int(number * _UNITS[unit])
    if total < 1:
        raise InputError(f"`{parameter}`: {text} is not a budget: give more than 0 bytes.")
    return total


def memory_of(model: MaclaurinForCausalLM, original: Sequence[str]) -> Memory:
    """The memory of a model with the attention in its config, and with its original attention."""
    config = cast("MaclaurinConfig", model.config)
    before = copy.deepcopy(config)
    before.attention = list(original)
    return Memory(*_sizes(config), *_sizes(before))


def _sizes(config: MaclaurinConfig) -> tuple[int, int]:
    """Bytes of fixed size, and bytes per token."""
    return state_bytes(config, 1, COUNTED_IN), growing_bytes(config, 1, 1, COUNTED_IN)
