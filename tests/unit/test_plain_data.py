"""Dataclasses as JSON and back."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maclaurin.plain_data import from_plain, to_plain


@dataclass(frozen=True)
class Leaf:
    kind: ClassVar[str] = "leaf"
    size: float
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Twig:
    kind: ClassVar[str] = "twig"
    length: int


@dataclass(frozen=True)
class Tree:
    by_year: Mapping[int, float | None]
    parts: tuple[Leaf | Twig, ...]
    best: Leaf | None = None
    where: str = field(default="", compare=False)


leaves = st.builds(
    Leaf, st.floats(allow_nan=False, allow_infinity=False), st.lists(st.text(max_size=3)).map(tuple)
)
trees = st.builds(
    Tree,
    st.dictionaries(st.integers(0, 99), st.none() | st.floats(-1e6, 1e6), max_size=3),
    st.lists(leaves | st.builds(Twig, st.integers()), max_size=3).map(tuple),
    st.none() | leaves,
    st.text(max_size=3),
)


@given(trees)
def test_what_is_written_is_read(tree):
    assert from_plain(Tree, json.loads(json.dumps(to_plain(tree)))) == tree


def test_fields_left_out_of_comparisons_are_not_written():
    assert "where" not in to_plain(Tree({}, (), where="here"))


@pytest.mark.parametrize("data", [{}, {"by_year": {}}, {"by_year": {}, "parts": [], "more": 1}, []])
def test_missing_and_unknown_fields_are_errors(data):
    with pytest.raises(TypeError):
        from_plain(Tree, data)


def test_an_unknown_kind_is_an_error():
    with pytest.raises(KeyError):
        from_plain(Tree, {"by_year": {}, "parts": [{"kind": "root"}]})
