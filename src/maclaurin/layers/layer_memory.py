"""The memory of one attention layer for a text that is read in pieces.

With a finite state that is the state, of the same size however long the text. Without one it is the keys
and values (and gates) of every token, which grow. Beside them are the last inputs of a short convolution.
No tensor is ever changed in place, so a copy of the memory may share them all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maclaurin.errors import InputError
from maclaurin.forms.state import State
from maclaurin.forms.window import ExactKeys
from maclaurin.layers.layout import Layout
from maclaurin.programs.dispatch import attention
from maclaurin.spec import AttentionSpec


class LayerMemory:
    """The memory of a layer with this spec; `rollback` is how many of the last tokens it can drop."""

    def __init__(self, spec: AttentionSpec, *, convolution: int = 0, rollback: int = 0) -> None:
        self.spec, self.convolution, self.rollback = spec, convolution, rollback
        self.state: State | None = None
        #: k, v and gates [B, n, …]: of every token where the memory grows, else of the last `rollback`
        self.keys: dict[str, Tensor] = {}
        #: last inputs of the convolution, [B, width − 1 + rollback, channels]
        self.tail: Tensor | None = None

    @property
    def grows(self) -> bool:
        """Whether it takes more memory with every token."""
        return not self.spec.has_finite_state

    @property
    def is_empty(self) -> bool:
        """Whether it holds no token."""
        return self.state is None and not self.keys

    @property
    def parts(self) -> tuple[Any, ...]:
        """State, keys and convolution inputs; any change replaces these objects."""
        return self.state, self.keys, self.tail

    # ------------------------------------------------------------------------------------ reading

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], layout: Layout) -> Tensor:
        """y [B, T, H, e] of T further tokens."""
        of_keys = {"k": k, "v": v} | {a.name: gates[a.name] for a in self.spec.arguments if a.tokens == "key"}
        if self.grows:
            return self._attend_to_keys(q, of_keys, gates, layout)
        y, self.state = attention(
            q,
            k,
            v,
            self.spec,
            state=self.state,
            return_state=True,
            layout="bthd",
            key_padding_mask=layout.key_padding_mask,
            gates=gates,
        )
        if self.rollback:
            self._keep(of_keys, self.rollback)
        return y

    def before(self, u: Tensor) -> Tensor:
        """Input of the convolution: its last inputs followed by u [B, T, C], [B, width − 1 + T, C]."""
        reach = self.convolution - 1
        if self.tail is None:
            self.tail = u.new_zeros(u.shape[0], reach, u.shape[2])
        line = torch.cat([self.tail, u], dim=1)
        self.tail = line[:, max(0, line.shape[1] - reach - self.rollback) :]
        return line[:, line.shape[1] - u.shape[1] - reach :]

    def _attend_to_keys(
        self, q: Tensor, of_keys: dict[str, Tensor], gates: dict[str, Tensor], layout: Layout
    ) -> Tensor:
        """Attend from the new tokens to all keys so far; padding may be anywhere among them."""
        first = not self.keys
        self._keep(of_keys, None)
        every = {**gates, **self.keys}
        k, v = every.pop("k"), every.pop("v")
        mask = layout.key_padding_mask if first else layout.present
        return attention(q, k, v, self.spec, layout="bthd", key_padding_mask=mask, gates=every)

    def _keep(self, new: dict[str, Tensor], most: int | None) -> None:
        if self.keys:
            new = {name: torch.cat([self.keys[name], t], dim=1) for name, t in new.items()}
        self.keys = new if most is None else {name: t[:, -most:] for name, t in new.items()}

    # ------------------------------------------------------------------------------ its own algebra

    def fork(self) -> LayerMemory:
        """A second memory of the same text."""
        return copy.copy(self)

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """The same change to every tensor."""
        self.state = None if self.state is None else self.state.map(change)
        self.keys = {name: change(t) for name, t in self.keys.items()}
        self.tail = None if self.tail is None else change(self.tail)

    def require_rollback(self, tokens: int) -> None:
        """Raise unless the last tokens can be dropped."""
        if self.grows and not self.convolution:
            return
        part = self.spec.irreversible_part
        if part is not None and not self.grows:
            raise InputError(
                f"a state of {self.spec} cannot be rolled back: {part.mark}{part} has thrown away what would "
                "have to come back. Keep a fork() of the cache from before the tokens and return to it."
            )
        if tokens > self.rollback:
            raise InputError(
                f"{tokens} tokens cannot be dropped: this cache keeps what that takes for the last "
                f"{self.rollback}. Make it with rollback={tokens} or more, or keep a fork() from before."
            )

    def drop(self, tokens: int) -> None:
        """Drop the last tokens; check with `require_rollback` first."""
        if self.state is not None:
            lost = {name: t[:, -tokens:] for name, t in self.keys.items()}
            self.state = self.state.rollback(lost.pop("k"), lost.pop("v"), gates=lost)
        self.keys = {name: t[:, :-tokens] for name, t in self.keys.items()}
        if self.tail is not None:
            self.tail = self.tail[:, :-tokens]

    # ------------------------------------------------------------------------------------ its size

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor it holds, by name."""
        named = {} if self.state is None else {f"state.{n}": t for n, t in self.state.tensors().items()}
        named |= {f"keys.{name}": t for name, t in self.keys.items()}
        return named if self.tail is None else {**named, "tail": self.tail}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""

        def under(prefix: str) -> dict[str, Tensor]:
            return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

        self.keys, self.tail = under("keys."), tensors.get("tail")
        exact: dict[str, Any] = under("state.exact.")
        state: dict[str, Any] = {n: t for n, t in under("state.").items() if not n.startswith("exact.")}
        if state:
            self.state = State(self.spec, **state, exact=ExactKeys(**exact) if exact else None)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())
