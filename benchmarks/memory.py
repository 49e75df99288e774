"""What a small memory costs SmolLM2-135M: recall and perplexity under each budget, untrained and trained.

    python benchmarks/carry_memory.py --model model.gguf --prose prose.jsonl.xz      # once, where both are
    PYTHONPATH=src:runs/carry/data python benchmarks/memory.py --stages untrained trained pressed rivals
    PYTHONPATH=src:runs/carry/data python benchmarks/memory.py --stages speed        # alone on the GPU

Stages, in this order (all unless --stages names some):

    untrained   a memory for each goal, chosen on calibration text and questions as `maclaurin convert` does,
                and measured on 200 other questions at each distance and on novels that were not used for
                calibration or training (carry_memory.py lists the texts)
    trained     goals with training have a memory by rule (`Goal.top`), since the cheapest memory before
                training need not be the cheapest after it. They are trained by the library's recovery
                (`maclaurin convert --kl-steps --mix`): KL to the original's predictions on text, on text
                with facts and questions and on repeated text, and the loss of the answers. The original is
                trained for as many steps on the same rows.
    pressed     memories for the comparison with kvpress are chosen (kvpress_comparison.py measures them)
    rivals      other memories of the same size, and trained goals before their training
    speed       time to read prompts, and tokens per second after long ones, all in one run

Every measurement is written at once. With the same --out (or --resume FILE of an earlier run) nothing but
speed is measured twice, and nothing is started that is not expected to end within --seconds. On a GPU the
model is bf16. --model FOLDER measures another model with the carried tokens, which must have its vocabulary.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import io
import json
import lzma
import math
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
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
    SINKS,
    Place,
    bytes_of,
    exact_keys,
    memories_to_try,
    plans_for,
    reference_plans,
)
from maclaurin.conversion.choose_memory import ChosenMemory, choose_by, distances_for, measures_identity
from maclaurin.conversion.conversion_record import MemoryBudget, Recovery
from maclaurin.conversion.fact_questions import Answer, Question, answers_together
from maclaurin.conversion.head_measures import TextDamage, measure_damage, measure_heads
from maclaurin.conversion.measure import MeasureFile, Perplexity, beyond_windows, without_tails
from maclaurin.conversion.memory_budget import read_budget
from maclaurin.conversion.recover import stages_of
from maclaurin.errors import InputError
from maclaurin.evaluation.likelihood import tokens_at_once
from maclaurin.evaluation.results import wilson_interval
from maclaurin.models import MaclaurinCache
from maclaurin.models.cache import weights_fingerprint
from maclaurin.models.model_folder import load_model, save_quietly
from maclaurin.models.modeling import set_attention, with_attention
from maclaurin.plain_data import to_plain, write_json
from maclaurin.programs import dispatch
from maclaurin.programs import plan as programs_plan
from maclaurin.programs.kept_keys import KEPT_KEYS
from maclaurin.programs.plan_cache import forget_plans
from maclaurin.progress_bar import Display
from maclaurin.training.run_folder import read_records
from maclaurin.training.trainer import train

RESULTS = Path(__file__).parent / "results" / "memory.json"
#: the code that a choice depends on
CHOICE_MODULES = (allocate, choose_memory, fact_questions, head_measures)
#: chance of a right answer among four
CHANCE = 0.25
#: rows of a training step, half of them text, a third with facts and questions, a sixth with copies
ROWS_OF_A_STEP, MIX = 6, 0.5
LEARNING_RATE = 2e-4
#: parts that a training step is computed in: the next number if memory does not suffice
PARTS = (1, 2, 3, 6)
STAGES = ("untrained", "trained", "pressed", "rivals", "speed")


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
    def stage(self) -> str:
        """The stage that chooses it: those for texts of 1,280 tokens are compared with kvpress."""
        return "trained" if self.top else "pressed" if self.at == 1280 else "untrained"


GOALS = (
    Goal("30% at 4k", "30%", None, 4096),
    #: for texts in which a fact is 4,096 tokens back: those are about 4,500 tokens long
    Goal("constant 53 MB", None, "53MB", 4608),
    Goal("10% at 8k", "10%", None, 8192, top=6, reach=4600),
    Goal("constant 8 MB", None, "8MB", 8192, top=7, reach=1200),
    Goal("25% at 1280", "25%", None, 1280),
    Goal("12.5% at 1280", "12.5%", None, 1280),
)


def main() -> None:
    """Measure everything that is missing and fits into the time."""
    options = _options()
    results = Results.open(options.out, options.resume)
    clock = Clock(options.seconds)
    with clock.step("load", 25) as go:
        if not go:
            return
        model = _model(options)
        tokens = _tokens(options.carry)
    settings = {n: v for n, v in vars(options).items() if v is not None and not isinstance(v, Path)}
    bench = Bench(options, clock, results, model, tokens, {"machine": stamp(), "settings": settings})
    with clock.step("check program", 25) as go:
        if go:
            results.keep("program", checked_program(model.device))
    goals = [goal for goal in GOALS if goal.name in options.goals]
    for stage in (stage for stage in STAGES if stage in options.stages):
        began = time.monotonic()
        bench.do(stage, goals)
        print(f"stage {stage}: {time.monotonic() - began:.1f} s", flush=True)
    bench.summary()
    clock.table()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--carry", type=Path, default=Path("runs/carry"), help="what carry_memory.py wrote")
    parser.add_argument("--model", help="another model than the carried one")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--resume", type=Path, help="earlier results file to resume from")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES, help="do only these")
    parser.add_argument("--train-steps", type=int, default=200, help="of 6 rows")
    parser.add_argument("--train-length", type=int, default=8192, help="tokens of a training row")
    parser.add_argument("--work", type=Path, default=Path("runs/memory"), help="training runs; they resume")
    parser.add_argument("--controls", action="store_true", help="measure trained arms without kept keys too")
    parser.add_argument("--prefill", type=int, nargs="*", default=[8192, 65536], help="tokens to read, timed")
    parser.add_argument("--goals", nargs="+", default=[goal.name for goal in GOALS])
    parser.add_argument("--questions", type=int, default=200, help="at each distance")
    parser.add_argument("--distances", type=int, nargs="+", default=[1024, 4096, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 1024, 4096])
    parser.add_argument("--text-tokens", type=int, default=65536, help="of evaluation text at each length")
    parser.add_argument("--choose-questions", type=int, default=12, help="at each distance of choosing")
    parser.add_argument("--final-questions", type=int, default=FINAL_QUESTIONS, help="for the best plans")
    parser.add_argument("--choose-rows", type=int, default=4)
    parser.add_argument("--choose-length", type=int, default=4608, help="most tokens of a calibration text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


# ------------------------------------------------------------------------------------ what is needed


def _model(options: argparse.Namespace) -> Any:
    folder = _folder(options)
    if options.model is None and not (folder / "config.json").is_file():
        _unpack(options.carry, folder)
    return _loaded(folder, options.device)


def _folder(options: argparse.Namespace) -> Path:
    """The folder of the original."""
    return options.carry / "model" if options.model is None else Path(options.model)


def _loaded(folder: Path, device: str) -> Any:
    model, _ = load_model(folder)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return model.to(device, dtype).eval()  # type: ignore[arg-type]


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
    #: seconds of all steps by name
    spent: dict[str, float] = field(default_factory=dict)

    def table(self) -> None:
        """Print how long each kind of step took, the longest first."""
        for name, seconds in sorted(self.spent.items(), key=lambda item: -item[1]):
            print(f"{seconds:7.1f} s  {name}", flush=True)

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
            self.clock.spent[self.name] = self.clock.spent.get(self.name, 0.0) + took
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
        if resume is not None:
            for before in resume.parent.glob(f"{resume.stem}*.json"):
                mine = path.with_name(before.name.replace(resume.stem, path.stem, 1))
                if not mine.exists():
                    shutil.copy2(before, mine)
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


@dataclass(frozen=True)
class Calibration:
    """Questions that heads and plans are measured by, and texts [B, T], all for one length."""

    of_heads: list[Question]
    of_plans: list[Question]
    rows: Tensor

    @staticmethod
    def of(tokens: dict[str, np.ndarray], length: int, options: argparse.Namespace) -> Calibration:
        """The distances are those of `maclaurin convert --at length`."""
        distances = distances_for(length)
        asked = [q for q in _questions(tokens, "choosing") if q.distance in distances]
        assert {q.distance for q in asked} == set(distances), "carry_memory.py packed other distances"
        of_heads = [q for q in asked if q.number < options.choose_questions]
        # the two sources alternate
        order = [n for pair in zip(range(8), range(8, 16), strict=True) for n in pair]
        rows = torch.from_numpy(tokens["calibration"].astype(np.int64))[order]
        rows = rows[: options.choose_rows, :length].contiguous()
        return Calibration(of_heads, asked[: max(options.final_questions, len(of_heads))], rows)

    def identity(self, model: Any) -> dict[str, Any]:
        """Everything that measures of heads and plans depend on."""
        return measures_identity(model, self.rows, self.of_heads)


class _Printed(Display):
    """Prints the progress of a training run: its first 30 steps, then every fiftieth."""

    def __init__(self) -> None:
        self._begin, self._readings = time.monotonic(), 0

    def step(self, done: int, loss: float, tokens_per_second: float) -> None:
        """Loss and speed."""
        self._readings += 1
        if self._readings < 4 or self._readings % 5 == 0:
            took = time.monotonic() - self._begin
            print(f"  step {done}, {took:.1f} s: {loss:.4f}, {tokens_per_second:,.0f} tokens/s", flush=True)


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
        self.calibrations: dict[int, Calibration] = {}
        self.own = ["exp/sum"] * self.model.config.num_hidden_layers

    def do(self, stage: str, goals: Sequence[Goal]) -> None:
        """One stage, as far as the time suffices."""
        own = [goal for goal in goals if goal.stage == stage]
        if stage == "speed":
            self.speed([goal for goal in goals if goal.stage != "pressed"])
            return
        if stage != "pressed":
            self.measure("original", None)
        if stage == "untrained":
            for goal in own:
                self.untrained(goal)
        elif stage == "trained":
            self.trained(own)
        elif stage == "pressed":
            for goal in own:
                self.chosen(goal)
        else:
            for goal in goals:
                if goal.stage != "pressed":
                    self.rivals(goal)

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
            return Perplexity(rows.reshape(-1, length)).read(self.model, lambda tokens: None).value

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
        try:
            budget = read_budget(self.model.config, memory=goal.memory, constant=goal.constant, at=goal.at)
        except InputError as problem:  # the other goals go on
            print(f"{goal.name}: {problem}", flush=True)
            return None
        given = self.calibration(goal)
        path = self.results.path.with_suffix(f".measured-{given.rows.shape[1]}.json")
        file = MeasureFile.open(path, given.identity(self.model), resume=False)
        is_first = not file.found
        with self.clock.step("choose first" if is_first else "choose", 80 if is_first else 15) as go:
            if not go:
                return None
            if goal.stage == "trained":
                found = self._by_rule(goal, budget, file)
            else:
                chosen = choose_by(
                    self.model,
                    budget,
                    given.of_heads,
                    given.rows,
                    file,
                    plan_questions=given.of_plans,
                    progress=False,
                )
                found = _chosen(chosen)
                if goal.stage == "pressed":  # kvpress_comparison.py measures them
                    found["rivals"] = _rivals(self.model.config, found)
            found = {**found, "key": key, "run": self.run}
            self.results.keep("chosen", {**known, goal.name: found})
            print(goal.name, found["plan"]["name"], flush=True)
        return found["attention"]

    def _choice_key(self, goal: Goal) -> str:
        """A digest of everything that the choice for a goal depends on."""
        given = self.calibration(goal)
        asked = [(q.distance, q.number, q.context.tolist(), q.prompt.tolist()) for q in given.of_plans]
        return digest(asdict(goal), given.identity(self.model), asked, code_of_the_choice())

    def calibration(self, goal: Goal) -> Calibration:
        """Questions and texts of the length that a goal is for."""
        length = min(goal.at, self.options.choose_length)
        if length not in self.calibrations:
            self.calibrations[length] = Calibration.of(self.tokens, length, self.options)
        return self.calibrations[length]

    def _by_rule(self, goal: Goal, budget: MemoryBudget, file: MeasureFile) -> dict[str, Any]:
        """A plan: the best retrieval heads keep every key or a long window; the others share by damage."""
        given = self.calibration(goal)
        heads = measure_heads(self.model, given.of_heads, file)
        damage = measure_damage(self.model, given.rows, memories_to_try(given.rows.shape[1]), file)
        return planned(self.model.config, goal, budget, heads.ranking, damage)

    # --------------------------------------------------------------------------------------- trained

    def trained(self, goals: Sequence[Goal]) -> None:
        """Each goal trained, then the original for as many steps on the rows of the first."""
        for goal in goals:
            attention = self.chosen(goal)
            if attention is not None:
                self._trained_arm(f"{goal.name}, trained", attention, goal.reach)
        if goals:
            self._trained_arm("original, trained", self.own, goals[0].reach)

    def _trained_arm(self, arm: str, attention: list[str], reach: int) -> None:
        """Train from the original weights and measure."""
        if self._is_complete(arm):
            return
        is_own, original = attention == self.own, self.model
        recovery = self._recovery(reach)
        of_step = self.clock.known.get("step of training", 0.7)
        # a trained model that is not measured is lost
        with self.clock.step(f"train {arm}", 15 + of_step * recovery.kl_steps + 15) as go:
            if not go:
                return
            begin = time.monotonic()
            try:
                trained, losses = self._train(arm, attention, recovery)
            except Exception:  # whatever it is, the other arms go on
                traceback.print_exc()
                return
            took = time.monotonic() - begin
        self.clock.known["step of training"] = took / recovery.kl_steps
        settings = {n: v for n, v in asdict(recovery).items() if n not in ("data", "device")}
        self.results.of(arm)["training"] = {"seconds": round(took, 1), "losses": losses, **settings}
        self.model = trained
        try:
            self.measure(arm, None if is_own else attention)
            alone = None if is_own else without_tails(attention)
            if self.options.controls and alone is not None:
                self.measure(f"{arm}, {beyond_windows(attention)} off", alone)
        finally:
            self.model = original
        self.summary()

    def _recovery(self, reach: int) -> Recovery:
        """The settings of `maclaurin convert` that a goal is trained with."""
        on_gpu = self.options.device == "cuda"
        return Recovery(
            kl_steps=self.options.train_steps,
            data=str(self._training_text()),
            length=self.options.train_length,
            batch_size=ROWS_OF_A_STEP,
            text_lr=LEARNING_RATE,
            precision="bf16" if on_gpu else "fp32",
            device=self.options.device,
            mix=MIX,
            reach=min(reach, self.options.train_length),
        )

    def _training_text(self) -> Path:
        """The carried training rows as text, one JSON line per row."""
        file = self.options.work / "training.jsonl"
        if not file.is_file():
            from transformers import AutoTokenizer

            tokenizer: Any = AutoTokenizer.from_pretrained(self.options.carry / "data" / "tokenizer")
            texts = tokenizer.batch_decode(self.tokens["training"].astype(np.int64).tolist())
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return file

    def _train(self, arm: str, attention: list[str], recovery: Recovery) -> tuple[Any, list[float]]:
        """The trained model, and the loss of about every twentieth step.

        It is the recovery of a converted folder (conversion/recover.py), with a checkpoint at its end only.
        """
        original = _folder(self.options)
        name = f"{arm.replace(' ', '-')}-{digest(attention, asdict(recovery), self._weights())}"
        folder = self.options.work / name
        if not (folder / "config.json").is_file():
            start, _ = load_model(original)
            set_attention(start, attention)
            save_quietly(start, folder)
            shutil.copytree(self.options.carry / "data" / "tokenizer", folder, dirs_exist_ok=True)
        for parts in PARTS:
            ((stage, config),) = stages_of(replace(recovery, accumulate=parts), folder, str(original))
            config = config.replace(checkpoint_every=0, test=False, compile=False)
            run = folder / "recovery" / f"{stage}-{parts}"
            try:
                train(config, run, resume=(run / "config.json").is_file(), display=_Printed())
            except torch.OutOfMemoryError:
                print(f"out of memory with {ROWS_OF_A_STEP // parts} rows at a time", flush=True)
                torch.cuda.empty_cache()
                continue
            losses = [line["loss"] for line in read_records(run / "records.jsonl") if line["kind"] == "train"]
            found = [round(loss, 4) for loss in losses[:: max(1, len(losses) // 20)]]
            return _loaded(run / "model", self.options.device), found
        raise RuntimeError("not even one row at a time fits into memory")

    def _weights(self) -> str:
        return weights_fingerprint(self.model.base_model)

    def _is_complete(self, arm: str) -> bool:
        found = self.results.of(arm)
        wanted = [f"recall {d}" for d in self.options.distances]
        wanted += [f"perplexity {n}" for n in self.options.lengths]
        return all(name in found for name in wanted)

    # ------------------------------------------------------------------------------------------ speed

    def speed(self, goals: Sequence[Goal]) -> None:
        """Time and memory to read texts, and tokens per second after a long one, with the original.

        All of it anew: ratios count within one run only.
        """
        self.results.found["speed"] = {}
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
        folder = _folder(self.options)
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
        attention = self.chosen(goal)
        if attention is None:
            return
        if goal.stage == "trained":
            self.measure(f"{goal.name}, untrained", attention)
            return
        known = self.results.found["chosen"][goal.name]
        for name, attention in _rivals(self.model.config, known).items():
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
    number = len(answers)
    share = sum(answer.is_right for answer in answers) / number
    low, high = wilson_interval(share, number)
    gains = [a.log_odds - prior[q.number].log_odds for a, q in zip(answers, questions, strict=True)]
    return {
        "accuracy": share,
        "low": low,
        "high": high,
        "log_odds": sum(answer.log_odds for answer in answers) / number,
        "log_odds_less_prior": sum(gains) / number,
        "questions": number,
        "log_odds_of_each": [round(answer.log_odds, 3) for answer in answers],
    }


def _chosen(chosen: ChosenMemory) -> dict[str, Any]:
    best = chosen.decision.best.plan
    record = to_plain(chosen.record())
    record["plan"]["kind"] = best.kind
    return {"attention": list(best.attention), "top": best.top, **record}


def _rivals(config: Any, chosen: dict[str, Any]) -> dict[str, list[str]]:
    """Simple plans that fill the same budget, by their kind, as pages have them."""
    plans = reference_plans(config, MemoryBudget(**chosen["budget"]), chosen["heads"]["score"])
    return {plan.kind: list(plan.attention) for plan in plans}


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
    fitting = [p for p in plans if p.is_by_damage and p.top]
    if goal.constant is not None:
        fitting = [p for p in fitting if p.of_top == exact_keys(goal.reach + SINKS)]
    best = min(fitting or plans, key=lambda plan: abs(plan.top - goal.top))
    return {
        "attention": list(best.attention),
        "top": best.top,
        "budget": asdict(budget),
        "plan": {"name": best.name, "bytes": best.bytes, "kind": best.kind},
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
        forget_plans()
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


if __name__ == "__main__":
    main()
