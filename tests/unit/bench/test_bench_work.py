"""Operations and bytes, counted once more by hand."""

import pytest

from maclaurin import parse
from maclaurin.bench.bench_record import Size
from maclaurin.bench.workloads import work_of_call, work_of_step

SIZE = Size.of(2, 3, 10, 4, 5)


@pytest.mark.parametrize(
    ("notation", "form", "pairs"),
    [
        ("exp/sum", "parallel", 55),
        ("exp(clamp=5)/len", "blocked", 55),
        ("taylor(2)/sum", "parallel", 55),
        ("poly(0)+window(3)/sum", "parallel", 1 + 2 + 8 * 3),
        ("poly(0)+window(3)/sum", "chunked", 1 + 2 + 8 * 3),
        ("poly(0)+window(30)/sum", "chunked", 55),
    ],
)
def test_every_pair_that_is_weighed(notation, form, pairs):
    assert work_of_call(parse(notation), form, SIZE, 2).flops == 2 * 2 * 3 * pairs * (4 + 5)


@pytest.mark.parametrize(
    ("notation", "features", "columns"), [("taylor(2)/sum", 15, 6), ("linear(identity)", 4, 5)]
)
def test_a_state_is_written_and_read_by_every_token(notation, features, columns):
    spec = parse(notation)
    flops = 4 * features * columns * 2 * 3
    assert work_of_call(spec, "chunked", SIZE, 2).flops == 10 * flops
    step = work_of_step(spec, Size.of(2, 3, 1, 4, 5), 2)
    assert step.flops == flops
    assert step.moved_bytes == 2 * 4 * (2 * 3 * features * columns) + 2 * 2 * 3 * (4 + 4 + 5 + 5)


def test_bytes_are_those_of_inputs_and_outputs():
    assert work_of_call(parse("exp/sum"), "parallel", SIZE, 2).moved_bytes == 2 * 60 * 18
    assert work_of_call(parse("exp*forget/sum"), "parallel", SIZE, 2).moved_bytes == 2 * 60 * 19
