"""How fast training runs on one GPU: softmax at two sizes, and converted models compared with softmax.

    python benchmarks/gpu_training.py [275M mini converted] [--seconds 150] [--tiny]

Every run is a process of its own, alone on the GPU, that trains with `maclaurin.training` on rows that are
made as they are needed, and ends after --seconds. It needs torch, triton and transformers, nothing else.

    275M, mini    softmax: model FLOPs per second over the GPU's peak (targets 0.45 and 0.25)
    converted     a model of SmolLM2-135M's shape with random weights: tokens per second relative to softmax,
                  for a window with an order-2 tail, with kept keys, and a hybrid whose first key-value head
                  of three keeps every key (target 0.6)

Results go to benchmarks/results/gpu_training_speed.json (--out) after every run. --tiny trains small models
for a few steps, on a CPU too: a check that everything runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import stamp

RESULTS = Path(__file__).parent / "results" / "gpu_training_speed.json"
#: dense bf16 operations per second of an H200 by its datasheet
PEAK_FLOPS = 989e12
#: the shape of SmolLM2-135M
SHAPE = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
TINY_SHAPE = {
    **SHAPE, "vocab_size": 512, "hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 2,
}  # fmt: skip
SOFTMAX = "softmax"
CONVERTED = {
    SOFTMAX: "exp/sum",
    "window and tail": "taylor(2,about=mean)+window(64,sinks=1)/sum",
    "window and kept keys": "poly(0)+window(64,sinks=4,kept=256)/sum",
    "hybrid with kept keys": "0: exp/sum; *: poly(0)+window(64,sinks=4,kept=256)/sum",
}
#: a log interval of some steps: reading a loss waits for the GPU
STEPS_IN_A_LAP = 5


@dataclass(frozen=True)
class Run:
    """One training run. `size` is one of the library's, or None for a converted model."""

    group: str
    name: str
    attention: str
    size: str | None
    vocabulary: int
    rows: int
    length: int
    steps: int
    least: float | None = None

    def tiny(self) -> Run:
        """The same with a small model and few steps, and no target."""
        size = None if self.size is None else "pico"
        return dataclasses.replace(self, size=size, vocabulary=512, rows=2, length=128, steps=6, least=None)


RUNS = (
    Run("275M", "softmax at 275M", "exp/sum", "small", 32000, 32, 1024, 60, 0.45),
    Run("mini", "softmax at mini", "exp/sum", "mini", 4096, 64, 1024, 200, 0.25),
    *(Run("converted", name, spec, None, SHAPE["vocab_size"], 16, 2048, 40, None if name == SOFTMAX else 0.6)
      for name, spec in CONVERTED.items()),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    known = list(dict.fromkeys(run.group for run in RUNS))
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(known)}; all by default")
    parser.add_argument("--seconds", type=float, default=150.0, help="limit of one run, compilation included")
    parser.add_argument("--no-compile", action="store_true", help="run launch by launch")
    parser.add_argument("--tiny", action="store_true", help="small models, a few steps, on any device")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", nargs=2, metavar=("RUN", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        train_one(Run(**json.loads(options.worker[0])), Path(options.worker[1]), not options.no_compile)
        return
    if unknown := set(options.groups) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    found: dict[str, Any] = {"machine": stamp(), "tiny": options.tiny, "peak_flops": PEAK_FLOPS, "runs": []}
    for run in RUNS:
        if run.group in (options.groups or known):
            chosen = run.tiny() if options.tiny else run
            record = alone(chosen, options.seconds, compiled=not options.no_compile)
            found["runs"].append(
                {**dataclasses.asdict(chosen), **record, **judged(chosen, record, found["runs"])}
            )
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(line_of(found["runs"][-1]), flush=True)
    if any("error" in run for run in found["runs"]):
        sys.exit(1)


def judged(run: Run, record: dict[str, Any], earlier: list[dict[str, Any]]) -> dict[str, Any]:
    """The value that the target is for, and whether it was reached; empty without a figure."""
    speed = record.get("tokens_per_second")
    if not speed:
        return {}
    if run.group != "converted":
        value, name = speed * record["flops_per_token"] / PEAK_FLOPS, "model_flop_utilisation"
    else:
        softmax = next((r for r in earlier if r["group"] == run.group and r["name"] == SOFTMAX), {})
        theirs = softmax.get("tokens_per_second")
        if not theirs:
            return {}
        value, name = speed / theirs, "relative_to_softmax"
    return {name: value, **({} if run.least is None else {"reached": value >= run.least})}


def line_of(run: dict[str, Any]) -> str:
    """One run for the terminal."""
    if "error" in run:
        return f"{run['name']}: {run['error'].strip().splitlines()[-1]}"
    value = run.get("model_flop_utilisation", run.get("relative_to_softmax"))
    shown = "" if value is None else f", {value:.3f}"
    target = "" if run["least"] is None else f" (target {run['least']:g})"
    how = "compiled" if run["compiled"] else "not compiled"
    speed = f"{run['tokens_per_second']:,.0f} tokens/s"
    return f"{run['name']}: {speed}{shown}{target}, {how}, {run['seconds']:.0f} s"


def alone(run: Run, seconds: float, *, compiled: bool) -> dict[str, Any]:
    """The figures of one run in a process of its own, or its error."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--worker", json.dumps(dataclasses.asdict(run)), folder]
        command += [] if compiled else ["--no-compile"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                   start_new_session=True)  # fmt: skip
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            end_with_children(process)
            return {"error": f"not finished after {seconds:g} s", "seconds": seconds}
        summary = Path(folder) / "run" / "summary.json"
        if process.returncode or not summary.exists():
            return {"error": output[-2000:] or f"exit status {process.returncode}"}
        figures = json.loads(summary.read_text(encoding="utf-8"))
    wanted = ("parameters", "tokens_per_second", "flops_per_token", "compiled", "peak_gpu_bytes")
    return {"seconds": round(time.perf_counter() - begun, 1), **{name: figures[name] for name in wanted}}


def end_with_children(process: subprocess.Popen[str]) -> None:
    """End a run and the processes that it started to compile."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def train_one(run: Run, folder: Path, compiled: bool) -> None:
    """Train in this process; the summary is written to folder/run."""
    import torch

    from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM
    from maclaurin.progress_bar import Display
    from maclaurin.training.config import config_from
    from maclaurin.training.trainer import train

    settings: dict[str, Any] = {
        "data": f"mqar:pairs=8,vocab={run.vocabulary},length={run.length}", "length": run.length,
        "batch_size": run.rows, "steps": run.steps, "log_every": min(STEPS_IN_A_LAP, run.steps // 2),
        "precision": "bf16", "eval_every": 0, "checkpoint_every": 0, "eval_rows": run.rows, "test": False,
        "compile": compiled and torch.cuda.is_available(),
    }  # fmt: skip
    if run.size is not None:
        settings |= {"attention": [run.attention], "size": run.size}
    else:
        shape = SHAPE if run.vocabulary == SHAPE["vocab_size"] else TINY_SHAPE
        config = MaclaurinConfig(attention=run.attention, max_position_embeddings=8192, **shape)
        start = folder / "start"
        MaclaurinForCausalLM(config).save_pretrained(start)
        settings["start"] = str(start)
    train(config_from(settings), folder / "run", display=Display())


if __name__ == "__main__":
    main()
