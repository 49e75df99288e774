"""One query over all keys of a text, as in decoding with a key–value cache (triton/one_query.py)."""

from __future__ import annotations

from torch import Tensor

from maclaurin.forms.attend import Form
from maclaurin.forms.state import State
from maclaurin.forms.tracing import are_traced, without_autocast
from maclaurin.programs import triton as gpu
from maclaurin.programs.operands import DTYPES, finish_rows, operands
from maclaurin.programs.program import Call, Cost, Program, dense_flops
from maclaurin.spec import AttentionSpec

_LARGEST_HEAD = 128


class OneQuery(Program):
    """Weights e^x without a clamp, divided by the row sum or under a norm; one query, forward only."""

    name = "one query"
    backend = "triton"
    form = Form.PARALLEL
    skips_absent_keys = True

    def cannot(self, call: Call) -> str | None:
        return refuse_spec(call.spec) or _refuse_tensors(call)

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
    if not spec.ignores_row_scale:
        return f"it does not divide by {spec.denominator}"
    return None


def _refuse_tensors(call: Call) -> str | None:
    q, k, v = call.inputs.q, call.inputs.k, call.inputs.v
    if q.shape[1] != 1 or k.shape[1] == 0:
        return "it supports only one query"
    if call.carries_state:
        return "it carries no state"
    if call.needs_gradient:
        return "it has no backward pass"
    if are_traced((q,)):
        return "it cannot be traced"
    if not gpu.runs_on(call.device):
        return gpu.why_not_on(call.device)
    if q.dtype not in DTYPES or q.dtype != k.dtype or q.dtype != v.dtype:
        return "it computes in fp32, fp16 or bf16"
    if max(q.shape[3], v.shape[3]) > _LARGEST_HEAD:
        return f"it supports head sizes up to {_LARGEST_HEAD}"
    return None
