"""A tokenizer that someone published: a name on the hub, its folder, or a tokenizer.json file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from maclaurin.data.errors import DataError
from maclaurin.data.extra import load_extra
from maclaurin.data.fingerprint import digest
from maclaurin.data.tokenizing.tokenizer import Tokenizer

SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|separator|>", "[SEP]")
"""Special tokens that end a text, tried in this order where a tokenizer.json does not say which does."""


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
        """Digest of the tokenizer's own description, and of its vocabulary where it has none."""
        backend = getattr(self.transformers_tokenizer, "backend_tokenizer", None)
        description = (
            backend.to_str() if backend is not None else digest(self.transformers_tokenizer.get_vocab())
        )
        hashed = hashlib.sha256(description.encode()).hexdigest()
        kind = type(self.transformers_tokenizer).__name__ if backend is None else "fast"
        return digest({"kind": kind, "tokenizer": hashed, "separator": self.separator})

    def encode(self, text: str) -> list[int]:
        """The tokens of the text alone: special tokens written out in it are ordinary text."""
        return self.transformers_tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True, verbose=False
        )

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """All at once, on all processors where the tokenizer can."""
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
        raise DataError("hf: names no tokenizer; write hf:NAME, hf:/folder or hf:/path/tokenizer.json.")
    transformers = load_extra("transformers", "a Hugging Face tokenizer", "use tokenizer=bytes")
    path = Path(written).expanduser()
    try:
        if path.is_file():
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(path) if path.is_dir() else written)
    except (
        Exception
    ) as problem:  # from missing files to errors of the Rust part, which have no class of their own
        raise DataError(
            f"the tokenizer hf:{written} cannot be opened ({_first_line(problem)}). "
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
            f"{', '.join(SEPARATORS)}), so documents could not be told apart. "
            "Give a folder whose tokenizer_config.json names an eos_token."
        )
    return vocabulary[found]


def _first_line(problem: Exception) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0][:200]
