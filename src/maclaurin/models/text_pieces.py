"""Text as its tokens come, each letter as soon as it is whole."""

from __future__ import annotations

from typing import Any

#: tokens that may belong to one letter; what is no letter by then never will be
_MOST_OF_A_LETTER = 6


class TextPieces:
    """Tokens in, text out. A token may be spelled by its neighbours, so the last piece is spelled again."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._told: list[int] = []
        self._held: list[int] = []

    def add(self, token: int) -> str:
        """What can be told now that did not stand before."""
        self._held.append(token)
        before, now = self._text(self._told), self._text(self._told + self._held)
        if now.endswith("�") and len(self._held) < _MOST_OF_A_LETTER:
            return ""
        self._told, self._held = self._held, []
        return now[len(before) :]

    def end(self) -> str:
        """What was still held back."""
        before, now = self._text(self._told), self._text(self._told + self._held)
        self._held = []
        return now[len(before) :]

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
