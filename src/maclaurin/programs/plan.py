"""The table of programs, and the plan of a call: the program that runs it, and why the others do not.

The plan is found once per spec, shapes, dtypes, device and flags, and cached.

Where heads of a layer differ, each group of heads has its own plan. Groups that differ only in their window
have one plan together, if a program takes them in one call and that costs less (`find_together`).

Programs that can read packed sequences in place do so; for the others, sequences are copied to padded rows.
Costs are estimated for rows as long as the longest sequence, if known, else as the mean: the cuts may be on a
GPU, and reading them would wait for it. Copying adds padding, and several calls instead of one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from maclaurin.errors import InputError
from maclaurin.forms.attend import Form
from maclaurin.programs.about_mean import BalancedChunks, BalancedPairs, PairsAboutMean, TailInChunks
from maclaurin.programs.decode_step import StateStep, TokenStep, WindowStep
from maclaurin.programs.kept_keys import KEPT_KEYS, ExactStep
from maclaurin.programs.linear_attention import LinearAttention
from maclaurin.programs.linear_time import LinearTime
from maclaurin.programs.one_query import OneQuery
from maclaurin.programs.pairs_in_cache import PairsInCache
from maclaurin.programs.plain import PlainForm
from maclaurin.programs.program import Call, Cost, Program, Run, state_bytes
from maclaurin.programs.quadratic_polynomial import QuadraticPolynomial
from maclaurin.programs.score_mod import ScoreMod
from maclaurin.programs.stock_softmax import StockSoftmax
from maclaurin.spec import AttentionSpec
from maclaurin.spec.head_groups import HeadGroup, LayerAttention
from maclaurin.spec.part import Part

PLAIN_FORMS = {form: PlainForm(form) for form in Form}
#: every way to compute a call; of two that cost the same, the first is taken
PROGRAMS: tuple[Program, ...] = (
    StateStep(),
    WindowStep(),
    ExactStep(),
    TokenStep(),
    OneQuery(),
    StockSoftmax(),
    PairsInCache(),
    ScoreMod(),
    QuadraticPolynomial(),
    PairsAboutMean(),
    BalancedPairs(),
    LinearAttention(),
    TailInChunks(),
    BalancedChunks(),
    KEPT_KEYS,
    LinearTime(),
    *PLAIN_FORMS.values(),
)


def _names_left_out() -> frozenset[str]:
    """The programs that $MACLAURIN_WITHOUT excludes, separated by commas; plain forms cannot be excluded."""
    given = os.environ.get("MACLAURIN_WITHOUT", "").split(",")
    return frozenset(map(str.strip, given)) - {form.name for form in PLAIN_FORMS.values()}


_LEFT_OUT = _names_left_out()


@dataclass(frozen=True)
class Plan:
    """The program that `attention` runs for a call, and what others would cost or why they cannot run it."""

    #: the spec of the call; for groups of heads that run together, all their specs
    spec: AttentionSpec | LayerAttention
    program: Program
    chunk_size: int | None
    costs: dict[Program, Cost]
    refusals: dict[Program, str]
    device: str
    state_bytes: int | None
    is_asked: bool
    is_packed: bool
    #: programs for which packed sequences are copied to rows, and why they cannot read them in place
    copied: dict[Program, str]
    #: the program, prepared for calls like this one
    run: Run = field(repr=False, compare=False)
    #: why another spec runs than the requested one
    note: str = ""
    #: whether packed sequences are copied to rows; a program is then chosen by their real lengths
    copies: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "copies", self.program in self.copied)

    @property
    def form(self) -> Form:
        """The form that the program computes."""
        return self.program.form

    @property
    def backend(self) -> str:
        """What the program is made of: "sdpa", "triton" or "torch"."""
        return self.program.backend

    @property
    def has_fixed_work(self) -> bool:
        """Whether such calls launch the same kernels each time, so that they can be recorded as a graph."""
        return self.program.has_fixed_work

    def seconds(self, program: Program) -> float:
        """The estimate for one of the programs that can run the call."""
        return self.costs[program].seconds(self.device, program.backend)

    @property
    def reason(self) -> str:
        """Why this program."""
        if self.is_asked:
            return f"the {self.form.value} form was requested"
        others = [p for p in self.costs if p is not self.program]
        if not others:
            return "the only one that can run this call"
        if not all(self.costs[p].fits for p in others) and self.costs[self.program].fits:
            fitting = [p for p in others if self.costs[p].fits]
            if not fitting:
                return "the others would not fit in memory"
            others = fitting
        ratio = min(map(self.seconds, others)) / max(self.seconds(self.program), 1e-12)
        return "the cheapest" if ratio < 1.05 else f"the cheapest by a factor of {ratio:.2g}"

    def __str__(self) -> str:
        lines = [f"{self.spec} on {self.device}: {self.program}, {self.form.value} form ({self.reason})"]
        for program in sorted(self.costs, key=self.seconds):
            cost, mark = self.costs[program], "→" if program is self.program else " "
            lines.append(
                f" {mark} {program.name:21} ≈ {self.seconds(program) * 1e3:9.3g} ms, {cost.flops / 1e9:.3g} "
                f"GFLOP, {cost.peak_bytes / 2**20:.3g} MiB besides inputs and output"
                f"{self._packing_note(program)}"
            )
        lines += [f"   {program.name:21} no: {why}" for program, why in self.refusals.items()]
        if self.state_bytes is not None:
            lines.append(f"   state: {self.state_bytes:,} bytes, however long the text")
        if self.note:
            lines.insert(0, self.note)
        return "\n".join(lines)

    def _packing_note(self, program: Program) -> str:
        if not self.is_packed:
            return ""
        why = self.copied.get(program)
        how = "read in place" if why is None else f"copied to rows ({why})"
        return f", packed sequences {how}"


@dataclass(frozen=True)
class LayerPlan:
    """The plans of a layer whose heads differ, one for each call: a group of heads, or several together."""

    parts: tuple[tuple[tuple[HeadGroup, ...], Plan], ...]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """One plan per call."""
        return tuple(plan for _, plan in self.parts)

    @property
    def has_fixed_work(self) -> bool:
        """Whether such calls launch the same kernels each time, so that they can be recorded as a graph."""
        return all(plan.has_fixed_work for plan in self.plans)

    def __str__(self) -> str:
        texts = []
        for groups, plan in self.parts:
            heads = " and ".join(group.written_heads for group in groups)
            texts.append(f"heads {heads}{', together' if len(groups) > 1 else ''}: {plan}")
        return "\n".join(texts)


def _refusal(program: Program, call: Call) -> str | None:
    if program.name in _LEFT_OUT:
        return "MACLAURIN_WITHOUT excludes it"
    return program.refuses(call)


def find_plan(call: Call) -> Plan:
    """The cheapest program that can run the call; if none can, an error with the plain form's reason."""
    costs: dict[Program, Cost] = {}
    refusals: dict[Program, str] = {}
    copied: dict[Program, str] = {}
    rows = call.in_rows()
    for program in PROGRAMS:
        why = _refusal(program, call)
        why_not_rows = _refusal(program, rows) if call.packing is not None and why is not None else why
        if why_not_rows is not None:
            refusals[program] = why if why is not None and program.reads_packed else why_not_rows
            continue
        costs[program] = program.cost(rows)
        if why is not None:
            copied[program], costs[program] = why, _with_copies(program, costs[program], rows, call)
    program = _cheapest(costs, call.device.type)
    if program is None:
        raise InputError(f"{_why_none(call, refusals)}.")
    return Plan(
        LayerAttention(call.groups) if call.groups else call.spec,
        program,
        program.chunk(rows),
        costs,
        refusals,
        call.device.type,
        state_bytes(call),
        call.form is not None,
        call.packing is not None,
        copied,
        program.run if program in copied or call.groups else program.prepared(call),
    )


