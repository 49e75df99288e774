"""A text file as contexts of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from maclaurin.errors import InputError
from maclaurin.files import not_utf8, require_file

#: characters given to the tokenizer at a time, up to the end of a line
PIECE = 1 << 18


@final
@dataclass(frozen=True)
class Contexts:
    """The tokens of a text in disjoint contexts; each starts with the tokens the tokenizer puts first.

    tokens   [N], without the prefixes
    length   tokens of a context, prefix included
    """

    name: str
    sha256: str
    tokens: Tensor
    prefix: tuple[int, ...]
    length: int

    @staticmethod
    def of(tokens: Tensor, length: int, name: str = "tokens") -> Contexts:
        """From tokens [N], without a prefix."""
        tokens = tokens.detach().long().cpu()
        digest = hashlib.sha256(str(tokens.tolist()).encode()).hexdigest()
        return Contexts(name, digest, tokens, (), length)

    def __iter__(self) -> Iterator[Tensor]:
        """Each context [T], T ≥ 2, on the CPU."""
        first = torch.tensor(self.prefix, dtype=torch.long)
        for start in range(0, len(self.tokens), self._new):
            part = torch.cat([first, self.tokens[start : start + self._new]])
            if len(part) > 1:
                yield part

    def __len__(self) -> int:
        full, rest = divmod(len(self.tokens), self._new)
        return full + (rest + len(self.prefix) > 1)

    @property
    def predicted(self) -> int:
        """Number of tokens that are predicted from those before them."""
        return sum(len(context) - 1 for context in self)

    @property
    def _new(self) -> int:
        return self.length - len(self.prefix)


def read_contexts(file: Path, tokenizer: Any, tokens: int, length: int, vocabulary: int) -> Contexts:
    """The first `tokens` tokens of a file, or all for 0."""
    require_file(file, "text")
    prefix = _prefix(tokenizer)
    if length <= len(prefix):
        raise InputError(
            f"a context of {length} tokens has no space for text: the tokenizer adds {len(prefix)} in front."
        )
    digest = hashlib.sha256()
    found: list[int] = []
    for piece in _pieces(file):
        digest.update(piece.encode())
        found += list(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])
        if tokens and len(found) >= tokens:
            break
    found = found[:tokens] if tokens else found
    if len(found) + len(prefix) < 2 or not found:
        raise InputError(
            f"`text`: {file} has {len(found)} tokens; at least 2 are needed to predict one from another."
        )
    highest = max((*found, *prefix))
    if highest >= vocabulary:
        raise InputError(
            f"the tokenizer produced token {highest}, but the model has {vocabulary:,} tokens: the tokenizer "
            "belongs to another model. Name the right one with `tokenizer`."
        )
    return Contexts(file.name, digest.hexdigest(), torch.tensor(found, dtype=torch.long), prefix, length)


def _prefix(tokenizer: Any) -> tuple[int, ...]:
    """The tokens that the tokenizer puts before a text: none, or its token for a beginning."""
    first = getattr(tokenizer, "bos_token_id", None)
    around_nothing = list(tokenizer("")["input_ids"])
    return (first,) if first is not None and around_nothing[:1] == [first] else ()


def _pieces(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8") as lines:
            while piece := lines.read(PIECE):
                yield piece + (lines.readline() if not piece.endswith("\n") else "")
    except UnicodeDecodeError as problem:
        raise not_utf8(file, "text", problem) from None
    except OSError as problem:
        raise InputError(f"`text`: {file} cannot be read: {problem.strerror}.") from None
