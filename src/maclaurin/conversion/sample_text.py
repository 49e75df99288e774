"""Sample text for a conversion, as tokens: a file, or the test documents of data=stdlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maclaurin.conversion.conversion_record import SampleSettings
from maclaurin.data.data_config import stdlib_test_documents
from maclaurin.errors import InputError
from maclaurin.inspection.contexts import read_contexts


def calibration_and_held_out(sample: SampleSettings, model: Any, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Tokens to calibrate on, and the tokens after them to measure on.

    Both get all they need if the text is long enough; otherwise calibration gets at least half of it.
    """
    wanted, measured = sample.calibration_tokens, max([sample.tokens, *sample.lengths])
    file = None if sample.text is None else Path(sample.text)
    tokens = tokens_of(tokenizer, file, wanted + measured, model.config.vocab_size)
    number = tokens.numel()
    if number < 4:
        raise InputError(f"the sample text has {number} tokens: too few to measure anything on.")
    cut = min(wanted, max(number // 2, number - measured))
    return tokens[:cut], tokens[cut:]


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
