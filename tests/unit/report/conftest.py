"""Fixtures of the report's tests."""

import pytest


@pytest.fixture(scope="package", autouse=True)
def _fast_multiple_tests():
    """statsmodels runs gc on every correction, slowing property tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gc.collect", lambda *_: 0)
        yield
