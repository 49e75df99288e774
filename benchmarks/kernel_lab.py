"""Time and check fused programs under development, and their peers, on this GPU in two minutes.

    python benchmarks/kernel_lab.py [linear mean forget …] [--out results.json] [--peers FOLDER]

First all programs are compiled in parallel. Each is timed forward and forward + backward (medians over CUDA
events), then compared with the plain form in float64: outputs and every gradient, an odd length,
uninitialised memory filled with NaN. With a folder of unpacked wheels (--peers, or MACLAURIN_PEERS) fla's
chunk_linear_attn is timed in the same run; its first call takes a minute or two. Each result is written
at once; nothing is started after --seconds.

`long` times order 2 in linear time with other chunks, and without a causal mask. MACLAURIN_HALVES=1 chooses
another layout of the moments of heads of 64 for the whole process, so it takes two runs:

    python benchmarks/kernel_lab.py long --out whole.json
    MACLAURIN_HALVES=1 python benchmarks/kernel_lab.py long --out halves.json

`--steps` times only decoding steps over exact keys, within seconds, from a CUDA graph of 30 layers, and
compares them with the plain step.

    python benchmarks/kernel_lab.py --steps --out steps.json

`--reading` times a layer of exact keys that reads 8 prompts of 8,192 tokens, launch by launch, with several
tiles, beside cuDNN's attention over all keys.

    python benchmarks/kernel_lab.py --reading --out reading.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from maclaurin import parse
from maclaurin.forms.attend import Form, attend
from maclaurin.forms.exact_keys import ExactKeys
from maclaurin.forms.state import State
from maclaurin.forms.stream import Inputs
from maclaurin.models.recorded_step import cuda_graph
from maclaurin.programs import linear_time
from maclaurin.programs.about_mean import PairsAboutMean, TailInChunks
from maclaurin.programs.decode_step import TokenStep
from maclaurin.programs.kept_keys import ExactStep
from maclaurin.programs.linear_attention import LinearAttention
from maclaurin.programs.linear_time import LinearTime
from maclaurin.programs.plan import find_plan
from maclaurin.programs.program import Call, Program
from maclaurin.programs.quadratic_polynomial import QuadraticPolynomial
from maclaurin.programs.triton import about_mean, kept_keys, linear_attention, moments
from maclaurin.programs.triton.launch import forget_launches
from maclaurin.programs.triton.tiles import Tile
from maclaurin.testing import Shape, random_tensors

DEVICE = "cuda"
RESULTS = Path(__file__).parent / "results" / "kernel_lab.json"
#: batch, tokens, heads, key-value heads, d
SIZES = {
    "B32 T1024": (32, 1024, 16, 16, 64),
    "B8 T4096": (8, 4096, 16, 16, 64),
    "B2 T16384": (2, 16384, 16, 16, 64),
    "B1 T65536 H8": (1, 65536, 8, 8, 64),
    "B4 T8192 d128": (4, 8192, 32, 8, 128),
    "B1 T32768 d128": (1, 32768, 32, 8, 128),
}
SMALL = ("B32 T1024", "B8 T4096", "B2 T16384", "B1 T65536 H8")
TWO = ("B8 T4096", "B1 T65536 H8")
SHORT, LONG = SMALL[:2], SMALL[1:]
WIDE = tuple(SIZES)[4:]
#: largest allowed relative error of outputs and gradients (docs/gpu.md)
LIMITS = {torch.float32: 4e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}


@dataclass(frozen=True)
class Subject:
    """One program on one spec; `variant` changes settings while it runs."""

    name: str
    spec: str
    program: Program
    sizes: tuple[str, ...]
    variant: Callable[[], Any] | None = None
    checked: bool = True
    causal: bool = True


@contextmanager
def settings(module: Any = None, **changed: Any) -> Iterator[None]:
    """Change module constants inside the block."""
    before = {name: getattr(module, name) for name in changed}
    _set(module, changed)
    try:
        yield
    finally:
        _set(module, before)


def _set(module: Any, values: dict[str, Any]) -> None:
    """Set constants of a module; launches prepared with others are forgotten."""
    for name, value in values.items():
        setattr(module, name, value)
    forget_launches()


def warps(**changed: tuple[int, int]) -> Callable[[], Any]:
    """Warps and loads ahead of some programs of linear attention, for heads up to 64."""
    table = {**linear_attention.WARPS}
    for name, value in changed.items():
        key = name.replace("_", " ")
        table[key] = (value, table[key][1])
    return lambda: settings(linear_attention, WARPS=table)


def tiles(**changed: Tile) -> Callable[[], Any]:
    """Tiles of the program about the mean, for all head sizes."""
    table = {**about_mean.TILES}
    for name, tile in changed.items():
        table[name.replace("_", " ")] = (tile, tile)
    return lambda: settings(about_mean, TILES=table)


def elu1(name: str, variant: Callable[[], Any], *, checked: bool = False) -> Subject:
    return Subject(f"elu1/sum {name}", "linear(elu1)/sum", LINEAR, TWO, variant, checked)


LINEAR, PAIRS, CHUNKS = LinearAttention(), PairsAboutMean(), TailInChunks()
MEAN, BESIDE = "taylor(2,about=mean)/sum", "taylor(2,about=mean)+window(64,sinks=1)/sum"
EIGHT_WARPS = {n: ((8, stages), large) for n, ((_, stages), large) in linear_attention.WARPS.items()}
FEW_REGISTERS = tiles(forward=Tile(64, 64, 4, 2, 128), queries=Tile(64, 64, 4, 3), keys=Tile(64, 64, 4, 2))
OF_128_ROWS = tiles(forward=Tile(128, 64, 8, 3), queries=Tile(128, 64, 8, 3), keys=Tile(64, 128, 8, 2))
OF_64_ROWS = tiles(forward=Tile(64, 64, 4, 3), queries=Tile(64, 64, 4, 2), keys=Tile(64, 64, 4, 2))
FAR_OF_64_KEYS = tiles(
    forward_far=Tile(64, 64, 4, 3), queries_far=Tile(64, 64, 4, 3), keys_far=Tile(64, 64, 4, 3)
)
TAYLOR, LONGEST = LinearTime(), ("B1 T65536 H8", "B1 T32768 d128")


def in_chunks(tokens: int, *sizes: str) -> Subject:
    """Order 2 in linear time with other chunks of long texts."""
    chunks = lambda: settings(linear_time, CHUNK_OF_LONG=tokens)  # noqa: E731
    return Subject(f"taylor(2), chunks of {tokens}", "taylor(2)/sum", TAYLOR, sizes or LONGEST, chunks, False)


FOUR_BLOCKS = lambda: settings(moments, FEW_PROGRAMS=1)  # noqa: E731
HALF_THE_WALKERS = lambda: settings(linear_attention, WALKERS=512)  # noqa: E731
GROUPS: dict[str, list[Subject]] = {
    "base": [
        Subject("taylor(2), pairs", "taylor(2)/sum", QuadraticPolynomial(), (*SHORT, WIDE[0]), checked=False),
        Subject("taylor(2), chunks", "taylor(2)/sum", LinearTime(), (*LONG, *WIDE), checked=False),
        Subject("identity before", "linear(identity)", LinearTime(), SMALL, checked=False),
    ],
    "linear": [
        Subject("identity", "linear(identity)", LINEAR, SMALL),
        Subject("elu1/sum", "linear(elu1)/sum", LINEAR, SMALL),
        Subject("identity*forget", "linear(identity)*forget", LINEAR, SMALL),
        Subject("cosine/l2", "linear(cosine)/l2", LINEAR, TWO),
        Subject("elu1/sum not causal", "linear(elu1)/sum", LINEAR, TWO[:1], causal=False),
        elu1("gradients 8 warps", warps(gradients=(8, 1))),
        Subject("elu1/sum 512 walkers", "linear(elu1)/sum", LINEAR, SMALL, HALF_THE_WALKERS, False),
        elu1("eight warps", lambda: settings(linear_attention, WARPS=EIGHT_WARPS)),
    ],
    "mean": [
        Subject("mean, pairs", MEAN, PAIRS, SMALL[:3]),
        Subject("mean, chunks", MEAN, CHUNKS, LONG),
        Subject("beside, pairs", BESIDE, PAIRS, SHORT),
        Subject("beside, chunks", BESIDE, CHUNKS, LONG),
        Subject("beside, pairs d128", BESIDE, PAIRS, WIDE[:1]),
        Subject("beside, chunks d128", BESIDE, CHUNKS, WIDE),
        Subject("mean, pairs, 4 of 128 regs", MEAN, PAIRS, SHORT, FEW_REGISTERS, False),
        Subject("mean, pairs, of 128", MEAN, PAIRS, SHORT, OF_128_ROWS, False),
        Subject("beside, pairs d128, of 64", BESIDE, PAIRS, WIDE[:1], OF_64_ROWS, False),
        Subject("beside, chunks, of 64 keys", BESIDE, CHUNKS, LONG[1:2], FAR_OF_64_KEYS, False),
    ],
    "long": [
        Subject("taylor(2), chunks", "taylor(2)/sum", TAYLOR, (*TWO, *LONGEST[1:])),
        Subject("taylor(2), four blocks", "taylor(2)/sum", TAYLOR, LONGEST[:1], FOUR_BLOCKS),
        in_chunks(1152, *LONGEST[:1]),
        in_chunks(1024),
        in_chunks(768),
        in_chunks(512, *LONGEST[1:]),
        Subject("taylor(2), not causal", "taylor(2)/sum", TAYLOR, SMALL[1:3], causal=False),
        Subject(
            "taylor(2), not causal, pairs",
            "taylor(2)/sum",
            QuadraticPolynomial(),
            TWO[:1],
            None,
            False,
            False,
        ),
        Subject("taylor(2), causal pairs", "taylor(2)/sum", QuadraticPolynomial(), TWO[:1], None, False),
    ],
    "forget": [
        Subject("power(2)*forget, pairs", "power(2)*forget/sum", QuadraticPolynomial(), SHORT),
        Subject("power(2)*forget, chunks", "power(2)*forget/sum", LinearTime(), LONG, checked=False),
    ],
}


def run(subject: Subject, inputs: Inputs) -> Tensor:
    spec = parse(subject.spec)
    scale = spec.kernel.default_scale(inputs.q.shape[3])
    return subject.program.run(Call(spec, inputs, scale, inputs.q.device, subject.causal))[0]


def as_inputs(tensors: dict[str, Tensor]) -> Inputs:
    gates = {name: tensor for name, tensor in tensors.items() if name not in "qkv"}
    return Inputs(q=tensors["q"], k=tensors["k"], v=tensors["v"], gates=gates)


# -------------------------------------------------------------------------------------------- checking


def errors(subject: Subject, dtype: torch.dtype, shape: Shape) -> dict[str, float]:
    """Relative errors against float64; gradients relative to at least a tenth of the largest."""
    spec = parse(subject.spec)
    case = random_tensors(spec, shape, 0, dtype, device=DEVICE)
    rows = (shape.batch, shape.tokens, shape.heads, shape.e)
    direction = torch.randn(rows, dtype=torch.float64, device=DEVICE).to(dtype)
    wide = {n: u.double().requires_grad_() for n, u in case.tensors.items()}
    options = {
        "scale": spec.kernel.default_scale(shape.d),
        "causal": subject.causal,
        "chunk": 64,
        "state": None,
    }
    gold_y, _ = attend(spec, as_inputs(wide), Form.PARALLEL, **options, return_state=False)
    gold = [gold_y.detach(), *torch.autograd.grad(gold_y, list(wide.values()), direction.double())]
    leaves = {n: u.detach().requires_grad_() for n, u in case.tensors.items()}
    y = run(subject, as_inputs(leaves))
    found = [y.detach(), *torch.autograd.grad(y, list(leaves.values()), direction)]
    largest = max(float(g.norm()) for g in gold[1:]) / 10
    names = ["y", *wide]
    return {
        n: float((f.double() - g).norm()) / max(float(g.norm()), 1e-3 if n == "y" else largest)
        for n, f, g in zip(names, found, gold, strict=True)
    }


def check(subject: Subject, *, full: bool) -> dict[str, Any]:
    wide = subject.sizes[0] in WIDE
    long = subject.program is CHUNKS
    shape = Shape(
        1, 2149 if long else 1337, 8 if wide else 16, 4 if wide else 1, *(2 * [128 if wide else 64])
    )
    jobs = [(torch.bfloat16, shape)]
    if full:
        jobs += [(torch.bfloat16, Shape(2, 515, 1, 2, 40, 24)), (torch.float16, Shape(1, 300, 1, 2, 64, 64))]
        jobs += [(torch.float32, Shape(1, 300, 1, 2, 64, 32)), (torch.bfloat16, Shape(1, 65, 2, 1, 128, 128))]
    table = {}
    for dtype, shape in jobs:
        key = f"{str(dtype)[6:]} T{shape.tokens} d{shape.d}"
        found = errors(subject, dtype, shape)
        worst = max(found.values(), key=lambda x: float("inf") if x != x else x)
        table[key] = {"right": worst < LIMITS[dtype], "errors": found}
        said = (
            "right" if table[key]["right"] else "WRONG " + ", ".join(f"{n} {e:.1e}" for n, e in found.items())
        )
        print(f"{subject.name:28} {key:20} {said}", flush=True)
    return table


@contextmanager
def poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # noqa: B010
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# --------------------------------------------------------------------------------------------- timing


def tensors(spec: Any, size: str) -> dict[str, Tensor]:
    batch, tokens, heads, kv_heads, d = SIZES[size]
    made = {n: torch.randn(batch, tokens, h, d, device=DEVICE, dtype=torch.bfloat16) for n, h in
            (("q", heads), ("k", kv_heads), ("v", kv_heads))}  # fmt: skip
    for name in spec.gates:
        h = heads if name == "output_gate" else kv_heads
        gate = torch.rand(batch, tokens, h, device=DEVICE)
        made[name] = (-0.1 * gate if name == "log_forget" else gate).to(torch.bfloat16)
    return {n: u.requires_grad_() for n, u in made.items()}


def median_ms(call: Callable[[], object], budget_ms: float = 30.0) -> float:
    call()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    torch.cuda.synchronize()
    once = max(1e3 * (time.perf_counter() - begun), 1e-2)
    count = int(min(60, max(4, budget_ms / once)))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def issue_ms(call: Callable[[], object]) -> float:
    """CPU time to issue one call, in a loop of ten from an idle GPU."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(10):
        call()
    spent = time.perf_counter() - begun
    torch.cuda.synchronize()
    return 100 * spent


