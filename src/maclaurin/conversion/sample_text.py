"""Text for a conversion: sample text as tokens, and training text with recall and copying in it.

Sample text is a file, or the part of the standard library that runs use only for testing. Plain text rarely
depends on distant tokens, so training text is mixed:

    recall    four facts inside running text and a question for each, with its answer
              (evaluation/needles.py, from a seed that nothing else uses)
    copying   the beginning of the previous document, twice

Both are added in turn until they make up the given share of the characters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maclaurin.data.cache_folder import Cache
from maclaurin.data.corpus import Corpus
from maclaurin.data.data_config import is_task, open_corpus, stdlib_test_documents
from maclaurin.errors import InputError
from maclaurin.evaluation.needles import MultiQuery
from maclaurin.evaluation.prose import CHARACTERS_PER_TOKEN, Prose
from maclaurin.files import write_file
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


SEED = 77


def write_mixed(data: str, file: Path, share: float, tokens: int, length: int) -> None:
    """About `tokens` tokens of the text `data`, mixed with recall and copying, one JSON line per document.

    share    of the characters that are recall or copying
    length   tokens of a row; facts with their questions, or both copies, fit into one
    """
    if not 0 < share < 1:
        raise InputError(f"the share of recall and copying must be above 0 and below 1; got {share:g}.")
    if is_task(data):
        raise InputError(
            f"{data} is a task, but recall and copying are mixed into text: name a text (`data`)."
        )
    corpus = open_corpus(data, limit=None, notes=Cache.at(None).notes, progress=False)
    lines = (json.dumps({"text": text}) for text in _mixed(corpus, share, tokens, length))
    write_file(file, "\n".join(lines) + "\n")


def _mixed(corpus: Corpus, share: float, tokens: int, length: int) -> Iterator[str]:
    left = tokens * CHARACTERS_PER_TOKEN
    plain = other = 0
    facts = recall_texts(length)
    for document in corpus.documents():
        yield document.text
        plain += len(document.text)
        while other < share / (1 - share) * plain:
            for text in (next(facts), twice(document.text, length)):
                yield text
                other += len(text)
        if plain + other > left:
            return


def recall_texts(length: int) -> Iterator[str]:
    """Facts in running text and all questions with their answers, in fewer than `length` tokens."""
    longest = max(MultiQuery.smallest, round(0.8 * length))
    sizes = [size for size in (MultiQuery.smallest, 2 * MultiQuery.smallest, longest) if size <= longest]
    items = [MultiQuery(size).items(Prose.embedded(), SEED + size) for size in sizes]
    while True:
        for source in items:
            item = next(source)
            asked = (f"{query.prompt} {query.answers[0]}." for query in item.queries)
            yield item.context + "\n".join(asked)


def twice(text: str, length: int) -> str:
    """The beginning of a text twice, in about `length` tokens."""
    part = text[: round(0.4 * length * CHARACTERS_PER_TOKEN)].rpartition(" ")[0] or text[:1]
    return f"{part}\n{part}"
