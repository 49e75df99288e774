"""Sample text as tokens: a file's, or what runs on the standard library only test on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maclaurin.data.corpus import StandardLibrary
from maclaurin.data.data_config import DataConfig
from maclaurin.data.splits import hash_share
from maclaurin.inspection.contexts import read_contexts


def tokens_of(tokenizer: Any, file: Path | None, needed: int, vocabulary: int) -> Tensor:
    """The first `needed` tokens, or as many as there are: [T]."""
    if file is not None:
        return read_contexts(file, tokenizer, needed, max(needed, 2), vocabulary).tokens
    return torch.tensor(tokenizer(_held_out(needed), add_special_tokens=False)["input_ids"][:needed])


def rows_of(tokens: Tensor, length: int, rows: int) -> Tensor:
    """[rows, length] from the front, fewer rows if the text ends before."""
    length = min(length, tokens.numel())
    count = max(1, min(rows, tokens.numel() // length))
    return tokens[: count * length].view(count, length)


def _held_out(needed: int) -> str:
    """Documents that no run with data=stdlib trains on, enough of them for so many tokens."""
    pieces: list[str] = []
    for document in StandardLibrary().documents():
        if hash_share(document.text) < DataConfig.test_fraction:
            pieces.append(document.text)
            if sum(map(len, pieces)) > 8 * needed:  # a token is rarely longer than eight characters
                break
    return "\n".join(pieces)
