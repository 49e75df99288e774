"""The exp family through torch's fused softmax attention.

L2, RMS and LayerNorm ignore a positive factor per row, and so does the row sum:

    N(Σ e^x v) = N(softmax(x) V)

so one call to a fused softmax computes exp under a row sum and under any norm per head. Every other
denominator D is a gain per row on the same call:

    Σ_s e^x v_s / D = e^g softmax(x)V,      g = lse − ln D,    lse = ln Σ_s e^x

Backward, with do = e^g dy and a = ∂g/∂lse: the scores get dx = P∘(do Vᵀ − δ) with
δ = Σ do∘o − a Σ do∘o = Σ do∘(1−a)o, so torch's backward gives the exact gradients when it gets
do for the gradient and (1−a)o for the output it saved. Where D does not depend on the row's weights (1, t,
a learned sum, a detached row sum) a = 1, and that output is zero. Where D is also constant and there is no
gate, dx = e^{x − ln D}∘(dy Vᵀ): torch's backward gets dy itself, and ln D for the log-sum-exp it saved, and
no rows are kept. Under a gate p, whose gradient is Σ dy∘y/p, only the output y is kept; a gate of zero counts
as 1e-30.

Under a norm, y = N(o) = o·length/‖o‖: the output and one number per row determine o, so only these are
kept. A mean that the norm subtracts is lost, but δ = Σ do∘o does not depend on it, as the mean of do is zero.

torch's backward takes memory for do, o and its own sums besides the gradients. If rows are large, it runs on
one part of the batch after the other, and the gradients of the parts are joined at the end (`_Backward`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, scaled_dot_product_attention

from maclaurin.forms.attend import Form
from maclaurin.forms.output import SeenByRows, running_log_sum
from maclaurin.forms.stream import Inputs, Rows, causal_mask, gated_values, working_dtype
from maclaurin.forms.tracing import are_traced, is_tracing
from maclaurin.programs.custom_operator import apply_of
from maclaurin.programs.fused_rows import (
    finish_rows,
    fused_length,
    normed_rows,
    normed_rows_backward,
    per_head,
    scaled_rows,
    scaled_rows_backward,
)
from maclaurin.programs.program import Call, Cost, Program, Run, dense_flops
from maclaurin.spec import AttentionSpec


class StockSoftmax(Program):
    """exp without a clamp, under any denominator and norm."""

    name = "stock softmax"
    backend = "sdpa"
    form = Form.PARALLEL
    has_fixed_work = True

    def cannot(self, call: Call) -> str | None:
        spec = call.spec
        weight = spec.kernel.fused
        if weight is None or weight.function != "exp" or weight.clamp is not None:
            return "it supports only weights e^x"
        if spec.decay_gates:
            return "it does not support decay gates"
        if call.carries_state:
            return "it carries no state"
        return None if spec.rows_are_means else _why_no_gain(call)

    def cost(self, call: Call) -> Cost:
        return Cost(dense_flops(call) / 2, 0.0, 5, 0.0)

    def prepared(self, call: Call) -> Run:
        if not call.spec.rows_are_means:
            return _Gained.of(call).run
        normed = _Normed.of(call)
        return _run_softmax if normed is None else normed.run


def _operands(call: Call) -> tuple[Inputs, float]:
    """The inputs with their value gates applied, and a positive scale.

    torch multiplies scores by the scale after it has masked them with −∞: a scale of 0 or less gives NaN.
    """
    spec, inputs, scale = call.spec, call.inputs, call.scale
    if spec.value_gates:
        inputs = inputs._replace(v=gated_values(spec, inputs.v, inputs.gates))
    if scale > 0:
        return inputs, scale
    q, scale = (-inputs.q, -scale) if scale < 0 else (inputs.q * scale, 1.0)
    return inputs._replace(q=q), scale


# ------------------------------------------------------------------------------- softmax itself


def _run_softmax(call: Call) -> tuple[Tensor, None]:
    """Softmax, then gates and norm on its rows."""
    inputs, scale = _operands(call)
    y = _softmax(inputs, scale, call.causal)
    return finish_rows(call.spec, y, inputs.gates, inputs.q.dtype), None


def _softmax(inputs: Inputs, scale: float, causal: bool) -> Tensor:
    q, k, v = inputs.q, inputs.k, inputs.v
    mask, is_causal = _mask(inputs, causal)
    if mask is None and _recomputes_on_cpu(q, k, v):
        group = q.shape[2] // k.shape[2]
        if group > 1:
            k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        return cast("Tensor", _CpuSoftmax.apply(q, k, v, scale, is_causal))
    grouped = True if q.shape[2] != k.shape[2] else False  # noqa: SIM210 (a plain bool for symbolic sizes)
    return scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=grouped,
    ).transpose(1, 2)


def _recomputes_on_cpu(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether torch would run its fused attention for CPUs, whose backward pass needs a guard."""
    if q.device.type != "cpu" or not torch.is_grad_enabled() or is_tracing():
        return False
    wanted = q.requires_grad or k.requires_grad or v.requires_grad
    alike = q.shape[3] == v.shape[3] and q.stride(3) == k.stride(3) == v.stride(3) == 1
    return wanted and alike


