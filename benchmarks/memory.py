"""What a small memory costs SmolLM2-135M: recall and perplexity under each budget, untrained and trained.

    python benchmarks/carry_memory.py --model model.gguf --prose prose.jsonl.xz      # once, where both are
    PYTHONPATH=src:runs/carry/data python benchmarks/memory.py --seconds 300

For each goal, a memory is chosen on calibration text and questions (conversion/choose_memory.py). It
is then evaluated on 200 other questions at each distance and on novels that were not used for calibration or
training (carry_memory.py lists the texts). Goals with training have a memory by rule (`Goal.top`), since the
cheapest memory before training need not be the cheapest after it. All weights are trained for
--train-seconds to match the original's predictions (KL) on text, on text with facts and questions, and on
repeated text, and to answer the questions. The original is trained for as many steps on the same rows.
Afterwards, other memories of the same size are measured.

Every measurement is written at once. With the same --out (or --resume FILE of an earlier run) nothing is
measured twice, and nothing is started that is not expected to end within --seconds. On a GPU the model is
bf16.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import copy
import hashlib
import inspect
import io
import json
import lzma
import math
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import conversion
import numpy as np
import torch
from machine import stamp
from torch import Tensor

from maclaurin.conversion import allocate, choose_memory, fact_questions, head_measures
from maclaurin.conversion.allocate import (
    FINAL_QUESTIONS,
    MOSTLY_KEPT,
    TAIL,
    WHOLE,
    WINDOW_ALONE,
    Place,
    attention_of,
    bytes_of,
    filling,
    memories_to_try,
    plans_for,
)
from maclaurin.conversion.choose_memory import ChosenMemory, choose_by, measures_identity
from maclaurin.conversion.fact_questions import Answer, Question, answers_together
from maclaurin.conversion.head_measures import TextDamage, measure_damage, measure_heads
from maclaurin.conversion.measure import MeasureFile, Perplexity, beyond_windows, without_tails
from maclaurin.conversion.memory_budget import COUNTED_IN, MemoryBudget
from maclaurin.evaluation.likelihood import tokens_at_once
from maclaurin.models import MaclaurinCache
from maclaurin.models.model_folder import load_model
from maclaurin.models.modeling import with_attention
from maclaurin.plain_data import to_plain, write_json
from maclaurin.programs import dispatch
from maclaurin.programs import plan as programs_plan
from maclaurin.programs.kept_keys import KEPT_KEYS
from maclaurin.training.losses import summed_cross_entropy, summed_divergence

RESULTS = Path(__file__).parent / "results" / "memory.json"
#: the code that a choice depends on
CHOICE_MODULES = (allocate, choose_memory, fact_questions, head_measures)
#: chance of a right answer among four
CHANCE = 0.25
#: rows of a training step: text, recall, copying
STEP = (3, 2, 1)
LEARNING_RATE = 2e-4
#: weight of the mean loss of answers relative to the mean divergence from the original
ANSWER_WEIGHT = 0.1
#: tokens between groups of facts in a recall row, facts in a group, and tokens from one to the next
GROUPS_APART, FACTS_TOGETHER, FACTS_APART = 1024, 4, 25
#: smallest distance of a fact to its question
NEAREST = 64


@dataclass(frozen=True)
class Goal:
    """A budget, and what is to be reached under it."""

    name: str
    memory: str | None
    constant: str | None
    at: int
    #: for a memory that is trained: how many heads keep every key, or see `reach` tokens
    top: int = 0
    #: largest distance of facts in training, in tokens
    reach: int = 0

    @property
    def trained(self) -> bool:
        """Whether its weights are trained."""
        return self.top > 0


GOALS = (
    Goal("30% at 4k", "30%", None, 4096),
    Goal("constant 53 MB", None, "53MB", 4096),
    Goal("10% at 8k", "10%", None, 8192, top=6, reach=4600),
    Goal("constant 8 MB", None, "8MB", 8192, top=7, reach=1200),
)


def main() -> None:
    """Measure everything that is missing and fits into the time."""
    options = _options()
    results = Results.open(options.out, options.resume)
    if options.draw is not None:
        draw(results.found, options)
        return
    clock = Clock(options.seconds)
    with clock.step("load", 25) as go:
        if not go:
            return
        model = _model(options)
        tokens = _tokens(options.carry)
    settings = {n: v for n, v in vars(options).items() if v is not None and not isinstance(v, Path)}
    run = {"machine": stamp(), "settings": settings}
    bench = Bench(options, clock, results, model, tokens, run)
    with clock.step("check program", 25) as go:
        if go:
            results.keep("program", checked_program(model.device))
    bench.measure("original", None)
    goals = [goal for goal in GOALS if goal.name in options.goals]
    if not options.skip_training:
        bench.trained([g for g in goals if g.trained])
    for goal in (g for g in goals if not g.trained):
        bench.untrained(goal)
    bench.summary()
    bench.speed(goals)
    for goal in (g for g in goals if not g.trained):
        bench.rivals(goal)
    bench.summary()


def draw(found: dict[str, Any], options: argparse.Namespace) -> None:
    """A page for each goal whose memory was chosen by measuring, and one for kvpress."""
    from memory_pages import page_of_bench, page_of_presses

    options.draw.mkdir(parents=True, exist_ok=True)
    for goal in (name for name, chosen in found.get("chosen", {}).items() if "measured" in chosen):
        page = page_of_bench(found, goal, source=options.out.name)
        (options.draw / f"{goal.replace(' ', '-').replace('%', '')}.html").write_text(page.html())
    if options.kvpress is not None:
        page = page_of_presses(json.loads(options.kvpress.read_text()), options.kvpress.name)
        (options.draw / "kvpress.html").write_text(page.html())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--carry", type=Path, default=Path("runs/carry"), help="what carry_memory.py wrote")
    parser.add_argument("--model", help="another model than the carried one")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--resume", type=Path, help="earlier results file to resume from")
    parser.add_argument("--draw", type=Path, help="only write the pages of known results into this folder")
    parser.add_argument("--kvpress", type=Path, help="with --draw: benchmarks/results/kvpress.json")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--train-seconds", type=float, default=90.0, help="of the first trained goal")
    parser.add_argument("--train-length", type=int, default=8192, help="tokens of a training row")
    parser.add_argument("--skip-training", action="store_true", help="measure only what needs no training")
    parser.add_argument("--controls", action="store_true", help="measure trained arms without kept keys too")
    parser.add_argument("--prefill", type=int, nargs="*", default=[8192, 65536], help="tokens to read, timed")
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
        name = options.carry / "model"
        if not (name / "config.json").is_file():
            _unpack(options.carry, name)
    model, _ = load_model(name)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    return model.to(options.device, dtype).eval()  # type: ignore[arg-type]


#: names of Llama's weights in GGUF files
_GGUF_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


def _unpack(carry: Path, folder: Path) -> None:
    """A Llama folder from the parts of a GGUF file; transformers would ask for accelerate to read it."""
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    file = carry / "model.gguf"
    file.write_bytes(b"".join(part.read_bytes() for part in sorted(carry.glob("model.gguf.[0-9]"))))
    config = LlamaConfig(**json.loads((carry / "data" / "config.json").read_text()))
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in gguf.GGUFReader(file).tensors:
        found = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        kind = tensor.name.split(".")
        if kind[0] == "blk":
            if kind[2] in heads:  # GGUF has the pairs that rotate together side by side
                pairs = found.unflatten(0, (heads[kind[2]], -1, 2))
                found = pairs.transpose(1, 2).reshape(found.shape)
            weights[f"model.layers.{kind[1]}.{_GGUF_NAMES[kind[2]]}.weight"] = found
        else:
            named = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
            weights[f"{named[kind[0]]}.weight"] = found
    model = LlamaForCausalLM(config).float()
    missing = set(model.load_state_dict(weights, strict=False).missing_keys) - {"lm_head.weight"}
    assert not missing, missing
    shutil.copytree(carry / "data" / "tokenizer", folder)
    model.save_pretrained(folder)


def _tokens(carry: Path) -> dict[str, np.ndarray]:
    with lzma.open(carry / "data" / "tokens.npz.xz") as file, np.load(io.BytesIO(file.read())) as found:
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
    """Starts only what can end in time; a step is expected to take as long as an earlier one of its kind."""

    seconds: float
    begin: float = field(default_factory=time.monotonic)
    known: dict[str, float] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.seconds - (time.monotonic() - self.begin)

    def step(self, name: str, guess: float) -> _Step:
        """A context manager that says whether there is time for the block."""
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
    """Measurements by name, each written at once."""

    path: Path
    found: dict[str, Any]

    @staticmethod
    def open(path: Path, resume: Path | None) -> Results:
        """The content of the file; with `resume`, starting from another file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        for suffix in (".json", ".measured.json"):
            before = None if resume is None else resume.with_suffix(suffix)
            if before is not None and before.is_file() and not path.with_suffix(suffix).exists():
                shutil.copy2(before, path.with_suffix(suffix))
        found = json.loads(path.read_text()) if path.is_file() else {}
        if "settings" in found:  # of the last run only: earlier files did not say which arms it measured
            found["unattributed"] = {name: found.pop(name) for name in ("machine", "settings")}
        return Results(path, found)

    def keep(self, name: str, value: Any) -> None:
        """Remember and write."""
        self.found[name] = value
        write_json(self.path, self.found)

    def of(self, arm: str) -> dict[str, Any]:
        """The measures of one arm."""
        return self.found.setdefault("arms", {}).setdefault(arm, {})


