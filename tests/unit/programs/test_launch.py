"""Launches that are kept: what finds a compiled kernel again, and what does not."""

import pytest
import torch

from maclaurin.programs.triton import INSTALLED, INTERPRETED

if not INSTALLED or INTERPRETED:
    pytest.skip("needs triton, not interpreted", allow_module_level=True)

import triton

from maclaurin.programs.triton import launch


@triton.jit
def _nothing(X, Y, n):
    pass


class Kernel:
    """A compiled kernel that records what it is started with, directly or through triton's hooks."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.started, self.watched = [], []

    def run(self, x, y, z, stream, function, metadata, of_launch, enter, leave, *arguments):
        assert (function, metadata) == (self.function, self.packed_metadata)
        assert of_launch is enter is leave is None
        self.started.append(((x, y, z), arguments))

    def __getitem__(self, grid):
        return lambda *arguments, stream: self.watched.append((grid, arguments))


@pytest.fixture
def compiled(monkeypatch):
    """(kernel, arguments of every first launch)."""
    kernel, firsts = Kernel(), []

    def first_launch(self, grid, arguments, options):
        firsts.append(arguments)
        return kernel, tuple(options.values())

    monkeypatch.setattr(launch.Launched, "first_launch", first_launch)
    monkeypatch.setattr(launch, "current_gpu", lambda: 0)
    monkeypatch.setattr(launch, "_stream", lambda device: 0)
    return kernel, firsts


def test_a_prepared_launch_is_compiled_once_and_started_with_addresses_numbers_and_constants(compiled):
    kernel, firsts = compiled
    start = launch.prepared(launch.launched(_nothing), (3,), (7,), {"BLOCK": 64})
    x = torch.zeros(32)
    for _ in range(3):
        start(x, None)
    assert len(firsts) == 1
    assert kernel.started == [((3, 1, 1), (x.data_ptr(), None, 7, 64))] * 2


def test_a_launch_with_all_its_arguments_is_compiled_once_per_numbers_and_options(compiled):
    kernel, firsts = compiled
    nothing, x = launch.launched(_nothing), torch.zeros(32)
    for n, block in ((7, 64), (7, 64), (8, 64), (7, 32), (7, 64)):
        nothing[(3,)](x, None, n, BLOCK=block)
    assert len(firsts) == 3
    assert kernel.started == [((3, 1, 1), (x.data_ptr(), None, 7, 64))] * 2


def test_a_profiler_sees_every_launch(compiled, monkeypatch):
    kernel, _ = compiled
    start = launch.prepared(launch.launched(_nothing), (3,), (7,), {})
    x = torch.zeros(32)
    start(x, None)
    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [print])
    start(x, None)
    assert kernel.watched == [((3, 1, 1), (x.data_ptr(), None, 7))]
    assert kernel.started == []


def test_other_dtypes_and_alignments_are_other_kernels(compiled):
    _, firsts = compiled
    start = launch.prepared(launch.launched(_nothing), (3,), (7,), {})
    x = torch.zeros(32)
    for given in (x, x.to(torch.bfloat16), x[1:], x[4:]):  # the last begins at 16 bytes again
        start(given, x)
    assert len(firsts) == 3


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 1), (7,), (2, 1, 3)])
def test_a_new_tensor_lies_as_its_layout_says(shape):
    found = launch.Layout.contiguous(shape, torch.float32)
    assert found == launch.Layout.of(torch.empty(shape))
