"""From what the user calls it to the tokenizer: bytes, bpe:N or hf:…"""

from __future__ import annotations

from pathlib import Path

from maclaurin.data.corpora.corpus import Corpus
from maclaurin.data.errors import DataError
from maclaurin.data.splits import Splitter
from maclaurin.data.tokenizing.bpe import open_byte_pairs
from maclaurin.data.tokenizing.byte_tokenizer import Bytes
from maclaurin.data.tokenizing.hub_tokenizer import open_hub_tokenizer
from maclaurin.data.tokenizing.tokenizer import Tokenizer
from maclaurin.errors import did_you_mean


def open_tokenizer(
    written: str, corpus: Corpus, splitter: Splitter, folder: Path, *, progress: bool = True
) -> Tokenizer:
    """The tokenizer; one that is learned is learned from the corpus's training documents."""
    kind, _, rest = written.partition(":")
    if written == "bytes":
        return Bytes()
    if kind == "bpe" and rest.isdecimal():
        return open_byte_pairs(int(rest), corpus, splitter, folder, progress=progress)
    if kind == "hf":
        return open_hub_tokenizer(rest)
    raise DataError(
        f"there is no tokenizer {written!r}; it is bytes, bpe:N (such as bpe:4096) or hf:NAME_OR_PATH."
        f"{did_you_mean(kind, ['bytes', 'bpe', 'hf'])}"
    )
