"""Scores and values of a few contrasting heads of a model while it reads a text, for the explorer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from maclaurin.errors import InputError
from maclaurin.inspection.contexts import Contexts
from maclaurin.inspection.inspect_model import check_layers
from maclaurin.layers.watch_attention import AttentionCall, attention_layers, watch_attention
from maclaurin.models import MaclaurinForCausalLM
from maclaurin.plain_data import significant

#: kind and version of a file that the page accepts
KIND, VERSION = "maclaurin-capture", 1
#: largest number of tokens on the page
LONGEST = 64
#: largest number of values per key; a head with more keeps only the first ones
LARGEST_VALUE = 128


@final
@dataclass(frozen=True)
class HeadScores:
    """What one head computed: scores x [T, T] (causal) and values v [T, e], both float64 on the CPU."""

    layer: int
    head: int
    scores: Tensor
    values: Tensor

    @property
    def weights(self) -> Tensor:
        """Softmax of the scores, [T, T]."""
        return torch.where(self._seen, self.scores, -torch.inf).softmax(-1)

    @property
    def broadness(self) -> float:
        """Entropy of the weights relative to equal weights, mean over the second half of the rows."""
        rows = self.weights[self._later]
        number = torch.arange(len(self.scores))[self._later] + 1
        return float((torch.special.entr(rows).sum(-1) / number.log()).mean())

    @property
    def on_first(self) -> float:
        """Attention on the first token."""
        return float(self.weights[self._later, 0].mean())

    @property
    def on_previous(self) -> float:
        """Attention on the token before."""
        return float(self.weights.diagonal(-1)[self._later.start - 1 :].mean())

    @property
    def on_earlier(self) -> float:
        """Largest weight on a token that is neither the first nor one of the last two."""
        weights = self.weights.clone()
        weights[:, 0] = 0
        weights = weights.tril(-2)
        return float(weights[self._later].amax(-1).mean())

    @property
    def centre(self) -> float:
        """Mean score of a row, mean over rows."""
        return float(self._row_means.mean())

    @property
    def spread(self) -> float:
        """Largest distance of a score from its row's mean."""
        centred = torch.where(self._seen, self.scores - self._row_means[:, None], 0.0)
        return float(centred[self._later].abs().max())

    @property
    def _row_means(self) -> Tensor:
        seen = self._seen
        return torch.where(seen, self.scores, 0.0).sum(-1) / seen.sum(-1)

    @property
    def _seen(self) -> Tensor:
        return torch.ones_like(self.scores, dtype=torch.bool).tril()

    @property
    def _later(self) -> slice:
        return slice(max(1, len(self.scores) // 2), None)


#: title → the number whose largest value chooses the head, among those not chosen yet
_CONTRASTS: tuple[tuple[str, Callable[[HeadScores], float]], ...] = (
    ("looks at everything", lambda head: head.broadness),
    ("looks at the first token", lambda head: head.on_first),
    ("looks at the token before", lambda head: head.on_previous),
    ("finds an earlier word", lambda head: head.on_earlier),
    ("scores far from zero", lambda head: abs(head.centre) - head.spread / 2),
    ("sharpest scores", lambda head: head.spread),
)


def contrasting(heads: list[HeadScores]) -> list[tuple[str, HeadScores]]:
    """Up to six heads that differ as much as possible, each with a title."""
    left, chosen = list(heads), []
    for title, measure in _CONTRASTS:
        if not left:
            break
        best = max(left, key=measure)
        left.remove(best)
        chosen.append((title, best))
    return chosen


def read_heads(model: MaclaurinForCausalLM, tokens: Tensor, device: str) -> list[HeadScores]:
    """Every head of every layer while the model reads the tokens [T]."""
    found: list[HeadScores] = []

    def watch(call: AttentionCall) -> None:
        scale = call.layer.spec.kernel.default_scale(call.q.shape[-1])
        q, k, v = (u[0].double().transpose(0, 1).cpu() for u in (call.q, call.k, call.v))
        group = q.shape[0] // k.shape[0]
        for head in range(q.shape[0]):
            of_keys = head // group
            found.append(HeadScores(call.number, head, scale * (q[head] @ k[of_keys].mT), v[of_keys]))

    with watch_attention(model, watch), torch.inference_mode():
        model.to(device).model(input_ids=tokens[None].to(device), use_cache=False)  # type: ignore[arg-type]
    return found


def capture(name: str, model: MaclaurinForCausalLM, contexts: Contexts, tokenizer: Any, device: str) -> dict:
    """The data that the page reads: tokens, and scores and values of contrasting heads."""
    check_layers(name, attention_layers(model))
    tokens = next(iter(contexts), None)
    if tokens is None or len(tokens) > LONGEST:
        raise InputError(f"the page shows 2 to {LONGEST} tokens, got {0 if tokens is None else len(tokens)}.")
    words = [str(tokenizer.decode([token])) for token in tokens.tolist()]
    return {
        "kind": KIND,
        "version": VERSION,
        "model": name,
        "text": contexts.name,
        "tokens": words,
        "heads": [
            {
                "layer": head.layer,
                "head": head.head,
                "title": title,
                "scores": [_rounded(row[: t + 1], 5) for t, row in enumerate(head.scores)],
                "values": [_rounded(row, 4) for row in head.values[:, :LARGEST_VALUE]],
            }
            for title, head in contrasting(read_heads(model, tokens, device))
        ],
    }


def _rounded(row: Tensor, digits: int) -> list[float]:
    """Numbers with this many significant digits, enough for the page."""
    return [significant(x, digits) for x in row.tolist()]
