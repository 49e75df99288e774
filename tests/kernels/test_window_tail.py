"""A window beside a polynomial tail on the fused programs, judged against float64."""

import pytest
import torch

from maclaurin import parse
from maclaurin.testing import Shape, random_tensors
from tests.kernels.conftest import ON_GPU
from tests.kernels.judging import assert_as_right_as_plain

SPECS = [
    "taylor(2,about=mean)+window(16,sinks=1)/sum",
    "taylor(2)+window(16)/sum",
    "taylor(1,about=mean)+window(7,sinks=3)/sum",
    "taylor(2,about=mean)+window(16,sinks=1)/l2",
    "taylor(2)+window(9,sinks=2)/sum*out",
]


@pytest.mark.parametrize("notation", SPECS)
def test_every_kind_of_spec_with_grouped_heads_and_odd_sizes(notation, dtype, device, poisoned):
    shape = Shape(batch=1, tokens=300 if ON_GPU else 70, kv_heads=1, group=2, d=24, e=20)
    assert_as_right_as_plain(
        parse(notation), shape, dtype, device, "triton", form="chunked", chunk_size=64, size=0.7
    )


@pytest.mark.parametrize("tokens", [1, 8, 9, 10, 11])
def test_texts_as_long_as_the_window(tokens, dtype, device, poisoned):
    shape = Shape(batch=2, tokens=tokens, kv_heads=1, group=1, d=24, e=16)
    spec = parse("taylor(2,about=mean)+window(8,sinks=1)/sum")
    assert_as_right_as_plain(spec, shape, dtype, device, "triton", form="chunked")


def test_a_tail_whose_sum_may_vanish_stays_with_the_plain_form(device):
    shape = Shape(batch=1, tokens=40, kv_heads=1, group=1, d=24, e=16)
    case = random_tensors(parse("taylor(1)+window(8)/l2"), shape, 0, torch.float32, device=device)
    assert bool(case.output(form="chunked").isfinite().all())
