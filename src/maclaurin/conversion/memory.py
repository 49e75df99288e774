"""What the cache of a converted model takes, beside that of the original."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast, final

import torch

from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.models.cache_size import growing_bytes, state_bytes


@final
@dataclass(frozen=True)
class Memory:
    """Bytes of the cache for one text.

    state_bytes            of all layers with a state of fixed size
    bytes_per_token        that the other layers add with every token
    original_state_bytes   the same two of the original
    original
    """

    state_bytes: int
    bytes_per_token: int
    original_state_bytes: int
    original: int

    @staticmethod
    def of(model: MaclaurinForCausalLM, original: Sequence[str]) -> Memory:
        """Of a model whose config names its present attention, beside the attention it had."""
        config = cast("MaclaurinConfig", model.config)
        before = copy.deepcopy(config)
        before.attention = list(original)
        return Memory(*_sizes(config, model.dtype), *_sizes(before, model.dtype))

    @property
    def even_at(self) -> int | None:
        """The length of text from which on the converted model takes less; None if it never does."""
        saved = self.original - self.bytes_per_token
        return None if saved <= 0 else max(0, -(-(self.state_bytes - self.original_state_bytes) // saved))


def _sizes(config: MaclaurinConfig, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of fixed size, and bytes per token."""
    return state_bytes(config, 1, dtype), growing_bytes(config, 1, 1, dtype)
