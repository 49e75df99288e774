"""Fused programs: on a GPU where there is one, else in triton's interpreter (TRITON_INTERPRET=1)."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

ON_GPU = torch.cuda.is_available()
INTERPRETED = not ON_GPU and os.environ.get("TRITON_INTERPRET") == "1"


if not (ON_GPU or INTERPRETED):
    collect_ignore_glob = ["test_*.py"]
if INTERPRETED:
    from tests.kernels import quick_interpreter

    quick_interpreter.install()


#: tests that take minutes in the interpreter → how many of their fp32 cases run in `make test`; None for all
MINUTES_IN_INTERPRETER = {
    "test_linear_time": 6,
    "test_every_kind_of_spec_with_grouped_heads_and_odd_sizes": 8,
    "test_every_pair": 6,
    "test_softmax_with_a_score_mod": 8,
    "test_chunks": 3,
    "test_heads_of_order_3": 1,
    "test_every_query_reads_the_whole_text": 6,
    "test_later_tokens_do_not_change_earlier_rows": 6,
    "test_every_sequence_about_the_mean": 2,
    "test_every_sequence_is_as_if_alone": None,
    "test_every_sequence_of_exp": 6,
    "test_other_lengths": 18,
    "test_without_a_causal_mask": None,
    "test_no_value_of_a_sequence_reaches_another": 5,
    "test_a_text_that_goes_on_from_a_state": 1,
    "test_a_text_in_pieces_gives_what_the_whole_gives_with_all_gradients": 1,
    "test_token_by_token": 12,
    "test_states_of_padded_rows_are_those_of_each_row_alone": 3,
    "test_a_text_in_pieces_is_the_whole_text": 5,
    "test_padded_pieces_continue_from_texts_of_different_lengths": 3,
    "test_operator_is_registered_as_torch_wants_it": 1,
}
#: files whose check of an operator runs only on a GPU and in `make test-all`: it takes 5 to 11 seconds
LONG_CHECKS = ("test_linear_time", "test_packed")
#: files of which every case runs in `make test`: none takes a second
SHORT_FILES = ("test_quadratic_polynomial",)


def assert_names_exist():
    """The tables above name files and tests; a name without one has no effect."""
    files = {file.stem: file.read_text() for file in Path(__file__).parent.glob("test_*.py")}
    tests = {name for text in files.values() for name in re.findall(r"^def (test_\w+)", text, re.M)}
    assert not {*LONG_CHECKS, *SHORT_FILES} - files.keys()
    assert not MINUTES_IN_INTERPRETER.keys() - tests


def pytest_collection_modifyitems(items):
    """Leave to `make test-all` what takes long in the interpreter: most shapes of long tests, and fp16."""
    assert_names_exist()
    if ON_GPU:
        return
    seen = Counter()
    for item in items:
        if item.path.parent != Path(__file__).parent:  # pytest passes the tests of all folders
            continue
        name = getattr(item, "originalname", item.name)
        if name == "test_operator_is_registered_as_torch_wants_it" and item.path.stem in LONG_CHECKS:
            item.add_marker(pytest.mark.exhaustive)
        if name not in MINUTES_IN_INTERPRETER or item.path.stem in SHORT_FILES:
            continue
        given = item.callspec.params if hasattr(item, "callspec") else {}
        half = given.get("dtype") in ("float16", torch.float16, torch.bfloat16) or given.get("e") == 32
        seen[item.path.stem, name] += not half
        most = MINUTES_IN_INTERPRETER[name]
        if half or (most is not None and seen[item.path.stem, name] > most):
            item.add_marker(pytest.mark.exhaustive)


@pytest.fixture(params=["float32", "float16", *(["bfloat16"] if ON_GPU else [])])
def dtype(request):
    """bf16 products are silently wrong in the interpreter, so they are tested on a GPU only."""
    return getattr(torch, request.param)


@pytest.fixture(scope="session")
def device():
    return "cuda" if ON_GPU else "cpu"


@pytest.fixture
def poisoned():
    """Uninitialised memory holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def settings(monkeypatch):
    """Change constants of a kernel's module: `settings(program, BLOCK=4)`."""
    from maclaurin.programs.triton.launch import forget_launches

    def change(module, **values):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
        forget_launches()

    yield change
    monkeypatch.undo()
    forget_launches()
