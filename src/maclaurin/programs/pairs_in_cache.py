"""Polynomial kernels over all pairs on a CPU, some heads at a time, so that their scores stay in its cache.

    x = q·k,         c = x, or x − x̄ with the mean x̄ of the n scores that the query sees
    w = Σ aₙ cⁿ,     y = Σ_s w_s v_s,     r = Σ_s w_s

    dw = dy·v + dr,  dc = dw · Σ n aₙ cⁿ⁻¹,  dx = dc, or dc − Σ_s dc_s/n

The backward pass computes scores again: a new tensor for those of all heads takes longer than the products
that fill it, because the system clears its memory first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maclaurin.forms.attend import Form, output_of
from maclaurin.forms.parallel import parallel_rows, polynomial
from maclaurin.forms.stream import Rows, Stream, make_stream
from maclaurin.forms.tracing import is_tracing, without_autocast
from maclaurin.programs.custom_operator import apply_of
from maclaurin.programs.program import Call, Cost, Program, dense_flops, first_reason, working_bytes
from maclaurin.spec import AttentionSpec

#: scores held at once: 512 kB in fp32
_BLOCK = 1 << 17
#: scores of one key-value head for which the program is meant
_MOST_SCORES = 1 << 20


class PairsInCache(Program):
    """Σ cₙ xⁿ for every pair of query and key of short texts."""

    name = "pairs in cache"
    backend = "torch"
    form = Form.PARALLEL

    def cannot(self, call: Call) -> str | None:
        return first_reason(
            lambda: "it cannot be traced" if is_tracing() else None,
            lambda: None if call.device.type == "cpu" else "it runs only on a CPU",
            lambda: _refuse_spec(call.spec),
            lambda: "it carries no state" if call.carries_state else None,
            lambda: "it does not support padding" if call.inputs.present is not None else None,
            lambda: None if _scores_of_head(call) <= _MOST_SCORES else "its scores do not fit into a cache",
        )

    def cost(self, call: Call) -> Cost:
        width, heads = working_bytes(call), call.inputs.k.shape[0] * call.inputs.k.shape[2]
        scores = float(heads * _scores_of_head(call))  # in the cache, passes cost as much as two from memory
        return Cost(dense_flops(call), 2 * scores * width, 20 + 10 * scores / _BLOCK, 2 * _BLOCK * width)

    def run(self, call: Call) -> tuple[Tensor, None]:
        fused = call.spec.kernel.fused
        assert fused is not None
        with without_autocast(call.device):  # sums are kept in fp32 or fp64
            stream = make_stream(call.spec, call.inputs, call.scale)
            weights = _Weights(
                call.spec, tuple(map(float, fused.coefficients)), fused.about_mean, call.causal
            )
            q, k, v = (u.contiguous() for u in (stream.q, stream.k, stream.v))
            rows = Rows(*_apply(q, k, v, weights))
            y, _ = output_of(call.spec, rows, call.inputs, None, call.causal)
            return y.to(call.inputs.q.dtype), None


def _refuse_spec(spec: AttentionSpec) -> str | None:
    fused = spec.kernel.fused
    if fused is None or fused.function != "polynomial" or len(fused.coefficients) < 2:
        return "it supports only polynomials of the score"
    if spec.window is not None:
        return "it does not support windows"
    return "it does not support decay gates" if spec.decay_gates else None


def _scores_of_head(call: Call) -> int:
    return call.group * call.queries * call.keys


class _Weights(NamedTuple):
    """w of scores x [..., T, S], and dx of dw."""

    spec: AttentionSpec
    coefficients: tuple[float, ...]
    about_mean: bool
    causal: bool

    @property
    def is_linear(self) -> bool:
        """Whether the slope is a number."""
        return len(self.coefficients) == 2

    def of_scores(self, x: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
        """w and c. x is overwritten, by w if that is linear in c; else `free` is."""
        c = self._less_mean(self._seen(x)) if self.about_mean else x
        return self._seen(polynomial(self.coefficients, c, out=c if self.is_linear else free)), c

    def gradient(self, dw: Tensor, c: Tensor, free: Tensor) -> Tensor:
        """dx. dw and `free` are overwritten."""
        slope = tuple(n * a for n, a in enumerate(self.coefficients))[1:]
        dc = self._seen(dw.mul_(slope[0] if self.is_linear else polynomial(slope, c, out=free)))
        return self._seen(self._less_mean(dc)) if self.about_mean else dc

    def _seen(self, u: Tensor) -> Tensor:
        """u where the query sees the key, else 0, in place. A later key may be infinite."""
        return u.tril_(u.shape[-1] - u.shape[-2]) if self.causal else u

    def _less_mean(self, u: Tensor) -> Tensor:
        """u minus the mean of what the query sees, in place; u is 0 elsewhere."""
        queries, keys = u.shape[-2:]
        number = torch.full((queries,), keys, dtype=u.dtype, device=u.device)
        if self.causal:
            number -= torch.arange(queries - 1, -1, -1, device=u.device)
        return u.sub_(u.sum(-1, keepdim=True).div_(number[:, None]))


class _Pairs(torch.autograd.Function):
    """Σ_s w_s v_s [B, K, G, T, e] and Σ_s w_s [B, K, G, T]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, weights: _Weights) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v)
        ctx.weights = weights
        y, r = q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1])
        blocks = _Blocks(q, k)
        x, free = blocks.scores(2)
        for qs, ks, vs, ys, rs in blocks.of(q, k, v, y, r):
            w, _ = weights.of_scores(_products(qs, ks, x), free[: len(qs)])
            torch.bmm(w.flatten(1, 2), vs, out=ys.flatten(1, 2))
            torch.sum(w, -1, out=rs)
        return y, r

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        q, k, v = ctx.saved_tensors
        with without_autocast(q.device):
            if torch.is_grad_enabled():
                return *_differentiable(ctx.weights, Stream(q, k, v), gradients), None
            dy, dr = (u.contiguous() for u in gradients)
            found = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            blocks = _Blocks(q, k)
            x, free, more = blocks.scores(3)
            for qs, ks, vs, dys, drs, dqs, dks, dvs in blocks.of(q, k, v, dy, dr, *found):
                w, c = ctx.weights.of_scores(_products(qs, ks, x), free[: len(qs)])
                torch.bmm(w.flatten(1, 2).mT, dys.flatten(1, 2), out=dvs)
                dw = _products(dys, vs, more).add_(drs[..., None])
                dx = ctx.weights.gradient(dw, c, free[: len(qs)]).flatten(1, 2)
                torch.bmm(dx, ks, out=dqs.flatten(1, 2))
                torch.bmm(dx.mT, qs.flatten(1, 2), out=dks)
            return *found, None


