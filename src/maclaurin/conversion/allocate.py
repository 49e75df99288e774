"""Choose the memory of each head: plans that fill a budget, measured on calibration text and questions.

    plan    the retrieval heads (those that attend to facts far back, see head_measures.py) keep every key or,
            if memory must not grow, have a long window; the others get sinks, a window and kept keys: each as
            many as its damage on text suggests, or all the same, with a polynomial tail if one fits

Plans differ in how much of the budget goes to the retrieval heads. The cost of each is measured:

    cost = increase of the loss per token + recall_weight · drop of the log-odds of right answers

All plans answer a few questions, and the best of them many more: with 24 questions the standard error of the
cost is as large as the differences between plans.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev
from typing import cast, final

from torch import Tensor

from maclaurin.conversion.conversion_record import MemoryBudget
from maclaurin.conversion.fact_questions import Answer, Question, answers_together
from maclaurin.conversion.head_measures import TextDamage
from maclaurin.conversion.measure import MeasureFile, Perplexity, measured_with
from maclaurin.conversion.memory_budget import COUNTED_IN
from maclaurin.errors import InputError
from maclaurin.evaluation.likelihood import tokens_at_once
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.models.cache import cache_bytes
from maclaurin.models.modeling import with_attention
from maclaurin.spec import parse
from maclaurin.spec.head_groups import LayerAttention

SINKS, SMALLEST_WINDOW = 4, 16
#: cost in nats per token of a log-odds drop by 1; at 0.1, a drop by 0.1 weighs as much as 1 % of perplexity
RECALL_WEIGHT = 0.1
#: shares of the budget that go to the retrieval heads
SHARES_OF_TOP = (0.0, 0.25, 0.35, 0.5, 0.7, 0.85)
#: if memory must not grow: shares of the heads that count as retrieval heads, and of the budget for them
CONSTANT_TOPS = ((0.0, 0.0), (0.1, 0.3), (0.2, 0.4), (0.2, 0.6))
#: share of the budget for heads whose window is as long as a distance of the questions
SHARE_OF_REACH = 0.4
#: a plan that leaves more than this share of the budget unused is not a candidate if another plan uses more
MOST_UNUSED = 0.1
#: questions that all plans answer, questions that the best plans answer, and how many those are
FIRST_QUESTIONS, FINAL_QUESTIONS, FINALISTS = 12, 64, 3
#: shares of a head's slots that are its window; the others are kept keys
WINDOW_ALONE, MOSTLY_KEPT = 1.0, 0.25
#: if damage decides: fewest keys of a head, sinks included, and the size from which sizes do not double
FEWEST_KEYS, FINE_FROM = 20, 1024
WHOLE, TAIL = "exp/sum", "taylor(2,about=mean)"
#: share of the budget for the layers or heads of a reference plan that keep every key
SHARE_OF_WHOLE = 0.75

Place = tuple[int, int]  # (layer, key-value head)


@final
@dataclass(frozen=True)
class MemoryPlan:
    """The attention of every layer, and the memory a text takes with it.

    top      number of top-ranked heads, which have the memory `of_top`
    others   the different memories of the other heads, the smallest first
    layers   how many whole layers the top heads are; 0 if heads were chosen one by one
    """

    top: int
    of_top: str
    others: tuple[str, ...]
    attention: tuple[str, ...]
    bytes: int
    layers: int = 0

    @property
    def is_by_damage(self) -> bool:
        """Whether the other heads have as many keys as their damage on text suggests."""
        return len(self.others) > 1

    @property
    def name(self) -> str:
        """The plan in one line."""
        others = self.others[0] if self.others else "none"
        if self.is_by_damage:
            fewest, most = _slots(self.others[0]), _slots(self.others[-1])
            others = f"{fewest:,} to {most:,} exact keys by their damage on text"
        return others if not self.top else f"{self._top} {self.of_top}, others {others}"

    @property
    def summary(self) -> str:
        """The keys of its heads in a few words: 5 exact; others 36–1,028 by damage."""
        others = memory_in_words(self.others[0]) if self.others else "none"
        if self.is_by_damage:
            others = f"{_slots(self.others[0]):,}–{_slots(self.others[-1]):,} by damage"
        if not self.top:
            return f"all heads {others}"
        top = "exact" if self.of_top == WHOLE else f"with {memory_in_words(self.of_top)}"
        return f"{self._top if self.layers else self.top} {top}; others {others}"

    @property
    def _top(self) -> str:
        if self.layers:
            return "1 layer" if self.layers == 1 else f"{self.layers} layers"
        return f"{self.top} heads"

    @property
    def kind(self) -> str:
        """How it spends memory, one of memory_page.METHODS."""
        if self.layers:
            return "every key in some layers"
        if self.top:
            return "every key in some heads" if self.of_top == WHOLE else "long windows for some heads"
        specs = [parse(memory) for memory in self.others]
        if any(spec.orders for spec in specs):
            return "tail"
        has_kept = any(spec.window is not None and spec.window.kept for spec in specs)
        return "window + kept" if has_kept else "window"


@final
@dataclass(frozen=True)
class Measured:
    """A plan on calibration text and questions.

    recall       share of the questions that are answered right; guessing gets one in four
    error        standard error of the cost, from its recall part, which dominates it; None
                 with a single question
    questions    how many were asked
    """

    plan: MemoryPlan
    loss: float
    log_odds: float
    recall: float
    cost: float
    error: float | None
    questions: int


@final
@dataclass(frozen=True)
class Answered:
    """An attention on calibration text, with its answers to the questions asked so far."""

    loss: float
    answers: tuple[Answer, ...]

    @property
    def log_odds(self) -> float:
        """The mean log-odds of right answers."""
        return fmean(answer.log_odds for answer in self.answers)

    @property
    def recall(self) -> float:
        """The share of right answers."""
        return fmean(answer.is_right for answer in self.answers)

    def first(self, number: int) -> Answered:
        """The same with the first answers only."""
        return Answered(self.loss, self.answers[:number])

    def measured(self, plan: MemoryPlan, original: Answered, recall_weight: float) -> Measured:
        """A plan with these answers, compared with the original's answers to the same questions."""
        number = len(self.answers)
        same = original.first(number)
        drops = [o.log_odds - own.log_odds for o, own in zip(same.answers, self.answers, strict=True)]
        return Measured(
            plan,
            self.loss,
            self.log_odds,
            self.recall,
            self.loss - original.loss + recall_weight * max(0.0, fmean(drops)),
            recall_weight * stdev(drops) / math.sqrt(number) if number > 1 else None,
            number,
        )


