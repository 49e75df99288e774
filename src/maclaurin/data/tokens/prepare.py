"""Corpus → tokens on disk, once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np

from maclaurin.data.cache.whole_folder import make_whole_folder
from maclaurin.data.corpora.corpus import Corpus, Document
from maclaurin.data.errors import DataError
from maclaurin.data.fingerprint import digest
from maclaurin.data.progress import report_progress
from maclaurin.data.split import TEST, TRAIN, side_of
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
    corpus: Corpus, tokenizer: Tokenizer, test_fraction: float, folder: Path, *, progress: bool = True
) -> PreparedTokens:
    """The tokens of this corpus under `folder`: those that are there, or new ones if any part is missing."""
    made_from = {
        "corpus": corpus.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "test_fraction": test_fraction,
    }
    place = folder / digest(made_from)[:32]
    make_whole_folder(
        place,
        lambda temporary: _fill(temporary, corpus, tokenizer, made_from, progress),
        is_whole_for(made_from),
        what=corpus.name,
        progress=progress,
    )
    manifest = Manifest.read(place)
    if manifest is None:
        raise DataError(f"the prepared tokens in {place} vanished while they were opened. Run again.")
    return PreparedTokens(place, manifest)


def _fill(folder: Path, corpus: Corpus, tokenizer: Tokenizer, made_from: dict, progress: bool) -> None:
    test_fraction = made_from["test_fraction"]
    title = f"tokenizing {corpus.name} with {tokenizer.name}"
    with ExitStack() as open_files, report_progress(title, progress) as report:
        sides = {side: _SideWriter(folder, side, tokenizer) for side in (TRAIN, TEST)}
        for side in sides.values():
            open_files.callback(side.close)
        for documents in _handfuls(corpus.documents()):
            encoded = tokenizer.encode_all([document.text for document in documents])
            for document, tokens in zip(documents, encoded, strict=True):
                sides[side_of(document.text, test_fraction)].append(tokens)
            written = sum(side.tokens.items for side in sides.values())
            report(documents[-1].progress, f"{written / 1e6:.1f}M tokens")
        _check_sides(corpus, {name: side.documents for name, side in sides.items()}, test_fraction)
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


def _check_sides(corpus: Corpus, counts: dict[str, int], test_fraction: float) -> None:
    if sum(counts.values()) == 0:
        raise DataError(f"{corpus.name} holds no text.")
    for side, count in counts.items():
        if count == 0:
            raise DataError(
                f"with test_fraction={test_fraction:g}, none of the {sum(counts.values())} documents of "
                f"{corpus.name} is for {side}ing. Use a {'larger' if side == TEST else 'smaller'} "
                "test_fraction or more documents."
            )


@final
class _SideWriter:
    """The two arrays of training or of testing."""

    def __init__(self, folder: Path, side: str, tokenizer: Tokenizer) -> None:
        self._separator = np.array([tokenizer.separator])
        width = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
        self.tokens = ArrayWriter(folder, f"{side}-tokens", width)
        self._starts = ArrayWriter(folder, f"{side}-starts", "<i8")
        self._side = side

    @property
    def documents(self) -> int:
        """Taken so far."""
        return self._starts.items

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
