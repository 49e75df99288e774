"""Byte pairs joined to tokens, learned from the training documents of a corpus and kept in the cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

from maclaurin.data.cache.lock import locked
from maclaurin.data.cache.whole_file import write_whole_file
from maclaurin.data.corpora.corpus import Corpus
from maclaurin.data.errors import DataError
from maclaurin.data.extra import load_extra
from maclaurin.data.fingerprint import digest
from maclaurin.data.progress import Report, report_progress
from maclaurin.data.splits import Splitter
from maclaurin.data.tokenizing.tokenizer import Tokenizer

SEPARATOR = "<|separator|>"
SMALLEST = 257
LEARNED_FROM = 256_000_000
"""Pairs are counted over this many characters of training text at most: more hardly changes them."""

_LIBRARY = ("tokenizers", "a bpe tokenizer", "use tokenizer=bytes")


@final
class BytePairs(Tokenizer):
    """Byte-level BPE: every text can be written with it, and decode(encode(text)) == text."""

    def __init__(self, serialized: str, size: int) -> None:
        self._size, self.serialized = size, serialized
        self._tokenizer = load_extra(*_LIBRARY).Tokenizer.from_str(serialized)
        self._tokenizer.encode_special_tokens = True  # a text that contains SEPARATOR is still only text

    @property
    def name(self) -> str:
        """`bpe:N` as it was asked for; a small corpus may not have that many pairs."""
        return f"bpe:{self._size}"

    @property
    def vocab_size(self) -> int:
        """Bytes, learned pairs and the separator."""
        return self._tokenizer.get_vocab_size()

    @property
    def separator(self) -> int:
        """The one special token."""
        return self._tokenizer.token_to_id(SEPARATOR)

    @property
    def fingerprint(self) -> str:
        """Digest of all tokens and merges."""
        return digest({"kind": "bpe", "tokenizer": hashlib.sha256(self.serialized.encode()).hexdigest()})

    def encode(self, text: str) -> list[int]:
        """Join bytes by the learned pairs."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """All at once, on all processors."""
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        """The bytes of the tokens, as text."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)


def open_byte_pairs(
    size: int, corpus: Corpus, splitter: Splitter, folder: Path, *, progress: bool = True
) -> BytePairs:
    """The tokenizer of this corpus: from the cache if it was learned before."""
    if size < SMALLEST:
        raise DataError(
            f"bpe:{size} has no room for the 256 bytes and a separator. Use bpe:{SMALLEST} or more, "
            "or tokenizer=bytes."
        )
    load_extra(*_LIBRARY)
    key = digest({"bpe": size, "corpus": corpus.fingerprint, "split": splitter.identity, "version": 2})
    path = folder / f"bpe-{size}-{key[:32]}.json"
    serialized = _read(path)
    if serialized is None:
        serialized = _learn_once(path, size, corpus, splitter, progress)
    return BytePairs(serialized, size)


def _learn_once(path: Path, size: int, corpus: Corpus, splitter: Splitter, progress: bool) -> str:
    """Learn it, unless another process did while this one waited."""
    with locked(path.with_name(f".{path.name}.lock"), f"bpe:{size}", progress=progress):
        serialized = _read(path)
        if serialized is None:
            with report_progress(f"learning bpe:{size} from {corpus.name}", progress) as report:
                serialized = learn(size, _training_texts(corpus, splitter, report))
            _write(path, serialized)
    return serialized


def learn(size: int, texts: Iterator[str]) -> str:
    """Count pairs in the texts, join the most frequent until there are `size` tokens; as JSON."""
    library: Any = load_extra(*_LIBRARY)
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer.to_str()


def _training_texts(corpus: Corpus, splitter: Splitter, report: Report) -> Iterator[str]:
    read = 0
    for document in corpus.documents():
        for text in splitter.training_texts(document.text):
            yield text
            read += len(text)
        report(max(document.progress or 0.0, read / LEARNED_FROM), f"{read / 1e6:.0f} MB of text")
        if read >= LEARNED_FROM:
            return


def _write(path: Path, serialized: str) -> None:
    checked = {"sha256": hashlib.sha256(serialized.encode()).hexdigest(), "tokenizer": serialized}
    write_whole_file(path, json.dumps(checked).encode())


def _read(path: Path) -> str | None:
    """The tokenizer in the file if it is there and as it was written."""
    try:
        stored = json.loads(path.read_bytes())
        serialized = stored["tokenizer"]
        whole = hashlib.sha256(serialized.encode()).hexdigest() == stored["sha256"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return serialized if whole else None
