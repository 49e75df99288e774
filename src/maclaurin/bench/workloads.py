"""The cases of the benchmark, as data: every call with its shape, its work, its peers and its targets."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, final

from maclaurin.bench.bench_record import SMALL_IS_SHORTER_BY, Size
from maclaurin.bench.targets import (
    BOTH_PASSES,
    FirstCall,
    IssuedWithin,
    MemoryAgainst,
    MemoryAtMost,
    ShareOfCopy,
    Target,
    TimeAgainst,
    TimeAtMost,
)
from maclaurin.errors import InputError
from maclaurin.spec import AttentionSpec

STATE_ITEM_BYTES = 4


@final
@dataclass(frozen=True)
class Work:
    """Operations and bytes of one forward pass."""

    flops: float
    moved_bytes: float


def work_of_call(spec: AttentionSpec, form: str, size: Size, item_bytes: int) -> Work:
    """The work of a call, over all pairs or through a state, depending on the form."""
    rows = size.batch * size.heads
    is_linear = spec.has_finite_state and form in ("chunked", "recurrent")
    flops = 2.0 * rows * _pairs(spec, size.tokens, is_linear) * (size.d + size.e)
    if is_linear:
        flops += rows * size.tokens * _flops_of_state(spec, size)
    return Work(flops, float(item_bytes * rows * size.tokens * _numbers_per_token(spec, size)))


def work_of_step(spec: AttentionSpec, size: Size, item_bytes: int) -> Work:
    """One token of every sequence: the state is written and read once."""
    rows = size.batch * size.heads
    state = STATE_ITEM_BYTES * rows * spec.state_size(size.d, size.e)
    moved = 2.0 * state + item_bytes * rows * _numbers_per_token(spec, size)
    return Work(float(rows * _flops_of_state(spec, size)), moved)


def _pairs(spec: AttentionSpec, tokens: int, is_linear: bool) -> int:
    """Pairs of query and key whose score is computed."""
    alone = spec.window is not None and spec.has_finite_state and spec.features(1) == 0
    if spec.window is not None and (is_linear or alone):
        exact = min(tokens, spec.window.size)
        return exact * (exact + 1) // 2 + (tokens - exact) * exact
    return 0 if is_linear else tokens * (tokens + 1) // 2


def _flops_of_state(spec: AttentionSpec, size: Size) -> int:
    return 4 * spec.features(size.d) * (size.e + int(spec.needs_row_sum))


def _numbers_per_token(spec: AttentionSpec, size: Size) -> int:
    """q, k, v, y and the gates."""
    return 2 * size.d + 2 * size.e + len(spec.gates)


#: a call, one recurrent step, or a call on packed texts of uneven length
Kind = Literal["call", "step", "packed"]

#: the curves against T; a batch of the longest is one sequence
SWEPT_HEADS, SWEPT_LENGTHS = 8, tuple(2**n for n in range(10, 17))
SMALL_SWEPT_HEADS, SMALL_SWEPT_LENGTHS = 2, tuple(2**n for n in range(5, 12))

#: size of a window without a tail
WINDOW = 512
FIRST_CALL = FirstCall(10)
#: CPU time of a call, in microseconds, without and with a pause before it
ISSUED = (IssuedWithin(120), IssuedWithin(300, cold=True))


@final
@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `maclaurin.attention`, or one recurrent step of it, measured together with its peers."""

    group: str
    spec: str
    size: Size
    kind: Kind = "call"
    form: str = "auto"
    causal: bool = True
    peers: tuple[str, ...] = ()
    targets: tuple[Target, ...] = (FIRST_CALL,)
    #: whether it is a point of the curves against T
    in_sweep: bool = False

    @property
    def name(self) -> str:
        """The unique name of the case."""
        form = "" if self.form == "auto" else f" {self.form}"
        form += "" if self.causal else " not causal"
        return f"{self.spec}{form}{'' if self.kind == 'call' else f' {self.kind}'} {self.size}"

    def small(self) -> Case:
        """The same on small shapes."""
        return dataclasses.replace(self, size=self.size.small())


def all_cases(*, small: bool = False) -> tuple[Case, ...]:
    """Every case; last those that take long to compile or may crash a GPU process."""
    window = WINDOW // SMALL_IS_SHORTER_BY if small else WINDOW
    first = (*_exp_family(), *_quadratic(), *_linear_time())
    first += (*_order_one(), *_about_the_mean(), *_forgetting(), *_not_causal(), *_packed(), *_short_calls())
    last = (*_score_mods(window), *_steps())
    sweep = tuple(_sweep(SWEPT_HEADS, SWEPT_LENGTHS))
    if small:
        first, last = (tuple(case.small() for case in cases) for cases in (first, last))
        sweep = tuple(_sweep(SMALL_SWEPT_HEADS, SMALL_SWEPT_LENGTHS))
    swept = {case.name for case in sweep}
    first = tuple(dataclasses.replace(c, in_sweep=True) if c.name in swept else c for c in first)
    known = {case.name for case in first}
    return (*first, *(case for case in sweep if case.name not in known), *last)


