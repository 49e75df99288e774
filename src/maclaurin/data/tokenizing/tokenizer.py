"""What every tokenizer can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class Tokenizer(ABC):
    """Text to numbers and back, with one more number, the separator, that no text becomes."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As the user writes it."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """All tokens, the separator too, are below this."""

    @property
    @abstractmethod
    def separator(self) -> int:
        """The token that stands before every document, and so also ends the one before it."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Digest of everything that decides the tokens of a text."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without separators around them."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens; separators leave nothing."""

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """encode for each text; several processors may share the work."""
        return [self.encode(text) for text in texts]
