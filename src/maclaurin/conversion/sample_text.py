"""Sample text for a conversion, as tokens: a file, or the test documents of data=stdlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maclaurin.data.data_config import stdlib_test_documents
from maclaurin.inspection.contexts import read_contexts


def tokens_of(tokenizer: Any, file: Path | None, needed: int, vocabulary: int) -> Tensor:
    """The first `needed` tokens of the text, or all if there are fewer: [T]."""
    if file is not None:
        return read_contexts(file, tokenizer, needed, max(needed, 2), vocabulary).tokens
    return torch.tensor(tokenizer(_held_out(needed), add_special_tokens=False)["input_ids"][:needed])


def rows_of(tokens: Tensor, length: int, rows: int) -> Tensor:
    """The first tokens as [rows, length]; fewer rows if the text is too short."""
    length = min(length, tokens.numel())
    count = max(1, min(rows, tokens.numel() // length))
    return tokens[: count * length].view(count, length)


def _held_out(needed: int) -> str:
    """Documents that no run with data=stdlib trains on, enough for `needed` tokens."""
    pieces: list[str] = []
    for text in stdlib_test_documents():
        pieces.append(text)
        if sum(map(len, pieces)) > 8 * needed:  # a token is rarely longer than eight characters
            break
    return "\n".join(pieces)
