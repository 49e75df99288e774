"""What a small memory costs SmolLM2-135M: recall and perplexity under each budget, untrained and trained.

    python benchmarks/carry_memory.py --model model.gguf --prose prose.jsonl.xz      # once, where both are
    PYTHONPATH=src:runs/carry/two python benchmarks/memory.py --seconds 300

For each goal a memory is chosen by calibration text and questions (maclaurin.conversion.run.choose_by), then
judged by 200 other questions at each distance and by novels that nothing was calibrated or trained on
(carry_memory.py says which texts). Goals with training are trained for --train-seconds on text, recall and
copying, and the original for as many steps on the same rows. Afterwards, rivals with the same bytes.

Every measurement is written as it comes. Given the same --out (or --resume FILE of an earlier run) nothing is
measured twice, and nothing is begun that is not expected to end within --seconds. On a GPU the model is bf16.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import stamp
from torch import Tensor

from maclaurin.conversion.allocate import (
    MOSTLY_KEPT,
    TAIL,
    WHOLE,
    WINDOW_ALONE,
    attention_of,
    bytes_of,
    filling,
)
from maclaurin.conversion.fact_questions import Answer, Question, answers_together
from maclaurin.conversion.measure import Perplexity, having
from maclaurin.conversion.measure_file import MeasureFile
from maclaurin.conversion.memory_budget import COUNTED_IN, MemoryBudget
from maclaurin.conversion.run import Chosen, choose_by, measured_with
from maclaurin.evaluation.likelihood import tokens_at_once
from maclaurin.files import write_json
from maclaurin.models.loading import load_model
from maclaurin.training.losses import summed_cross_entropy

RESULTS = Path(__file__).parent / "results" / "memory.json"
#: chance of a right answer among four
CHANCE = 0.25
#: rows of a training step: text, recall, copying
STEP = (12, 5, 1)
LEARNING_RATE = 1e-4
#: how much more the answer of a recall row counts than another token
ANSWER_WEIGHT = 20.0


@dataclass(frozen=True)
class Goal:
    """A budget, and what is to be reached under it."""

    name: str
    memory: str | None
    constant: str | None
    at: int
    trained: bool


GOALS = (
    Goal("30% at 4k", "30%", None, 4096, trained=False),
    Goal("constant 53 MB", None, "53MB", 4096, trained=False),
    Goal("10% at 8k", "10%", None, 8192, trained=True),
    Goal("constant 8 MB", None, "8MB", 8192, trained=True),
)


def main() -> None:
    """Everything that is not known yet and fits into the time."""
    options = _options()
    clock = Clock(options.seconds)
    results = Results.open(options.out, options.resume)
    with clock.step("load", 25) as go:
        if not go:
            return
        model = _model(options)
        tokens = _tokens(options.carry)
    results.keep("machine", stamp())
    results.keep("settings", {n: str(v) for n, v in vars(options).items()})
    bench = Bench(options, clock, results, model, tokens)
    bench.measure("original", None)
    goals = [goal for goal in GOALS if goal.name in options.goals]
    for goal in (g for g in goals if not g.trained):
        bench.untrained(goal)
    bench.trained([g for g in goals if g.trained])
    for goal in (g for g in goals if not g.trained):
        bench.rivals(goal)
    bench.summary()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--carry", type=Path, default=Path("runs/carry"), help="what carry_memory.py wrote")
    parser.add_argument("--model", help="another model than the carried one")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--resume", type=Path, help="a results file of before to go on from")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--train-seconds", type=float, default=45.0, help="of the first trained goal")
    parser.add_argument("--train-length", type=int, default=2048, help="tokens of a training row")
    parser.add_argument("--goals", nargs="+", default=[goal.name for goal in GOALS])
    parser.add_argument("--questions", type=int, default=200, help="at each distance")
    parser.add_argument("--distances", type=int, nargs="+", default=[1024, 4096, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 1024, 4096])
    parser.add_argument("--text-tokens", type=int, default=65536, help="of evaluation text at each length")
    parser.add_argument("--choose-questions", type=int, default=16, help="at each distance of choosing")
    parser.add_argument("--choose-distances", type=int, nargs="+", default=[256, 1024, 3072])
    parser.add_argument("--choose-rows", type=int, default=4)
    parser.add_argument("--choose-length", type=int, default=4096)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


# ------------------------------------------------------------------------------------ what is needed


def _model(options: argparse.Namespace) -> Any:
    name = options.model
    if name is None:
        name = options.carry / "model.gguf"
        if not name.is_file():
            halves = (options.carry / "one" / "model.gguf.1", options.carry / "two" / "model.gguf.2")
            name.write_bytes(b"".join(half.read_bytes() for half in halves))
    model, _ = load_model(name)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    return model.to(options.device, dtype).eval()  # type: ignore[arg-type]


def _tokens(carry: Path) -> dict[str, np.ndarray]:
    with lzma.open(carry / "two" / "tokens.npz.xz") as file, np.load(io.BytesIO(file.read())) as found:
        return dict(found)


def _questions(tokens: dict[str, np.ndarray], name: str) -> list[Question]:
    """The inverse of `packed` in carry_memory.py."""
    line, place, found = torch.from_numpy(tokens[f"{name}_tokens"].astype(np.int64)), 0, []
    for facts in tokens[f"{name}_facts"].tolist():
        distance, number, context, prompt, start, stop, right, *choices = facts
        found.append(
            Question(
                distance,
                number,
                line[None, place : place + context],
                line[None, place + context : place + context + prompt],
                slice(start, stop),
                tuple(choices),
                right,
            )
        )
        place += context + prompt
    return found


@dataclass
class Clock:
    """What is begun must end in time: a step takes about as long as its like before it."""

    seconds: float
    begin: float = field(default_factory=time.monotonic)
    known: dict[str, float] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.seconds - (time.monotonic() - self.begin)

    def step(self, name: str, guess: float) -> _Step:
        """A block whose condition says whether there is time for it."""
        return _Step(self, name, self.known.get(name, guess))


@dataclass
class _Step:
    clock: Clock
    name: str
    expected: float
    start: float = 0.0

    def __enter__(self) -> bool:
        self.start = time.monotonic()
        fits = self.expected * 1.15 <= self.clock.left
        if not fits:
            print(f"no time for {self.name}: {self.expected:.0f} s, {self.clock.left:.0f} left", flush=True)
            self.name = ""
        return fits

    def __exit__(self, *problem: object) -> None:
        if self.name and problem[0] is None:
            took = time.monotonic() - self.start
            self.clock.known[self.name] = max(took, self.clock.known.get(self.name, 0.0))
            elapsed = time.monotonic() - self.clock.begin
            print(f"{elapsed:6.1f} s  {self.name} {took:.1f} s", flush=True)


@dataclass
class Results:
    """Measurements by name, written as they come."""

    path: Path
    found: dict[str, Any]

    @staticmethod
    def open(path: Path, resume: Path | None) -> Results:
        """What the file holds; with `resume`, what another file holds first."""
        path.parent.mkdir(parents=True, exist_ok=True)
        for suffix in (".json", ".measured.json"):
            before = None if resume is None else resume.with_suffix(suffix)
            if before is not None and before.is_file() and not path.with_suffix(suffix).exists():
                shutil.copy2(before, path.with_suffix(suffix))
        return Results(path, json.loads(path.read_text()) if path.is_file() else {})

    def keep(self, name: str, value: Any) -> None:
        """Remember and write."""
        self.found[name] = value
        write_json(self.path, self.found)

    def of(self, arm: str) -> dict[str, Any]:
        """The measures of one arm."""
        return self.found.setdefault("arms", {}).setdefault(arm, {})


# ----------------------------------------------------------------------------------------- the bench


@dataclass
class Bench:
    """The model, its texts and questions, and where results go."""

    options: argparse.Namespace
    clock: Clock
    results: Results
    model: Any
    tokens: dict[str, np.ndarray]

    def __post_init__(self) -> None:
        limit = self.options.questions
        judging = _questions(self.tokens, "judging")
        self.judging = {d: [q for q in judging if q.distance == d][:limit] for d in self.options.distances}
        self.prior = _questions(self.tokens, "prior")[:limit]
        asked = self.options.choose_questions
        self.choosing = [
            q
            for q in _questions(self.tokens, "choosing")
            if q.distance in self.options.choose_distances and q.number < asked
        ]
        rows = torch.from_numpy(self.tokens["calibration"].astype(np.int64))
        # the two sources alternate
        order = [n for pair in zip(range(8), range(8, 16), strict=True) for n in pair]
        self.calibration = rows[order][: self.options.choose_rows, : self.options.choose_length].contiguous()
        self.own = ["exp/sum"] * self.model.config.num_hidden_layers

    # ------------------------------------------------------------------------------------- measures

    def measure(self, arm: str, attention: Sequence[str] | None, distances: Sequence[int] = ()) -> None:
        """Recall and perplexity of the model with this attention, whatever is not known yet."""
        found = self.results.of(arm)
        kind = "original" if attention is None else "limited"
        with having(self.model, attention or self.own):
            for distance in distances or self.options.distances:
                name, label = f"recall {distance}", f"{kind} recall {distance}"
                self._once(
                    found, name, label, self._guess(kind, 200 * 1.15 * distance), self._recall(distance)
                )
            for length in self.options.lengths:
                name, label = f"perplexity {length}", f"{kind} perplexity {length}"
                self._once(found, name, label, self._guess(kind, 65536), self._perplexity(length))

    def _guess(self, kind: str, tokens: float) -> float:
        """Seconds for so many tokens on an H200 before anything was timed."""
        return 1.0 + tokens / (400_000 if kind == "original" else 90_000)

    def _once(
        self, found: dict[str, Any], name: str, label: str, guess: float, work: Callable[[], Any]
    ) -> None:
        if name in found:
            return
        with self.clock.step(label, guess) as go:
            if go:
                found[name] = work()
                self.results.keep("arms", self.results.found["arms"])

    def _recall(self, distance: int) -> Callable[[], dict[str, Any]]:
        def work() -> dict[str, Any]:
            at_once = tokens_at_once(self.model.device)
            odds = answers_together(self.model, self.judging[distance], at_once)
            before = answers_together(self.model, self.prior, at_once)
            return _recall_summary(self.judging[distance], odds, before)

        return work

    def _perplexity(self, length: int) -> Callable[[], float]:
        def work() -> float:
            rows = torch.from_numpy(self.tokens["evaluation"].astype(np.int64))
            longest = max(self.options.lengths)
            rows = rows[: max(1, self.options.text_tokens // longest), :longest]
            return Perplexity(rows.reshape(-1, length))(self.model, lambda tokens: None)

        return work

    # ------------------------------------------------------------------------------------- untrained

    def untrained(self, goal: Goal) -> None:
        """Choose and judge."""
        attention = self.chosen(goal)
        if attention is not None:
            self.measure(goal.name, attention)

    def chosen(self, goal: Goal) -> list[str] | None:
        """The attention for a goal; None where there is no time to choose."""
        known = self.results.found.get("chosen", {})
        if goal.name in known:
            return known[goal.name]["attention"]
        budget = MemoryBudget.read(self.model.config, memory=goal.memory, constant=goal.constant, at=goal.at)
        path = self.results.path.with_suffix(".measured.json")
        identity = measured_with(self.model, self.calibration, self.choosing)
        file = MeasureFile.open(path, identity, resume=path.is_file())
        with self.clock.step("choose" if known else "choose first", 30 if known else 60) as go:
            if not go:
                return None
            chosen = choose_by(self.model, budget, self.choosing, self.calibration, file, progress=False)
            self.results.keep("chosen", {**known, goal.name: _chosen(chosen)})
            print(goal.name, chosen.decision.best.plan.name, flush=True)
        return list(chosen.decision.best.plan.attention)

    # --------------------------------------------------------------------------------------- trained

    def trained(self, goals: Sequence[Goal]) -> None:
        """Each goal trained, then the original for as many steps on the same rows."""
        weights = {name: t.clone() for name, t in self.model.state_dict().items()}
        steps = self.results.found.get("training", {}).get("steps")
        for goal in goals:
            attention = self.chosen(goal)
            if attention is None:
                continue
            self.measure(f"{goal.name}, untrained", attention)
            steps = self._trained_arm(f"{goal.name}, trained", attention, weights, steps) or steps
        if steps:
            self._trained_arm("original, trained", self.own, weights, steps)

    def _trained_arm(
        self, arm: str, attention: list[str], weights: dict[str, Tensor], steps: int | None
    ) -> int | None:
        """Train from the original weights, measure, put the weights back; the number of steps."""
        if self._is_complete(arm):
            return steps
        is_own = attention == self.own
        guess = self.options.train_seconds * (0.3 if is_own else 1.0) + 5
        after = 10 if is_own else 25  # a trained model that is not measured is lost
        with self.clock.step(f"train{' original' if is_own else ''}", guess + after) as go:
            if not go:
                return None
            begin = time.monotonic()
            with having(self.model, attention):
                done, losses = self._train(steps)
            took = time.monotonic() - begin
        self.results.of(arm)["training"] = {"steps": done, "seconds": round(took, 1), "losses": losses}
        self.results.keep(
            "training", {"steps": done, "rows_of_a_step": STEP, "length": self.options.train_length}
        )
        self.clock.known.pop("train", None)
        self.measure(arm, None if is_own else attention)
        self.model.load_state_dict(weights)
        return done

    def _is_complete(self, arm: str) -> bool:
        found = self.results.of(arm)
        wanted = [f"recall {d}" for d in self.options.distances]
        wanted += [f"perplexity {n}" for n in self.options.lengths]
        return all(name in found for name in wanted)

    def _train(self, steps: int | None) -> tuple[int, list[float]]:
        """AdamW on fp32 copies of the weights; by time where the number of steps is not given."""
        model = self.model
        own = list(model.parameters())
        masters = [p.detach().float().clone().requires_grad_() for p in own]
        optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, weight_decay=0.0, betas=(0.9, 0.95))
        begin, losses, done = time.monotonic(), [], 0
        model.train()
        for batch in _batches(self.tokens, _questions(self.tokens, "training"), self.options.train_length):
            warm = min(1.0, (done + 1) / 10)
            elapsed = (time.monotonic() - begin) / self.options.train_seconds
            share = done / steps if steps else elapsed
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * warm * max(0.05, 1 - share)
            total = 0.0
            for some in batch.parts(tokens_at_once(model.device)):
                loss = some.loss(model, len(batch.tokens))
                loss.backward()
                total += float(loss.detach())
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in own]
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad = gradient.float()
            torch.nn.utils.clip_grad_norm_(masters, 1.0)
            optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(own, masters, strict=True):
                    parameter.copy_(master)
                    parameter.grad = None
            losses.append(round(total, 4))
            done += 1
            if done == steps or (not steps and time.monotonic() - begin > self.options.train_seconds):
                break
        model.eval()
        return done, losses[:: max(1, len(losses) // 20)]

    # ---------------------------------------------------------------------------------------- rivals

    def rivals(self, goal: Goal) -> None:
        """Other ways to spend the same bytes, nothing trained."""
        known = self.results.found.get("chosen", {}).get(goal.name)
        if known is None:
            return
        for name, attention in _rivals(self.model.config, known, goal):
            size = bytes_of(self.model.config, attention, goal.at)
            self.results.of(f"{goal.name}: {name}")["bytes"] = size
            self.measure(f"{goal.name}: {name}", attention, self.options.distances[:2])

    def summary(self) -> None:
        """Every arm beside the original; trained arms beside the original trained alike."""
        arms = self.results.found.get("arms", {})
        lines = [_line(name, found, arms) for name, found in arms.items()]
        self.results.keep("summary", lines)
        for line in lines:
            print(line)


def _recall_summary(
    questions: Sequence[Question], answers: list[Answer], prior: list[Answer]
) -> dict[str, Any]:
    """Accuracy with Wilson's interval, log-odds, and log-odds less those without the facts."""
    number, z = len(answers), 1.96
    share = sum(answer.is_right for answer in answers) / number
    centre = (share + z**2 / (2 * number)) / (1 + z**2 / number)
    spread = z / (1 + z**2 / number) * math.sqrt(share * (1 - share) / number + z**2 / (4 * number**2))
    gains = [a.log_odds - prior[q.number].log_odds for a, q in zip(answers, questions, strict=True)]
    return {
        "accuracy": share,
        "low": centre - spread,
        "high": centre + spread,
        "log_odds": sum(answer.log_odds for answer in answers) / number,
        "log_odds_less_prior": sum(gains) / number,
        "questions": number,
        "log_odds_of_each": [round(answer.log_odds, 3) for answer in answers],
    }


