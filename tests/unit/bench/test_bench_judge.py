"""A wrong result is seen to be wrong, however small the place."""

import math

import pytest
import torch
from tests.unit.bench.tiny import SETTING

from maclaurin import parse
from maclaurin.bench.judge import (
    Errors,
    error_of_rows,
    errors_of_piece,
    exact_row,
    piece_of,
    rows_to_check,
)
from maclaurin.testing import relative_error
from maclaurin.testing.cases import Shape, draw_direction, draw_inputs
from maclaurin.testing.tolerances import TOLERANCE_BEFORE_TIMING

SPECS = [
    "exp/sum",
    "exp/len*out",
    "exp(clamp=5)/len",
    "exp*forget/sum",
    "poly(0)+window(16)/sum",
    "sigmoid(-6.93)",
    "taylor(2)/sum",
    "taylor(3)/l2",
    "linear(identity)",
]


def inputs_of(notation, tokens=150):
    return draw_inputs(parse(notation), Shape(3, tokens, 2, 1, 8, 6), torch.float32, SETTING.device)


@pytest.mark.parametrize("notation", SPECS)
def test_a_row_made_of_its_query_and_keys_is_the_row_of_the_whole(notation):
    case = inputs_of(notation)
    whole = case.map(torch.Tensor.double).output(form="parallel")
    for t in rows_to_check(150):
        assert relative_error(exact_row(case, case.spec, 1, t), whole[1, t]) < 1e-12


@pytest.mark.parametrize("notation", SPECS)
def test_right_results_pass_in_output_and_every_gradient(notation):
    case = inputs_of(notation)
    assert error_of_rows(case, case.spec, case.output()) < TOLERANCE_BEFORE_TIMING[torch.float32]
    piece = case.map(lambda t: piece_of(t, 64, 2))
    direction = piece_of(draw_direction(Shape(3, 150, 2, 1, 8, 6), torch.float32, SETTING.device), 64, 2)
    errors = errors_of_piece(piece, direction, lambda c: c.output())
    assert set(errors) == {"output", *(f"gradient of {name}" for name in case.tensors)}
    assert Errors(errors).within(torch.float32)


@pytest.mark.parametrize("place", [(0, 0), (0, 149), (2, 75), (2, 149)])
def test_one_wrong_row_is_enough(place):
    """The last row of a text is far smaller than the first: it must not hide behind it."""
    case = inputs_of("exp/sum")
    y = case.output()
    y[place] *= 1 + 1e-3
    assert error_of_rows(case, case.spec, y) == pytest.approx(1e-3, rel=0.1)


def test_non_finite_values_are_detected():
    case = inputs_of("exp/sum")
    y = case.output()
    y[1, 3, 0, 0] = math.nan
    assert error_of_rows(case, case.spec, y) == math.inf


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u):
        return u.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.01


def test_a_gradient_that_is_wrong_alone_is_found_and_named():
    case = inputs_of("exp/sum").map(lambda t: piece_of(t, 32, 2))
    direction = torch.randn(2, 32, 2, 6)
    errors = errors_of_piece(
        case, direction, lambda c: c.with_tensors(v=_WrongBackward.apply(c.tensors["v"])).output()
    )
    assert errors["output"] < 1e-6
    assert Errors(errors).worst == "gradient of v"
    assert Errors(errors).largest == pytest.approx(0.01, rel=0.01)
    assert not Errors(errors).within(torch.float32)