def kernel_ms(call: Callable[[], object]) -> dict[str, float]:
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(2):
            call()
        torch.cuda.synchronize()
    busy = {
        e.key[:48]: round(e.device_time_total / 2e3, 4) for e in found.key_averages() if e.device_time_total
    }
    return dict(sorted(busy.items(), key=lambda item: -item[1]))


def times(forward: Callable[[], Tensor], leaves: list[Tensor]) -> dict[str, Any]:
    with torch.no_grad():
        ms: dict[str, Any] = {"forward": median_ms(forward), "issue": issue_ms(forward)}
    direction = torch.randn_like(forward().detach())

    def both() -> object:
        return torch.autograd.grad(forward(), leaves, direction)

    ms |= {"both": median_ms(both), "kernels": kernel_ms(both)}
    ms["busy"] = round(sum(ms["kernels"].values()), 4)
    return ms


def time_subject(subject: Subject, size: str) -> dict[str, Any]:
    given = tensors(parse(subject.spec), size)
    with (subject.variant or settings)():
        return times(lambda: run(subject, as_inputs(given)), list(given.values()))


def time_sdpa(size: str) -> dict[str, Any]:
    given = tensors(parse("exp/sum"), size)
    q, k, v = (u.transpose(1, 2) for u in given.values())

    def forward() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )

    return times(forward, list(given.values()))


