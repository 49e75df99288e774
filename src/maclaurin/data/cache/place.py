"""Where the cache is, and what goes where in it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import final

from maclaurin.data.errors import DataError

VARIABLE = "MACLAURIN_CACHE"


@final
@dataclass(frozen=True)
class Cache:
    """A folder with a room for tokens, one for tokenizers and one for what is remembered of corpora."""

    root: Path

    @classmethod
    def at(cls, folder: str | None) -> Cache:
        """The folder given, else $MACLAURIN_CACHE, else ~/.cache/maclaurin; made if it is not there."""
        chosen = folder or os.environ.get(VARIABLE) or "~/.cache/maclaurin"
        cache = cls(Path(chosen).expanduser().absolute())
        try:
            for room in (cache.tokens, cache.tokenizers, cache.corpora):
                room.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise DataError(
                f"the cache folder {cache.root} cannot be made ({problem.strerror}). "
                f"Give another: cache=/path, or the environment variable {VARIABLE}."
            ) from None
        return cache

    @property
    def tokens(self) -> Path:
        """One folder per corpus, tokenizer and split."""
        return self.root / "tokens"

    @property
    def tokenizers(self) -> Path:
        """One file per trained tokenizer."""
        return self.root / "tokenizers"

    @property
    def corpora(self) -> Path:
        """Revisions and hashes of files."""
        return self.root / "corpora"
