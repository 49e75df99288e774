"""Which key-value heads remember: what each contributes to finding a fact from far back.

For questions at several distances (fact_questions.py), asked after the text was read with full attention:

    mass   the attention that the last token of the question pays to the asked fact,
           the largest over the queries of the head's group
    loss   how much the log-odds of the right answer fall when this head alone sees a window and sinks
           while the question is read

Each alone misleads: mass misses heads that pass a fact on, loss generalises badly to longer distances. A
head's score is the mean of both, each divided by its largest value, over all distances.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast, final

import torch
from torch import Tensor

from maclaurin.conversion.fact_questions import Question
from maclaurin.conversion.measure import MeasureFile
from maclaurin.errors import InputError
from maclaurin.layers.layer_memory import LayerMemory
from maclaurin.layers.layout import Layout
from maclaurin.models import MaclaurinCache, MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.programs.dispatch import attention

#: the attention of a limited head while its loss is measured
PROBE = "poly(0)+window(64,sinks=4)/sum"
#: heads limited in one pass, each in its own row
AT_ONCE = 9

Table = list[list[float]]  # [layers][key-value heads]


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
        """How much a head remembers, 0 … 1, [layers, heads]."""
        parts = []
        for distance in self.distances:
            for what in ("mass", "loss"):
                found = self.mean(what, distance).clamp(min=0)
                parts.append(found / found.max().clamp(min=1e-12))
        return torch.stack(parts).mean(0)

    @property
    def ranking(self) -> list[tuple[int, int]]:
        """(layer, head), those that remember most first."""
        score = self.score
        heads = [(layer, head) for layer in range(score.shape[0]) for head in range(score.shape[1])]
        return sorted(heads, key=lambda place: -float(score[place]))


def measure_heads(
    model: MaclaurinForCausalLM,
    questions: Sequence[Question],
    file: MeasureFile,
    report: Callable[[float], None] = lambda share: None,
) -> HeadMeasures:
    """Ask every question that has no answer in the file."""
    require_softmax(model)
    asked = []
    for done, question in enumerate(questions, start=1):
        name = f"heads {question.distance} {question.number}"
        if name not in file.found:
            file.keep(name, vars(_ask(model, question)))
        asked.append(Asked(**file.found[name]))
        report(done / len(questions))
    return HeadMeasures(tuple(asked))


def require_softmax(model: MaclaurinForCausalLM) -> None:
    """Raise unless every head has plain softmax, the attention that a memory is chosen for."""
    config = cast("MaclaurinConfig", model.config)
    for number, layer in enumerate(config.layer_attention()):
        for spec in layer.specs:
            if str(spec) != "exp/sum" or layer.extras.convolution or layer.extras.extra_tokens:
                raise InputError(
                    f"layer {number} has the attention {layer}, but a memory is chosen for models with "
                    "standard softmax attention (exp/sum) in every layer: convert the original, or name the "
                    "new attention yourself (--attention)."
                )


# ------------------------------------------------------------------------------------ one question


@torch.no_grad()
def _ask(model: MaclaurinForCausalLM, question: Question) -> Asked:
    cache = question.read(model)
    watching = cache.fork()
    seen = [_Watched.put_on(memory) for memory in watching.memories]
    full = float(question.log_odds(model, watching))
    places = [(layer, head) for layer, memory in enumerate(cache.memories) for head in memory.groups[0].heads]
    found: dict[tuple[int, int], float] = {}
    for start in range(0, len(places), AT_ONCE):
        some = places[start : start + AT_ONCE]
        odds = question.log_odds(model, _with_one_limited(cache, some))
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
    """The memory of a layer in which, in some rows of the batch, one head sees only a window and sinks."""

    limited: tuple[tuple[int, int], ...]  # (row, head)

    @staticmethod
    def of(memory: LayerMemory, limited: Sequence[tuple[int, int]]) -> _Limited:
        found = copy.copy(memory)
        found.__class__ = _Limited
        assert isinstance(found, _Limited)
        found.limited = tuple(limited)
        return found

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], layout: Layout) -> Tensor:
        """y [B, T, H, e]; the keys before were read with full attention."""
        y = super().attend(q, k, v, gates, layout).clone()
        keys, group = self.heads[0].keys, q.shape[2] // k.shape[2]
        for row, head in self.limited:
            mine, queries = slice(row, row + 1), slice(head * group, (head + 1) * group)
            own_k, own_v = (keys[name][mine, :, head : head + 1] for name in "kv")
            own_q = q[mine, :, queries]
            y[mine, :, queries] = attention(own_q, own_k, own_v, PROBE, layout="bthd", form="parallel")
        return y


def _with_one_limited(cache: MaclaurinCache, places: Sequence[tuple[int, int]]) -> MaclaurinCache:
    """The cache of one text with one row per (layer, head), where that head is limited."""
    rows = cache.fork()
    rows.batch_repeat_interleave(len(places))
    for layer in {layer for layer, _ in places}:
        limited = [(row, head) for row, (at, head) in enumerate(places) if at == layer]
        rows.memories[layer] = _Limited.of(rows.memories[layer], limited)
    return rows
