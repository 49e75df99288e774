"""The tokens of a corpus on disk: a manifest, and for each split two arrays that are mapped into memory.

    ⟨sep⟩ d₁ ⟨sep⟩ d₂ … ⟨sep⟩ d_n ⟨sep⟩     <split>-tokens.bin, two or four bytes a token
    where each document starts, and the end  <split>-starts.bin, eight bytes a number

A separator precedes every document, so that its first token can be predicted, and another follows it, so
that its end is predicted too. The manifest is written last, with the size and sha256 of every file. A folder
whose files differ from its manifest is prepared again. Large files are hashed again only when they change.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from maclaurin.data.cache_folder import Cache, complete_folder, file_hashes
from maclaurin.data.corpus import Corpus, Document
from maclaurin.data.splits import SPLITS, Splitter
from maclaurin.data.text_tokenizers import Tokenizer
from maclaurin.errors import DataError
from maclaurin.plain_data import digest, read_or_none, to_plain, write_json
from maclaurin.progress_bar import report_progress

MANIFEST = "manifest.json"
VERSION = 3
_TEXT_AT_ONCE = 1 << 21  # characters to tokenize together, enough to keep all processors busy
_ADVICE = (
    "Free some space, use another folder (cache=/path or MACLAURIN_CACHE), or take fewer documents "
    "(limit_documents)."
)


@final
@dataclass(frozen=True)
class Documents:
    """Tokenized documents one after the other, mapped into memory."""

    tokens: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def at(self, place: int) -> int:
        """The number of the document that the token at this place belongs to."""
        return min(int(np.searchsorted(self.starts, place, side="right")) - 1, len(self) - 1)


@final
@dataclass(frozen=True)
class ArrayFile:
    """What the manifest says about one array."""

    dtype: str
    items: int
    sha256: str

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return self.items * np.dtype(self.dtype).itemsize

    def mapped(self, path: Path) -> np.ndarray:
        """The array, read-only; nothing is read before it is used."""
        if self.items == 0:  # an empty file cannot be mapped
            return np.empty(0, self.dtype)
        return np.memmap(path, dtype=self.dtype, mode="r", shape=(self.items,))


@final
@dataclass(frozen=True)
class Manifest:
    """What is in the folder, and what it was made from."""

    made_from: dict[str, Any]
    vocab_size: int
    arrays: dict[str, ArrayFile]  # name of the file without its .bin

    def write(self, folder: Path) -> None:
        """Write it as the last file, so that a folder with a manifest is complete."""
        plain = {"version": VERSION, **to_plain(self)}
        write_json(folder / MANIFEST, {**plain, "digest": digest(plain)})

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest; None if it is missing, damaged or of another version."""
        return read_or_none(cls, folder / MANIFEST, _require_intact)


def _require_intact(plain: dict[str, Any]) -> None:
    if plain.pop("digest") != digest(plain) or plain.pop("version") != VERSION:
        raise ValueError("damaged, or of another version")


@final
@dataclass(frozen=True)
class PreparedTokens:
    """A complete folder of tokens, and its manifest."""

    folder: Path
    manifest: Manifest

    def documents(self, split: str) -> Documents:
        """The documents of one split."""
        return Documents(self._array(f"{split}-tokens"), self._array(f"{split}-starts"))

    def _array(self, name: str) -> np.ndarray:
        return self.manifest.arrays[name].mapped(_file(self.folder, name))


def prepare_tokens(
    corpus: Corpus, tokenizer: Tokenizer, splitter: Splitter, cache: Cache, *, progress: bool = True
) -> PreparedTokens:
    """The tokens of this corpus: those in the cache, or new ones if any file is missing or damaged."""
    made_from = {
        "corpus": corpus.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "split": splitter.identity,
    }
    folder = cache.tokens / digest(made_from)[:32]
    complete_folder(
        folder,
        lambda temporary: _fill(temporary, corpus, tokenizer, splitter, made_from, progress),
        _is_complete_for(made_from, cache.notes, progress),
        what=corpus.name,
        progress=progress,
        advice=_ADVICE,
    )
    manifest = Manifest.read(folder)
    if manifest is None:
        raise DataError(
            f"the prepared tokens in {folder} disappeared while they were opened. Run the command again."
        )
    return PreparedTokens(folder, manifest)


def _is_complete_for(made_from: dict[str, Any], notes: Path, progress: bool) -> Callable[[Path], bool]:
    """A predicate for folders: made from exactly this, with every file unchanged."""

    def is_complete(folder: Path) -> bool:
        manifest = Manifest.read(folder)
        if manifest is None or manifest.made_from != made_from:
            return False
        files = {_file(folder, name): array for name, array in manifest.arrays.items()}
        if any(_size(path) != array.bytes for path, array in files.items()):
            return False
        hashes = file_hashes(list(files), notes, progress=progress)
        return hashes == [array.sha256 for array in files.values()]

    return is_complete


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
        writers = {split: _SplitWriter(folder, split, tokenizer, open_files) for split in SPLITS}
        for documents in _together(corpus.documents()):
            parts = [part for document in documents for part in splitter.parts(document.text)]
            encoded = tokenizer.encode_all([text for _, text in parts])
            for (split, _), tokens in zip(parts, encoded, strict=True):
                writers[split].append(tokens)
            written = sum(writer.tokens.items for writer in writers.values())
            report(documents[-1].progress, f"{written / 1e6:.1f}M tokens")
        if not any(writer.tokens.items for writer in writers.values()):
            raise DataError(f"{corpus.name} holds no text.")
        arrays = {name: array for writer in writers.values() for name, array in writer.finish().items()}
    Manifest(made_from, tokenizer.vocab_size, arrays).write(folder)


def _together(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in groups of about _TEXT_AT_ONCE characters."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= _TEXT_AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


@final
class _ArrayWriter:
    """An array that grows on disk, hashed as it is written."""

    def __init__(self, path: Path, dtype: str, open_files: ExitStack) -> None:
        self._file = open_files.enter_context(path.open("wb"))
        self._dtype, self._hash, self.items = np.dtype(dtype), hashlib.sha256(), 0

    def append(self, numbers: np.ndarray) -> None:
        content = numbers.astype(self._dtype).tobytes()
        self._file.write(content)
        self._hash.update(content)
        self.items += len(numbers)

    def finish(self) -> ArrayFile:
        """Flush to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return ArrayFile(self._dtype.str, self.items, self._hash.hexdigest())


@final
class _SplitWriter:
    """The two arrays of one split."""

    def __init__(self, folder: Path, split: str, tokenizer: Tokenizer, open_files: ExitStack) -> None:
        self._split, self._separator = split, tokenizer.separator
        width = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
        self.tokens = _ArrayWriter(_file(folder, f"{split}-tokens"), width, open_files)
        self._starts = _ArrayWriter(_file(folder, f"{split}-starts"), "<i8", open_files)

    def append(self, tokens: list[int]) -> None:
        """Write a separator and the document."""
        self._starts.append(np.array([self.tokens.items]))
        self.tokens.append(np.array([self._separator, *tokens]))

    def finish(self) -> dict[str, ArrayFile]:
        """Write the last separator, and the start of a next document."""
        self._starts.append(np.array([self.tokens.items]))
        self.tokens.append(np.array([self._separator]))
        return {f"{self._split}-tokens": self.tokens.finish(), f"{self._split}-starts": self._starts.finish()}


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.bin"


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
