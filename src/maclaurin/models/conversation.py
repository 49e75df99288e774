"""A conversation with an instruct model: messages in its chat template, read into one cache turn by turn."""

from __future__ import annotations

from typing import Any, final

import torch

from maclaurin.errors import InputError
from maclaurin.models.generating import Generation

#: stands for a reply when only the text behind it is wanted
_REPLY = "\x00reply\x00"


@final
class Conversation:
    """Adds each message to a Generation as the tokenizer's chat template writes it.

    Earlier turns are in the cache already and are not read again, so a turn costs the same however long the
    conversation is.
    """

    def __init__(self, generation: Generation, tokenizer: Any, system: str | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise InputError(
                "this model's tokenizer has no chat template: only models that are trained on conversations "
                "have one. Leave --chat out."
            )
        self._generation, self._tokenizer = generation, tokenizer
        self._before = [] if system is None else [{"role": "system", "content": system}]
        self._is_begun = generation.cache.seen > 0

    def ask(self, message: str) -> None:
        """Add a message of the user and the beginning of the reply."""
        said = {"role": "user", "content": message}
        if self._is_begun:
            earlier = [{"role": "user", "content": "…"}, {"role": "assistant", "content": _REPLY}]
            text = self._written([*self._before, *earlier, said]).partition(_REPLY)[2]
        else:
            text = self._written([*self._before, said])
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        pending = self._generation.pending
        if self._is_begun and pending is not None and ids and int(pending[0, -1]) == ids[0]:
            ids = ids[1:]  # the reply ended with the token that ends a turn
        self._generation.add(torch.tensor([ids], dtype=torch.long))
        self._is_begun = True

    def _written(self, messages: list[dict[str, str]]) -> str:
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