class _CpuSoftmax(torch.autograd.Function):
    """torch's fused softmax attention for CPUs with a guarded backward pass (`_Cpu`)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        o, lse = _Cpu().forward(q, k, v, scale, causal)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.scale, ctx.causal = scale, causal
        return o.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, o, lse = ctx.saved_tensors
        found = _Cpu().backward(dy.transpose(1, 2), q, k, v, o, lse, ctx.scale, ctx.causal)
        return *(u.transpose(1, 2) for u in found), None, None


def _mask(inputs: Inputs, causal: bool) -> tuple[Tensor | None, bool]:
    """The mask SDPA needs besides its own causal flag, which aligns the first query to the first key.

    Padding on the right needs none when causal: no real query sees a later key.
    """
    queries, keys = inputs.q.shape[1], inputs.k.shape[1]
    if causal and queries == keys:
        return None, True
    mask = causal_mask(queries, keys, inputs.q.device) if causal and queries > 1 else None
    if inputs.present is None:
        return mask, False
    seen = inputs.present[:, None, None, :].expand(-1, 1, queries, -1)
    seen = seen if mask is None else seen & mask
    # unmask fully masked rows to avoid NaN; their values are zero
    return seen | ~seen.any(-1, keepdim=True), False


# --------------------------------------------------------------------------- softmax with a gain


def _why_no_gain(call: Call) -> str | None:
    """Why a per-row gain cannot be used; None if it can."""
    spec, inputs = call.spec, call.inputs
    if spec.norm is not None and not spec.norm.per_head:
        return "a norm over several heads needs gains that may overflow"
    if not (call.is_aligned if call.causal else inputs.present is None):
        return "with a gain per row it needs one query per key, and no padding unless causal"
    if torch_softmax(inputs.q.transpose(1, 2), inputs.k, inputs.v, call.device) is None:
        return "torch has no fused attention that also gives the log-sum-exp for such tensors"
    denominator = spec.denominator
    if denominator is not None and denominator.uses_row_sum and not denominator.has_log_slope:
        return f"{denominator} does not define log_slope, its change with the row sum"
    if denominator is not None and denominator.uses_row_sum and denominator.arguments:
        return f"{denominator} depends on the row sum and on an argument"
    return None


class _Gained(NamedTuple):
    """What a softmax with a gain per row needs from its spec and shapes."""

    stock: TorchSoftmax
    spec: AttentionSpec
    #: the argument of a gate [B, T, H], if only that gate follows on the rows: the gain is multiplied by it
    gate: str | None
    uses_row_sum: bool
    #: ln D, if it depends on nothing but the number of keys
    constant: Callable[[], Tensor] | None
    #: query heads per key-value head
    group: int
    #: the head size that the fused program takes, and whether q, k or v must be padded to it
    size: int
    is_padded: bool
    needs_gradient: bool

    @staticmethod
    def of(call: Call) -> _Gained:
        spec, q, k, v = call.spec, *call.inputs[:3]
        stock = torch_softmax(q.transpose(1, 2), k, v, call.device)
        assert stock is not None
        size = max(q.shape[-1], v.shape[-1])
        size += -size % (8 if call.device.type == "cuda" else 1)
        divides = spec.denominator is not None and spec.denominator.uses_row_sum
        return _Gained(
            stock,
            spec,
            _gate_in_gain(spec),
            divides,
            _constant_divisor(call),
            call.group,
            size,
            not q.shape[-1] == v.shape[-1] == size,
            call.needs_gradient,
        )

    def run(self, call: Call) -> tuple[Tensor, None]:
        """The rows over their denominator, their gates and their norm."""
        inputs, scale = _operands(call)
        gate = None if self.gate is None else inputs.gates[self.gate]
        if gate is not None and gate.dim() == 3:
            return self.rows(call, inputs, scale, gate), None
        rows = self.rows(call, inputs, scale, None)
        return finish_rows(call.spec, rows, inputs.gates, inputs.q.dtype), None

    def rows(self, call: Call, inputs: Inputs, scale: float, gate: Tensor | None) -> Tensor:
        """The rows over their denominator [B, T, H, e], times a gate [B, T, H] if given."""
        q, k, v = inputs[:3]
        e = v.shape[3]
        if self.group > 1:
            k, v = k.repeat_interleave(self.group, 2), v.repeat_interleave(self.group, 2)
        if self.is_padded:
            q, k, v = (_padded(u, self.size) for u in (q, k, v))
        divisor = log_divisor(call, inputs) if self.constant is None else self.constant()
        if self.needs_gradient:
            y: Tensor = _apply_gained(q, k, v, divisor, gate, self, inputs, scale, call.causal)
        else:
            y = self.forward(q, k, v, divisor, gate, inputs, scale, call.causal).y
        return y[..., :e] if self.is_padded else y

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_divisor: Tensor | None,
        gate: Tensor | None,
        inputs: Inputs,
        scale: float,
        causal: bool,
    ) -> _GainedAnswer:
        o, lse = self.stock.forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale, causal)
        lse, log_slope = lse.contiguous(), None
        if self.uses_row_sum:
            log_divisor, log_slope = self.from_row_sum(lse, inputs, causal)
        y = scaled_rows(o, lse, log_divisor, gate).transpose(1, 2)
        return _GainedAnswer(y, o, lse, log_divisor, log_slope)

    def from_row_sum(self, lse: Tensor, inputs: Inputs, causal: bool) -> tuple[Tensor, Tensor | None]:
        """ln D and 1 − a = ∂ ln D/∂ lse (None for zero) where D depends on the row's weights."""
        denominator = self.spec.denominator
        assert denominator is not None
        rows = lse.unflatten(1, (inputs.k.shape[2], -1))
        seen = SeenByRows(self.spec, inputs, causal, rows=Rows(rows, torch.ones_like(rows), rows))
        log_divisor = seen.log_divisor().to(rows.dtype).flatten(1, 2)
        slope = denominator.log_slope(seen)
        return log_divisor, None if slope is None else slope.to(rows.dtype).expand_as(rows).flatten(1, 2)