@final
@dataclass(frozen=True)
class Decision:
    """The best plan, with every measured plan, plans to compare with, and the original."""

    best: Measured
    measured: tuple[Measured, ...]
    original: Answered
    references: tuple[Measured, ...] = ()


def decide(
    model: MaclaurinForCausalLM,
    plans: Sequence[MemoryPlan],
    rows: Tensor,
    questions: Sequence[Question],
    file: MeasureFile,
    report: Callable[[float], None] = lambda share: None,
    *,
    finalists: int = FINALISTS,
    references: Sequence[MemoryPlan] = (),
    recall_weight: float = RECALL_WEIGHT,
) -> Decision:
    """Choose the cheapest plan on rows [B, T] and questions; what is in the file is not measured again.

    All plans answer the first FIRST_QUESTIONS; then the best `finalists` answer all. The best of those
    is chosen. References answer the first questions too, but are not chosen unless they are among the plans.
    """
    own = [str(layer) for layer in cast("MaclaurinConfig", model.config).layer_attention()]
    some = questions[:FIRST_QUESTIONS]
    finalists = min(finalists, len(plans))
    known = {plan.attention for plan in plans}
    others = [plan for plan in references if plan.attention not in known]
    total = len(questions) * (1 + finalists) + len(some) * (len(plans) - finalists + len(others))
    done = 0

    def measure(attention: Sequence[str], asked: Sequence[Question], more: int) -> Answered:
        nonlocal done
        found = _answered(model, attention, rows, asked, file)
        done += more
        report(done / total)
        return found

    # in the same two parts as the plans: texts of a batch are cut to the same length
    measure(own, some, len(some))
    original = measure(own, questions, len(questions) - len(some))

    def by_some(plan: MemoryPlan) -> Measured:
        return measure(plan.attention, some, len(some)).measured(plan, original, recall_weight)

    def by_all(plan: MemoryPlan) -> Measured:
        found = measure(plan.attention, questions, len(questions) - len(some))
        return found.measured(plan, original, recall_weight)

    first = sorted(map(by_some, plans), key=_by_cost)
    final = sorted((by_all(found.plan) for found in first[:finalists]), key=_by_cost)
    compared = list(map(by_some, others))
    return Decision(final[0], (*final, *first[finalists:]), original, tuple(compared))


def _by_cost(found: Measured) -> tuple[float, int]:
    return found.cost, found.plan.bytes


