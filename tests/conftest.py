"""Shared settings: the same examples in every run, warnings about series kept out of the way."""

import gc
import warnings

import pytest
import torch
from hypothesis import settings

from maclaurin import SeriesNotice
from maclaurin.spec import part

settings.register_profile("steady", derandomize=True, database=None)
settings.load_profile("steady")
torch.set_num_threads(1)  # the tests themselves run side by side


@pytest.fixture(autouse=True)
def _quiet_and_seeded():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SeriesNotice)
        yield


@pytest.fixture
def built_in_parts(monkeypatch):
    """The library's own parts alone, whatever other tests have registered."""
    own = {
        family: {name: known for name, known in parts.items() if known.__module__.startswith("maclaurin.")}
        for family, parts in part._registry.items()
    }
    monkeypatch.setattr(part, "_registry", own)


def pytest_collection_modifyitems(config, items):
    """Without a GPU its tests are left out, rather than skipped one by one."""
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_collection_finish():
    """Freeze imported objects: scanning them cost 5 %."""
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


def pytest_addoption(parser):
    parser.addoption(
        "--rewrite-golden", action="store_true", help="rewrite golden files instead of comparing"
    )
