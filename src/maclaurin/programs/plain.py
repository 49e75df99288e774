"""The plain forms as programs, for every spec, device and dtype.

If a requested form cannot run, the user sees the reason from here.
"""

from __future__ import annotations

from torch import Tensor

from maclaurin.forms.attend import Form, attend
from maclaurin.forms.chunked import SPAN_BUDGET, chunk_size_for
from maclaurin.forms.state import State
from maclaurin.forms.tracing import without_autocast
from maclaurin.programs.program import Call, Cost, Program, dense_flops, working_bytes
from maclaurin.spec import AttentionSpec

#: queries per block of the blocked form
_BLOCK = 256


class PlainForm(Program):
    """One form in plain torch."""

    name = "plain torch"
    backend = "torch"

    def __init__(self, form: Form) -> None:
        self.form = form
        self.name = f"plain {form.value}"

    def cannot(self, call: Call) -> str | None:
        why = _why_not(self.form, call)
        return None if why is None else f"{why}{_instead(call)}"

    def chunk(self, call: Call) -> int | None:
        if call.chunk_size is not None:
            return call.chunk_size
        if not call.spec.has_finite_state or self.form is Form.BLOCKED:
            return _BLOCK
        return chunk_size_for(call.spec, call.inputs.k.shape[3])

    def cost(self, call: Call) -> Cost:
        if self.form is Form.PARALLEL:
            return _parallel_cost(call)
        if self.form is Form.BLOCKED:
            return _blocked_cost(call, self.chunk(call) or _BLOCK)
        if self.form is Form.CHUNKED:
            return _chunked_cost(call, self.chunk(call) or _BLOCK)
        return _recurrent_cost(call)

    def run(self, call: Call) -> tuple[Tensor, State | None]:
        with without_autocast(call.device):  # sums are kept in fp32 or fp64
            return attend(
                call.spec,
                call.inputs,
                self.form,
                scale=call.scale,
                causal=call.causal,
                chunk=self.chunk(call) or _BLOCK,
                state=call.state,
                return_state=call.return_state,
            )


def _why_not(form: Form, call: Call) -> str | None:
    """Why this form cannot compute the call; None if it can."""
    spec = call.spec
    keeps = spec.window is not None and spec.window.kept > 0
    if keeps and form is Form.BLOCKED:
        return (
            f"{spec} keeps keys by the attention of all queries, and the blocked form sees a block of them "
            "at a time"
        )
    if keeps and form is Form.PARALLEL and not call.is_aligned:
        return f"{spec} keeps keys by the attention they received, which needs one query per key"
    if form in (Form.PARALLEL, Form.BLOCKED):
        return f"the {form.value} form carries no state" if call.carries_state else None
    if not spec.has_finite_state:
        return f"{spec} has no finite state, so it has no {form.value} form"
    if not call.causal and form is Form.RECURRENT:
        return "the recurrent form reads from left to right, so it is causal"
    if not call.is_aligned and call.causal:
        return f"the {form.value} form needs one query per key"
    return None


#: torch.compile (2.11) does not iterate over an enumeration
_FORMS = tuple(Form)


def _instead(call: Call) -> str:
    """What the caller of a refused form can do: only forms that can compute the call, if any."""
    forms = [f"'{form.value}'" for form in _FORMS if _why_not(form, call) is None]
    advice = [f"use form={' or '.join(forms)}"] if forms else []
    if call.is_aligned or not call.causal:
        return f": {advice[0]}" if advice else ""
    if call.spec.has_finite_state or call.spec.has_series:
        advice.append("pass a state instead of old keys")
    got = f" (got {call.queries} queries and {call.keys} keys)"
    return f"{got}: {', or '.join(advice)}" if advice else got


# ------------------------------------------------------------------------------------- their costs


def _number_of_weights(call: Call) -> float:
    return float(call.inputs.q.shape[0] * call.inputs.q.shape[2] * call.queries * call.keys)


def _parallel_cost(call: Call) -> Cost:
    weights, width = _number_of_weights(call), working_bytes(call)
    passes = 8 + 2 * _polynomial_passes(call.spec)
    ranking = 0.0
    if call.spec.window and call.spec.window.kept:  # a matrix of comparisons for every key-value head
        ranking = 2.0 * call.inputs.k.shape[0] * call.inputs.k.shape[2] * call.queries * call.keys**2
    return Cost(dense_flops(call) + ranking, weights * width * passes, 20, 3 * weights * width)


def _blocked_cost(call: Call, block: int) -> Cost:
    """Half of the pairs, since later keys are left out, and the weights of one block in memory."""
    weights, width = _number_of_weights(call), working_bytes(call)
    blocks = -(-call.queries // block)
    passes = 8 + 2 * _polynomial_passes(call.spec)
    halved = 0.5 + 0.5 / blocks
    return Cost(
        dense_flops(call) * halved,
        weights * width * passes * halved,
        30 * blocks,
        3 * weights * width / blocks,
    )


def _chunked_cost(call: Call, chunk: int) -> Cost:
    spec = call.spec
    batch, tokens, heads, d = call.inputs.q.shape
    kv_heads, e = call.inputs.k.shape[2], call.inputs.v.shape[3]
    features, columns = spec.features(d), e + int(spec.needs_row_sum)
    chunk = min(chunk, tokens)
    chunks = -(-tokens // chunk)
    rows, keys = float(batch * heads * chunks * chunk), float(batch * kv_heads * chunks * chunk)
    flops = 2 * (rows + keys) * features * columns + 2 * rows * chunk * (d + columns)
    states = float(batch * kv_heads * chunks * features * columns)
    within = rows * chunk
    moved = (rows + keys) * features * 4 + states * 4 + within * (6 + 2 * _polynomial_passes(spec))
    if spec.window:
        beside = chunk + spec.window.size + spec.window.kept
        flops += 2 * rows * beside * (d + e)
        moved += rows * beside * (24 if spec.window.kept else 8)
    least = 1 / chunks  # a span is one chunk at least
    share = max(least, min(1.0, SPAN_BUDGET / (rows * max(features, 1))))  # of tokens in memory at once
    peak = ((rows + keys) * features + 2 * states + 2 * within) * share
    width = working_bytes(call)
    return Cost(flops, moved * width, 40 + 3 * d * spec.highest_order, peak * width)


def _recurrent_cost(call: Call) -> Cost:
    spec = call.spec
    batch, tokens, heads, d = call.inputs.q.shape
    kv_heads, e = call.inputs.k.shape[2], call.inputs.v.shape[3]
    size = float(batch * tokens * spec.features(d) * (e + int(spec.needs_row_sum)))
    width = working_bytes(call)
    launches = tokens * ((40 if spec.window else 12) + 2 * d * max(len(spec.orders) - 2, 0))
    flops, moved = 2 * size * (heads + kv_heads), 4 * size * kv_heads * width
    if spec.window:  # every step reads and writes all exact keys
        beside = float(batch * tokens * (spec.window.size + spec.window.kept))
        flops += 2 * beside * heads * (d + e)
        moved += beside * (heads * (24 if spec.window.kept else 8) + 2 * kv_heads * (d + e)) * width
    return Cost(flops, moved, launches, size / tokens * width)


def _polynomial_passes(spec: AttentionSpec) -> int:
    """How often the weights are read and written to evaluate the kernel's polynomial."""
    passes = spec.highest_order if spec.has_finite_state else 1
    return 3 * passes if spec.kernel.depends_on_row else passes
