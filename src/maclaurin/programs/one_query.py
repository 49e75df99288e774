"""One query over all keys of a text, as in decoding with a key–value cache (triton/one_query.py)."""

from __future__ import annotations

from torch import Tensor

from maclaurin.forms.attend import Form
from maclaurin.forms.state import State
from maclaurin.forms.tracing import are_traced, without_autocast
from maclaurin.programs import triton as gpu
from maclaurin.programs.fused_rows import finish_rows, operands, refuse_kind
from maclaurin.programs.program import Call, Cost, Program, dense_flops, first_reason
from maclaurin.spec import AttentionSpec


class OneQuery(Program):
    """Weights e^x without a clamp, divided by the row sum or under a norm; one query, forward only."""

    name = "one query"
    backend = "triton"
    form = Form.PARALLEL
    skips_absent_keys = True
    has_fixed_work = True

    def cannot(self, call: Call) -> str | None:
        return first_reason(lambda: refuse_spec(call.spec), lambda: _refuse_tensors(call))

    def cost(self, call: Call) -> Cost:
        return Cost(dense_flops(call) / 2, 0.0, 2, 0.0)

    def run(self, call: Call) -> tuple[Tensor, State | None]:
        from maclaurin.programs.triton import one_query as program

        spec, inputs = call.spec, call.inputs
        with without_autocast(call.device):
            q, k, v = operands(spec, inputs)
            present = None if inputs.present is None else gpu.dense(inputs.present)
            y = program.rows(q, k, v, present, call.scale)
            return finish_rows(spec, y, inputs.gates, inputs.q.dtype), None


def refuse_spec(spec: AttentionSpec) -> str | None:
    """Why the program cannot compute this spec; None if it can."""
    weight = spec.kernel.fused
    if weight is None or weight.function != "exp" or weight.clamp is not None:
        return "it supports only weights e^x"
    if spec.window is not None or spec.decay_gates:
        return "it does not support windows or decay gates"
    if not spec.rows_are_means:
        return f"it does not divide by {spec.denominator}"
    return None


def _refuse_tensors(call: Call) -> str | None:
    q, k = call.inputs.q, call.inputs.k
    if q.shape[1] != 1 or k.shape[1] == 0:
        return "it supports only one query"
    if call.carries_state:
        return "it carries no state"
    if call.needs_gradient:
        return "it has no backward pass"
    if are_traced((q,)):
        return "it cannot be traced"
    return refuse_kind(call)
