"""Which form and which program a call takes, why, and what the others would cost.

A small cost model: floating-point operations, bytes moved and operations launched, over the rates at which
each kind of program does them on a few CPU cores and on a data-centre GPU. It decides between forms whose
costs differ by factors, so the rates need not be right to better than that.
"""

from __future__ import annotations

from dataclasses import dataclass

from maclaurin.backends.changed_score import changed_score_serves
from maclaurin.backends.flash import flash_serves
from maclaurin.backends.linear_time import chunk_for as linear_chunk
from maclaurin.backends.linear_time import linear_serves
from maclaurin.backends.polynomial import fused_serves
from maclaurin.backends.window_tail import window_tail_serves
from maclaurin.forms.attend import Form
from maclaurin.forms.chunked import SPAN_BUDGET, chunk_size_for
from maclaurin.forms.inputs import Inputs, working_dtype
from maclaurin.spec import AttentionSpec


@dataclass(frozen=True)
class Rates:
    """What a machine does per second: matrix operations, bytes, launched operations."""

    flops: float
    bytes: float
    launches: float


#: by device and program. Fused programs on a GPU: measured on an H200, d = 64, bf16, forward, 4,096 to 65,536
#: tokens (benchmarks/results/gpu_bench.json); the others are typical
RATES = {
    "cpu": {"torch": Rates(6e10, 1.2e10, 2e5)},
    "cuda": {
        "torch": Rates(1e14, 3e12, 1.5e5),
        "sdpa": Rates(4.2e14, 3e12, 1.5e5),
        "triton": Rates(4e14, 3e12, 1.5e5),
    },
}
#: above this, the weights of the parallel form are not written down
WEIGHTS_BUDGET = 4 << 30


@dataclass(frozen=True)
class Cost:
    """An estimate for one forward pass."""

    flops: float
    bytes: float
    launches: float
    peak_bytes: float
    backend: str = "torch"

    @property
    def fits(self) -> bool:
        """Whether what is written down beside inputs and output stays within the budget."""
        return self.peak_bytes <= WEIGHTS_BUDGET

    def seconds(self, device: str) -> float:
        known = RATES.get(device, RATES["cpu"])
        rates = known.get(self.backend, known["torch"])
        return self.flops / rates.flops + self.bytes / rates.bytes + self.launches / rates.launches


@dataclass(frozen=True)
class Plan:
    """What `attention` will do for a call like this one."""

    spec: AttentionSpec
    form: Form
    chunk_size: int
    costs: dict[Form, Cost]
    device: str
    state_bytes: int | None
    asked: bool
    carries_state: bool

    @property
    def backend(self) -> str:
        """The kind of program: "sdpa" (torch's fused softmax), "triton" (fused programs of ours), "torch"."""
        return self.costs[self.form].backend

    @property
    def reason(self) -> str:
        """Why this form."""
        if self.asked:
            return "as asked"
        if len(self.costs) == 1:
            return "the only form it has here"
        if Form.PARALLEL in self.costs and not self.costs[Form.PARALLEL].fits and self.costs[self.form].fits:
            return "since the weights of the parallel form would not fit in memory"
        others = [c.seconds(self.device) for f, c in self.costs.items() if f is not self.form]
        ratio = min(others) / max(self.costs[self.form].seconds(self.device), 1e-12)
        among = "of the forms that carry a state" if self.carries_state else "of its forms"
        return f"the cheapest {among} by a factor of {ratio:.2g}"

    def __str__(self) -> str:
        lines = [f"{self.spec}: {self.form.value} form on {self.backend}, {self.reason}"]
        for form, cost in sorted(self.costs.items(), key=lambda item: item[1].seconds(self.device)):
            mark = "→" if form is self.form else " "
            lines.append(
                f" {mark} {form.value:9} ≈ {cost.seconds(self.device) * 1e3:9.3g} ms on {cost.backend:6} "
                f"{cost.flops / 1e9:.3g} GFLOP, {cost.peak_bytes / 2**20:.3g} MiB beside inputs and output"
            )
        if self.state_bytes is not None:
            lines.append(f"   state: {self.state_bytes:,} bytes, however long the text")
        return "\n".join(lines)