#: window, kept keys and batch of steps; heads as in SmolLM2-135M. The last lines are layers of stored plans
STEPS = (
    (64, 0, 1), (128, 0, 1), (256, 0, 1), (512, 0, 1), (2048, 0, 1), (4500, 0, 1),
    (16, 48, 1), (32, 96, 1), (64, 192, 1), (128, 384, 1), (512, 1536, 1), (1131, 3393, 1), (1131, 3393, 8),
)  # fmt: skip
LAYERS = 30


def step_call(window: int, kept: int, batch: int, kv_heads: int = 3, group: int = 3, d: int = 64) -> Call:
    """One more token after a state that is full."""
    notation = f"poly(0)+window({window},sinks=4{f',kept={kept}' if kept else ''})/sum"
    spec = parse(notation)
    options: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}

    def keys(number: int) -> Tensor:
        return torch.randn(batch, kv_heads, number, d, **options)

    def scores(number: int) -> Tensor:
        return torch.rand(batch, kv_heads, number, device=DEVICE)

    exact = ExactKeys(keys(window), keys(window), keys(4), keys(4))
    if kept:
        of_kept = {"kept_k": keys(kept), "kept_v": keys(kept), "kept_score": scores(kept)}
        exact = dataclasses.replace(exact, recent_score=scores(window), **of_kept)
    count = torch.full((batch,), 65536, device=DEVICE)
    moments = torch.zeros(batch, kv_heads, spec.features(d), d + 1, device=DEVICE)
    heads = (kv_heads * group, kv_heads, kv_heads)
    q, k, v = (torch.randn(batch, 1, h, d, **options) for h in heads)
    state = State(spec, moments, count, exact=exact, is_full=True)
    scale = spec.kernel.default_scale(d)
    return Call(spec, Inputs(q, k, v, {}), scale, q.device, state=state, return_state=True)