def _answered(
    model: MaclaurinForCausalLM,
    attention: Sequence[str],
    rows: Tensor,
    questions: Sequence[Question],
    file: MeasureFile,
) -> Answered:
    """Loss and answers with this attention: those in the file, and the others measured now."""
    name = f"plan on text {list(rows.shape)}: " + " | ".join(attention)
    if name not in file.found:
        file.keep(name, {"loss": math.log(measured_with(model, attention, Perplexity(rows))), "answers": []})
    known = file.found[name]
    new = questions[len(known["answers"]) :]
    if new:
        with with_attention(model, attention):
            found = answers_together(model, new, tokens_at_once(model.device))
        answers = [*known["answers"], *([a.log_odds, a.is_right] for a in found)]
        file.keep(name, {"loss": known["loss"], "answers": answers})
    answers = file.found[name]["answers"][: len(questions)]
    return Answered(known["loss"], tuple(Answer(odds, right) for odds, right in answers))


# ------------------------------------------------------------------------------------------- plans


def plans_for(
    config: MaclaurinConfig,
    budget: MemoryBudget,
    ranking: Sequence[Place],
    damage: TextDamage | None = None,
    reaches: Sequence[int] = (),
) -> list[MemoryPlan]:
    """Plans that fill the budget, for heads ordered by score, the best retrieval head first.

    reaches    if memory must not grow: how many tokens back the questions' facts are; some plans have windows
               that long, for as many heads as fit into a share of the budget
    """
    found: dict[tuple[str, ...], MemoryPlan] = {}
    for top, of_top, others in _mixtures(config, budget, ranking, damage, reaches):
        plan = _plan(config, budget.at, ranking, top, of_top, others)
        if plan.bytes <= budget.bytes:
            found.setdefault(plan.attention, plan)
    full = [plan for plan in found.values() if plan.bytes >= (1 - MOST_UNUSED) * budget.bytes]
    if not found:
        smallest = attention_of(config, dict.fromkeys(ranking, exact_keys(SMALLEST_WINDOW + SINKS)))
        needed = bytes_of(config, smallest, budget.at)
        raise InputError(
            f"a budget of {budget} is too small: {len(ranking)} key-value heads with {SINKS} sinks and a "
            f"window of {SMALLEST_WINDOW} take {needed:,} bytes. Give that or more."
        )
    return full or list(found.values())


def _plan(
    config: MaclaurinConfig,
    at: int,
    ranking: Sequence[Place],
    top: int,
    of_top: str,
    others: Sequence[str],
    layers: int = 0,
) -> MemoryPlan:
    """The first `top` heads of the ranking with the memory `of_top`, the others with one memory each."""
    memories = dict.fromkeys(ranking[:top], of_top) | dict(zip(ranking[top:], others, strict=True))
    attention = attention_of(config, memories)
    different = tuple(sorted(set(others), key=_slots))
    return MemoryPlan(top, of_top, different, attention, bytes_of(config, attention, at), layers)


def reference_plans(
    config: MaclaurinConfig, budget: MemoryBudget, score: Sequence[Sequence[float]]
) -> list[MemoryPlan]:
    """Simple plans that fill the same budget, to compare a choice with.

    All heads have a window, a window with kept keys, or a window with a tail if one fits. If memory may grow,
    also every key in some layers, or in some heads, and a window with kept keys in the others.

    score    of each head as a retrieval head, [layers][heads]; the best layers and heads keep every key
    """
    places = [(layer, head) for layer, row in enumerate(score) for head in range(len(row))]
    size, found = config.head_size, []
    for near, tail in ((WINDOW_ALONE, None), (MOSTLY_KEPT, None), (WINDOW_ALONE, TAIL)):
        same = filling(budget.bytes / len(places), size, near, tail)
        if same is not None:
            found.append(_plan(config, budget.at, places, 0, WHOLE, [same] * len(places)))
    if not budget.constant:
        number = round(SHARE_OF_WHOLE * budget.bytes / (budget.at * _key_bytes(size)))
        layers = number // config.kv_heads
        by_layer = sorted(places, key=lambda place: (-sum(score[place[0]]), place))
        by_head = sorted(places, key=lambda place: (-score[place[0]][place[1]], place))
        found += _with_exact_heads(config, budget, by_layer, layers * config.kv_heads, layers)
        found += _with_exact_heads(config, budget, by_head, number)
    return [plan for plan in found if plan.bytes <= budget.bytes]