def note_run(found: dict[str, Any], run: dict[str, Any], name: str) -> None:
    """Record which run measured `name`: found["runs"] lists runs with the names of their measures."""
    runs = found.setdefault("runs", [])
    for known in runs:
        known["measures"] = [other for other in known["measures"] if other != name]
    same = next((r for r in runs if {**run, "measures": r["measures"]} == r), None)
    if same is None:
        same = {**run, "measures": []}
        runs.append(same)
    same["measures"].append(name)


def digest(*parts: Any) -> str:
    """Sixteen digits that change with any of the parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def code_of_the_choice() -> str:
    """A digest of the code that chooses memories, comments and layout aside."""
    return digest(*(ast.dump(ast.parse(inspect.getsource(module))) for module in CHOICE_MODULES))


def retire_unless(found: dict[str, Any], goal: str, key: str) -> bool:
    """Whether the known choice for a goal has this key.

    A choice with another key moves to found["retired"]; its arms stay, marked with what they were chosen by.
    """
    chosen = found.get("chosen", {})
    if goal not in chosen:
        return False
    if chosen[goal].get("key") == key:
        return True
    old = chosen.pop(goal)
    mark = f"choice {old.get('key', 'without a key')}"
    found.setdefault("retired", {})[f"{goal} [{mark}]"] = old
    for part in ("arms", "speed"):
        for name in list(found.get(part, {})):
            if _is_of(name, goal):
                found[part][f"{name} [{mark}]"] = found[part].pop(name)
    return False


def _is_of(name: str, goal: str) -> bool:
    """Whether an arm, or a measure of speed, is of this goal's present choice."""
    is_arm = name == goal or name.startswith((f"{goal}:", f"{goal},"))
    return not name.endswith("]") and (is_arm or name.endswith(f", {goal}"))


