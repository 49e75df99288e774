"""The algebra as frozen data: an AttentionSpec is a tuple of parts, each with its meaning."""

from maclaurin.spec.attention_spec import AttentionSpec
from maclaurin.spec.denominator import Denominator, RowSum, RunningSum, VisibleKeys
from maclaurin.spec.feature_map import Cosine, Elu1, FeatureMap, Identity, Relu
from maclaurin.spec.gate import DecayGate, ForgetGate, Gate, InputGate, OutputGate, RowGate, ValueGate
from maclaurin.spec.kernel import (
    Exp,
    Hermite,
    Kernel,
    Linear,
    Poly,
    Polynomial,
    Power,
    RowStatistics,
    Sigmoid,
    Taylor,
)
from maclaurin.spec.norm import L2, RMS, Layer, Norm
from maclaurin.spec.notation import parse
from maclaurin.spec.part import (
    Argument,
    Part,
    Recipe,
    choice,
    flag,
    number,
    numbers,
    positive,
    register,
    whole,
)
from maclaurin.spec.polynomials import Sign
from maclaurin.spec.window import SlidingWindow, Window

__all__ = [
    "L2",
    "RMS",
    "Argument",
    "AttentionSpec",
    "Cosine",
    "DecayGate",
    "Denominator",
    "Elu1",
    "Exp",
    "FeatureMap",
    "ForgetGate",
    "Gate",
    "Hermite",
    "Identity",
    "InputGate",
    "Kernel",
    "Layer",
    "Linear",
    "Norm",
    "OutputGate",
    "Part",
    "Poly",
    "Polynomial",
    "Power",
    "Recipe",
    "Relu",
    "RowGate",
    "RowStatistics",
    "RowSum",
    "RunningSum",
    "Sigmoid",
    "Sign",
    "SlidingWindow",
    "Taylor",
    "ValueGate",
    "VisibleKeys",
    "Window",
    "choice",
    "flag",
    "number",
    "numbers",
    "parse",
    "positive",
    "register",
    "whole",
]