def _with_exact_heads(
    config: MaclaurinConfig, budget: MemoryBudget, ranking: Sequence[Place], top: int, layers: int = 0
) -> list[MemoryPlan]:
    """The plan in which the first heads keep every key and the others share the rest equally, if it fits."""
    size, others = config.head_size, len(ranking) - top
    left = budget.bytes - top * budget.at * _key_bytes(size)
    same = filling(left / others, size, MOSTLY_KEPT) if top and others else None
    return [] if same is None else [_plan(config, budget.at, ranking, top, WHOLE, [same] * others, layers)]


def attention_of(config: MaclaurinConfig, memories: dict[Place, str]) -> tuple[str, ...]:
    """The notation of every layer, from the memory of every head."""
    return tuple(
        str(LayerAttention.of_heads([parse(memories[layer, head]) for head in range(config.kv_heads)]))
        for layer in range(config.num_hidden_layers)
    )


def bytes_of(config: MaclaurinConfig, attention: Sequence[str], tokens: int) -> int:
    """Bytes of the cache after `tokens` tokens."""
    other = copy.copy(config)
    other.attention = list(attention)
    return cache_bytes(other, 1, tokens, COUNTED_IN)


def memories_to_try(longest: int) -> list[str]:
    """The memories whose damage decides how bytes are shared, for texts of up to `longest` tokens.

    Both a window alone and one with kept keys: over all heads together kept keys do less damage at every
    size, but a third of the heads attend to near tokens and do better with a longer window (docs/LOG.md).
    The last one is a window over the whole text, which does no damage.
    """
    sizes = list(_ladder(longest))
    both = (exact_keys(slots, near) for slots in sizes[:-1] for near in (WINDOW_ALONE, MOSTLY_KEPT))
    return list(dict.fromkeys([*both, exact_keys(sizes[-1])]))


def _ladder(longest: int) -> Iterator[int]:
    """Numbers of keys, sinks included, that about double; the last one is `longest`."""
    free = FEWEST_KEYS - SINKS
    while free + SINKS < longest:
        yield free + SINKS
        between = free + free // 2 + SINKS
        if free >= FINE_FROM and between < longest:
            yield between
        free *= 2
    yield max(longest, FEWEST_KEYS)


def exact_keys(slots: int, near: float = WINDOW_ALONE, tail: str | None = None) -> str:
    """Sinks, a window and kept keys in `slots` slots."""
    window = min(slots - SINKS, max(SMALLEST_WINDOW, round(near * (slots - SINKS))))
    kept = slots - SINKS - window
    also = f",kept={kept}" if kept else ""
    return f"{tail or 'poly(0)'}+window({window},sinks={SINKS}{also})/sum"


def _mixtures(
    config: MaclaurinConfig,
    budget: MemoryBudget,
    ranking: Sequence[Place],
    damage: TextDamage | None,
    reaches: Sequence[int],
) -> Iterator[tuple[int, str, list[str]]]:
    """(number of top heads, their memory, the memory of every other head)"""
    size = config.head_size
    tops = list(_tops(budget, len(ranking), size, reaches))
    for number, (top, of_top, left) in enumerate(tops):
        others = ranking[top:]
        if not others:
            yield top, of_top, []
            continue
        shared = None if damage is None else _by_damage(others, left, size, damage)
        if shared is not None:
            yield top, of_top, shared
        with_tail = damage is None or number in (0, len(tops) - 1)
        for tail in (None, TAIL) if with_tail else (None,):
            same = filling(left / len(others), size, MOSTLY_KEPT, tail)
            if same is not None:
                yield top, of_top, [same] * len(others)


def _tops(
    budget: MemoryBudget, heads: int, size: int, reaches: Sequence[int]
) -> Iterator[tuple[int, str, float]]:
    """(number of top heads, their memory, bytes left for the others)"""
    key = _key_bytes(size)
    if not budget.constant:
        tops = {min(heads, int(share * budget.bytes / (budget.at * key))) for share in SHARES_OF_TOP}
        for top in sorted(tops):
            yield top, WHOLE, budget.bytes - top * budget.at * key
        return
    for share_of_heads, share in CONSTANT_TOPS:
        top = round(share_of_heads * heads)
        if not top:
            yield 0, WHOLE, budget.bytes
            yield from _tops_by_reach(budget, heads, size, reaches)
            continue
        for near in (WINDOW_ALONE, MOSTLY_KEPT):
            of_top = filling(share * budget.bytes / top, size, near)
            if of_top is not None:
                yield top, of_top, budget.bytes * (1 - share)


def _tops_by_reach(
    budget: MemoryBudget, heads: int, size: int, reaches: Sequence[int]
) -> Iterator[tuple[int, str, float]]:
    """Plans giving as many heads as the budget allows a window long enough for the facts.

    There is no such plan if the budget allows all heads such a window.
    """
    for reach in reaches:
        far = exact_keys(reach + SINKS)
        top = int(SHARE_OF_REACH * budget.bytes / _taken(far, size))
        if top and _taken(far, size) > budget.bytes / heads:
            yield top, far, budget.bytes - top * _taken(far, size)