# ----------------------------------------------------------------------------------------- the bench


@dataclass
class Bench:
    """The model, its texts and questions, and where results go."""

    options: argparse.Namespace
    clock: Clock
    results: Results
    model: Any
    tokens: dict[str, np.ndarray]
    #: machine and settings, recorded with everything that this run measures
    run: dict[str, Any]

    def __post_init__(self) -> None:
        limit = self.options.questions
        judging = _questions(self.tokens, "judging")
        self.judging = {d: [q for q in judging if q.distance == d][:limit] for d in self.options.distances}
        self.prior = _questions(self.tokens, "prior")[:limit]
        distances = self.options.choose_distances
        #: questions that plans are measured by, and the first of them, that heads are measured by
        self.deciding = [q for q in _questions(self.tokens, "choosing") if q.distance in distances]
        self.choosing = [q for q in self.deciding if q.number < self.options.choose_questions]
        self.deciding = self.deciding[: max(FINAL_QUESTIONS, len(self.choosing))]
        rows = torch.from_numpy(self.tokens["calibration"].astype(np.int64))
        # the two sources alternate
        order = [n for pair in zip(range(8), range(8, 16), strict=True) for n in pair]
        self.calibration = rows[order][: self.options.choose_rows, : self.options.choose_length].contiguous()
        self.own = ["exp/sum"] * self.model.config.num_hidden_layers

    # ------------------------------------------------------------------------------------- measures

    def measure(self, arm: str, attention: Sequence[str] | None, distances: Sequence[int] = ()) -> None:
        """Measure recall and perplexity of the model with this attention, where missing."""
        found = self.results.of(arm)
        kind = "original" if attention is None else "limited"
        with with_attention(self.model, attention or self.own):
            for distance in distances or self.options.distances:
                name, label = f"recall {distance}", f"{kind} recall {distance}"
                self._once(
                    found, name, label, self._guess(kind, 200 * 1.15 * distance), self._recall(distance)
                )
            for length in self.options.lengths:
                name, label = f"perplexity {length}", f"{kind} perplexity {length}"
                self._once(found, name, label, self._guess(kind, 65536), self._perplexity(length))

    def _guess(self, kind: str, tokens: float) -> float:
        """Expected seconds for this many tokens on an H200, before anything was timed."""
        return 1.0 + tokens / (400_000 if kind == "original" else 200_000)

    def _once(
        self, found: dict[str, Any], name: str, label: str, guess: float, work: Callable[[], Any]
    ) -> None:
        if name in found:
            return
        with self.clock.step(label, guess) as go:
            if not go:
                return
            try:
                found[name] = work()
                note_run(found, self.run, name)
            except torch.OutOfMemoryError as problem:  # the other measures go on
                print(f"{label}: {problem}", flush=True)
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
        """Choose a memory and measure it."""
        attention = self.chosen(goal)
        if attention is not None:
            self.measure(goal.name, attention)

    def chosen(self, goal: Goal) -> list[str] | None:
        """The attention for a goal; None if there is no time to choose."""
        known = self.results.found.get("chosen", {})
        key = self._choice_key(goal)
        if retire_unless(self.results.found, goal.name, key):
            return known[goal.name]["attention"]
        budget = MemoryBudget.read(self.model.config, memory=goal.memory, constant=goal.constant, at=goal.at)
        path = self.results.path.with_suffix(".measured.json")
        identity = measures_identity(self.model, self.calibration, self.choosing)
        file = MeasureFile.open(path, identity, resume=False)
        with self.clock.step("choose" if known else "choose first", 30 if known else 60) as go:
            if not go:
                return None
            if goal.trained:
                found = self._by_rule(goal, budget, file)
            else:
                chosen = choose_by(
                    self.model,
                    budget,
                    self.choosing,
                    self.calibration,
                    file,
                    plan_questions=self.deciding,
                    progress=False,
                )
                found = _chosen(chosen)
            found = {**found, "key": key, "run": self.run}
            self.results.keep("chosen", {**known, goal.name: found})
            print(goal.name, found["plan"]["name"], flush=True)
        return found["attention"]

    def _choice_key(self, goal: Goal) -> str:
        """A digest of everything that the choice for a goal depends on."""
        asked = [(q.distance, q.number, q.context.tolist(), q.prompt.tolist()) for q in self.deciding]
        identity = measures_identity(self.model, self.calibration, self.choosing)
        return digest(asdict(goal), identity, asked, code_of_the_choice())

    def _by_rule(self, goal: Goal, budget: MemoryBudget, file: MeasureFile) -> dict[str, Any]:
        """A plan: the best retrieval heads keep every key or a long window; the others share by damage."""
        heads = measure_heads(self.model, self.choosing, file)
        memories = memories_to_try(self.calibration.shape[1])
        damage = measure_damage(self.model, self.calibration, memories, file)
        return planned(self.model.config, goal, budget, heads.ranking, damage)

    # --------------------------------------------------------------------------------------- trained

    def trained(self, goals: Sequence[Goal]) -> None:
        """Each goal trained, then the original for as many steps on the rows of the first."""
        teacher = copy.deepcopy(self.model).eval().requires_grad_(False)
        steps = self.results.found.get("training", {}).get("steps")
        for goal in goals:
            attention = self.chosen(goal)
            if attention is None:
                continue
            self.measure(f"{goal.name}, untrained", attention)
            arm = f"{goal.name}, trained"
            steps = self._trained_arm(arm, attention, teacher, goal.reach, steps) or steps
            self.summary()
        if steps:
            self._trained_arm("original, trained", self.own, teacher, goals[0].reach, steps)

    def _trained_arm(
        self, arm: str, attention: list[str], teacher: Any, reach: int, steps: int | None
    ) -> int | None:
        """Train from the original weights, measure, restore the weights; returns the number of steps."""
        if self._is_complete(arm):
            return steps
        is_own = attention == self.own
        guess = float(self.options.train_seconds)
        if steps:
            of_step: float = self.clock.known.get("step of training", guess / steps)
            guess = of_step * steps * (0.7 if is_own else 1.0)
        after = 8 if is_own else 12  # a trained model that is not measured is lost
        with self.clock.step(f"train {arm}", guess + 5 + after) as go:
            if not go:
                return None
            begin = time.monotonic()
            try:
                with with_attention(self.model, attention):
                    done, losses = self._train(teacher, reach, steps)
            except Exception:  # whatever it is, the other arms go on
                traceback.print_exc()
                self.model.load_state_dict(teacher.state_dict())
                return None
            took = time.monotonic() - begin
        self.clock.known.setdefault("step of training", took / done)
        self.results.of(arm)["training"] = {"steps": done, "seconds": round(took, 1), "losses": losses}
        about = {"steps": done, "rows_of_a_step": STEP, "length": self.options.train_length}
        self.results.keep("training", {**about, "learning_rate": LEARNING_RATE, "answers": ANSWER_WEIGHT})
        self.measure(arm, None if is_own else attention)
        alone = None if is_own else without_tails(attention)
        if self.options.controls and alone is not None:
            self.measure(f"{arm}, {beyond_windows(attention)} off", alone)
        self.model.load_state_dict(teacher.state_dict())
        return done

    def _is_complete(self, arm: str) -> bool:
        found = self.results.of(arm)
        wanted = [f"recall {d}" for d in self.options.distances]
        wanted += [f"perplexity {n}" for n in self.options.lengths]
        return all(name in found for name in wanted)

    def _train(self, teacher: Any, reach: int, steps: int | None) -> tuple[int, list[list[float]]]:
        """AdamW on fp32 copies of the weights; for a fixed time if the number of steps is not given.

        Of every twentieth step: the mean divergence, the mean loss of answers, the norm of the gradient.
        """
        model = self.model
        own = list(model.parameters())
        masters = [p.detach().float().clone().requires_grad_() for p in own]
        on_gpu = model.device.type == "cuda"
        optimizer = torch.optim.AdamW(
            masters, lr=LEARNING_RATE, weight_decay=0.0, betas=(0.9, 0.95), fused=on_gpu
        )
        begin, losses, done = time.monotonic(), [], 0
        at_once = 1 << 20  # all rows together, unless memory says otherwise
        facts = Facts(self.tokens)
        model.train()
        for batch in _batches(self.tokens, facts, self.options.train_length, reach):
            elapsed = (time.monotonic() - begin) / self.options.train_seconds
            share = done / steps if steps else elapsed
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(1.0, (done + 1) / 20) * max(0.02, 1 - share)
            found, at_once = _backward(model, teacher, batch, at_once)
            with torch.no_grad():
                for master, parameter in zip(masters, own, strict=True):
                    master.grad = (
                        torch.zeros_like(master) if parameter.grad is None else parameter.grad.float()
                    )
                norm = float(torch.nn.utils.clip_grad_norm_(masters, 1.0))
                optimizer.step()
                torch._foreach_copy_(own, masters)  # pyright: ignore[reportPrivateImportUsage]
            model.zero_grad(set_to_none=True)
            losses.append([round(x, 4) for x in (*found, norm)])
            done += 1
            if done in (1, 5, 20) or done % 50 == 0:
                print(f"  step {done}, {time.monotonic() - begin:.1f} s: {losses[-1]}", flush=True)
            if done == steps or (not steps and time.monotonic() - begin > self.options.train_seconds):
                break
        model.eval()
        return done, losses[:: max(1, len(losses) // 20)]

    # ------------------------------------------------------------------------------------------ speed

    def speed(self, goals: Sequence[Goal]) -> None:
        """Time and memory to read texts, and tokens per second after a long one, with the original."""
        attention = {goal.name: self.chosen(goal) for goal in goals}
        plans = {"original": self.own, **{name: its for name, its in attention.items() if its}}
        texts = [(batch, tokens) for tokens in self.options.prefill for batch in (1, 8)]
        for batch, tokens in (text for text in texts if math.prod(text) <= 65536):
            for name, its in plans.items():
                work = partial(_reading, self.model, batch, tokens)
                self._timed(f"reading {batch} x {tokens}, {name}", its, work)
        if not self.options.prefill:
            return
        longest = max(self.options.prefill)
        folder = self.options.model or self.options.carry / "model"
        self._timed(
            f"tokens/s after {longest}, transformers, static cache, recorded",
            self.own,
            partial(_speed_of_transformers, folder, self.model, longest),
        )
        for name, its in reversed(plans.items()):
            self._timed(
                f"tokens/s after {longest}, {name}", its, partial(_tokens_per_second, self.model, longest)
            )

    def _timed(self, name: str, attention: Sequence[str], work: Callable[[], Any]) -> None:
        found = self.results.found.setdefault("speed", {})
        if name in found:
            return
        with self.clock.step("timing", 6) as go:
            if go:
                try:
                    with with_attention(self.model, attention):
                        found[name] = work()
                    note_run(found, self.run, name)
                except Exception:  # whatever it is, the other measures go on
                    traceback.print_exc()
                print(name, found.get(name), flush=True)
        self.results.keep("speed", found)

    # ---------------------------------------------------------------------------------------- rivals

    def rivals(self, goal: Goal) -> None:
        """Measure other memories of the same size, without training."""
        if self.chosen(goal) is None:
            return
        known = self.results.found["chosen"][goal.name]
        for name, attention in _rivals(self.model.config, known, goal):
            size = bytes_of(self.model.config, attention, goal.at)
            self.results.of(f"{goal.name}: {name}")["bytes"] = size
            self.measure(f"{goal.name}: {name}", attention, self.options.distances[:2])

    def summary(self) -> None:
        """Print every arm relative to the original; trained arms relative to the trained original."""
        arms = self.results.found.get("arms", {})
        lines = [_line(name, found, arms) for name, found in arms.items()]
        self.results.keep("summary", lines)
        for line in lines:
            print(line)


def _recall_summary(
    questions: Sequence[Question], answers: list[Answer], prior: list[Answer]
) -> dict[str, Any]:
    """Accuracy with Wilson's interval, log-odds, and log-odds minus those without the facts."""
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


def _chosen(chosen: ChosenMemory) -> dict[str, Any]:
    best = chosen.decision.best.plan
    return {"attention": list(best.attention), "top": best.top, **to_plain(chosen.record())}


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
    reference = arms.get("original, trained" if ", trained" in name else "original", {})
    parts = [f"{name:44}"]
    for measure, value in sorted(found.items()):
        other = reference.get(measure)
        if measure.startswith("recall"):
            share = ""
            if other and other["accuracy"] > CHANCE:
                share = f" ({(value['accuracy'] - CHANCE) / (other['accuracy'] - CHANCE):.0%})"
            parts.append(f"{measure[7:]}: {value['accuracy']:.3f}{share} {value['log_odds_less_prior']:+.2f}")
        elif measure.startswith("perplexity"):
            ratio = f" (×{value / other:.4f})" if other else ""
            parts.append(f"ppl {measure[11:]}: {value:.2f}{ratio}")
    return "  ".join(parts)


# ------------------------------------------------------------------------------------- by rule


def planned(
    config: Any, goal: Goal, budget: MemoryBudget, ranking: Sequence[Place], damage: TextDamage
) -> dict[str, Any]:
    """The plan of a goal that is trained, in the format that `_chosen` writes."""
    plans = plans_for(config, budget, ranking, damage, [goal.reach])
    fitting = [p for p in plans if "by their damage" in p.of_others and p.top]
    if goal.constant is not None:
        fitting = [p for p in fitting if f"window({goal.reach}," in p.of_top]
    best = min(fitting, key=lambda plan: abs(plan.top - goal.top))
    return {
        "attention": list(best.attention),
        "top": best.top,
        "budget": asdict(budget),
        "plan": {"name": best.name, "bytes": best.bytes},
        "heads": [list(place) for place in ranking[: best.top]],
    }


# --------------------------------------------------------------------------------- is the program right


def checked_program(device: torch.device) -> dict[str, Any]:
    """Check the fused program for kept keys against float64; if it is wrong or fails, plain torch is used."""
    spec = "poly(0)+window(16,sinks=4,kept=48)/sum"
    found: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, 700, h, 64, generator=generator, dtype=torch.float64) for h in (6, 2, 2, 6)]
    given = [u.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32) for u in drawn]
    try:
        answers = []
        for inputs in (given, [u.double() for u in given]):
            q, k, v = (u.detach().requires_grad_() for u in inputs[:3])
            y = dispatch.attention(q, k, v, spec, form="chunked")
            answers.append([y.detach(), *torch.autograd.grad(y, (q, k, v), inputs[3])])
        found = {
            name: float((own.double() - wanted).norm() / wanted.norm())
            for name, own, wanted in zip(("y", "dq", "dk", "dv"), *answers, strict=True)
        }
        right = max(found.values()) < 0.05
        q, k, v, _ = given
        found["program"] = dispatch.plan(q, k, v, spec, form="chunked").program.name
    except Exception as problem:  # whatever a first launch on this machine may raise
        found, right = {"problem": repr(problem)[:2000]}, False
    print("program for kept keys:", found, flush=True)
    if not right:
        programs_plan._LEFT_OUT |= {KEPT_KEYS.name}
        programs_plan.forget_plans()
    return {**found, "right": right}


