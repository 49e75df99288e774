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
from maclaurin.models.tokenizer_folder import named_tokenizer

#: letters given to the tokenizer at a time, up to the end of a line
PIECE = 1 << 18


@final
@dataclass(frozen=True)
class Contexts:
    """The tokens of a text, read in disjoint contexts that each begin with the tokenizer's own prefix."""

    name: str
    sha256: str
    tokens: Tensor  # [N], without prefixes
    prefix: tuple[int, ...]
    length: int

    @staticmethod
    def of(tokens: Tensor, length: int, name: str = "tokens") -> Contexts:
        """Tokens [N] that are there already."""
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
        whole, rest = divmod(len(self.tokens), self._new)
        return whole + (rest + len(self.prefix) > 1)

    @property
    def predicted(self) -> int:
        """How many tokens are predicted from those before them."""
        return sum(len(context) - 1 for context in self)

    @property
    def _new(self) -> int:
        return self.length - len(self.prefix)


def read_contexts(file: Path, tokenizer: Any, tokens: int, length: int, vocabulary: int) -> Contexts:
    """The first `tokens` tokens of a file (all for 0), every one below `vocabulary`."""
    if not file.is_file():
        raise InputError(f"there is no text file {file}.")
    prefix = _prefix(tokenizer)
    if length <= len(prefix):
        raise InputError(
            f"a context of {length} holds nothing beside the {len(prefix)} tokens it begins with."
        )
    digest = hashlib.sha256()
    found: list[int] = []
    for piece in _pieces(file):
        digest.update(piece.encode())
        found += _encoded(tokenizer, piece)
        if tokens and len(found) >= tokens:
            break
    found = found[:tokens] if tokens else found
    if len(found) + len(prefix) < 2 or not found:
        raise InputError(
            f"{file} holds {len(found)} tokens; at least 2 are needed to predict one from another."
        )
    highest = max((*found, *prefix))
    if highest >= vocabulary:
        raise InputError(
            f"the tokenizer makes the token {highest}, and the model knows {vocabulary:,} only: it "
            "is another model's. Name the right one with --tokenizer."
        )
    return Contexts(file.name, digest.hexdigest(), torch.tensor(found, dtype=torch.long), prefix, length)


def require_tokenizer(model: str, found: Any | None, given: str | None) -> Any:
    """The one given, else the model's own."""
    if given is not None:
        return named_tokenizer(given)
    if found is None:
        raise InputError(
            f"{model} has no tokenizer of its own: name one with --tokenizer (a folder, a tokenizer.json, a "
            "name on the hub, or bytes)."
        )
    return found


def _prefix(tokenizer: Any) -> tuple[int, ...]:
    """What the tokenizer puts before a text: nothing, or its token for a beginning."""
    first = getattr(tokenizer, "bos_token_id", None)
    around_nothing = list(tokenizer("")["input_ids"])
    return (first,) if first is not None and around_nothing[:1] == [first] else ()


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _pieces(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8") as lines:
            while piece := lines.read(PIECE):
                yield piece + (lines.readline() if not piece.endswith("\n") else "")
    except UnicodeDecodeError as problem:
        raise InputError(f"{file} is no UTF-8 text (byte {problem.start}).") from None