def make_plan(
    spec: AttentionSpec,
    inputs: Inputs,
    *,
    form: Form | None,
    causal: bool,
    chunk_size: int | None,
    carries_state: bool,
    fused_state: bool = False,
) -> Plan:
    """The plan for these shapes; `form` None: the cheapest; fused_state: a state that fused programs know."""
    d = inputs.k.shape[3]
    chunk = chunk_size or (chunk_size_for(spec, d) if spec.has_finite_state else 256)
    state_bytes = _state_bytes(spec, inputs)
    fused = _linear_is_fused(spec, inputs, causal, carries_state, fused_state)
    costs = _costs(
        spec,
        inputs,
        chunk,
        linear_chunk(spec, chunk_size, inputs.q.shape[1]) if fused else None,
        carries_state,
        causal,
    )
    device = inputs.q.device.type
    if form is None:
        chosen = _cheapest(costs, device)
    elif form is Form.CHUNKED and not spec.has_finite_state:
        chosen = Form.BLOCKED
    else:
        chosen = form
    if chosen not in costs:
        costs[chosen] = _blocked_cost(spec, inputs, chunk)
    if chosen is Form.CHUNKED and costs[chosen].backend == "triton":
        chunk = linear_chunk(spec, chunk_size, inputs.q.shape[1])
    return Plan(spec, chosen, chunk, costs, device, state_bytes, form is not None, carries_state)


def _parallel_backend(spec: AttentionSpec, inputs: Inputs, causal: bool) -> str:
    if flash_serves(spec, inputs, causal):
        return "sdpa"
    fused = fused_serves(spec, inputs, causal) or changed_score_serves(spec, inputs, causal)
    return "triton" if fused else "torch"


def _linear_is_fused(
    spec: AttentionSpec, inputs: Inputs, causal: bool, carries_state: bool, fused_state: bool
) -> bool:
    if carries_state and not fused_state:
        return False
    return linear_serves(spec, inputs, causal) or window_tail_serves(spec, inputs, causal)


def _state_bytes(spec: AttentionSpec, inputs: Inputs) -> int | None:
    if not spec.has_finite_state:
        return None
    numbers = spec.state_size(inputs.k.shape[3], inputs.v.shape[3])
    return inputs.k.shape[0] * inputs.k.shape[2] * numbers * working_dtype(inputs.q.dtype).itemsize


def _cheapest(costs: dict[Form, Cost], device: str) -> Form:
    """The fastest form that fits, or the fastest if none does (a plain loop: it is traced)."""
    best: tuple[bool, float] | None = None
    chosen = Form.PARALLEL
    for form, cost in costs.items():
        rank = (not cost.fits, cost.seconds(device))
        if best is None or rank < best:
            best, chosen = rank, form
    return chosen


def _costs(
    spec: AttentionSpec, inputs: Inputs, chunk: int, fused: int | None, carries_state: bool, causal: bool
) -> dict[Form, Cost]:
    """The forms this call could take; `fused` is the chunk where fused programs serve the chunked form.

    The parallel form carries no state.
    """
    costs: dict[Form, Cost] = {}
    if not carries_state:
        costs[Form.PARALLEL] = _parallel_cost(spec, inputs, causal)
        costs[Form.BLOCKED] = _blocked_cost(spec, inputs, chunk)
    same_length = inputs.q.shape[1] == inputs.k.shape[1]
    if spec.has_finite_state and (same_length or not causal):
        if fused is not None:
            costs[Form.CHUNKED] = _fused_chunked_cost(spec, inputs, fused)
        else:
            costs[Form.CHUNKED] = _chunked_cost(spec, inputs, chunk)
        if causal:
            costs[Form.RECURRENT] = _recurrent_cost(spec, inputs)
    return costs


def _parallel_cost(spec: AttentionSpec, inputs: Inputs, causal: bool) -> Cost:
    backend = _parallel_backend(spec, inputs, causal)
    if backend != "torch":
        return Cost(_dense_flops(inputs) / 2, 0.0, 5, 0.0, backend)
    weights = float(inputs.q.shape[0] * inputs.q.shape[2] * inputs.q.shape[1] * inputs.k.shape[1])
    width = working_dtype(inputs.q.dtype).itemsize
    passes = 8 + 2 * _polynomial_passes(spec)
    return Cost(_dense_flops(inputs), weights * width * passes, 20, 3 * weights * width)