def chosen_cases(cases: Iterable[Case], wanted: Iterable[str]) -> tuple[Case, ...]:
    """Cases whose name or group contains one of the words; all cases if there are none."""
    cases, wanted = tuple(cases), tuple(wanted)
    for words in wanted:
        if not any(_matches(case, words) for case in cases):
            raise InputError(
                f"no case has {words!r} in its name or group: maclaurin bench --list lists all cases."
            )
    return tuple(case for case in cases if not wanted or any(_matches(case, words) for words in wanted))


def _matches(case: Case, words: str) -> bool:
    return words.lower() in f"{case.group}: {case.name}".lower()


def _times(factor: float, peer: str) -> tuple[Target, ...]:
    """One target for each pass."""
    return tuple(TimeAgainst(factor, peer, which) for which in BOTH_PASSES)


_SHAPES = (Size.of(8, 16, 4096, 64), Size.of(8, 16, 4096, 128), Size.of(2, 16, 16384, 64))
_SHORT, _USUAL = Size.of(32, 16, 1024, 64), _SHAPES[0]
_GROUPED, _LONG_GROUPED = Size.of(4, 32, 8192, 128, key_heads=8), Size.of(1, 32, 32768, 128, key_heads=8)
_LONG, _LONGEST = Size.of(2, 16, 16384, 64), Size.of(1, 8, 65536, 64)


def _exp_family() -> Iterable[Case]:
    targets = (*_times(1.15, "sdpa"), MemoryAgainst(1.2, "sdpa"), FIRST_CALL)
    for size in _SHAPES:
        for spec in ("exp/sum", "exp/l2", "exp/rms", "exp/len", "exp/len*out", "exp/layer"):
            yield Case(group="exp family", spec=spec, size=size, peers=("sdpa",), targets=targets)
    targets = (*_times(1.15, "sdpa"), *ISSUED)
    for spec in ("exp/len", "exp/len*out", "exp/l2"):
        yield Case(group="exp family", spec=spec, size=_SHORT, peers=("sdpa",), targets=targets)


def _score_mods(window: int) -> Iterable[Case]:
    """exp with score_mods; a window alone is written with a tail of weight zero."""
    targets = (*_times(1.0, "flex"), FIRST_CALL)
    windowed = f"poly(0)+window({window})/sum"
    for size in _SHAPES:
        for spec in ("exp(clamp=5)/len", "exp*forget/sum", windowed, "sigmoid(-6.93)"):
            yield Case(group="score_mod", spec=spec, size=size, peers=("flex",), targets=targets)
    yield Case(group="score_mod", spec="exp(clamp=5)/len", size=_GROUPED, peers=("flex",), targets=targets)


def _quadratic() -> Iterable[Case]:
    for spec in ("taylor(2)/sum", "taylor(4)/sum"):
        yield Case(
            group="polynomial, quadratic time",
            spec=spec,
            form="parallel",
            size=_SHAPES[0],
            peers=("sdpa",),
            targets=(*_times(1.0, "sdpa"), FIRST_CALL),
        )


#: every feature map without and with a row sum or a norm; a sum needs weights that are not negative
_MAPPED = (
    *("linear(elu1)/sum", "linear(relu)/sum", "linear(cosine)/l2", "linear(elu1)"),
    *("linear(elu1)/l2", "linear(relu)/l2", "linear(identity)/l2", "linear(relu)", "linear(cosine)"),
)
#: how many of them run at long lengths too
_MAPPED_AT_LENGTH = 4


def _order_one() -> Iterable[Case]:
    """Feature maps and denominators, compared with fla's program, which has neither."""
    fla, group = "chunk_linear_attn", "order one"
    for size in (_USUAL, _LONG, _LONGEST):
        for spec in _MAPPED if size is _USUAL else _MAPPED[:_MAPPED_AT_LENGTH]:
            targets = (TimeAgainst(1.1, fla, "forward+backward"), FIRST_CALL)
            yield Case(group=group, spec=spec, size=size, peers=(fla,), targets=targets)
        targets = (*_times(1.0, fla), FIRST_CALL)
        yield Case(group=group, spec="linear(identity)", size=size, peers=(fla,), targets=targets)
        targets = (TimeAgainst(1.4, "ungated", "forward+backward"), FIRST_CALL)
        gated = "linear(identity)*forget"
        yield Case(group=group, spec=gated, size=size, peers=("ungated",), targets=targets)