def graph_ms(work: Callable[[], object]) -> float:
    """Time of LAYERS calls in one graph, per call."""

    def layers() -> None:
        for _ in range(LAYERS):
            work()

    return median_ms(cuda_graph(layers)) / LAYERS


@torch.no_grad()
def time_steps() -> dict[str, Any]:
    """µs of each program in a graph, and the largest difference of outputs and states from the first one."""
    found: dict[str, Any] = {}
    for window, kept, batch in STEPS:
        call = step_call(window, kept, batch)
        name = f"batch {batch}, window {window}, kept {kept}"
        found[name] = {"chosen": find_plan(call).program.name}
        expected = None
        for program in (TokenStep(), ExactStep()):
            y, state = program.run(call)
            assert state is not None
            answer = {"y": y, **state.tensors()}
            expected = expected or answer
            apart = {
                n: float((u.double() - expected[n].double()).abs().max())
                for n, u in answer.items()
                if u.numel()
            }
            us = round(1e3 * graph_ms(lambda program=program, call=call: program.run(call)), 2)
            found[name][program.name] = {"us": us, "largest difference": max(apart.values())}
        print(f"{name:36}", json.dumps(found[name]), flush=True)
    return found


#: window, sinks and slots of the three heads of a layer
READ = {
    "window 2050": ((2050, 4, 0),) * 3,
    "window 512, kept 1538": ((512, 4, 1538),) * 3,
    "window 1131, kept 3393": ((1131, 4, 3393),) * 3,
    "window 64, kept 192": ((64, 4, 192),) * 3,
}
TILES_OF_READING = {
    "64 x 64": Tile(64, 64, 4, 3),
    "64 x 128": Tile(64, 128, 4, 2),
    "128 x 64": Tile(128, 64, 8, 3),
    "128 x 128": Tile(128, 128, 8, 2),
}


