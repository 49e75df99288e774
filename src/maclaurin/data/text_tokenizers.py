"""Tokenizers: bytes, byte pairs learned from the training documents, and published ones."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from maclaurin.data.cache_folder import preparing
from maclaurin.data.corpus import Corpus
from maclaurin.data.splits import Splitter
from maclaurin.errors import DataError, load_extra
from maclaurin.plain_data import digest, read_json, write_json
from maclaurin.progress_bar import Progress, report_progress
from maclaurin.wording import first_line

SEPARATOR = "<|separator|>"
SMALLEST = 257
TRAINED_ON = 256_000_000
"""At most this many characters of training text are used: more text changes the result little."""

_LIBRARY = ("tokenizers", "data", "a bpe tokenizer", "use tokenizer=bytes")


class Tokenizer(ABC):
    """Text to tokens and back, with a separator: a token that no text contains."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name the user gave."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Vocabulary size, including the separator."""

    @property
    @abstractmethod
    def separator(self) -> int:
        """The token before every document, which also ends the previous one."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Digest of everything that determines the tokens of a text."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without separators around them."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, without separators."""

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text; several processors may share the work."""
        return [self.encode(text) for text in texts]


@final
@dataclass(frozen=True)
class Bytes(Tokenizer):
    """The bytes of UTF-8; 256 is the separator. Needs no training and no library."""

    @property
    def name(self) -> str:
        """`bytes`."""
        return "bytes"

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: 256 bytes and the separator."""
        return 257

    @property
    def separator(self) -> int:
        """The number after the last byte."""
        return 256

    @property
    def fingerprint(self) -> str:
        """A constant, the same on every machine."""
        return digest({"kind": "bytes", "separator": self.separator})

    def encode(self, text: str) -> list[int]:
        """The bytes of the text in UTF-8."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the bytes, with � for invalid bytes, which a model may generate."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


# ----------------------------------------------------------------------------------------- byte pairs


@final
class BytePairs(Tokenizer):
    """Byte-level BPE: it can encode every text, and decode(encode(text)) == text."""

    def __init__(self, serialized: str, size: int) -> None:
        self._size, self.serialized = size, serialized
        self._tokenizer = load_extra(*_LIBRARY).Tokenizer.from_str(serialized)
        self._tokenizer.encode_special_tokens = True  # SEPARATOR inside a text is ordinary text

    @property
    def name(self) -> str:
        """`bpe:N` with the N of the user; a small corpus may give fewer pairs."""
        return f"bpe:{self._size}"

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: bytes, pairs and the separator."""
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
        """Bytes merged by the trained pairs."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode all texts at once, on all processors."""
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        """The bytes of the tokens, as text."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)


def open_byte_pairs(
    size: int, corpus: Corpus, splitter: Splitter, folder: Path, *, progress: bool = True
) -> BytePairs:
    """The tokenizer of this corpus, from the cache or trained now."""
    if size < SMALLEST:
        raise DataError(
            f"bpe:{size} cannot hold the 256 bytes and a separator. Use bpe:{SMALLEST} or more, "
            "or tokenizer=bytes."
        )
    load_extra(*_LIBRARY)
    key = digest({"bpe": size, "corpus": corpus.fingerprint, "split": splitter.identity, "version": 2})
    path = folder / f"bpe-{size}-{key[:32]}.json"
    serialized = _read(path)
    if serialized is None:
        serialized = _train_once(path, size, corpus, splitter, progress)
    return BytePairs(serialized, size)


def _train_once(path: Path, size: int, corpus: Corpus, splitter: Splitter, progress: bool) -> str:
    """Train the tokenizer, unless another process did so while this one waited."""
    with preparing(path, f"bpe:{size}", progress=progress):
        serialized = _read(path)
        if serialized is None:
            with report_progress(f"training bpe:{size} on {corpus.name}", progress) as report:
                serialized = train_byte_pairs(size, _training_texts(corpus, splitter, report))
            _write(path, serialized)
    return serialized


def train_byte_pairs(size: int, texts: Iterator[str]) -> str:
    """Merge the most frequent pairs of the texts until there are `size` tokens; as JSON."""
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


def _training_texts(corpus: Corpus, splitter: Splitter, report: Progress) -> Iterator[str]:
    read = 0
    for document in corpus.documents():
        for text in splitter.training_texts(document.text):
            yield text
            read += len(text)
        report(max(document.progress or 0.0, read / TRAINED_ON), f"{read / 1e6:.0f} MB of text")
        if read >= TRAINED_ON:
            return


def _write(path: Path, serialized: str) -> None:
    checked = {"sha256": hashlib.sha256(serialized.encode()).hexdigest(), "tokenizer": serialized}
    write_json(path, checked, indent=None)


def _read(path: Path) -> str | None:
    """The tokenizer in the file if it is there and undamaged."""
    stored = read_json(path)
    if not isinstance(stored, dict) or not isinstance(stored.get("tokenizer"), str):
        return None
    serialized = stored["tokenizer"]
    return serialized if hashlib.sha256(serialized.encode()).hexdigest() == stored.get("sha256") else None


# --------------------------------------------------------------------------------- published tokenizers

SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|separator|>", "[SEP]")
"""Special tokens that end a text, tried in this order if a tokenizer.json names none."""


@final
class HubTokenizer(Tokenizer):
    """A tokenizer of transformers; its end-of-text token is the separator."""

    def __init__(self, written: str, tokenizer: Any) -> None:
        self._written, self.transformers_tokenizer = written, tokenizer
        self._separator = _separator(written, tokenizer)
        self._vocab_size = 1 + max(tokenizer.get_vocab().values())

    @property
    def name(self) -> str:
        """`hf:NAME_OR_PATH`."""
        return f"hf:{self._written}"

    @property
    def vocab_size(self) -> int:
        """One more than the largest token."""
        return self._vocab_size

    @property
    def separator(self) -> int:
        """Its end-of-text token."""
        return self._separator

    @property
    def fingerprint(self) -> str:
        """Digest of the tokenizer's description, or of its vocabulary if it has none."""
        backend = getattr(self.transformers_tokenizer, "backend_tokenizer", None)
        description = (
            backend.to_str() if backend is not None else digest(self.transformers_tokenizer.get_vocab())
        )
        hashed = hashlib.sha256(description.encode()).hexdigest()
        kind = type(self.transformers_tokenizer).__name__ if backend is None else "fast"
        return digest({"kind": kind, "tokenizer": hashed, "separator": self.separator})

    def encode(self, text: str) -> list[int]:
        """The tokens of the text; special tokens spelled out in it are ordinary text."""
        return self.transformers_tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True, verbose=False
        )

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode all texts at once, on all processors if the tokenizer can."""
        return self.transformers_tokenizer(
            list(texts),
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, without special tokens."""
        return self.transformers_tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def open_hub_tokenizer(written: str) -> HubTokenizer:
    """`NAME`, a folder, or a file such as tokenizer.json."""
    if not written:
        raise DataError("hf: names no tokenizer; use hf:NAME, hf:/folder or hf:/path/tokenizer.json.")
    transformers = load_extra("transformers", "models", "a Hugging Face tokenizer", "use tokenizer=bytes")
    path = Path(written).expanduser()
    try:
        if path.is_file():
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(path) if path.is_dir() else written)
    except Exception as problem:  # the Rust library has no error class of its own
        raise DataError(
            f"the tokenizer hf:{written} cannot be opened ({first_line(problem)}). "
            "Give the name of one on the hub that can be reached, a folder made by save_pretrained, "
            "or a tokenizer.json file; tokenizer=bytes needs none."
        ) from problem
    return HubTokenizer(written, tokenizer)


def _separator(written: str, tokenizer: Any) -> int:
    for known in (tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id):
        if known is not None:
            return known
    vocabulary = tokenizer.get_vocab()
    found = next((token for token in SEPARATORS if token in vocabulary), None)
    if found is None:
        raise DataError(
            f"the tokenizer hf:{written} has no token that ends a text (tried eos, sep, bos and "
            f"{', '.join(SEPARATORS)}), so documents could not be separated. "
            "Give a folder whose tokenizer_config.json names an eos_token."
        )
    return vocabulary[found]