def _gate_in_gain(spec: AttentionSpec) -> str | None:
    """The argument of the gate that follows on the rows, if it is the only step left."""
    if spec.norm is not None or len(spec.gates_before_norm) != 1:
        return None
    (only,) = spec.gates_before_norm
    return only.argument.name if only.multiplies else None


def log_divisor(call: Call, inputs: Inputs) -> Tensor | None:
    """ln D [B or 1, H or 1, T] of a denominator that does not depend on the row's weights; None for 1."""
    denominator = call.spec.denominator
    if denominator is None or denominator.uses_row_sum:
        return None
    constant = _constant_divisor(call)
    if constant is not None:
        return constant()
    running = running_log_sum(call.spec, inputs, None, call.causal)
    seen = SeenByRows(call.spec, inputs, call.causal, running=running)
    return per_head(denominator.log_divisor(seen), inputs)


def _constant_divisor(call: Call) -> Callable[[], Tensor] | None:
    """How to get ln D [1, 1, T] of a denominator that depends only on the number of keys; None for others."""
    spec, inputs = call.spec, call.inputs
    if spec.denominator is None or spec.denominator.uses_row_sum or spec.denominator.arguments:
        return None
    if inputs.present is not None or is_tracing():
        return None
    counted = inputs.q.shape[1], inputs.k.shape[1], call.causal, inputs.q.dtype, call.device
    return partial(_log_divisor_of_count, spec, *counted)