@torch.no_grad()
def time_reading(batch: int = 8, tokens: int = 8192, d: int = 64) -> dict[str, Any]:
    """ms of a layer of 9 queries and 3 key-value heads, in all and by launch."""
    q, k, v = (torch.randn(batch, tokens, h, d, device=DEVICE, dtype=torch.bfloat16) for h in (9, 3, 3))

    def full() -> Tensor:
        keys, values = k.transpose(1, 2), v.transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, is_causal=True, enable_gqa=True
        )

    found: dict[str, Any] = {"every key, torch": {"ms": round(median_ms(full), 4)}}
    for name, numbers in READ.items():
        exact = tuple(kept_keys.Exact(*each) for each in numbers)
        groups = (kept_keys.GroupOfHeads(len(exact), exact[0]),)
        for size, tile in TILES_OF_READING.items():
            with settings(kept_keys, TILES={**kept_keys.TILES, "forward": (tile, tile)}):
                call = lambda exact=exact, groups=groups: kept_keys.read(q, k, v, d**-0.5, exact, groups)  # noqa: E731
                found[f"{name}, {size}"] = {"ms": round(median_ms(call), 4), "launches": kernel_ms(call)}
    for name, ms in found.items():
        print(f"{name:36}", json.dumps(ms), flush=True)
    return found


def time_fla(size: str) -> dict[str, Any]:
    from fla.ops.linear_attn import chunk_linear_attn  # type: ignore[import-not-found]

    given = tensors(parse("linear(identity)"), size)
    return times(lambda: chunk_linear_attn(*given.values(), normalize=False)[0], list(given.values()))