def keys_of_heads(attention: Sequence[str], heads: int) -> list[list[str]]:
    """How many keys each head keeps, [layers][heads]: all, 260, 260w (a window alone), +t with a tail."""
    layers = [LayerAttention.read(text, heads) for text in attention]
    return [[_keys_of(str(spec)) for spec in layer.by_head] for layer in layers]


def _keys_of(memory: str) -> str:
    window = parse(memory).window
    if window is None:
        return "all" if memory == WHOLE else memory
    tail = "" if memory.startswith("poly(0)") else "+t"
    return f"{_slots(memory):,}{'' if window.kept else 'w'}{tail}"


def memory_in_words(memory: str) -> str:
    """poly(0)+window(45,sinks=4,kept=134)/sum → 183 (window 45, kept 134)"""
    window = parse(memory).window
    if window is None:
        return memory
    kept = f", kept {window.kept:,}" if window.kept else ""
    tail = "" if memory.startswith("poly(0)") else ", tail"
    return f"{_slots(memory):,} (window {window.size:,}{kept}{tail})"


def _slots(memory: str) -> int:
    window = parse(memory).window
    return 0 if window is None else window.size + window.sinks + window.kept


# ----------------------------------------------------------------------------------- sharing bytes


def _by_damage(others: Sequence[Place], budget: float, size: int, damage: TextDamage) -> list[str] | None:
    """A memory for each head, chosen greedily: bytes go to the head whose damage falls most per byte."""
    by_size = sorted(damage.of, key=_slots)
    options = {
        place: [(_taken(memory, size), damage(memory, *place), memory) for memory in by_size]
        for place in others
    }
    chosen = dict.fromkeys(others, 0)
    left = budget - sum(options[place][0][0] for place in others)
    if left < 0:
        return None
    waiting: list[tuple[float, Place, int]] = []

    def offer(place: Place) -> None:
        bytes_now, damage_now, _ = options[place][chosen[place]]
        steps = [
            ((after - damage_now) / (needed - bytes_now), place, step)
            for step, (needed, after, _) in enumerate(options[place])
            if step > chosen[place] and needed - bytes_now <= left
        ]
        if steps and min(steps)[0] < 0:
            heapq.heappush(waiting, min(steps))

    for place in others:
        offer(place)
    while waiting:
        _, place, step = heapq.heappop(waiting)
        more = options[place][step][0] - options[place][chosen[place]][0]
        if more <= left:
            chosen[place], left = step, left - more
        offer(place)
    memories = [options[place][chosen[place]][2] for place in others]
    return _using_up(memories, left, size)


def _using_up(memories: list[str], left: float, size: int) -> list[str]:
    """The same memories, with the rest of the budget shared equally."""
    more = int(left / len(memories) / (_key_bytes(size) + 4))  # a kept key also has a score
    if more < 1:
        return memories
    grown = [_grown(memory, more) for memory in memories]
    extra = sum(_taken(g, size) - _taken(m, size) for g, m in zip(grown, memories, strict=True))
    return grown if extra <= left else memories


def _grown(memory: str, slots: int) -> str:
    """`slots` more kept keys, or a longer window if no key is kept."""
    window = parse(memory).window
    assert window is not None
    if not window.kept:
        return exact_keys(window.slots + slots)
    return f"poly(0)+window({window.size},sinks={window.sinks},kept={window.kept + slots})/sum"


def _key_bytes(size: int) -> int:
    """Bytes of one key and value of a head."""
    return 2 * size * COUNTED_IN.itemsize


@cache
def _taken(memory: str, size: int) -> int:
    """Bytes of one head's state."""
    return parse(memory).state_bytes(size, size, own=COUNTED_IN.itemsize, working=4) + 8  # and a count


def filling(budget: float, size: int, near: float, tail: str | None = None) -> str | None:
    """The memory whose state fills the budget in bytes; None if that is too small for sinks and a window."""
    least = SMALLEST_WINDOW + SINKS
    if _taken(exact_keys(least, near, tail), size) > budget:
        return None
    most = least
    while _taken(exact_keys(2 * most, near, tail), size) <= budget:
        most *= 2
    step = most
    while step:
        fits = _taken(exact_keys(most + step, near, tail), size) <= budget
        most, step = (most + step if fits else most), step // 2
    return exact_keys(most, near, tail)
