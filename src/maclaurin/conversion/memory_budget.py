"""Memory budgets (`25%` of the original's bytes, `64MB`, a size that never grows), and the bytes used."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast, final

import torch

from maclaurin.errors import InputError
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.models.cache import growing_bytes, key_value_bytes, state_bytes

#: bytes are counted for keys and values in this dtype, the one models are served in
COUNTED_IN = torch.bfloat16
_UNITS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30,
}  # fmt: skip


@final
@dataclass(frozen=True)
class MemoryBudget:
    """Bytes that a text of `at` tokens may take; if constant, longer texts may not take more."""

    bytes: int
    at: int
    constant: bool
    #: bytes of the original's keys and values at that length
    original: int

    @staticmethod
    def read(config: MaclaurinConfig, *, memory: str | None, constant: str | None, at: int) -> MemoryBudget:
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

    def times(self, factor: float) -> MemoryBudget:
        """A budget for the same text with `factor` times the bytes."""
        return dataclasses.replace(self, bytes=int(factor * self.bytes))

    def __str__(self) -> str:
        share = f"{self.bytes / self.original:.1%} of the original's {self.original:,}"
        kind = "at any length" if self.constant else f"at {self.at:,} tokens"
        return f"{self.bytes:,} bytes {kind} ({share} at {self.at:,})"


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


@final
@dataclass(frozen=True)
class Memory:
    """Bytes of the cache for one text, counted in bf16 like a budget; a model in fp32 takes twice that.

    state_bytes            of all layers with a state of fixed size
    bytes_per_token        that the other layers add with every token
    original_state_bytes   the same as state_bytes, for the original
    original               the same as bytes_per_token, for the original
    """

    state_bytes: int
    bytes_per_token: int
    original_state_bytes: int
    original: int

    @staticmethod
    def of(model: MaclaurinForCausalLM, original: Sequence[str]) -> Memory:
        """The memory of a model with the attention in its config, and with its original attention."""
        config = cast("MaclaurinConfig", model.config)
        before = copy.deepcopy(config)
        before.attention = list(original)
        return Memory(*_sizes(config), *_sizes(before))

    @property
    def break_even_tokens(self) -> int | None:
        """The length of text from which the converted model takes less; None if it never does."""
        saved = self.original - self.bytes_per_token
        return None if saved <= 0 else max(0, -(-(self.state_bytes - self.original_state_bytes) // saved))


def _sizes(config: MaclaurinConfig) -> tuple[int, int]:
    """Bytes of fixed size, and bytes per token."""
    return state_bytes(config, 1, COUNTED_IN), growing_bytes(config, 1, 1, COUNTED_IN)