def print_times(name: str, found: dict[str, Any]) -> None:
    cells = []
    for size, ms in found.items():
        said = (
            ms["problem"][:60]
            if "problem" in ms
            else f"{ms['forward']:.3f}/{ms['both']:.3f} ({ms['busy']:.3f})"
        )
        cells.append(f"{size}: {said}")
    issue = next((ms["issue"] for ms in found.values() if "issue" in ms), float("nan"))
    print(f"{name:28} {'  '.join(cells)}  issue {issue:.2f}", flush=True)


# ----------------------------------------------------------------------------------- compiling ahead


def compiled_sizes(subject: Subject) -> tuple[str, ...]:
    """Sizes with distinct programs."""
    if subject.program is LINEAR or subject.program.form is Form.PARALLEL:
        return tuple({size in WIDE: size for size in subject.sizes}.values())
    return tuple({(size in WIDE, SIZES[size][1] > 16384): size for size in subject.sizes}.values())


def compile_ahead(name: str, size: str) -> str | None:
    """Compile all programs of a subject into triton's cache, in a process that does not use the GPU."""
    from maclaurin.programs.triton.compiled_code import compiled_for

    subject = next(s for group in GROUPS.values() for s in group if s.name == name)
    spec = parse(subject.spec)
    batch, tokens, heads, kv_heads, d = SIZES[size]
    try:
        with (subject.variant or settings)(), compiled_for(90, describe=False):
            made = {n: torch.empty(batch, tokens, h, d, dtype=torch.bfloat16) for n, h in
                    (("q", heads), ("k", kv_heads), ("v", kv_heads))}  # fmt: skip
            made |= {n: torch.empty(batch, tokens, kv_heads, dtype=torch.bfloat16) for n in spec.gates}
            made = {n: u.requires_grad_() for n, u in made.items()}
            y = run(subject, as_inputs(made))
            torch.autograd.grad(y, list(made.values()), y)
    except Exception as problem:
        return f"{name}: {type(problem).__name__}: {str(problem)[:200]}"
    return None


def attempt(job: Callable[[], Any]) -> Any:
    try:
        return job()
    except Exception as problem:
        return {"problem": f"{type(problem).__name__}: {str(problem)[:300]}"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="*", default=[], help=f"of {', '.join(GROUPS)}; all by default")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--peers", default=os.environ.get("MACLAURIN_PEERS"))
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--checks", choices=("none", "quick", "full"), default="quick")
    parser.add_argument("--steps", action="store_true", help="time only decoding steps over exact keys")
    parser.add_argument("--reading", action="store_true", help="time only prompts read with exact keys")
    options = parser.parse_args()
    if options.steps or options.reading:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        report |= {"steps": time_steps()} if options.steps else {}
        report |= {"reading": time_reading()} if options.reading else {}
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        return
    begun = time.perf_counter()

    def left() -> bool:
        return time.perf_counter() - begun < options.seconds

    subjects = [s for group in options.groups or GROUPS for s in GROUPS[group]]
    ahead = [(s.name, size) for s in subjects for size in compiled_sizes(s)]
    ahead.sort(key=lambda job: "d128" not in job[1])  # those that take longest first
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        problems = [p for p in pool.map(compile_ahead, *zip(*ahead, strict=True)) if p]
    print(*problems, f"compiled after {time.perf_counter() - begun:.0f} s", sep="\n")
    print("forward/both (sum of kernels of both) in ms", flush=True)
    import triton

    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    report: dict[str, Any] = {"machine": machine, "times": {}, "checks": {}}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    jobs: list[tuple[str, tuple[str, ...], Callable[[str], Any]]] = [("cuDNN SDPA", tuple(SIZES), time_sdpa)]
    jobs += [(s.name, s.sizes, lambda size, s=s: time_subject(s, size)) for s in subjects]
    if options.peers:
        sys.path.insert(0, options.peers)
        jobs.append(("fla chunk_linear_attn", SMALL, time_fla))
    for name, sizes, job in jobs:
        for size in sizes:
            if left():
                report["times"].setdefault(name, {})[size] = attempt(lambda job=job, size=size: job(size))
                torch.cuda.empty_cache()
        if name in report["times"]:
            print_times(name, report["times"][name])
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    for subject in subjects:
        if subject.checked and options.checks != "none" and left():
            with poisoned(), (subject.variant or settings)():
                found = attempt(lambda s=subject: check(s, full=options.checks == "full"))
            report["checks"][subject.name] = found
            if "problem" in found:
                print(f"{subject.name:28} {found['problem']}", flush=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
            torch.cuda.empty_cache()
    print(f"done after {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