def _dense_flops(inputs: Inputs) -> float:
    """Scores and their product with the values, for every pair."""
    batch, queries, heads, d = inputs.q.shape
    return 2.0 * batch * heads * queries * inputs.k.shape[1] * (d + inputs.v.shape[3])


def _blocked_cost(spec: AttentionSpec, inputs: Inputs, chunk: int) -> Cost:
    """Half of the pairs, since later keys are left out, and the weights of one block in memory."""
    weights = float(inputs.q.shape[0] * inputs.q.shape[2] * inputs.q.shape[1] * inputs.k.shape[1])
    width = working_dtype(inputs.q.dtype).itemsize
    blocks = -(-inputs.q.shape[1] // chunk)
    passes = 8 + 2 * _polynomial_passes(spec)
    halved = 0.5 + 0.5 / blocks
    return Cost(
        _dense_flops(inputs) * halved,
        weights * width * passes * halved,
        30 * blocks,
        3 * weights * width / blocks,
    )


def _chunked_cost(spec: AttentionSpec, inputs: Inputs, chunk: int) -> Cost:
    batch, tokens, heads, d = inputs.q.shape
    kv_heads, e = inputs.k.shape[2], inputs.v.shape[3]
    features, columns = spec.features(d), e + int(spec.needs_row_sum)
    chunk = min(chunk, tokens)
    chunks = -(-tokens // chunk)
    width = working_dtype(inputs.q.dtype).itemsize
    rows, keys = float(batch * heads * chunks * chunk), float(batch * kv_heads * chunks * chunk)
    flops = 2 * (rows + keys) * features * columns + 2 * rows * chunk * (d + columns)
    states = float(batch * kv_heads * chunks * features * columns)
    within = rows * chunk
    moved = (rows + keys) * features * 4 + states * 4 + within * (6 + 2 * _polynomial_passes(spec))
    if spec.window:
        flops += 2 * rows * (chunk + spec.window.size) * (d + e)
        moved += rows * (chunk + spec.window.size) * 8
    least = 1 / chunks  # a span is one chunk at least
    share = max(least, min(1.0, SPAN_BUDGET / (rows * max(features, 1))))  # of the tokens in memory at once
    peak = ((rows + keys) * features + 2 * states + 2 * within) * share
    return Cost(flops, moved * width, 40 + 3 * d * max(spec.orders or (0,)), peak * width)


def _fused_chunked_cost(spec: AttentionSpec, inputs: Inputs, chunk: int) -> Cost:
    """Moments made and read, half of the pairs within a chunk, and the moments of every chunk in memory."""
    batch, tokens, heads, d = inputs.q.shape
    kv_heads, e, order = inputs.k.shape[2], inputs.v.shape[3], max(spec.orders or (0,))
    chunk = min(chunk, tokens)
    features = d ** min(order, 2) * ((d + 1) / 2 if order > 2 else 1)
    rows, keys = float(batch * heads * tokens), float(batch * kv_heads * tokens)
    beside = chunk if spec.window is None else chunk + 2 * spec.window.size
    flops = 2 * (rows + keys) * features * e + rows * beside * (d + e)
    states = float(batch * kv_heads) * (tokens // chunk) * features * e * inputs.q.element_size()
    return Cost(flops, 2 * states, 8, states, "triton")


def _recurrent_cost(spec: AttentionSpec, inputs: Inputs) -> Cost:
    batch, tokens, heads, d = inputs.q.shape
    kv_heads, e = inputs.k.shape[2], inputs.v.shape[3]
    size = float(batch * tokens * spec.features(d) * (e + int(spec.needs_row_sum)))
    width = working_dtype(inputs.q.dtype).itemsize
    launches = tokens * ((40 if spec.window else 12) + 2 * d * max(len(spec.orders or ()) - 2, 0))
    return Cost(2 * size * (heads + kv_heads), 4 * size * kv_heads * width, launches, size / tokens * width)


def _polynomial_passes(spec: AttentionSpec) -> int:
    orders = spec.orders or (1,)
    passes = max(orders, default=0)
    return 3 * passes if spec.kernel.depends_on_row else passes
