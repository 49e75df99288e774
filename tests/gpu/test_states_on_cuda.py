"""States of texts and steps from states with large heads, in bf16, against float64."""

from itertools import accumulate, pairwise

import pytest
import torch

from maclaurin import parse, plan
from maclaurin.spec.polynomials import number_of_multisets
from maclaurin.testing.cases import Shape, random_tensors

pytestmark = pytest.mark.gpu

#: programs that compute the moments of a text on a GPU, and the one that adds a token
STEPS = {
    "taylor(2)/sum": ("linear time", "state step"),
    "taylor(2,about=mean)/sum": ("tail in chunks", "state step"),
    "taylor(2,about=mean)+window(40,sinks=1)/sum": ("tail in chunks", "window step"),
}
#: head size, tokens, key-value heads: few heads are computed two blocks at a time, many four
SHAPES = [
    (64, 301, 2),
    (96, 191, 2),
    (128, 191, 2),
    (128, 300, 2),
    (128, 700, 2),
    (128, 191, 16),
    (128, 1025, 16),
]


def off(found, expected):
    """The relative error, by the norm."""
    return float((found.double() - expected).norm() / expected.norm())


def case_of(notation, d, tokens, kv_heads):
    shape = Shape(batch=1, tokens=tokens, kv_heads=kv_heads, group=4, d=d, e=d)
    return random_tensors(parse(notation), shape, 0, torch.bfloat16, device="cuda")


@pytest.mark.parametrize("notation", STEPS)
@pytest.mark.parametrize(("d", "tokens", "kv_heads"), SHAPES)
@torch.no_grad()
def test_the_state_of_a_text(notation, d, tokens, kv_heads):
    case = case_of(notation, d, tokens, kv_heads)
    q, k, v = (case.tensors[name] for name in "qkv")
    assert plan(q, k, v, case.spec, return_state=True).program.name == STEPS[notation][0]
    _, state = case(return_state=True)
    _, expected = case.map(lambda u: u.double())(return_state=True, form="chunked")
    stop = list(accumulate(number_of_multisets(d, order) for order in case.spec.orders))
    for order, (a, b) in zip(case.spec.orders, pairwise([0, *stop]), strict=True):
        assert off(state.moments[:, :, a:b], expected.moments[:, :, a:b]) < 5e-3, f"order {order}"


@pytest.mark.parametrize("notation", STEPS)
@pytest.mark.parametrize(("d", "tokens", "kv_heads"), SHAPES)
@torch.no_grad()
def test_one_more_token_after_the_state_of_the_plain_form(notation, d, tokens, kv_heads):
    case = case_of(notation, d, tokens, kv_heads)
    before, last = case.map(lambda u: u[:, :-1]), case.map(lambda u: u[:, -1:])
    _, state = before(return_state=True, form="chunked")
    q, k, v = (last.tensors[name] for name in "qkv")
    assert plan(q, k, v, case.spec, state=state, return_state=True).program.name == STEPS[notation][1]
    y, _ = last(state=state, return_state=True)
    expected = case.map(lambda u: u.double())(form="parallel")[:, -1:]
    assert off(y, expected) < 1e-2
