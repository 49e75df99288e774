"""The memory of one attention layer for a text that is read in pieces.

Heads with a finite state keep that state, whose size does not depend on the length of the text. Other heads
keep the keys and values (and gates) of every token, which grow. The last inputs of a short convolution are
kept too. No tensor is ever changed in place, so a copy of the memory can share all of them. The exception is
a memory with preallocated buffers, which a recorded step fills in place.

To drop the last m of t tokens, with up to n of them kept (`rollback`):

    moments alone      S_{t−m} = S_t − Σ φ(k_s) [v_s, 1]ᵀ of the m tokens                  keys of n tokens
    decay or window    S_{t−m} = S_{t−n}, continued with n − m of the tokens after it      S_{t−n}, n tokens

Every new token moves S_{t−n} on by one, so that such heads read each token twice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from maclaurin.errors import InputError
from maclaurin.forms.exact_keys import ExactKeys
from maclaurin.forms.kept import keep_attended_keys
from maclaurin.forms.state import State
from maclaurin.forms.stream import Inputs
from maclaurin.layers.layout import Layout
from maclaurin.programs.by_heads import HeadsOfPart, HeadSplit, split_heads
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
    before     the state before the tokens in `keys`, if it cannot be computed backwards; None: no token
    """

    def __init__(self, spec: AttentionSpec, rollback: int) -> None:
        self.spec, self.rollback = spec, rollback
        self.state: State | None = None
        self.before: State | None = None
        self.buffers: dict[str, Tensor] = {}
        self.space: Preallocation | None = None
        self.writes_in_place = False

    @property
    def keys(self) -> dict[str, Tensor]:
        """k, v and gates [B, n, …]: of every token where the memory grows, else of the last `rollback`.

        With q, where these tokens are read again after a rollback.
        """
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

    def attend_to_keys(
        self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], layout: Layout
    ) -> Tensor:
        """y [B, T, H, e] of T more tokens, which attend to all keys so far; padding may be anywhere."""
        of_keys = self._of_keys(k, v, gates)
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

    @property
    def reads_again(self) -> bool:
        """Whether a rollback reads the last tokens again, from the state before them."""
        return self.rollback > 0 and not self.grows and self.spec.irreversible_part is not None

    @property
    def droppable(self) -> int:
        """How many of the last tokens a state can be rolled back now."""
        return next(iter(self.buffers.values())).shape[1] if self.buffers else 0

    def keep_last(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> None:
        """Keep what a rollback of the last tokens needs, after they were read."""
        if not self.reads_again:
            self._keep(self._of_keys(k, v, gates), self.rollback)
            return
        held = self.keys
        new = {"q": q, "k": k, "v": v, **gates}
        if held:
            new = {name: torch.cat([held[name], t], dim=1) for name, t in new.items()}
        older = new["k"].shape[1] - self.rollback
        if older > 0:
            self.before = self._continued(self.before, {name: t[:, :older] for name, t in new.items()})
        self.keys = {name: _own(t[:, -self.rollback :]) for name, t in new.items()}

    def cannot_go_back(self) -> None:
        """Make the present state the earliest that a rollback can return to."""
        self.before, self.keys = self.state if self.reads_again else None, {}

    def _continued(self, state: State | None, tokens: dict[str, Tensor]) -> State:
        """The state after more tokens, given by their q, k, v and gates."""
        gates = dict(tokens)
        q, k, v = (gates.pop(name) for name in "qkv")
        given: dict[str, Any] = {"layout": "bthd", "gates": gates, "return_state": True}
        return attention(q, k, v, self.spec, state=state, **given)[1]

    def _of_keys(self, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> dict[str, Tensor]:
        """All tensors with one entry per key."""
        named = {a.name: gates[a.name] for a in self.spec.arguments if a.tokens == "key"}
        return {"k": k, "v": v, **named}

    def _keep(self, new: dict[str, Tensor], most: int | None) -> None:
        before = self.keys
        if before:
            new = {name: torch.cat([before[name], t], dim=1) for name, t in new.items()}
        if most is not None:
            new = {name: t[:, -most:] for name, t in new.items()}
        self.keys = {name: _own(t) for name, t in new.items()}

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change` to every tensor."""
        self.state = None if self.state is None else self.state.map(change)
        self.before = None if self.before is None else self.before.map(change)
        self.keys = {name: change(t) for name, t in self.keys.items()}

    def require_rollback(self, tokens: int) -> None:
        """Raise unless the last tokens can be dropped."""
        if self.grows:
            return
        part = self.spec.irreversible_part
        if self.rollback == 0 and part is not None:
            raise InputError(
                f"a state of {self.spec} cannot be rolled back: {part.mark}{part} has discarded what that "
                f"needs. Make the cache with rollback={tokens} or more, which keeps it, or keep a fork() "
                "from before the tokens and return to it."
            )
        require_within(tokens, self.droppable, self.rollback)

    def drop(self, tokens: int) -> None:
        """Drop the last tokens; check with `require_rollback` first."""
        left = {name: t[:, :-tokens] for name, t in self.keys.items()}
        if self.reads_again and self.droppable == tokens:
            self.state, left = self.before, {}
        elif self.reads_again:
            self.state = self._continued(self.before, left)
        elif self.state is not None:
            lost = {name: t[:, -tokens:] for name, t in self.keys.items()}
            self.state = self.state.rollback(lost.pop("k"), lost.pop("v"), gates=lost)
        self.keys = {name: _own(t) for name, t in left.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, spare capacity included."""
        states = [t for state in self._states().values() for t in state.tensors().values()]
        return sum(t.nbytes for t in (*states, *self.buffers.values()))

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor it holds, by name."""
        named = {f"{s}.{n}": t for s, state in self._states().items() for n, t in state.tensors().items()}
        return named | {f"keys.{name}": t for name, t in self.keys.items()}

    def _states(self) -> dict[str, State]:
        """The state and, if it is another one, the state before the last tokens."""
        found = {"state": self.state, "before": None if self.before is self.state else self.before}
        return {name: state for name, state in found.items() if state is not None}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        self.keys = _under("keys.", tensors)
        self.state, self.before = (self._state_of(_under(name, tensors)) for name in ("state.", "before."))
        if self.reads_again and "q" not in self.keys:
            self.cannot_go_back()

    def _state_of(self, tensors: dict[str, Any]) -> State | None:
        if not tensors:
            return None
        exact: dict[str, Any] = _under("exact.", tensors)
        others = {n: t for n, t in tensors.items() if not n.startswith("exact.")}
        return State(self.spec, **others, exact=ExactKeys(**exact) if exact else None)


class LayerMemory:
    """The memory of a layer with these groups of heads.

    rollback   how many of the last tokens can be dropped
    prompt     attention for the first piece of a text, instead of each group's; groups decide what is kept
    """

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
        of_heads = ((heads.state, heads.before, heads.buffers) for heads in self.heads)
        return (self.tail, *(part for parts in of_heads for part in parts))

    # ------------------------------------------------------------------------------------ reading

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], layout: Layout) -> Tensor:
        """y [B, T, H, e] of T more tokens: one call for all heads with a state, one per growing group."""
        split = _by_memory(self.groups, q.shape[2] // k.shape[2])
        if len(self.groups) == 1:
            return self._attend_part(split.parts[0], q, k, v, gates, layout)
        return split.joined(
            [
                self._attend_part(
                    part, part.queries.of(q), part.keys.of(k), part.keys.of(v), part.gates(gates), layout
                )
                for part in split.parts
            ]
        )

    def _attend_part(
        self, part: HeadsOfPart, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], layout: Layout
    ) -> Tensor:
        memory = self.heads[part.numbers[0]]
        if memory.grows:
            return memory.attend_to_keys(q, k, v, gates, layout)
        return self._attend_with_states(part, q, k, v, gates, layout)

    def _attend_with_states(
        self, part: HeadsOfPart, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], layout: Layout
    ) -> Tensor:
        """y [B, T, H, e] of heads that have states, which become those after the tokens."""
        memories = [self.heads[number] for number in part.numbers]
        tokens = Inputs(q, k, v, gates, layout.key_padding_mask)
        if self.prompt is not None and memories[0].state is None:
            return self._read_prompt(part, tokens, self.prompt)
        if not self.rollback:
            return self._read(part, tokens)
        first = q.shape[1] - min(self.rollback, layout.unpadded)  # tokens that can never be dropped
        if first <= 0 or not any(memory.reads_again for memory in memories):
            return self._read_and_keep(part, tokens)
        y = self._read(part, tokens.between(0, first))
        for memory in memories:
            memory.cannot_go_back()
        if first == q.shape[1]:
            return y
        rest = tokens.between(first, q.shape[1])._replace(present=None)
        return torch.cat([y, self._read_and_keep(part, rest)], dim=1)

    def _read(self, part: HeadsOfPart, tokens: Inputs) -> Tensor:
        """y of more tokens; states become those after them."""
        q, k, v, gates, mask = tokens
        memories = [self.heads[number] for number in part.numbers]
        read: dict[str, Any] = {"layout": "bthd", "key_padding_mask": mask, "gates": gates}
        if len(memories) == 1:
            before = memories[0].state
            y, state = attention(q, k, v, memories[0].spec, state=before, return_state=True, **read)
            states: Sequence[State] = (state,)
        else:
            earlier = [memory.state for memory in memories if memory.state is not None] or None
            y, states = attention(q, k, v, part.layer, state=earlier, return_state=True, **read)
        for memory, state in zip(memories, states, strict=True):
            memory.state = state
        return y

    def _read_and_keep(self, part: HeadsOfPart, tokens: Inputs) -> Tensor:
        """y of more tokens, which a rollback may drop."""
        y = self._read(part, tokens)
        for number, heads in zip(part.numbers, part.each_group(), strict=True):
            q, k, v = heads.queries.of(tokens.q), heads.keys.of(tokens.k), heads.keys.of(tokens.v)
            self.heads[number].keep_last(q, k, v, heads.gates(tokens.gates))
        return y

    def _read_prompt(self, part: HeadsOfPart, tokens: Inputs, spec: AttentionSpec) -> Tensor:
        """y of a text's first piece with the attention of prompts; memories keep the keys it attended to.

        Where its last queries choose what is kept, a rollback cannot drop a part of it.
        """
        self._read(part, tokens)
        for number, heads in zip(part.numbers, part.each_group(), strict=True):
            memory, gates = self.heads[number], heads.gates(tokens.gates)
            own = heads.queries.of(tokens.q), heads.keys.of(tokens.k), heads.keys.of(tokens.v)
            assert memory.state is not None
            memory.state = keep_attended_keys(memory.state, *own, tokens.present)
            if memory.reads_again:
                memory.cannot_go_back()
            elif self.rollback:
                memory.keep_last(*own, gates)
        q, k, v, gates, mask = tokens
        return attention(q, k, v, spec, layout="bthd", key_padding_mask=mask, gates=gates)

    def before(self, u: Tensor) -> Tensor:
        """The inputs of a convolution [B, width − 1 + T, C]: the last earlier inputs, then u [B, T, C]."""
        reach = self.convolution - 1
        if self.tail is None:
            self.tail = u.new_zeros(u.shape[0], reach, u.shape[2])
        line = torch.cat([self.tail, u], dim=1)
        self.tail = _own(line[:, max(0, line.shape[1] - reach - self.rollback) :])
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
        return [HeadsMemory(group.spec, self.rollback) for group in self.groups]

    def require_rollback(self, tokens: int) -> None:
        """Raise unless the last tokens can be dropped."""
        for heads in self.heads:
            heads.require_rollback(tokens)
        if self.tail is not None:
            require_within(tokens, self.tail.shape[1] - (self.convolution - 1), self.rollback)

    def drop(self, tokens: int) -> None:
        """Drop the last tokens; check with `require_rollback` first."""
        for heads in self.heads:
            heads.drop(tokens)
        if self.tail is not None:
            self.tail = _own(self.tail[:, :-tokens])

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


@lru_cache(maxsize=1024)
def _by_memory(groups: tuple[HeadGroup, ...], group_size: int) -> HeadSplit:
    """Heads with a state in one part, and each group that keeps all keys in its own."""
    with_state = tuple(n for n, group in enumerate(groups) if group.spec.has_finite_state)
    growing = [(n,) for n, group in enumerate(groups) if not group.spec.has_finite_state]
    return split_heads(groups, (with_state, *growing) if with_state else tuple(growing), group_size)


def require_within(tokens: int, droppable: int, rollback: int) -> None:
    """Raise if more tokens are to be dropped than a cache made with rollback=… can drop now."""
    if tokens > droppable:
        raise InputError(
            f"{tokens} tokens cannot be dropped: this cache can roll back the last {droppable} only. Make it "
            f"with rollback={rollback + tokens - droppable} or more, or keep a fork() from before."
        )


def _own(t: Tensor) -> Tensor:
    """The tensor, copied if it is a view of a larger one."""
    return t.clone() if t.untyped_storage().nbytes() > t.nbytes else t


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
