"""Student's t and Fisher's F against printed tables and closed forms."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maclaurin.report.distributions import f_tail, incomplete_beta, t_cdf, t_quantile

#: two-sided 95 % and 99 % points, as tables print them
TABLE = [
    (0.975, 1, 12.706204736), (0.975, 2, 4.302652730), (0.975, 3, 3.182446305), (0.975, 4, 2.776445105),
    (0.975, 5, 2.570581836), (0.975, 10, 2.228138852), (0.975, 20, 2.085963447), (0.975, 30, 2.042272456),
    (0.975, 120, 1.979930405), (0.995, 1, 63.656741163), (0.995, 2, 9.924843201), (0.995, 5, 4.032142984),
    (0.995, 10, 3.169272673), (0.995, 30, 2.749995654), (0.95, 7, 1.894578605),
]  # fmt: skip


@pytest.mark.parametrize(("p", "df", "expected"), TABLE)
def test_quantiles_are_those_of_the_tables(p, df, expected):
    assert t_quantile(p, df) == pytest.approx(expected, abs=1e-6)


def test_one_and_two_degrees_of_freedom_have_closed_forms():
    for t in (-7.0, -0.3, 0.0, 0.5, 2.0, 40.0):
        assert t_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-12)
        assert t_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-12)


def test_f_with_two_degrees_of_freedom_above_has_a_closed_form():
    for f, df in ((0.0, 5), (0.7, 3), (4.0, 10), (55.0, 24)):
        assert f_tail(f, 2, df) == pytest.approx((1 + 2 * f / df) ** (-df / 2), rel=1e-10)
    assert f_tail(math.inf, 3, 4) == 0.0


@given(t=st.floats(0.0, 50.0), df=st.integers(1, 200))
def test_f_with_one_degree_of_freedom_above_is_t_squared(t, df):
    assert f_tail(t * t, 1, df) == pytest.approx(2 * (1 - t_cdf(t, df)), abs=1e-9)


@given(p=st.floats(0.001, 0.999), df=st.integers(1, 300))
def test_quantile_undoes_cdf(p, df):
    assert t_cdf(t_quantile(p, df), df) == pytest.approx(p, abs=1e-10)


@given(x=st.floats(0.0, 1.0), a=st.floats(0.5, 60.0), b=st.floats(0.5, 60.0))
def test_incomplete_beta_is_a_probability_and_mirrors(x, a, b):
    value = incomplete_beta(x, a, b)
    assert -1e-12 <= value <= 1 + 1e-12
    assert value == pytest.approx(1 - incomplete_beta(1 - x, b, a), abs=1e-7)


@pytest.mark.parametrize(("function", "argument"), [(t_quantile, 0.0), (t_quantile, 1.0)])
def test_no_quantile_of_certainty(function, argument):
    with pytest.raises(ValueError, match="0 < p < 1"):
        function(argument, 3)