def _chosen(chosen: Chosen) -> dict[str, Any]:
    best = chosen.decision.best.plan
    return {"attention": list(best.attention), "top": best.top, **chosen.to_json()}


def _rivals(config: Any, chosen: dict[str, Any], goal: Goal) -> Iterator[tuple[str, list[str]]]:
    """Windows, kept keys, a tail, and whole layers, each filling the budget."""
    score = torch.tensor(chosen["heads"]["score"])
    places = [(layer, head) for layer in range(score.shape[0]) for head in range(score.shape[1])]
    budget, size = chosen["budget"]["bytes"], config.head_size
    key = 2 * size * COUNTED_IN.itemsize

    def hybrid(top: Sequence[tuple[int, int]], name: str) -> Iterator[tuple[str, list[str]]]:
        left = budget - len(top) * goal.at * key
        others = filling(left / (len(places) - len(top)), size, MOSTLY_KEPT)
        if others is not None:
            memories = dict.fromkeys(places, others) | dict.fromkeys(top, WHOLE)
            yield name, list(attention_of(config, memories))

    equal = {
        "window": (WINDOW_ALONE, None),
        "window and kept": (MOSTLY_KEPT, None),
        "window and tail": (WINDOW_ALONE, TAIL),
    }
    for name, (near, tail) in equal.items():
        memory = filling(budget / len(places), size, near, tail)
        if memory is not None:
            yield name, list(attention_of(config, dict.fromkeys(places, memory)))
    if goal.constant is None:
        number = round(0.75 * budget / (goal.at * key))
        layers = score.sum(1).sort(descending=True).indices.tolist()[: number // score.shape[1]]
        yield from hybrid([place for place in places if place[0] in layers], "whole layers")
        best = sorted(places, key=lambda place: -float(score[place]))[:number]
        yield from hybrid(best, "whole heads, others equal")


def _line(name: str, found: dict[str, Any], arms: dict[str, Any]) -> str:
    beside = arms.get("original, trained" if name.endswith(", trained") else "original", {})
    parts = [f"{name:44}"]
    for measure, value in sorted(found.items()):
        other = beside.get(measure)
        if measure.startswith("recall"):
            share = ""
            if other and other["accuracy"] > CHANCE:
                share = f" ({(value['accuracy'] - CHANCE) / (other['accuracy'] - CHANCE):.0%})"
            parts.append(f"{measure[7:]}: {value['accuracy']:.3f}{share} {value['log_odds_less_prior']:+.2f}")
        elif measure.startswith("perplexity"):
            ratio = f" (×{value / other:.4f})" if other else ""
            parts.append(f"ppl {measure[11:]}: {value:.2f}{ratio}")
    return "  ".join(parts)


# ------------------------------------------------------------------------------------- training rows


@dataclass(frozen=True)
class Rows:
    """Tokens [B, T] to predict, and how much more than others the last one counts: [B]."""

    tokens: Tensor
    last_weight: Tensor

    def parts(self, tokens_at_once: int) -> Iterator[Rows]:
        """So many tokens at a time."""
        rows = max(1, tokens_at_once // self.tokens.shape[1])
        for tokens, weight in zip(self.tokens.split(rows), self.last_weight.split(rows), strict=True):
            yield Rows(tokens, weight)

    def loss(self, model: Any, of: int) -> Tensor:
        """Their share in the mean over the tokens of `of` rows."""
        ids = self.tokens.to(model.device)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        weight = model.lm_head.weight
        every = summed_cross_entropy(hidden.flatten(0, 1), weight, ids[:, 1:].flatten())
        more = [n for n, w in enumerate(self.last_weight.tolist()) if w > 1]
        if more:
            answers = summed_cross_entropy(hidden[more, -1], weight, ids[more, -1])
            every = every + (ANSWER_WEIGHT - 1) * answers
        return every / (of * (ids.shape[1] - 1))


def _batches(tokens: dict[str, np.ndarray], questions: list[Question], length: int) -> Iterator[Rows]:
    """Text, questions with their answers at the end of text, and text that comes twice; always the same."""
    generator = torch.Generator().manual_seed(0)
    text = torch.from_numpy(tokens["training"].astype(np.int64)).reshape(-1, length)
    fitting = [q for q in questions if q.tokens < length - 8]

    def draw(most: int) -> int:
        return int(torch.randint(0, most, (1,), generator=generator))

    def recall() -> Tensor:
        q = fitting[draw(len(fitting))]
        asked = torch.cat([q.context[0], q.prompt[0], torch.tensor([q.choices[q.right]])])
        return torch.cat([text[draw(len(text))][: length - len(asked)], asked])

    def copying() -> Tensor:
        row = text[draw(len(text))]
        return torch.cat([row[: length // 2], row[: length - length // 2]])

    while True:
        texts, recalls, copies = STEP
        rows = [text[draw(len(text))] for _ in range(texts)]
        rows += [recall() for _ in range(recalls)] + [copying() for _ in range(copies)]
        weight = torch.tensor([1.0] * texts + [ANSWER_WEIGHT] * recalls + [1.0] * copies)
        yield Rows(torch.stack(rows), weight)


if __name__ == "__main__":
    main()