def _about_the_mean() -> Iterable[Case]:
    """Polynomials about the mean, compared with the same polynomial about zero."""
    mean, group, peer = "taylor(2,about=mean)", "about the mean", "about_zero"
    for size in (_SHORT, _USUAL, _LONG, _LONGEST):
        issued = ISSUED if size is _SHORT else ()
        targets = (TimeAgainst(1.4, peer, "forward+backward"), *issued, FIRST_CALL)
        yield Case(group=group, spec=f"{mean}/sum", size=size, peers=(peer,), targets=targets)
    for size in (_SHORT, _USUAL, _LONG, _LONGEST, _GROUPED, _LONG_GROUPED):
        targets = (TimeAgainst(1.8, peer, "forward+backward"), FIRST_CALL)
        spec = f"{mean}+window(64,sinks=1)/sum"
        yield Case(group=group, spec=spec, size=size, peers=(peer,), targets=targets)


def _forgetting() -> Iterable[Case]:
    for size in (_SHORT, _USUAL, _LONGEST):
        targets = (TimeAgainst(1.3, "about_zero", "forward+backward"), FIRST_CALL)
        yield Case(
            group="forgetting", spec="power(2)*forget/sum", size=size, peers=("about_zero",), targets=targets
        )
    half = (TimeAgainst(0.5, "sdpa", "forward+backward"), FIRST_CALL)
    yield _chunked("taylor(2)/sum", _LONG_GROUPED, ("sdpa",), half)


def _not_causal() -> Iterable[Case]:
    targets = (TimeAgainst(1.5, "about_zero", "forward+backward"), FIRST_CALL)
    for spec, causal in (("hermite(2)/len", True), ("linear(elu1)/sum", False), ("taylor(2)/sum", False)):
        yield Case(
            group="not causal", spec=spec, size=_USUAL, causal=causal, peers=("about_zero",), targets=targets
        )


def _packed() -> Iterable[Case]:
    """As many tokens as the peer has in rows of one length."""
    targets = (TimeAgainst(1.2, "equal_rows", "forward+backward"), FIRST_CALL)
    size = Size.of(16, 16, 2048, 64)
    for spec in ("exp/l2", "taylor(2)/sum", "taylor(2,about=mean)/sum"):
        yield Case(
            group="packed", spec=spec, kind="packed", size=size, peers=("equal_rows",), targets=targets
        )


def packed_cuts(texts: int, tokens: int) -> list[int]:
    """0 = c₀ < … < c_n of texts whose lengths are between 0.25 and 1.75 of their mean, always the same."""
    draws = random.Random(0)
    ends = list(itertools.accumulate(draws.uniform(0.25, 1.75) for _ in range(texts)))
    return [0, *(round(tokens * end / ends[-1]) for end in ends)]


def _short_calls() -> Iterable[Case]:
    """Calls so short that the CPU's time to issue them counts."""
    for spec in ("taylor(2)/sum", "linear(elu1)/sum"):
        yield Case(
            group="short calls", spec=spec, size=_SHORT, peers=("sdpa",), targets=(*ISSUED, FIRST_CALL)
        )


def _linear_time() -> Iterable[Case]:
    peers = ("sdpa", "power_retention")
    yield _chunked("taylor(2)/sum", _LONGEST, peers, (TimeAtMost(4.2), MemoryAtMost(0.8)))
    yield _chunked("taylor(2)/sum", _LONG, peers, (TimeAtMost(5),))
    peer = "fused_chunk_based"
    a_quarter = TimeAgainst(0.25, peer, "forward+backward")
    yield _chunked("taylor(2)/sum", Size.of(8, 16, 4096, 16, 64), (peer,), (a_quarter,))
    yield _chunked("taylor(3)/l2", Size.of(2, 16, 16384, 16, 64), ("parallel",), _times(1.0, "parallel"))


def _chunked(spec: str, size: Size, peers: tuple[str, ...], targets: tuple[Target, ...]) -> Case:
    return Case(
        group="linear time",
        spec=spec,
        form="chunked",
        size=size,
        peers=peers,
        targets=(*targets, FIRST_CALL),
    )


def _steps() -> Iterable[Case]:
    for batch, share in ((1, 0.55), (64, 0.8)):
        yield Case(
            group="decode",
            spec="taylor(2)/sum",
            kind="step",
            size=Size.of(batch, 16, 1, 64),
            targets=(ShareOfCopy(share), *ISSUED, FIRST_CALL),
        )


def _sweep(heads: int, lengths: Sequence[int]) -> Iterable[Case]:
    """The same number of tokens at every length: constant work for methods that are linear in T."""
    for tokens in lengths:
        size = Size.of(lengths[-1] // tokens, heads, tokens, 64)
        for spec, form in (("taylor(2)/sum", "parallel"), ("taylor(2)/sum", "chunked"), ("exp/sum", "auto")):
            peers = ("sdpa",) if spec == "exp/sum" else ()
            yield Case(group="sweep", spec=spec, form=form, size=size, peers=peers, in_sweep=True)
