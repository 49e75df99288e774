"""Check a result against the plain forms in float64, which share no code with the fast programs.

At the full shape, a few rows of the output are computed again from their query and all keys they see. On a
part of the input (a few heads, a few hundred tokens), the whole output and all gradients are compared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from maclaurin.forms.attend import Form, attend
from maclaurin.forms.stream import Inputs
from maclaurin.spec import AttentionSpec
from maclaurin.testing.cases import TensorCase
from maclaurin.testing.tolerances import TOLERANCE_BEFORE_TIMING, relative_error

#: sequences and heads of the piece that is computed in full
PIECE_ROWS = 2
#: errors of a gradient smaller than this share of the largest gradient are relative to that share
SMALLEST_GRADIENT = 0.1


@final
@dataclass(frozen=True)
class Errors:
    """Relative errors by name of the tensor."""

    found: dict[str, float]

    @property
    def worst(self) -> str:
        """The name of the largest error."""
        return max(self.found, key=lambda name: self.found[name])

    @property
    def largest(self) -> float:
        """The largest error."""
        return self.found[self.worst]

    def within(self, dtype: torch.dtype) -> bool:
        """Whether all errors are within the tolerance."""
        return self.largest <= TOLERANCE_BEFORE_TIMING[dtype]


def rows_to_check(tokens: int) -> list[int]:
    """The first row, the last rows of a block and of the text, and one in between."""
    return sorted({0, min(127, tokens - 1), tokens // 2, tokens - 1})


def error_of_rows(case: TensorCase, spec: AttentionSpec, y: Tensor, *, causal: bool = True) -> float:
    """The largest error of some rows of y [B, T, H, e], over all heads; infinite if any value is not finite.

    The error is relative to each row: the first row of a text is many times larger than the last.
    """
    if not all_finite([y]):
        return math.inf
    sequences, rows = sorted({0, y.shape[0] - 1}), rows_to_check(y.shape[1])
    return max(
        relative_error(y[b, t], exact_row(case, spec, b, t, causal=causal)) for b in sequences for t in rows
    )


@torch.no_grad()
def exact_row(case: TensorCase, spec: AttentionSpec, b: int, t: int, *, causal: bool = True) -> Tensor:
    """y[b, t] [H, e] in float64, from the query and the keys it sees."""
    per_query = ("q", *(a.name for a in spec.arguments if a.tokens == "query"))
    row = {
        name: u[b : b + 1, t : t + 1] if name in per_query else u[b : b + 1, : t + 1 if causal else None]
        for name, u in case.tensors.items()
    }
    return plain_output(spec, row, causal=causal)[0, 0]


def plain_output(spec: AttentionSpec, tensors: dict[str, Tensor], *, causal: bool = True) -> Tensor:
    """The plain parallel form in float64, independent of the program that the library would choose."""
    q, k, v = (tensors[name].double() for name in "qkv")
    inputs = Inputs(q, k, v, {name: tensors[name].double() for name in spec.gates})
    scale = spec.kernel.default_scale(inputs.q.shape[3])
    y, _ = attend(
        spec,
        inputs,
        Form.PARALLEL,
        scale=scale,
        causal=causal,
        chunk=inputs.q.shape[1],
        state=None,
        return_state=False,
    )
    return y


def piece_of(tensor: Tensor, tokens: int, kv_heads: int) -> Tensor:
    """A copy of the first tokens of a few key-value heads and their queries."""
    heads = PIECE_ROWS * tensor.shape[2] // kv_heads
    return tensor.detach()[:PIECE_ROWS, :tokens, :heads].clone()


def errors_of_piece(
    piece: TensorCase,
    direction: Tensor,
    output: Callable[[TensorCase], Tensor],
    *,
    causal: bool = True,
    cuts: Sequence[int] | None = None,
) -> dict[str, float]:
    """Errors of the output and of every gradient, for the output's gradient `direction`.

    `cuts`: the tokens are packed sequences.
    """
    spec = piece.spec
    texts = list(itertools.pairwise(cuts)) if cuts is not None else [(0, piece.length)]
    found = _with_gradients(piece, direction, output)
    wide = piece.map(torch.Tensor.double)

    def plain(case: TensorCase) -> Tensor:
        alone = [plain_output(spec, case.tokens(a, b).tensors, causal=causal) for a, b in texts]
        return torch.cat(alone, dim=1)

    expected = _with_gradients(wide, direction.double(), plain)
    largest = max(float(u.norm()) for name, u in expected.items() if name != "output")
    errors = {"output": relative_error(found["output"], expected["output"])}
    for name in piece.tensors:
        floor = SMALLEST_GRADIENT * largest
        errors[f"gradient of {name}"] = relative_error(found[name], expected[name], floor)
    return errors


def _with_gradients(
    case: TensorCase, direction: Tensor, output: Callable[[TensorCase], Tensor]
) -> dict[str, Tensor]:
    leaves = case.with_gradients()
    y = output(leaves)
    return {"output": y, **leaves.gradients((y * direction).sum())}


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether every value is finite."""
    return all(bool(t.isfinite().all()) for t in tensors)
