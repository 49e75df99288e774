"""Fixtures of the report's tests."""

import pytest


@pytest.fixture(scope="package", autouse=True)
def _fast_multiple_tests():
    """statsmodels collects garbage at every correction, which properties tested a thousand times feel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gc.collect", lambda *_: 0)
        yield
