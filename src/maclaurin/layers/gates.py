"""Arguments of a spec's parts, made from the token: one module per recipe of `spec/part.py`.

Forget gates start with horizons 1/(1 − f) spread evenly in the logarithm from 4 to 1024 tokens over the
heads, so that some heads remember from the start; input gates start near 1/2, output gates at 1/2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, silu, softplus

from maclaurin.spec import Argument, AttentionSpec, Recipe
from maclaurin.spec.catalogue import LayerExtras

SHORTEST_HORIZON, LONGEST_HORIZON = 4.0, 1024.0
#: recipes that share one step size dt per layer
_OF_STEP_SIZE = (Recipe.STEP_SIZE, Recipe.MINUS_STEP_SIZE)


def module_names(arguments: Sequence[Argument]) -> dict[str, str]:
    """The module that makes each argument, by the argument's name: input_gate, forget_gate, output_gate, …

    Where two of these short names are equal, as for `forget` and `log_forget`, the names stay unshortened.
    """
    short = [argument.name.removeprefix("log_").removesuffix("_gate") for argument in arguments]
    if len(set(short)) < len(short):
        short = [argument.name for argument in arguments]
    return {argument.name: f"{name}_gate" for argument, name in zip(arguments, short, strict=True)}


def needs_step_size(spec: AttentionSpec, extras: LayerExtras) -> bool:
    """Whether the layer makes dt, once for all gates that use it."""
    return any(extras.recipe(argument) in _OF_STEP_SIZE for argument in spec.arguments)


class GateLinear(nn.Linear):
    """A projection to one number per head, with a given initial bias."""

    def __init__(self, hidden_size: int, first_bias: Tensor) -> None:
        self.first_bias = first_bias.tolist()
        super().__init__(hidden_size, len(self.first_bias))

    @torch.no_grad()
    def reset_bias(self) -> None:
        """Set the bias to its initial value."""
        self.bias.copy_(torch.tensor(self.first_bias))


class StepSize(nn.Module):
    """dt = softplus(Wx + b), one per head, initially between 0.001 and 0.1 as in Mamba-2."""

    def __init__(self, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.projection = GateLinear(hidden_size, inverse_softplus(_spread(1e-3, 1e-1, heads)))

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, hidden] → [B, T, heads]."""
        return softplus(self.projection(hidden).float())


class GateFromToken(nn.Module):
    """An argument [B, T, heads], or [B, T, heads, e] for one number per channel, by its recipe."""

    def __init__(self, recipe: Recipe, hidden_size: int, heads: int, head_size: int) -> None:
        super().__init__()
        self.recipe, self.heads = recipe, heads
        log_forget = torch.log1p(-1 / _spread(SHORTEST_HORIZON, LONGEST_HORIZON, heads))
        if recipe in (Recipe.LINEAR, Recipe.SIGMOID):
            self.projection: nn.Linear = nn.Linear(hidden_size, heads)
        elif recipe is Recipe.LOG_SIGMOID:
            self.projection = GateLinear(hidden_size, inverse_logsigmoid(log_forget))
        elif recipe is Recipe.LOG_SIGMOID_16:
            self.projection = GateLinear(hidden_size, inverse_logsigmoid(16 * log_forget))
        elif recipe is Recipe.MINUS_SOFTPLUS:
            self.projection = GateLinear(hidden_size, inverse_softplus(-log_forget))
        elif recipe is Recipe.LINEAR_1024:
            self.projection = nn.Linear(hidden_size, heads, bias=False)
        elif recipe is Recipe.SILU:
            self.projection = nn.Linear(hidden_size, heads * head_size, bias=False)
        elif recipe is Recipe.MINUS_STEP_SIZE:
            self.log_rate = nn.Parameter(torch.zeros(heads))
        elif recipe is Recipe.LENGTH_POWER:
            self.exponent = nn.Parameter(torch.full((heads,), 0.5))

    @torch.no_grad()
    def reset(self) -> None:
        """Start with the exponent σ(0.5), or with rates A from 1 to 16 over the heads."""
        if self.recipe is Recipe.LENGTH_POWER:
            nn.init.constant_(self.exponent, 0.5)
        if self.recipe is Recipe.MINUS_STEP_SIZE:
            self.log_rate.copy_(torch.linspace(1, 16, self.heads).log())

    def forward(self, hidden: Tensor, positions: Tensor, step_size: Tensor | None) -> Tensor:
        """From hidden states [B, T, hidden], positions [1 or B, T] and dt."""
        recipe = self.recipe
        if recipe is Recipe.LENGTH_POWER:
            return _length_power(self.exponent, positions, hidden.shape[0])
        if recipe is Recipe.FIXED_DECAY:
            head = torch.arange(self.heads, device=hidden.device)
            return torch.log1p(-(2.0 ** (-5.0 - head))).expand(*hidden.shape[:2], -1)
        if recipe in _OF_STEP_SIZE:
            assert step_size is not None
            return step_size if recipe is Recipe.STEP_SIZE else -step_size * self.log_rate.float().exp()
        raw = self.projection(hidden)
        if recipe is Recipe.LINEAR:
            return raw
        if recipe is Recipe.SIGMOID:
            return raw.sigmoid()
        if recipe is Recipe.SILU:
            return silu(raw).unflatten(-1, (self.heads, -1))
        if recipe is Recipe.LINEAR_1024:
            return raw.float() / 1024
        if recipe is Recipe.MINUS_SOFTPLUS:
            return -softplus(raw.float())
        return logsigmoid(raw.float()) / (16 if recipe is Recipe.LOG_SIGMOID_16 else 1)


@lru_cache(maxsize=1024)
def gate_bytes(recipe: Recipe, hidden_size: int, heads: int, head_size: int, dtype: torch.dtype) -> int:
    """Bytes of an argument for one token, made with this recipe in a model of this dtype."""
    with torch.device("meta"):
        gate = GateFromToken(recipe, hidden_size, heads, head_size).to(dtype)
        token, position = torch.empty(1, 1, hidden_size, dtype=dtype), torch.zeros(1, 1, dtype=torch.long)
        return gate(token, position, torch.empty(1, 1, heads)).nbytes


def _length_power(exponent: Tensor, positions: Tensor, batch: int) -> Tensor:
    """t^−σ(p) [B, T, heads], t counting from 1."""
    length = (positions + 1).float()[..., None]
    return (length ** -exponent.float().sigmoid()).expand(batch, -1, -1)


def _spread(low: float, high: float, number: int) -> Tensor:
    """Values from low to high, evenly spaced in the logarithm."""
    with torch.device("cpu"):
        return torch.exp(torch.linspace(math.log(low), math.log(high), number))


def inverse_softplus(y: Tensor) -> Tensor:
    """x with softplus(x) = y."""
    return y + torch.log(-torch.expm1(-y))


def inverse_logsigmoid(y: Tensor) -> Tensor:
    """x with logsigmoid(x) = y."""
    return -inverse_softplus(-y)