# ------------------------------------------------------------------------------------------------- speed


@torch.no_grad()
def _reading(model: Any, batch: int, tokens: int, times: int = 5) -> dict[str, float]:
    """Seconds, the median of several readings after one to compile; on a GPU also the most bytes allocated.

    peak_bytes   with the weights and the cache; bytes_before: with the weights alone
    """
    found = []
    for n in range(times + 1):
        if n == 1 and model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = _now(model)
        _cache_after(model, batch, tokens)
        found.append(_now(model) - begin)
    read = {"seconds": sorted(found[1:])[times // 2]}
    if model.device.type == "cuda":
        read["peak_bytes"] = torch.cuda.max_memory_allocated()
        read["bytes_before"] = torch.cuda.memory_allocated()
    return read


@torch.no_grad()
def _tokens_per_second(model: Any, tokens: int) -> dict[str, float]:
    """Recorded as a CUDA graph where possible, else step by step."""
    cache = _cache_after(model, 1, tokens)
    size = cache.nbytes
    generation = conversion._recorded(model, cache)
    recorded = generation._recorded is not None
    steps = 128 if recorded else 16
    begin = _now(model)
    for _ in range(steps):
        generation.step()
    return {"tokens_per_second": steps / (_now(model) - begin), "cache_bytes": size, "recorded": recorded}


@torch.no_grad()
def _speed_of_transformers(folder: Any, like: Any, tokens: int, steps: int = 128) -> float | None:
    """transformers' own model with its static cache, from a recorded step."""
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=like.dtype).to(like.device).eval()
    step = conversion._recorded_step_of_original(model, tokens, steps)
    if step is None:
        return None
    begin = _now(model)
    for _ in range(steps):
        step()
    return steps / (_now(model) - begin)


def _cache_after(model: Any, batch: int, tokens: int) -> MaclaurinCache:
    cache = MaclaurinCache(model.config)
    ids = torch.arange(tokens, device=model.device).expand(batch, -1) % 1000
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    return cache


def _now(model: Any) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()


# ------------------------------------------------------------------------------------- training rows


@dataclass(frozen=True)
class Rows:
    """Tokens [B, T] to predict, and which of them are answers to questions."""

    tokens: Tensor
    answers: Tensor

    def parts(self, tokens_at_once: int) -> Iterator[Rows]:
        """Parts of at most this many tokens."""
        rows = max(1, tokens_at_once // self.tokens.shape[1])
        for tokens, answers in zip(self.tokens.split(rows), self.answers.split(rows), strict=True):
            yield Rows(tokens, answers)

    def losses(self, model: Any, teacher: Any, of: Rows) -> tuple[Tensor, Tensor]:
        """The share of these rows in the mean divergence and in the mean loss of answers of `of`."""
        ids = self.tokens.to(model.device)
        with torch.no_grad():
            known = teacher.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        is_answer = self.answers[:, 1:].flatten()
        weight, other = model.lm_head.weight, teacher.lm_head.weight
        all_but = (~is_answer).to(ids.device)
        divergence = summed_divergence(hidden, weight, known, other, all_but)
        at = is_answer.nonzero()[:, 0].to(ids.device)
        answers = summed_cross_entropy(hidden[at], weight, ids[:, 1:].flatten()[at])
        number = max(1, int(of.answers.sum()))
        return divergence / (of.tokens.numel() - number), answers / number


def _backward(model: Any, teacher: Any, batch: Rows, at_once: int) -> tuple[tuple[float, float], int]:
    """Compute gradients; returns both losses of a batch, and how many tokens fit into memory at once."""
    while True:
        total = [0.0, 0.0]
        try:
            for some in batch.parts(at_once):
                divergence, answers = some.losses(model, teacher, batch)
                (divergence + ANSWER_WEIGHT * answers).backward()
                total = [total[0] + float(divergence.detach()), total[1] + float(answers.detach())]
        except torch.OutOfMemoryError:
            at_once = min(at_once, batch.tokens.numel())
            if at_once <= batch.tokens.shape[1]:
                raise
            at_once = max(batch.tokens.shape[1], at_once // 2)
        else:
            return (total[0], total[1]), at_once
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        print(f"out of memory: {at_once:,} tokens at once from here on", flush=True)


class Facts:
    """Facts as tokens, to be put into text: names and things in parts, as carry_memory.py packed them."""

    def __init__(self, tokens: dict[str, np.ndarray]) -> None:
        self.told, self.asked, self.things = (
            [[t for t in row if t >= 0] for row in tokens[f"facts_{kind}"].tolist()]
            for kind in ("told", "asked", "things")
        )
        self.stop, self.newline = tokens["facts_marks"].tolist()

    def fact(self, name: int, thing: int) -> list[int]:
        """The password of Anna is river."""
        return [*self.told[name], *self.things[thing], self.stop]

    def question(self, name: int, thing: int) -> tuple[list[int], int]:
        """A line with the answer in it, and the place where the answer begins."""
        begin = self.asked[name]
        return [*begin, *self.things[thing], self.stop, self.newline], len(begin)


def _batches(tokens: dict[str, np.ndarray], facts: Facts, length: int, reach: int) -> Iterator[Rows]:
    """Text, text with facts and questions up to `reach` tokens later, repeated text; deterministic."""
    generator = torch.Generator().manual_seed(0)
    text = torch.from_numpy(tokens["training"].astype(np.int64)).reshape(-1, length)

    def row() -> list[int]:
        return text[int(torch.randint(0, len(text), (1,), generator=generator))].tolist()

    texts, recalls, copies = STEP
    while True:
        made = [(row(), []) for _ in range(texts)]
        made += [with_questions(row(), facts, reach, generator) for _ in range(recalls)]
        made += [(with_copies(row(), reach, generator), []) for _ in range(copies)]
        answers = torch.zeros(len(made), length, dtype=torch.bool)
        for n, (_, places) in enumerate(made):
            answers[n, places] = True
        yield Rows(torch.tensor([tokens for tokens, _ in made]), answers)


def with_questions(
    text: list[int], facts: Facts, reach: int, generator: torch.Generator
) -> tuple[list[int], list[int]]:
    """The text with groups of facts and questions, of the same length; and the places of the answers."""
    length = len(text)
    names = torch.randperm(len(facts.told), generator=generator).tolist()
    things = torch.randperm(len(facts.things), generator=generator).tolist()
    stops = [0, *(n + 1 for n, token in enumerate(text) if token == facts.stop)]
    put: list[tuple[int, int, list[int], int | None]] = []  # (where, which, what, where the answer begins)
    for first in range(0, length - 2 * NEAREST, GROUPS_APART):
        group = first + _below(GROUPS_APART // 2, generator)
        for n in range(FACTS_TOGETHER):
            if not names or not things:
                break
            name, thing = names.pop(), things.pop()
            told = _next_of(stops, group + n * FACTS_APART)
            most = min(reach, length - told) - FACTS_APART * FACTS_TOGETHER
            if most <= NEAREST:
                continue
            asked = _next_of(stops, told + _distance(most, generator))
            put.append((told, len(put), facts.fact(name, thing), None))
            put.append((max(asked, told + 1), len(put), *facts.question(name, thing)))
    made: list[int] = []
    answers, at = [], 0
    for where, _, what, answer in sorted(put, key=lambda item: item[:2]):
        made += text[at:where]
        at = max(at, where)
        if answer is not None and len(made) + answer < length:
            answers.append(len(made) + answer)
        made += what
    return (made + text[at:])[:length], answers


def with_copies(text: list[int], reach: int, generator: torch.Generator) -> list[int]:
    """Passages of the text, each twice, up to `reach` tokens long."""
    made: list[int] = []
    at, length = 0, len(text)
    while len(made) < length:
        most = min(reach, length // 2)
        size = max(1, min(most, round(NEAREST * (most / NEAREST) ** _share(generator))))
        made += 2 * text[at : at + size]
        at = (at + size) % (length - most)
    return made[:length]


def _distance(most: int, generator: torch.Generator) -> int:
    """A random distance: half of the time uniform, half of the time log-uniform."""
    share = _share(generator)
    if _share(generator) < 0.5:
        return round(NEAREST + (most - NEAREST) * share)
    return round(NEAREST * (most / NEAREST) ** share)


def _next_of(places: list[int], at: int) -> int:
    """The first of the places from `at` on, if it is near."""
    found = bisect.bisect_left(places, at)
    return places[found] if found < len(places) and places[found] < at + 2 * FACTS_APART else at


def _below(most: int, generator: torch.Generator) -> int:
    return int(torch.randint(0, max(1, most), (1,), generator=generator))


def _share(generator: torch.Generator) -> float:
    return float(torch.rand(1, generator=generator))


if __name__ == "__main__":
    main()
