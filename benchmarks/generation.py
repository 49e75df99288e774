"""Is memory constant over a long text? Generate 100,000 tokens and measure every 10,000.

    python benchmarks/generation.py [--size nano] [--attention "taylor(2)/sum"] [--device cpu]

Weights are random, as neither speed nor memory depends on them. Results are added to those of other sizes
and devices in benchmarks/results/generation.json.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
from machine import stamp

from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM, size_named
from maclaurin.models.cache import key_value_bytes
from maclaurin.models.generating import Generation, Sampling

RESULTS = Path(__file__).parent / "results" / "generation.json"
VOCABULARY = 1024


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    run = _run(options)
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    known[f"{options.size}, {options.attention}, {options.device}"] = run
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Memory and speed over a long generated text.")
    parser.add_argument("--size", default="nano")
    parser.add_argument("--attention", default="taylor(2)/sum")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def _run(options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    config = MaclaurinConfig.of_size(size_named(options.size), options.attention, VOCABULARY)
    model = MaclaurinForCausalLM(config).eval().to(options.device)
    generation = Generation(model, sampling=Sampling(1.0), seed=0)
    generation.add(torch.zeros(1, 1, dtype=torch.long))
    for _ in range(100):  # tables, buffers of the libraries
        generation.step()
    samples = [_sample(generation, 0, 0.0)]
    begin = time.perf_counter()
    for done in range(options.every, options.tokens + 1, options.every):
        start = time.perf_counter()
        for _ in range(options.every):
            generation.step()
        int(generation.step()[0])  # waits for the device
        samples.append(_sample(generation, done, options.every / (time.perf_counter() - start)))
        print(samples[-1], flush=True)
    tokens = generation.cache.get_seq_length()
    return {
        "machine": stamp(),
        "tokens": options.tokens,
        "tokens_per_second": options.tokens / (time.perf_counter() - begin),
        "parameters": sum(p.numel() for p in model.parameters()),
        "key_value_bytes": key_value_bytes(config, 1, tokens, model.dtype),
        "samples": samples,
    }


def _sample(generation: Generation, done: int, speed: float) -> dict[str, Any]:
    cuda = generation.model.device.type == "cuda"
    return {
        "tokens": done,
        "state_bytes": generation.cache.nbytes,
        "resident_bytes": _resident_bytes(),
        "gpu_bytes": torch.cuda.memory_allocated() if cuda else None,
        "tokens_per_second": round(speed, 1),
    }


def _resident_bytes() -> int | None:
    """Resident memory after the allocator has returned its unused memory."""
    gc.collect()
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
