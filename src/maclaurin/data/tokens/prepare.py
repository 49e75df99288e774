"""Corpus → tokens on disk, once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from maclaurin.data.cache.whole_folder import make_whole_folder
from maclaurin.data.corpora.corpus import Corpus, Document
from maclaurin.data.errors import DataError
from maclaurin.data.fingerprint import digest
from maclaurin.data.progress import report_progress
from maclaurin.data.splits import SPLITS, Splitter
from maclaurin.data.tokenizing.tokenizer import Tokenizer
from maclaurin.data.tokens.checked_array import ArrayEntry, ArrayWriter
from maclaurin.data.tokens.token_folder import Manifest, is_whole_for

_TEXT_AT_ONCE = 1 << 21


@final
@dataclass(frozen=True)
class PreparedTokens:
    """A folder of tokens that is whole, and its manifest."""

    folder: Path
    manifest: Manifest


def prepare_tokens(
    corpus: Corpus, tokenizer: Tokenizer, splitter: Splitter, folder: Path, *, progress: bool = True
) -> PreparedTokens:
    """The tokens of this corpus under `folder`: those that are there, or new ones if any part is missing."""
    made_from = {
        "corpus": corpus.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "split": splitter.identity,
    }
    place = folder / digest(made_from)[:32]
    make_whole_folder(
        place,
        lambda temporary: _fill(temporary, corpus, tokenizer, splitter, made_from, progress),
        is_whole_for(made_from),
        what=corpus.name,
        progress=progress,
    )
    manifest = Manifest.read(place)
    if manifest is None:
        raise DataError(f"the prepared tokens in {place} vanished while they were opened. Run again.")
    return PreparedTokens(place, manifest)


def _fill(
    folder: Path,
    corpus: Corpus,
    tokenizer: Tokenizer,
    splitter: Splitter,
    made_from: dict[str, Any],
    progress: bool,
) -> None:
    title = f"tokenizing {corpus.name} with {tokenizer.name}"
    with ExitStack() as open_files, report_progress(title, progress) as report:
        sides = {side: _SideWriter(folder, side, tokenizer) for side in SPLITS}
        for side in sides.values():
            open_files.callback(side.close)
        for documents in _handfuls(corpus.documents()):
            parts = [part for document in documents for part in splitter.parts(document.text)]
            encoded = tokenizer.encode_all([text for _, text in parts])
            for (side, _), tokens in zip(parts, encoded, strict=True):
                sides[side].append(tokens)
            written = sum(side.tokens.items for side in sides.values())
            report(documents[-1].progress, f"{written / 1e6:.1f}M tokens")
        arrays = {name: entry for side in sides.values() for name, entry in side.finish().items()}
    Manifest(made_from, tokenizer.vocab_size, arrays).write(folder)


def _handfuls(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents together until there is enough text to keep all processors busy."""
    handful: list[Document] = []
    size = 0
    for document in documents:
        handful.append(document)
        size += len(document.text)
        if size >= _TEXT_AT_ONCE:
            yield handful
            handful, size = [], 0
    if handful:
        yield handful


@final
class _SideWriter:
    """The two arrays of one split."""

    def __init__(self, folder: Path, side: str, tokenizer: Tokenizer) -> None:
        self._separator = np.array([tokenizer.separator])
        width = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
        self.tokens = ArrayWriter(folder, f"{side}-tokens", width)
        self._starts = ArrayWriter(folder, f"{side}-starts", "<i8")
        self._side = side

    def append(self, tokens: list[int]) -> None:
        """A separator and the document."""
        self._starts.append(np.array([self.tokens.items]))
        self.tokens.append(self._separator)
        self.tokens.append(np.array(tokens, dtype=np.int64))

    def close(self) -> None:
        """Let go of the files."""
        self.tokens.close()
        self._starts.close()

    def finish(self) -> dict[str, ArrayEntry]:
        """The last separator, and where a next document would begin."""
        self._starts.append(np.array([self.tokens.items]))
        self.tokens.append(self._separator)
        return {f"{self._side}-tokens": self.tokens.finish(), f"{self._side}-starts": self._starts.finish()}
