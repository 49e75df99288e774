"""The algebra as frozen data: kernel, gates, denominator, norm → AttentionSpec."""

from maclaurin.spec.attention_spec import AttentionSpec
from maclaurin.spec.denominator import Denominator, RowSum, RunningSum, VisibleKeys
from maclaurin.spec.feature_map import Cosine, Elu1, FeatureMap, Identity, Relu
from maclaurin.spec.kernel import (
    Exp,
    Hermite,
    Kernel,
    Linear,
    Poly,
    Polynomial,
    Power,
    Sigmoid,
    Taylor,
)
from maclaurin.spec.norm import L2, RMS, Layer, Norm
from maclaurin.spec.notation import parse
from maclaurin.spec.part import Part, choice, flag, number, numbers, register, whole
from maclaurin.spec.sign import Sign
from maclaurin.spec.window import Window

__all__ = [
    "L2",
    "RMS",
    "AttentionSpec",
    "Cosine",
    "Denominator",
    "Elu1",
    "Exp",
    "FeatureMap",
    "Hermite",
    "Identity",
    "Kernel",
    "Layer",
    "Linear",
    "Norm",
    "Part",
    "Poly",
    "Polynomial",
    "Power",
    "Relu",
    "RowSum",
    "RunningSum",
    "Sigmoid",
    "Sign",
    "Taylor",
    "VisibleKeys",
    "Window",
    "choice",
    "flag",
    "number",
    "numbers",
    "parse",
    "register",
    "whole",
]
