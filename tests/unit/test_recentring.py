"""Moments about another point are the moments of keys moved there."""

import pytest
import torch

from maclaurin.forms.features import moments_about, symmetric_powers


@pytest.mark.parametrize("orders", [(0, 1), (0, 1, 2)])
def test_moments_of_moved_keys(orders):
    torch.manual_seed(0)
    k, v, c = (torch.randn(2, 3, *size, dtype=torch.float64) for size in ((9, 5), (9, 4), (5,)))

    def moments(keys):
        return symmetric_powers(keys, orders).mT @ v

    moved = moments_about(moments(k), c)
    torch.testing.assert_close(moved, moments(k - c[:, :, None]))
    torch.testing.assert_close(moments_about(moved, -c), moments(k))
