"""Gates made from the token, one module per line of the enumerations in `spec/extras.py`.

Forget gates begin with horizons 1/(1 − f) spread evenly in the logarithm from 4 to 1024 tokens over the
heads, so that some heads remember at once; input gates begin near 1/2, output gates at 1/2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, silu, softplus

from maclaurin.spec.extras import ForgetGate, InputGate, LayerExtras, OutputGate

SHORTEST_HORIZON, LONGEST_HORIZON = 4.0, 1024.0


class GateLinear(nn.Linear):
    """A projection to one number per head with a bias to begin with."""

    def __init__(self, hidden_size: int, first_bias: Tensor) -> None:
        self.first_bias = first_bias.tolist()
        super().__init__(hidden_size, len(self.first_bias))

    @torch.no_grad()
    def reset_bias(self) -> None:
        """Set the bias it begins with."""
        self.bias.copy_(torch.tensor(self.first_bias))


class StepSize(nn.Module):
    """dt = softplus(Wx + b), one per head, beginning between 0.001 and 0.1 as in Mamba-2."""

    def __init__(self, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.projection = GateLinear(hidden_size, inverse_softplus(_spread(1e-3, 1e-1, heads)))

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, hidden] → [B, T, heads]."""
        return softplus(self.projection(hidden).float())


class InputGateLayer(nn.Module):
    """i [B, T, Hkv]."""

    def __init__(self, hidden_size: int, heads: int, kind: InputGate) -> None:
        super().__init__()
        self.kind = kind
        if kind is InputGate.SIGMOID:
            self.projection = nn.Linear(hidden_size, heads)
        elif kind is InputGate.LENGTH_POWER:
            self.exponent = nn.Parameter(torch.full((heads,), 0.5))

    def reset(self) -> None:
        """Begin with the exponent σ(0.5)."""
        if self.kind is InputGate.LENGTH_POWER:
            nn.init.constant_(self.exponent, 0.5)

    def forward(self, hidden: Tensor, positions: Tensor, step_size: Tensor | None) -> Tensor:
        """From hidden states [B, T, hidden], positions [1 or B, T] and dt."""
        if self.kind is InputGate.SIGMOID:
            return self.projection(hidden).sigmoid()
        if self.kind is InputGate.LENGTH_POWER:
            return _length_power(self.exponent, positions, hidden.shape[0])
        assert step_size is not None
        return step_size


class ForgetGateLayer(nn.Module):
    """ln f [B, T, Hkv]."""

    def __init__(self, hidden_size: int, heads: int, kind: ForgetGate) -> None:
        super().__init__()
        self.kind, self.heads = kind, heads
        log_forget = torch.log1p(-1 / _spread(SHORTEST_HORIZON, LONGEST_HORIZON, heads))
        if kind is ForgetGate.SIGMOID:
            self.projection: nn.Linear = GateLinear(hidden_size, inverse_logsigmoid(log_forget))
        elif kind is ForgetGate.SIGMOID_ROOT:
            self.projection = GateLinear(hidden_size, inverse_logsigmoid(16 * log_forget))
        elif kind is ForgetGate.SOFTPLUS:
            self.projection = GateLinear(hidden_size, inverse_softplus(-log_forget))
        elif kind is ForgetGate.RAW:
            self.projection = nn.Linear(hidden_size, heads, bias=False)
        elif kind is ForgetGate.MAMBA:
            self.log_rate = nn.Parameter(torch.zeros(heads))

    @torch.no_grad()
    def reset(self) -> None:
        """Begin with rates A from 1 to 16 over the heads."""
        if self.kind is ForgetGate.MAMBA:
            self.log_rate.copy_(torch.linspace(1, 16, self.heads).log())

    def forward(self, hidden: Tensor, step_size: Tensor | None) -> Tensor:
        """From hidden states [B, T, hidden] and dt."""
        if self.kind is ForgetGate.FIXED:
            head = torch.arange(self.heads, device=hidden.device)
            return torch.log1p(-(2.0 ** (-5.0 - head))).expand(*hidden.shape[:2], -1)
        if self.kind is ForgetGate.MAMBA:
            assert step_size is not None
            return -step_size * self.log_rate.float().exp()
        raw = self.projection(hidden).float()
        if self.kind is ForgetGate.RAW:
            return raw / 1024
        if self.kind is ForgetGate.SOFTPLUS:
            return -softplus(raw)
        return logsigmoid(raw) / (16 if self.kind is ForgetGate.SIGMOID_ROOT else 1)


class OutputGateLayer(nn.Module):
    """o [B, T, H], or [B, T, H, e] for one number per channel."""

    def __init__(self, hidden_size: int, heads: int, head_size: int, kind: OutputGate) -> None:
        super().__init__()
        self.kind, self.heads = kind, heads
        if kind is OutputGate.LENGTH_POWER:
            self.exponent = nn.Parameter(torch.full((heads,), 0.5))
        elif kind is OutputGate.SILU:
            self.projection = nn.Linear(hidden_size, heads * head_size, bias=False)
        else:
            self.projection = nn.Linear(hidden_size, heads)

    def reset(self) -> None:
        """Begin with the exponent σ(0.5)."""
        if self.kind is OutputGate.LENGTH_POWER:
            nn.init.constant_(self.exponent, 0.5)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """From hidden states [B, T, hidden] and positions [1 or B, T]."""
        if self.kind is OutputGate.LENGTH_POWER:
            return _length_power(self.exponent, positions, hidden.shape[0])
        raw = self.projection(hidden)
        if self.kind is OutputGate.SILU:
            return silu(raw).unflatten(-1, (self.heads, -1))
        return raw.sigmoid()


def needs_step_size(extras: LayerExtras, input_gate: bool, forget_gate: bool) -> bool:
    """Whether dt is made: once for both gates that use it."""
    of_input = input_gate and extras.input_gate is InputGate.SOFTPLUS
    return of_input or (forget_gate and extras.forget_gate is ForgetGate.MAMBA)


def _length_power(exponent: Tensor, positions: Tensor, batch: int) -> Tensor:
    """t^−σ(p) [B, T, heads], t counting from 1."""
    length = (positions + 1).float()[..., None]
    return (length ** -exponent.float().sigmoid()).expand(batch, -1, -1)


def _spread(low: float, high: float, number: int) -> Tensor:
    """Numbers from low to high, evenly in the logarithm."""
    with torch.device("cpu"):
        return torch.exp(torch.linspace(math.log(low), math.log(high), number))


def inverse_softplus(y: Tensor) -> Tensor:
    """x with softplus(x) = y."""
    return y + torch.log(-torch.expm1(-y))


def inverse_logsigmoid(y: Tensor) -> Tensor:
    """x with logsigmoid(x) = y."""
    return -inverse_softplus(-y)
