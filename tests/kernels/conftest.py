"""Fused programs: on a GPU where there is one, else in triton's interpreter (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

ON_GPU = torch.cuda.is_available()
INTERPRETED = not ON_GPU and os.environ.get("TRITON_INTERPRET") == "1"


if not (ON_GPU or INTERPRETED):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(params=["float32", "float16", *(["bfloat16"] if ON_GPU else [])])
def dtype(request):
    """bf16 products are silently wrong in the interpreter, so they are tested on a GPU only."""
    return getattr(torch, request.param)


@pytest.fixture(scope="session")
def device():
    return "cuda" if ON_GPU else "cpu"


@pytest.fixture
def poisoned():
    """Memory that nobody has written holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)
