"""Random inputs that fit a spec: queries, keys, values and exactly its gates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maclaurin.forms.state import State
from maclaurin.programs.dispatch import attention
from maclaurin.spec import AttentionSpec, Recipe

#: seed of `draw_inputs`; `draw_direction` uses the next one
SEED = 0
#: a log forget gate of `draw_inputs` is between −this and 0, so that tokens a hundred steps ago still count
STRONGEST_FORGET = 0.02


@dataclass(frozen=True)
class Shape:
    """Sizes of one call."""

    batch: int = 2
    tokens: int = 9
    kv_heads: int = 2
    group: int = 2
    d: int = 3
    e: int = 4

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.kv_heads * self.group


@dataclass(frozen=True)
class TensorCase:
    """The tensors of one call by argument name, with operations on all of them."""

    spec: AttentionSpec
    tensors: dict[str, Tensor]

    def __call__(self, **options: Any) -> Any:
        """attention(q, k, v, spec, gates…, **options)"""
        return attention(spec=self.spec, **self.tensors, **options)

    def output(self, **options: Any) -> Tensor:
        """The output alone."""
        result = self(**options)
        return result[0] if isinstance(result, tuple) else result

    def state(self, **options: Any) -> State:
        """The final state alone."""
        return self(return_state=True, **options)[1]

    def map(self, change: Callable[[Tensor], Tensor]) -> TensorCase:
        """Apply `change` to every tensor."""
        return TensorCase(self.spec, {name: change(t) for name, t in self.tensors.items()})

    def tokens(self, start: int, stop: int) -> TensorCase:
        """Tokens start … stop−1."""
        return self.map(lambda t: t[:, start:stop])

    def with_tensors(self, **changed: Tensor) -> TensorCase:
        """Some tensors replaced."""
        return TensorCase(self.spec, {**self.tensors, **changed})

    def with_gradients(self) -> TensorCase:
        """The same as separate leaves that require gradients."""
        return self.map(lambda t: t.detach().clone().requires_grad_())

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        """d loss / d tensor for every tensor; zeros where the loss does not depend on it."""
        grads = torch.autograd.grad(loss, list(self.tensors.values()), allow_unused=True)
        return {
            name: torch.zeros_like(t) if g is None else g
            for (name, t), g in zip(self.tensors.items(), grads, strict=True)
        }

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.tensors["k"].shape[1]


def random_tensors(
    spec: AttentionSpec,
    shape: Shape,
    seed: int,
    dtype: torch.dtype = torch.float64,
    *,
    device: str = "cpu",
    size: float = 1.0,
) -> TensorCase:
    """Normal q, k, v with scores of about `size`, and arguments as their recipes make them.

    Where the denominator can vanish, q and k are positive, which keeps it away from zero: near
    zero the answer itself is ill-conditioned, in every form.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    def uniform(*sizes: int) -> Tensor:
        return torch.rand(*sizes, generator=generator, dtype=torch.float64)

    rows = (shape.batch, shape.tokens)
    tensors = {
        "q": normal(*rows, shape.heads, shape.d) * size**0.5,
        "k": normal(*rows, shape.kv_heads, shape.d) * size**0.5,
        "v": normal(*rows, shape.kv_heads, shape.e),
    }
    if spec.denominator_can_vanish:
        tensors |= {name: tensors[name].abs() + 0.1 for name in "qk"}
    for argument in spec.arguments:
        numbers: tuple[int, ...] = (*rows, shape.heads if argument.heads == "query" else shape.kv_heads)
        if argument.recipe is Recipe.SILU:
            numbers = (*numbers, shape.e)
        if argument.recipe is Recipe.LINEAR:
            tensors[argument.name] = normal(*numbers)
        elif argument.recipe is Recipe.LOG_SIGMOID:
            tensors[argument.name] = -uniform(*numbers)
        else:
            tensors[argument.name] = 0.1 + 0.8 * uniform(*numbers)
    return TensorCase(spec, {name: t.to(device, dtype) for name, t in tensors.items()})


def draw_inputs(spec: AttentionSpec, shape: Shape, dtype: torch.dtype, device: torch.device) -> TensorCase:
    """Inputs of any size, made on the device: normal q, k, v; gates in (0.1, 0.9); little forgetting."""
    generator = torch.Generator(device).manual_seed(SEED)
    rows = (shape.batch, shape.tokens)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device, dtype=torch.float32).to(dtype)

    def uniform(heads: int, low: float, high: float) -> Tensor:
        numbers = torch.rand((*rows, heads), generator=generator, device=device, dtype=torch.float32)
        return (low + (high - low) * numbers).to(dtype)

    tensors = {
        "q": normal(*rows, shape.heads, shape.d),
        "k": normal(*rows, shape.kv_heads, shape.d),
        "v": normal(*rows, shape.kv_heads, shape.e),
    }
    decays = {gate.argument for gate in spec.decay_gates}
    for argument in spec.arguments:
        limits = (-STRONGEST_FORGET, 0.0) if argument in decays else (0.1, 0.9)
        heads = shape.heads if argument.heads == "query" else shape.kv_heads
        tensors[argument.name] = uniform(heads, *limits)
    return TensorCase(spec, tensors)


def draw_direction(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A random gradient of the output, [B, T, H, e]."""
    generator = torch.Generator(device).manual_seed(SEED + 1)
    sizes = (shape.batch, shape.tokens, shape.heads, shape.e)
    return torch.randn(sizes, generator=generator, device=device, dtype=torch.float32).to(dtype)
