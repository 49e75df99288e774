"""The cache folder: tokens, trained tokenizers, and notes about corpora."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import final

from maclaurin.data.data_errors import DataError

VARIABLE = "MACLAURIN_CACHE"


@final
@dataclass(frozen=True)
class Cache:
    """Where prepared data is kept."""

    root: Path

    @classmethod
    def at(cls, folder: str | None) -> Cache:
        """The given folder, else $MACLAURIN_CACHE, else ~/.cache/maclaurin; created if missing."""
        chosen = folder or os.environ.get(VARIABLE) or "~/.cache/maclaurin"
        cache = cls(Path(chosen).expanduser().absolute())
        try:
            for part in (cache.tokens, cache.tokenizers, cache.notes):
                part.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise DataError(
                f"the cache folder {cache.root} cannot be created ({problem.strerror}). "
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
    def notes(self) -> Path:
        """Revisions of hub data sets and hashes of large files."""
        return self.root / "corpora"
