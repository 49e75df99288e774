"""Score our tasks without the harness: each context is read once, and choices continue from its cache."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from maclaurin.evaluation.eval_task import Item, Query, ScoringMode
from maclaurin.evaluation.likelihood import TextReader, ending_log_likelihoods, perplexity, windowed_loss
from maclaurin.evaluation.results import Score, mean_score, share_score
from maclaurin.models import MaclaurinForCausalLM

#: how many tokens longer than the right answer a written answer may be
SLACK = 8

#: called with the share of the work done so far, and a description
Progress = Callable[[float, str], None]


@final
@dataclass(frozen=True)
class Answer:
    """The answer to one query.

    score      share of right answers among the best choices, or among the first words written
    log_odds   ln(p of the right choices / p of the others)
    prior      the same after the text without the facts
    """

    score: float
    log_odds: float | None = None
    prior: float | None = None
    non_finite: bool = False


@final
class Scorer:
    """A model with its tokenizer.

    max_length   most tokens the model reads; longer texts lose their beginning
    truncated    how many texts lost it
    """

    def __init__(self, model: MaclaurinForCausalLM, tokenizer: Any, max_length: int) -> None:
        self.model, self.tokenizer, self.max_length = model, tokenizer, max_length
        self.truncated = 0
        first = tokenizer.bos_token_id
        self._first = [first] if list(tokenizer("")["input_ids"])[:1] == [first] else []

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text, with the tokenizer's first token if it adds one."""
        return [*self._first, *self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]

    def answers(self, item: Item, mode: ScoringMode) -> list[Answer]:
        """One answer for each query."""
        if mode == "endings":
            found = self._ending_likelihoods(item)
            return [_answer(query, each, None) for query, each in zip(item.queries, found, strict=True)]
        return self._written(item) if mode == "written" else self._chosen(item)

    def text_loss(self, text: str) -> float:
        """Σ −ln p of every token of a text."""
        tokens = self.tokens(text)[len(self._first) :]
        start, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        return windowed_loss(self.model, tokens, end if start is None else start, self.max_length)

    # -------------------------------------------------------------------------------------- choices

    def _chosen(self, item: Item) -> list[Answer]:
        given = self._likelihoods(item.context, item.queries)
        if item.without is None:
            return [_answer(query, found, None) for query, found in zip(item.queries, given, strict=True)]
        truncated = self.truncated
        before = self._likelihoods(item.without, item.queries)
        self.truncated = truncated  # only contexts are counted
        return [_answer(*each) for each in zip(item.queries, given, before, strict=True)]

    def _likelihoods(self, context: str, queries: Sequence[Query]) -> list[list[float]]:
        """ln p of each choice of each query, up to a constant per query.

        The text is read up to where the tokens of two choices first differ. The tokens of a word depend on
        its neighbours, so a choice is not simply some tokens after those of the text.
        """
        spelled = [[self.tokens(f"{context}{q.prompt} {choice}") for choice in q.choices] for q in queries]
        stems = [_common_start(sequences) for sequences in spelled]
        longest = max(len(sequence) for sequences in spelled for sequence in sequences)
        prompts = [sequences[0][:stem] for sequences, stem in zip(spelled, stems, strict=True)]
        found = []
        for reader, sequences, stem in zip(self._read(prompts, longest), spelled, stems, strict=True):
            found.append([reader.log_likelihood(sequence[stem:]) for sequence in sequences])
        return found

    def _read(self, prompts: Sequence[list[int]], longest: int) -> list[TextReader]:
        """A reader for each prompt; their common beginning is read once.

        longest   tokens of the longest prompt with its continuation; if that exceeds max_length, the prompt
                  loses its beginning
        """
        shared = min(_common_start(prompts) + (len(prompts) == 1), *map(len, prompts))
        if shared < 1:
            return [self._read([prompt], longest)[0] for prompt in prompts]
        lost = min(max(0, longest - self.max_length), shared - 1)
        self.truncated += lost > 0
        common = TextReader.of(self.model, prompts[0][lost:shared])
        return [common.after(prompt[shared:]) for prompt in prompts]

    def _ending_likelihoods(self, item: Item) -> list[list[float]]:
        """ln p of the ending of each query after each of its choices.

        The words are the same after each choice, so their frequency cancels.
        """
        texts, truncated = [], False
        pairs = [(query, choice) for query in item.queries for choice in query.choices]
        for query, choice in pairs:
            before = self.tokens(item.context + choice)
            whole = self.tokens(f"{item.context}{choice} {query.prompt}")
            lost = min(max(0, len(whole) - self.max_length), len(before) - 1)
            texts.append((before[lost:], whole[len(before) :]))
            truncated = truncated or lost > 0
        self.truncated += truncated
        found = iter(ending_log_likelihoods(self.model, texts))
        return [[next(found) for _ in query.choices] for query in item.queries]

    # -------------------------------------------------------------------------------------- written

    def _written(self, item: Item) -> list[Answer]:
        prompts = [self.tokens(item.context + query.prompt_for("written")) for query in item.queries]
        most = [len(self.tokens(" " + ", ".join(query.answers))) + SLACK for query in item.queries]
        longest = max(len(prompt) + more for prompt, more in zip(prompts, most, strict=True))
        texts = [self._continuation(*each) for each in zip(self._read(prompts, longest), most, strict=True)]
        return [
            Answer(0.0, non_finite=True) if text is None else Answer(written_score(text, query.answers))
            for query, text in zip(item.queries, texts, strict=True)
        ]

    def _continuation(self, reader: TextReader, most: int) -> str | None:
        """What the model writes up to the end of a line; None if its output is not finite."""
        if not bool(reader.next_token.isfinite().all()):
            return None
        end = self.tokenizer.eos_token_id
        tokens = reader.greedy(most, lambda found: found[-1] == end or "\n" in self._decoded(found).lstrip())
        return self._decoded(tokens)

    def _decoded(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def written_score(text: str, answers: Sequence[str]) -> float:
    """The share of the n answers among the first n words of a text, not counting 'and'."""
    words = [word for word in re.findall(r"\w+", text.lower()) if word != "and"][: len(answers)]
    return sum(answer.lower() in words for answer in answers) / len(answers)


def _answer(query: Query, given: list[float], prior: list[float] | None) -> Answer:
    if not all(map(math.isfinite, given)):
        return Answer(0.0, non_finite=True)
    best = sorted(range(len(given)), key=lambda i: -given[i])[: len(query.right)]
    score = sum(i in query.right for i in best) / len(query.right)
    usable = prior is not None and all(map(math.isfinite, prior))
    return Answer(score, _log_odds(query, given), _log_odds(query, prior) if usable and prior else None)


def _log_odds(query: Query, likelihoods: list[float]) -> float:
    right = [likelihoods[i] for i in query.right]
    wrong = [found for i, found in enumerate(likelihoods) if i not in query.right]
    return _log_sum(right) - _log_sum(wrong)


def _log_sum(values: list[float]) -> float:
    largest = max(values)
    return largest + math.log(sum(math.exp(value - largest) for value in values))


def _common_start(sequences: Sequence[Sequence[int]]) -> int:
    """Length of the common beginning of all sequences, leaving at least one token of each."""
    shortest = min(map(len, sequences)) - 1
    first = sequences[0]
    for place in range(shortest):
        if any(sequence[place] != first[place] for sequence in sequences):
            return place
    return shortest


# ------------------------------------------------------------------------------------------- a task


@final
@dataclass(frozen=True)
class Asked:
    """The answers to all items of a task."""

    metrics: dict[str, Score]
    questions: int
    truncated: int
    non_finite: int
    distance: tuple[int, int, int] | None


def ask(
    scorer: Scorer, items: Sequence[Item], mode: ScoringMode, report: Progress = lambda share, what: None
) -> Asked:
    """Ask every item."""
    before = scorer.truncated
    if mode == "text":
        metrics, non_finite, questions = _text_metrics(scorer, items, report), 0, 0
    else:
        answers = []
        for number, item in enumerate(items, start=1):
            answers.append(scorer.answers(item, mode))
            report(number / len(items), f"{number} of {len(items)}")
        metrics = answer_metrics(answers, mode)
        non_finite = sum(answer.non_finite for each in answers for answer in each)
        questions = sum(map(len, answers))
    return Asked(metrics, questions, scorer.truncated - before, non_finite, _distance(scorer, items))


def answer_metrics(answers: Sequence[Sequence[Answer]], mode: ScoringMode) -> dict[str, Score]:
    """Means over items; queries of one item are averaged first, since they are about the same text."""
    scores = [statistics.mean(answer.score for answer in each) for each in answers]
    metrics = {"exact_match" if mode == "written" else "acc": share_score(scores)}
    odds = [[a.log_odds for a in each if a.log_odds is not None] for each in answers]
    gains = [
        [a.log_odds - a.prior for a in each if a.log_odds is not None and a.prior is not None]
        for each in answers
    ]
    for name, values in (("log_odds", odds), ("log_odds_gain", gains)):
        if any(values):
            metrics[name] = mean_score([statistics.mean(each) for each in values if each])
    return metrics


def _text_metrics(scorer: Scorer, items: Sequence[Item], report: Progress) -> dict[str, Score]:
    losses = []
    for number, item in enumerate(items, start=1):
        losses.append(scorer.text_loss(item.context))
        report(number / len(items), f"{number} of {len(items)}")
    size = sum(len(item.context.encode()) for item in items)
    words = sum(len(re.split(r"\s+", item.context)) for item in items)
    values = {
        "word_perplexity": perplexity(sum(losses) / words),
        "byte_perplexity": perplexity(sum(losses) / size),
        "bits_per_byte": sum(losses) / size / math.log(2),
    }
    return {
        name: Score(value=value if math.isfinite(value) else None, higher_is_better=False)
        for name, value in values.items()
    }


#: items whose distance is counted
ITEMS_FOR_DISTANCE = 50


def _distance(scorer: Scorer, items: Sequence[Item]) -> tuple[int, int, int] | None:
    """Tokens from the needed fact to the question: least, median, most."""
    texts = [
        item.context[query.known_until :] + query.prompt
        for item in items[:ITEMS_FOR_DISTANCE]
        for query in item.queries
        if query.known_until is not None
    ]
    if not texts:
        return None
    tokens = [len(scorer.tokens(text)) for text in texts]
    return min(tokens), round(statistics.median(tokens)), max(tokens)
