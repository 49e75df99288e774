"""A program is one way to compute a call: it says whether it can run it, at what cost, and runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from maclaurin.forms.attend import Form
from maclaurin.forms.packing import Packing
from maclaurin.forms.state import State
from maclaurin.forms.stream import Inputs, working_dtype
from maclaurin.spec import AttentionSpec
from maclaurin.spec.head_groups import HeadGroup


class Call(NamedTuple):
    """One call of `attention` on rows of tokens, with padding only on the right of a row.

    Or on packed sequences in one row, which only programs with `reads_packed` accept.
    """

    spec: AttentionSpec
    inputs: Inputs
    scale: float
    #: where it runs; the tensors of a plan may be on the meta device
    device: torch.device
    causal: bool = True
    state: State | None = None
    return_state: bool = False
    form: Form | None = None  # None: any
    chunk_size: int | None = None  # None: the program's own
    packing: Packing | None = None
    #: groups of heads whose specs differ only in their window. The tensors hold one group after the other,
    #: and `spec` is that of the first. Empty: all heads have `spec`
    groups: tuple[HeadGroup, ...] = ()
    #: the states of the groups, if they continue from some; `state` is that of the first
    group_states: tuple[State, ...] = ()

    @property
    def states(self) -> tuple[State, ...]:
        """The states that it continues from: of each group, or of all heads; empty at the start of a text."""
        return self.group_states or (() if self.state is None else (self.state,))

    @property
    def carries_state(self) -> bool:
        """Whether a state goes in or out."""
        return self.state is not None or self.return_state

    @property
    def queries(self) -> int:
        return self.inputs.q.shape[1]

    @property
    def keys(self) -> int:
        return self.inputs.k.shape[1]

    @property
    def is_aligned(self) -> bool:
        """Whether there are as many queries as keys."""
        return self.queries == self.keys

    @property
    def is_step(self) -> bool:
        """Whether this is one more token after a state."""
        one = self.queries == 1 and self.keys == 1 and self.inputs.present is None
        return self.state is not None and self.causal and one

    @property
    def specs_of_heads(self) -> list[tuple[AttentionSpec, int]]:
        """Every spec, and how many key-value heads have it."""
        if not self.groups:
            return [(self.spec, self.inputs.k.shape[2])]
        return [(group.spec, len(group.heads)) for group in self.groups]

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.inputs.q.shape[2] // self.inputs.k.shape[2]

    @property
    def needs_gradient(self) -> bool:
        """Whether a gradient will flow through it."""
        if not torch.is_grad_enabled():
            return False
        given = (self.inputs.q, self.inputs.k, self.inputs.v, *self.inputs.gates.values())
        return any(u.requires_grad for u in given) or any(state.has_gradient for state in self.states)

    def in_rows(self) -> Call:
        """A call of the same size on rows about as long as the packed sequences, to estimate costs.

        Rows are views of the first token: nothing is copied, and their values are meaningless.
        """
        if self.packing is None:
            return self
        length = self.packing.length(self.keys)
        rows = -(-self.keys // length)
        inputs = self.inputs.map(lambda u: u[:, :1].expand(rows, length, *u.shape[2:]))
        present = self.inputs.q.new_empty((1, 1), dtype=torch.bool).expand(rows, length)
        return self._replace(inputs=inputs._replace(present=present), packing=None)


#: how a program runs calls of one kind
Run = Callable[[Call], tuple[Tensor, State | None]]


@dataclass(frozen=True)
class Rates:
    """What a machine does per second: matrix operations, bytes, launched operations."""

    flops: float
    bytes: float
    launches: float


#: by device and backend. Fused programs on a GPU: measured on an H200, d = 64, bf16, forward, 4,096 to 65,536
#: tokens (benchmarks/results/gpu_bench.json); the other rates are typical values
RATES = {
    "cpu": {"torch": Rates(6e10, 1.2e10, 2e5)},
    "cuda": {
        "torch": Rates(1e14, 3e12, 1.5e5),
        "sdpa": Rates(4.2e14, 3e12, 1.5e5),
        "triton": Rates(4e14, 3e12, 1.5e5),
    },
}
#: bytes besides inputs and output above which a program is chosen only if no other fits
MEMORY_BUDGET = 4 << 30


@dataclass(frozen=True)
class Cost:
    """An estimate for one forward pass, good enough to choose between programs that differ by a factor."""

    flops: float
    bytes: float
    launches: float
    peak_bytes: float

    @property
    def fits(self) -> bool:
        """Whether the memory needed besides inputs and output is within the budget."""
        return self.peak_bytes <= MEMORY_BUDGET

    def seconds(self, device: str, backend: str) -> float:
        """The time it takes at the rates of the device."""
        known = RATES.get(device, RATES["cpu"])
        rates = known.get(backend, known["torch"])
        return self.flops / rates.flops + self.bytes / rates.bytes + self.launches / rates.launches


class Program(ABC):
    """One way to compute a call. Programs have no state: one object of each runs every call.

    A program defines `run`, or `prepared` if it has something to compute once for many calls.
    """

    #: its name in a plan
    name: str
    #: the form it computes
    form: Form
    #: what it is made of: "sdpa" (torch's fused softmax), "triton" (our fused programs) or "torch"
    backend: ClassVar[str]
    #: whether it reads packed sequences in place; for other programs they are copied to rows
    reads_packed: ClassVar[bool] = False
    #: whether one call may be for groups of heads with different windows (`Call.groups`)
    takes_groups: ClassVar[bool] = False
    #: whether calls with the same shapes launch the same kernels and never wait for the GPU, so that a
    #: decoding step can be recorded as a graph
    has_fixed_work: ClassVar[bool] = False
    #: whether it never reads absent keys and values; for other programs they are replaced by zeros
    skips_absent_keys: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.run is Program.run and cls.prepared is Program.prepared:
            raise TypeError(f"the program {cls.__name__} must define `run` or `prepared`.")

    def refuses(self, call: Call) -> str | None:
        """Why it does not compute this call; None if it does."""
        needs_mask = None if call.causal else why_it_must_be_causal(call.spec)
        if needs_mask is not None:
            return needs_mask
        if call.form is not None and call.form is not self.form:
            return f"it computes the {self.form.value} form, but another was requested"
        if call.packing is not None and not self.reads_packed:
            return "it does not read packed sequences"
        if call.groups and not self.takes_groups:
            return "it computes one spec for all heads"
        return self.cannot(call)

    @abstractmethod
    def cannot(self, call: Call) -> str | None:
        """Why it cannot compute this call, whatever form was requested; None if it can."""

    @abstractmethod
    def cost(self, call: Call) -> Cost:
        """The cost of a forward pass."""

    def run(self, call: Call) -> tuple[Tensor, State | None]:
        """The output [B, T, H, e] in the dtype of q, and the state after the last token if requested."""
        return self.prepared(call)(call)

    def run_groups(self, call: Call) -> tuple[Tensor, tuple[State, ...]]:
        """The output for `call.groups`, and the state of each group if requested; if `takes_groups`."""
        raise NotImplementedError(f"{self.name} computes one spec for all heads")

    def prepared(self, call: Call) -> Run:
        """`run` for calls with the plan of this one: same spec, shapes, strides, dtypes, device and flags.

        A program with short calls computes here whatever depends on these alone. The scale, the strides
        of gates and all numbers in tensors may differ from call to call.
        """
        return self.run

    def chunk(self, call: Call) -> int | None:
        """Tokens per chunk or block, if it has chunks or blocks."""
        return None

    def __str__(self) -> str:
        return self.name


def why_it_must_be_causal(spec: AttentionSpec) -> str | None:
    """Why the spec is defined only for causal attention; None if it is not limited to that."""
    part = spec.irreversible_part
    if part is None or not spec.has_order_of_time:
        return None
    return f"{spec} has {part.mark}{part}, which is undefined for causal=False"


def first_reason(*reasons: Callable[[], str | None]) -> str | None:
    """The first that is not None; the functions after it are not called.

    Programs combine their refusals with this and not with `or`: torch.compile (2.11) cannot test a formatted
    text for anything but None.
    """
    for reason in reasons:
        why = reason()
        if why is not None:
            return why
    return None


# ------------------------------------------------------------------------------------- counting


def dense_flops(call: Call) -> float:
    """Scores and their product with the values, for every pair of query and key."""
    batch, queries, heads, d = call.inputs.q.shape
    return 2.0 * batch * heads * queries * call.keys * (d + call.inputs.v.shape[3])


def working_bytes(call: Call) -> int:
    """Bytes per number in the working dtype."""
    return working_dtype(call.inputs.q.dtype).itemsize


def state_bytes(call: Call) -> int | None:
    """Bytes of the state of such a call, for specs that have one."""
    if not call.spec.has_finite_state:
        return None
    k, v = call.inputs.k, call.inputs.v
    sizes = {"own": k.dtype.itemsize, "working": working_bytes(call)}
    return k.shape[0] * sum(
        heads * spec.state_bytes(k.shape[3], v.shape[3], **sizes) for spec, heads in call.specs_of_heads
    )
