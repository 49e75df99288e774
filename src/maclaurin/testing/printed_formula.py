"""Compute what a printed formula says, to compare it with what the part computes.

    value_of("1/(1 + exp(g_r))", {"g_r": gate})

A text with names that have no value here, such as T2 or a sum over tokens, cannot be computed: `value_of`
returns None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maclaurin.spec import AttentionSpec, Part
from maclaurin.testing.dense_formula import PlainSeen

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exp": torch.exp, "ln": torch.log, "log": torch.log, "σ": torch.sigmoid, "sigmoid": torch.sigmoid,
    "tanh": torch.tanh, "sin": torch.sin, "cos": torch.cos, "sinh": torch.sinh, "cosh": torch.cosh,
    "relu": torch.relu, "elu": torch.nn.functional.elu, "silu": torch.nn.functional.silu,
    "softplus": torch.nn.functional.softplus, "abs": torch.abs, "detach": lambda u: u,
    "min": lambda a, b: torch.minimum(*torch.broadcast_tensors(a, b)),
    "max": lambda a, b: torch.maximum(*torch.broadcast_tensors(a, b)),
}  # fmt: skip
_TOKEN = re.compile(r"\s*(?:(?P<number>\d+\.?\d*(?:e[+-]?\d+)?)|(?P<name>[^\W\d²³][^\W²³]*)|(?P<mark>\S))")


class _CannotCompute(Exception):
    """The text has a name or a sign without a value here."""


def value_of(text: str, symbols: Mapping[str, Tensor]) -> Tensor | None:
    """The value of a formula for these values of its symbols; None if it cannot be computed."""
    reader = _Reader([m[m.lastgroup or 0] for m in _TOKEN.finditer(text)], symbols)
    try:
        value = reader.sum()
    except _CannotCompute:
        return None
    return None if reader.tokens else value


@dataclass
class _Reader:
    tokens: list[str]
    symbols: Mapping[str, Tensor]

    @property
    def next(self) -> str:
        return self.tokens[0] if self.tokens else ""

    def take(self, expected: str = "") -> str:
        if not self.tokens or (expected and self.next != expected):
            raise _CannotCompute
        return self.tokens.pop(0)

    def sum(self) -> Tensor:
        value = self.product()
        while self.next in ("+", "−", "-"):
            value = value + self.product() if self.take() == "+" else value - self.product()
        return value

    def product(self) -> Tensor:
        """Factors, dots and slashes from left to right; a space multiplies too."""
        value = self.signed()
        while self.next and self.next not in "+−-),‖":
            mark = self.take() if self.next in "·/" else "·"
            value = value / self.power() if mark == "/" else value * self.power()
        return value

    def signed(self) -> Tensor:
        if self.next in ("−", "-"):
            self.take()
            return -self.power()
        return self.power()

    def power(self) -> Tensor:
        value = self.atom()
        for sign, exponent in (("²", 2), ("³", 3)):
            if self.next == sign:
                self.take()
                return value**exponent
        if self.next == "^":
            self.take()
            return value ** self.signed()
        return value

    def atom(self) -> Tensor:
        token = self.take()
        if token == "(":
            value = self.sum()
            self.take(")")
            return value
        if token == "√":
            return self.atom().sqrt()
        if token == "‖":
            value = self.sum()
            self.take("‖")
            return value.norm(dim=-1, keepdim=True)
        if token[0].isdigit():
            return torch.tensor(float(token), dtype=torch.float64)
        if token in self.symbols:
            return self.symbols[token]
        if token in _FUNCTIONS and self.next == "(":
            return _FUNCTIONS[token](*self.arguments())
        raise _CannotCompute

    def arguments(self) -> list[Tensor]:
        self.take("(")
        values = [self.sum()]
        while self.next == ",":
            self.take()
            values.append(self.sum())
        self.take(")")
        return values


# -------------------------------------------------------------------------------------- the parts of a spec

#: a part, its printed formula, the values of the symbols in it, and what the part computes from them
_Case = tuple[Part, str, dict[str, Tensor], Tensor]
#: random numbers of a shape
_Numbers = Callable[..., Tensor]


def printed_and_computed(spec: AttentionSpec, seed: int) -> list[tuple[Part, Tensor, Tensor]]:
    """(part, value of its printed formula, what it computes) for every part whose formula can be computed."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*sizes: int) -> Tensor:
        return torch.rand(*sizes, generator=generator, dtype=torch.float64) + 0.1

    cases = (
        *_of_kernel(spec, numbers),
        *_of_gates(spec, numbers),
        *_of_divisor(spec, numbers),
        *_of_bias(spec, numbers),
    )
    values = ((part, value_of(text, symbols), computed) for part, text, symbols, computed in cases)
    return [(part, value, computed) for part, value, computed in values if value is not None]


def _of_kernel(spec: AttentionSpec, numbers: _Numbers) -> Iterator[_Case]:
    kernel, u = spec.kernel, numbers(3, 4) - 0.6
    if not kernel.depends_on_row:
        yield kernel, kernel.text("x"), {"x": u}, kernel.weight(u)
    if kernel.feature_map is not None:
        yield kernel.feature_map, kernel.feature_map.text("u"), {"u": u}, kernel.mapped(u)


def _of_gates(spec: AttentionSpec, numbers: _Numbers) -> Iterator[_Case]:
    u, gate = numbers(3, 4) - 0.6, numbers(3, 1)
    for of_values in spec.value_gates:
        named = {"v": u, of_values.argument.symbol: gate}
        yield of_values, of_values.text("v"), named, of_values.on_values(u, gate)
    for decay in spec.decay_gates:
        takes_logarithm = decay.takes_log  # then the symbol stands for f itself
        named = {decay.argument.symbol: gate.exp() if takes_logarithm else gate}
        yield decay, decay.text(decay.argument.symbol), named, decay.log_decay(gate).exp()
    for of_rows in (*spec.gates_before_norm, *spec.gates_after_norm):
        named = {"y": u, of_rows.argument.symbol: gate}
        yield of_rows, of_rows.text("y"), named, of_rows.on_rows(u, gate)


def _of_divisor(spec: AttentionSpec, numbers: _Numbers) -> Iterator[_Case]:
    denominator = spec.denominator
    if denominator is None:
        return
    keys, row_sum, given = (numbers(4) for _ in range(3))
    named = {"R": row_sum, "t": keys}
    argument = denominator.declared_argument()
    if argument is not None and not argument.running:
        named[argument.symbol] = given
    yield denominator, denominator.text("R"), named, denominator.divisor(PlainSeen(keys, row_sum, given))


def _of_bias(spec: AttentionSpec, numbers: _Numbers) -> Iterator[_Case]:
    """The bias of a window, by the age t − s of a key."""
    window, age = spec.window, numbers(4)
    bias = None if window is None else window.log_bias(age)
    if window is not None and bias is not None:
        yield window, f"0{window.bias_text}", {"t": age, "s": torch.zeros_like(age)}, bias
