"""The 256 bytes of UTF-8 as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from maclaurin.data.fingerprint import digest
from maclaurin.data.tokenizing.tokenizer import Tokenizer


@final
@dataclass(frozen=True)
class Bytes(Tokenizer):
    """Token = byte; 256 is the separator. Nothing to learn, nothing to install."""

    @property
    def name(self) -> str:
        """`bytes`."""
        return "bytes"

    @property
    def vocab_size(self) -> int:
        """256 bytes and the separator."""
        return 257

    @property
    def separator(self) -> int:
        """The number after the last byte."""
        return 256

    @property
    def fingerprint(self) -> str:
        """The same everywhere."""
        return digest({"kind": "bytes", "separator": self.separator})

    def encode(self, text: str) -> list[int]:
        """UTF-8."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """UTF-8, with � for bytes that are no text (a model may put any after any)."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")
