"""Short training runs on one GPU through the command line: speeds, and the ordering of the variants.

    python benchmarks/python_sources.py sources.jsonl
    python benchmarks/gpu_training.py runs/gpu --data sources.jsonl [--steps 1000] [--together 3]
    python benchmarks/gpu_training.py runs/gpu --speed-only      # model-FLOP utilisation of mini and small

First softmax runs alone at two sizes, compiled and not, to measure speed; then the variants, several at once.
Results go to benchmarks/results/gpu_training.json; finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from machine import stamp

RESULTS = Path(__file__).parent / "results" / "gpu_training.json"
#: dense bf16 operations per second of an H200 by its datasheet
PEAK_FLOPS = 989e12
VARIANTS = ["exp/sum", "exp/l2", "exp/rms", "exp/len*out", "exp/len", "taylor(2)/sum"]
#: size → rows of 1024 tokens per step, vocabulary of the paper, steps
SPEED = {"mini": (64, 4096, 200), "small": (32, 32000, 60)}


def command(attention: str, data: str, steps: int, seed: int, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "maclaurin", "train", f"--attention={attention}", f"--data={data}",
        f"--steps={steps}", "--lr=1e-3", "--precision=bf16", "--eval-every=0", "--checkpoint-every=0",
        f"--seed={seed}", *more,
    ]  # fmt: skip


def run(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Train, unless a run with these settings exists; returns the run's summary."""
    out = folder / hashlib.sha256(" ".join(arguments[1:]).encode()).hexdigest()[:16]
    begun = time.perf_counter()
    if not (out / "summary.json").exists():
        resume = ["--resume"] if (out / "config.json").exists() else []
        result = subprocess.run(
            [*arguments, f"--out={out}", *resume], capture_output=True, text=True, check=False
        )
        if result.returncode:
            return {"error": result.stderr[-2000:]}
    summary = json.loads((out / "summary.json").read_text())
    return {"seconds": time.perf_counter() - begun, **summary}


def speed(folder: Path, size: str, compiled: bool) -> dict[str, Any]:
    """Tokens per second and utilisation of softmax, alone on the GPU, on rows made on the fly."""
    rows, vocabulary, steps = SPEED[size]
    flag = "--compile" if compiled else "--no-compile"
    data = f"mqar:pairs=8,vocab={vocabulary},length=1024"
    more = (f"--size={size}", f"--batch-size={rows}", "--eval-rows=64", flag)
    found = run(folder, command("exp/sum", data, steps, 0, *more))
    if "error" not in found:
        found["model_flop_utilisation"] = found["tokens_per_second"] * found["flops_per_token"] / PEAK_FLOPS
    print(size, flag, json.dumps(found), flush=True)
    return {"size": size, "rows": rows, "asked_to_compile": compiled, **found}


def variant(folder: Path, attention: str, data: str, steps: int, seed: int) -> dict[str, Any]:
    more = ("--size=mini", "--tokenizer=bpe:4096", "--batch-size=64", "--warmup=100")
    found = run(folder, command(attention, data, steps, seed, *more))
    print(f"{attention}: {found.get('test_loss', found.get('error'))}", flush=True)
    return {"attention": attention, "seed": seed, **found}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--together", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speed-only", action="store_true")
    options = parser.parse_args()
    data = {
        "machine": stamp(),
        "speed": [speed(options.folder, size, compiled) for size in SPEED for compiled in (False, True)],
    }
    if not options.speed_only:
        with ThreadPoolExecutor(options.together) as pool:
            runs = pool.map(
                lambda a: variant(options.folder, a, options.data, options.steps, options.seed), VARIANTS
            )
            data["runs"] = list(runs)
        name = Path(options.data).name
        data["setting"] = f"mini, {name}, bpe:4096, 64 rows of 512 tokens, bf16 autocast, compiled"
        data["steps"] = options.steps
    RESULTS.write_text(json.dumps(data, indent=1) + "\n")
    print(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
