"""Rows that benchmarks/memory.py trains on: facts are told before they are asked for."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

STOP, NEWLINE, NAMES, THINGS = 1, 2, 100, 200


@pytest.fixture(scope="module")
def memory():
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("memory")
    finally:
        sys.path.remove(folder)


@pytest.fixture
def facts(memory):
    names = np.arange(NAMES, NAMES + 40)
    return memory.Facts(
        {
            "facts_told": np.stack([np.full(40, 10), names, np.full(40, 11)], 1),
            "facts_asked": np.stack([np.full(40, NEWLINE), np.full(40, 10), names, np.full(40, 11)], 1),
            "facts_things": np.stack([np.arange(THINGS, THINGS + 40), np.full(40, -1)], 1),
            "facts_marks": np.array([STOP, NEWLINE]),
        }
    )


@pytest.mark.parametrize("reach", [300, 2000])
def test_every_answer_was_told_before_within_reach(memory, facts, reach):
    generator = torch.Generator().manual_seed(0)
    text = [STOP if n % 17 == 0 else 1000 + n for n in range(4096)]
    row, answers = memory.with_questions(text, facts, reach, generator)
    assert len(row) == 4096
    assert len(answers) >= 8
    for at in answers:
        name, thing = row[at - 2], row[at]
        told = [n for n in range(at - 4) if row[n] == thing and row[n - 2] == name]
        assert len(told) == 1
        assert at - told[0] < reach + 100
    left = [token for token in row if token >= 1000]
    assert left == [token for token in text if token >= 1000][: len(left)]  # the text is all there, in order


def test_copies_follow_what_they_copy(memory):
    row = memory.with_copies(list(range(1000)), 200, torch.Generator().manual_seed(0))
    assert len(row) == 1000
    again = sum(token in row[:n] for n, token in enumerate(row))
    assert again >= 400