def find_together(
    calls: Sequence[Call], joint: Callable[[tuple[int, ...]], Call]
) -> dict[tuple[int, ...], Plan]:
    """The groups of heads that run together, by number, and their plan.

    `calls` are those of each group alone; `joint` makes one call of some groups.
    """
    alike: dict[tuple[Part, ...], list[int]] = {}
    for number, call in enumerate(calls):
        if call.spec.window is not None and _can_run(joint((number,))):
            alike.setdefault(_parts_but_window(call.spec), []).append(number)
    found = {}
    for numbers in map(tuple, alike.values()):
        if len(numbers) > 1 and _can_run(call := joint(numbers)):
            plan, alone = find_plan(call), [find_plan(calls[number]) for number in numbers]
            if plan.seconds(plan.program) <= sum(each.seconds(each.program) for each in alone):
                found[numbers] = plan
    return found


def _can_run(call: Call) -> bool:
    return any(_refusal(program, call) is None for program in PROGRAMS)


def _parts_but_window(spec: AttentionSpec) -> tuple[Part, ...]:
    return tuple(part for part in spec.parts if part is not spec.window)


#: sequences whose lengths round up to the same power of two are rows of one batch. On average: the
#: number of batches, and their tokens and pairs divided by those of the sequences (docs/LOG.md)
_BATCHES, _PADDED_TOKENS, _PADDED_PAIRS = 2, 1.2, 1.4
#: time to copy a batch to rows and back, in launches: the host needed 2.5 ms for two batches of exp/l2,
#: including their calls and a wait for the lengths (benchmarks/results/gpu_bench_packed.json)
_LAUNCHES_TO_COPY = 150


def _with_copies(program: Program, cost: Cost, rows: Call, call: Call) -> Cost:
    """The cost with copies to and from padded rows; `cost` is the cost on rows without padding.

    If the length of the longest sequence is known, all rows have that length and form one batch.
    """
    assert call.packing is not None
    batches, padded, pairs = _BATCHES, _PADDED_TOKENS, _PADDED_PAIRS
    if call.packing.longest is not None:
        batches = 1
        padded = pairs = max(1.0, call.packing.sequences * call.packing.longest / max(1, call.keys))
    work = pairs if program.form in (Form.PARALLEL, Form.BLOCKED) else padded
    q, k, v = rows.inputs[:3]
    tokens = sum(u.numel() for u in (q, k, v)) + q[..., 0].numel() * v.shape[3]
    copies = padded * tokens * q.element_size()
    return Cost(
        work * cost.flops,
        padded * cost.bytes + 2 * copies,
        batches * (cost.launches + _LAUNCHES_TO_COPY),
        padded * cost.peak_bytes + copies,
    )


def _cheapest(costs: dict[Program, Cost], device: str) -> Program | None:
    """The fastest program that fits in memory, or the fastest if none does."""
    # a loop: torch.compile traces it
    best: tuple[bool, float] | None = None
    chosen = None
    for program, cost in costs.items():
        rank = (not cost.fits, cost.seconds(device, program.backend))
        if best is None or rank < best:
            best, chosen = rank, program
    return chosen


def _why_none(call: Call, refusals: dict[Program, str]) -> str:
    """The reason to report if no program can run the call: that of a plain form."""
    if call.form is not None:
        return refusals[PLAIN_FORMS[call.form]]
    carries = Form.CHUNKED if call.carries_state else Form.PARALLEL
    return refusals[PLAIN_FORMS[carries]]
