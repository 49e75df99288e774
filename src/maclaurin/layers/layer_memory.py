"""The memory of one attention layer for a text that is read in pieces.

Heads with a finite state keep that state, whose size does not depend on the length of the text. Other heads
keep the keys and values (and gates) of every token, which grow. The last inputs of a short convolution are
kept too. No tensor is ever changed in place, so a copy of the memory can share all of them. The exception is
a memory with preallocated buffers, which a recorded step fills in place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from maclaurin.errors import InputError
from maclaurin.forms.exact_keys import ExactKeys
from maclaurin.forms.kept import keep_attended_keys
from maclaurin.forms.state import State
from maclaurin.layers.layout import Layout
from maclaurin.programs.by_heads import attend_by_heads, attention_of_groups, groups_together
from maclaurin.programs.dispatch import attention
from maclaurin.spec import AttentionSpec
from maclaurin.spec.head_groups import HeadGroup


class Preallocation:
    """Buffers [B, capacity + 1, …] for keys that grow; all layers of a cache hold the same number of tokens.

    A new token is written to two places: the last, where attention expects a query's own key, and the first
    free one, where later tokens see it.

    length    number of tokens so far, on the host
    filled    [1] the same on the device: the index of the first free place
    present   [B, capacity + 1] which places the next token sees
    """

    def __init__(self, batch: int, capacity: int, device: torch.device) -> None:
        self.capacity, self.length = capacity, 0
        self.filled = torch.zeros(1, dtype=torch.long, device=device)
        self.present = torch.zeros(batch, capacity + 1, dtype=torch.bool, device=device)

    def holds(self, length: int, present: Tensor | None) -> None:
        """Set the number of tokens; `present` [B, length] says which are not padding, by default all."""
        self.length = length
        self.filled.fill_(length)
        self.present.zero_()
        self.present[:, :length] = True if present is None else present
        self.present[:, -1] = True

    def write(self, buffer: Tensor, token: Tensor) -> None:
        """Write a token's tensor [B, 1, …] to both of its places in a buffer."""
        buffer[:, -1:].copy_(token)
        buffer.index_copy_(1, self.filled, token)

    def advance(self) -> None:
        """Make the token in the first free place visible to later ones; changes device tensors only."""
        self.present.index_fill_(1, self.filled, True)
        self.filled.add_(1)


