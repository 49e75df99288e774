"""From sums over keys to the output:  y_t = p_t N( o_t Σ_s w_s v_s / D_t ).

Every form and every fused program ends here: rows, then the denominator, the gates and the norm. Each part
defines its own step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from maclaurin.errors import SpecError
from maclaurin.forms.packing import Packing
from maclaurin.forms.stream import Inputs, Rows, working_dtype
from maclaurin.forms.tracing import is_tracing
from maclaurin.spec import AttentionSpec, Denominator
from maclaurin.spec.gate import RowGate


@dataclass(frozen=True)
class SeenByRows:
    """What denominators can read (spec/denominator.py), computed on first use."""

    spec: AttentionSpec
    inputs: Inputs
    causal: bool = True
    count: Tensor | None = None  # [B], keys that came before this call
    running: Tensor | None = None  # [B, T, heads], see running_log_sum
    rows: Rows | None = None
    packing: Packing | None = None  # of sequences in one row, each of which sees only itself

    @property
    def keys(self) -> Tensor:
        """The number of keys each row sees, at least 1, [B or 1, 1, 1, T]."""
        if self.packing is not None:
            number = self.packing.visible_keys(self.inputs.q.shape[1], self.causal)
            return number[:, None, None].to(working_dtype(self.inputs.q.dtype))
        number = visible_keys(self.inputs, self.count, self.causal)[:, None, None]
        return number if self.inputs.present is None else number.clamp(min=1)

    @property
    def row_sum(self) -> Tensor:
        """Σ_s w_ts, [B, K, G, T]; 1 where it is 0, as for rows that see no key."""
        total, scale = self._row_sum, self._log_scale
        if scale is not None:  # in float64, where e^700 fits; beyond that NaN, since ∞ would give rows of 0
            total = total.double() * scale.double().exp()
            total = total.masked_fill(total.isinf(), torch.nan)
        return total.masked_fill(total == 0, 1.0)

    @property
    def log_row_sum(self) -> Tensor:
        """ln Σ_s w_ts, [B, K, G, T]."""
        total, scale = self._row_sum, self._log_scale
        log = total.masked_fill(total == 0, 1.0).log()
        return log if scale is None else torch.where(total == 0, log, log + scale)

    @property
    def scaled_row_sum(self) -> Tensor:
        """Σ_s w_ts in the units of the rows, [B, K, G, T]."""
        self._require("is_scaled = True", "the scaled row sum", self._denominator.is_scaled)
        return self._row_sum

    @property
    def _row_sum(self) -> Tensor:
        self._require("uses_row_sum = True", "the row sum", self._denominator.uses_row_sum)
        assert self.rows is not None
        assert self.rows.row_sum is not None
        return self.rows.row_sum

    @property
    def _denominator(self) -> Denominator:
        assert self.spec.denominator is not None
        return self.spec.denominator

    def _require(self, declaration: str, what: str, is_declared: bool) -> None:
        """Raise unless the denominator declares what it reads: the rest of the library goes by that."""
        if not is_declared:
            raise SpecError(
                f"{self._denominator} reads {what} without declaring it: set {declaration} on the class "
                f"{type(self._denominator).__qualname__}."
            )

    def log_divisor(self) -> Tensor:
        """ln D [B, K, G, T] of the spec's denominator."""
        denominator = self._denominator
        if not denominator.is_scaled:
            return denominator.log_divisor(self)
        log, scale = self.scaled_divisor().log(), self._log_scale
        return log if scale is None else log + scale

    def scaled_divisor(self) -> Tensor:
        """D·unit [B, K, G, T] of a scaled denominator; 1 where it is 0, as for rows that see no key."""
        divisor = self._denominator.divisor(self)
        return divisor.masked_fill(divisor == 0, 1.0)

    @property
    def _log_scale(self) -> Tensor | None:
        return None if self.rows is None else self.rows.log_scale

    @property
    def unit(self) -> Tensor | float:
        """e^(−log_scale): what 1 is in the units of the rows."""
        self._require("is_scaled = True", "the unit of the row sum", self._denominator.is_scaled)
        scale = self._log_scale
        return 1.0 if scale is None else (-scale).exp()

    @property
    def argument(self) -> Tensor:
        """The denominator's own argument, [B, K, G, T] or [B, K, 1, T]."""
        self._require("argument = Argument(…)", "an argument", self._denominator.argument is not None)
        (argument,) = self._denominator.arguments
        if argument.running:
            assert self.running is not None
            given = self.running
        else:
            given = self.inputs.gates[argument.name].to(working_dtype(self.inputs.q.dtype))
        return given.transpose(1, 2).unflatten(1, (self.inputs.k.shape[2], -1))


