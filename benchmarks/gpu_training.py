"""How fast training runs on one GPU: softmax at two sizes, and a converted model compared with the original.

    python benchmarks/gpu_training.py runs/gpu [--steps 60]

Every run goes through `maclaurin train`, alone on the GPU, on rows that are made as they are needed.

    utilisation    softmax at mini and small, compiled and not: model FLOPs per second over the GPU's peak
    converted      a model of SmolLM2-135M's shape with a window and a tail or kept keys, relative to softmax

Results go to benchmarks/results/gpu_training.json after every run; finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import stamp

RESULTS = Path(__file__).parent / "results" / "gpu_training.json"
#: dense bf16 operations per second of an H200 by its datasheet
PEAK_FLOPS = 989e12
#: size → rows of 1024 tokens per step, vocabulary of the paper, steps
SPEED = {"mini": (64, 4096, 200), "small": (32, 32000, 60)}
#: the shape of SmolLM2-135M
SHAPE = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
CONVERTED = {
    "original": "exp/sum",
    "window and tail": "taylor(2,about=mean)+window(64,sinks=1)/sum",
    "window and kept keys": "poly(0)+window(64,sinks=4,kept=256)/sum",
}
#: rows and tokens per row of a step of a converted model
CONVERTED_ROWS, CONVERTED_LENGTH = 16, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the runs")
    parser.add_argument("--steps", type=int, default=60, help="of a converted model")
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": stamp(), "speed": [], "converted": []}
    for size in SPEED:
        for compiled in (True, False):
            found["speed"].append(speed(options.folder, size, compiled))
            write(found)
    for name in CONVERTED:
        found["converted"].append(converted(options.folder, name, options.steps))
        found["relative_to_original"] = relative(found["converted"])
        write(found)


def write(found: dict[str, Any]) -> None:
    """Write and print what is known so far."""
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    last = (found["converted"] or found["speed"])[-1]
    print(json.dumps(last), flush=True)


def speed(folder: Path, size: str, compiled: bool) -> dict[str, Any]:
    """Tokens per second and utilisation of softmax."""
    rows, vocabulary, steps = SPEED[size]
    flag = "--compile" if compiled else "--no-compile"
    found = run(
        folder, steps, "--attention=exp/sum", f"--data=mqar:pairs=8,vocab={vocabulary},length=1024",
        f"--size={size}", f"--batch-size={rows}", flag,
    )  # fmt: skip
    if "error" not in found:
        found["model_flop_utilisation"] = found["tokens_per_second"] * found["flops_per_token"] / PEAK_FLOPS
    return {"size": size, "rows": rows, "asked_to_compile": compiled, **found}


def converted(folder: Path, name: str, steps: int) -> dict[str, Any]:
    """Tokens per second of a model of SmolLM2's shape with random weights and this attention."""
    from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM

    start = folder / f"smollm2-{name.replace(' ', '-')}"
    if not start.is_dir():
        config = MaclaurinConfig(attention=CONVERTED[name], max_position_embeddings=8192, **SHAPE)
        MaclaurinForCausalLM(config).save_pretrained(start)
    data = f"mqar:pairs=8,vocab={SHAPE['vocab_size']},length={CONVERTED_LENGTH}"
    found = run(
        folder, steps, f"--start={start}", f"--data={data}", f"--length={CONVERTED_LENGTH}",
        f"--batch-size={CONVERTED_ROWS}",
    )  # fmt: skip
    return {"memory": name, "attention": CONVERTED[name], **found}


def relative(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Tokens per second relative to the original in the same results."""
    speeds = {run["memory"]: run.get("tokens_per_second") for run in runs}
    return {name: its / speeds["original"] for name, its in speeds.items() if its and speeds["original"]}


def run(folder: Path, steps: int, *arguments: str) -> dict[str, Any]:
    """Train, unless a run with these settings exists; returns the run's summary, or its error."""
    command = [
        sys.executable, "-m", "maclaurin", "train", *arguments, f"--steps={steps}", "--lr=1e-3",
        "--precision=bf16", "--eval-every=0", "--checkpoint-every=0", "--eval-rows=64",
    ]  # fmt: skip
    out = folder / hashlib.sha256(" ".join(command[1:]).encode()).hexdigest()[:16]
    begun = time.perf_counter()
    if not (out / "summary.json").exists():
        resume = ["--resume"] if (out / "config.json").exists() else []
        result = subprocess.run(
            [*command, f"--out={out}", *resume], capture_output=True, text=True, check=False
        )
        if result.returncode:
            return {"error": result.stderr[-2000:]}
    summary = json.loads((out / "summary.json").read_text())
    return {"seconds": round(time.perf_counter() - begun, 1), **summary}


if __name__ == "__main__":
    main()