@lru_cache(maxsize=64)
def _log_divisor_of_count(
    spec: AttentionSpec, queries: int, keys: int, causal: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """`_constant_divisor`, cached per shape."""
    with torch.inference_mode(False), torch.no_grad():
        q, k = (torch.empty(1, n, 1, 1, dtype=dtype, device=device) for n in (queries, keys))
        inputs = Inputs(q, k, k)
        assert spec.denominator is not None
        return per_head(spec.denominator.log_divisor(SeenByRows(spec, inputs, causal)), inputs)


def _padded(u: Tensor, size: int) -> Tensor:
    return u if u.shape[-1] == size else pad(u, (0, size - u.shape[-1]))


def weights_fit(like: Tensor) -> bool:
    """Whether e^x/D can be multiplied in this dtype if D does not depend on the row: fp16 lacks the range."""
    return like.dtype != torch.float16


class _GainedAnswer(NamedTuple):
    """Rows [B, T, H, e] with their gain, and what the backward pass reads: o [B, H, T, e], lse, ln D, 1−a."""

    y: Tensor
    o: Tensor
    lse: Tensor
    log_divisor: Tensor | None
    log_slope: Tensor | None


class _GainedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_divisor: Tensor | None,
        gate: Tensor | None,
        gained: _Gained,
        inputs: Inputs,
        scale: float,
        causal: bool,
    ) -> Tensor:
        found = gained.forward(q, k, v, log_divisor, gate, inputs, scale, causal)
        ctx.call, ctx.layout = (gained.stock, scale, causal), found.o.stride()
        ctx.rows_are_output = not gained.uses_row_sum and weights_fit(q)
        ctx.is_direct = ctx.rows_are_output and gate is None and not ctx.needs_input_grad[3]
        if ctx.is_direct:
            ctx.save_for_backward(q, k, v, log_divisor)
        else:
            rows = found.y.transpose(1, 2) if ctx.rows_are_output else found.o
            ctx.save_for_backward(q, k, v, rows, found.lse, found.log_divisor, gate, found.log_slope)
        return found.y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, *kept = ctx.saved_tensors
        if ctx.is_direct:
            dy = dy if dy.stride(-1) == 1 and min(dy.stride()) > 0 else dy.contiguous()
            rows = _DirectRows(dy.transpose(1, 2), ctx.layout, *kept)
            return *_Backward(*ctx.call).gradients(q, k, v, rows), *(None,) * 6
        of_divisor, of_gate = ctx.needs_input_grad[3], ctx.needs_input_grad[4]
        rows = _GainedRows(
            dy.transpose(1, 2),
            ctx.layout,
            ctx.rows_are_output,
            *kept,
            want_sums=of_divisor or of_gate,
            sums=[],
        )
        found = _Backward(*ctx.call).gradients(q, k, v, rows)
        d_divisor = d_gate = None
        if rows.want_sums:
            sums = rows.sums[0] if len(rows.sums) == 1 else torch.cat(rows.sums)
            if of_divisor and rows.log_divisor is not None:
                of_rows = sums if rows.gate is None else sums * rows.gate.transpose(1, 2)
                d_divisor = (-of_rows).sum_to_size(rows.log_divisor.shape)
            if of_gate and rows.gate is not None:
                d_gate = sums.transpose(1, 2).to(rows.gate.dtype)
        return *found, d_divisor, d_gate, *(None,) * 4


