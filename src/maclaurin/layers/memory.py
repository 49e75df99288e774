"""What one attention layer remembers of a text it reads in pieces.

With a finite state that is the state, of the same size however long the text. Without one it is the keys
and values (and gates) of every token, which grow. Beside them stands the tail that a short convolution
looks back on. No tensor is ever changed in place, so a copy of the memory may share them all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from maclaurin.backends.dispatch import attention
from maclaurin.backends.step import is_step, step
from maclaurin.errors import InputError
from maclaurin.forms.attend import Form, attend
from maclaurin.forms.divisors import counts_keys
from maclaurin.forms.inputs import Inputs
from maclaurin.forms.state import State
from maclaurin.forms.window import ExactKeys
from maclaurin.layers.layout import Layout
from maclaurin.spec import AttentionSpec

#: the arguments of `attention` that belong to a query; all others belong to a key
_OF_QUERIES = ("q", "output_gate")


class LayerMemory:
    """The memory of a layer with this spec; `rollback` is how many of the last tokens it can forget again."""

    def __init__(self, spec: AttentionSpec, *, convolution: int = 0, rollback: int = 0) -> None:
        self.spec, self.convolution, self.rollback = spec, convolution, rollback
        self.state: State | None = None
        #: k, v and gates [B, n, …]: of every token where the memory grows, else of the last `rollback`
        self.keys: dict[str, Tensor] = {}
        #: what the convolution has read last, [B, width − 1 + rollback, channels]
        self.tail: Tensor | None = None

    @property
    def grows(self) -> bool:
        """Whether it takes more room with every token."""
        return not self.spec.has_finite_state

    @property
    def is_empty(self) -> bool:
        """Whether no token has come yet."""
        return self.state is None and not self.keys

    @property
    def parts(self) -> tuple[Any, ...]:
        """What it holds; any change puts other objects there."""
        return self.state, self.keys, self.tail

    # ------------------------------------------------------------------------------------ reading

    def attend(self, tensors: dict[str, Any], layout: Layout) -> Tensor:
        """y [B, T, H, e] of T further tokens, given as the arguments of `attention`."""
        if self.grows:
            return self._attend_to_keys(tensors, layout)
        mask = layout.key_padding_mask
        if self.state is not None and is_step(self.spec, tensors["q"], self.state, mask):
            y, self.state = step(self.spec, Inputs(**tensors), self.state)
        else:
            answer = attention(
                **tensors, spec=self.spec, state=self.state, return_state=True, key_padding_mask=mask
            )
            y, self.state = cast("tuple[Tensor, State]", answer)
        if self.rollback:
            self._keep(tensors, self.rollback)
        return y

    def before(self, u: Tensor) -> Tensor:
        """What a convolution sees of the text so far and of u [B, T, C]: [B, width − 1 + T, C]."""
        reach = self.convolution - 1
        if self.tail is None:
            self.tail = u.new_zeros(u.shape[0], reach, u.shape[2])
        line = torch.cat([self.tail, u], dim=1)
        self.tail = line[:, max(0, line.shape[1] - reach - self.rollback) :]
        return line[:, line.shape[1] - u.shape[1] - reach :]

    def _attend_to_keys(self, tensors: dict[str, Any], layout: Layout) -> Tensor:
        first = not self.keys
        self._keep(tensors, None)
        if first:
            return cast(
                "Tensor", attention(**tensors, spec=self.spec, key_padding_mask=layout.key_padding_mask)
            )
        every = {**tensors, **self.keys}
        if layout.present is None:
            return cast("Tensor", attention(**every, spec=self.spec))
        return self._attend_around_padding(Inputs(**every, present=layout.present))

    def _attend_around_padding(self, inputs: Inputs) -> Tensor:
        """The last tokens as queries of keys among which padding stands anywhere.

        Only the number of keys a query sees cannot be told from the places of tokens, so where it is
        divided by, queries come one at a time.
        """
        scale = self.spec.kernel.default_scale(inputs.q.shape[3])
        tokens, keys = inputs.q.shape[1], inputs.k.shape[1]
        step = 1 if counts_keys(self.spec) else tokens
        parts = []
        for start in range(0, tokens, step):
            stop = keys - tokens + start + step
            part = _until(inputs, stop, slice(start, start + step))
            with torch.autocast(inputs.q.device.type, enabled=False):
                y, _ = attend(
                    self.spec, part, Form.PARALLEL, scale=scale, causal=step > 1, chunk=1, state=None,
                    return_state=False,
                )  # fmt: skip
            parts.append(y)
        return torch.cat(parts, dim=1)

    def _keep(self, tensors: dict[str, Any], most: int | None) -> None:
        new = {name: t for name, t in tensors.items() if name not in _OF_QUERIES}
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
        if self.spec.forget_gate and not self.grows:
            raise InputError(_cannot_return(self.spec, "forget gate"))
        if self.spec.window and not self.grows:
            raise InputError(_cannot_return(self.spec, "window"))
        if tokens > self.rollback:
            raise InputError(
                f"{tokens} tokens cannot be dropped: this cache keeps what that takes for the last "
                f"{self.rollback}. Make it with rollback={tokens} or more, or keep a fork() from before."
            )

    def drop(self, tokens: int) -> None:
        """Forget the last tokens again; `require_rollback` says whether it can."""
        if self.state is not None:
            lost: dict[str, Any] = {name: t[:, -tokens:] for name, t in self.keys.items()}
            gates = {name: lost[name] for name in ("input_gate", "denominator_gate") if name in lost}
            self.state = self.state.rollback(lost["k"], lost["v"], **gates)
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


def _cannot_return(spec: AttentionSpec, part: str) -> str:
    return (
        f"a state of {spec} cannot be rolled back: its {part} has thrown away what would have to come back. "
        "Keep a fork() of the cache from before the tokens and return to it."
    )


def _until(inputs: Inputs, stop: int, queries: slice) -> Inputs:
    """Some of the queries, with the keys before `stop`."""
    assert inputs.present is not None
    of_queries = {name: getattr(inputs, name) for name in _OF_QUERIES}
    of_keys = {
        name: getattr(inputs, name) for name in ("k", "v", "input_gate", "log_forget", "denominator_gate")
    }
    taken: dict[str, Any] = {name: None if t is None else t[:, queries] for name, t in of_queries.items()}
    taken |= {name: None if t is None else t[:, :stop] for name, t in of_keys.items()}
    return Inputs(**taken, present=inputs.present[:, :stop])
