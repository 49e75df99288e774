"""What a published variant needs around its attention, as data for the layer that builds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from maclaurin.spec.argument import Argument, Recipe


@final
@dataclass(frozen=True, slots=True)
class LayerExtras:
    """Everything of a published variant that is not in its spec."""

    rotary: bool = True
    #: width of a depthwise causal convolution on q, k and v before the heads; 0 for none
    convolution: int = 0
    #: whether SiLU follows that convolution
    convolution_silu: bool = False
    #: tokens of zeros put in front of the text and dropped at the end
    extra_tokens: int = 0
    #: size of q and k per head where it is not the head size; 0 for the head size
    feature_size: int = 0
    #: γ·LayerNorm(u) + β on q and k before the kernel
    query_key_affine: bool = False
    #: how arguments are made from the token, where not by their own recipe: (name, recipe)
    gates: tuple[tuple[str, Recipe], ...] = ()

    def recipe(self, argument: Argument) -> Recipe:
        """How the layer makes this argument."""
        return dict(self.gates).get(argument.name, argument.recipe)