_apply = apply_of(_Pairs)


class _Blocks:
    """Some key-value heads of the batch at a time: [n, …] of tensors [B, K, …], and memory for scores."""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self._like, self._of_head = q, (q.shape[2], q.shape[3], k.shape[2])
        at_once = _BLOCK // max(1, math.prod(self._of_head))
        self._size = max(1, min(at_once, q.shape[0] * q.shape[1]))

    def of(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """The tensors, some heads at a time."""
        return zip(*(u.flatten(0, 1).split(self._size) for u in tensors), strict=True)

    def scores(self, number: int) -> tuple[Tensor, ...]:
        """Memory for the scores of one block, several times."""
        return self._like.new_empty((number, self._size, *self._of_head)).unbind()


def _products(q: Tensor, k: Tensor, free: Tensor) -> Tensor:
    """q·k [n, G, T, S] in `free`; a group of query heads shares its keys."""
    result = free[: len(q)]
    torch.bmm(q.flatten(1, 2), k.mT, out=result.flatten(1, 2))
    return result


def _differentiable(weights: _Weights, stream: Stream, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """dq, dk, dv through the plain form, which can be differentiated again."""
    rows = parallel_rows(weights.spec, stream, causal=weights.causal)
    assert rows.row_sum is not None
    inputs = (stream.q, stream.k, stream.v)
    return torch.autograd.grad((rows.numerator, rows.row_sum), inputs, gradients, create_graph=True)
