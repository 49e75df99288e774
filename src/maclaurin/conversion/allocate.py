"""Which heads get which memory: plans that fill a budget, measured on calibration text and questions.

    plan    the heads that remember most keep every key (or, where memory must not grow, more slots than the
            others); all others get sinks, a window and kept keys, and a polynomial tail where one fits

Plans differ in how much of the budget goes to the heads that remember, how the slots of a head are shared
between window and kept keys, and whether there is a tail. What each buys is measured, not assumed:

    cost = increase of the loss per token + RECALL_WEIGHT · fall of the log-odds of right answers
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast, final

from torch import Tensor

from maclaurin.conversion.fact_questions import Question
from maclaurin.conversion.measure import Perplexity, having, measured_with
from maclaurin.conversion.measure_file import MeasureFile
from maclaurin.conversion.memory_budget import COUNTED_IN, MemoryBudget
from maclaurin.errors import InputError
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.models.cache_size import cache_bytes
from maclaurin.spec import AttentionSpec, parse
from maclaurin.spec.head_groups import LayerAttention

SINKS, SMALLEST_WINDOW = 4, 16
#: nats per token that a fall of the log-odds by 1 is worth: 0.1 is a hundredth of perplexity for a tenth
RECALL_WEIGHT = 0.1
#: shares of the budget that go to the heads that remember most
SHARES_OF_TOP = (0.0, 0.4, 0.6, 0.8)
#: shares of a head's slots that are its window; the others are kept keys
SHARES_OF_WINDOW = (0.25, 0.5, 1.0)
#: where memory must not grow, how many heads count as remembering
TOP_HEADS = 0.2
WHOLE, TAIL = "exp/sum", "taylor(2,about=mean)"


@final
@dataclass(frozen=True)
class Plan:
    """The attention of every layer, and what a text takes with it."""

    top: int  # how many of the heads that remember most have `of_top`
    of_top: str
    of_others: str
    attention: tuple[str, ...]
    bytes: int

    @property
    def name(self) -> str:
        """In one line."""
        return self.of_others if not self.top else f"{self.top} heads {self.of_top}, others {self.of_others}"


@final
@dataclass(frozen=True)
class Measured:
    """A plan on calibration text and questions."""

    plan: Plan
    loss: float
    log_odds: float
    cost: float


@final
@dataclass(frozen=True)
class Decision:
    """The best plan, beside every other that was measured and the original."""

    best: Measured
    measured: tuple[Measured, ...]
    loss: float
    log_odds: float

    @property
    def frontier(self) -> tuple[Measured, ...]:
        """Plans that no other beats in bytes and in cost."""
        return tuple(
            m
            for m in self.measured
            if not any(
                (o.plan.bytes, o.cost) != (m.plan.bytes, m.cost)
                and o.plan.bytes <= m.plan.bytes
                and o.cost <= m.cost
                for o in self.measured
            )
        )


def decide(
    model: MaclaurinForCausalLM,
    plans: Sequence[Plan],
    rows: Tensor,
    questions: Sequence[Question],
    file: MeasureFile,
    report: Callable[[float], None] = lambda share: None,
) -> Decision:
    """Measure every plan the file does not know on rows [B, T] and questions, and take the cheapest."""
    own = [str(layer) for layer in cast("MaclaurinConfig", model.config).layer_attention()]
    text = Perplexity(rows)

    def measure(attention: Sequence[str]) -> tuple[float, float]:
        name = f"plan, {len(questions)} questions, text {list(rows.shape)}: " + " | ".join(attention)
        if name not in file.found:
            loss = math.log(measured_with(model, attention, text))
            with having(model, attention):
                odds = [float(question.log_odds(model, question.read(model))) for question in questions]
            file.keep(name, [loss, sum(odds) / len(odds)])
        loss, odds = file.found[name]
        return loss, odds

    loss, odds = measure(own)
    report(1 / (1 + len(plans)))
    measured = []
    for done, plan in enumerate(plans, start=2):
        own_loss, own_odds = measure(plan.attention)
        cost = own_loss - loss + RECALL_WEIGHT * max(0.0, odds - own_odds)
        measured.append(Measured(plan, own_loss, own_odds, cost))
        report(done / (1 + len(plans)))
    best = min(measured, key=lambda found: (found.cost, found.plan.bytes))
    return Decision(best, tuple(measured), loss, odds)


# ------------------------------------------------------------------------------------------- plans


def plans_for(
    config: MaclaurinConfig, budget: MemoryBudget, ranking: Sequence[tuple[int, int]]
) -> list[Plan]:
    """Plans that fill the budget, for heads in the order of how much they remember."""
    found: dict[tuple[str, ...], Plan] = {}
    for top, of_top, of_others in _mixtures(config, budget, len(ranking)):
        attention = attention_of(config, ranking[:top], of_top, of_others)
        size = bytes_of(config, attention, budget.at)
        if size <= budget.bytes:
            found.setdefault(attention, Plan(top, of_top, of_others, attention, size))
    if not found:
        heads = len(ranking)
        smallest = attention_of(config, (), WHOLE, _exact_keys(SMALLEST_WINDOW + SINKS, 1.0))
        needed = bytes_of(config, smallest, budget.at)
        raise InputError(
            f"a budget of {budget} is too small: {heads} key-value heads with {SINKS} sinks and a window of "
            f"{SMALLEST_WINDOW} take {needed:,} bytes. Give that or more."
        )
    return list(found.values())


def attention_of(
    config: MaclaurinConfig, top: Sequence[tuple[int, int]], of_top: str, of_others: str
) -> tuple[str, ...]:
    """The notation of every layer, with `of_top` for those (layer, head)."""
    chosen, specs = set(top), (parse(of_top), parse(of_others))
    return tuple(
        str(LayerAttention.of_heads([specs[(layer, head) not in chosen] for head in range(config.kv_heads)]))
        for layer in range(config.num_hidden_layers)
    )


def bytes_of(config: MaclaurinConfig, attention: Sequence[str], tokens: int) -> int:
    """What a text of so many tokens takes."""
    other = copy.copy(config)
    other.attention = list(attention)
    return cache_bytes(other, 1, tokens, COUNTED_IN)


def _mixtures(config: MaclaurinConfig, budget: MemoryBudget, heads: int) -> Iterator[tuple[int, str, str]]:
    """(number of top heads, their attention, that of the others)"""
    size = config.head_size
    key = 2 * size * COUNTED_IN.itemsize  # of one key and value
    for share in SHARES_OF_TOP:
        if budget.constant:
            top = round(TOP_HEADS * heads) if share else 0
        else:
            top = min(heads, int(share * budget.bytes / (budget.at * key)))
        if share and not top:
            continue
        left = budget.bytes * (1 - share) if budget.constant else budget.bytes - top * budget.at * key
        if top == heads:
            yield top, WHOLE, WHOLE
            continue
        for near in SHARES_OF_WINDOW:
            grows = not budget.constant or not top
            of_top = WHOLE if grows else _filling(share * budget.bytes / top, size, near)
            if of_top is None:
                continue
            for tail in (None, TAIL):
                of_others = _filling(left / (heads - top), size, near, tail)
                if of_others is not None:
                    yield top, of_top, of_others


def _filling(budget: float, size: int, near: float, tail: str | None = None) -> str | None:
    """The attention whose state takes so many bytes; None where that is less than sinks and a window."""

    def taken(slots: int) -> int:
        spec: AttentionSpec = parse(_exact_keys(slots, near, tail))
        return spec.state_bytes(size, size, own=COUNTED_IN.itemsize, working=4) + 8  # and a count

    least = SMALLEST_WINDOW + SINKS
    if taken(least) > budget:
        return None
    most = least
    while taken(2 * most) <= budget:
        most *= 2
    step = most
    while step:
        most, step = (most + step if taken(most + step) <= budget else most), step // 2
    return _exact_keys(most, near, tail)


def _exact_keys(slots: int, near: float, tail: str | None = None) -> str:
    """Sinks, and a window with kept keys behind it, in so many slots."""
    window = min(slots - SINKS, max(SMALLEST_WINDOW, round(near * (slots - SINKS))))
    kept = slots - SINKS - window
    also = f",kept={kept}" if kept else ""
    return f"{tail or 'poly(0)'}+window({window},sinks={SINKS}{also})/sum"
