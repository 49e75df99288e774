"""What a converted model keeps of a text, beside the keys and values the original would keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast, final

from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.models.room import growing_bytes, key_value_bytes, state_bytes


@final
@dataclass(frozen=True)
class Memory:
    """Bytes for one text.

    state_bytes       of all layers with a state of one size
    bytes_per_token   that layers without one add with every token
    original          bytes per token of the original's keys and values
    """

    state_bytes: int
    bytes_per_token: int
    original: int

    @staticmethod
    def of(model: MaclaurinForCausalLM) -> Memory:
        """Of a model whose config names its present attention."""
        config = cast("MaclaurinConfig", model.config)
        dtype = model.dtype
        growing = growing_bytes(config, 1, 1, dtype)
        return Memory(state_bytes(config, 1, dtype), growing, key_value_bytes(config, 1, 1, dtype))

    @property
    def even_at(self) -> int | None:
        """The length of text from which on the state is the smaller one; None if it never is."""
        saved = self.original - self.bytes_per_token
        return None if saved <= 0 else -(-self.state_bytes // saved)
