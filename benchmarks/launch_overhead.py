"""CPU time of a call around its launches, measured without a GPU.

    python benchmarks/launch_overhead.py [exp/l2 …] [--profile [--gradients]] [--rounds 60]

CPU tensors take the code path of a GPU; launches of kernels do nothing, and torch's fused attention only
allocates its outputs. What remains is the time that Python, views, allocations and autograd take. It does not
include the driver, and hosts of GPUs run such Python two to three times as slowly (docs/LOG.md).

Prints microseconds per call without gradients and with gradients (forward only): the smallest of many means,
because other work on the machine only ever adds time.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.compiler.compiler import CompiledKernel

from maclaurin import attention
from maclaurin.forms.state import State
from maclaurin.forms.stream import Inputs
from maclaurin.programs import stock_softmax
from maclaurin.programs import triton as gpu
from maclaurin.programs.dispatch import plan
from maclaurin.programs.program import RATES
from maclaurin.programs.triton import launch
from maclaurin.spec import AttentionSpec, parse

#: specs and tokens; 1 is a decoding step, 4096 is read in chunks
CASES = [
    ("taylor(2)/sum", 1024),
    ("taylor(2)/sum", 4096),
    ("exp/sum", 1024),
    ("exp/l2", 1024),
    ("exp/len", 1024),
    ("exp/len*out", 1024),
    ("taylor(2,about=mean)/sum", 1024),
    ("taylor(2,about=mean)/sum", 4096),
    ("hermite(2)/len", 1024),
    ("linear(elu1)/sum", 1024),
    ("power(2)*forget/sum", 1024),
    ("exp(clamp=5)/len", 1024),
    ("taylor(2)/sum", 1),
    ("taylor(2)*forget/sum", 1),
    ("taylor(2)+window(64)/sum", 1),
]
CALLS_PER_MEAN = 50


def _no_launch(x: int, y: int, z: int, stream: int, function: Any, packed: Any, *rest: Any) -> None:
    """Stands for triton's launcher of a compiled kernel, which calls the hooks of profilers."""
    metadata, enter, leave, *_ = rest
    if enter is not None:
        enter(metadata)
    if leave is not None:
        leave(metadata)


def _no_kernel() -> CompiledKernel:
    """A kernel as triton returns it from the first launch."""
    kernel: Any = CompiledKernel.__new__(CompiledKernel)
    kernel.src, kernel.name, kernel.packed_metadata = None, "kernel", (4, 1, 0)
    kernel.module, kernel._module_pid, kernel.function, kernel._run = 1, None, 1, _no_launch
    return kernel


def _first_launch(
    self: launch.Launched, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, tuple[Any, ...]]:
    names = [p.name for p in self.jit.params[len(arguments) :]]
    return _no_kernel(), tuple(options.get(name) for name in names)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
    """Allocates what cuDNN's forward pass returns."""
    return torch.empty_like(q), q.new_empty((*q.shape[:3], 1), dtype=torch.float32), q, q


def _torch_sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return torch.empty_like(q)


@contextmanager
def without_gpu() -> Iterator[None]:
    """Programs run on CPU tensors, and launches do nothing."""
    ops = SimpleNamespace(_scaled_dot_product_cudnn_attention=SimpleNamespace(default=_cudnn))
    with (
        patch.object(gpu, "why_not_on", lambda device: None),
        patch.dict(RATES, cpu=RATES["cuda"]),
        patch.object(launch, "current_gpu", lambda: 0),
        patch.object(launch, "_stream", lambda device: 0),
        patch.object(launch.Launched, "first_launch", _first_launch),
        patch.object(stock_softmax, "_ops", ops),
        patch.object(stock_softmax, "_recomputes_on_cpu", lambda *given: False),
        patch.object(stock_softmax, "torch_softmax", lambda *given: stock_softmax._CuDNN()),
        patch.object(stock_softmax, "scaled_dot_product_attention", _torch_sdpa),
    ):
        yield


def call_of(spec: AttentionSpec, tokens: int, *, gradients: bool) -> tuple[str, Callable[[], object]]:
    """The program that runs such a call, and the call."""
    heads, size = 2, 64
    q, k, v = (torch.zeros(1, tokens, heads, size, dtype=torch.bfloat16) for _ in range(3))
    gates = {a.name: torch.zeros(1, tokens, heads, dtype=torch.bfloat16) for a in spec.arguments}
    for u in (q, k, v, *gates.values()):
        u.requires_grad_(gradients)
    options: dict[str, Any] = {}
    if tokens == 1:
        on_meta = State.on_meta(spec, Inputs(q, k, v, gates))
        state = on_meta.map(lambda u: torch.zeros(u.shape, dtype=u.dtype))
        options = {"state": state, "return_state": True}
    if tokens == 4096:
        options["form"] = "chunked"
    chosen = plan(q, k, v, spec, gates=gates, **options)
    return chosen.program.name, lambda: attention(q, k, v, spec, gates=gates, **options)


def microseconds(call: Callable[[], object], rounds: int) -> float:
    """The smallest mean time of CALLS_PER_MEAN calls."""
    for _ in range(20):
        call()
    best = float("inf")
    gc.disable()
    for _ in range(rounds):
        begun = time.perf_counter()
        for _ in range(CALLS_PER_MEAN):
            call()
        best = min(best, (time.perf_counter() - begun) / CALLS_PER_MEAN)
    gc.enable()
    return 1e6 * best


def profiled(call: Callable[[], object]) -> None:
    """Print where the time goes."""
    for _ in range(50):
        call()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(2000):
        call()
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("specs", nargs="*", help="only these specs")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--gradients", action="store_true", help="profile with gradients")
    parser.add_argument("--rounds", type=int, default=60)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'spec':30} {'tokens':>6} {'program':22} {'µs':>7} {'with gradients':>15}")
    with without_gpu():
        for text, tokens in CASES:
            if asked.specs and text not in asked.specs:
                continue
            spec = parse(text)
            with torch.no_grad():
                name, call = call_of(spec, tokens, gradients=False)
                if asked.profile and not asked.gradients:
                    profiled(call)
                plain = microseconds(call, asked.rounds)
            graded = ""
            if tokens > 1:
                _, call = call_of(spec, tokens, gradients=True)
                if asked.profile and asked.gradients:
                    profiled(call)
                graded = f"{microseconds(call, asked.rounds):15.1f}"
            print(f"{text:30} {tokens:6} {name:22} {plain:7.1f} {graded}", flush=True)


if __name__ == "__main__":
    main()
