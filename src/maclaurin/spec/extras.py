"""What a published variant needs around its attention, as data for the layer that builds it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import final


class InputGate(enum.Enum):
    """How i_s is made from the token x_s; one number per key-value head."""

    SIGMOID = "i = σ(Wx + b)"
    SOFTPLUS = "i = dt = softplus(Wx + b)"
    LENGTH_POWER = "i_s = s^−σ(p), p per head, initially 0.5"


class ForgetGate(enum.Enum):
    """How f_t is made from the token x_t; one number per key-value head."""

    SIGMOID = "f = σ(Wx + b)"
    SOFTPLUS = "f = exp(−softplus(Wx + b))"
    RAW = "ln f = Wx/1024"
    MAMBA = "f = exp(−dt·A), dt = softplus(Wx + b), A per head"
    FIXED = "f = 1 − 2^(−5−h), fixed per head"
    SIGMOID_ROOT = "f = σ(Wx + b)^(1/16)"


class OutputGate(enum.Enum):
    """How o_t is made from the token x_t."""

    SIGMOID = "o = σ(Wx + b), one number per head"
    SILU = "o = silu(Wx), one number per channel"
    LENGTH_POWER = "o_t = t^−σ(p), p per head, initially 0.5"


@final
@dataclass(frozen=True, slots=True)
class LayerExtras:
    """Everything of a published variant that is not in its spec."""

    rotary: bool = True
    #: width of a depthwise causal convolution on q, k and v before the heads; 0 for none
    convolution: int = 0
    #: whether SiLU follows that convolution
    convolution_silu: bool = False
    #: learned-nothing tokens put in front of the text and dropped at the end
    extra_tokens: int = 0
    #: size of q and k per head where it is not the head size; 0 for the head size
    feature_size: int = 0
    #: γ·LayerNorm(u) + β on q and k before the kernel
    query_key_affine: bool = False
    input_gate: InputGate = InputGate.SIGMOID
    forget_gate: ForgetGate = ForgetGate.SIGMOID
    output_gate: OutputGate = OutputGate.SIGMOID
