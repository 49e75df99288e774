"""Log-likelihoods under a model: of a text, and of continuations of a text that is read once.

    −ln p(text) = Σ_t −ln p(token_t | tokens before it)

A text is read through the model's cache, so a model with a state of constant size needs no more memory for a
longer text. Continuations are tried from forks of that cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from maclaurin.models import MaclaurinCache, MaclaurinConfig, MaclaurinForCausalLM

#: predictions whose logits are in memory at a time
ROWS = 256


def tokens_at_once(device: torch.device) -> int:
    """How many tokens of a batch of texts are read in one pass: enough to keep the device busy."""
    return 1 << 16 if device.type == "cuda" else 1 << 12


@torch.inference_mode()
def summed_loss(model: Any, tokens: Tensor) -> float:
    """Σ −ln p over tokens 1 … T−1 of texts [T] or [B, T], each predicted from those before it."""
    rows = tokens if tokens.ndim == 2 else tokens[None]
    hidden = model.model(input_ids=rows, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    targets = rows[:, 1:].flatten()
    total = torch.zeros((), dtype=torch.float64, device=rows.device)
    at_once = ROWS * (16 if rows.device.type == "cuda" else 1)
    for some, wanted in zip(hidden.split(at_once), targets.split(at_once), strict=True):
        logits = model.lm_head(some).float()
        total += cross_entropy(logits, wanted, reduction="none").double().sum()
    return float(total)


def windowed_loss(model: Any, tokens: Sequence[int], first: int, most: int) -> float:
    """Σ −ln p over all tokens of a text of any length, read at most `most` tokens at a time.

    The token `first` is put before the text. Each later window begins with the last token of the one before.
    """
    whole = torch.tensor([first, *tokens])
    starts = range(0, len(whole) - 1, most - 1)
    return sum(summed_loss(model, whole[start : start + most].to(model.device)) for start in starts)


@torch.inference_mode()
def ending_log_likelihoods(model: Any, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
    """ln p(ending | beginning) of each (beginning, ending); not finite if an output of the model is not.

    Short texts are read whole, several at once: a state of high order would cost more than they do. Rows
    are padded on the right, which earlier tokens do not see.
    """
    longest = max(len(before) + len(after) for before, after in texts)
    at_once = max(1, tokens_at_once(model.device) // longest)
    found: list[float] = []
    for first in range(0, len(texts), at_once):
        some = texts[first : first + at_once]
        rows = torch.zeros(len(some), longest, dtype=torch.long)
        for row, (before, after) in zip(rows, some, strict=True):
            row[: len(before) + len(after)] = torch.tensor([*before, *after])
        hidden = model.model(input_ids=rows.to(model.device), use_cache=False).last_hidden_state
        for states, (before, after) in zip(hidden, some, strict=True):
            end = len(before) + len(after) - 1
            logits = model.lm_head(states[len(before) - 1 : end]).float()
            targets = torch.tensor(after, device=logits.device)
            found.append(-float(cross_entropy(logits, targets, reduction="none").double().sum()))
    return found


def perplexity(loss: float) -> float:
    """e^loss, or ∞ if that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


@final
class TextReader:
    """A text that a model has read; it can be continued in several ways without reading it again.

    next_token   ln p [vocabulary] of the token after the text
    """

    def __init__(self, model: MaclaurinForCausalLM, cache: MaclaurinCache, next_token: Tensor) -> None:
        self._model, self._cache, self.next_token = model, cache, next_token

    @staticmethod
    def of(model: MaclaurinForCausalLM, tokens: Sequence[int]) -> TextReader:
        """Read a text of at least one token."""
        cache = MaclaurinCache(cast("MaclaurinConfig", model.config))
        return TextReader(model, cache, _log_probabilities(model, tokens, cache, 1)[0])

    def after(self, tokens: Sequence[int]) -> TextReader:
        """The text with more tokens read; this reader does not change."""
        if not tokens:
            return self
        cache = self._cache.fork()
        return TextReader(self._model, cache, _log_probabilities(self._model, tokens, cache, 1)[0])

    def log_likelihood(self, tokens: Sequence[int]) -> float:
        """ln p(tokens | text); not finite if an output of the model is not."""
        total = self.next_token[tokens[0]].double()
        if len(tokens) > 1:
            later = _log_probabilities(self._model, tokens[:-1], self._cache.fork(), len(tokens) - 1)
            targets = torch.tensor(tokens[1:], device=later.device)
            total = total + later.double().gather(-1, targets[:, None]).sum()
        return float(total)

    def greedy(self, most: int, ends: Callable[[list[int]], bool]) -> list[int]:
        """The most likely next tokens, one after the other, until `ends(them)` or there are `most`."""
        cache, next_token, found = self._cache.fork(), self.next_token, []
        while len(found) < most:
            found.append(int(next_token.argmax()))
            if ends(found):
                break
            next_token = _log_probabilities(self._model, found[-1:], cache, 1)[0]
        return found


@torch.no_grad()
def _log_probabilities(
    model: MaclaurinForCausalLM, tokens: Sequence[int], cache: MaclaurinCache, last: int
) -> Tensor:
    """ln p [n, vocabulary] of what follows each of the last n tokens; the cache then includes them."""
    ids = torch.tensor([list(tokens)], device=model.device)
    out = model(input_ids=ids, past_key_values=cache, logits_to_keep=last)
    assert out.logits is not None
    return out.logits[0].float().log_softmax(-1)