class HeadsMemory:
    """The memory of heads with this spec.

    rollback   how many of the last tokens can be dropped
    prompt     attention for the first piece of a text, instead of the spec; the memory is still the spec's
    """

    def __init__(self, spec: AttentionSpec, rollback: int, prompt: AttentionSpec | None = None) -> None:
        self.spec, self.rollback, self.prompt = spec, rollback, prompt
        self.state: State | None = None
        self.buffers: dict[str, Tensor] = {}
        self.space: Preallocation | None = None
        self.writes_in_place = False

    @property
    def keys(self) -> dict[str, Tensor]:
        """k, v and gates [B, n, …]: of every token where the memory grows, else of the last `rollback`."""
        if self.space is None:
            return self.buffers
        return {name: t[:, : self.space.length] for name, t in self.buffers.items()}

    @keys.setter
    def keys(self, keys: dict[str, Tensor]) -> None:
        self.buffers, self.space, self.writes_in_place = keys, None, False

    @property
    def grows(self) -> bool:
        """Whether it takes more memory with every token."""
        return not self.spec.has_finite_state

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], layout: Layout) -> Tensor:
        """y [B, T, H, e] of T more tokens."""
        of_keys = {"k": k, "v": v} | {a.name: gates[a.name] for a in self.spec.arguments if a.tokens == "key"}
        if self.grows:
            return self._attend_to_keys(q, of_keys, gates, layout)
        read_otherwise = self.prompt is not None and self.state is None
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
            self.keep_last(of_keys)
        if read_otherwise and self.prompt is not None:
            mask = layout.key_padding_mask
            self.state = keep_attended_keys(self.state, q, k, v, mask)
            return attention(q, k, v, self.prompt, layout="bthd", key_padding_mask=mask, gates=gates)
        return y

    def _attend_to_keys(
        self, q: Tensor, of_keys: dict[str, Tensor], gates: dict[str, Tensor], layout: Layout
    ) -> Tensor:
        """Attend from the new tokens to all keys so far; padding may be anywhere among them."""
        if self.space is not None and self.writes_in_place:
            for name, t in of_keys.items():
                self.space.write(self.buffers[name], t)
            mask = self.space.present
        else:
            mask = layout.key_padding_mask if not self.buffers else layout.present
            self._keep(of_keys, None)
        every = {**gates, **self.buffers}
        k, v = every.pop("k"), every.pop("v")
        return attention(q, k, v, self.spec, layout="bthd", key_padding_mask=mask, gates=every)

    def keep_last(self, of_keys: dict[str, Tensor]) -> None:
        """Keep what a rollback of the last tokens needs."""
        self._keep(of_keys, self.rollback)

    def _keep(self, new: dict[str, Tensor], most: int | None) -> None:
        before = self.keys
        if before:
            new = {name: torch.cat([before[name], t], dim=1) for name, t in new.items()}
        elif most is None:
            new = {name: _own(t) for name, t in new.items()}
        self.keys = new if most is None else {name: t[:, -most:] for name, t in new.items()}

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change` to every tensor."""
        self.state = None if self.state is None else self.state.map(change)
        self.keys = {name: change(t) for name, t in self.keys.items()}

    def require_rollback(self, tokens: int) -> None:
        """Raise unless the last tokens can be dropped."""
        if self.grows:
            return
        part = self.spec.irreversible_part
        if part is not None:
            raise InputError(
                f"a state of {self.spec} cannot be rolled back: {part.mark}{part} has discarded what that "
                "needs. Keep a fork() of the cache from before the tokens and return to it."
            )
        require_within(tokens, self.rollback)

    def drop(self, tokens: int) -> None:
        """Drop the last tokens; check with `require_rollback` first."""
        if self.state is not None:
            lost = {name: t[:, -tokens:] for name, t in self.keys.items()}
            self.state = self.state.rollback(lost.pop("k"), lost.pop("v"), gates=lost)
        self.keys = {name: t[:, :-tokens] for name, t in self.keys.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, spare capacity included."""
        state = {} if self.state is None else self.state.tensors()
        return sum(t.numel() * t.element_size() for t in (*state.values(), *self.buffers.values()))

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor it holds, by name."""
        named = {} if self.state is None else {f"state.{n}": t for n, t in self.state.tensors().items()}
        return named | {f"keys.{name}": t for name, t in self.keys.items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        self.keys = _under("keys.", tensors)
        exact: dict[str, Any] = _under("state.exact.", tensors)
        state: dict[str, Any] = {
            n: t for n, t in _under("state.", tensors).items() if not n.startswith("exact.")
        }
        if state:
            self.state = State(self.spec, **state, exact=ExactKeys(**exact) if exact else None)


def read_together(
    memories: Sequence[HeadsMemory], groups: Sequence[HeadGroup], q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """y [B, T, H, e] of a text's first tokens, for groups that can run in one call; fills their memories."""
    heads = [len(group.heads) for group in groups]
    y, states = attention_of_groups(groups, q, k, v, return_states=True)
    of_groups = zip(memories, states, k.split(heads, dim=2), v.split(heads, dim=2), strict=True)
    for memory, state, k_own, v_own in of_groups:
        memory.state = state
        if memory.rollback:
            memory.keep_last({"k": k_own, "v": v_own})
    return y


class LayerMemory:
    """The memory of a layer with these groups of heads."""

    def __init__(
        self,
        groups: Sequence[HeadGroup],
        *,
        convolution: int = 0,
        rollback: int = 0,
        prompt: AttentionSpec | None = None,
    ) -> None:
        self.groups, self.convolution = tuple(groups), convolution
        self.rollback, self.prompt = rollback, prompt
        self.heads = self._nothing_yet()
        #: the last inputs of the convolution, [B, width − 1 + rollback, channels]
        self.tail: Tensor | None = None

    @property
    def grows(self) -> bool:
        """Whether some of it takes more memory with every token."""
        return any(heads.grows for heads in self.heads)

    @property
    def is_empty(self) -> bool:
        """Whether the memory is empty."""
        return all(heads.state is None and not heads.buffers for heads in self.heads)

    @property
    def parts(self) -> tuple[Any, ...]:
        """The objects it holds; every change replaces them."""
        return (self.tail, *(part for heads in self.heads for part in (heads.state, heads.buffers)))

    # ------------------------------------------------------------------------------------ reading

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], layout: Layout) -> Tensor:
        """y [B, T, H, e] of T more tokens."""

        def of_group(number: int, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> Tensor:
            return self.heads[number].attend(q, k, v, gates, layout)

        def of_groups(numbers: Sequence[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return read_together([self.heads[n] for n in numbers], [self.groups[n] for n in numbers], q, k, v)

        begins = self.is_empty and self.prompt is None and layout.key_padding_mask is None
        together = groups_together(self.groups, q, k, v, return_states=True) if begins else ()
        return attend_by_heads(
            self.groups, q, k, v, gates, of_group, together=together, call_together=of_groups
        )

    def before(self, u: Tensor) -> Tensor:
        """The inputs of a convolution [B, width − 1 + T, C]: the last earlier inputs, then u [B, T, C]."""
        reach = self.convolution - 1
        if self.tail is None:
            self.tail = u.new_zeros(u.shape[0], reach, u.shape[2])
        line = torch.cat([self.tail, u], dim=1)
        self.tail = line[:, max(0, line.shape[1] - reach - self.rollback) :]
        return line[:, line.shape[1] - u.shape[1] - reach :]

    # ------------------------------------------------------------------------------ copies and rollback

    def fork(self) -> LayerMemory:
        """A copy of the memory that shares all tensors."""
        other = copy.copy(self)
        other.heads = [copy.copy(heads) for heads in self.heads]
        return other

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change` to every tensor."""
        for heads in self.heads:
            heads.map(change)
        self.tail = None if self.tail is None else change(self.tail)

    def forget(self) -> None:
        """Clear the memory."""
        self.heads, self.tail = self._nothing_yet(), None

    def _nothing_yet(self) -> list[HeadsMemory]:
        return [HeadsMemory(group.spec, self.rollback, self.prompt) for group in self.groups]

    def require_rollback(self, tokens: int) -> None:
        """Raise unless the last tokens can be dropped."""
        for heads in self.heads:
            heads.require_rollback(tokens)
        if self.convolution:
            require_within(tokens, self.rollback)

    def drop(self, tokens: int) -> None:
        """Drop the last tokens; check with `require_rollback` first."""
        for heads in self.heads:
            heads.drop(tokens)
        if self.tail is not None:
            self.tail = self.tail[:, :-tokens]

    # ------------------------------------------------------------------------------------ its size

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor it holds, by name."""
        named = {
            self._prefix(number) + name: t
            for number, heads in enumerate(self.heads)
            for name, t in heads.tensors().items()
        }
        return named if self.tail is None else {**named, "tail": self.tail}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        for number, heads in enumerate(self.heads):
            heads.restore(_under(self._prefix(number), tensors))
        self.tail = tensors.get("tail")

    def _prefix(self, number: int) -> str:
        """The prefix of a group's tensor names; empty if all heads are alike."""
        return "" if len(self.groups) == 1 else f"groups.{number}."

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tail = 0 if self.tail is None else self.tail.numel() * self.tail.element_size()
        return tail + sum(heads.nbytes for heads in self.heads)

    def growing(self) -> set[str]:
        """Names of the tensors that grow with every token."""
        return {
            f"{self._prefix(number)}keys.{name}"
            for number, heads in enumerate(self.heads)
            if heads.grows
            for name in heads.buffers
        }

    def use(self, space: Preallocation, *, writes_in_place: bool) -> None:
        """Treat the tensors that grow as preallocated buffers; a recorded step writes its token into them."""
        for heads in self.heads:
            if heads.grows:
                heads.space, heads.writes_in_place = space, writes_in_place


def require_within(tokens: int, rollback: int) -> None:
    """Raise if more tokens are to be dropped than a cache can roll back."""
    if tokens > rollback:
        raise InputError(
            f"{tokens} tokens cannot be dropped: this cache can roll back the last "
            f"{rollback} only. Make it with rollback={tokens} or more, or keep a fork() from before."
        )


def _own(t: Tensor) -> Tensor:
    """The tensor, copied if it is a view of a larger one."""
    return t.clone() if t.untyped_storage().nbytes() > t.nbytes else t


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
