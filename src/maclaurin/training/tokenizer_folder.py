"""The tokenizer of a run's text beside its weights, so that the run is an ordinary model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers

from maclaurin.data.source import Source
from maclaurin.data.text_source import TextSource
from maclaurin.data.text_tokenizers import BytePairs, Bytes, HubTokenizer, Tokenizer
from maclaurin.models import MaclaurinForCausalLM
from maclaurin.models.tokenizer_folder import (
    as_fast_tokenizer,
    byte_tokenizer,
    end_texts_with,
    save_tokenizer,
)


def keep_tokenizer(source: Source, model: MaclaurinForCausalLM, folder: Path) -> None:
    """Write the tokenizer, and tell the model which token ends a text; tasks have neither."""
    if not isinstance(source, TextSource):
        return
    tokenizer = _as_transformers_has_it(source.tokenizer)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
        end_texts_with(model, source.tokenizer.separator)


def _as_transformers_has_it(tokenizer: Tokenizer) -> Any | None:
    if isinstance(tokenizer, Bytes):
        return as_fast_tokenizer(byte_tokenizer())
    if isinstance(tokenizer, BytePairs):
        return as_fast_tokenizer(tokenizers.Tokenizer.from_str(tokenizer.serialized))
    return tokenizer.transformers_tokenizer if isinstance(tokenizer, HubTokenizer) else None
