"""Dataclasses as JSON and back."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maclaurin import InputError
from maclaurin.plain_data import (
    finite,
    from_plain,
    read_json,
    read_or_none,
    read_record,
    significant,
    to_plain,
    write_json,
)


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


# ------------------------------------------------------------------------------------------ files


def test_a_record_is_read_as_it_was_written(tmp_path):
    tree = Tree({1: 0.5}, (Leaf(1.0, ("größe",)), Twig(2)), Leaf(3.0))
    write_json(tmp_path / "tree.json", tree, 7)
    assert json.loads((tmp_path / "tree.json").read_text("utf-8"))["schema"] == 7
    assert read_record(Tree, tmp_path / "tree.json", 7, "a tree", missing="none") == tree


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not a tree: it is not JSON .* Plant one"),
        ("[]", "is not a tree: it has no schema number. Plant one"),
        ('{"schema": 6}', "has schema 6, but .* reads schema 7 of a tree. Let it grow. Plant one"),
        ('{"schema": 7, "colour": 1}', "does not have the form of a tree .* Plant one"),
    ],
)
def test_another_file_is_one_clear_error(tmp_path, text, words):
    (tmp_path / "tree.json").write_text(text)
    given = {"missing": "none here", "advice": " Plant one.", "older": {6: " Let it grow."}}
    with pytest.raises(InputError, match=words):
        read_record(Tree, tmp_path / "tree.json", 7, "a tree", **given)
    with pytest.raises(InputError, match="none here"):
        read_record(Tree, tmp_path / "other.json", 7, "a tree", **given)


def test_numbers_that_are_not_finite_become_null():
    assert finite({"a": [1.23456, float("nan")], "b": (float("inf"), 3)}, 3) == {
        "a": [1.23, None],
        "b": [None, 3],
    }


def test_rounding_includes_whole_numbers_that_a_page_cannot_hold_exactly():
    assert finite([12345678, 5 * 10**30 + 1, True], 3) == [12345678, 5e30, True]
    assert finite(5 * 10**30 + 1) == 5 * 10**30 + 1
    assert significant(0.0123456, 3) == 0.0123
    assert significant(0.0, 3) == 0.0


def test_a_value_of_another_form_is_none(tmp_path):
    file = tmp_path / "a.json"
    assert read_or_none(Twig, file) is None
    for other in ("{", "[]", "null", '{"width": 3}', '{"length": 3, "width": 4}'):
        file.write_text(other)
        assert read_or_none(Twig, file) is None
    write_json(file, Twig(3))
    assert read_or_none(Twig, file) == Twig(3)


def test_a_check_of_the_plain_data_may_reject_them(tmp_path):
    def require_version(data):
        if data.pop("version") != 2:
            raise ValueError("another version")

    file = tmp_path / "a.json"
    for version, expected in ((1, None), (2, Twig(3))):
        write_json(file, {"version": version, "length": 3})
        assert read_or_none(Twig, file, require_version) == expected


def test_a_json_file_that_cannot_be_read_is_none(tmp_path):
    file = tmp_path / "a.json"
    assert read_json(file) is None
    for broken in (b'{"half', b"\xff\xfe"):
        file.write_bytes(broken)
        assert read_json(file) is None
    write_json(file, {"é": [1, (2, 3)]}, indent=None)
    assert file.read_text(encoding="utf-8") == '{"é":[1,[2,3]]}\n'
    assert read_json(file) == {"é": [1, [2, 3]]}


def test_numbers_that_are_not_finite_are_refused_on_request(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", [float("inf")], allow_nan=False)
    assert not (tmp_path / "a.json").exists()
