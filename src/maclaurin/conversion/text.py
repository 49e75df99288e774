"""Sample text as tokens: a file's, or the source text of Python's standard library."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maclaurin.errors import InputError


def tokens_of(tokenizer: Any, file: Path | None, needed: int) -> Tensor:
    """At least two tokens, and no more than `needed` if the text has so many: [T]."""
    text = _read(file) if file is not None else _standard_library(needed)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) < 2:
        raise InputError(f"{file} has {len(ids)} tokens; a sample needs two at least.")
    return torch.tensor(ids[:needed])


def rows_of(tokens: Tensor, length: int, rows: int) -> Tensor:
    """[rows, length] from the front, fewer rows if the text ends before."""
    length = min(length, tokens.numel())
    count = max(1, min(rows, tokens.numel() // length))
    return tokens[: count * length].view(count, length)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:
        raise InputError(f"there is no text file {file}.") from None
    except UnicodeDecodeError:
        raise InputError(f"{file} is not UTF-8 text.") from None


def _standard_library(needed: int) -> str:
    """The prose of docstrings and comments is as good a sample as any that is on every machine."""
    from maclaurin.data.corpora.stdlib import StandardLibrary

    pieces: list[str] = []
    size = 0
    for document in _documents(StandardLibrary()):
        pieces.append(document)
        size += len(document)
        if size > 8 * needed:  # a token is rarely longer than eight characters
            break
    return "\n".join(pieces)


def _documents(corpus: Any) -> Iterable[str]:
    for document in corpus.documents():
        yield document if isinstance(document, str) else document.text
