"""Parts of one's own on the fused programs: computed as defined, or left to plain torch."""

from dataclasses import dataclass

import pytest
import torch

import maclaurin
from maclaurin import parse
from maclaurin.spec import (
    Argument,
    DecayGate,
    Denominator,
    Kernel,
    Polynomial,
    Recipe,
    Sign,
    register,
)
from maclaurin.spec.feature_map import read_feature_map
from maclaurin.testing import Shape, random_tensors, relative_error
from tests.kernels.judging import plain


@register
@dataclass(frozen=True, slots=True)
class Seeping(DecayGate):
    """f_r = 1/(1 + e^{g_r}): in bf16, 1 + e^g is 1 for g below −5.5."""

    notation = "seeping"
    argument = Argument("seeping", symbol="g_r", tokens="key", heads="key", recipe=Recipe.LINEAR)

    def log_decay(self, gate):
        return -(1 + gate.exp()).log()

    def text(self, g):
        return f"1/(1 + exp({g}))"


@register
@dataclass(frozen=True, slots=True)
class DoubleSum(Denominator):
    """D_t = 2 Σ_s w_ts: it ignores a factor on the row, but is not the row sum."""

    notation = "doublesum"
    uses_row_sum = True
    is_scaled = True
    ignores_row_scale = True

    def divisor(self, seen):
        return 2 * seen.scaled_row_sum

    def text(self, row_sum):
        return f"2·({row_sum})"


@register
@dataclass(frozen=True, slots=True)
class Bump(Kernel):
    """κ = 1/(1 + (x − 1)²): a tail without a finite state."""

    notation = "bump"
    sign = Sign.POSITIVE
    expands_exp = True

    def weight(self, x, statistics=None):
        return 1 / (1 + (x - 1).square())

    def text(self, x):
        return f"1/(1 + ({x} − 1)^2)"


@register
@dataclass(frozen=True, slots=True)
class Tripled(Polynomial):
    """κ = 3 φ(q)·φ(k)"""

    notation = "tripled"
    series = (0.0, 3.0)
    feature_map = read_feature_map("relu")


@pytest.mark.parametrize("form", ["parallel", "chunked"])
@pytest.mark.parametrize("notation", ["linear(relu)*seeping/len", "linear(relu)*forget*seeping/len"])
def test_a_decay_is_computed_in_the_working_dtype(notation, form, device):
    shape = Shape(batch=1, tokens=256, kv_heads=1, group=1, d=16, e=16)
    case = random_tensors(parse(notation), shape, 0, torch.float32, device=device)
    changed = {"seeping": (0.3 * case.tensors["seeping"] - 6).bfloat16()}
    if "log_forget" in case.tensors:
        changed["log_forget"] = (case.tensors["log_forget"] / 100).bfloat16()
    case = case.with_tensors(**changed, v=case.tensors["v"].abs())
    expected = plain(case.map(torch.Tensor.double))
    assert_fused(case, form)
    assert relative_error(case.output(form=form), expected) < 1e-5


@pytest.mark.parametrize(
    ("notation", "form"),
    [
        ("exp/doublesum", "parallel"),
        ("exp(clamp=2)/doublesum", "parallel"),
        ("exp*forget/doublesum", "parallel"),
        ("taylor(2)/doublesum", "parallel"),
        ("taylor(2)/doublesum", "chunked"),
        ("taylor(2,about=mean)/doublesum", "parallel"),
        ("taylor(2,about=mean)+window(4)/doublesum", "chunked"),
        ("poly(0)+window(4,sinks=1)/doublesum", "parallel"),
        ("poly(0)+window(4,kept=3)/doublesum", "chunked"),
        ("bump+window(4,sinks=1)/sum", "parallel"),
        ("bump+window(4,sinks=1)/sum", "blocked"),
        ("bump+window(4,kept=3)/sum", "parallel"),
        ("bump+window(4,kept=3)/sum", "auto"),
        ("tripled/len", "parallel"),
        ("tripled/len", "chunked"),
    ],
)
def test_no_program_takes_a_part_for_another(notation, form, device):
    shape = Shape(batch=1, tokens=40, kv_heads=1, group=2, d=16, e=16)
    case = random_tensors(parse(notation), shape, 0, torch.float32, device=device)
    expected = plain(case.map(torch.Tensor.double))
    with torch.no_grad():
        assert relative_error(case.output(form=form), expected) < 1e-5


@pytest.mark.parametrize(
    "notation", ["exp/doublesum", "poly(0)+window(8)/doublesum", "poly(0)+window(8,kept=2)/doublesum"]
)
def test_one_query_or_one_step_divides_by_ones_own_denominator(notation, device):
    shape = Shape(batch=1, tokens=20, kv_heads=1, group=2, d=16, e=16)
    case = random_tensors(parse(notation), shape, 0, torch.float32, device=device)
    expected = plain(case.map(torch.Tensor.double))[:, -1:]
    q, k, v = (case.tensors[name] for name in "qkv")
    with torch.no_grad():
        if not case.spec.has_finite_state:
            found = maclaurin.attention(q[:, -1:], k, v, case.spec)
        else:
            state = case.tokens(0, 19).state()
            found = maclaurin.attention(q[:, -1:], k[:, -1:], v[:, -1:], case.spec, state=state)
    assert relative_error(found, expected) < 1e-5


def assert_fused(case, form):
    tensors = [case.tensors[name] for name in "qkv"]
    found = maclaurin.plan(*tensors, case.spec, form=form)
    assert found.backend == "triton", str(found)