_apply_gained = apply_of(_GainedSoftmax)


class _DirectRows(NamedTuple):
    """What torch's backward gets if D is constant and there is no gate: dy, zeros and ln D."""

    dy: Tensor
    layout: tuple[int, ...]
    log_divisor: Tensor | None

    @property
    def keeps_rows(self) -> bool:
        return False

    def part(self, some: slice | None) -> tuple[Tensor, Tensor, Tensor]:
        dy, log = _some(self.dy, some), self.log_divisor
        if log is None:
            log = dy.new_zeros((1, 1, 1), dtype=working_dtype(dy.dtype))
        return dy, zeros_in_layout(dy, self.layout), _some(log, some).expand(dy.shape[:3]).contiguous()


class _GainedRows(NamedTuple):
    """The same if rows have their own gain. Sums Σ dy∘o e^g/D are added to the list, part by part."""

    dy: Tensor
    layout: tuple[int, ...]
    #: whether o holds the output y instead
    rows_are_output: bool
    o: Tensor
    lse: Tensor
    log_divisor: Tensor | None
    gate: Tensor | None
    log_slope: Tensor | None
    want_sums: bool
    sums: list[Tensor]

    @property
    def keeps_rows(self) -> bool:
        return not self.rows_are_output

    def part(self, some: slice | None) -> tuple[Tensor, Tensor, Tensor]:
        dy, o, lse = (_some(u, some) for u in (self.dy, self.o, self.lse))
        log_divisor, gate, log_slope = (
            None if u is None else _some(u, some) for u in (self.log_divisor, self.gate, self.log_slope)
        )
        do, seen, sums = scaled_rows_backward(
            dy,
            o,
            lse,
            log_divisor,
            gate,
            log_slope,
            sums=self.want_sums,
            rows_are_output=self.rows_are_output,
        )
        if sums is not None:
            self.sums.append(sums)
        return do, zeros_in_layout(o, self.layout) if seen is None else seen, lse


# --------------------------------------------------------------------------- softmax under a norm


class _Normed(NamedTuple):
    """What a softmax needs from its spec if a norm per head follows; only its output is kept."""

    stock: TorchSoftmax
    length: float
    centred: bool
    needs_gradient: bool

    @staticmethod
    def of(call: Call) -> _Normed | None:
        """None if more than a norm follows, or if no fused norm supports such rows."""
        spec, q, k, v = call.spec, *call.inputs[:3]
        if spec.norm is None or not spec.norm.per_head or spec.gates_after_norm:
            return None
        plain = q.shape == k.shape == v.shape and q.shape[3] % 8 == 0
        plain = plain and (call.causal or call.inputs.present is None)
        stock = torch_softmax(q.transpose(1, 2), k, v, call.device) if plain else None
        length = fused_length(spec, q)
        if stock is None or length is None:
            return None
        return _Normed(stock, length, spec.norm.centred, call.needs_gradient)

    def run(self, call: Call) -> tuple[Tensor, None]:
        """The rows under their norm."""
        (q, k, v, *_), scale = _operands(call)
        if self.needs_gradient:
            return _apply_normed(q, k, v, self, scale, call.causal), None
        return self.forward(q, k, v, scale, call.causal).y, None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> _NormedAnswer:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        o, lse = self.stock.forward(q, k, v, scale, causal)
        rows = o.transpose(1, 2)
        y, gain = normed_rows(rows, self.length, self.centred)
        return _NormedAnswer(y, lse, gain, rows.stride())


class _NormedAnswer(NamedTuple):
    """Rows [B, T, H, e] under a norm, and what the backward pass reads."""

    y: Tensor
    lse: Tensor
    gain: Tensor
    layout: tuple[int, ...]


