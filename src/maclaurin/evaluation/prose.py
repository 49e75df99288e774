"""Running text out of source code: the paragraphs of docstrings, without examples and tables."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator

#: a paragraph is prose if this share of its characters are letters and spaces
LETTERS = 0.9


def docstrings(sources: Iterable[str]) -> Iterator[str]:
    """The prose of each docstring, one line per paragraph; docstrings without any are left out."""
    for source in sources:
        for text in _documented(source):
            if prose := "\n".join(_paragraphs(text)):
                yield prose


def _documented(source: str) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        line = " ".join(paragraph.split())
        if len(line.split()) >= 8 and ">>>" not in line and _share_of_letters(line) >= LETTERS:
            yield line


def _share_of_letters(line: str) -> float:
    return sum(letter.isalpha() or letter == " " for letter in line) / len(line)
