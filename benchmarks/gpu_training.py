"""Short training runs on one GPU through the command line: speeds, and the ordering of the variants.

    python benchmarks/python_sources.py sources.jsonl
    python benchmarks/gpu_training.py runs/gpu --data sources.jsonl [--steps 1000] [--together 3]

The first variant runs alone, for its speed; the others several at a time. Results go to
benchmarks/results/gpu_training.json; finished runs are not repeated.
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


def command(attention: str, data: str, out: Path, steps: int, seed: int) -> list[str]:
    return [
        sys.executable, "-m", "maclaurin", "train", f"--attention={attention}", "--size=mini",
        f"--data={data}", "--tokenizer=bpe:4096", "--batch-size=64", f"--steps={steps}", "--warmup=100",
        "--lr=1e-3", "--precision=bf16", "--eval-every=0", "--checkpoint-every=0",
        f"--seed={seed}", f"--out={out}",
    ]  # fmt: skip


def run(attention: str, data: str, folder: Path, steps: int, seed: int) -> dict[str, Any]:
    settings = command(attention, data, Path(), steps, seed)[2:]  # another setting is another folder
    out = folder / hashlib.sha256(" ".join(settings).encode()).hexdigest()[:16]
    begun = time.perf_counter()
    if not (out / "summary.json").exists():
        resume = ["--resume"] if (out / "config.json").exists() else []
        result = subprocess.run(
            [*command(attention, data, out, steps, seed), *resume],
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            return {"attention": attention, "seed": seed, "error": result.stderr[-2000:]}
    seconds = time.perf_counter() - begun
    summary = json.loads((out / "summary.json").read_text())
    print(f"{attention}: test loss {summary['test_loss']:.4f}, {seconds:.0f} s", flush=True)
    return {"attention": attention, "seed": seed, "seconds": seconds, **summary}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--together", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    alone, *others = VARIANTS
    found = [run(alone, options.data, options.folder, options.steps, options.seed)]
    if "tokens_per_second" in found[0]:
        found[0]["alone_on_the_gpu"] = True
        found[0]["model_flop_utilisation"] = (
            found[0]["tokens_per_second"] * found[0]["flops_per_token"] / PEAK_FLOPS
        )
    with ThreadPoolExecutor(options.together) as pool:
        found += pool.map(lambda v: run(v, options.data, options.folder, options.steps, options.seed), others)
    setting = f"mini, {Path(options.data).name}, bpe:4096, 64 rows of 512 tokens, bf16 autocast, not compiled"
    data = {"machine": stamp(), "setting": setting, "steps": options.steps, "runs": found}
    RESULTS.write_text(json.dumps(data, indent=1) + "\n")
    print(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