class _NormedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, normed: _Normed, scale: float, causal: bool
    ) -> Tensor:
        found = normed.forward(q, k, v, scale, causal)
        ctx.save_for_backward(q, k, v, found.y, found.lse, found.gain)
        ctx.call, ctx.layout, ctx.centred = (normed.stock, scale, causal), found.layout, normed.centred
        return found.y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, *kept = ctx.saved_tensors
        rows = _NormedRows(dy, ctx.layout, ctx.centred, *kept)
        return *_Backward(*ctx.call).gradients(q, k, v, rows), None, None, None


_apply_normed = apply_of(_NormedSoftmax)


class _NormedRows(NamedTuple):
    """What torch's backward gets under a norm, computed from the answer and one number per row."""

    dy: Tensor
    layout: tuple[int, ...]
    centred: bool
    y: Tensor
    lse: Tensor
    gain: Tensor

    @property
    def keeps_rows(self) -> bool:
        return False

    def part(self, some: slice | None) -> tuple[Tensor, Tensor, Tensor]:
        dy, y, gain, lse = (_some(u, some) for u in (self.dy, self.y, self.gain, self.lse))
        do, o = normed_rows_backward(dy, y, gain, self.centred, self.layout)
        return do.transpose(1, 2), o.transpose(1, 2), lse


# --------------------------------------------------------------------------- backward in slices of the batch

#: bytes of rows, and tokens per text, from which the backward pass runs on some sequences at a time. For
#: short texts it is slower: copying takes as long per token, and attention less
SLICED_BYTES, SLICED_TOKENS = 1 << 26, 2048
#: how many slices: with only answers kept, or rows beside them. For rows of R bytes, cuDNN's own backward
#: takes 2 R besides its gradients. A slice takes its share of 7 R, for do, o, cuDNN's sums and three
#: gradients. Gradients of earlier slices are part of the result, so the last of n equal slices takes 4 R/n
#: beyond it; joining them takes R
_SLICES, _SLICES_WITH_ROWS = 2, 3


class _RowsOfSome(Protocol):
    @property
    def keeps_rows(self) -> bool:
        """Whether rows besides the output were kept for the backward pass."""
        ...

    def part(self, some: slice | None) -> tuple[Tensor, Tensor, Tensor]:
        """do and o [b, H, T, e], and the log-sum-exp [b, H, T], of some sequences, or of all (None)."""
        ...