def visible_keys(inputs: Inputs, before: Tensor | None, causal: bool) -> Tensor:
    """The number of keys each query sees, [B or 1, T] in the working dtype; `before` [B] came earlier."""
    queries, keys = inputs.q.shape[1], inputs.k.shape[1]
    dtype = working_dtype(inputs.q.dtype)
    if inputs.present is not None:
        number = inputs.present.cumsum(-1)[:, keys - queries :] if causal else inputs.present.sum(-1)[:, None]
        number = number.expand(-1, queries).to(dtype)
    elif causal:
        count = _counting_up.__wrapped__ if is_tracing() else _counting_up
        number = count(keys - queries + 1, keys + 1, dtype, inputs.q.device)
    else:
        number = torch.full((1, queries), keys, dtype=dtype, device=inputs.q.device)
    return number if before is None else number + before[:, None]


@lru_cache(maxsize=256)
def _counting_up(start: int, stop: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """start, …, stop − 1 as [1, n], cached per device: making it again takes as long as a short program."""
    with torch.inference_mode(False):
        return torch.arange(start, stop, dtype=dtype, device=device)[None]


def running_log_sum(
    spec: AttentionSpec, inputs: Inputs, before: Tensor | None, causal: bool
) -> Tensor | None:
    """ln Σ_{r≤t} e^{g_r} of the running argument for every query, [B, T, heads]; `before` came earlier."""
    argument = spec.running_argument
    if argument is None:
        return None
    logs = inputs.gates[argument.name].to(working_dtype(inputs.q.dtype))
    if inputs.present is not None:
        logs = torch.where(inputs.present[..., None], logs, -torch.inf)
    if before is not None:
        logs = torch.cat([before[:, None], logs], dim=1)
    queries = inputs.q.shape[1]
    if not causal:
        return logs.logsumexp(1, keepdim=True).expand(-1, queries, -1)
    return logs.logcumsumexp(1)[:, -queries:]


def finish(spec: AttentionSpec, rows: Rows, seen: SeenByRows) -> Tensor:
    """y [B, T, H, e] from rows [B, K, G, T, …], in their dtype."""
    y = divided(spec, rows, seen).flatten(1, 2).transpose(1, 2)
    return gated_and_normed(spec, y, seen.inputs.gates)


def divided(spec: AttentionSpec, rows: Rows, seen: SeenByRows) -> Tensor:
    """The numerator over the denominator; where both are zero, zero."""
    denominator = spec.denominator
    seen = dataclasses.replace(seen, rows=rows)
    if denominator is not None and denominator.is_scaled:
        return _quotient(rows.numerator, seen.scaled_divisor()[..., None])
    if denominator is not None and denominator.uses_row_sum and denominator in spec.cancelled_parts:
        denominator = None  # its value may overflow
    log_gain = None if spec.ignores_row_scale else rows.log_scale
    if log_gain is not None and _only_ratios_count(spec):
        log_gain = log_gain - log_gain.amax((1, 2), keepdim=True)  # a norm over the heads needs ratios only
    if denominator is None:
        return rows.numerator if log_gain is None else rows.numerator * log_gain.exp()[..., None]
    if log_gain is None and not denominator.in_log_domain:
        return _quotient(rows.numerator, denominator.divisor(seen)[..., None])
    log_divisor = denominator.log_divisor(seen).to(rows.numerator.dtype)
    log_gain = -log_divisor if log_gain is None else log_gain - log_divisor
    return rows.numerator * log_gain.exp()[..., None]


def _only_ratios_count(spec: AttentionSpec) -> bool:
    """Whether a positive factor on all heads of a token changes nothing."""
    if spec.norm is None or not all(gate.multiplies for gate in spec.gates_before_norm):
        return False
    return spec.norm.ignores_row_scale


def _quotient(numerator: Tensor, divisor: Tensor) -> Tensor:
    """n / D for D [..., 1] as (n/c) / (D/c) with the constant c = D, for a finite gradient.

    torch computes dD as −dy · (y/D). With a tiny D, y/D overflows, and a row that no loss depends on gets
    0 · ∞. Here D/c is 1.
    """
    if not divisor.requires_grad:
        return numerator / divisor
    constant = divisor.detach()
    return (numerator / constant) / (divisor / constant)


def gated_and_normed(spec: AttentionSpec, y: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
    """p_t N(o_t y_t) for y [B, T, H, e] and gates [B, T, H] or [B, T, H, e]."""
    y = _gated(spec.gates_before_norm, y, gates)
    if spec.norm is not None:
        y = spec.norm(y)
    return _gated(spec.gates_after_norm, y, gates)


def _gated(parts: tuple[RowGate, ...], y: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
    for part in parts:
        gate = gates[part.argument.name].to(y.dtype)
        y = part.on_rows(y, gate if gate.dim() == 4 else gate[..., None])
    return y
