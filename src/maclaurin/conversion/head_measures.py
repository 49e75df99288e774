"""Measure how much each key-value head contributes to finding a fact far back in the text.

For questions at several distances (fact_questions.py), asked after the text was read with full attention:

    mass   the attention that the last token of the question pays to the asked fact,
           the largest over the queries of the head's group
    loss   how much the log-odds of the right answer fall when this head alone sees a window and sinks
           while the question is read

Neither is enough alone: mass misses heads that pass a fact on, loss generalises badly to longer distances. A
head's score is the mean of both, each divided by its largest value, over all distances.

Heads also need each other: a fact is found only if every head of a chain sees it. So the best ELIMINATED_FROM
heads are ordered together. All other heads are limited, then one of the best after the other: always
the one without which the log-odds of right answers stay largest. The heads that remain longest are
ranked first.

The cost of a smaller memory on ordinary text is estimated from one backward pass (`TextDamage`):

    damage of head h with memory m  =  ½ E (g · (y_m − y))²  per token,      in nats

y is the output of the head's attention, y_m its output with the memory m, and g = ∂(−ln p)/∂y for next tokens
drawn from the model's own predictions. That is the second-order increase of the divergence from the original
(Fisher information), for each token and head alone. The sum over heads estimates the cost of a plan; it is
used to share bytes among heads, and the plans are then measured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast, final

import torch
from torch import Tensor

from maclaurin.conversion.fact_questions import Question
from maclaurin.conversion.measure import MeasureFile
from maclaurin.errors import InputError
from maclaurin.layers.layer_memory import LayerMemory
from maclaurin.layers.layout import Layout
from maclaurin.layers.watch_attention import AttentionCall, watch_attention
from maclaurin.models import MaclaurinCache, MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.programs.dispatch import attention
from maclaurin.training.losses import summed_cross_entropy

#: the attention of a limited head while its loss is measured
PROBE = "poly(0)+window(64,sinks=4)/sum"
#: sets of heads limited in one pass, each in its own row
AT_ONCE = 9
#: number of heads that are ordered by elimination, and of questions it is based on
ELIMINATED_FROM, ELIMINATED_BY = 16, 24

Table = list[list[float]]  # [layers][key-value heads]
Place = tuple[int, int]  # (layer, key-value head)


@final
@dataclass(frozen=True)
class Asked:
    """The measures from one question."""

    distance: int
    number: int
    mass: Table
    loss: Table
    log_odds: float


@final
@dataclass(frozen=True)
class HeadMeasures:
    """Every question asked so far."""

    asked: tuple[Asked, ...]
    #: the best heads by elimination, the last one left first
    together: tuple[Place, ...] = ()

    def mean(self, what: str, distance: int | None = None) -> Tensor:
        """mass or loss [layers, heads], of one distance or of all."""
        rows = [getattr(a, what) for a in self.asked if distance in (None, a.distance)]
        return torch.tensor(rows, dtype=torch.float64).mean(0)

    @property
    def distances(self) -> list[int]:
        """The distances of the questions."""
        return sorted({asked.distance for asked in self.asked})

    @property
    def score(self) -> Tensor:
        """How strongly a head retrieves distant facts, 0 … 1, [layers, heads]."""
        parts = []
        for distance in self.distances:
            for what in ("mass", "loss"):
                found = self.mean(what, distance).clamp(min=0)
                parts.append(found / found.max().clamp(min=1e-12))
        return torch.stack(parts).mean(0)

    @property
    def ranking(self) -> list[Place]:
        """(layer, head), the best retrieval head first."""
        score = self.score
        heads = [(layer, head) for layer in range(score.shape[0]) for head in range(score.shape[1])]
        others = (place for place in heads if place not in self.together)
        return [*self.together, *sorted(others, key=lambda place: -float(score[place]))]


def measure_heads(
    model: MaclaurinForCausalLM,
    questions: Sequence[Question],
    file: MeasureFile,
    report: Callable[[float], None] = lambda share: None,
) -> HeadMeasures:
    """Ask every question that has no answer in the file, then order the best heads by elimination."""
    require_softmax(model)
    asked = []
    for done, question in enumerate(questions, start=1):
        name = f"heads {question.distance} {question.number}"
        if name not in file.found:
            file.keep(name, vars(_ask(model, question)))
        asked.append(Asked(**file.found[name]))
        report(done / (2 * len(questions)))
    alone = HeadMeasures(tuple(asked))
    best = alone.ranking[:ELIMINATED_FROM]
    some = questions[:ELIMINATED_BY]  # of all distances: those with the same index are adjacent
    together = eliminated(model, some, best, file, lambda share: report((1 + share) / 2))
    return HeadMeasures(alone.asked, tuple(together))


def eliminated(
    model: MaclaurinForCausalLM,
    questions: Sequence[Question],
    best: Sequence[Place],
    file: MeasureFile,
    report: Callable[[float], None] = lambda share: None,
) -> list[Place]:
    """The best heads, the most needed first: the last one left comes first.

    The head to limit next is the one without which the mean log-odds stay largest.
    """
    left, order = list(best), list[Place]()
    caches: list[MaclaurinCache] = []
    while len(left) > 1:
        tried = [[place for place in left if place != gone] for gone in left]
        name = f"without each of {left} by {len(questions)} questions"
        if name not in file.found:
            caches = caches or [question.read(model) for question in questions]
            of_each = [_log_odds(model, *pair, tried) for pair in zip(questions, caches, strict=True)]
            file.keep(name, torch.stack(of_each).mean(0).tolist())
        found = file.found[name]
        order.append(left.pop(found.index(max(found))))
        report(len(order) / len(best))
    return [*left, *reversed(order)]


@torch.no_grad()
def _log_odds(
    model: MaclaurinForCausalLM, question: Question, cache: MaclaurinCache, sets: Sequence[Sequence[Place]]
) -> Tensor:
    """Log-odds of the right answer if only the heads of a set see everything, for each set."""
    places = _places(cache)
    found = []
    for start in range(0, len(sets), AT_ONCE):
        limited = [[place for place in places if place not in kept] for kept in sets[start : start + AT_ONCE]]
        found.append(question.log_odds(model, _with_limited(cache, limited)))
    return torch.cat(found)


def require_softmax(model: MaclaurinForCausalLM) -> None:
    """Raise unless every head has plain softmax, the attention that a memory is chosen for."""
    config = cast("MaclaurinConfig", model.config)
    for number, layer in enumerate(config.layer_attention()):
        for spec in layer.specs:
            if str(spec) != "exp/sum" or layer.extras.convolution or layer.extras.extra_tokens:
                raise InputError(
                    f"layer {number} has the attention {layer}, but a memory is chosen for models with "
                    "standard softmax attention (exp/sum) in every layer: convert the original, or name the "
                    "new attention yourself (`attention`)."
                )


# ------------------------------------------------------------------------------------ one question


@torch.no_grad()
def _ask(model: MaclaurinForCausalLM, question: Question) -> Asked:
    cache = question.read(model)
    watching = cache.fork()
    seen = [_Watched.put_on(memory) for memory in watching.memories]
    full = float(question.log_odds(model, watching))
    places = _places(cache)
    found: dict[Place, float] = {}
    for start in range(0, len(places), AT_ONCE):
        some = places[start : start + AT_ONCE]
        odds = question.log_odds(model, _with_limited(cache, [[place] for place in some]))
        found |= dict(zip(some, odds.tolist(), strict=True))
    loss: Table = [[] for _ in cache.memories]
    for layer, head in places:
        loss[layer].append(round(full - found[layer, head], 6))
    return Asked(question.distance, question.number, [each.mass(question.fact) for each in seen], loss, full)


class _Watched:
    """Records the last query of a question in one layer, and the keys it sees."""

    def __init__(self, memory: LayerMemory) -> None:
        self._memory, self._attend = memory, memory.attend
        self._query: Tensor | None = None

    @staticmethod
    def put_on(memory: LayerMemory) -> _Watched:
        watched = _Watched(memory)
        memory.attend = watched  # type: ignore[method-assign]
        return watched

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], layout: Layout) -> Tensor:
        self._query = q[0, -1]
        return self._attend(q, k, v, gates, layout)

    def mass(self, fact: slice) -> list[float]:
        """For every key-value head, the largest share that its queries give to the fact."""
        assert self._query is not None
        heads = self._memory.heads[0]
        k = heads.keys["k"][0].double().transpose(0, 1)  # [K, S, d]
        q = self._query.double().unflatten(0, (k.shape[0], -1))  # [K, G, d]
        scores = q @ k.mT * heads.spec.kernel.default_scale(k.shape[-1])
        return [round(share, 6) for share in scores.softmax(-1)[..., fact].sum(-1).amax(-1).tolist()]


class _Limited(LayerMemory):
    """The memory of a layer in which some heads of some rows see only a window and sinks."""

    limited: Tensor  # [B, key-value heads]

    @staticmethod
    def of(memory: LayerMemory, limited: Tensor) -> _Limited:
        found = copy.copy(memory)
        found.__class__ = _Limited
        assert isinstance(found, _Limited)
        found.limited = limited
        return found

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], layout: Layout) -> Tensor:
        """y [B, T, H, e]; the keys before were read with full attention."""
        y = super().attend(q, k, v, gates, layout)
        keys = self.heads[0].keys
        near = attention(q, keys["k"], keys["v"], PROBE, layout="bthd", form="parallel")
        limited = self.limited.repeat_interleave(q.shape[2] // k.shape[2], dim=1)
        return torch.where(limited[:, None, :, None], near, y)


def _places(cache: MaclaurinCache) -> list[Place]:
    """Every (layer, key-value head)."""
    return [(layer, head) for layer, memory in enumerate(cache.memories) for head in memory.groups[0].heads]


def _with_limited(cache: MaclaurinCache, sets: Sequence[Sequence[Place]]) -> MaclaurinCache:
    """The cache of one text with one row for each set of heads, in which these are limited."""
    rows = cache.fork()
    rows.batch_repeat_interleave(len(sets))
    for layer, memory in enumerate(cache.memories):
        heads = memory.groups[0].heads
        limited = torch.tensor([[(layer, head) in places for head in heads] for places in sets])
        if limited.any():
            device = memory.heads[0].keys["k"].device
            rows.memories[layer] = _Limited.of(rows.memories[layer], limited.to(device))
    return rows


# --------------------------------------------------------------------------------------- damage on text


#: predictions whose logits are in memory at a time
_ROWS = 512


@final
@dataclass(frozen=True)
class TextDamage:
    """Damage by memory, in nats per token: [layers][key-value heads]."""

    of: dict[str, list[list[float]]]

    def __call__(self, memory: str, layer: int, head: int) -> float:
        """The estimate for one head."""
        return self.of[memory][layer][head]


def measure_damage(
    model: MaclaurinForCausalLM,
    rows: Tensor,
    memories: Sequence[str],
    file: MeasureFile,
    report: Callable[[float], None] = lambda share: None,
) -> TextDamage:
    """Measure the damage of every head with each memory on texts [B, T], unless it is in the file."""
    names = {memory: f"damage on {list(rows.shape)}: {memory}" for memory in memories}
    unknown = [memory for memory, name in names.items() if name not in file.found]
    sums: dict[str, Tensor] = {}
    for done, row in enumerate(rows if unknown else []):
        for memory, found in _of_text(model, row.to(model.device), unknown):
            sums[memory] = sums.get(memory, torch.zeros(())) + found / len(rows)
            report((done + len(sums) / len(unknown)) / len(rows))
    for memory in unknown:
        file.keep(names[memory], [[float(f"{x:.4g}") for x in heads] for heads in sums[memory].tolist()])
    return TextDamage({memory: file.found[name] for memory, name in names.items()})


def _of_text(
    model: MaclaurinForCausalLM, tokens: Tensor, memories: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """(memory, damage [layers, heads]) on one text [T]."""
    calls = _calls(model, tokens)
    for memory in memories:
        with torch.no_grad():
            yield memory, torch.stack([call.damage(memory) for call in calls])


@dataclass
class _Call:
    """Inputs and output of a layer's attention, and the gradient of the loss there: [1, T, heads, …]."""

    q: Tensor
    k: Tensor
    v: Tensor
    y: Tensor
    slope: Tensor | None = None

    def damage(self, memory: str) -> Tensor:
        """½ Σ_t (g·Δ)² / T of every key-value head."""
        assert self.slope is not None
        change = attention(self.q, self.k, self.v, memory, layout="bthd").float() - self.y.detach().float()
        along = (self.slope.float() * change).sum(-1)  # [1, T, H]
        by_head = along.unflatten(-1, (self.k.shape[2], -1)).sum(-1)
        return by_head.square().mean((0, 1)).div(2).cpu()


def _calls(model: MaclaurinForCausalLM, tokens: Tensor) -> list[_Call]:
    """Every layer's attention over a text, with the gradient of the summed loss of drawn next tokens."""
    generator = torch.Generator(device=tokens.device).manual_seed(0)
    calls: list[_Call] = []

    def watch(call: AttentionCall) -> None:
        calls.append(_Call(call.q.detach(), call.k.detach(), call.v.detach(), call.y))

    with watch_attention(model, watch), torch.enable_grad():
        hidden = model.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        weight = model.lm_head.weight.detach()
        with torch.no_grad():
            drawn = [
                torch.multinomial((part @ weight.t()).float().softmax(-1), 1, generator=generator)[:, 0]
                for part in hidden.split(_ROWS)
            ]
        loss = summed_cross_entropy(hidden, weight, torch.cat(drawn))
    slopes = torch.autograd.grad(loss, [call.y for call in calls])
    for call, slope in zip(calls, slopes, strict=True):
        call.slope = slope
    return calls