class _Backward(NamedTuple):
    """torch's backward for given rows."""

    stock: TorchSoftmax
    scale: float
    causal: bool

    def gradients(self, q: Tensor, k: Tensor, v: Tensor, rows: _RowsOfSome) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv [B, T, H, size]; in slices of the batch if rows are large."""
        batch = q.shape[0]
        if batch == 1 or not _is_large(v):
            return self.of_part(q, k, v, rows, None)
        parts: tuple[list[Tensor], ...] = ([], [], [])
        for some in _slices(batch, _SLICES_WITH_ROWS if rows.keeps_rows else _SLICES):
            for of_one, part in zip(parts, self.of_part(q[some], k[some], v[some], rows, some), strict=True):
                of_one.append(part)
        dq, dk, dv = map(_joined, parts)
        return dq, dk, dv

    def of_part(
        self, q: Tensor, k: Tensor, v: Tensor, rows: _RowsOfSome, some: slice | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        do, o, lse = rows.part(some)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        dq, dk, dv = self.stock.backward(do, q, k, v, o, lse, self.scale, self.causal)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _slices(batch: int, count: int) -> list[slice]:
    """At most `count` slices of a batch, as equal as possible, larger ones first."""
    count = min(count, batch)
    sizes = [batch // count + (number < batch % count) for number in range(count)]
    starts = [sum(sizes[:number]) for number in range(count)]
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _joined(parts: list[Tensor]) -> Tensor:
    """All parts in one tensor; the list is emptied, so that their memory is free for the next one."""
    whole = torch.cat(parts)
    parts.clear()
    return whole


def _is_large(v: Tensor) -> bool:
    """Whether saving memory is worth copying gradients; a traced pass is never sliced."""
    if is_tracing() or v.shape[1] < SLICED_TOKENS:
        return False
    return v.numel() * v.element_size() >= SLICED_BYTES


def _some(u: Tensor, some: slice | None) -> Tensor:
    """Some sequences of a tensor [B or 1, …], or all of them."""
    return u if some is None or u.shape[0] == 1 else u[some]


# --------------------------------------------------------------------------- torch's fused softmax attentions


_ops = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


class TorchSoftmax(Protocol):
    """One of torch's fused softmax attentions."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """softmax(x)V [B, H, T, e] and ln Σ eˣ [B, H, T] in fp32."""
        ...

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv from dx = P∘(do Vᵀ − Σ do∘o).

        o must have the memory layout that `forward` gave it: cuDNN caches what it built for the layout of
        q, k, v and assumes that the layout of o follows from it.
        """
        ...


def zeros_in_layout(like: Tensor, layout: tuple[int, ...]) -> Tensor:
    """Zeros of the shape and dtype of `like`, in the memory layout of the output of `forward`."""
    return torch.empty_strided(like.shape, layout, dtype=like.dtype, device=like.device).zero_()


def torch_softmax(q: Tensor, k: Tensor, v: Tensor, device: torch.device) -> TorchSoftmax | None:
    """The fastest program for such tensors, or None where torch has none."""
    if device.type == "cpu":
        return _Cpu() if q.dtype in (torch.float32, torch.float64) else None
    if device.type != "cuda" or q.shape[-1] > 256:
        return None
    if q.dtype == torch.float32:
        return _Efficient()
    if q.dtype not in _HALF:
        return None
    return _CuDNN() if _has_hopper_cudnn(device) and q.shape[-1] <= 128 and q.shape[2] > 1 else _Flash()


@lru_cache(maxsize=16)
def _has_hopper_cudnn(device: torch.device) -> bool:
    """Whether cuDNN's attention for Hopper runs here; AMD's GPUs also report a capability of 9 or more."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return torch.version.hip is None
    return torch.cuda.get_device_properties(device).major >= 9


#: scores up to which torch's backward pass for CPUs recomputes weights without overflow, with a wide margin
_SAFE_SCORES = 1e6


class _Cpu:
    """torch's fused attention for CPUs.

    Its backward pass computes scores anew, in another order of additions than the forward pass, and from
    them weights e^(x − lse). In fp32, scores above 10⁹ are rounded by more than 88: weights overflow, and a
    row without a gradient gives ∞·0 = NaN to every key it sees. Such rows get lse = ∞, so weights of 0.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        return _ops._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal, scale=scale)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        if are_traced((lse,)) or (lse.numel() and not lse.abs().amax() <= _SAFE_SCORES):  # also if NaN
            lse = lse.masked_fill((do == 0).all(-1), torch.inf)
        return _ops._scaled_dot_product_flash_attention_for_cpu_backward.default(
            do, q, k, v, o, lse, 0.0, causal, scale=scale
        )


class _CuDNN:
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        found = _ops._scaled_dot_product_cudnn_attention.default(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        return found[0], found[1].squeeze(-1)  # [B, H, T, 1], of several queries

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        if do.stride() != o.stride():
            do = torch.empty_strided(o.shape, o.stride(), dtype=do.dtype, device=do.device).copy_(do)
        return _ops._scaled_dot_product_cudnn_attention_backward.default(
            do, q, k, v, o, lse[..., None], seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, causal,
            scale=scale,
        )  # fmt: skip


class _Flash:
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        found = _ops._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False, scale=scale)
        return found[0], found[1]

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        return _ops._scaled_dot_product_flash_attention_backward.default(
            do, q, k, v, o, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed[0], scale=scale
        )


class _Efficient:
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        found = _ops._scaled_dot_product_efficient_attention.default(
            q, k, v, None, True, 0.0, causal, scale=scale
        )
        return found[0], found[1][..., : q.shape[2]]

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
        dq, dk, dv, _ = _ops._scaled_dot_product_efficient_attention_backward.default(
            do, q, k, v, None, o, padded, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
        )
        return dq, dk, dv
